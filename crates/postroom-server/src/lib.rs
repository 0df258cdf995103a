//! What a running postroom shows of itself: metrics, health, and the listener that serves them.
//!
//! [`Meter`] observes relays, fillers and receivers, also those that are embedded in an application. [`Sampler`] looks at the store from
//! time to time, so that nobody who reads the metrics causes a query. [`admin`] serves both over HTTP.

pub mod admin;
mod ask;
mod metrics;
mod sampler;

pub use ask::{Answer, AskFailed, ask};
pub use metrics::{Exported, Inboxes, Meter, Metrics, Routes};
pub use sampler::Sampler;
