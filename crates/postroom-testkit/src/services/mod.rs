//! Real servers that belong to one test run.
//!
//! [`PostgresServer`], [`PgBouncer`], [`MysqlServer`], [`RabbitServer`], [`RedisServer`], [`MosquittoServer`] and [`SmtpServer`] are started from the Debian packages, [`NatsServer`] from a Python package, [`KafkaServer`] from Java archives, each on a free loopback
//! port, with a data folder of its own. A server that already runs on the machine is neither used nor touched.
//!
//! Promise: a server that was started here ends when its value is dropped, and a little later when the whole process
//! dies, even by `SIGKILL`: a watchdog shell notices that its pipe closed. Its folder goes with it.
//!
//! Edge: Linux only (`/proc` tells which processes belong to a server), and `sh` must be on the `PATH`.

mod account;
mod folder;
mod kafka;
mod mosquitto;
mod mysql;
mod nats;
mod pgbouncer;
pub mod ports;
mod postgres;
mod process;
mod prometheus;
mod rabbitmq;
mod redis;
mod restart;
mod seaweedfs;
mod smtp;
mod tmpfs;
mod wait;

pub use kafka::{KAFKA_JARS, KafkaSecurity, KafkaServer};
pub use mosquitto::MosquittoServer;
pub use mysql::{MYSQL_ROOT, MysqlServer};
pub use nats::{NATS_PROGRAM, NatsServer};
pub use pgbouncer::PgBouncer;
pub use postgres::{POSTGRES_PROGRAMS, PostgresOptions, PostgresServer};
pub use prometheus::{Prometheus, promtool};
pub use rabbitmq::{RABBITMQ_ROOT, RabbitServer, RabbitTls};
pub use redis::{REDIS_PROGRAM, RedisServer};
pub use seaweedfs::{SEAWEEDFS_PROGRAM, SeaweedFs};
pub use smtp::SmtpServer;
pub use tmpfs::Tmpfs;

/// Names of the Debian packages that the servers here need and that are not installed.
///
/// Empty means that all of them can be started. It looks for the programs, not into the package database.
#[must_use]
pub fn missing() -> Vec<&'static str> {
    let mut packages = Vec::new();
    if postgres::programs().is_none() {
        packages.push("postgresql");
    }
    if !rabbitmq::is_installed() {
        packages.push("rabbitmq-server");
    }
    if pgbouncer::program().is_none() {
        packages.push("pgbouncer");
    }
    if postgres::clock_library().is_none() {
        packages.push("libfaketime");
    }
    if prometheus::program("prometheus").is_none() || prometheus::program("promtool").is_none() {
        packages.push("prometheus");
    }
    if mysql::mariadb_programs().is_none() {
        // Without the package that starts a server of its own.
        packages.extend(["mariadb-server-core", "mariadb-client-core"]);
    }
    if mosquitto::program().is_none() {
        packages.push("mosquitto");
    }
    if !smtp::is_installed() {
        packages.push("python3-aiosmtpd");
    }
    if redis::program().is_none() {
        packages.push("redis-server");
    }
    if prometheus::program("java").is_none() {
        packages.push("openjdk-17-jre-headless");
    }
    if prometheus::program("mvn").is_none() {
        packages.push("maven");
    }
    packages
}

/// Whether [`POSTGRES_PROGRAMS`] says which PostgreSQL is used.
#[must_use]
pub fn postgres_is_chosen() -> bool {
    std::env::var_os(POSTGRES_PROGRAMS).is_some()
}

/// Whether [`MYSQL_ROOT`] says where a MySQL is, which is used in place of MariaDB.
#[must_use]
pub fn mysql_is_chosen() -> bool {
    std::env::var_os(MYSQL_ROOT).is_some()
}

/// Whether the account that PostgreSQL runs under gets to a folder of ours.
///
/// # Errors
/// When that cannot be found out.
pub fn postgres_can_run_in(folder: &std::path::Path) -> std::io::Result<bool> {
    account::Account::for_postgres()?.enters(folder)
}
