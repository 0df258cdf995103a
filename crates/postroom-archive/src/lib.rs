//! Where messages go before they are removed from the outbox.
//!
//! An archive is a folder or a bucket. A segment of messages is one object of zstd-compressed JSON lines, and a manifest beside it that says
//! how many messages there are, from where to where, and their SHA-256. The manifest is written last: an object without one is not finished.
//! Both are named
//! after the segment, so that whoever writes a segment once more does not write it under another name.

mod archive;
mod line;
mod manifest;
mod place;

pub use archive::{Archive, ArchiveError, Found};
pub use manifest::Manifest;
pub use place::{InvalidPlace, Place};
