//! Numbered migrations, each in its own transaction, safe to repeat and to run from several processes at once.

use postroom::{LANES_DEFAULT, MigrateError, Migrated, MigrationPlan, MigrationStep, StoreError};
use sha2::{Digest, Sha256};
use tokio_postgres::Transaction;

use crate::connect::Connector;
use crate::link::store_error;

/// Any number; all that matters is that every postroom takes the same one.
const ADVISORY_LOCK: i64 = 0x706f_7374_726f_6f6d;

struct Migration {
    number: i32,
    name: &'static str,
    /// What it locks, and for whom that matters.
    locks: &'static str,
    /// ASCII, so that a database of any encoding can run it.
    sql: &'static str,
    /// Checksum of a former text that does the same, if there was one.
    formerly: Option<&'static str>,
}

const MIGRATIONS: &[Migration] = &[
    Migration {
        number: 1,
        name: "foundation",
        locks: "nothing that exists: it creates tables",
        sql: include_str!("../migrations/0001_foundation.sql"),
        formerly: None,
    },
    Migration {
        number: 2,
        name: "relays",
        locks: "nothing that exists: it creates a table",
        sql: include_str!("../migrations/0002_relays.sql"),
        formerly: None,
    },
    Migration {
        number: 3,
        name: "audit",
        locks: "nothing that exists: it creates a table",
        sql: include_str!("../migrations/0003_audit.sql"),
        formerly: None,
    },
    Migration {
        number: 4,
        name: "trouble",
        locks: "postroom.parked, dead_letters, lanes, relays and audit: relays and operators wait",
        sql: include_str!("../migrations/0004_trouble.sql"),
        formerly: Some("1588bd1e3f8107cd688b4badb2b762354a40fe95ad35328d7bdc6f794e52d877"),
    },
    Migration {
        number: 5,
        name: "receiving",
        locks: "postroom.inbox and audit: consumers and operators wait",
        sql: include_str!("../migrations/0005_receiving.sql"),
        formerly: None,
    },
    Migration {
        number: 6,
        name: "watch",
        locks: "postroom.settings, routes, lanes and outbox: relays and writers wait",
        sql: include_str!("../migrations/0006_watch.sql"),
        formerly: None,
    },
    Migration {
        number: 7,
        name: "fillers",
        locks: "nothing that exists: it creates a table",
        sql: include_str!("../migrations/0007_fillers.sql"),
        formerly: None,
    },
    Migration {
        number: 8,
        name: "doubts",
        locks: "postroom.suspects: relays wait",
        sql: include_str!("../migrations/0008_doubts.sql"),
        formerly: None,
    },
    Migration {
        number: 9,
        name: "clocks",
        locks: "nothing that exists: it creates a table and replaces a function",
        sql: include_str!("../migrations/0009_clocks.sql"),
        formerly: None,
    },
    Migration {
        number: 10,
        name: "locks",
        locks: "nothing: it replaces a function",
        sql: include_str!("../migrations/0010_locks.sql"),
        formerly: None,
    },
    Migration {
        number: 11,
        name: "prune",
        locks: "postroom.inbox: consumers wait while an index over it is built",
        sql: include_str!("../migrations/0011_prune.sql"),
        formerly: None,
    },
    Migration {
        number: 12,
        name: "safe_names",
        locks: "nothing: it changes functions and who may execute them",
        sql: include_str!("../migrations/0012_safe_names.sql"),
        formerly: None,
    },
    Migration {
        number: 13,
        name: "truth",
        locks: "postroom.lanes and audit: relays and operators wait for a moment",
        sql: include_str!("../migrations/0013_truth.sql"),
        formerly: None,
    },
    Migration {
        number: 14,
        name: "operators",
        locks: "postroom.relays, inbox_fillers, audit and settings: relays and operators wait for a moment",
        sql: include_str!("../migrations/0014_operators.sql"),
        formerly: None,
    },
    Migration {
        number: 15,
        name: "retention",
        locks: "postroom.audit: operators wait for a moment",
        sql: include_str!("../migrations/0015_retention.sql"),
        formerly: None,
    },
    Migration {
        number: 16,
        name: "sizes",
        locks: "nothing that exists",
        sql: include_str!("../migrations/0016_sizes.sql"),
        formerly: None,
    },
    Migration {
        number: 17,
        name: "operations",
        locks: "postroom.audit: operators wait for a moment",
        sql: include_str!("../migrations/0017_operations.sql"),
        formerly: None,
    },
    Migration {
        number: 18,
        name: "archive",
        locks: "postroom.settings and audit: relays and operators wait for a moment",
        sql: include_str!("../migrations/0018_archive.sql"),
        formerly: None,
    },
    Migration {
        number: 19,
        name: "reconcile",
        locks: "postroom.audit: operators wait for a moment",
        sql: include_str!("../migrations/0019_reconcile.sql"),
        formerly: None,
    },
    Migration {
        number: 20,
        name: "waits",
        locks: "postroom.inbox_messages: consumers wait for a moment",
        sql: include_str!("../migrations/0020_waits.sql"),
        formerly: None,
    },
    Migration {
        number: 21,
        name: "steps",
        locks: "postroom.outbox: it is read once without a lock; then writers and relays wait for a moment",
        sql: include_str!("../migrations/0021_steps.sql"),
        formerly: None,
    },
    Migration {
        number: 22,
        name: "intake",
        locks: "postroom.audit: operators wait",
        sql: include_str!("../migrations/0022_intake.sql"),
        formerly: None,
    },
    Migration {
        number: 23,
        name: "queues",
        locks: "postroom.inbox_messages: consumers wait while its rows are read once",
        sql: include_str!("../migrations/0023_queues.sql"),
        formerly: None,
    },
    Migration {
        number: 24,
        name: "taking",
        locks: "postroom.inbox_clocks: consumers wait for a moment",
        sql: include_str!("../migrations/0024_taking.sql"),
        formerly: None,
    },
];

