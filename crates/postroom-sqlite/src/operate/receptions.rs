//! One message at the receiving end, for an operator who asks why it has no effect.

use postroom::{MessageId, ReceivedPlace, Reception, StoreError, lasting};
use rusqlite::{Connection, Row};

use crate::connect::{NOW, store_error};

/// Where a message is at every consumer whose inbox is in this file.
pub(crate) fn receptions(connection: &Connection, id: MessageId) -> Result<Vec<Reception>, StoreError> {
    let sql = format!(
        "with consumers as (select consumer from postroom_inbox where message_id = ?1
                            union select consumer from postroom_inbox_messages where id = ?1
                            union select consumer from postroom_dead_consume where id = ?1)
         select c.consumer, m.state, coalesce(m.ordering_key, d.ordering_key), m.attempts, m.last_error, m.history,
                max(m.due_ms - {NOW}, 0) / 1000.0, m.claimed_by,
                (select h.id from postroom_inbox_messages h
                  where h.consumer = m.consumer and h.ordering_key = m.ordering_key and h.seq < m.seq
                    and h.state in ('ready', 'claimed') order by h.seq limit 1),
                d.attempts, d.cause, d.error, ({NOW} - d.died_ms) / 1000.0, d.history,
                (select ({NOW} - i.processed_ms) / 1000.0 from postroom_inbox i where i.consumer = c.consumer and i.message_id = ?1),
                (select a.actor || ': ' || a.reason from postroom_audit a, json_each(a.message_ids) i
                  where a.action = 'inbox.discard' and i.value = ?1 order by a.id desc limit 1)
           from consumers c
           left join postroom_inbox_messages m on m.consumer = c.consumer and m.id = ?1
           left join postroom_dead_consume d on d.consumer = c.consumer and d.id = ?1
          order by c.consumer"
    );
    connection
        .prepare(&sql)
        .and_then(|mut statement| statement.query_map([id.to_string()], reception)?.collect())
        .map_err(|error| store_error("look for a received message", error))
}

fn reception(row: &Row<'_>) -> Result<Reception, rusqlite::Error> {
    let seconds = |column| Ok::<_, rusqlite::Error>(lasting(row.get::<_, Option<f64>>(column)?.unwrap_or_default()));
    let history = |column| {
        let text: Option<String> = row.get(column)?;
        Ok::<_, rusqlite::Error>(serde_json::from_str(&text.unwrap_or_default()).unwrap_or_default())
    };
    let (consumer, key) = (row.get(0)?, row.get(2)?);
    let mut because = Vec::new();
    if let Some(cause) = row.get::<_, Option<String>>(10)? {
        let (attempts, error): (i64, String) = (row.get(9)?, row.get(11)?);
        because.push(format!("it died {} ago, {cause} after {attempts} attempts: {error}", seconds(12)?));
        because.push(
            "`postroom dead retry --side in` gives it back to its consumer, `postroom dead discard --side in` deletes it"
                .to_owned(),
        );
        return Ok(Reception { consumer, state: ReceivedPlace::Dead, key, attempts, because, history: history(13)? });
    }
    let Some(state) = row.get::<_, Option<String>>(1)? else {
        because.push(match row.get::<_, Option<String>>(15)? {
            Some(discarded) => format!("it was dead, and an operator discarded it ({discarded})"),
            None => format!("it was claimed {} ago, in the transaction that contains its effect", seconds(14)?),
        });
        let state = ReceivedPlace::Claimed;
        return Ok(Reception { consumer, state, key, attempts: 0, because, history: Vec::new() });
    };
    let attempts: i64 = row.get::<_, Option<i64>>(3)?.unwrap_or_default();
    let behind: Option<String> = row.get(8)?;
    let state = match (state.as_str(), behind) {
        ("claimed", _) => {
            let worker = row.get::<_, Option<String>>(7)?.unwrap_or_else(|| "a worker".to_owned());
            because.push(format!("{worker} is handling it; the claim expires in {} unless it is renewed", seconds(6)?));
            ReceivedPlace::InWork
        }
        ("early", _) => {
            because.push(format!(
                "an earlier version of its aggregate is missing; it waits for that version for at most {}",
                seconds(6)?
            ));
            ReceivedPlace::Early
        }
        (_, Some(head)) => {
            because.push(format!("it waits behind message {head} of its key"));
            ReceivedPlace::Behind
        }
        _ if attempts > 0 => {
            because.push(format!("it is tried again in {} (attempts so far: {attempts})", seconds(6)?));
            ReceivedPlace::Retry
        }
        _ => {
            because.push("no worker has taken it yet".to_owned());
            ReceivedPlace::Waiting
        }
    };
    because.extend(row.get::<_, Option<String>>(4)?.map(|error| format!("its last error: {error}")));
    Ok(Reception { consumer, state, key, attempts, because, history: history(5)? })
}
