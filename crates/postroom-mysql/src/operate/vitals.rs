//! How large the tables are and how fast they grow.

use std::collections::HashMap;
use std::time::{Duration, SystemTime};

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Row, params};
use postroom::{Growth, TableVitals, Vitals};

use crate::desk::{Failed, begin};
use crate::log::get;

/// Tables whose rows are told.
const TABLES: [&str; 6] = ["audit", "dead_consume", "dead_letters", "inbox", "outbox", "parked"];
const ALL: &str = "tables";

/// Rows and bytes of each table, as the server estimates them.
pub(crate) async fn vitals(conn: &mut Conn) -> Result<Vitals, Failed> {
    let now: Option<i64> =
        conn.query_first("select timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))").await?;
    let sizes = sizes(conn).await?;
    let noted = noted(conn).await?;
    let mut tables = Vec::new();
    for name in TABLES {
        let Some(size) = sizes.get(name) else { continue };
        let growth = noted.get(name).map(|then| {
            let bytes = (then.bytes, size.bytes + size.index_bytes);
            Growth::since(then.over, Some((then.rows, size.rows)), Some(bytes))
        });
        tables.push(TableVitals {
            table: format!("postroom_{name}"),
            rows: size.rows,
            dead_rows: None,
            bytes: Some(size.bytes),
            index_bytes: Some(size.index_bytes),
            growth,
        });
    }
    let bytes = sizes.values().map(|size| size.bytes + size.index_bytes).sum();
    let growth = noted.get(ALL).map(|then| Growth::since(then.over, None, Some((then.bytes, bytes))));
    let now = SystemTime::UNIX_EPOCH + Duration::from_micros(now.unwrap_or_default().max(0).unsigned_abs());
    Ok(Vitals { now, bytes, growth, tables })
}

struct Size {
    rows: i64,
    bytes: i64,
    index_bytes: i64,
}

/// By name without its prefix.
async fn sizes(conn: &mut impl Queryable) -> Result<HashMap<String, Size>, Failed> {
    let sql = "select substr(table_name, 10) as name, cast(coalesce(table_rows, 0) as signed) as row_count,
                      cast(coalesce(data_length, 0) as signed) as bytes, cast(coalesce(index_length, 0) as signed) as index_bytes
                 from information_schema.tables
                where table_schema = database() and table_name like 'postroom\\_%'";
    let rows: Vec<Row> = conn.query(sql).await?;
    let mut sizes = HashMap::new();
    for mut row in rows {
        let row = &mut row;
        let size =
            Size { rows: get(row, "row_count")?, bytes: get(row, "bytes")?, index_bytes: get(row, "index_bytes")? };
        sizes.insert(get(row, "name")?, size);
    }
    Ok(sizes)
}

/// What was noted about a day ago.
struct Noted {
    rows: i64,
    bytes: i64,
    over: f64,
}

/// The oldest notes of the last 25 hours that are at least 50 minutes old.
async fn noted(conn: &mut Conn) -> Result<HashMap<String, Noted>, Failed> {
    let sql = "select s.name, s.`rows` as row_count, s.bytes, timestampdiff(microsecond, s.at, utc_timestamp(6)) / 1e6 as seconds
                 from postroom_sizes s
                where s.at = (select min(o.at) from postroom_sizes o
                               where o.name = s.name and o.at between utc_timestamp(6) - interval 25 hour and utc_timestamp(6) - interval 50 minute)";
    let rows: Vec<Row> = conn.query(sql).await?;
    let mut noted = HashMap::new();
    for mut row in rows {
        let row = &mut row;
        let then = Noted { rows: get(row, "row_count")?, bytes: get(row, "bytes")?, over: get(row, "seconds")? };
        noted.insert(get(row, "name")?, then);
    }
    Ok(noted)
}

/// Remembers the sizes of now, unless that was done within the last 55 minutes.
pub(crate) async fn note_sizes(conn: &mut Conn) -> Result<(), Failed> {
    let recent = "select count(*) from postroom_sizes where name = ? and at > utc_timestamp(6) - interval 55 minute";
    if conn.exec_first::<i64, _, _>(recent, (ALL,)).await? != Some(0) {
        return Ok(());
    }
    let sizes = sizes(conn).await?;
    let mut tx = begin(conn).await?;
    // Held until the end, so that of two processes one notes them.
    let at: Option<String> =
        tx.query_first("select cast(utc_timestamp(6) as char) from postroom_settings for update").await?;
    if tx.exec_first::<i64, _, _>(recent, (ALL,)).await? != Some(0) {
        return Ok(());
    }
    let all = sizes.values().map(|size| size.bytes + size.index_bytes).sum::<i64>();
    let each = TABLES.iter().filter_map(|name| {
        let size = sizes.get(*name)?;
        Some((*name, size.rows, size.bytes + size.index_bytes))
    });
    for (name, rows, bytes) in each.chain([(ALL, 0, all)]) {
        let sql = "insert into postroom_sizes (name, at, `rows`, bytes) values (:name, :at, :rows, :bytes)
                   on duplicate key update bytes = values(bytes)";
        tx.exec_drop(sql, params! { "name" => name, "at" => &at, "rows" => rows, "bytes" => bytes }).await?;
    }
    tx.query_drop("delete from postroom_sizes where at < utc_timestamp(6) - interval 40 day").await?;
    tx.commit().await?;
    Ok(())
}
