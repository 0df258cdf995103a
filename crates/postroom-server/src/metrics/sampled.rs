//! The state of the store as it was sampled last. What is too old is not shown: no value is better than a wrong one.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use postroom::{InboxStatus, ReconciledStatus, RouteStatus, StoreStatus, Vitals};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::registry::Unit;

use super::labels::{Values, gauge, named};

/// A sample that is older is not shown.
pub(crate) const STALE_AFTER: Duration = Duration::from_secs(90);
/// Sizes change slowly and are sampled less often.
pub(crate) const SIZES_STALE_AFTER: Duration = Duration::from_secs(900);
/// So many routes and consumers are shown by name: more would be more time series than anybody asked for.
const NAMES_MAX: usize = 200;

/// Something that was looked at.
#[derive(Debug, Clone)]
pub(crate) struct Sample<T> {
    pub value: T,
    pub at: Instant,
    pub took: Duration,
}

impl<T> Sample<T> {
    fn if_newer(&self, than: Duration) -> Option<&T> {
        (self.at.elapsed() < than).then_some(&self.value)
    }
}

/// What is known of the store.
#[derive(Debug, Default)]
struct Known {
    status: Option<Sample<StoreStatus>>,
    vitals: Option<Sample<Vitals>>,
    /// Whether the last look succeeded; none: there was none.
    answered: Option<bool>,
    failures: u64,
}

/// The samples; clones share them.
#[derive(Debug, Clone)]
pub(crate) struct Sampled {
    known: Arc<Mutex<Known>>,
    capacity_bytes: Option<i64>,
}

impl Sampled {
    pub fn new(capacity_bytes: Option<i64>) -> Self {
        Self { known: Arc::default(), capacity_bytes }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn status(&self, sample: Sample<StoreStatus>) {
        let mut known = self.known();
        known.status = Some(sample);
        known.answered = Some(true);
    }

    pub fn vitals(&self, sample: Sample<Vitals>) {
        self.known().vitals = Some(sample);
    }

    pub fn failed(&self) {
        let mut known = self.known();
        known.answered = Some(false);
        known.failures += 1;
    }
}

impl Collector for Sampled {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let e = &mut encoder;
        let known = self.known();
        let one = |value: f64| -> Values { vec![(Vec::new(), value)] };
        let answered = known.answered.map(|answered| one(f64::from(u8::from(answered)))).unwrap_or_default();
        gauge(e, "store_up", None, "1: the last look at the store succeeded; 0: it failed", &answered)?;
        let ages = known.status.as_ref().map(|sample| one(sample.at.elapsed().as_secs_f64())).unwrap_or_default();
        let help = "Age of the last successful look at the store; what it saw is left out when it is older than 90 s";
        gauge(e, "sample_age", Some(Unit::Seconds), help, &ages)?;
        let took = known.status.as_ref().map(|sample| one(sample.took.as_secs_f64())).unwrap_or_default();
        gauge(e, "sample_duration", Some(Unit::Seconds), "Time that the last look at the store took", &took)?;
        if let Some(status) = known.status.as_ref().and_then(|sample| sample.if_newer(STALE_AFTER)) {
            routes(e, &status.routes)?;
            inboxes(e, &status.inboxes)?;
            let unrouted: i64 = status.unrouted.iter().map(|topic| topic.messages).sum();
            let help = "Messages of topics that no route takes, among the newest of the outbox";
            gauge(e, "unrouted_messages", None, help, &one(unrouted as f64))?;
            let help = "Routes and consumers beyond the first 200 of each, which are left out here";
            let omitted =
                status.routes.len().saturating_sub(NAMES_MAX) + status.inboxes.len().saturating_sub(NAMES_MAX);
            gauge(e, "omitted_names", None, help, &one(omitted as f64))?;
            reconciled(e, &status.reconciled)?;
        }
        match known.vitals.as_ref().and_then(|sample| sample.if_newer(SIZES_STALE_AFTER)) {
            Some(vitals) => sizes(e, vitals, self.capacity_bytes),
            None => Ok(()),
        }
    }
}

