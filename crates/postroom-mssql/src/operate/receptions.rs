//! One message at the receiving end, for an operator who asks why it has no effect.

use postroom::{DeadFound, MessageId, Reception, ReceptionFound, WaitingFound};
use tiberius::Row;
use tiberius::error::Error;

use crate::conn::Conn;
use crate::desk::Failed;
use crate::sql::{get, named, seconds_since};

/// Where a message is at every consumer whose inbox is in this database.
pub(crate) async fn receptions(conn: &mut Conn, id: MessageId) -> Result<Vec<Reception>, Failed> {
    // There is no index by the id alone.
    let sql = format!(
        "select case when m.id is null then 0 else 1 end as waits, m.state, coalesce(m.ordering_key, d.ordering_key) as ordering_key,
                coalesce(m.attempts, 0) as attempts, m.last_error, m.history, m.claimed_by,
                coalesce(-({}), 0) as due_in,
                (select top (1) h.id from postroom_inbox_messages h
                  where h.consumer = m.consumer and h.key_hash = m.key_hash and h.seq < m.seq
                    and m.state <> 'claimed' and h.state in ('ready', 'claimed') order by h.seq) as behind,
                coalesce(d.attempts, 0) as dead_attempts, d.cause, d.error, d.history as dead_history,
                coalesce({}, 0) as died_ago, coalesce({}, 0) as received_ago
           from (select 1 as one) x
           left join postroom_inbox i on i.consumer = @consumer and i.message_id = @id
           left join postroom_inbox_messages m on m.consumer = @consumer and m.id = @id
           left join postroom_dead_consume d on d.consumer = @consumer and d.id = @id
          where m.id is not null or d.id is not null or i.message_id is not null",
        seconds_since("m.due_at"),
        seconds_since("d.died_at"),
        seconds_since("i.processed_at")
    );
    let id = id.to_string();
    let mut found = Vec::new();
    for consumer in super::consumers(conn, &["inbox", "inbox_messages", "dead_consume"]).await? {
        let rows = conn.rows(&sql, named! { "consumer" => &consumer, "id" => &id }).await?;
        found.extend(rows.into_iter().next().map(|row| (consumer, row)));
    }
    let sql = "select top (1) concat(a.actor, N': ', a.reason) from postroom_audit a
                where a.action = 'inbox.discard' and charindex(@id, a.message_ids) > 0 order by a.id desc";
    let discarded: Option<String> = match found.is_empty() {
        true => None,
        false => conn.first(sql, named! { "id" => format!("\"{id}\"") }).await?,
    };
    let told = |(consumer, row)| reception(consumer, &row, discarded.clone());
    Ok(found.into_iter().map(told).collect::<Result<_, _>>()?)
}

fn reception(consumer: String, row: &Row, discarded: Option<String>) -> Result<Reception, Error> {
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
