//! What operators see of keys that wait, what they do about them, and where one message is.

use postroom::{Deed, KeyDeed, MessageId, StoreError, WaitingKey, Whereabouts};
use rusqlite::{Connection, Row, TransactionBehavior, params};

use crate::connect::store_error;
use crate::dead::audit;
use crate::record::promote;
use crate::source::NOW;

/// Keys that wait, longest first, at most `limit`.
pub fn waiting_keys(connection: &Connection, route: Option<&str>, limit: i64) -> Result<Vec<WaitingKey>, StoreError> {
    // A parked row does not note when it was parked; the message's own time stands for it.
    let sql = format!(
        "with waiting as (
             select route, ordering_key, count(*) as messages, min(seq) as first from postroom_parked
              where state <> 'scheduled' and ordering_key is not null and (?1 is null or route = ?1)
              group by route, ordering_key),
         blocked as (
             select route, ordering_key, min(blocked_ms) as since, max(seq) as seq, max(reason) as reason
               from postroom_blocked_keys where ?1 is null or route = ?1 group by route, ordering_key),
         keys as (select route, ordering_key from waiting union select route, ordering_key from blocked)
         select k.route, k.ordering_key,
                case when b.route is null then 'retry' when b.seq > 0 then 'dead' else 'parked' end,
                coalesce((select d.id from postroom_dead_letters d where d.route = b.route and d.seq = b.seq), h.id),
                coalesce(w.messages, 0), coalesce(h.attempts, 0),
                ({NOW} - coalesce(b.since, h.occurred_ms)) / 1000.0,
                case when b.route is null then max(h.due_ms - {NOW}, 0) / 1000.0 end, coalesce(b.reason, h.last_error)
           from keys k
           left join waiting w on w.route = k.route and w.ordering_key = k.ordering_key
           left join blocked b on b.route = k.route and b.ordering_key = k.ordering_key
           left join postroom_parked h on h.route = w.route and h.seq = w.first
          order by 7 desc limit ?2"
    );
    let read = |row: &Row<'_>| {
        Ok(WaitingKey {
            route: row.get(0)?,
            key: row.get(1)?,
            waits_for: row.get(2)?,
            head: row.get(3)?,
            messages: row.get(4)?,
            attempts: row.get(5)?,
            since_seconds: row.get(6)?,
            retry_in_seconds: row.get(7)?,
            reason: row.get(8)?,
        })
    };
    connection
        .prepare(&sql)
        .and_then(|mut statement| statement.query_map(params![route, limit], read)?.collect())
        .map_err(|error| store_error("read the waiting keys", error))
}

/// Parks, unparks or skips a key of a route, with an audit row in the same transaction. False: there was nothing to do.
pub fn act_on_key(
    connection: &mut Connection,
    route: &str,
    key: &str,
    what: KeyDeed,
    deed: &Deed,
) -> Result<bool, StoreError> {
    let failed = |error| store_error("act on a key; nothing was changed", error);
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(failed)?;
    let known: bool = tx
        .query_row("select exists (select 1 from postroom_routes where name = ?1)", [route], |row| row.get(0))
        .map_err(failed)?;
    if !known {
        return Err(StoreError::Refused {
            what: "act on a key",
            source: format!("there is no route {route:?}; `postroom status` lists them").into(),
        });
    }
    let changed = match what {
        KeyDeed::Park => {
            let sql = "insert into postroom_blocked_keys (route, ordering_key, seq, reason) values (?1, ?2, 0, ?3)
                       on conflict do nothing";
            tx.execute(sql, params![route, key, deed.reason])
        }
        KeyDeed::Unpark => {
            let sql = "delete from postroom_blocked_keys where route = ?1 and ordering_key = ?2 and seq = 0";
            tx.execute(sql, params![route, key])
        }
        KeyDeed::Skip => {
            let sql = "delete from postroom_blocked_keys where route = ?1 and ordering_key = ?2 and seq > 0";
            tx.execute(sql, params![route, key])
        }
    };
    if changed.map_err(failed)? == 0 {
        return Ok(false);
    }
    promote(&tx, route, key).map_err(failed)?;
    let conditions = serde_json::json!({ "route": route, "key": key }).to_string();
    audit(&tx, deed, what.as_str(), &conditions, &[]).map_err(failed)?;
    tx.commit().map_err(failed)?;
    Ok(true)
}

