//! Numbered migrations, each in one transaction.

use postroom::{LANES_DEFAULT, MigrateError, Migrated, MigrationPlan, MigrationStep, StoreError};
use sha2::{Digest, Sha256};
use tiberius::error::Error;

use crate::conn::Conn;
use crate::connect::{Settings, connect, store_error};
use crate::sql::{get, named};

const MIGRATIONS: &[(i64, &str, &str)] = &[
    (1, "foundation", include_str!("../migrations/0001_foundation.sql")),
    (2, "receiving", include_str!("../migrations/0002_receiving.sql")),
    (3, "enqueue", include_str!("../migrations/0003_enqueue.sql")),
    (4, "operating", include_str!("../migrations/0004_operating.sql")),
    (5, "intake", include_str!("../migrations/0005_intake.sql")),
];

const BOOKKEEPING: &str = "create table postroom_migrations (
    number     int          not null constraint postroom_migrations_pk primary key,
    name       nvarchar(64) not null,
    checksum   nchar(64)    not null,
    applied_at datetime2(6) not null default sysutcdatetime()
)";
/// A lock that ends with the transaction; 0 and 1 mean that it was granted.
const LOCK: &str = "declare @granted int; \
                    exec @granted = sp_getapplock @Resource = 'postroom.migrate', @LockMode = 'Exclusive', @LockOwner = 'Transaction', @LockTimeout = 60000; \
                    select @granted";
const WHAT: &str = "migrate the schema; what is not complete was rolled back";

/// Brings the schema up to date; `lanes` is for a new schema. SQL Server 2019 or newer.
pub async fn migrate(settings: &Settings, lanes: Option<u16>) -> Result<Migrated, MigrateError> {
    if let Some(asked) = lanes.filter(|lanes| !(1..=1024).contains(lanes)) {
        return Err(MigrateError::Lanes(asked));
    }
    let failed = |error| MigrateError::Store(store_error(WHAT, error));
    let mut conn = connect(settings).await.map_err(failed)?;
    check(&mut conn).await.map_err(failed)?.map_or(Ok(()), Err)?;
    let mut applied = Vec::new();
    loop {
        conn.begin().await.map_err(failed)?;
        let granted = conn.batch(LOCK).await.map_err(failed)?;
        let granted: Option<i64> = granted.first().and_then(|row| get(row, 0_usize).ok());
        if granted.is_none_or(|granted| granted < 0) {
            let source = "another process has migrated it for a minute".into();
            return Err(StoreError::Busy { what: "migrate the schema", source }.into());
        }
        let next = step(&mut conn, lanes).await?;
        conn.commit().await.map_err(failed)?;
        match next {
            Some(step) => applied.push(step),
            None => return Ok(Migrated { applied, version: schema_version() }),
        }
    }
}

/// Why the database cannot have postroom's tables as it is set; none: it can. Who reads must see what was committed last, and wait for nobody.
pub(crate) async fn check(conn: &mut Conn) -> Result<Option<StoreError>, Error> {
    const LEVEL: i64 = 150;
    let sql =
        "select is_read_committed_snapshot_on, compatibility_level from sys.databases where database_id = db_id()";
    let (versions, level): (bool, i64) = conn.first(sql, named! {}).await?.unwrap_or_default();
    Ok(match versions {
        false => Some(StoreError::Schema {
            problem: "the database has read_committed_snapshot off, so whoever reads waits for whoever writes"
                .to_owned(),
            hint: "alter database current set read_committed_snapshot on with rollback immediate; it ends open transactions once",
        }),
        true if level < LEVEL => Some(StoreError::Schema {
            problem: format!(
                "the database has the compatibility level {level}, and {LEVEL} is needed (SQL Server 2019)"
            ),
            hint: "alter database current set compatibility_level = 150",
        }),
        true => None,
    })
}

