//! What is written about deliveries that met trouble: parked messages and dead letters.

use std::collections::HashSet;
use std::time::Duration;

use postroom::{Change, Entry};
use rusqlite::{Transaction, params};

use crate::connect::NOW;

pub(crate) const COPIED: &str = "id, topic, type, payload, key, routing_key, content_type, headers, tenant_id, aggregate_type, \
                      aggregate_id, aggregate_version, occurred_ms";

/// Written in one transaction before the position passes them. `ordered`: whether a message waits for others of its key.
pub(crate) fn write(
    tx: &Transaction<'_>,
    entries: &[Entry],
    route: &str,
    ordered: bool,
) -> Result<(), rusqlite::Error> {
    for Entry { seq, id, key, parked, change, .. } in entries {
        // The id tells a message from another one that got the same seq after the outbox was emptied.
        let (seq, id) = (*seq, id.as_uuid().simple().to_string());
        match change {
            Change::ParkAgain { after, attempts, error } => {
                let sql = format!(
                    "update postroom_parked set state = 'retry', attempts = ?3, due_ms = {NOW} + ?4,
                            waits_since_ms = {NOW}, last_error = ?5,
                            history = {}
                      where route = ?1 and seq = ?2",
                    noted("?3", "?5")
                );
                tx.execute(&sql, params![route, seq, attempts, milliseconds(*after), error])?;
            }
            Change::Park { state, after, attempts, error } => {
                let sql = format!(
                    "insert into postroom_parked (route, seq, lane, ordering_key, state, attempts, due_ms, waits_since_ms,
                                                  last_error, history, {COPIED})
                     select ?1, seq, 0, case when ?7 then coalesce(key, aggregate_id) end, ?3, ?4,
                            case ?3 when 'scheduled' then coalesce(visible_ms, {NOW}) else {NOW} + ?5 end, {NOW}, ?6,
                            case when ?6 is null then '[]' else {} end, {COPIED}
                       from postroom_outbox where seq = ?2 and {}
                         on conflict (route, seq) do nothing",
                    noted("?4", "?6").replace("history", "'[]'"),
                    same("?8")
                );
                let (state, wait) = (state.as_str(), milliseconds(*after));
                tx.execute(&sql, params![route, seq, state, attempts, wait, error, ordered, id])?;
            }
            Change::Bury { attempts, cause, error, blocks_key } => {
                let from = if *parked { "postroom_parked" } else { "postroom_outbox" };
                let sql = format!(
                    "insert into postroom_dead_letters (route, seq, lane, attempts, cause, error, history, {COPIED})
                     select ?1, seq, 0, ?3, ?4, ?5, {}, {COPIED} from {from} where seq = ?2 and {} {}
                         on conflict (route, seq) do nothing",
                    if *parked { noted("?3", "?5") } else { noted("?3", "?5").replace("history", "'[]'") },
                    same("?6"),
                    if *parked { "and route = ?1" } else { "" }
                );
                tx.execute(&sql, params![route, seq, attempts, cause.as_str(), error, id])?;
                unpark(tx, route, seq)?;
                if let Some(key) = key.as_ref().filter(|_| *blocks_key) {
                    let sql = "insert into postroom_blocked_keys (route, ordering_key, seq, reason)
                               values (?1, ?2, ?3, ?4) on conflict do nothing";
                    tx.execute(sql, params![route, key, seq, format!("dead: {error}")])?;
                }
            }
            Change::Unpark => unpark(tx, route, seq)?,
        }
    }
    let keys: HashSet<&String> = entries.iter().filter_map(|entry| entry.key.as_ref()).collect();
    for key in keys {
        promote(tx, route, key)?;
    }
    Ok(())
}

fn milliseconds(wait: Duration) -> i64 {
    i64::try_from(wait.as_millis()).unwrap_or(i64::MAX)
}

/// The history with one failure more, at most the last 32; in SQL, of the parameters for attempt and error.
pub(crate) fn noted(attempt: &str, error: &str) -> String {
    format!(
        "json_insert(case when json_array_length(history) >= 32 then json_remove(history, '$[0]') else history end, '$[#]',
             json_object('at', strftime('%Y-%m-%dT%H:%M:%fZ', 'now'), 'attempt', {attempt}, 'error', {error}))"
    )
}

/// Whether a row is the message with the id of a parameter; writers hyphenate as they like.
fn same(id: &str) -> String {
    format!("lower(replace(id, '-', '')) = {id}")
}

fn unpark(tx: &Transaction<'_>, route: &str, seq: i64) -> Result<(), rusqlite::Error> {
    tx.execute("delete from postroom_parked where route = ?1 and seq = ?2", params![route, seq]).map(drop)
}

/// The first message left of a key becomes its head, so that it can be claimed.
pub(crate) fn promote(tx: &Transaction<'_>, route: &str, key: &str) -> Result<(), rusqlite::Error> {
    let sql = format!(
        "update postroom_parked set state = 'retry', due_ms = {NOW}, waits_since_ms = {NOW}
          where route = ?1 and state = 'queued'
            and seq = (select min(seq) from postroom_parked
                        where route = ?1 and ordering_key = ?2 and state <> 'scheduled')"
    );
    tx.prepare_cached(&sql)?.execute(params![route, key]).map(drop)
}
