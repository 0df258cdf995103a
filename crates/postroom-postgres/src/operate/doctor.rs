//! What a PostgreSQL server has that can lose messages, hold them up, or let the tables grow.

use std::time::SystemTime;

use postroom::{Diagnosis, Severity, StoreError, lasting};
use tokio_postgres::Row;

use crate::connect::Connector;
use crate::link::store_error;
use crate::migrate::schema_version;
use crate::operate::session::OperatorSession;
use crate::text::shown_opt;

/// A transaction that is open for longer, in seconds, keeps rows from being cleaned up.
const LONG_TRANSACTION: f64 = 600.0;
/// PostgreSQL stops writing at 2^31; autovacuum should have frozen long before this.
const OLD_XIDS: i64 = 1_500_000_000;
/// WAL that an unused slot keeps, in bytes.
const SLOT_BYTES: i64 = 1 << 30;
/// Ages would be wrong by this much, in seconds.
const CLOCKS_APART: f64 = 2.0;

/// Looks at settings, transactions, slots and tables; changes nothing.
pub(crate) async fn diagnose(connector: &Connector) -> Result<Vec<Diagnosis>, StoreError> {
    let failed = |error| store_error("examine the store", error);
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.look().await?;
    let before = SystemTime::now();
    let row = tx.query_one(include_str!("sql/doctor.sql"), &[]).await.map_err(failed)?;
    judged(&row, before).map_err(failed)
}