/// Applies the next migration; none is left.
async fn step(conn: &mut Conn, asked: Option<u16>) -> Result<Option<(i64, &'static str)>, MigrateError> {
    let failed = |error| MigrateError::Store(store_error(WHAT, error));
    if !is_there(conn, "postroom_migrations").await.map_err(failed)? {
        conn.batch(BOOKKEEPING).await.map_err(failed)?;
    }
    let sql = "select number, name, checksum from postroom_migrations order by number";
    let present: Vec<(i64, String, String)> = conn.query(sql, named! {}).await.map_err(failed)?;
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
    let lanes: Option<u16> = match is_there(conn, "postroom_settings").await.map_err(failed)? {
        true => conn.first("select lanes from postroom_settings", named! {}).await.map_err(failed)?,
        false => None,
    };
    if let (Some(schema), Some(asked)) = (lanes, asked)
        && schema != asked
    {
        return Err(MigrateError::OtherLanes { schema, asked });
    }
    let lanes = lanes.or(asked).unwrap_or(LANES_DEFAULT);
    let newest = present.last().map_or(0, |(number, _, _)| *number);
    let Some((number, name, sql)) = MIGRATIONS.iter().find(|(number, _, _)| *number > newest) else {
        return Ok(None);
    };
    for statement in statements(sql, lanes) {
        conn.batch(&statement).await.map_err(failed)?;
    }
    let noted = "insert into postroom_migrations (number, name, checksum) values (@number, @name, @checksum)";
    let parameters = named! { "number" => *number, "name" => *name, "checksum" => checksum(sql) };
    conn.exec(noted, parameters).await.map_err(failed)?;
    Ok(Some((*number, *name)))
}

async fn is_there(conn: &mut Conn, table: &str) -> Result<bool, Error> {
    let there: Option<i64> =
        conn.first("select count(*) from sys.tables where name = @table", named! { "table" => table }).await?;
    Ok(there.is_some_and(|tables| tables > 0))
}

/// Tells letters apart.
const TEXT: &str = "Latin1_General_100_BIN2";
/// The same, and a `varchar` of it is UTF-8.
const UTF8: &str = "Latin1_General_100_BIN2_UTF8";
/// A UUIDv7 (RFC 9562).
const NEW_ID: &str = "convert(uniqueidentifier, stuff(convert(char(12), convert(binary(6), datediff_big(millisecond, '1970-01-01', sysutcdatetime())), 2), 9, 0, '-') \
                      + '-7' + right(convert(char(4), crypt_gen_random(2), 2), 3) \
                      + '-' + substring('89AB', convert(int, crypt_gen_random(1)) % 4 + 1, 1) + right(convert(char(4), crypt_gen_random(2), 2), 3) \
                      + '-' + convert(char(12), crypt_gen_random(6), 2))";
/// What a row of the outbox counts for when messages are fetched up to a number of bytes.
const SIZE_OF: &str = "convert(int, datalength(payload) + coalesce(datalength(headers), 0) + 512)";

fn statements(sql: &str, lanes: u16) -> Vec<String> {
    let list: Vec<String> = (0..lanes).map(|lane| lane.to_string()).collect();
    let lane_of = format!(
        "convert(smallint, convert(int, substring(hashbytes('SHA2_256', coalesce([key], aggregate_id, convert(nvarchar(36), id))), 1, 2)) % {lanes})"
    );
    let filled = |statement: &str| {
        let mut statement = statement
            .replace("{lanes}", &lanes.to_string())
            .replace("{lane_list}", &format!("[{}]", list.join(",")))
            .replace("{lane_of}", &lane_of)
            .replace("{size_of}", SIZE_OF)
            .replace("{new_id}", NEW_ID)
            .replace("{text}", TEXT)
            .replace("{utf8}", UTF8);
        for (name, expression) in [
            ("bytes", "datalength(convert(varchar(max), {} collate Latin1_General_100_BIN2_UTF8))"),
            (
                "unicode",
                "convert(nvarchar(max), convert(varchar(max), {} collate Latin1_General_100_BIN2_UTF8)) collate Latin1_General_100_BIN2 = {} collate Latin1_General_100_BIN2",
            ),
            ("hash", "convert(binary(32), hashbytes('SHA2_256', {}))"),
            (
                "object",
                "isjson({}) = 1 and ltrim(translate(left({}, 100), concat(nchar(9), nchar(10), nchar(13)), N'   ')) like N'{%'",
            ),
        ] {
            statement = expanded(&statement, name, expression);
        }
        statement.trim().to_owned()
    };
    sql.split("\n----\n").map(filled).collect()
}

