//! How large the tables are and how fast they grow.

use std::collections::HashMap;
use std::time::{Duration, SystemTime};

use postroom::{Growth, TableVitals, Vitals};

use crate::conn::Conn;
use crate::desk::{Failed, begin};
use crate::sql::{NOW, get, named, seconds_since, since_1970};

/// Tables whose rows are told.
const TABLES: [&str; 6] = ["audit", "dead_consume", "dead_letters", "inbox", "outbox", "parked"];
const ALL: &str = "tables";

/// Rows and bytes of each table, as the server counts its pages.
pub(crate) async fn vitals(conn: &mut Conn) -> Result<Vitals, Failed> {
    let now: Option<i64> = conn.first(&format!("select {}", since_1970(NOW)), named! {}).await?;
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

/// By name without its prefix. Index 1 is the table itself; a page has 8 KiB.
async fn sizes(conn: &mut Conn) -> Result<HashMap<String, Size>, Failed> {
    let sql = "select t.name, p.index_id, convert(bigint, sum(p.rows)) as row_count, coalesce(convert(bigint, sum(a.pages)), 0) * 8192 as bytes
                 from sys.tables t
                 join sys.partitions p on p.object_id = t.object_id
                 left join (select container_id, sum(total_pages) as pages from sys.allocation_units group by container_id) a
                   on a.container_id = p.partition_id
                where t.name like N'postroom|_%' escape '|'
                group by t.name, p.index_id";
    let mut sizes = HashMap::new();
    for row in conn.rows(sql, named! {}).await? {
        let name: String = get(&row, "name")?;
        let name = name.trim_start_matches("postroom_").to_owned();
        let size = sizes.entry(name).or_insert(Size { rows: 0, bytes: 0, index_bytes: 0 });
        let bytes: i64 = get(&row, "bytes")?;
        match get::<i64>(&row, "index_id")? {
            0 | 1 => {
                size.rows = get(&row, "row_count")?;
                size.bytes += bytes;
            }
            _ => size.index_bytes += bytes,
        }
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
    let sql = format!(
        "select s.name, s.row_count, s.bytes, {} as seconds
           from postroom_sizes s
          where s.at = (select min(o.at) from postroom_sizes o
                         where o.name = s.name and o.at between dateadd(hour, -25, {NOW}) and dateadd(minute, -50, {NOW}))",
        seconds_since("s.at")
    );
    let mut noted = HashMap::new();
    for row in conn.rows(&sql, named! {}).await? {
        let then = Noted { rows: get(&row, "row_count")?, bytes: get(&row, "bytes")?, over: get(&row, "seconds")? };
        noted.insert(get(&row, "name")?, then);
    }
    Ok(noted)
}

/// Remembers the sizes of now, unless that was done within the last 55 minutes.
pub(crate) async fn note_sizes(conn: &mut Conn) -> Result<(), Failed> {
    let recent =
        format!("select count_big(*) from postroom_sizes where name = @name and at > dateadd(minute, -55, {NOW})");
    if conn.first::<i64>(&recent, named! { "name" => ALL }).await? != Some(0) {
        return Ok(());
    }
    let sizes = sizes(conn).await?;
    let tx = begin(conn).await?;
    // Held until the end, so that of two processes one notes them.
    let sql = format!("select convert(nvarchar(33), {NOW}, 126) from postroom_settings with (updlock)");
    let at: Option<String> = tx.first(&sql, named! {}).await?;
    if tx.first::<i64>(&recent, named! { "name" => ALL }).await? != Some(0) {
        return Ok(());
    }
    let all = sizes.values().map(|size| size.bytes + size.index_bytes).sum::<i64>();
    let each = TABLES.iter().filter_map(|name| {
        let size = sizes.get(*name)?;
        Some((*name, size.rows, size.bytes + size.index_bytes))
    });
    for (name, rows, bytes) in each.chain([(ALL, 0, all)]) {
        let sql = "insert into postroom_sizes (name, at, row_count, bytes) values (@name, convert(datetime2(6), @at), @rows, @bytes)";
        tx.exec(sql, named! { "name" => name, "at" => at.as_ref(), "rows" => rows, "bytes" => bytes }).await?;
    }
    tx.exec(&format!("delete from postroom_sizes where at < dateadd(day, -40, {NOW})"), named! {}).await?;
    tx.commit().await?;
    Ok(())
}