/// Where a message is on every route that has run.
pub fn whereabouts(connection: &Connection, id: MessageId) -> Result<Vec<Whereabouts>, StoreError> {
    let sql = format!(
        "with found as (
             select seq, topic, coalesce(key, aggregate_id) as key, visible_ms from postroom_outbox
              where replace(lower(id), '-', '') = ?1)
         select r.name, f.key, f.seq <= l.position_seq, p.state, p.attempts, p.last_error, max(p.due_ms - {NOW}, 0) / 1000.0,
                p.history, d.attempts, d.cause, d.error, d.history,
                (select b.reason from postroom_blocked_keys b where b.route = r.name and b.ordering_key = f.key limit 1),
                case when l.expires_ms > {NOW} then l.owner end,
                (select count(*) from postroom_outbox e where e.seq > l.position_seq and e.seq < f.seq),
                (select h.id from postroom_parked h where h.route = r.name and h.ordering_key = f.key
                    and h.state <> 'scheduled' and h.seq < f.seq order by h.seq limit 1),
                exists (select 1 from json_each(r.topics) t
                         where f.topic = t.value or (substr(t.value, -1) = '*'
                               and substr(f.topic, 1, length(t.value) - 1) = substr(t.value, 1, length(t.value) - 1)))
           from found f join postroom_routes r join postroom_lanes l on l.route = r.name
           left join postroom_parked p on p.route = r.name and p.seq = f.seq
           left join postroom_dead_letters d on d.route = r.name and d.seq = f.seq
          order by r.name"
    );
    connection
        .prepare(&sql)
        .and_then(|mut statement| {
            let id = id.to_string().replace('-', "");
            statement.query_map([id], whereabouts_of)?.collect()
        })
        .map_err(|error| store_error("look for a message", error))
}

fn whereabouts_of(row: &Row<'_>) -> Result<Whereabouts, rusqlite::Error> {
    let mut because = Vec::new();
    let (mut attempts, mut history) = (0, Vec::new());
    let parked: Option<String> = row.get(3)?;
    let cause: Option<String> = row.get(9)?;
    let blocked: Option<String> = row.get(12)?;
    let read = |text: Option<String>| serde_json::from_str(&text.unwrap_or_default()).unwrap_or_default();
    let state = if let Some(cause) = cause {
        (attempts, history) = (row.get(8)?, read(row.get(11)?));
        because.push(format!("{cause} after {attempts} attempts: {}", row.get::<_, String>(10)?));
        because.push("`postroom dead retry` sends it again, `postroom dead discard` gives it up".to_owned());
        "dead"
    } else if let Some(parked) = parked {
        (attempts, history) = (row.get(4)?, read(row.get(7)?));
        let behind: Option<String> = row.get(15)?;
        match behind {
            Some(head) => because.push(format!("it queues up behind message {head} of its key")),
            None => because.push(format!("it is due in {:.1} s", row.get::<_, f64>(6)?)),
        }
        because.extend(row.get::<_, Option<String>>(5)?.map(|error| format!("its last error: {error}")));
        match parked.as_str() {
            _ if blocked.is_some() => "blocked",
            "scheduled" => "scheduled",
            "queued" => "queued",
            _ => "retry",
        }
    } else if !row.get::<_, bool>(16)? {
        because.push("the route does not take its topic".to_owned());
        "not_taken"
    } else if row.get::<_, bool>(2)? {
        because.push("the broker confirmed it, or it was discarded by an operator (see the audit table)".to_owned());
        "acked"
    } else {
        because.push(format!("{} messages are before it", row.get::<_, i64>(14)?));
        "waiting"
    };
    if matches!(state, "waiting" | "retry" | "queued" | "scheduled" | "blocked") {
        because.extend(blocked.map(|reason| format!("its key is blocked ({reason})")));
        because.push(match row.get::<_, Option<String>>(13)? {
            Some(owner) => format!("relay {owner} holds its lane"),
            None => "no relay holds its lane: start one with `postroom run`".to_owned(),
        });
    }
    Ok(Whereabouts { route: row.get(0)?, state, key: row.get(1)?, attempts, because, history })
}
