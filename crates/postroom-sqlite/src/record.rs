//! What is written about deliveries that met trouble: parked messages and dead letters.

use std::collections::HashSet;

use postroom::{MessageId, Outcome};
use rusqlite::{Transaction, params};

use crate::source::NOW;

pub(crate) const COPIED: &str = "id, topic, type, payload, key, routing_key, content_type, headers, tenant_id, aggregate_type, \
                      aggregate_id, aggregate_version, occurred_ms";

/// Outcomes that leave a trace, written in one transaction before the position passes them.
#[derive(Default)]
pub(crate) struct Record {
    steps: Vec<(i64, MessageId, bool, Option<String>, Outcome)>,
    keys: HashSet<String>,
}

impl Record {
    pub fn add(&mut self, (seq, id): (i64, MessageId), key: Option<&str>, parked: bool, outcome: &Outcome) {
        let leaves_a_trace = match outcome {
            Outcome::Release => false,
            Outcome::Done => parked,
            Outcome::Queue | Outcome::Schedule => !parked,
            Outcome::Retry { .. } | Outcome::Dead { .. } => true,
        };
        if leaves_a_trace {
            self.steps.push((seq, id, parked, key.map(str::to_owned), outcome.clone()));
            self.keys.extend(key.map(str::to_owned));
        }
    }

    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// `ordered`: whether a message waits for others of its key.
    pub fn write(&self, tx: &Transaction<'_>, route: &str, ordered: bool) -> Result<(), rusqlite::Error> {
        for (seq, id, parked, key, outcome) in &self.steps {
            // The id tells a message from another one that got the same seq after the outbox was emptied.
            let (seq, id) = (*seq, id.as_uuid().simple().to_string());
            match outcome {
                Outcome::Retry { after, attempts, error } if *parked => {
                    let sql = format!(
                        "update postroom_parked set state = 'retry', attempts = ?3, due_ms = {NOW} + ?4,
                                waits_since_ms = {NOW}, last_error = ?5,
                                history = {}
                          where route = ?1 and seq = ?2",
                        noted("?3", "?5")
                    );
                    tx.execute(&sql, params![route, seq, attempts, after.as_millis() as i64, error])?;
                }
                Outcome::Retry { after, attempts, error } => {
                    park(tx, route, (seq, &id), ordered, "retry", *attempts, after.as_millis() as i64, Some(error))?;
                }
                Outcome::Queue => park(tx, route, (seq, &id), ordered, "queued", 0, 0, None)?,
                Outcome::Schedule => park(tx, route, (seq, &id), ordered, "scheduled", 0, 0, None)?,
                Outcome::Dead { attempts, cause, error, blocks_key } => {
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
                Outcome::Done => unpark(tx, route, seq)?,
                Outcome::Release => {}
            }
        }
        for key in &self.keys {
            promote(tx, route, key)?;
        }
        Ok(())
    }
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

#[expect(clippy::too_many_arguments, reason = "the columns of one row")]
fn park(
    tx: &Transaction<'_>,
    route: &str,
    (seq, id): (i64, &str),
    ordered: bool,
    state: &str,
    attempts: u32,
    wait_ms: i64,
    error: Option<&String>,
) -> Result<(), rusqlite::Error> {
    let sql = format!(
        "insert into postroom_parked (route, seq, lane, ordering_key, state, attempts, due_ms, waits_since_ms, last_error,
                                      history, {COPIED})
         select ?1, seq, 0, case when ?7 then coalesce(key, aggregate_id) end, ?3, ?4,
                case ?3 when 'scheduled' then coalesce(visible_ms, {NOW}) else {NOW} + ?5 end, {NOW}, ?6,
                case when ?6 is null then '[]' else {} end, {COPIED}
           from postroom_outbox where seq = ?2 and {}
             on conflict (route, seq) do nothing",
        noted("?4", "?6").replace("history", "'[]'"),
        same("?8")
    );
    tx.execute(&sql, params![route, seq, state, attempts, wait_ms, error, ordered, id]).map(drop)
}

fn unpark(tx: &Transaction<'_>, route: &str, seq: i64) -> Result<(), rusqlite::Error> {
    tx.execute("delete from postroom_parked where route = ?1 and seq = ?2", params![route, seq]).map(drop)
}

/// The first message left of a key becomes its head, so that it can be claimed.
pub(crate) fn promote(tx: &Transaction<'_>, route: &str, key: &str) -> Result<(), rusqlite::Error> {
    let sql = format!(
        "update postroom_parked set state = 'retry', due_ms = {NOW}
          where route = ?1 and state = 'queued'
            and seq = (select min(seq) from postroom_parked
                        where route = ?1 and ordering_key = ?2 and state <> 'scheduled')"
    );
    tx.prepare_cached(&sql)?.execute(params![route, key]).map(drop)
}
