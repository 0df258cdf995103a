//! What a SQL Server has that can lose messages, hold them up, or refuse them.

use std::time::{Duration, SystemTime};

use postroom::{Diagnosis, Severity, lasting};
use tiberius::error::Error;

use crate::conn::Conn;
use crate::desk::Failed;
use crate::migrate::{schema_version, version};
use crate::sql::{NOW, get, named, since_1970};

/// A transaction that is open for longer, in seconds, keeps old versions of rows.
const LONG_TRANSACTION: i64 = 600;
/// Ages would be wrong by this much, in seconds.
const CLOCKS_APART: f64 = 2.0;
/// No right to look at the server's state: 297 and 300.
const NO_RIGHT: [u32; 2] = [297, 300];

/// Looks at settings, transactions and the clock; changes nothing.
pub(crate) async fn diagnose(conn: &mut Conn) -> Result<Vec<Diagnosis>, Failed> {
    let sql = "select convert(nvarchar(128), serverproperty(N'ProductVersion'))";
    let server: Option<Option<String>> = conn.first(sql, named! {}).await?;
    let mut found =
        vec![Diagnosis::fine("server-version", format!("SQL Server {}", server.flatten().unwrap_or_default()))];
    let (present, known) = (version(conn).await?, schema_version());
    found.push(if present < known {
        let told = format!("the schema is at version {present}, and this program knows {known}");
        Diagnosis::of("schema-version", Severity::Warning, told, "postroom migrate")
    } else {
        Diagnosis::fine("schema-version", format!("the schema is at version {present}"))
    });
    found.extend(of_settings(conn).await?);
    found.push(long_transactions(conn).await?);
    let before = SystemTime::now();
    let theirs: Option<i64> = conn.first(&format!("select {}", since_1970(NOW)), named! {}).await?;
    found.push(clocks(theirs.unwrap_or_default(), before));
    Ok(found)
}

async fn of_settings(conn: &mut Conn) -> Result<Vec<Diagnosis>, Error> {
    let sql = "select is_read_committed_snapshot_on, convert(int, compatibility_level) as compatibility_level,
                      convert(int, delayed_durability) as delayed_durability, convert(int, page_verify_option) as page_verify_option, is_read_only
                 from sys.databases where database_id = db_id()";
    let rows = conn.rows(sql, named! {}).await?;
    let row = rows.first().ok_or_else(|| Error::Conversion("sys.databases does not show this database".into()))?;
    let versions: bool = get(row, "is_read_committed_snapshot_on")?;
    let level: i64 = get(row, "compatibility_level")?;
    let delayed: i64 = get(row, "delayed_durability")?;
    let verified: i64 = get(row, "page_verify_option")?;
    let read_only: bool = get(row, "is_read_only")?;
    Ok(vec![
        Diagnosis::unless(
            !versions,
            ("row-versions", "whoever reads does not wait for whoever writes"),
            Severity::Danger,
            "read_committed_snapshot is off: relays wait for writers, and messages of one key can get places in the wrong order",
            "alter database current set read_committed_snapshot on with rollback immediate",
        ),
        Diagnosis::unless(
            level < 150,
            ("compatibility-level", "the database speaks the language that postroom uses"),
            Severity::Danger,
            "the compatibility level is lower than 150 (SQL Server 2019)",
            "alter database current set compatibility_level = 150",
        ),
        Diagnosis::unless(
            delayed != 0,
            ("delayed-durability", "commits wait for the disk"),
            Severity::Danger,
            "delayed_durability is allowed or forced: a crash can undo commits, also of messages that were sent already",
            "alter database current set delayed_durability = disabled",
        ),
        Diagnosis::unless(
            verified != 2,
            ("page-verify", "pages have checksums"),
            Severity::Warning,
            "page_verify is not checksum: damage to the disk is found late, or not at all",
            "alter database current set page_verify checksum",
        ),
        Diagnosis::unless(
            read_only,
            ("standby", "the server accepts writes"),
            Severity::Danger,
            "the database is read-only: nothing can be written, and no relay can work on it",
            "name the primary in the URL",
        ),
    ])
}

async fn long_transactions(conn: &mut Conn) -> Result<Diagnosis, Error> {
    let sql = format!(
        "select count_big(*), coalesce(max(datediff_big(second, t.transaction_begin_time, getdate())), 0)
           from sys.dm_tran_active_transactions t
           join sys.dm_tran_session_transactions s on s.transaction_id = t.transaction_id and s.is_user_transaction = 1
          where t.transaction_begin_time < dateadd(second, -{LONG_TRANSACTION}, getdate())"
    );
    let open: Result<Option<(i64, i64)>, Error> = conn.first(&sql, named! {}).await;
    Ok(match open {
        Ok(Some((count, oldest))) if count > 0 => {
            let lasting = lasting(oldest.max(0) as f64);
            let told = format!(
                "{count} transactions are open for long, one for {lasting}: old rows stay, and what they wrote is not sent"
            );
            let advice = "find them in sys.dm_tran_session_transactions and end them";
            Diagnosis::of("long-transactions", Severity::Warning, told, advice)
        }
        Ok(_) => Diagnosis::fine("long-transactions", "no transaction is open for long"),
        Err(Error::Server(error)) if NO_RIGHT.contains(&error.code()) => Diagnosis::unknown(
            "long-transactions",
            "transactions of others cannot be seen",
            "grant view server state to this login, or look at sys.dm_tran_active_transactions yourself",
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
