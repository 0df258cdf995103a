//! The receiving runtime: takes messages from a [`postroom::Subscription`], hands them to handlers that work in the store's
//! own transactions, and acks after the commit.
//!
//! A message whose handler fails, or that waits behind such a one, or for an earlier version, is kept in the store; the broker
//! is acked and other keys flow. The crate's parts: [`Handlers`] say what is done, [`Receiver`] does it.

mod apply;
mod desk;
mod handler;
mod handlers;
mod queue;
mod receiver;
mod shared;
mod versions;

pub use handler::{Call, Compensate, Handle, HandlerError, Incoming, OutOfOrder, Stale};
pub use handlers::{Handlers, InvalidHandlers, Unknown};
pub use receiver::{ReceiveCounters, Receiver, ReceiverFailed};
pub use versions::Versions;
