//! What a relay that sent a table's rows before leaves in the database: rows that it has claimed, sessions that still send, indexes.

use std::time::Duration;

use postroom::{Deed, Intake, Stuck, TableIndex, TableName};
use tiberius::error::Error;

use super::table::{name_of, quoted};
use super::{now_us, set, statements, whole, wrong};
use crate::conn::Conn;
use crate::desk::{Failed, begin};
use crate::operate::audit::audit;
use crate::sql::{json, named};

/// No right to look at the server's state.
const NO_RIGHT: [u32; 2] = [297, 300];

pub(crate) async fn indexes(conn: &mut Conn, table: &TableName) -> Result<Vec<TableIndex>, Failed> {
    let sql = "select i.name, c.name, x.is_included_column, i.filter_definition
                 from sys.indexes i
                 join sys.index_columns x on x.object_id = i.object_id and x.index_id = i.index_id
                 join sys.columns c on c.object_id = x.object_id and c.column_id = x.column_id
                where i.object_id = object_id(@name) order by i.name, x.is_included_column, x.key_ordinal, x.index_column_id";
    let parts: Vec<(String, String, bool, Option<String>)> =
        conn.query(sql, named! { "name" => name_of(table) }).await?;
    let mut indexes: Vec<TableIndex> = Vec::new();
    for (name, column, is_included, condition) in parts {
        if indexes.last().is_none_or(|last| last.name != name) {
            let removal = format!("drop index {} on {}", quoted(&name), name_of(table));
            indexes.push(TableIndex { name, columns: Vec::new(), included: Vec::new(), condition, removal });
        }
        if let Some(last) = indexes.last_mut() {
            if is_included { last.included.push(column) } else { last.columns.push(column) }
        }
    }
    Ok(indexes)
}

/// Only what runs at this moment is shown, and nothing to a role that may not see it.
pub(crate) async fn senders(conn: &mut Conn, table: &TableName) -> Result<Vec<String>, Failed> {
    let sql = "select distinct s.login_name, coalesce(s.host_name, N'?')
                 from sys.dm_exec_requests r
                 join sys.dm_exec_sessions s on s.session_id = r.session_id and s.database_id = db_id() and s.session_id <> @@spid
                cross apply sys.dm_exec_sql_text(r.sql_handle) t
                where charindex(@name, lower(t.text)) > 0 and charindex(N'postroom_', t.text) = 0
                  and (charindex(N'update', lower(t.text)) > 0 or charindex(N'delete', lower(t.text)) > 0)";
    let found: Result<Vec<(String, String)>, Error> =
        conn.query(sql, named! { "name" => table.name.to_lowercase() }).await;
    match found {
        Ok(found) => Ok(found.into_iter().map(|(login, host)| format!("{login}@{host}")).collect()),
        Err(Error::Server(told)) if NO_RIGHT.contains(&told.code()) => Ok(Vec::new()),
        Err(error) => Err(error.into()),
    }
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
    let tx = begin(conn).await?;
    let next = statements.next(&intake.name, i64::try_from(max).unwrap_or(i64::MAX));
    let found = whole(tx, &statements, next).await?;
    if found.is_empty() {
        return Ok(0);
    }
    let free = whole(tx, &statements, statements.free(&found)).await?;
    let now = now_us(tx).await?;
    let keys = looked_for.older_than(free, age, now).ok_or_else(|| wrong(intake, &[Intake::ageless()]))?;
    if keys.is_empty() {
        return Ok(0);
    }
    set(tx, &statements, &stuck.set, &keys).await?;
    let (name, rows) = (json(&intake.name), json(&keys));
    let filter = format!("{{\"intake\":{name},\"rows\":{rows},\"stuck_for_seconds\":{}}}", age.as_secs());
    audit(tx, deed, "intake.again", &filter, &[] as &[&str]).await?;
    tx.commit().await?;
    Ok(keys.len() as u64)
}
