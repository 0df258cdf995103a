//! How large a SQLite store is and how fast it grows.

use std::time::{Duration, SystemTime};

use postroom::{Growth, StoreError, TableVitals, Vitals};
use rusqlite::{Connection, OptionalExtension, TransactionBehavior, params};

use crate::connect::{NOW, store_error};

/// Tables whose rows are counted, each up to [`ROWS_MAX`].
const TABLES: [&str; 6] = ["audit", "dead_consume", "dead_letters", "inbox", "outbox", "parked"];
const ROWS_MAX: i64 = 1_000_000;
const FILE: &str = "file";

/// What was noted about a day ago: rows, bytes, and how long ago in seconds.
type Noted = (i64, Option<i64>, f64);

/// Rows of each table and bytes of the file. SQLite does not know how large each table is without reading it.
pub(crate) fn vitals(connection: &Connection) -> Result<Vitals, StoreError> {
    read(connection).map_err(|error| store_error("read the size of the file", error))
}

fn read(connection: &Connection) -> Result<Vitals, rusqlite::Error> {
    let now: i64 = connection.query_row(&format!("select {NOW}"), [], |row| row.get(0))?;
    let bytes = file_bytes(connection)?;
    let mut tables = Vec::new();
    for table in TABLES {
        let rows = rows_of(connection, table)?;
        let growth = noted(connection, table)?.map(|(then, _, over)| Growth::since(over, Some((then, rows)), None));
        let table = format!("postroom_{table}");
        tables.push(TableVitals { table, rows, dead_rows: None, bytes: None, index_bytes: None, growth });
    }
    let growth =
        noted(connection, FILE)?.and_then(|(_, then, over)| Some(Growth::since(over, None, Some((then?, bytes)))));
    let now = SystemTime::UNIX_EPOCH + Duration::from_millis(now.max(0).unsigned_abs());
    Ok(Vitals { now, bytes, growth, tables })
}

fn file_bytes(connection: &Connection) -> Result<i64, rusqlite::Error> {
    let sql = "select p.page_count * s.page_size from pragma_page_count() p, pragma_page_size() s";
    connection.query_row(sql, [], |row| row.get(0))
}

fn rows_of(connection: &Connection, table: &str) -> Result<i64, rusqlite::Error> {
    let sql = format!("select count(*) from (select 1 from postroom_{table} limit {ROWS_MAX})");
    connection.query_row(&sql, [], |row| row.get(0))
}

/// The oldest note of the last 25 hours that is at least 50 minutes old.
fn noted(connection: &Connection, name: &str) -> Result<Option<Noted>, rusqlite::Error> {
    let sql = format!(
        "select rows, bytes, ({NOW} - at_ms) / 1000.0 from postroom_sizes
          where name = ?1 and at_ms between {NOW} - 25 * 3600000 and {NOW} - 50 * 60000 order by at_ms limit 1"
    );
    connection.query_row(&sql, [name], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?))).optional()
}

/// Remembers the sizes of now, unless that was done within the last 55 minutes.
pub(crate) fn note_sizes(connection: &mut Connection) -> Result<(), StoreError> {
    note(connection).map_err(|error| store_error("remember the size of the file", error))
}

fn note(connection: &mut Connection) -> Result<(), rusqlite::Error> {
    // Writers do not wait for one that has nothing to do.
    let recent = format!("select exists (select 1 from postroom_sizes where at_ms > {NOW} - 55 * 60000)");
    if connection.query_row(&recent, [], |row| row.get(0))? {
        return Ok(());
    }
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    if tx.query_row(&recent, [], |row| row.get(0))? {
        return Ok(());
    }
    let insert = format!("insert into postroom_sizes (name, at_ms, rows, bytes) values (?1, {NOW}, ?2, ?3)");
    for table in TABLES {
        tx.execute(&insert, params![table, rows_of(&tx, table)?, None::<i64>])?;
    }
    tx.execute(&insert, params![FILE, 0, file_bytes(&tx)?])?;
    tx.execute(&format!("delete from postroom_sizes where at_ms < {NOW} - 40 * 86400000"), [])?;
    tx.commit()
}
