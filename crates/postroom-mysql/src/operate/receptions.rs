//! One message at the receiving end, for an operator who asks why it has no effect.

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Error, Row, params};
use postroom::{DeadFound, MessageId, Reception, ReceptionFound, WaitingFound};

use crate::desk::Failed;
use crate::log::get;

/// Where a message is at every consumer whose inbox is in this database.
pub(crate) async fn receptions(conn: &mut Conn, id: MessageId) -> Result<Vec<Reception>, Failed> {
    // There is no index by the id alone.
    let sql = "select m.id is not null as waits, m.state, coalesce(m.ordering_key, d.ordering_key) as ordering_key,
                      coalesce(m.attempts, 0) as attempts, m.last_error, m.history, m.claimed_by,
                      coalesce(timestampdiff(microsecond, utc_timestamp(6), m.due_at), 0) / 1e6 as due_in,
                      (select h.id from postroom_inbox_messages h
                        where h.consumer = m.consumer and h.key_hash = m.key_hash and h.ordering_key = m.ordering_key and h.seq < m.seq
                          and m.state <> 'claimed' and h.state in ('ready', 'claimed') order by h.seq limit 1) as behind,
                      coalesce(d.attempts, 0) as dead_attempts, d.cause, d.error, d.history as dead_history,
                      coalesce(timestampdiff(microsecond, d.died_at, utc_timestamp(6)), 0) / 1e6 as died_ago,
                      coalesce(timestampdiff(microsecond, i.processed_at, utc_timestamp(6)), 0) / 1e6 as received_ago
                 from (select 1 as one) x
                 left join postroom_inbox i on i.consumer = :consumer and i.message_id = :id
                 left join postroom_inbox_messages m on m.consumer = :consumer and m.id = :id
                 left join postroom_dead_consume d on d.consumer = :consumer and d.id = :id
                where m.id is not null or d.id is not null or i.message_id is not null";
    let id = id.to_string();
    let mut found = Vec::new();
    for consumer in super::consumers(conn, &["inbox", "inbox_messages", "dead_consume"]).await? {
        let row: Option<Row> = conn.exec_first(sql, params! { "consumer" => &consumer, "id" => &id }).await?;
        found.extend(row.map(|row| (consumer, row)));
    }
    let sql = "select concat(a.actor, ': ', a.reason) from postroom_audit a
                where a.action = 'inbox.discard' and instr(a.message_ids, ?) > 0 order by a.id desc limit 1";
    let discarded: Option<String> =
        if found.is_empty() { None } else { conn.exec_first(sql, (format!("\"{id}\""),)).await? };
    let told = |(consumer, row)| reception(consumer, row, discarded.clone());
    Ok(found.into_iter().map(told).collect::<Result<_, _>>()?)
}

fn reception(consumer: String, mut row: Row, discarded: Option<String>) -> Result<Reception, Error> {
    let row = &mut row;
    let dead = match get::<Option<String>>(row, "cause")? {
        Some(cause) => Some(DeadFound {
            attempts: get(row, "dead_attempts")?,
            cause,
            error: get(row, "error")?,
            ago: get(row, "died_ago")?,
            history: get(row, "dead_history")?,
        }),
        None => None,
    };
    let waiting = if get::<bool>(row, "waits")? {
        Some(WaitingFound {
            state: get(row, "state")?,
            attempts: get(row, "attempts")?,
            last_error: get(row, "last_error")?,
            history: get(row, "history")?,
            due_in: get(row, "due_in")?,
            worker: get(row, "claimed_by")?,
            behind: get(row, "behind")?,
        })
    } else {
        None
    };
    let found = ReceptionFound {
        consumer,
        key: get(row, "ordering_key")?,
        waiting,
        dead,
        discarded,
        received_ago: get(row, "received_ago")?,
    };
    Ok(found.told())
}
