//! What a relay that sent a table's rows before leaves in the database: rows that it has claimed, sessions that still send, indexes.

use std::time::Duration;

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Row};
use postroom::{Deed, Intake, Stuck, TableIndex, TableName};

use super::table::quoted;
use super::{now_us, rows, set, statements, wrong};
use crate::desk::{Failed, begin};
use crate::log::json;
use crate::operate::audit::audit;

pub(crate) async fn indexes(conn: &mut Conn, table: &TableName) -> Result<Vec<TableIndex>, Failed> {
    let sql = "select index_name, column_name from information_schema.statistics
                where table_schema = coalesce(?, database()) and table_name = ? order by index_name, seq_in_index";
    let parts: Vec<(String, Option<String>)> = conn.exec(sql, (&table.schema, &table.name)).await?;
    let mut indexes: Vec<TableIndex> = Vec::new();
    for (name, column) in parts {
        if indexes.last().is_none_or(|last| last.name != name) {
            let removal = format!("drop index {} on {}", quoted(&name), name_of(table));
            indexes.push(TableIndex { name, columns: Vec::new(), included: Vec::new(), condition: None, removal });
        }
        if let Some(last) = indexes.last_mut() {
            // An expression has no name.
            last.columns.push(column.unwrap_or_default());
        }
    }
    Ok(indexes)
}

pub(crate) async fn senders(conn: &mut Conn, table: &TableName) -> Result<Vec<String>, Failed> {
    let (own, database): (u64, Option<String>) =
        conn.query_first("select connection_id(), database()").await?.unwrap_or_default();
    let name = table.name.to_lowercase();
    // Only what runs at this moment is shown.
    let sessions: Vec<Row> = conn.query("show full processlist").await?;
    let mut senders = Vec::new();
    for row in sessions {
        let text = |index: usize| row.get_opt::<Option<String>, _>(index).and_then(Result::ok).flatten();
        let does = text(7).unwrap_or_default().to_lowercase();
        let is_own = row.get_opt::<u64, _>(0).and_then(Result::ok) == Some(own);
        let changes = does.contains("update") || does.contains("delete");
        if !is_own && text(3) == database && changes && does.contains(&name) && !does.contains("postroom_") {
            senders.push(format!("{}@{}", text(1).unwrap_or_default(), text(2).unwrap_or_default()));
        }
    }
    Ok(senders)
}

pub(crate) async fn free(
    conn: &mut Conn,
    intake: &Intake,
    stuck: &Stuck,
    age: Duration,
    max: usize,
    deed: &Deed,
) -> Result<u64, Failed> {
    let looked_for = Intake { taken: stuck.set.clone(), ..intake.looking_for(&stuck.rows) };
    let statements = statements(conn, &looked_for).await?;
    let mut tx = begin(conn).await?;
    let found = rows(&mut tx, statements.next(&intake.name, i64::try_from(max).unwrap_or(i64::MAX))).await?;
    let found: Vec<_> = found.iter().map(|row| statements.whole(row)).collect();
    if found.is_empty() {
        return Ok(0);
    }
    let free = rows(&mut tx, statements.free(&found)).await?;
    let free = free.iter().map(|row| statements.whole(row)).collect();
    let now = now_us(&mut tx).await?;
    let keys = looked_for.older_than(free, age, now).ok_or_else(|| wrong(intake, &[Intake::ageless()]))?;
    if keys.is_empty() {
        return Ok(0);
    }
    set(&mut tx, &statements, &stuck.set, &keys).await?;
    let (name, rows) = (json(&intake.name), json(&keys));
    let filter = format!("{{\"intake\":{name},\"rows\":{rows},\"stuck_for_seconds\":{}}}", age.as_secs());
    audit(&mut tx, deed, "intake.again", &filter, &[] as &[&str]).await?;
    tx.commit().await?;
    Ok(keys.len() as u64)
}

fn name_of(table: &TableName) -> String {
    let schema = table.schema.as_ref().map_or_else(String::new, |schema| format!("{}.", quoted(schema)));
    format!("{schema}{}", quoted(&table.name))
}
