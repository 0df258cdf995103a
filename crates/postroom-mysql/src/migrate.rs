//! Numbered migrations. MariaDB and MySQL commit each change of the schema by itself, so a run that ends half-way leaves what it did; each
//! statement may be repeated, and the next run finishes it.

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Error, Opts};
use postroom::{LANES_DEFAULT, MigrateError, Migrated, MigrationPlan, MigrationStep, StoreError};
use sha2::{Digest, Sha256};

use crate::connect::{connect, store_error};

const MIGRATIONS: &[(i64, &str, &str)] = &[
    (1, "foundation", include_str!("../migrations/0001_foundation.sql")),
    (2, "receiving", include_str!("../migrations/0002_receiving.sql")),
    (3, "operating", include_str!("../migrations/0003_operating.sql")),
    (4, "enqueue", include_str!("../migrations/0004_enqueue.sql")),
    (5, "intake", include_str!("../migrations/0005_intake.sql")),
    (6, "queues", include_str!("../migrations/0006_queues.sql")),
];

const BOOKKEEPING: &str = "create table if not exists postroom_migrations (
    number     int          not null primary key,
    name       varchar(64)  not null,
    checksum   char(64)     not null,
    applied_at datetime(6)  not null default (utc_timestamp(6))
) engine = InnoDB default character set utf8mb4";
/// A lock of the whole server, so the database's name is part of it; at most 64 characters.
const LOCK: &str = "select get_lock(concat('postroom.migrate ', left(sha2(database(), 256), 40)), 60)";
const UNLOCK: &str = "select release_lock(concat('postroom.migrate ', left(sha2(database(), 256), 40)))";
const WHAT: &str = "migrate the schema; what was done so far stays, and the next run goes on from there";

/// Brings the schema up to date; `lanes` is for a new schema.
pub async fn migrate(opts: &Opts, lanes: Option<u16>) -> Result<Migrated, MigrateError> {
    if let Some(asked) = lanes.filter(|lanes| !(1..=1024).contains(lanes)) {
        return Err(MigrateError::Lanes(asked));
    }
    let failed = |error| MigrateError::Store(store_error(WHAT, error));
    let mut conn = connect(opts).await.map_err(failed)?;
    let locked: Option<i64> = conn.query_first(LOCK).await.map_err(failed)?.flatten();
    if locked != Some(1) {
        let source = "another process has migrated it for a minute".into();
        return Err(StoreError::Busy { what: "migrate the schema", source }.into());
    }
    let migrated = migrate_locked(&mut conn, lanes).await;
    // Ends with the connection in any case.
    let _ = conn.query_drop(UNLOCK).await;
    let _ = conn.disconnect().await;
    migrated
}

async fn migrate_locked(conn: &mut Conn, asked: Option<u16>) -> Result<Migrated, MigrateError> {
    let failed = |error| MigrateError::Store(store_error(WHAT, error));
    conn.query_drop(BOOKKEEPING).await.map_err(failed)?;
    let present: Vec<(i64, String, String)> =
        conn.query("select number, name, checksum from postroom_migrations order by number").await.map_err(failed)?;
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
    let lanes = lanes(conn).await.map_err(failed)?;
    if let (Some(schema), Some(asked)) = (lanes, asked)
        && schema != asked
    {
        return Err(MigrateError::OtherLanes { schema, asked });
    }
    let lanes = lanes.or(asked).unwrap_or(LANES_DEFAULT);
    let mut applied = Vec::new();
    for (number, name, sql) in MIGRATIONS.iter().filter(|(number, _, _)| *number > newest) {
        for statement in statements(sql, lanes) {
            conn.query_drop(statement).await.map_err(failed)?;
        }
        let sql = "insert into postroom_migrations (number, name, checksum) values (?, ?, ?)";
        let sum = MIGRATIONS.iter().find(|(n, _, _)| n == number).map(|(_, _, sql)| checksum(sql)).unwrap_or_default();
        conn.exec_drop(sql, (number, name, sum)).await.map_err(failed)?;
        applied.push((*number, *name));
    }
    Ok(Migrated { applied, version: known })
}

/// The lanes of an existing schema.
async fn lanes(conn: &mut Conn) -> Result<Option<u16>, Error> {
    let there = "select count(*) from information_schema.tables where table_schema = database() and table_name = 'postroom_settings'";
    if conn.query_first(there).await? != Some(1_i64) {
        return Ok(None);
    }
    conn.query_first("select lanes from postroom_settings").await
}

/// Compares texts as bytes, with trailing spaces. The two families of servers have it under different names; each takes the other's for a
/// comment (MariaDB ignores those for versions 5.7 to 9.9 of MySQL).
const COLLATION: &str = "/*M! utf8mb4_nopad_bin *//*!80000 utf8mb4_0900_bin */";

fn statements(sql: &str, lanes: u16) -> Vec<String> {
    let list: Vec<String> = (0..lanes).map(|lane| lane.to_string()).collect();
    let list = format!("[{}]", list.join(","));
    let filled = |statement: &str| {
        let statement = statement.replace("{lanes}", &lanes.to_string()).replace("{lane_list}", &list);
        statement.replace("{collation}", COLLATION).trim().to_owned()
    };
    sql.split("\n----\n").map(filled).collect()
}

/// The whole schema as one script for the clients `mariadb` and `mysql`.
pub fn print_sql(lanes: Option<u16>) -> Result<String, MigrateError> {
    let lanes = lanes.unwrap_or(LANES_DEFAULT);
    if !(1..=1024).contains(&lanes) {
        return Err(MigrateError::Lanes(lanes));
    }
    let mut script = format!("delimiter $$\n{BOOKKEEPING}$$\n");
    for (number, name, sql) in MIGRATIONS {
        statements(sql, lanes).iter().for_each(|statement| script.push_str(&format!("{statement}$$\n")));
        let sum = checksum(sql);
        let noted = "insert ignore into postroom_migrations (number, name, checksum) values";
        script.push_str(&format!("{noted} ({number}, '{name}', '{sum}')$$\n"));
    }
    script.push_str("delimiter ;\n");
    Ok(script)
}

/// Number of the newest migration of the database; 0: it has none.
pub(crate) async fn present(conn: &mut Conn) -> Result<i64, Error> {
    let there = "select count(*) from information_schema.tables where table_schema = database() and table_name = 'postroom_migrations'";
    if conn.query_first(there).await? != Some(1_i64) {
        return Ok(0);
    }
    version(conn).await
}

/// As `present`, for a database that has been migrated.
pub(crate) async fn version(conn: &mut Conn) -> Result<i64, Error> {
    Ok(conn.query_first("select coalesce(max(number), 0) from postroom_migrations").await?.unwrap_or_default())
}

/// What `migrate` would do to a database of this version.
pub(crate) fn plan_of(version: i64) -> Result<MigrationPlan, MigrateError> {
    let known = schema_version();
    if version > known {
        return Err(MigrateError::Newer { number: version, known });
    }
    let locks = |number| match number {
        6 => "postroom_inbox_messages: consumers wait while its indexes are built",
        _ => "nothing that is in use: it makes new tables",
    };
    let pending = MIGRATIONS.iter().filter(|(number, _, _)| *number > version);
    let steps =
        pending.map(|(number, name, _)| MigrationStep { number: *number, name, locks: locks(*number) }).collect();
    Ok(MigrationPlan { version, steps })
}

/// Number of the newest migration that this program knows.
pub(crate) fn schema_version() -> i64 {
    MIGRATIONS.last().map_or(0, |(number, _, _)| *number)
}

fn checksum(sql: &str) -> String {
    Sha256::digest(sql.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}
