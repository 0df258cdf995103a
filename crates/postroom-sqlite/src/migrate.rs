//! Numbered migrations in one immediate transaction, safe to repeat and to run from several processes at once.

use postroom::{MigrateError, Migrated, MigrationPlan, MigrationStep, StoreError};
use rusqlite::{Connection, TransactionBehavior, params};
use sha2::{Digest, Sha256};

use crate::connect::store_error;

const MIGRATIONS: &[(i64, &str, &str)] = &[
    (1, "foundation", include_str!("../migrations/0001_foundation.sql")),
    (2, "audit", include_str!("../migrations/0002_audit.sql")),
    (3, "trouble", include_str!("../migrations/0003_trouble.sql")),
    (4, "receiving", include_str!("../migrations/0004_receiving.sql")),
    (5, "watch", include_str!("../migrations/0005_watch.sql")),
    (6, "fillers", include_str!("../migrations/0006_fillers.sql")),
    (7, "clocks", include_str!("../migrations/0007_clocks.sql")),
    (8, "operators", include_str!("../migrations/0008_operators.sql")),
    (9, "sizes", include_str!("../migrations/0009_sizes.sql")),
    (10, "operations", include_str!("../migrations/0010_operations.sql")),
    (11, "archive", include_str!("../migrations/0011_archive.sql")),
    (12, "reconcile", include_str!("../migrations/0012_reconcile.sql")),
    (13, "waits", include_str!("../migrations/0013_waits.sql")),
    (14, "intake", include_str!("../migrations/0014_intake.sql")),
    (15, "queues", include_str!("../migrations/0015_queues.sql")),
];

const BOOKKEEPING: &str = "create table if not exists postroom_migrations (
    number integer primary key, name text not null, checksum text not null);";

/// Brings the schema up to date, in one transaction.
pub fn migrate(connection: &mut Connection) -> Result<Migrated, MigrateError> {
    let failed = |error| MigrateError::Store(store_error("migrate the schema", error));
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(failed)?;
    tx.execute_batch(BOOKKEEPING).map_err(failed)?;
    let present: Vec<(i64, String, String)> = tx
        .prepare("select number, name, checksum from postroom_migrations order by number")
        .and_then(|mut statement| statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?.collect())
        .map_err(failed)?;
    let known = schema_version();
    for (number, name, sum) in &present {
        match MIGRATIONS.iter().find(|(known, _, _)| known == number) {
            None => return Err(MigrateError::Newer { number: *number, known }),
            Some((_, _, sql)) if checksum(sql) != *sum => {
                return Err(MigrateError::Changed { number: *number, name: name.clone() });
            }
            Some(_) => {}
        }
    }
    let newest = present.last().map_or(0, |(number, _, _)| *number);
    let mut applied = Vec::new();
    for (number, name, sql) in MIGRATIONS.iter().filter(|(number, _, _)| *number > newest) {
        let failed_at = |error: rusqlite::Error| MigrateError::Failed { number: *number, name, source: error.into() };
        tx.execute_batch(sql).map_err(failed_at)?;
        tx.execute(
            "insert into postroom_migrations (number, name, checksum) values (?1, ?2, ?3)",
            params![number, name, checksum(sql)],
        )
        .map_err(failed)?;
        applied.push((*number, *name));
    }
    tx.commit().map_err(failed)?;
    Ok(Migrated { applied, version: known })
}

/// What `migrate` would do.
pub(crate) fn plan(connection: &Connection) -> Result<MigrationPlan, MigrateError> {
    let failed = |error| MigrateError::Store(store_error("read the applied migrations", error));
    let there = "select exists (select 1 from sqlite_master where type = 'table' and name = 'postroom_migrations')";
    if !connection.query_row(there, [], |row| row.get(0)).map_err(failed)? {
        return Ok(plan_of(0));
    }
    let newest = "select coalesce(max(number), 0) from postroom_migrations";
    let version = connection.query_row(newest, [], |row| row.get(0)).map_err(failed)?;
    let known = schema_version();
    if version > known {
        return Err(MigrateError::Newer { number: version, known });
    }
    Ok(plan_of(version))
}

/// What `migrate` would do to a file of this version.
pub(crate) fn plan_of(version: i64) -> MigrationPlan {
    let locks = "the file, for writers: they wait until the migration ends";
    let pending = MIGRATIONS.iter().filter(|(number, _, _)| *number > version);
    let steps = pending.map(|(number, name, _)| MigrationStep { number: *number, name, locks }).collect();
    MigrationPlan { version, steps }
}

/// The whole schema as one script.
pub fn print_sql() -> String {
    let mut script = format!("begin immediate;\n{BOOKKEEPING}\n");
    for (number, name, sql) in MIGRATIONS {
        let sum = checksum(sql);
        script.push_str(&format!("{sql}\ninsert into postroom_migrations values ({number}, '{name}', '{sum}');\n"));
    }
    script.push_str("commit;\n");
    script
}

/// Number of the newest migration that this program knows.
pub(crate) fn schema_version() -> i64 {
    MIGRATIONS.last().map_or(0, |(number, _, _)| *number)
}

/// Number of the newest migration of a file.
pub(crate) fn version(connection: &Connection) -> Result<i64, StoreError> {
    connection
        .query_row("select max(number) from postroom_migrations", [], |row| row.get(0))
        .map_err(|error| store_error("read the schema version", error))
}

fn checksum(sql: &str) -> String {
    Sha256::digest(sql.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}
