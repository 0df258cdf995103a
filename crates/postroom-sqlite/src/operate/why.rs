//! One message's life, for an operator who asks why it has not arrived.

use postroom::{MessageId, ParkedState, Place, StoreError, Whereabouts, attempts_of, lasting};
use rusqlite::{Connection, Row};

use crate::connect::{NOW, store_error};
use crate::text::{text, text_or_null};

/// Where a message is on every route that has run.
pub(crate) fn whereabouts(connection: &Connection, id: MessageId) -> Result<Vec<Whereabouts>, StoreError> {
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
                               and substr(f.topic, 1, length(t.value) - 1) = substr(t.value, 1, length(t.value) - 1))),
                (select a.actor || ': ' || a.reason from postroom_audit a, json_each(a.message_ids) i
                  where a.action = 'dead.discard' and replace(lower(i.value), '-', '') = ?1
                    and (json_extract(a.filter, '$.route') = r.name or (json_extract(a.filter, '$.route') is null
                         and not exists (select 1 from postroom_routes s where s.name <> r.name)))
                  order by a.rowid desc limit 1),
                exists (select 1 from postroom_audit a, json_each(a.message_ids) i
                         where a.action = 'dead.discard' and replace(lower(i.value), '-', '') = ?1
                           and json_extract(a.filter, '$.route') is null),
                y.sink_error, y.sink_blocked, ({NOW} - y.sink_down_since_ms) / 1000.0,
                exists (select 1 from postroom_route_revisions v, json_each(v.topics) t
                         where v.route = r.name
                           and (f.topic = t.value or (substr(t.value, -1) = '*'
                                and substr(f.topic, 1, length(t.value) - 1) = substr(t.value, 1, length(t.value) - 1)))),
                exists (select 1 from postroom_route_revisions v
                         where v.route = r.name
                           and not exists (select 1 from json_each(v.topics) t
                                            where f.topic = t.value or (substr(t.value, -1) = '*'
                                                  and substr(f.topic, 1, length(t.value) - 1) = substr(t.value, 1, length(t.value) - 1)))),
                exists (select 1 from postroom_archive_restored a where a.seq = f.seq and replace(lower(a.id), '-', '') = ?1),
                (select ({NOW} - min(b.blocked_ms)) / 1000.0 from postroom_blocked_keys b where b.route = r.name and b.ordering_key = f.key)
           from found f join postroom_routes r join postroom_lanes l on l.route = r.name
           left join postroom_relays y on y.route = r.name and y.owner = l.owner
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
    let blocked = text_or_null(row, 12)?;
    let read = |text: Option<String>| serde_json::from_str(&text.unwrap_or_default()).unwrap_or_default();
    let state = if let Some(cause) = cause {
        (attempts, history) = (row.get(8)?, read(text_or_null(row, 11)?));
        because.push(format!("{cause} after {}: {}", attempts_of(attempts), text(row, 10)?));
        because.push("`postroom dead retry` sends it again, `postroom dead discard` deletes it".to_owned());
        Place::Dead
    } else if let Some(parked) = parked {
        (attempts, history) = (row.get(4)?, read(text_or_null(row, 7)?));
        let behind: Option<String> = row.get(15)?;
        match behind {
            Some(head) => because.push(format!("it waits behind message {head} of its key")),
            None => because.push(format!("it is due in {}", lasting(row.get::<_, f64>(6)?))),
        }
        because.extend(text_or_null(row, 5)?.map(|error| format!("its last error: {error}")));
        match ParkedState::of(&parked) {
            _ if blocked.is_some() => Place::Blocked,
            Some(ParkedState::Scheduled) => Place::Scheduled,
            Some(ParkedState::Queued) => Place::Queued,
            Some(ParkedState::Retry) | None => Place::Retry,
        }
    } else if let Some(discarded) = text_or_null(row, 17)? {
        because.push(format!("it was dead, and an operator discarded it ({discarded})"));
        Place::Discarded
    } else if row.get::<_, bool>(2)? && ((!row.get::<_, bool>(16)? && row.get(22)?) || (row.get(16)? && row.get(23)?)) {
        because.push(
            "the route has passed it: the broker confirmed it, or the route did not take its topic at that time \
             (postroom_route_revisions has the dates)"
                .to_owned(),
        );
        Place::Passed
    } else if !row.get::<_, bool>(16)? {
        because.push("the route does not take its topic".to_owned());
        Place::NotTaken
    } else if row.get::<_, bool>(2)? && row.get::<_, bool>(24)? {
        because.push(postroom::CAME_BACK.to_owned());
        Place::Passed
    } else if row.get::<_, bool>(2)? && row.get::<_, bool>(18)? {
        because.push(
            "the broker confirmed it, or it was dead on this route and an operator discarded it (see the audit table)"
                .to_owned(),
        );
        Place::Passed
    } else if row.get::<_, bool>(2)? {
        because.push("the broker confirmed it".to_owned());
        Place::Acked
    } else {
        let held = row.get::<_, Option<String>>(13)?.is_some();
        because.push(match row.get::<_, i64>(14)? {
            0 if held => "it is the next message, or its relay has already claimed it".to_owned(),
            0 => "it is the next message".to_owned(),
            1 => "1 message is before it".to_owned(),
            before => format!("{before} messages are before it"),
        });
        Place::Waiting
    };
    if matches!(state, Place::Waiting | Place::Retry | Place::Queued | Place::Scheduled | Place::Blocked) {
        let since = row.get::<_, Option<f64>>(25)?.map_or_else(String::new, lasting);
        because.extend(blocked.map(|reason| {
            format!("its key has been blocked for {since} ({reason}); `postroom keys list` shows it, `keys unpark` or `keys skip` lets it continue")
        }));
        because.push(match row.get::<_, Option<String>>(13)? {
            Some(owner) => format!("relay {owner} holds its lane"),
            None => "no relay holds its lane: start one with `postroom run`".to_owned(),
        });
        if let (Some(error), Some(_)) = (text_or_null(row, 19)?, row.get::<_, Option<String>>(13)?) {
            let what =
                if row.get::<_, Option<bool>>(20)? == Some(true) { "has accepted nothing" } else { "has been down" };
            let since = row.get::<_, Option<f64>>(21)?.unwrap_or_default();
            because.push(format!("that relay's sink {what} for {}: {error}", lasting(since)));
        }
    }
    Ok(Whereabouts { route: row.get(0)?, state, key: text_or_null(row, 1)?, attempts, because, history })
}
