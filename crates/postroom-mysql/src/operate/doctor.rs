//! What a MariaDB or MySQL server has that can lose messages, hold them up, or refuse them.

use std::collections::HashMap;
use std::time::{Duration, SystemTime};

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Error};
use postroom::{Diagnosis, PAYLOAD_BYTES_MAX, Severity, lasting};

use crate::desk::Failed;
use crate::migrate::{schema_version, version};

/// A transaction that is open for longer, in seconds, keeps old versions of rows.
const LONG_TRANSACTION: i64 = 600;
/// Ages would be wrong by this much, in seconds.
const CLOCKS_APART: f64 = 2.0;
const NO_PRIVILEGE: u16 = 1227;
/// What a message takes beside its payload.
const PACKET_SPARE: usize = 256 << 10;

/// Looks at settings, transactions and the clock; changes nothing.
pub(crate) async fn diagnose(conn: &mut Conn) -> Result<Vec<Diagnosis>, Failed> {
    let server: String = conn.query_first("select version()").await?.unwrap_or_default();
    let mut found = vec![Diagnosis::fine("server-version", family(&server))];
    let (present, known) = (version(conn).await?, schema_version());
    found.push(if present < known {
        let told = format!("the schema is at version {present}, and this program knows {known}");
        Diagnosis::of("schema-version", Severity::Warning, told, "postroom migrate")
    } else {
        Diagnosis::fine("schema-version", format!("the schema is at version {present}"))
    });
    let settings: Vec<(String, String)> = conn
        .query(
            "show global variables where variable_name in ('innodb_flush_log_at_trx_commit', 'innodb_doublewrite', 'log_bin', 'sync_binlog',
                                                           'binlog_format', 'max_allowed_packet', 'read_only')",
        )
        .await?;
    let settings: HashMap<String, String> =
        settings.into_iter().map(|(name, value)| (name.to_lowercase(), value.to_lowercase())).collect();
    found.extend(of_settings(&settings));
    found.push(triggers(conn).await?);
    found.push(long_transactions(conn).await?);
    let clock = "select timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))";
    let before = SystemTime::now();
    let theirs: i64 = conn.query_first(clock).await?.unwrap_or_default();
    found.push(clocks(theirs, before));
    Ok(found)
}

fn family(version: &str) -> String {
    if version.contains("MariaDB") { format!("MariaDB {version}") } else { format!("MySQL {version}") }
}

fn of_settings(settings: &HashMap<String, String>) -> Vec<Diagnosis> {
    use Severity::{Danger, Warning};
    let value = |name: &str| settings.get(name).map(String::as_str).unwrap_or_default();
    let is_off = |name: &str| matches!(value(name), "off" | "0");
    let logs = matches!(value("log_bin"), "on" | "1");
    let packet: usize = value("max_allowed_packet").parse().unwrap_or(usize::MAX);
    vec![
        Diagnosis::unless(
            value("innodb_flush_log_at_trx_commit") != "1",
            ("flush-log", "commits wait for the disk"),
            Severity::Danger,
            "innodb_flush_log_at_trx_commit is not 1: a crash can undo commits of the last second, also of messages that were sent already",
            "set global innodb_flush_log_at_trx_commit = 1, and in the server's configuration",
        ),
        Diagnosis::unless(
            is_off("innodb_doublewrite"),
            ("doublewrite", "pages are written so that a crash cannot tear them"),
            Danger,
            "innodb_doublewrite is off: a crash of the machine can damage tables",
            "innodb_doublewrite = 1 in the server's configuration, then restart it",
        ),
        Diagnosis::unless(
            logs && value("sync_binlog") != "1",
            ("sync-binlog", "the binary log is not behind commits"),
            Warning,
            "sync_binlog is not 1: after a crash replicas may lack messages that were sent already",
            "set global sync_binlog = 1, and in the server's configuration",
        ),
        Diagnosis::unless(
            logs && value("binlog_format") == "statement",
            ("binlog-format", "the binary log has rows where it must"),
            Danger,
            "binlog_format is STATEMENT: the server refuses what relays write, since they work at READ COMMITTED",
            "set global binlog_format = ROW (or MIXED), and in the server's configuration",
        ),
        Diagnosis::unless(
            packet < PAYLOAD_BYTES_MAX + PACKET_SPARE,
            ("packet-size", "the largest message fits into a packet"),
            Warning,
            "max_allowed_packet is smaller than the largest message: it cannot be written, or not be read",
            "set global max_allowed_packet = 16777216, and in the server's configuration",
        ),
        Diagnosis::unless(
            value("read_only").starts_with("on") || value("read_only") == "1",
            ("standby", "the server accepts writes"),
            Danger,
            "the server is read-only: nothing can be written, and no relay can work on it",
            "name the primary in the URL",
        ),
    ]
}

/// Who may not see triggers sees none.
async fn triggers(conn: &mut Conn) -> Result<Diagnosis, Error> {
    let sql = "select count(*) from information_schema.triggers where trigger_schema = database()
                  and trigger_name in ('postroom_outbox_written', 'postroom_note_death', 'postroom_note_death_in')";
    let seen: i64 = conn.query_first(sql).await?.unwrap_or_default();
    Ok(if seen == 3 {
        Diagnosis::fine("triggers", "the triggers of the tables are there")
    } else {
        let found = format!("{seen} of the 3 triggers of the tables can be seen");
        Diagnosis::unknown(
            "triggers",
            found,
            "look as the owner of the tables; if they are gone, restore them before anybody writes",
        )
    })
}

async fn long_transactions(conn: &mut Conn) -> Result<Diagnosis, Error> {
    let sql = "select count(*), cast(coalesce(max(timestampdiff(second, t.trx_started, s.now)), 0) as signed)
                 from (select convert_tz(utc_timestamp(), '+00:00', 'SYSTEM') as now) s
                 join information_schema.innodb_trx t on t.trx_started < s.now - interval ? second";
    let open: Result<Option<(i64, i64)>, Error> = conn.exec_first(sql, (LONG_TRANSACTION,)).await;
    Ok(match open {
        Ok(Some((count, oldest))) if count > 0 => {
            let lasting = lasting(oldest.max(0) as f64);
            let told = format!(
                "{count} transactions are open for long, one for {lasting}: old rows stay, and what they wrote is not sent"
            );
            let advice = "find them in information_schema.innodb_trx and end them";
            Diagnosis::of("long-transactions", Severity::Warning, told, advice)
        }
        Ok(_) => Diagnosis::fine("long-transactions", "no transaction is open for long"),
        Err(Error::Server(error)) if error.code == NO_PRIVILEGE => Diagnosis::unknown(
            "long-transactions",
            "transactions of others cannot be seen",
            "grant process on *.* to this user, or look at information_schema.innodb_trx yourself",
        ),
        Err(error) => return Err(error),
    })
}

fn clocks(theirs_us: i64, before: SystemTime) -> Diagnosis {
    let theirs = SystemTime::UNIX_EPOCH + Duration::from_micros(theirs_us.max(0).unsigned_abs());
    let apart = theirs.duration_since(before).unwrap_or_else(|behind| behind.duration()).as_secs_f64();
    Diagnosis::unless(
        apart > CLOCKS_APART,
        ("clock", "the clocks of the database and of this machine agree"),
        Severity::Note,
        &format!(
            "the clocks of the database and of this machine are {} apart; nothing is lost, but ages in logs differ",
            lasting(apart)
        ),
        "synchronise both clocks, for example with chrony",
    )
}
