//! The queue of a key: of the messages with one key, only the first may be taken (docs/decisions/0038).

use std::collections::HashSet;
use std::time::Duration;

use postroom::Consumer;
use rusqlite::{Connection, Row, params};

use crate::connect::NOW;

/// After this time a take looks again at what was put off, although a trigger should have made it due before.
const PUT_OFF: Duration = Duration::from_secs(600);
/// Most messages that one take puts off; it holds the write lock of the file meanwhile.
const PUT_OFF_AT_ONCE: usize = 10_000;

/// Seqs of up to `max` messages that can be taken, the longest due first. What is found behind others of its key is put off; a trigger
/// makes it due when its turn has come (migration 15), so that a long queue is read once and not by each take. What was claimed `claims_max` times is
/// for the next take to bury.
pub(super) fn due(
    tx: &Connection,
    consumer: &Consumer,
    max: usize,
    claims_max: u32,
) -> Result<Vec<i64>, rusqlite::Error> {
    let sql = format!(
        "select m.seq, m.due_ms, m.ordering_key,
                m.state = 'early' and exists (
                    select 1 from postroom_inbox_messages e
                     where e.consumer = m.consumer and e.aggregate_type = m.aggregate_type and e.aggregate_id = m.aggregate_id
                       and e.aggregate_version < m.aggregate_version and e.state = 'early' and e.due_ms <= {NOW}),
                m.state = 'ready' and exists (
                    select 1 from postroom_inbox_messages e
                     where e.consumer = m.consumer and e.ordering_key = m.ordering_key and e.state <> 'early' and e.seq < m.seq),
                m.state = 'ready' and exists (
                    select 1 from postroom_inbox_messages e
                     where e.consumer = m.consumer and e.ordering_key = m.ordering_key and e.state = 'claimed')
           from postroom_inbox_messages m
          where m.consumer = ?1 and m.put_off = 0 and m.due_ms <= {NOW} and (m.due_ms, m.seq) > (?2, ?3)
            and (m.state <> 'claimed' or m.claims < ?5)
          order by m.due_ms, m.seq limit ?4"
    );
    let again = format!(
        "update postroom_inbox_messages set put_off = 0 where consumer = ?1 and put_off = 1 and due_ms <= {NOW}"
    );
    tx.prepare_cached(&again)?.execute([consumer.as_str()])?;
    let put_off = format!(
        "update postroom_inbox_messages set put_off = 1, due_ms = {NOW} + {}, waits_since_ms = {NOW} where seq = ?1",
        PUT_OFF.as_millis()
    );
    let at_once = max.saturating_mul(2).clamp(16, 1000);
    let (mut chosen, mut keys, mut put_off_now, mut after) = (Vec::new(), HashSet::new(), 0, (i64::MIN, i64::MIN));
    while chosen.len() < max && put_off_now < PUT_OFF_AT_ONCE {
        let found: Vec<Due> = tx
            .prepare_cached(&sql)?
            .query_map(params![consumer.as_str(), after.0, after.1, at_once as i64, claims_max], Due::of)?
            .collect::<Result<_, _>>()?;
        for due in &found {
            after = (due.due_ms, due.seq);
            if due.behind {
                tx.prepare_cached(&put_off)?.execute([due.seq])?;
                put_off_now += 1;
            }
            // An early message whose window ended together with one of its key waits for the next take.
            if chosen.len() < max && due.can_go && due.key.as_ref().is_none_or(|key| keys.insert(key.clone())) {
                chosen.push(due.seq);
            }
        }
        if found.len() < at_once {
            break;
        }
    }
    Ok(chosen)
}

/// A message whose time has come.
struct Due {
    seq: i64,
    due_ms: i64,
    key: Option<String>,
    can_go: bool,
    /// Others of its key are before it.
    behind: bool,
}

