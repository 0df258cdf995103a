//! What a relay that sent a table's rows before leaves in the database: rows that it has claimed, sessions that still send, indexes.

use std::time::Duration;

use postroom::{Deed, Intake, StoreError, Stuck, TableIndex, TableName};

use super::{now_us, parameters, set, statements, table_error, wrong};
use crate::connect::Connector;
use crate::link::store_error;
use crate::operate::OperatorSession;
use crate::operate::dead::audit;
use crate::text::shown;

pub(crate) async fn indexes(connector: &Connector, table: &TableName) -> Result<Vec<TableIndex>, StoreError> {
    let failed = |error| store_error("look at a table's indexes", error);
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.look().await?;
    let schema = table.schema.as_deref().unwrap_or("public");
    let rows = tx.query(include_str!("sql/indexes.sql"), &[&schema, &table.name]).await.map_err(failed)?;
    let index = |row: &tokio_postgres::Row| {
        Ok(TableIndex {
            name: shown(row, 0)?,
            columns: row.try_get(1)?,
            included: row.try_get(2)?,
            condition: row.try_get(3)?,
            removal: format!("drop index {}", shown(row, 4)?),
        })
    };
    rows.iter().map(index).collect::<Result<_, tokio_postgres::Error>>().map_err(failed)
}

pub(crate) async fn senders(connector: &Connector, table: &TableName) -> Result<Vec<String>, StoreError> {
    let failed = |error| store_error("look at sessions", error);
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.look().await?;
    // What a session did last is there as long as it is connected; of other roles' sessions only for those who may read it.
    let sql = "select concat_ws(' ', nullif(a.application_name, ''), a.usename || '@' || coalesce(host(a.client_addr), 'local'))
                 from pg_stat_activity a
                where a.datname = current_database() and a.pid <> pg_backend_pid() and a.application_name not like 'postroom%'
                  and position(lower($1) in lower(a.query)) > 0 and a.query ~* '\\m(update|delete)\\M'
                order by 1 limit 100";
    let rows = tx.query(sql, &[&table.name]).await.map_err(failed)?;
    rows.iter().map(|row| shown(row, 0)).collect::<Result<_, _>>().map_err(failed)
}

pub(crate) async fn free(
    connector: &Connector,
    intake: &Intake,
    stuck: &Stuck,
    age: Duration,
    max: usize,
    deed: &Deed,
) -> Result<u64, StoreError> {
    let failed = |error| table_error("give back rows that are stuck; nothing was changed", error);
    let looked_for = Intake { taken: stuck.set.clone(), ..intake.looking_for(&stuck.rows) };
    let mut session = OperatorSession::open(connector).await?;
    let tx = super::deed(&mut session).await?;
    let statements = statements(&tx, &looked_for).await?;
    let max = i64::try_from(max).unwrap_or(i64::MAX);
    let values = parameters(&intake.name, &max, &statements.pending_values);
    let rows = tx.query(&statements.next_free(), &values).await.map_err(failed)?;
    let rows = rows.iter().map(|row| statements.whole(row)).collect::<Result<Vec<_>, _>>().map_err(failed)?;
    let now = now_us(&tx).await.map_err(failed)?;
    let keys = looked_for.older_than(rows, age, now).ok_or_else(|| wrong(intake, &[Intake::ageless()]))?;
    if keys.is_empty() {
        return Ok(0);
    }
    set(&tx, &statements, &stuck.set, &keys, &[]).await.map_err(failed)?;
    let filter =
        serde_json::json!({ "intake": intake.name, "rows": keys, "stuck_for_seconds": age.as_secs() }).to_string();
    audit(&tx, deed, "intake.again", &filter, &[]).await.map_err(failed)?;
    tx.commit().await.map_err(failed)?;
    Ok(keys.len() as u64)
}
