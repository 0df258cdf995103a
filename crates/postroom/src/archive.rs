//! Messages that leave the outbox for an archive before they are removed.
//!
//! A process looks for what has expired, begins a *segment* of it, stores the segment's messages somewhere, reads them back, and ends the
//! segment: only that removes them. A process that dies in between leaves a segment that the next one takes and finishes; it has the same
//! messages, so that none is archived under two names.

use std::collections::BTreeMap;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use uuid::Uuid;

use crate::dead_letter::Deed;
use crate::error::StoreError;
use crate::message::MessageId;
use crate::retention::{Retention, Sweep};

/// Names a segment, in the store and in the archive; ordered by time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct SegmentId(Uuid);

impl SegmentId {
    /// As a UUID.
    pub fn as_uuid(&self) -> &Uuid {
        &self.0
    }
}

impl From<Uuid> for SegmentId {
    fn from(id: Uuid) -> Self {
        Self(id)
    }
}

impl std::fmt::Display for SegmentId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// The place of a message that may be removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expired {
    /// Its lane.
    pub lane: i16,
    /// Its seq.
    pub seq: i64,
    /// Bytes of its payload and headers.
    pub bytes: u64,
}

/// Messages on their way to an archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Its name.
    pub id: SegmentId,
    /// The archive has its messages; some could not be removed from the outbox when it was ended.
    pub stored: bool,
}

/// Whose turn it is to go on with a segment that was begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// Nobody's: there is none.
    Nobodys,
    /// Another process is at one, or died less than a minute ago.
    Others,
    /// The caller's.
    Ours(Segment),
}

/// A message as the outbox has it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ArchivedMessage {
    /// Its place; where two messages have the same key, the lower one was written first.
    pub seq: i64,
    /// Message id.
    pub id: Uuid,
    /// Topic.
    pub topic: String,
    /// Type.
    pub kind: String,
    /// The payload.
    pub payload: Bytes,
    /// Key, if it was given.
    pub key: Option<String>,
    /// Routing key, if it was given.
    pub routing_key: Option<String>,
    /// Content type.
    pub content_type: String,
    /// Headers, as JSON text.
    pub headers: Option<String>,
    /// Tenant.
    pub tenant_id: Option<String>,
    /// Aggregate type.
    pub aggregate_type: Option<String>,
    /// Aggregate id.
    pub aggregate_id: Option<String>,
    /// Aggregate version.
    pub aggregate_version: Option<i64>,
    /// When it happened, in microseconds since 1970.
    pub occurred_us: i64,
    /// Columns whose text is not UTF-8, with their bytes; the fields above have `U+FFFD` in place of what could not be read.
    pub unreadable: BTreeMap<String, Bytes>,
}

/// What a store knows of its archive.
#[derive(Debug, Clone, PartialEq)]
pub struct ArchiveState {
    /// Names this outbox; a copy of the database has the same name.
    pub outbox: Uuid,
    /// Messages are archived before they are removed.
    pub archives: bool,
    /// Segments that were ended, as far back as the store knows.
    pub segments: u64,
    /// Since when the oldest segment that is not in the archive was begun, in seconds before now; none: there is none.
    pub unfinished_seconds: Option<f64>,
}

/// What became of messages that were put back.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct Restored {
    /// Ids of those that were put back.
    #[serde(skip)]
    pub ids: Vec<MessageId>,
    /// How many were put back.
    pub restored: u64,
    /// Were in the outbox already.
    pub present: u64,
    /// A route has not passed their place, or the outbox has not come to it: they would be sent as new ones. They are not put back.
    pub ahead: u64,
    /// Another message has their place; they are not put back.
    pub taken: u64,
    /// Have text that is not UTF-8, which would not be the same afterwards; they are not put back.
    pub unreadable: u64,
}

impl std::ops::AddAssign for Restored {
    fn add_assign(&mut self, mut more: Self) {
        self.ids.append(&mut more.ids);
        self.restored += more.restored;
        self.present += more.present;
        self.ahead += more.ahead;
        self.taken += more.taken;
        self.unreadable += more.unreadable;
    }
}

/// The end of a store from which messages leave for an archive, and to which they come back.
#[async_trait]
pub trait Archivable: Send + Sync {
    /// What is known of the archive.
    async fn archive_state(&self) -> Result<ArchiveState, StoreError>;

    /// Looks for messages that [`retain`](crate::Operator::retain) would remove, at a bounded number of rows, and moves `sweep` on, which is about
    /// [`Part::Outbox`](crate::Part::Outbox) alone. Changes nothing. What is on its way to an archive, or came from one, is not found.
    async fn find_expired(&self, retention: &Retention, sweep: &mut Sweep) -> Result<Vec<Expired>, StoreError>;

    /// Writes down that these messages are about to leave for an archive. None: another process is at that, or they are gone. From now on
    /// [`retain`](crate::Operator::retain) removes no message of the outbox.
    async fn begin_segment(&self, messages: &[Expired]) -> Result<Option<Segment>, StoreError>;

    /// Takes a segment that was begun, and that no process has begun to work on in the last minute.
    async fn take_segment(&self) -> Result<Turn, StoreError>;

    /// The messages of a segment that are still in the outbox, in a fixed order.
    async fn segment_messages(&self, segment: SegmentId) -> Result<Vec<ArchivedMessage>, StoreError>;

    /// Removes the messages of a segment from the outbox, which the archive has for certain. A message that a route has to send (once
    /// more) stays until it has; then the segment can be taken again. Returns how many were removed.
    async fn end_segment(&self, segment: SegmentId) -> Result<u64, StoreError>;

    /// Puts messages back into their old places, which every route has passed, for a replay. They stay for `stays`, and longer if a route
    /// is not done with them. At most 10,000 at once.
    async fn restore(&self, messages: &[ArchivedMessage], stays: Duration, deed: &Deed)
    -> Result<Restored, StoreError>;

    /// Removes messages that were put back and whose time is over, a bounded number of them; nothing archives those once more.
    async fn forget_restored(&self) -> Result<u64, StoreError>;
}
