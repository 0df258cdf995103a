//! Messages leave the outbox for the archive: written, read back, and only then removed.

use std::time::{Duration, Instant};

use postroom::{Expired, Part, Retention, Segment, Store, Sweep, Turn, crash_point};
use postroom_archive::{Archive, ArchiveError, ArchiveOptions, Place};

use crate::exit::{self, Failure};

/// A segment has at most so many messages and about so many bytes.
const MESSAGES_MAX: usize = 20_000;
const BYTES_MAX: u64 = 16 << 20;
/// Fewer than this wait for more, for at most this long: many small objects are expensive to keep and to read.
const MESSAGES_LEAST: usize = 1_000;
const WAITS_MOST: Duration = Duration::from_secs(3600);
/// A segment is followed by a pause of its own length, so that new messages go first; and at most of this.
const PAUSE_MOST: Duration = Duration::from_secs(5);

/// Archives what has expired.
pub struct Archiver {
    archive: Archive,
    /// When the last segment was written by this process.
    last: Option<Instant>,
}

/// What a pass did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Archived {
    /// Segments that are in the archive now.
    pub segments: u64,
    /// Messages that were removed from the outbox.
    pub removed: u64,
    /// Another process is at it, or was less than a minute ago.
    pub others: bool,
}

/// Why a pass ended early.
#[derive(Debug, thiserror::Error)]
pub enum PassFailed {
    #[error(transparent)]
    Store(#[from] postroom::StoreError),
    #[error(transparent)]
    Archive(#[from] ArchiveError),
}

impl From<PassFailed> for Failure {
    fn from(error: PassFailed) -> Self {
        match error {
            PassFailed::Store(error) => error.into(),
            PassFailed::Archive(error @ ArchiveError::Unreachable { .. }) => Self::of(exit::UNREACHABLE, &error),
            PassFailed::Archive(error) => Self::of(exit::FAILURE, &error),
        }
    }
}

impl Archiver {
    pub fn open(options: &ArchiveOptions) -> Result<Self, Failure> {
        let archive = Archive::open(options).map_err(|error| Failure::from(PassFailed::from(error)))?;
        Ok(Self { archive, last: None })
    }

    pub fn place(&self) -> &Place {
        self.archive.place()
    }

    /// One pass over the outbox; with `all`, small remainders do not wait for more. What was done is in `archived`, also of a pass that
    /// failed. `progress` is told how many were removed.
    pub async fn pass(
        &mut self,
        store: &dyn Store,
        retention: &Retention,
        all: bool,
        archived: &mut Archived,
        mut progress: impl FnMut(u64),
    ) -> Result<(), PassFailed> {
        loop {
            match store.take_segment().await? {
                Turn::Ours(segment) => self.finish(store, segment, archived).await?,
                Turn::Others => {
                    archived.others = true;
                    return Ok(());
                }
                Turn::Nobodys => break,
            }
            progress(archived.removed);
        }
        let mut sweep = Sweep::begin(retention);
        sweep.parts.retain(|part| *part == Part::Outbox);
        let (mut gathered, mut bytes): (Vec<Expired>, u64) = (Vec::new(), 0);
        while !sweep.is_over() {
            for found in store.find_expired(retention, &mut sweep).await? {
                if gathered.len() >= MESSAGES_MAX || (!gathered.is_empty() && bytes + found.bytes > BYTES_MAX) {
                    self.send(store, &gathered, archived).await?;
                    if archived.others {
                        return Ok(());
                    }
                    progress(archived.removed);
                    gathered.clear();
                    bytes = 0;
                }
                bytes += found.bytes;
                gathered.push(found);
            }
        }
        let waited = self.last.is_none_or(|last| last.elapsed() >= WAITS_MOST);
        if !gathered.is_empty() && (all || waited || gathered.len() >= MESSAGES_LEAST) {
            self.send(store, &gathered, archived).await?;
        }
        loop {
            let forgotten = store.forget_restored().await?;
            if forgotten == 0 {
                break;
            }
            archived.removed += forgotten;
            progress(archived.removed);
        }
        Ok(())
    }

    async fn send(
        &mut self,
        store: &dyn Store,
        messages: &[Expired],
        archived: &mut Archived,
    ) -> Result<(), PassFailed> {
        let began = Instant::now();
        let Some(segment) = store.begin_segment(messages).await? else {
            archived.others = true;
            return Ok(());
        };
        crash_point("archive-begun");
        self.finish(store, segment, archived).await?;
        tokio::time::sleep(began.elapsed().min(PAUSE_MOST)).await;
        Ok(())
    }

    async fn finish(&mut self, store: &dyn Store, segment: Segment, archived: &mut Archived) -> Result<(), PassFailed> {
        if !segment.stored {
            let messages = store.segment_messages(segment.id).await?;
            // Somebody removed them by hand.
            if !messages.is_empty() {
                let outbox = store.archive_state().await?.outbox;
                let manifest = self.archive.store(outbox, segment.id, messages).await?;
                tracing::debug!("segment {} with {} messages is in the archive", segment.id, manifest.messages);
                archived.segments += 1;
            }
            crash_point("archive-stored");
        }
        archived.removed += store.end_segment(segment.id).await?;
        crash_point("archive-ended");
        self.last = Some(Instant::now());
        Ok(())
    }
}