/// What is created in this transaction means the same, whatever others have created in schemas on our search_path.
const SAFE_NAMES: &str = "set local search_path = pg_catalog, pg_temp;";

const SCHEMA: &str = "create schema if not exists postroom;";
const BOOKKEEPING: &str = "create table if not exists postroom.migrations (
    number     integer     primary key,
    name       text        not null,
    checksum   text        not null,
    applied_at timestamptz not null default clock_timestamp()
);";

/// So that a lock that somebody holds for long holds up nobody behind us.
const LOCK_TIMEOUT: &str = "set local lock_timeout = '10s'; set local statement_timeout = 0; set local jit = off";

/// Brings the schema up to date, in one transaction. `lanes` is for a new schema, [`LANES_DEFAULT`] where there is none; another
/// number than a schema has is an error.
pub async fn migrate(connector: &Connector, lanes: impl Into<Option<u16>>) -> Result<Migrated, MigrateError> {
    let lanes = lanes.into();
    check_lanes(lanes.unwrap_or(LANES_DEFAULT))?;
    let mut client = connector.connect().await?;
    let failed = |error| MigrateError::Store(store_error("prepare the schema; nothing was changed", error));
    let tx = client.transaction().await.map_err(failed)?;
    tx.batch_execute(SAFE_NAMES).await.map_err(failed)?;
    // Held by the transaction: another process waits here until we are done, then finds nothing to do.
    let alone: bool =
        tx.query_one("select pg_try_advisory_xact_lock($1)", &[&ADVISORY_LOCK]).await.map_err(failed)?.get(0);
    if !alone {
        tracing::warn!("another `postroom migrate` is running on this database; waiting until it ends");
        tx.query_one("select pg_advisory_xact_lock($1)", &[&ADVISORY_LOCK]).await.map_err(failed)?;
    }
    tx.batch_execute(LOCK_TIMEOUT).await.map_err(failed)?;
    let migrated = apply(&tx, lanes).await?;
    tx.commit().await.map_err(failed)?;
    Ok(migrated)
}

