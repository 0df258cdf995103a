//! MariaDB and MySQL store of postroom: the writer's end, the relay's end, the receiving end and the operator's end, with the same contracts as
//! on PostgreSQL.

mod connect;
mod database;
mod desk;
mod inbox;
mod intake;
mod link;
mod log;
mod migrate;
mod operate;
mod outbox;
mod routes;

pub use connect::options_of;
pub use database::Database;
pub use inbox::MysqlSession;
pub use log::MysqlSource;
pub use migrate::{migrate, print_sql};

/// The outbox in MariaDB or MySQL. It has no connection of its own: it works in the caller's transaction.
#[derive(Debug, Clone, Copy, Default)]
pub struct Mysql;
