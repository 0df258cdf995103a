//! The receiving runtime: takes messages from a [`postroom::Subscription`], hands them to handlers that work in the store's
//! own transactions, and acks after the commit.
//!
//! A message whose handler fails, or that waits behind such a message or for an earlier version, is kept in the store; the broker
//! is acked, and other keys do not wait. [`Handlers`] define what to do with a message, and [`Receiver`] does it.

mod again;
mod apply;
mod bury;
mod counters;
mod desk;
mod filler;
mod from_inbox;
mod handler;
mod handlers;
mod in_hand;
mod inbox_sink;
mod pump;
mod queue;
mod receiver;
mod shared;
mod unkeepable;
mod versions;

pub use counters::ReceiveCounters;
pub use filler::{FillCounters, Filler, FillerFailed, InboxNow};
pub use from_inbox::FromInbox;
pub use handler::{Call, Compensate, Handle, HandlerError, Incoming, OutOfOrder, Stale};
pub use handlers::{Handlers, InvalidHandlers, Unknown};
pub use inbox_sink::InboxSink;
pub use receiver::{Receiver, ReceiverFailed, ReceiverNow};
pub use versions::Versions;
