//! What is written about deliveries that met trouble: parked messages and dead letters.

use std::collections::HashSet;

use postroom::Outcome;
use rusqlite::{Transaction, params};

use crate::source::NOW;

pub(crate) const COPIED: &str = "id, topic, type, payload, key, routing_key, content_type, headers, tenant_id, aggregate_type, \
                      aggregate_id, aggregate_version, occurred_ms";

/// Outcomes that leave a trace, written in one transaction before the position passes them.
#[derive(Default)]
pub(crate) struct Record {
    steps: Vec<(i64, bool, Outcome)>,
    keys: HashSet<String>,
}

impl Record {
    pub fn add(&mut self, seq: i64, key: Option<&str>, parked: bool, outcome: &Outcome) {
        let leaves_a_trace = match outcome {
            Outcome::Release => false,
            Outcome::Done => parked,
            Outcome::Queue | Outcome::Schedule => !parked,
            Outcome::Retry { .. } | Outcome::Dead { .. } => true,
        };
        if leaves_a_trace {
            self.steps.push((seq, parked, outcome.clone()));
            self.keys.extend(key.map(str::to_owned));
        }
    }

    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    pub fn write(&self, tx: &Transaction<'_>, route: &str) -> Result<(), rusqlite::Error> {
        for (seq, parked, outcome) in &self.steps {
            match outcome {
                Outcome::Retry { after, attempts, error } if *parked => {
                    let sql = format!(
                        "update postroom_parked set state = 'retry', attempts = ?3, due_ms = {NOW} + ?4, last_error = ?5
                          where route = ?1 and seq = ?2"
                    );
                    tx.execute(&sql, params![route, seq, attempts, after.as_millis() as i64, error])?;
                }
                Outcome::Retry { after, attempts, error } => {
                    park(tx, route, *seq, "retry", *attempts, after.as_millis() as i64, Some(error))?;
                }
                Outcome::Queue => park(tx, route, *seq, "queued", 0, 0, None)?,
                Outcome::Schedule => park(tx, route, *seq, "scheduled", 0, 0, None)?,
                Outcome::Dead { attempts, cause, error } => {
                    let from = if *parked { "postroom_parked" } else { "postroom_outbox" };
                    let sql = format!(
                        "insert into postroom_dead_letters (route, seq, lane, attempts, cause, error, {COPIED})
                         select ?1, seq, 0, ?3, ?4, ?5, {COPIED} from {from} where seq = ?2 {}
                             on conflict (route, seq) do nothing",
                        if *parked { "and route = ?1" } else { "" }
                    );
                    tx.execute(&sql, params![route, seq, attempts, cause.as_str(), error])?;
                    unpark(tx, route, *seq)?;
                }
                Outcome::Done => unpark(tx, route, *seq)?,
                Outcome::Release => {}
            }
        }
        for key in &self.keys {
            promote(tx, route, key)?;
        }
        Ok(())
    }
}

fn park(
    tx: &Transaction<'_>,
    route: &str,
    seq: i64,
    state: &str,
    attempts: u32,
    wait_ms: i64,
    error: Option<&String>,
) -> Result<(), rusqlite::Error> {
    let sql = format!(
        "insert into postroom_parked (route, seq, lane, ordering_key, state, attempts, due_ms, last_error, {COPIED})
         select ?1, seq, 0, coalesce(key, aggregate_id), ?3, ?4,
                case ?3 when 'scheduled' then coalesce(visible_ms, {NOW}) else {NOW} + ?5 end, ?6, {COPIED}
           from postroom_outbox where seq = ?2
             on conflict (route, seq) do nothing"
    );
    tx.execute(&sql, params![route, seq, state, attempts, wait_ms, error]).map(drop)
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
