//! Counts what happens to relays, fillers and receivers of this process, and how long it takes.

use std::collections::HashMap;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use postroom::{Cause, Happened, Observed, Observer, Removed};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use super::labels::{OfInbox, OfRoute, named};

/// Upper bounds in seconds of how long a call to the store or the broker took.
const CALLS: [f64; 15] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];
/// Upper bounds in seconds of how old a message was.
const AGES: [f64; 17] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0];
/// The database's clock has not been compared with ours yet.
const UNKNOWN: i64 = i64::MIN;

/// Makes a histogram with these bounds.
#[derive(Clone)]
struct Within(&'static [f64]);

impl MetricConstructor<Histogram> for Within {
    fn new_metric(&self) -> Histogram {
        Histogram::new(self.0.iter().copied())
    }
}

type Timed<L> = Family<L, Histogram, Within>;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Died {
    route: String,
    cause: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Ended {
    consumer: String,
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FailedAt {
    route: String,
    what: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct InboxFailedAt {
    consumer: String,
    what: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfPart {
    part: &'static str,
}

/// Observes relays, fillers and receivers. Clones share everything.
#[derive(Clone)]
pub struct Meter {
    claimed: Family<OfRoute, Counter>,
    acked: Family<OfRoute, Counter>,
    rejected: Family<OfRoute, Counter>,
    skipped: Family<OfRoute, Counter>,
    unknown: Family<OfRoute, Counter>,
    unavailable: Family<OfRoute, Counter>,
    dead: Family<Died, Counter>,
    fenced: Family<OfRoute, Counter>,
    lanes_lost: Family<OfRoute, Counter>,
    store_failures: Family<FailedAt, Counter>,
    inbox_store_failures: Family<InboxFailedAt, Counter>,
    claim: Timed<OfRoute>,
    publish: Timed<OfRoute>,
    settle: Timed<OfRoute>,
    renew: Timed<OfRoute>,
    delivery: Timed<OfRoute>,
    received: Family<Ended, Counter>,
    receive: Timed<OfInbox>,
    effect: Timed<OfInbox>,
    removed: Family<OfPart, Counter>,
    archived_messages: Counter,
    archived_segments: Counter,
    archive_failures: Counter,
    /// What to add to our clock to get the database's, in microseconds.
    clock: Arc<AtomicI64>,
    renewed: Arc<Mutex<HashMap<(bool, String), Instant>>>,
}

impl std::fmt::Debug for Meter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Meter").finish_non_exhaustive()
    }
}

impl Default for Meter {
    fn default() -> Self {
        let calls = || Family::new_with_constructor(Within(&CALLS));
        Self {
            claimed: Family::default(),
            acked: Family::default(),
            rejected: Family::default(),
            skipped: Family::default(),
            unknown: Family::default(),
            unavailable: Family::default(),
            dead: Family::default(),
            fenced: Family::default(),
            lanes_lost: Family::default(),
            store_failures: Family::default(),
            inbox_store_failures: Family::default(),
            claim: calls(),
            publish: calls(),
            settle: calls(),
            renew: calls(),
            delivery: Family::new_with_constructor(Within(&AGES)),
            received: Family::default(),
            receive: Family::new_with_constructor(Within(&CALLS)),
            effect: Family::new_with_constructor(Within(&AGES)),
            removed: Family::default(),
            archived_messages: Counter::default(),
            archived_segments: Counter::default(),
            archive_failures: Counter::default(),
            clock: Arc::new(AtomicI64::new(UNKNOWN)),
            renewed: Arc::default(),
        }
    }
}

/// Time since the last renewal of each route (true) and inbox (false) of this process.
#[derive(Debug, Clone)]
pub(crate) struct LeaseAges(Arc<Mutex<HashMap<(bool, String), Instant>>>);

impl LeaseAges {
    fn locked(&self) -> MutexGuard<'_, HashMap<(bool, String), Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn of_route(&self, route: &str) -> Option<Duration> {
        self.locked().get(&(true, route.to_owned())).map(Instant::elapsed)
    }

    pub(crate) fn of_inbox(&self, consumer: &str) -> Option<Duration> {
        self.locked().get(&(false, consumer.to_owned())).map(Instant::elapsed)
    }
}

impl Meter {
    /// Nothing has happened yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Begins the counters of these routes and inboxes at zero: from a series that begins with its first event, nobody sees that event.
    pub fn expect(&self, routes: &[String], consumers: &[String]) {
        for route in routes.iter().map(|route| named(route)) {
            let of = OfRoute { route: route.clone() };
            for family in [
                &self.claimed,
                &self.acked,
                &self.rejected,
                &self.skipped,
                &self.unknown,
                &self.unavailable,
                &self.fenced,
                &self.lanes_lost,
            ] {
                drop(family.get_or_create(&of));
            }
            for cause in Cause::ALL {
                drop(self.dead.get_or_create(&Died { route: route.clone(), cause: cause.as_str() }));
            }
            for what in ["renew the lease", "claim messages", "settle messages"] {
                drop(self.store_failures.get_or_create(&FailedAt { route: route.clone(), what }));
            }
        }
        for consumer in consumers.iter().map(|consumer| named(consumer)) {
            for outcome in ["kept", "duplicate", "dead"] {
                drop(self.received.get_or_create(&Ended { consumer: consumer.clone(), outcome }));
            }
        }
    }

    /// What retention of this process has removed.
    pub fn removed(&self, removed: &Removed) {
        let parts =
            [("outbox", removed.outbox), ("dead", removed.dead), ("inbox", removed.inbox), ("audit", removed.audit)];
        for (part, rows) in parts {
            self.removed.get_or_create(&OfPart { part }).inc_by(rows);
        }
    }

    /// So many segments went into the archive, read back, and so many messages with them from the outbox.
    pub fn archived(&self, segments: u64, messages: u64) {
        self.archived_segments.inc_by(segments);
        self.archived_messages.inc_by(messages);
    }

    /// A pass over what is to be archived failed.
    pub fn archive_failed(&self) {
        self.archive_failures.inc();
    }

    pub(crate) fn lease_ages(&self) -> LeaseAges {
        LeaseAges(self.renewed.clone())
    }

    /// What the database's clock showed at this moment of ours.
    pub(crate) fn database_clock(&self, theirs: SystemTime, ours: SystemTime) {
        let ahead = match theirs.duration_since(ours) {
            Ok(ahead) => i64::try_from(ahead.as_micros()).unwrap_or(i64::MAX),
            Err(behind) => i64::try_from(behind.duration().as_micros()).map_or(i64::MIN + 1, |behind| -behind),
        };
        self.clock.store(ahead, Ordering::Relaxed);
    }

    /// By the database's clock; none: it was not compared with ours yet.
    fn now(&self) -> Option<SystemTime> {
        let ahead = match self.clock.load(Ordering::Relaxed) {
            UNKNOWN => return None,
            ahead => ahead,
        };
        let by = Duration::from_micros(ahead.unsigned_abs());
        let now = SystemTime::now();
        if ahead < 0 { now.checked_sub(by) } else { now.checked_add(by) }
    }

    pub(super) fn register(&self, registry: &mut Registry) {
        let r = registry;
        self.register_retention(r);
        r.register("claimed_messages", "Messages claimed from the store by this process", self.claimed.clone());
        r.register("acked_messages", "Messages that the broker confirmed to this process", self.acked.clone());
        r.register(
            "rejected_messages",
            "Publications that the broker rejected, also those that use up no attempt",
            self.rejected.clone(),
        );
        r.register("skipped_messages", "Messages that the sink is configured not to send", self.skipped.clone());
        r.register(
            "unknown_messages",
            "Publications of which it is not known whether the broker has the message; they are repeated",
            self.unknown.clone(),
        );
        r.register(
            "unavailable_batches",
            "Batches that ended without a verdict because the broker was away",
            self.unavailable.clone(),
        );
        r.register("dead_messages", "Messages that became dead letters, by cause", self.dead.clone());
        r.register(
            "fenced_messages",
            "Outcomes that were not recorded because another relay has the lane",
            self.fenced.clone(),
        );
        r.register(
            "lanes_lost",
            "Lanes that this process lost, because another relay took them over or its lease expired",
            self.lanes_lost.clone(),
        );
        r.register("store_failures", "Calls to the store that failed, and are made again", self.store_failures.clone());
        let help = "Calls to the store for an inbox that failed, and are made again";
        r.register("inbox_store_failures", help, self.inbox_store_failures.clone());
        let timed = |r: &mut Registry, name, help, family: &Timed<OfRoute>| {
            r.register_with_unit(name, help, Unit::Seconds, family.clone());
        };
        timed(r, "claim_duration", "Time of a claim", &self.claim);
        timed(r, "publish_duration", "Time from handing a batch to the sink to its last verdict", &self.publish);
        timed(r, "settle_duration", "Time to record the outcomes of a batch", &self.settle);
        timed(r, "renew_duration", "Time of a renewal of the lease", &self.renew);
        timed(
            r,
            "delivery_latency",
            "Age of a message, since it was written, when the broker confirmed it; a delayed message includes its delay",
            &self.delivery,
        );
        r.register("received_messages", "Messages received for an inbox, by outcome", self.received.clone());
        r.register_with_unit(
            "receive_duration",
            "Time to keep or handle a batch of received messages",
            Unit::Seconds,
            self.receive.clone(),
        );
        r.register_with_unit(
            "receive_latency",
            "Age of a message, since it was written, when it was kept in the inbox or its effect was committed; by two clocks, and as exact as the broker's timestamp",
            Unit::Seconds,
            self.effect.clone(),
        );
    }

    fn register_retention(&self, r: &mut Registry) {
        let help = "Rows that retention of this process deleted because they were finished and old, by table";
        r.register("removed_rows", help, self.removed.clone());
        let help = "Messages that this process deleted from the outbox because the archive has them";
        r.register("archived_messages", help, self.archived_messages.clone());
        let help = "Segments that this process wrote to the archive, and read back";
        r.register("archived_segments", help, self.archived_segments.clone());
        let help = "Passes of this process that could not archive; they are made again";
        r.register("archive_failures", help, self.archive_failures.clone());
    }

    fn of_route(&self, route: &str, event: &Happened) {
        let of = OfRoute { route: named(route) };
        let count = |family: &Family<OfRoute, Counter>, messages: usize| {
            if messages > 0 {
                family.get_or_create(&of).inc_by(messages as u64);
            }
        };
        let time = |family: &Timed<OfRoute>, took: &Duration| family.get_or_create(&of).observe(took.as_secs_f64());
        match event {
            Happened::Renewed { took, .. } => time(&self.renew, took),
            Happened::Claimed { messages, took } => {
                count(&self.claimed, *messages);
                time(&self.claim, took);
            }
            Happened::Published { stored, failed, skipped, unknown, took } => {
                count(&self.acked, *stored);
                count(&self.rejected, *failed);
                count(&self.skipped, *skipped);
                count(&self.unknown, *unknown);
                time(&self.publish, took);
            }
            Happened::Unavailable { messages, took } => {
                count(&self.unknown, *messages);
                count(&self.unavailable, 1);
                time(&self.publish, took);
            }
            Happened::Settled { fenced, took, .. } => {
                count(&self.fenced, *fenced);
                time(&self.settle, took);
            }
            Happened::Died { cause, messages } => {
                let of = Died { route: of.route.clone(), cause: cause.as_str() };
                self.dead.get_or_create(&of).inc_by(*messages as u64);
            }
            Happened::LanesLost { lanes } => count(&self.lanes_lost, *lanes),
            _ => {}
        }
    }

    fn of_inbox(&self, consumer: &str, event: &Happened) {
        let consumer = named(consumer);
        let count = |outcome: &'static str, messages: usize| {
            if messages > 0 {
                let of = Ended { consumer: consumer.clone(), outcome };
                self.received.get_or_create(&of).inc_by(messages as u64);
            }
        };
        let (parts, took): (&[(&str, usize)], _) = match event {
            Happened::Kept { kept, duplicates, dead, took } => {
                (&[("kept", *kept), ("duplicate", *duplicates), ("dead", *dead)], took)
            }
            Happened::Handled { done, out_of_order, duplicates, kept, dead, given_up, took } => (
                &[
                    ("done", *done),
                    ("out_of_order", *out_of_order),
                    ("duplicate", *duplicates),
                    ("kept", *kept),
                    ("dead", *dead),
                    ("given_up", *given_up),
                ],
                took,
            ),
            _ => return,
        };
        parts.iter().for_each(|(outcome, messages)| count(outcome, *messages));
        self.receive.get_or_create(&OfInbox { consumer: consumer.clone() }).observe(took.as_secs_f64());
    }
}

impl Observer for Meter {
    fn event(&self, of: Observed<'_>, event: &Happened) {
        let (is_route, name) = match of {
            Observed::Route(route) => (true, route),
            Observed::Inbox(consumer) => (false, consumer),
        };
        match event {
            Happened::Renewed { .. } => {
                let mut renewed = self.renewed.lock().unwrap_or_else(PoisonError::into_inner);
                renewed.insert((is_route, name.to_owned()), Instant::now());
            }
            Happened::StoreFailed { what } if is_route => {
                self.store_failures.get_or_create(&FailedAt { route: named(name), what }).inc();
            }
            Happened::StoreFailed { what } => {
                self.inbox_store_failures.get_or_create(&InboxFailedAt { consumer: named(name), what }).inc();
            }
            _ => {}
        }
        match is_route {
            true => self.of_route(name, event),
            false => self.of_inbox(name, event),
        }
    }

    fn through(&self, of: Observed<'_>, written: &mut dyn Iterator<Item = SystemTime>) {
        let Some(now) = self.now() else { return };
        // One that seems to come from the future is as new as can be.
        let age = |written: SystemTime| now.duration_since(written).unwrap_or_default().as_secs_f64();
        match of {
            Observed::Route(route) => {
                let family = self.delivery.get_or_create_owned(&OfRoute { route: named(route) });
                written.for_each(|written| family.observe(age(written)));
            }
            Observed::Inbox(consumer) => {
                let family = self.effect.get_or_create_owned(&OfInbox { consumer: named(consumer) });
                written.for_each(|written| family.observe(age(written)));
            }
        }
    }
}