/// Each `{NAME X}` becomes the expression, with X for `{}`.
fn expanded(statement: &str, name: &str, expression: &str) -> String {
    let begin = format!("{{{name} ");
    let (mut done, mut rest) = (String::with_capacity(statement.len()), statement);
    while let Some((before, after)) = rest.split_once(&begin) {
        let (of, after) = after.split_once('}').unwrap_or((after, ""));
        done.push_str(before);
        done.push_str(&expression.replace("{}", of));
        rest = after;
    }
    done + rest
}

/// The whole schema as one script for `sqlcmd`.
pub fn print_sql(lanes: Option<u16>) -> Result<String, MigrateError> {
    let lanes = lanes.unwrap_or(LANES_DEFAULT);
    if !(1..=1024).contains(&lanes) {
        return Err(MigrateError::Lanes(lanes));
    }
    // What a computed column with an index asks of a session; sqlcmd has some of it off, and goes on after an error unless told.
    let mut script =
        format!("set quoted_identifier on;\nset xact_abort on;\nbegin transaction;\ngo\n{BOOKKEEPING}\ngo\n");
    for (number, name, sql) in MIGRATIONS {
        statements(sql, lanes).iter().for_each(|statement| script.push_str(&format!("{statement}\ngo\n")));
        let sum = checksum(sql);
        let noted = "insert into postroom_migrations (number, name, checksum) values";
        script.push_str(&format!("{noted} ({number}, '{name}', '{sum}')\ngo\n"));
    }
    script.push_str("commit transaction;\ngo\n");
    Ok(script)
}

/// The version of a schema; 0: there is none.
pub(crate) async fn present(conn: &mut Conn) -> Result<i64, Error> {
    match is_there(conn, "postroom_migrations").await? {
        true => version(conn).await,
        false => Ok(0),
    }
}

/// As `present`, for a database that has been migrated.
pub(crate) async fn version(conn: &mut Conn) -> Result<i64, Error> {
    let newest = "select coalesce(max(number), 0) from postroom_migrations";
    Ok(conn.first(newest, named! {}).await?.unwrap_or_default())
}

/// What `migrate` would do to a database of this version.
pub(crate) fn plan_of(version: i64) -> Result<MigrationPlan, MigrateError> {
    let known = schema_version();
    if version > known {
        return Err(MigrateError::Newer { number: version, known });
    }
    let pending = MIGRATIONS.iter().filter(|(number, _, _)| *number > version);
    let locks = "nothing that is in use: it makes new tables";
    let steps = pending.map(|(number, name, _)| MigrationStep { number: *number, name, locks }).collect();
    Ok(MigrationPlan { version, steps })
}

/// Number of the newest migration that this program knows.
pub(crate) fn schema_version() -> i64 {
    MIGRATIONS.last().map_or(0, |(number, _, _)| *number)
}

fn checksum(sql: &str) -> String {
    Sha256::digest(sql.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_placeholder_is_left() {
        for (_, name, sql) in MIGRATIONS {
            for statement in statements(sql, 16) {
                let code: String = statement.lines().filter(|line| !line.trim_start().starts_with("--")).collect();
                assert!(!code.contains("{b") && !code.contains("{h") && !code.contains("{o"), "{name}: {code}");
            }
        }
    }
}
