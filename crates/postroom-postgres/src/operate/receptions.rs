//! One message at the receiving end, for an operator who asks why it has no effect.

use postroom::{BoxError, DeadFound, MessageId, Reception, ReceptionFound, StoreError, WaitingFound};
use tokio_postgres::Row;

use crate::connect::Connector;
use crate::link::store_error;
use crate::operate::session::OperatorSession;
use crate::text::Text;

/// Where a message is at every consumer whose inbox is in this database.
pub(crate) async fn receptions(connector: &Connector, id: MessageId) -> Result<Vec<Reception>, StoreError> {
    let failed = |error| store_error("look for a received message", error);
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.look().await?;
    let rows = tx.query(include_str!("sql/receptions.sql"), &[id.as_uuid()]).await.map_err(failed)?;
    rows.iter()
        .map(reception)
        .collect::<Result<_, _>>()
        .map_err(|error| StoreError::Refused { what: "look for a received message", source: BoxError::from(error) })
}

fn reception(row: &Row) -> Result<Reception, tokio_postgres::Error> {
    let text = |column| Ok(row.try_get::<_, Option<Text>>(column)?.map(|text| text.text));
    let seconds = |column| Ok(row.try_get::<_, Option<f64>>(column)?.unwrap_or_default());
    let count = |column| Ok(row.try_get::<_, Option<i64>>(column)?.unwrap_or_default());
    let dead = match text("cause")? {
        Some(cause) => Some(DeadFound {
            attempts: count("dead_attempts")?,
            cause,
            error: text("error")?.unwrap_or_default(),
            ago: seconds("died_ago")?,
            history: text("dead_history")?,
        }),
        None => None,
    };
    let waiting = match text("state")? {
        Some(state) => Some(WaitingFound {
            state,
            attempts: count("attempts")?,
            last_error: text("last_error")?,
            history: text("history")?,
            due_in: seconds("due_in")?,
            worker: text("claimed_by")?,
            behind: row.try_get("behind")?,
        }),
        None => None,
    };
    let found = ReceptionFound {
        consumer: text("consumer")?.unwrap_or_default(),
        key: text("key")?,
        waiting,
        dead,
        discarded: text("discarded")?,
        received_ago: seconds("received_ago")?,
    };
    Ok(found.told())
}
