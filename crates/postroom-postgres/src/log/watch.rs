//! What a relay sees of its route and of other relays between two renewals. No I/O.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use postroom::{OnDead, Order, StoreError};
use tokio_postgres::Row;

use crate::log::row::get;

/// A clock may be slewed by so much between two looks without having gone back.
const CLOCK_SLACK: Duration = Duration::from_secs(2);

/// What was being written when the clock went back is committed within this time.
const DOUBT: Duration = Duration::from_secs(60);
const RESET_EVERY: Duration = Duration::from_secs(5);
/// The clock may go forth and back between two looks.
const IN_DOUBT_EVERY: Duration = Duration::from_secs(300);

/// What one look found.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    /// The rows are those of this database and this outbox.
    pub at_home: bool,
    /// The sequence is below a position.
    pub sequence_behind: bool,
    pub backend: i32,
    pub registered: bool,
    pub order: Option<Order>,
    pub on_dead: Option<OnDead>,
    /// Tables are much larger than the planner knows.
    pub statistics_stale: bool,
    /// Relays that were silent for a lease, as this process saw it.
    pub silent: Vec<String>,
    /// Whose positions they are: it changes when somebody has put them right.
    pub incarnation: i64,
    clock_ms: i64,
    others: Vec<Other>,
}

/// A relay that holds lanes, and how its lease stands in the database.
#[derive(Debug, Clone)]
struct Other {
    owner: String,
    until: String,
    lease: Option<Duration>,
}

impl Seen {
    pub fn of(row: &Row) -> Result<Self, StoreError> {
        let owners: Vec<String> = get(row, "owners")?;
        let leases: Vec<String> = get(row, "leases")?;
        let lease_ms: Vec<Option<i64>> = get(row, "lease_ms")?;
        let others = owners.into_iter().zip(leases).zip(lease_ms).map(|((owner, until), lease_ms)| {
            let lease = lease_ms.and_then(|ms| u64::try_from(ms).ok()).map(Duration::from_millis);
            Other { owner, until, lease }
        });
        Ok(Self {
            at_home: get(row, "at_home")?,
            sequence_behind: get(row, "sequence_behind")?,
            backend: get(row, "backend")?,
            registered: get(row, "registered")?,
            order: get::<Option<&str>>(row, "ordering")?.and_then(Order::of),
            on_dead: get::<Option<&str>>(row, "on_dead")?.and_then(OnDead::of),
            statistics_stale: get(row, "statistics_stale")?,
            silent: Vec::new(),
            incarnation: get(row, "incarnation")?,
            clock_ms: get(row, "clock_ms")?,
            others: others.collect(),
        })
    }
}

/// What a look said that the one before it did not.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct News {
    /// Waits may have been noted with a clock that was ahead: the clock went back, or the tables are others than before, such as a
    /// backup of another time, or nobody knows, because this is the first look, or the last reset was long ago.
    pub reset_waits: bool,
    pub silent: Vec<String>,
}

/// Remembers the looks before.
#[derive(Debug)]
pub(crate) struct Watch {
    lease: Duration,
    clock: Option<(i64, Instant)>,
    incarnation: Option<i64>,
    /// Since when waits are in doubt, and when they were reset since then.
    in_doubt: Option<(Instant, Option<Instant>)>,
    /// When waits were reset last.
    reset: Option<Instant>,
    /// How each other relay's lease stood, and since when it has stood so.
    others: HashMap<String, (String, Instant)>,
}

impl Watch {
    pub fn new(lease: Duration) -> Self {
        Self { lease, clock: None, incarnation: None, in_doubt: None, reset: None, others: HashMap::new() }
    }

    pub fn look(&mut self, seen: &Seen) -> News {
        self.look_at(seen, Instant::now())
    }

