//! What a relay that sent a table's rows before leaves in the file: rows that it has claimed, indexes.

use std::time::Duration;

use postroom::{Deed, Intake, StoreError, Stuck, TableIndex, TableName};
use rusqlite::{Connection, TransactionBehavior, params_from_iter};

use super::table::quoted;
use super::{now_us, set, statements, wrong};
use crate::connect::store_error;
use crate::operate::dead::audit;

pub(crate) fn indexes(connection: &Connection, table: &TableName) -> Result<Vec<TableIndex>, StoreError> {
    let failed = |error| store_error("look at a table's indexes", error);
    // The primary key of a table whose rows have numbers is no index in this list.
    let sql = "select l.name, i.name, (select sql from sqlite_schema s where s.name = l.name)
                 from pragma_index_list(?1) l, pragma_index_info(l.name) i order by l.name, i.seqno";
    let mut statement = connection.prepare(sql).map_err(failed)?;
    let parts: Vec<(String, Option<String>, Option<String>)> = statement
        .query_map([&table.name], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))
        .and_then(Iterator::collect)
        .map_err(failed)?;
    let mut indexes: Vec<TableIndex> = Vec::new();
    for (name, column, sql) in parts {
        if indexes.last().is_none_or(|last| last.name != name) {
            let lower = sql.unwrap_or_default().to_lowercase();
            let condition = lower.split_once(" where ").map(|(_, condition)| condition.to_owned());
            let removal = format!("drop index {}", quoted(&name));
            indexes.push(TableIndex { name, columns: Vec::new(), included: Vec::new(), condition, removal });
        }
        if let Some(last) = indexes.last_mut() {
            // An expression has no name.
            last.columns.push(column.unwrap_or_default());
        }
    }
    Ok(indexes)
}

pub(crate) fn free(
    connection: &mut Connection,
    intake: &Intake,
    stuck: &Stuck,
    age: Duration,
    max: usize,
    deed: &Deed,
) -> Result<u64, StoreError> {
    let failed = |error| store_error("give back rows that are stuck; nothing was changed", error);
    let looked_for = Intake { taken: stuck.set.clone(), ..intake.looking_for(&stuck.rows) };
    let statements = statements(connection, &looked_for)?;
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(failed)?;
    let (sql, values) = statements.next(&intake.name, i64::try_from(max).unwrap_or(i64::MAX));
    let found = {
        let mut statement = tx.prepare(&sql).map_err(failed)?;
        let rows = statement.query_map(params_from_iter(values), |row| statements.whole(row));
        rows.and_then(Iterator::collect::<Result<Vec<_>, _>>).map_err(failed)?
    };
    let now = now_us(&tx).map_err(failed)?;
    let keys = looked_for.older_than(found, age, now).ok_or_else(|| wrong(intake, &[Intake::ageless()]))?;
    if keys.is_empty() {
        return Ok(0);
    }
    for key in &keys {
        set(&tx, &statements, &stuck.set, key, None).map_err(failed)?;
    }
    let filter =
        serde_json::json!({ "intake": intake.name, "rows": keys, "stuck_for_seconds": age.as_secs() }).to_string();
    audit(&tx, deed, "intake.again", &filter, &[]).map_err(failed)?;
    tx.commit().map_err(failed)?;
    Ok(keys.len() as u64)
}