fn routes(e: &mut DescriptorEncoder<'_>, routes: &[RouteStatus]) -> fmt::Result {
    let routes = &routes[..routes.len().min(NAMES_MAX)];
    let of = |value: &dyn Fn(&RouteStatus) -> Option<f64>| -> Values {
        let labelled = |route: &RouteStatus| Some((vec![("route", named(&route.route))], value(route)?));
        routes.iter().filter_map(labelled).collect()
    };
    let truth = |value: bool| Some(f64::from(u8::from(value)));
    let help = "Messages that are neither sent nor dead, without delayed ones that are not due; see backlog_is_bound";
    gauge(e, "backlog_messages", None, help, &of(&|route| Some(route.backlog as f64)))?;
    let help = "1: counting ended at its limit, and the backlog is at least what is shown";
    gauge(e, "backlog_is_bound", None, help, &of(&|route| truth(route.backlog_is_bound)))?;
    let help = "Age of the oldest message that is neither sent nor dead, parked ones included; 0: there is none";
    let oldest = |route: &RouteStatus| match route.oldest_unsent_seconds {
        Some(age) => Some(age),
        None if route.backlog == 0 && !route.backlog_is_bound => Some(0.0),
        // None of this route was among those looked at. None is older than the first one that it has not read.
        None => route.oldest_unread_seconds,
    };
    gauge(e, "oldest_unfinished", Some(Unit::Seconds), help, &of(&oldest))?;
    let parked = |state: &'static str, value: &dyn Fn(&RouteStatus) -> i64| -> Values {
        let labelled = |route: &RouteStatus| {
            (vec![("route", named(&route.route)), ("state", state.to_owned())], value(route) as f64)
        };
        routes.iter().map(labelled).collect()
    };
    let mut values = parked("retry", &|route| route.retrying);
    values.extend(parked("scheduled", &|route| route.scheduled));
    values.extend(parked("queued", &|route| (route.parked - route.retrying - route.scheduled).max(0)));
    let help = "Messages that wait in the store: for another attempt, for their time, or behind another one of their key; up to 50000";
    gauge(e, "parked_messages", None, help, &values)?;
    gauge(e, "dead_letters", None, "Dead letters of a route; up to 50000", &of(&|route| Some(route.dead as f64)))?;
    gauge(e, "lanes", None, "Lanes of a route", &of(&|route| Some(route.lanes as f64)))?;
    let help = "Lanes that some relay holds under a valid lease";
    gauge(e, "lanes_covered", None, help, &of(&|route| Some(route.lanes_held as f64)))?;
    let help = "Relays with a valid lease";
    gauge(
        e,
        "relays_alive",
        None,
        help,
        &of(&|route| Some(route.relays.iter().filter(|relay| relay.alive).count() as f64)),
    )?;
    let help = "Relays with a valid lease that report that they cannot publish";
    gauge(
        e,
        "relays_in_trouble",
        None,
        help,
        &of(&|route| {
            let trouble = route.relays.iter().filter(|relay| relay.alive && relay.link.trouble.is_some());
            Some(trouble.count() as f64)
        }),
    )
}

fn inboxes(e: &mut DescriptorEncoder<'_>, inboxes: &[InboxStatus]) -> fmt::Result {
    let inboxes = &inboxes[..inboxes.len().min(NAMES_MAX)];
    let of = |value: &dyn Fn(&InboxStatus) -> f64| -> Values {
        inboxes.iter().map(|inbox| (vec![("consumer", named(&inbox.consumer))], value(inbox))).collect()
    };
    let help = "Received messages that are neither handled nor dead; up to 50000";
    gauge(e, "inbox_waiting_messages", None, help, &of(&|inbox| inbox.waiting as f64))?;
    let help = "Received messages that failed and will be tried again";
    gauge(e, "inbox_retrying_messages", None, help, &of(&|inbox| inbox.retrying as f64))?;
    let help = "Age of the oldest waiting message, since it was received; 0: none waits";
    gauge(e, "inbox_oldest_waiting", Some(Unit::Seconds), help, &of(&|inbox| inbox.oldest_seconds.unwrap_or(0.0)))?;
    let help = "Dead letters of a consumer; up to 50000";
    gauge(e, "inbox_dead_letters", None, help, &of(&|inbox| inbox.dead as f64))?;
    let help = "1: the process that fills the inbox reports that it receives; 0: it reports that it cannot";
    let source = |inbox: &InboxStatus| {
        let filler = inbox.filler.as_ref().filter(|filler| filler.alive)?;
        let labels = vec![("consumer", named(&inbox.consumer))];
        Some((labels, f64::from(u8::from(filler.link.trouble.is_none()))))
    };
    gauge(e, "inbox_source_up", None, help, &inboxes.iter().filter_map(source).collect())?;
    let help = "1: some process fills the inbox from a queue under a valid lease; an inbox that an application fills itself shows 0";
    gauge(
        e,
        "inbox_filled",
        None,
        help,
        &of(&|inbox| f64::from(u8::from(inbox.filler.as_ref().is_some_and(|filler| filler.alive)))),
    )
}

