//! What an archive says about one segment.

use jiff::Timestamp;
use postroom::SegmentId;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Beside each object of messages, written after it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// 1.
    pub format: u32,
    /// The outbox that the messages are from.
    pub outbox: Uuid,
    /// The segment.
    pub segment: SegmentId,
    /// Name of the object with the messages, below the archive.
    pub object: String,
    /// How many messages it has.
    pub messages: u64,
    /// The lowest seq.
    pub first_seq: i64,
    /// The highest seq.
    pub last_seq: i64,
    /// When the oldest of them happened.
    pub first_at: Timestamp,
    /// When the newest of them happened.
    pub last_at: Timestamp,
    /// When they began to leave the outbox.
    pub begun_at: Timestamp,
    /// Bytes of the object.
    pub bytes: u64,
    /// Bytes of the lines, before compression.
    pub lines_bytes: u64,
    /// SHA-256 of the object, in hexadecimal digits.
    pub sha256: String,
    /// The same messages once more, as a Parquet file, if the archive has that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parquet: Option<ParquetObject>,
}

/// A Parquet file of the messages of a segment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParquetObject {
    /// Name of the object, below the archive.
    pub object: String,
    /// Its bytes.
    pub bytes: u64,
    /// Its SHA-256, in hexadecimal digits.
    pub sha256: String,
}

impl Manifest {
    /// Whether messages of this time may be in it; an end that is none is open.
    pub fn overlaps(&self, from: Option<Timestamp>, to: Option<Timestamp>) -> bool {
        from.is_none_or(|from| self.last_at >= from) && to.is_none_or(|to| self.first_at < to)
    }
}
