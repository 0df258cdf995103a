//! What is written about deliveries: positions, parked messages, dead letters. Everything is conditional on the epoch.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use postroom::lane_book::Move;
use postroom::{Change, Entry, ParkedState, StoreError, crash_point};
use tokio_postgres::types::ToSql;
use uuid::Uuid;

use crate::link::Link;
use crate::log::position::Position;

/// Moves positions; returns the lanes that were still ours.
pub(crate) async fn positions(
    link: &Link,
    (generation, route, owner): (u64, &str, &str),
    moves: &[Move<Position>],
) -> Result<HashSet<u16>, StoreError> {
    let lanes: Vec<i16> = moves.iter().map(|to| to.lane as i16).collect();
    let epochs: Vec<i64> = moves.iter().map(|to| to.epoch).collect();
    let snapshots: Vec<&str> = moves.iter().map(|to| to.position.snapshot.as_ref()).collect();
    let seqs: Vec<i64> = moves.iter().map(|to| to.position.seq).collect();
    let floors: Vec<i64> = moves.iter().map(|to| to.position.floor).collect();
    let catch_ups: Vec<Option<&str>> =
        moves.iter().map(|to| to.position.catch_up.as_ref().map(|c| c.snapshot.as_ref())).collect();
    let catch_up_seqs: Vec<Option<i64>> = moves.iter().map(|to| to.position.catch_up.as_ref().map(|c| c.seq)).collect();
    let rows = link
        .call(generation, "write positions", async |session| {
            let statement = session.prepared(include_str!("sql/settle_positions.sql")).await?;
            let parameters: [&(dyn ToSql + Sync); 9] =
                [&route, &lanes, &epochs, &snapshots, &seqs, &floors, &catch_ups, &catch_up_seqs, &owner];
            session.client.query(&statement, &parameters).await
        })
        .await?;
    Ok(rows.iter().map(|row| row.get::<_, i16>(0) as u16).collect())
}

/// Outcomes that leave a trace in the tables of trouble. Written in one durable transaction, before any position passes.
#[derive(Default)]
pub(crate) struct Record {
    epochs: BTreeMap<u16, i64>,
    /// From the outbox into the parked ones.
    park: Vec<Park>,
    /// Parked, failed again.
    park_again: Vec<Park>,
    /// From the outbox into the dead letters.
    bury: Vec<Bury>,
    /// From the parked ones into the dead letters.
    bury_parked: Vec<Bury>,
    /// Parked and done: seq, lane.
    done_parked: Vec<(i64, u16)>,
    /// Keys that wait for an operator.
    block: Vec<Block>,
    /// Keys whose head may have changed.
    keys: HashSet<String>,
}

struct Park {
    seq: i64,
    lane: u16,
    id: Uuid,
    state: &'static str,
    attempts: i32,
    wait_ms: i64,
    error: Option<String>,
}

struct Bury {
    seq: i64,
    lane: u16,
    id: Uuid,
    attempts: i32,
    cause: &'static str,
    error: String,
}

/// What is not ASCII as `?`: for databases whose encoding is not Unicode.
fn ascii(text: &str) -> String {
    text.chars().map(|c| if c.is_ascii() { c } else { '?' }).collect()
}

struct Block {
    seq: i64,
    lane: u16,
    key: String,
    reason: String,
}

impl Record {
    /// Sorts what is to be written.
    pub fn of(entries: Vec<Entry>) -> Self {
        let mut record = Self::default();
        for Entry { lane, epoch, seq, id, key, parked, change } in entries {
            let id = *id.as_uuid();
            let number = |attempts: u32| i32::try_from(attempts).unwrap_or(i32::MAX);
            let wait_ms = |after: Duration| i64::try_from(after.as_millis()).unwrap_or(i64::MAX);
            match change {
                Change::Unpark => record.done_parked.push((seq, lane)),
                Change::Park { state, attempts, after, error } => {
                    let (attempts, wait_ms, state) = (number(attempts), wait_ms(after), state.as_str());
                    record.park.push(Park { seq, lane, id, state, attempts, wait_ms, error });
                }
                Change::ParkAgain { attempts, after, error } => {
                    let (attempts, wait_ms, state) = (number(attempts), wait_ms(after), ParkedState::Retry.as_str());
                    record.park_again.push(Park { seq, lane, id, state, attempts, wait_ms, error: Some(error) });
                }
                Change::Bury { attempts, cause, error, blocks_key } => {
                    if let Some(key) = key.clone().filter(|_| blocks_key) {
                        record.block.push(Block { seq, lane, key, reason: format!("dead: {error}") });
                    }
                    let row = Bury { seq, lane, id, attempts: number(attempts), cause: cause.as_str(), error };
                    if parked { record.bury_parked.push(row) } else { record.bury.push(row) }
                }
            }
            record.epochs.insert(lane, epoch);
            record.keys.extend(key);
        }
        record
    }

    pub fn is_empty(&self) -> bool {
        self.epochs.is_empty()
    }

