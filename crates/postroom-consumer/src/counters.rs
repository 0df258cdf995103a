//! What a receiver has seen.

use std::time::Duration;

use postroom::Happened;

use crate::apply::{End, Fate};

/// What a receiver has seen. Every delivery is counted once, by its outcome, and so is each time that a waiting
/// message was handled.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct ReceiveCounters {
    /// Applied.
    pub applied: u64,
    /// Already applied, or already waiting in the store.
    pub duplicates: u64,
    /// Not newer than what was handled, and merged.
    pub merged: u64,
    /// Not newer than what was handled, and ignored.
    pub ignored: u64,
    /// Arrived too late, and went to the compensation.
    pub late: u64,
    /// Versions that were missing when their window ended.
    pub missing: u64,
    /// Kept in the store behind another message of their key.
    pub kept: u64,
    /// Kept in the store for an earlier version.
    pub early: u64,
    /// Failed, and kept in the store for another attempt.
    pub retried: u64,
    /// Dead letters, including those that cannot be kept among the waiting messages.
    pub dead: u64,
    /// Ignored, because no handler takes their type.
    pub unknown: u64,
    /// Claims that had expired before they were settled; nothing was changed.
    pub lapsed: u64,
    /// Given back to the broker.
    pub requeued: u64,
}

impl ReceiveCounters {
    pub(crate) fn count(&mut self, end: End) {
        self.missing = self.missing.saturating_add(end.missing);
        let counter = match end.fate {
            Fate::Applied => &mut self.applied,
            Fate::Merged => &mut self.merged,
            Fate::Ignored => &mut self.ignored,
            Fate::Compensated => &mut self.late,
            Fate::Duplicate => &mut self.duplicates,
            Fate::Unknown => &mut self.unknown,
            Fate::Kept => &mut self.kept,
            Fate::Early => &mut self.early,
            Fate::Retried => &mut self.retried,
            Fate::Dead => &mut self.dead,
            Fate::Lost => &mut self.lapsed,
            Fate::Requeue | Fate::Refused | Fate::Unkept => &mut self.requeued,
        };
        *counter += 1;
    }

    /// What happened since these counters were read.
    pub(crate) fn since(&self, before: &Self, took: Duration) -> Happened {
        let sum = |of: fn(&Self) -> u64| of(self).saturating_sub(of(before)) as usize;
        Happened::Handled {
            done: sum(|all| all.applied + all.unknown),
            out_of_order: sum(|all| all.merged + all.ignored + all.late),
            duplicates: sum(|all| all.duplicates),
            kept: sum(|all| all.kept + all.early + all.retried),
            dead: sum(|all| all.dead),
            given_up: sum(|all| all.lapsed + all.requeued),
            took,
        }
    }
}
