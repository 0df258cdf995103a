//! A backup of the outbox side of a database, restored in place. The inbox side is left out: it must not go back.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use postroom_testkit::surroundings;

use crate::writers;

const TABLES: &[&str] = &[
    "outbox",
    "outbox_json",
    "lanes",
    "settings",
    "routes",
    "route_revisions",
    "relays",
    "parked",
    "dead_letters",
    "blocked_keys",
    "suspects",
    "migrations",
];
/// A server that is restarted or fails over is back before that.
const PATIENCE: Duration = Duration::from_secs(60);

pub struct OutboxDump(PathBuf);

impl OutboxDump {
    /// None: the database was away for too long.
    pub fn take(url: &str, dir: &Path) -> Option<Self> {
        let file = dir.join(format!("{}.dump", surroundings::unique()));
        let began = Instant::now();
        while began.elapsed() < PATIENCE {
            let mut dump = limited("pg_dump");
            dump.arg("-Fc").arg("-f").arg(&file);
            TABLES.iter().for_each(|table| {
                dump.arg("-t").arg(format!("postroom.{table}"));
            });
            if run(dump.arg(url)).is_ok() {
                return Some(Self(file));
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        None
    }

    /// An error leaves the tables half-restored, unless it was to be done at once or not at all.
    pub fn restore(&self, url: &str, at_once: bool) -> Result<(), String> {
        let mut restore = limited("pg_restore");
        restore.args(["--clean", "--if-exists"]);
        if at_once {
            restore.arg("--single-transaction");
        }
        run(restore.arg("-d").arg(url).arg(&self.0))
    }
}

/// A program that is ended when it does not end.
fn limited(program: &str) -> Command {
    let mut command = Command::new("timeout");
    command.args(["60", program]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

fn run(command: &mut Command) -> Result<(), String> {
    let output = command.output().unwrap();
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim()))
}

/// Everything as SQL, for whoever looks into a violation: the server is gone by then.
pub fn keep_a_copy(url: &str, dir: &Path) {
    if let Err(why) = run(limited("pg_dump").arg("-f").arg(dir.join("database.sql")).arg(url)) {
        println!("the database could not be dumped: {why}");
    }
}

/// Waits until no writer's transaction is open, not even one whose writer lost its connection; false: it took too long.
pub async fn at_rest(url: &str) -> bool {
    let began = Instant::now();
    while began.elapsed() < PATIENCE {
        if no_transaction_is_open(url).await.unwrap_or(false) {
            return true;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    false
}

async fn no_transaction_is_open(url: &str) -> Result<bool, tokio_postgres::Error> {
    let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await?;
    tokio::spawn(connection);
    let sql = "select not pg_is_in_recovery()
                  and not exists (select from pg_stat_activity
                                   where datname = current_database() and application_name = $1 and state <> 'idle')
                  and not exists (select from pg_prepared_xacts where database = current_database())";
    Ok(client.query_one(sql, &[&writers::APPLICATION]).await?.get(0))
}
