//! Whether this process does its part.

use std::time::Duration;

use serde::Serialize;

use crate::metrics::Meter;

/// What this process was started for, and how long its leases are.
#[derive(Debug, Clone, Default)]
pub struct Expected {
    /// Names of routes.
    pub routes: Vec<String>,
    /// Consumers of inboxes.
    pub inboxes: Vec<String>,
    /// Length of a lease.
    pub lease: Duration,
}

/// Knows when each part was last known to the store.
#[derive(Debug)]
pub struct Health {
    expected: Expected,
    meter: Meter,
}

/// Whether this process does its part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Readiness {
    pub ready: bool,
    pub parts: Vec<Part>,
}

/// One route or inbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Part {
    pub part: String,
    pub ready: bool,
    pub why: String,
}

impl Health {
    /// Of a process that was started for this, and that this meter observes.
    pub fn new(expected: Expected, meter: Meter) -> Self {
        Self { expected, meter }
    }

    /// A part is ready while the store has known of it within the length of its lease. A broker that is away does not count: another
    /// process would not reach it either, and messages wait in the store. A process that stands by is ready.
    pub(super) fn now(&self) -> Readiness {
        let Expected { routes, inboxes, lease } = &self.expected;
        let ages = self.meter.lease_ages();
        let routes = routes.iter().map(|route| judged(format!("route {route}"), ages.of_route(route), *lease));
        let inboxes =
            inboxes.iter().map(|consumer| judged(format!("inbox {consumer}"), ages.of_inbox(consumer), *lease));
        let parts: Vec<Part> = routes.chain(inboxes).collect();
        Readiness { ready: parts.iter().all(|part| part.ready), parts }
    }
}

fn judged(part: String, age: Option<Duration>, lease: Duration) -> Part {
    let (ready, why) = match age {
        None => (false, "the store has not answered yet".to_owned()),
        Some(age) if age > lease => {
            let (age, lease) = (postroom::lasting(age.as_secs_f64()), postroom::lasting(lease.as_secs_f64()));
            (false, format!("the store has not answered for {age}, and the lease lasts {lease}"))
        }
        Some(_) => (true, "the lease was renewed in time".to_owned()),
    };
    Part { part, ready, why }
}

#[cfg(test)]
mod tests {
    use postroom::{Happened, Observed, Observer};

    use super::*;

    #[test]
    fn a_process_is_ready_while_the_store_knows_of_all_its_parts() {
        let meter = Meter::new();
        let expected = |lease| Expected {
            routes: vec!["orders".to_owned()],
            inboxes: vec!["billing".to_owned()],
            lease: Duration::from_secs(lease),
        };
        let health = Health::new(expected(15), meter.clone());
        assert!(!health.now().ready, "nothing is known yet");
        let renewed = Happened::Renewed { lanes: 0, took: Duration::ZERO };
        meter.event(Observed::Route("orders"), &renewed);
        let now = health.now();
        assert_eq!(now.parts.iter().map(|part| part.ready).collect::<Vec<_>>(), [true, false]);
        meter.event(Observed::Inbox("billing"), &renewed);
        assert!(health.now().ready, "one without a lane stands by");
        assert!(!Health::new(expected(0), meter).now().ready, "the lease is over");
    }
}