    fn look_at(&mut self, seen: &Seen, now: Instant) -> News {
        let clock_went_back = self.clock.is_none_or(|(clock_ms, at)| {
            let passed = i64::try_from(now.saturating_duration_since(at).as_millis()).unwrap_or(i64::MAX);
            seen.clock_ms < clock_ms.saturating_add(passed) - CLOCK_SLACK.as_millis() as i64
        });
        self.clock = Some((seen.clock_ms, now));
        let other_tables = self.incarnation.replace(seen.incarnation) != Some(seen.incarnation);
        if clock_went_back || other_tables {
            self.in_doubt = Some((now, None));
        }
        let reset_waits = match &mut self.in_doubt {
            None if self.reset.is_some_and(|reset| now.saturating_duration_since(reset) >= IN_DOUBT_EVERY) => true,
            Some((since, _)) if now.saturating_duration_since(*since) > DOUBT => {
                self.in_doubt = None;
                false
            }
            Some((_, last)) if last.is_none_or(|last| now.saturating_duration_since(last) >= RESET_EVERY) => {
                *last = Some(now);
                true
            }
            _ => false,
        };
        if reset_waits {
            self.reset = Some(now);
        }
        self.others.retain(|owner, _| seen.others.iter().any(|other| other.owner == *owner));
        let mut silent = Vec::new();
        for other in &seen.others {
            let known = self.others.entry(other.owner.clone()).or_insert_with(|| (other.until.clone(), now));
            if known.0 != other.until {
                *known = (other.until.clone(), now);
            } else if now.saturating_duration_since(known.1) > other.lease.unwrap_or(self.lease) {
                silent.push(other.owner.clone());
            }
        }
        News { reset_waits, silent }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(clock_ms: i64, until: &str) -> Seen {
        let lease = Some(Duration::from_secs(5));
        Seen {
            at_home: true,
            sequence_behind: false,
            backend: 1,
            registered: true,
            order: None,
            on_dead: None,
            statistics_stale: false,
            silent: Vec::new(),
            incarnation: 1,
            clock_ms,
            others: vec![Other { owner: "other".to_owned(), until: until.to_owned(), lease }],
        }
    }

    #[test]
    fn a_relay_is_silent_when_its_lease_has_not_changed_for_its_length() {
        let mut watch = Watch::new(Duration::from_secs(1));
        let began = Instant::now();
        let mut look = |seconds: u64, until: &str| {
            watch.look_at(&seen(seconds as i64 * 1000, until), began + Duration::from_secs(seconds)).silent.len()
        };
        assert_eq!([look(0, "a"), look(4, "b"), look(8, "b"), look(9, "b")], [0, 0, 0, 0]);
        assert_eq!(look(10, "b"), 1, "five seconds and more since it changed");
        assert_eq!(look(11, "c"), 0, "it was only slow");
    }

    #[test]
    fn a_clock_that_goes_back_is_noticed_and_one_that_is_slewed_is_not() {
        let mut watch = Watch::new(Duration::from_secs(1));
        let began = Instant::now();
        let mut look = |seconds: u64, clock_ms| {
            watch.look_at(&seen(clock_ms, ""), began + Duration::from_secs(seconds)).reset_waits
        };
        assert!(look(0, 1_000_000), "nobody knows what was before");
        assert!(!look(1, 1_000_900));
        assert!(look(2, 1_000_900 - 3_600_000));
        assert!(!look(3, 1_001_900 - 3_600_000));
        assert!(look(7, 1_005_900 - 3_600_000), "something may have been committed meanwhile");
        assert!(!look(63, 1_061_900 - 3_600_000), "and now no more");
        assert!(!look(306, 1_304_900 - 3_600_000));
        assert!(look(307, 1_305_900 - 3_600_000), "it may have gone forth and back meanwhile");
        assert!(!look(308, 1_306_900 - 3_600_000));
    }

    #[test]
    fn waits_of_tables_that_were_restored_are_in_doubt() {
        let mut watch = Watch::new(Duration::from_secs(1));
        let began = Instant::now();
        let mut look = |seconds: u64, incarnation| {
            let seen = Seen { incarnation, ..seen(seconds as i64 * 1000, "") };
            watch.look_at(&seen, began + Duration::from_secs(seconds)).reset_waits
        };
        assert!(look(0, 1));
        assert!(!look(100, 1) && !look(101, 1));
        assert!(look(102, 2));
    }
}
