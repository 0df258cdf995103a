//! One route of one store: what is needed to begin it, the first time and again.

use std::sync::Arc;
use std::time::Duration;

use postroom::{Live, MessageId, Store, StoreError, Wake};
use postroom_relay::{Relay, RouteNow, Summary};
use postroom_server::Meter;
use tokio::sync::watch;

use crate::config::{Config, Routed};
use crate::exit::{self, Failure};
use crate::supervise::Attempt;

/// What is needed to start a route, the first time and again.
#[derive(Clone)]
pub(super) struct Start {
    pub config: Arc<Config>,
    pub store: Arc<dyn Store>,
    pub index: usize,
    pub owner: String,
    pub wake: Wake,
    pub live: Live<RouteNow>,
    pub meter: Meter,
    pub unique: MessageId,
    pub stopped: watch::Receiver<bool>,
    /// It is one of many that are worked at for a short time.
    pub brief: bool,
}

impl Start {
    pub async fn open(&self, restart: u64) -> Result<Relay, Failure> {
        let (config, store, Routed { route, sink: options, .. }) =
            (&self.config, &self.store, &self.config.routes[self.index]);
        if let Some(what) = store.cannot(route) {
            return Err(Failure::new(exit::CONFIG, format!("route {:?}: {what}", route.name)));
        }
        // One that is started again must not take what the one before it may still be writing for its own: it waits for the
        // lease, as after a crash.
        let owner = if restart == 0 { self.owner.clone() } else { format!("{}/{restart}", self.owner) };
        let source = loop {
            match store.source(route, &owner).await {
                // A SQLite file that somebody else writes to for long; a PostgreSQL that is away is waited for inside.
                Err(error @ StoreError::Busy { .. }) => {
                    let text = Failure::of(exit::FAILURE, &error).text;
                    tracing::warn!(route = %route.name, "the route begins later, trying again: {text}");
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
                opened => break opened?,
            }
        };
        let sink = options.open().map_err(|error| Failure::of(exit::CONFIG, &error))?;
        let (name, topics, shown) = (&route.name, &route.topics, store.shown());
        let relay = Relay::new(route.clone(), source, sink);
        let relay = if self.brief {
            tracing::debug!(route = %name, %topics, store = %shown, sink = %options.shown(), "opened the route");
            relay.brief()
        } else {
            tracing::info!(route = %name, %topics, store = %shown, sink = %options.shown(), "opened the route");
            relay
        };
        Ok(relay
            .wake_by(self.wake.clone())
            .shown_in(self.live.clone())
            .observed_by(Arc::new(self.meter.clone()))
            .sink_named(options.shown())
            .in_flight_max(config.relay.in_flight_max)
            .in_flight_bytes_max(config.relay.in_flight_bytes_max)
            .poll_idle(config.relay.poll_idle)
            .stop_deadline(config.relay.stop_deadline)
            .seed(self.unique.as_uuid().as_u64_pair().1))
    }

    pub fn relay(self, relay: Relay) -> Attempt<Summary> {
        Box::pin(async move { Ok(relay.run(stop_of(self.stopped)).await) })
    }
}

/// An error means that the sender is gone, which is a stop too.
pub(super) async fn stop_of(mut stopped: watch::Receiver<bool>) {
    let _ = stopped.wait_for(|stopped| *stopped).await;
}

pub(super) fn not_running() -> Failure {
    Failure::new(exit::FAILURE, "stopped before it was running again")
}
