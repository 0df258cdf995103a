//! The engine: claims messages from a [`postroom::Source`], publishes them to a [`postroom::Sink`], and records the
//! outcome. It names no store and no broker, and never looks into a payload.
//!
//! [`Engine`] makes all decisions: a state machine without I/O, and without a clock or random numbers of its own. [`Relay`]
//! carries out what it asks for.

mod backoff;
mod breaker;
mod chance;
mod engine;
mod keys;
mod parking;
mod protocol;
mod rate;
mod rationed;
mod relay;
mod suspects;
mod told;
mod window;

pub use engine::Engine;
pub use protocol::{Action, BatchId, Counters, Death, EngineOptions, Input, RouteNow};
pub use relay::{Relay, Summary};
