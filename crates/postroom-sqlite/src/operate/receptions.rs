//! One message at the receiving end, for an operator who asks why it has no effect.

use postroom::{DeadFound, MessageId, Reception, ReceptionFound, StoreError, WaitingFound};
use rusqlite::{Connection, Row};

use crate::connect::{NOW, store_error};
use crate::text::{text, text_or_null};

/// Where a message is at every consumer whose inbox is in this file.
pub(crate) fn receptions(connection: &Connection, id: MessageId) -> Result<Vec<Reception>, StoreError> {
    let sql = format!(
        "with consumers as (select consumer from postroom_inbox where message_id = ?1
                            union select consumer from postroom_inbox_messages where id = ?1
                            union select consumer from postroom_dead_consume where id = ?1)
         select c.consumer, m.state, coalesce(m.ordering_key, d.ordering_key), m.attempts, m.last_error, m.history,
                (m.due_ms - {NOW}) / 1000.0, m.claimed_by,
                (select h.id from postroom_inbox_messages h
                  where h.consumer = m.consumer and h.ordering_key = m.ordering_key and h.seq < m.seq
                    and m.state <> 'claimed' and h.state in ('ready', 'claimed') order by h.seq limit 1),
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
    let seconds = |column| Ok::<_, rusqlite::Error>(row.get::<_, Option<f64>>(column)?.unwrap_or_default());
    let count = |column| Ok::<_, rusqlite::Error>(row.get::<_, Option<i64>>(column)?.unwrap_or_default());
    let dead = match text_or_null(row, 10)? {
        Some(cause) => {
            let (error, history) = (text(row, 11)?, text_or_null(row, 13)?);
            Some(DeadFound { attempts: count(9)?, cause, error, ago: seconds(12)?, history })
        }
        None => None,
    };
    let waiting = match text_or_null(row, 1)? {
        Some(state) => Some(WaitingFound {
            state,
            attempts: count(3)?,
            last_error: text_or_null(row, 4)?,
            history: text_or_null(row, 5)?,
            due_in: seconds(6)?,
            worker: text_or_null(row, 7)?,
            behind: row.get(8)?,
        }),
        None => None,
    };
    let found = ReceptionFound {
        consumer: text(row, 0)?,
        key: text_or_null(row, 2)?,
        waiting,
        dead,
        discarded: text_or_null(row, 15)?,
        received_ago: seconds(14)?,
    };
    Ok(found.told())
}