fn reconciled(e: &mut DescriptorEncoder<'_>, reconciled: &[ReconciledStatus]) -> fmt::Result {
    let of = |value: &dyn Fn(&ReconciledStatus) -> f64| -> Values {
        reconciled.iter().map(|one| (vec![("reconcile", named(&one.name))], value(one))).collect()
    };
    let help = "Age of the last comparison of messages with effects";
    gauge(e, "reconcile_age", Some(Unit::Seconds), help, &of(&|one| one.seconds_ago))?;
    let help = "Messages that were sent and that a consumer lacks, as the last comparison found";
    gauge(e, "reconcile_missing_messages", None, help, &of(&|one| one.missing as f64))?;
    let help = "Messages that a consumer has and the outbox has not, as the last comparison found";
    gauge(e, "reconcile_stranger_messages", None, help, &of(&|one| one.strangers as f64))?;
    let help = "Days, tenants and types of which business changes and messages differ, as the last comparison found";
    gauge(e, "reconcile_differing_days", None, help, &of(&|one| one.days as f64))?;
    let help = "Changes of aggregates without a message, as the last comparison found";
    gauge(e, "reconcile_unwritten_changes", None, help, &of(&|one| one.unwritten as f64))?;
    let help = "Messages that the last comparison could not compare, since their ids have no time in them";
    gauge(e, "reconcile_uncompared_messages", None, help, &of(&|one| one.not_compared as f64))?;
    let help =
        "Consumers and queries that the last comparison could not compare at all; also 1 if it failed as a whole";
    gauge(e, "reconcile_uncompared_sides", None, help, &of(&|one| one.troubles as f64))
}

fn sizes(e: &mut DescriptorEncoder<'_>, vitals: &Vitals, capacity_bytes: Option<i64>) -> fmt::Result {
    let one = |value: Option<f64>| -> Values { value.map(|value| (Vec::new(), value)).into_iter().collect() };
    let of = |value: &dyn Fn(&postroom::TableVitals) -> Option<f64>| -> Values {
        // The same names on every store.
        let name = |table: &postroom::TableVitals| table.table.trim_start_matches("postroom_").to_owned();
        vitals.tables.iter().filter_map(|table| Some((vec![("table", name(table))], value(table)?))).collect()
    };
    gauge(e, "table_rows", None, "Rows of a table, as the database estimates", &of(&|table| Some(table.rows as f64)))?;
    let help = "Rows whose space is not free yet";
    gauge(e, "table_dead_rows", None, help, &of(&|table| table.dead_rows.map(|rows| rows as f64)))?;
    let help = "Size of a table without its indexes";
    gauge(e, "table_size", Some(Unit::Bytes), help, &of(&|table| table.bytes.map(|bytes| bytes as f64)))?;
    let help = "Size of the indexes of a table";
    gauge(e, "table_index_size", Some(Unit::Bytes), help, &of(&|table| table.index_bytes.map(|bytes| bytes as f64)))?;
    let help = "Rows by which a table grew in a day, by what was noted about a day ago";
    gauge(e, "table_growth_rows_per_day", None, help, &of(&|table| table.growth?.rows_per_day))?;
    let help = "Size of all tables of postroom with their indexes; for a store that is one file, of the file";
    gauge(e, "store_size", Some(Unit::Bytes), help, &one(Some(vitals.bytes as f64)))?;
    let help = "Bytes by which the store grew in a day";
    gauge(e, "store_growth_bytes_per_day", None, help, &one(vitals.growth.and_then(|growth| growth.bytes_per_day)))?;
    let Some(capacity) = capacity_bytes else { return Ok(()) };
    let help = "The configured capacity of the store";
    gauge(e, "store_capacity", Some(Unit::Bytes), help, &one(Some(capacity as f64)))?;
    let help =
        "Days until the store reaches its capacity if it grows on as in the last day; left out when it does not grow";
    gauge(e, "store_days_until_full", None, help, &one(vitals.days_until(capacity)))
}
