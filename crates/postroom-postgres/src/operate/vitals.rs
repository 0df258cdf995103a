//! How large a PostgreSQL store is and how fast it grows.

use std::time::SystemTime;

use postroom::{Growth, StoreError, TableVitals, Vitals};
use tokio_postgres::Row;

use crate::connect::Connector;
use crate::link::store_error;
use crate::operate::session::OperatorSession;

/// Sizes and growth, without reading a table.
pub(crate) async fn vitals(connector: &Connector) -> Result<Vitals, StoreError> {
    let failed = |error| store_error("read the sizes of the tables", error);
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.look().await?;
    let rows = tx.query(include_str!("sql/vitals.sql"), &[]).await.map_err(failed)?;
    vitals_of(&rows).map_err(failed)
}

fn vitals_of(rows: &[Row]) -> Result<Vitals, tokio_postgres::Error> {
    let mut now = SystemTime::UNIX_EPOCH;
    let (mut bytes, mut over, mut before, mut after) = (0, None::<f64>, 0, 0);
    let mut tables = Vec::new();
    for row in rows {
        let (live, table, index): (i64, i64, i64) = (row.try_get(1)?, row.try_get(3)?, row.try_get(4)?);
        let total = table + index;
        let growth = match (row.try_get(5)?, row.try_get(6)?, row.try_get(7)?) {
            (Some(rows), Some(then), Some(seconds)) => {
                over = Some(over.map_or(seconds, |over| over.max(seconds)));
                (before, after) = (before + then, after + total);
                Some(Growth::since(seconds, Some((rows, live)), Some((then, total))))
            }
            _ => None,
        };
        bytes += total;
        now = row.try_get(8)?;
        tables.push(TableVitals {
            table: row.try_get(0)?,
            rows: live,
            dead_rows: Some(row.try_get(2)?),
            bytes: Some(table),
            index_bytes: Some(index),
            growth,
        });
    }
    let growth = over.map(|over| Growth::since(over, None, Some((before, after))));
    Ok(Vitals { now, bytes, growth, tables })
}

/// Remembers the sizes of now, once an hour.
pub(crate) async fn note_sizes(connector: &Connector) -> Result<(), StoreError> {
    let failed = |error| store_error("remember the sizes of the tables", error);
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.deed().await?;
    tx.execute("select postroom.note_sizes()", &[]).await.map_err(failed)?;
    tx.commit().await.map_err(failed)
}
