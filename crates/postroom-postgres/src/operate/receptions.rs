//! One message at the receiving end, for an operator who asks why it has no effect.

use postroom::{BoxError, FailedAttempt, MessageId, ReceivedPlace, Reception, StoreError, lasting};
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
    let seconds = |column| Ok(lasting(row.try_get::<_, Option<f64>>(column)?.unwrap_or_default()));
    let history = |column| -> Result<Vec<FailedAttempt>, tokio_postgres::Error> {
        Ok(serde_json::from_str(&text(column)?.unwrap_or_default()).unwrap_or_default())
    };
    let (consumer, key) = (text("consumer")?.unwrap_or_default(), text("key")?);
    let mut because = Vec::new();
    if let Some(cause) = text("cause")? {
        let attempts = row.try_get("dead_attempts")?;
        let error = text("error")?.unwrap_or_default();
        because.push(format!("it died {} ago, {cause} after {attempts} attempts: {error}", seconds("died_ago")?));
        because.push(
            "`postroom dead retry --side in` gives it back to its consumer, `postroom dead discard --side in` deletes it"
                .to_owned(),
        );
        let (state, history) = (ReceivedPlace::Dead, history("dead_history")?);
        return Ok(Reception { consumer, state, key, attempts, because, history });
    }
    let Some(state) = text("state")? else {
        because.push(match text("discarded")? {
            Some(discarded) => format!("it was dead, and an operator discarded it ({discarded})"),
            None => {
                format!("it was claimed {} ago, in the transaction that contains its effect", seconds("claimed_ago")?)
            }
        });
        let (state, attempts) = (ReceivedPlace::Claimed, 0);
        return Ok(Reception { consumer, state, key, attempts, because, history: Vec::new() });
    };
    let attempts: i64 = row.try_get::<_, Option<i64>>("attempts")?.unwrap_or_default();
    let behind: Option<String> = row.try_get("behind")?;
    let state = match (state.as_str(), behind) {
        ("new" | "behind", Some(head)) => {
            because.push(format!("it waits behind message {head} of its key"));
            ReceivedPlace::Behind
        }
        ("claimed", _) => {
            let worker = text("claimed_by")?.unwrap_or_else(|| "a worker".to_owned());
            because.push(format!(
                "{worker} is handling it; the claim expires in {} unless it is renewed",
                seconds("due_in")?
            ));
            ReceivedPlace::InWork
        }
        ("early" | "aside", _) => {
            because.push(format!(
                "an earlier version of its aggregate is missing; it waits for that version for at most {}",
                seconds("due_in")?
            ));
            ReceivedPlace::Early
        }
        _ if attempts > 0 => {
            because.push(format!("it is tried again in {} (attempts so far: {attempts})", seconds("due_in")?));
            ReceivedPlace::Retry
        }
        _ => {
            because.push("no worker has taken it yet".to_owned());
            ReceivedPlace::Waiting
        }
    };
    because.extend(text("last_error")?.map(|error| format!("its last error: {error}")));
    Ok(Reception { consumer, state, key, attempts, because, history: history("history")? })
}
