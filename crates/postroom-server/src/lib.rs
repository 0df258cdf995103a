//! What a running postroom shows of itself: metrics, health, and the listener that serves them.
//!
//! [`Meter`] observes relays, fillers and receivers, also those that are embedded in an application. [`Sampler`] looks at the store from
//! time to time, so that nobody who reads the metrics causes a query. [`admin`] serves both over HTTP.

pub mod admin;
mod ask;
mod fleet;
mod metrics;
mod sampler;

pub use ask::{Answer, AskFailed, ask};
pub use fleet::{Fleet, FleetLimits, FleetTask, Seen, StandingWord, StoreStanding, WorkEnded};
pub use metrics::{Exported, FleetShown, Inboxes, Meter, Metrics, Routes};
pub use sampler::Sampler;
