//! The log source: the relay's end of the outbox. Rows are appended and never updated; progress is a position a lane.

mod lanes;
mod notify;
mod position;
mod record;
pub(crate) mod row;
mod source;
mod watch;

pub use notify::{Listener, Notifier};
pub use source::{LogSource, ReadCounters};
