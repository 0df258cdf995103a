//! Where messages go before they are removed from the outbox.
//!
//! An archive is a folder or a bucket. A segment of messages is one object of zstd-compressed JSON lines, and a manifest beside it that says
//! how many messages there are, from where to where, and their SHA-256; with the feature `parquet`, on request, also a Parquet file of the
//! same messages. The manifest is written last: an object without one is not finished. All are named after the segment, so that whoever
//! writes a segment once more does not write it under another name.

mod archive;
mod line;
mod manifest;
#[cfg(feature = "parquet")]
mod parquet_file;
mod place;

pub use archive::{Archive, ArchiveError, ArchiveOptions, Found};
pub use manifest::{Manifest, ParquetObject};
pub use place::{InvalidPlace, Place};

/// Whether this was built with the feature `parquet`.
pub const WITH_PARQUET: bool = cfg!(feature = "parquet");
