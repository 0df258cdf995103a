//! Numbered migrations, each in its own transaction, safe to repeat and to run from several processes at once.

use postroom::{MigrateError, Migrated};
use sha2::{Digest, Sha256};
use tokio_postgres::Transaction;

use crate::connect::Connector;
use crate::link::store_error;

/// Any number; all that matters is that every postroom takes the same one.
const ADVISORY_LOCK: i64 = 0x706f_7374_726f_6f6d;

struct Migration {
    number: i32,
    name: &'static str,
    /// ASCII, so that a database of any encoding can run it.
    sql: &'static str,
    /// Checksum of a former text that does the same, if there was one.
    formerly: Option<&'static str>,
}

const MIGRATIONS: &[Migration] = &[
    Migration { number: 1, name: "foundation", sql: include_str!("../migrations/0001_foundation.sql"), formerly: None },
    Migration { number: 2, name: "relays", sql: include_str!("../migrations/0002_relays.sql"), formerly: None },
    Migration { number: 3, name: "audit", sql: include_str!("../migrations/0003_audit.sql"), formerly: None },
    Migration {
        number: 4,
        name: "trouble",
        sql: include_str!("../migrations/0004_trouble.sql"),
        formerly: Some("1588bd1e3f8107cd688b4badb2b762354a40fe95ad35328d7bdc6f794e52d877"),
    },
    Migration { number: 5, name: "receiving", sql: include_str!("../migrations/0005_receiving.sql"), formerly: None },
    Migration { number: 6, name: "watch", sql: include_str!("../migrations/0006_watch.sql"), formerly: None },
    Migration { number: 7, name: "fillers", sql: include_str!("../migrations/0007_fillers.sql"), formerly: None },
    Migration { number: 8, name: "doubts", sql: include_str!("../migrations/0008_doubts.sql"), formerly: None },
    Migration { number: 9, name: "clocks", sql: include_str!("../migrations/0009_clocks.sql"), formerly: None },
    Migration { number: 10, name: "locks", sql: include_str!("../migrations/0010_locks.sql"), formerly: None },
    Migration { number: 11, name: "prune", sql: include_str!("../migrations/0011_prune.sql"), formerly: None },
];

const BOOKKEEPING: &str = "create schema if not exists postroom;
create table if not exists postroom.migrations (
    number     integer     primary key,
    name       text        not null,
    checksum   text        not null,
    applied_at timestamptz not null default clock_timestamp()
);";

/// Brings the schema up to date, in one transaction. `lanes` counts only when the schema is new.
pub async fn migrate(connector: &Connector, lanes: u16) -> Result<Migrated, MigrateError> {
    check_lanes(lanes)?;
    let mut client = connector.connect().await?;
    let failed = |error| MigrateError::Store(store_error("prepare the schema", error));
    let tx = client.transaction().await.map_err(failed)?;
    // Held by the transaction: another process waits here until we are done, then finds nothing to do.
    tx.query_one("select pg_advisory_xact_lock($1)", &[&ADVISORY_LOCK]).await.map_err(failed)?;
    let migrated = apply(&tx, lanes).await?;
    tx.commit().await.map_err(failed)?;
    Ok(migrated)
}

async fn apply(client: &Transaction<'_>, lanes: u16) -> Result<Migrated, MigrateError> {
    let failed = |error| MigrateError::Store(store_error("read the applied migrations", error));
    let there: bool =
        client.query_one("select to_regclass('postroom.migrations') is not null", &[]).await.map_err(failed)?.get(0);
    if !there {
        client.batch_execute(BOOKKEEPING).await.map_err(failed)?;
    }
    let rows = client
        .query("select number, name, checksum from postroom.migrations order by number", &[])
        .await
        .map_err(failed)?;
    let known = MIGRATIONS.last().map_or(0, |migration| migration.number);
    let mut newest = 0;
    for row in &rows {
        let (number, name, sum): (i32, String, String) = (row.get(0), row.get(1), row.get(2));
        newest = number;
        match MIGRATIONS.iter().find(|migration| migration.number == number) {
            None => return Err(MigrateError::Newer { number: number.into(), known: known.into() }),
            Some(migration) if checksum(migration.sql) != sum && migration.formerly != Some(sum.as_str()) => {
                return Err(MigrateError::Changed { number: number.into(), name });
            }
            Some(_) => {}
        }
    }
    let mut applied = Vec::new();
    for migration in MIGRATIONS.iter().filter(|migration| migration.number > newest) {
        let failed = |error: tokio_postgres::Error| MigrateError::Failed {
            number: migration.number.into(),
            name: migration.name,
            source: error.into(),
        };
        client.batch_execute(&render(migration.sql, lanes)).await.map_err(failed)?;
        client
            .execute(
                "insert into postroom.migrations (number, name, checksum) values ($1, $2, $3)",
                &[&migration.number, &migration.name, &checksum(migration.sql)],
            )
            .await
            .map_err(failed)?;
        applied.push((migration.number.into(), migration.name));
    }
    Ok(Migrated { applied, version: known.max(newest).into() })
}

/// The whole schema as one script, for those who apply migrations by their own tool. Running it is the same as `migrate`
/// on a new database; `migrate` afterwards finds nothing to do.
pub fn print_sql(lanes: u16) -> Result<String, MigrateError> {
    check_lanes(lanes)?;
    let mut script = format!("begin;\n{BOOKKEEPING}\n");
    for migration in MIGRATIONS {
        script.push_str(&render(migration.sql, lanes));
        script.push_str(&format!(
            "\ninsert into postroom.migrations (number, name, checksum) values ({}, '{}', '{}');\n",
            migration.number,
            migration.name,
            checksum(migration.sql)
        ));
    }
    script.push_str("commit;\n");
    Ok(script)
}

/// Number of the newest migration that this program knows.
pub fn schema_version() -> i32 {
    MIGRATIONS.last().map_or(0, |migration| migration.number)
}

fn check_lanes(lanes: u16) -> Result<(), MigrateError> {
    if (1..=1024).contains(&lanes) { Ok(()) } else { Err(MigrateError::Lanes(lanes)) }
}

fn render(sql: &str, lanes: u16) -> String {
    sql.replace("{{lanes}}", &lanes.to_string())
}

fn checksum(sql: &str) -> String {
    Sha256::digest(sql.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn migrations_are_ascii_and_numbered_without_a_gap() {
        for (index, migration) in MIGRATIONS.iter().enumerate() {
            assert!(migration.sql.is_ascii(), "{}", migration.name);
            assert_eq!(migration.number as usize, index + 1);
        }
    }
}
