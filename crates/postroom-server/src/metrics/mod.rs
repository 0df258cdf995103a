//! Metrics in the text format of Prometheus: what happened in this process, its current state, and the sampled state of its store.

mod fleet;
mod labels;
mod live;
mod meter;
mod otlp;
mod sampled;

use std::fmt;
use std::sync::Arc;

use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;

pub use fleet::FleetShown;
pub use live::{Inboxes, Routes};
pub use meter::Meter;
pub use otlp::Exported;
pub(crate) use sampled::{Sample, Sampled};

/// Everything that is shown under `/metrics`.
pub struct Metrics {
    registry: Registry,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

/// The text format of these metrics.
pub(crate) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

impl Metrics {
    /// What this meter saw, and the state of these routes and inboxes of this process.
    pub fn new(meter: &Meter, routes: Routes, inboxes: Inboxes) -> Self {
        let mut registry = Registry::with_prefix("postroom");
        meter.register(&mut registry);
        registry.register_collector(Box::new(live::Running { routes, inboxes, lease_ages: meter.lease_ages() }));
        Self { registry }
    }

    /// Also the state of the store, as it was sampled last.
    pub fn with_store(mut self, sampler: &crate::Sampler) -> Self {
        self.registry.register_collector(Box::new(sampler.sampled()));
        self
    }

    /// Also how many stores stand, and what was seen in them.
    pub fn with_fleet(mut self, shown: &FleetShown) -> Self {
        self.registry.register_collector(Box::new(shown.clone()));
        self
    }

    /// The metrics of now, in the text format of OpenMetrics. Asks nobody and waits for nothing.
    pub fn text(&self) -> String {
        let mut text = String::with_capacity(16 << 10);
        // Writing to a string does not fail.
        let _ = encode(&mut text, &self.registry);
        text
    }

    /// Shares them.
    pub fn shared(self) -> Arc<Self> {
        Arc::new(self)
    }
}
