//! The relay's end of the outbox: one writer at a time makes the order of seqs the order of commits, so a position is one seq.

mod reads;
pub(crate) mod record;
pub(crate) mod row;
pub(crate) mod source;
mod watch;

pub use source::SqliteSource;