/// What `migrate` would do.
pub(crate) async fn plan(connector: &Connector) -> Result<MigrationPlan, MigrateError> {
    let mut client = connector.connect().await?;
    let failed = |error| MigrateError::Store(store_error("read the applied migrations", error));
    let tx = client.build_transaction().read_only(true).start().await.map_err(failed)?;
    tx.batch_execute(SAFE_NAMES).await.map_err(failed)?;
    let version = newest_applied(&tx).await?;
    let pending = MIGRATIONS.iter().filter(|migration| migration.number > version);
    let step = |migration: &Migration| MigrationStep {
        number: migration.number.into(),
        name: migration.name,
        locks: migration.locks,
    };
    Ok(MigrationPlan { version: version.into(), steps: pending.map(step).collect() })
}

/// Number of the newest applied migration, 0 where there is none. Refuses what this program must not work on.
async fn newest_applied(client: &Transaction<'_>) -> Result<i32, MigrateError> {
    let failed = |error| MigrateError::Store(store_error("read the applied migrations", error));
    let sql = "select n.nspowner::regrole::text, current_user::text, n.nspowner = (select oid from pg_roles where rolname = current_user),
                      to_regclass('postroom.migrations') is not null
                 from pg_namespace n where n.nspname = 'postroom'";
    let Some(row) = client.query_opt(sql, &[]).await.map_err(failed)? else { return Ok(0) };
    if !row.get::<_, bool>(2) {
        return Err(MigrateError::Owner { owner: row.get(0), role: row.get(1) });
    }
    if !row.get::<_, bool>(3) {
        return Ok(0);
    }
    let sql = "select number, name, checksum from postroom.migrations order by number";
    let rows = client.query(sql, &[]).await.map_err(failed)?;
    let mut newest = 0;
    for row in &rows {
        let (number, name, sum): (i32, String, String) = (row.get(0), row.get(1), row.get(2));
        newest = number;
        match MIGRATIONS.iter().find(|migration| migration.number == number) {
            None => return Err(MigrateError::Newer { number: number.into(), known: schema_version().into() }),
            Some(migration) if checksum(migration.sql) != sum && migration.formerly != Some(sum.as_str()) => {
                return Err(MigrateError::Changed { number: number.into(), name });
            }
            Some(_) => {}
        }
    }
    Ok(newest)
}

async fn apply(client: &Transaction<'_>, lanes: Option<u16>) -> Result<Migrated, MigrateError> {
    let failed = |error| MigrateError::Store(store_error("prepare the schema; nothing was changed", error));
    let newest = newest_applied(client).await?;
    if newest == 0 {
        // An administrator may have made it for a role that cannot make schemas.
        let sql = "select to_regnamespace('postroom') is null";
        if client.query_one(sql, &[]).await.map_err(failed)?.get(0) {
            client.batch_execute(SCHEMA).await.map_err(failed)?;
        }
        client.batch_execute(BOOKKEEPING).await.map_err(failed)?;
    } else if let Some(asked) = lanes {
        let schema: i16 = client.query_one("select lanes from postroom.settings", &[]).await.map_err(failed)?.get(0);
        let schema = schema.unsigned_abs();
        if schema != asked {
            return Err(MigrateError::OtherLanes { schema, asked });
        }
    }
    let lanes = lanes.unwrap_or(LANES_DEFAULT);
    let mut applied = Vec::new();
    for migration in MIGRATIONS.iter().filter(|migration| migration.number > newest) {
        let failed = |error: tokio_postgres::Error| match store_error("migrate the schema; nothing was changed", error)
        {
            busy @ StoreError::Busy { .. } => busy.into(),
            StoreError::Refused { source, .. } | StoreError::Unavailable { source, .. } => {
                MigrateError::Failed { number: migration.number.into(), name: migration.name, source }
            }
            schema => schema.into(),
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
    Ok(Migrated { applied, version: schema_version().max(newest).into() })
}

/// The whole schema as one script, for those who apply migrations by their own tool. Running it is the same as `migrate`
/// on a new database; `migrate` afterwards finds nothing to do.
pub fn print_sql(lanes: impl Into<Option<u16>>) -> Result<String, MigrateError> {
    let lanes = lanes.into().unwrap_or(LANES_DEFAULT);
    check_lanes(lanes)?;
    let mut script = format!("begin;\n{SAFE_NAMES}\n{SCHEMA}\n{BOOKKEEPING}\n");
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
