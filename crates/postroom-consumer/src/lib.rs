//! The receiving runtime: takes messages from a [`postroom::Subscription`], hands them to a [`Handler`], and acks after
//! the handler's transaction committed.

mod handler;
mod receiver;

pub use handler::{Handled, Handler, HandlerError};
pub use receiver::{ReceiveCounters, Receiver};