impl Due {
    fn of(row: &Row<'_>) -> Result<Self, rusqlite::Error> {
        let (above_another, behind, held): (bool, bool, bool) = (row.get(3)?, row.get(4)?, row.get(5)?);
        let can_go = !above_another && !behind && !held;
        Ok(Self { seq: row.get(0)?, due_ms: row.get(1)?, key: row.get(2)?, can_go, behind })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use postroom::{Cause, Message, Settle, Waiting};

    use super::*;
    use crate::inbox::receiving::{keep, settle, take};

    const QUEUED: usize = 20_000;
    /// Thousands of steps of SQLite's machine that a take of one message may need; to look at each message of the queue takes hundreds.
    const STEPS_MAX: u64 = 10;

    /// A file with an inbox, and the thousands of steps that statements took there.
    struct Counted {
        connection: Connection,
        consumer: Consumer,
        steps: Arc<AtomicU64>,
    }

    impl Counted {
        fn take(&self, max: usize) -> (Vec<Waiting>, u64) {
            self.steps.store(0, Ordering::Relaxed);
            let taken = take(&self.connection, &self.consumer, "worker", max, Duration::from_secs(60), 3).unwrap();
            (taken, self.steps.load(Ordering::Relaxed))
        }

        fn settle(&self, waiting: &Waiting, how: &Settle) -> u64 {
            self.steps.store(0, Ordering::Relaxed);
            assert!(settle(&self.connection, &self.consumer, waiting.message.id, waiting.claim, how).unwrap());
            self.steps.load(Ordering::Relaxed)
        }

        fn keep(&self, key: &str) {
            let message = Message::new("orders", "order.placed", "x").key(key);
            keep(&self.connection, &self.consumer, &message, "ready", None, Duration::ZERO).unwrap();
        }
    }

    fn queued() -> Counted {
        let mut connection = Connection::open_in_memory().unwrap();
        crate::migrate::migrate(&mut connection).unwrap();
        let steps = Arc::new(AtomicU64::new(0));
        let counted = steps.clone();
        let count = move || {
            counted.fetch_add(1, Ordering::Relaxed);
            false
        };
        connection.progress_handler(1000, Some(count)).unwrap();
        let counted = Counted { connection, consumer: Consumer::new("totals").unwrap(), steps };
        (0..QUEUED).for_each(|_| counted.keep("hot"));
        counted
    }

    #[test]
    fn a_long_queue_is_read_once_and_not_by_each_take() {
        let inbox = queued();
        let (first, _) = inbox.take(1);
        while inbox.take(1).1 > STEPS_MAX {}
        let mut head = first.into_iter().next().unwrap();
        let failed = || "no".to_owned();
        let ways = [
            Settle::Done,
            Settle::Retry { after: Duration::ZERO, attempts: 1, error: failed() },
            Settle::Dead { attempts: 1, cause: Cause::Permanent, error: failed() },
            Settle::GivenBack,
            Settle::Early { window: Duration::from_secs(60) },
            Settle::Done,
        ];
        for how in ways {
            let settled = inbox.settle(&head, &how);
            let (next, took) = inbox.take(10);
            assert_eq!(next.len(), 1, "behind one that was settled as {how:?}");
            let stays = matches!(how, Settle::Retry { .. } | Settle::GivenBack);
            assert_eq!(next[0].message.id == head.message.id, stays, "{how:?}");
            assert!(settled < STEPS_MAX && took < STEPS_MAX, "{how:?}: {settled} and {took} thousand steps");
            head = next.into_iter().next().unwrap();
        }
        // Other keys do not wait.
        inbox.keep("other");
        let (other, took) = inbox.take(10);
        assert_eq!((other.len(), other[0].message.key.as_deref()), (1, Some("other")));
        assert!(took < STEPS_MAX, "{took} thousand steps");
    }

    /// As a program leaves it that knew nothing of turns.
    #[test]
    fn what_nobody_made_due_is_looked_at_again() {
        let inbox = queued();
        let (first, _) = inbox.take(1);
        while inbox.take(1).1 > STEPS_MAX {}
        inbox.connection.execute_batch("drop trigger postroom_inbox_left").unwrap();
        inbox.settle(&first[0], &Settle::Done);
        assert!(inbox.take(1).0.is_empty());
        inbox.connection.execute("update postroom_inbox_messages set due_ms = due_ms - 600000", []).unwrap();
        assert_eq!(inbox.take(1).0.len(), 1);
    }
}