    pub fn lanes(&self) -> impl Iterator<Item = (u16, i64)> + '_ {
        self.epochs.iter().map(|(lane, epoch)| (*lane, *epoch))
    }

    /// Whether parked messages may have become claimable at once.
    pub fn frees_parked(&self) -> bool {
        !self.done_parked.is_empty() || !self.bury_parked.is_empty() || !self.park.is_empty()
    }

    /// Writes it for the lanes that are still ours, and returns those. Repeating it changes nothing more.
    pub async fn write(
        &self,
        link: &Link,
        (generation, route, owner): (u64, &str, &str),
        ordered: bool,
    ) -> Result<HashSet<u16>, StoreError> {
        link.call(generation, "record parked messages and dead letters", async |session| {
            let unicode = session.holds_unicode;
            // An error text that the database cannot hold must not keep the outcome from being recorded.
            let shown = |text: &str| if unicode { text.to_owned() } else { ascii(text) };
            let tx = session.client.transaction().await?;
            let (lanes, epochs): (Vec<i16>, Vec<i64>) = self.lanes().map(|(l, e)| (l as i16, e)).unzip();
            let held = tx.query(include_str!("sql/lock_lanes.sql"), &[&route, &lanes, &epochs, &owner]).await?;
            let held: HashSet<u16> = held.iter().map(|row| row.get::<_, i16>(0) as u16).collect();

            let rows: Vec<_> = self.park.iter().filter(|row| held.contains(&row.lane)).collect();
            if !rows.is_empty() {
                let seqs: Vec<i64> = rows.iter().map(|row| row.seq).collect();
                let lanes: Vec<i16> = rows.iter().map(|row| row.lane as i16).collect();
                let states: Vec<&str> = rows.iter().map(|row| row.state).collect();
                let attempts: Vec<i32> = rows.iter().map(|row| row.attempts).collect();
                let waits: Vec<i64> = rows.iter().map(|row| row.wait_ms).collect();
                let errors: Vec<Option<String>> = rows.iter().map(|row| row.error.as_deref().map(shown)).collect();
                let ids: Vec<Uuid> = rows.iter().map(|row| row.id).collect();
                let sql = include_str!("sql/park.sql");
                let parameters: [&(dyn ToSql + Sync); 9] =
                    [&route, &seqs, &lanes, &states, &attempts, &waits, &errors, &ordered, &ids];
                tx.execute(sql, &parameters).await?;
            }
            let rows: Vec<_> = self.park_again.iter().filter(|row| held.contains(&row.lane)).collect();
            if !rows.is_empty() {
                let seqs: Vec<i64> = rows.iter().map(|row| row.seq).collect();
                let attempts: Vec<i32> = rows.iter().map(|row| row.attempts).collect();
                let waits: Vec<i64> = rows.iter().map(|row| row.wait_ms).collect();
                let errors: Vec<Option<String>> = rows.iter().map(|row| row.error.as_deref().map(shown)).collect();
                tx.execute(include_str!("sql/park_again.sql"), &[&route, &seqs, &attempts, &waits, &errors]).await?;
            }
            for (rows, parked) in [(&self.bury, false), (&self.bury_parked, true)] {
                let rows: Vec<_> = rows.iter().filter(|row| held.contains(&row.lane)).collect();
                if rows.is_empty() {
                    continue;
                }
                let seqs: Vec<i64> = rows.iter().map(|row| row.seq).collect();
                let lanes: Vec<i16> = rows.iter().map(|row| row.lane as i16).collect();
                let attempts: Vec<i32> = rows.iter().map(|row| row.attempts).collect();
                let causes: Vec<&str> = rows.iter().map(|row| row.cause).collect();
                let errors: Vec<String> = rows.iter().map(|row| shown(&row.error)).collect();
                if parked {
                    let sql = include_str!("sql/bury_parked.sql");
                    tx.execute(sql, &[&route, &seqs, &attempts, &causes, &errors]).await?;
                } else {
                    let sql = include_str!("sql/bury.sql");
                    let ids: Vec<Uuid> = rows.iter().map(|row| row.id).collect();
                    tx.execute(sql, &[&route, &seqs, &lanes, &attempts, &causes, &errors, &ids]).await?;
                }
            }
            let rows: Vec<_> = self.block.iter().filter(|row| held.contains(&row.lane)).collect();
            if !rows.is_empty() {
                let seqs: Vec<i64> = rows.iter().map(|row| row.seq).collect();
                let lanes: Vec<i16> = rows.iter().map(|row| row.lane as i16).collect();
                let keys: Vec<&str> = rows.iter().map(|row| row.key.as_str()).collect();
                let reasons: Vec<String> = rows.iter().map(|row| shown(&row.reason)).collect();
                tx.execute(include_str!("sql/block.sql"), &[&route, &seqs, &lanes, &keys, &reasons]).await?;
            }
            let done: Vec<i64> = self.done_parked.iter().filter(|row| held.contains(&row.1)).map(|row| row.0).collect();
            if !done.is_empty() {
                let sql = "delete from postroom.parked where route = $1 and seq = any ($2::bigint[])";
                tx.execute(sql, &[&route, &done]).await?;
            }
            let keys: Vec<&str> = self.keys.iter().map(String::as_str).collect();
            if !keys.is_empty() {
                tx.execute(include_str!("sql/promote.sql"), &[&route, &keys]).await?;
            }
            crash_point("record.before_commit");
            tx.commit().await?;
            crash_point("record.after_commit");
            Ok(held)
        })
        .await
    }
}
