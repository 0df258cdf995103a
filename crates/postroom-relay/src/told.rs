//! What the log is told of a route: each death, each failure, each outage and its end, none of them without a bound.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use postroom::{Failure, Message, StoreError, fingerprint};

use crate::protocol::Death;
use crate::rationed::Rationed;

const WINDOW: Duration = Duration::from_secs(10);
const DEATHS: u32 = 10;
const FAILURES: u32 = 10;
/// A start that takes longer is told.
const CONNECTS_WITHIN: Duration = Duration::from_secs(2);
/// Of each kind.
const COMPLAINTS: u32 = 3;
/// A sink that is down is probed every five seconds, and that it is down was told.
pub(crate) const PROBE: &str = "probe the sink";
const PROBES_WINDOW: Duration = Duration::from_secs(60);

/// Tells the log of one route.
pub(crate) struct Told {
    route: String,
    began: Instant,
    rations: Mutex<Rations>,
}

struct Rations {
    deaths: Rationed,
    failures: Rationed,
    complaints: HashMap<&'static str, Rationed>,
    sink_was_up: bool,
    sink_down_since: Option<Instant>,
    sink_down_told: bool,
    blocked_since: Option<Instant>,
    store_down_since: Option<Instant>,
}

impl Told {
    pub fn new(route: &str) -> Self {
        let rations = Rations {
            deaths: Rationed::new(DEATHS, WINDOW),
            failures: Rationed::new(FAILURES, WINDOW),
            complaints: HashMap::new(),
            sink_was_up: false,
            sink_down_since: None,
            sink_down_told: false,
            blocked_since: None,
            store_down_since: None,
        };
        Self { route: route.to_owned(), began: Instant::now(), rations: Mutex::new(rations) }
    }

    fn rations(&self) -> MutexGuard<'_, Rations> {
        self.rations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A message is among the dead letters.
    pub fn death(&self, Death { message, attempts, cause, error }: &Death) {
        if self.rations().deaths.admits(self.began.elapsed()) {
            tracing::warn!(
                route = %self.route, id = %message.id, topic = message.topic, r#type = message.kind, tenant = message.tenant_id,
                aggregate_type = message.aggregate_type, aggregate = message.aggregate_id, payload = %fingerprint(message), attempts,
                cause = cause.as_str(), "a message became a dead letter; see `postroom dead show {}`: {error}", message.id
            );
        }
    }

    /// Who failed and why; of the payload only its keyed hash.
    pub fn failure(&self, message: &Message, failure: &Failure) {
        if self.rations().failures.admits(self.began.elapsed()) {
            tracing::info!(
                route = %self.route, id = %message.id, topic = message.topic, r#type = message.kind, tenant = message.tenant_id,
                aggregate_type = message.aggregate_type, aggregate = message.aggregate_id, version = message.aggregate_version,
                payload = %fingerprint(message), "the sink rejected a message: {}", failure.reason
            );
        }
    }

    /// An error with its causes, which is returned too.
    pub fn complaint(&self, what: &'static str, error: &(dyn std::error::Error + 'static)) -> String {
        let mut text = error.to_string();
        let mut cause = error.source();
        while let Some(error) = cause {
            text.push_str(": ");
            text.push_str(&error.to_string());
            cause = error.source();
        }
        let ration = &mut self.rations();
        let ration = ration.complaints.entry(what).or_insert(match what {
            PROBE => Rationed::new(1, PROBES_WINDOW),
            _ => Rationed::new(COMPLAINTS, WINDOW),
        });
        if !ration.admits(self.began.elapsed()) {
            return text;
        }
        let needs_a_person = error.downcast_ref::<StoreError>().is_some_and(|error| !error.is_transient());
        if needs_a_person {
            tracing::error!(route = %self.route, "failed to {what}: {text}");
        } else {
            tracing::warn!(route = %self.route, "failed to {what}, trying again: {text}");
        }
        text
    }

    /// How the sink stands; tells when it goes and when it is back.
    pub fn sink(&self, down: Option<&str>) {
        let rations = &mut *self.rations();
        let Some(why) = down else {
            rations.sink_was_up = true;
            let since = rations.sink_down_since.take();
            if let (Some(since), true) = (since, std::mem::take(&mut rations.sink_down_told)) {
                tracing::info!(route = %self.route, "the sink is back after {:.1} s", since.elapsed().as_secs_f64());
            }
            return;
        };
        let since = *rations.sink_down_since.get_or_insert_with(Instant::now);
        // One that was never up is about to be connected to.
        if !rations.sink_down_told && (rations.sink_was_up || since.elapsed() >= CONNECTS_WITHIN) {
            rations.sink_down_told = true;
            tracing::warn!(route = %self.route, "the sink is down, messages wait in the store: {why}");
        }
    }

    /// Whether it was told that the sink is down, and not yet that it is back.
    pub fn sink_is_down(&self) -> bool {
        self.rations().sink_down_told
    }

    /// Whether the sink's connection is up but takes nothing for now, such as under a memory alarm; tells when that begins and ends.
    pub fn blocked(&self, why: Option<&str>) {
        let since = &mut self.rations().blocked_since;
        match (why, *since) {
            (Some(why), None) => {
                *since = Some(Instant::now());
                tracing::warn!(route = %self.route, "the sink accepts nothing for now, messages wait in the store: {why}");
            }
            (None, Some(began)) => {
                *since = None;
                tracing::info!(route = %self.route, "the sink accepts messages again after {:.1} s", began.elapsed().as_secs_f64());
            }
            _ => {}
        }
    }

    /// Whether a renewal reached the store; tells when it is back.
    pub fn store(&self, answered: bool) {
        let since = &mut self.rations().store_down_since;
        match (answered, *since) {
            (false, None) => *since = Some(Instant::now()),
            (true, Some(began)) => {
                *since = None;
                tracing::info!(route = %self.route, "the store is back after {:.1} s", began.elapsed().as_secs_f64());
            }
            _ => {}
        }
    }

    /// Tells how many were not told, where their time has come, or at the end.
    pub fn rest(&self, at_the_end: bool) {
        let now = self.began.elapsed();
        let rations = &mut *self.rations();
        let rest = |rationed: &mut Rationed| if at_the_end { rationed.rest() } else { rationed.withheld(now) };
        if let Some(more) = rest(&mut rations.deaths) {
            tracing::warn!(route = %self.route, more, "more messages became dead letters; see `postroom dead list --route {}`", self.route);
        }
        if let Some(more) = rest(&mut rations.failures) {
            tracing::info!(route = %self.route, more, "the sink rejected more messages");
        }
        for (what, rationed) in &mut rations.complaints {
            if let Some(more) = rest(rationed) {
                tracing::warn!(route = %self.route, more, "failed to {what} again");
            }
        }
    }
}
