//! The relay's end of the outbox. Rows get their places when they are seen, so that a position, one place for each lane, has everything
//! before it behind it.

mod claim;
mod lanes;
mod places;
pub(crate) mod record;
mod row;
mod source;

pub(crate) use record::History;
pub(crate) use row::{COPIED, MESSAGE, message};
pub use source::MssqlSource;