fn judged(row: &Row, before: SystemTime) -> Result<Vec<Diagnosis>, tokio_postgres::Error> {
    use Severity::{Danger, Note, Warning};
    let text = |column: usize| shown_opt(row, column).map(Option::unwrap_or_default);
    let mut found = vec![Diagnosis::fine("server-version", format!("PostgreSQL {}", text(0)?))];
    found.push(Diagnosis::unless(
        text(1)? == "off",
        ("fsync", "fsync is on"),
        Danger,
        "fsync is off: a crash of the machine can lose or damage committed messages",
        "alter system set fsync = on; then restart the server",
    ));
    found.push(Diagnosis::unless(
        text(2)? == "off",
        ("full-page-writes", "full_page_writes is on"),
        Danger,
        "full_page_writes is off: a crash of the machine can damage tables",
        "alter system set full_page_writes = on; select pg_reload_conf();",
    ));
    found.push(Diagnosis::unless(
        text(3)? == "off",
        ("synchronous-commit", "commits wait for the disk"),
        Warning,
        "synchronous_commit is off by default: a crash can undo commits of the last moments, also of messages that were sent already",
        "alter system set synchronous_commit = on; select pg_reload_conf();",
    ));
    let tables = text(16)?;
    found.push(match (text(4)?.as_str(), tables.as_str()) {
        ("off", _) => Diagnosis::of(
            "autovacuum",
            Warning,
            "autovacuum is off: deleted rows keep their space, and reads become slow",
            "alter system set autovacuum = on; select pg_reload_conf();",
        ),
        (_, "") => Diagnosis::fine("autovacuum", "autovacuum is on"),
        (_, tables) => Diagnosis::of(
            "autovacuum",
            Warning,
            format!("autovacuum is off for {tables}"),
            "alter table postroom.NAME reset (autovacuum_enabled);",
        ),
    });
    found.push(Diagnosis::unless(
        text(5)? != "UTF8",
        ("encoding", "the database is in UTF8"),
        Note,
        "the database is not in UTF8: text that it cannot represent is rejected when it is written",
        "a new database with encoding UTF8",
    ));
    let age: i64 = row.try_get::<_, Option<i64>>(6)?.unwrap_or_default();
    found.push(Diagnosis::unless(
        age > OLD_XIDS,
        ("transaction-ids", "transaction ids are far from their limit"),
        Danger,
        &format!("the oldest transaction id is {age} old; at about 2 billion the server stops accepting writes"),
        "vacuum (freeze); find what holds it back: long transactions, prepared transactions, replication slots",
    ));
    let cache: Option<i64> = row.try_get(7)?;
    found.push(Diagnosis::unless(
        cache.is_some_and(|cache| cache != 1),
        ("sequence-cache", "the sequence of the outbox caches nothing"),
        Danger,
        "the sequence of the outbox caches values per session, which would lose messages; relays refuse to run",
        "alter sequence postroom.outbox_seq_seq cache 1; then reconnect the writers",
    ));
    let version: i64 = row.try_get::<_, Option<i64>>(8)?.unwrap_or_default();
    let known = i64::from(schema_version());
    found.push(if version < known {
        let told = format!("the schema is at version {version}, and this program knows {known}");
        Diagnosis::of("schema-version", Warning, told, "postroom migrate")
    } else {
        Diagnosis::fine("schema-version", format!("the schema is at version {version}"))
    });
    found.push(Diagnosis::unless(
        row.try_get::<_, Option<bool>>(9)?.unwrap_or_default(),
        ("public-may-create", "only its owner may create objects in the schema postroom"),
        Warning,
        "every role may create objects in the schema postroom",
        "revoke create on schema postroom from public;",
    ));
    let sees_others = row.try_get::<_, Option<bool>>(10)?.unwrap_or_default()
        || row.try_get::<_, Option<bool>>(11)?.unwrap_or_default();
    let longest: Option<f64> = row.try_get(12)?;
    found.push(match longest.filter(|age| *age > LONG_TRANSACTION) {
        Some(age) => Diagnosis::of(
            "long-transactions",
            Warning,
            format!("a transaction is open for {}: what it wrote is not sent, and deleted rows keep their space", lasting(age)),
            "select pid, usename, state, xact_start, query from pg_stat_activity order by xact_start; then pg_terminate_backend(pid)",
        ),
        None if sees_others => Diagnosis::fine("long-transactions", "no transaction is open for longer than 10 minutes"),
        None => Diagnosis::unknown(
            "long-transactions",
            "this role does not see the transactions of others",
            "grant pg_read_all_stats to this role, or run it as another one",
        ),
    });
    let prepared: i64 = row.try_get(13)?;
    found.push(Diagnosis::unless(
        prepared > 0,
        ("prepared-transactions", "no prepared transaction is old"),
        Warning,
        &format!("{prepared} prepared transactions are older than 10 minutes: what they wrote is not sent, and they survive restarts"),
        "select gid, prepared, owner from pg_prepared_xacts; then commit prepared 'GID' or rollback prepared 'GID'",
    ));
    let (slots, kept) = (text(14)?, row.try_get::<_, Option<i64>>(15)?.unwrap_or_default());
    found.push(match slots.as_str() {
        "" => Diagnosis::fine("replication-slots", "no replication slot is unused"),
        slots => Diagnosis::of(
            "replication-slots",
            if kept > SLOT_BYTES { Warning } else { Note },
            format!("nobody reads from {slots}; they keep {} MiB of WAL on the disk", kept >> 20),
            "select pg_drop_replication_slot('NAME'); if nobody needs it any more",
        ),
    });
    let bloated = text(17)?;
    found.push(Diagnosis::unless(
        !bloated.is_empty(),
        ("dead-rows", "deleted rows are cleaned up"),
        Warning,
        &format!("most rows of {bloated} are deleted ones whose space is not free"),
        "vacuum (verbose) postroom.NAME; its output says what holds them back",
    ));
    let theirs: SystemTime = row.try_get(18)?;
    let apart = theirs.duration_since(before).unwrap_or_else(|behind| behind.duration()).as_secs_f64();
    found.push(Diagnosis::unless(
        apart > CLOCKS_APART,
        ("clock", "the clocks of the database and of this machine agree"),
        Note,
        &format!(
            "the clocks of the database and of this machine are {} apart; nothing is lost, but ages in logs differ",
            lasting(apart)
        ),
        "synchronise both clocks, for example with chrony",
    ));
    found.push(Diagnosis::unless(
        row.try_get(19)?,
        ("standby", "the server accepts writes"),
        Danger,
        "this server is a standby: nothing can be written, and no relay can work on it",
        "name the primary in the URL; with several hosts, add target_session_attrs=read-write",
    ));
    Ok(found)
}
