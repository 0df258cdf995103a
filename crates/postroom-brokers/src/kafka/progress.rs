//! Pure: how far a partition is settled, and where the next session begins.

use std::collections::BTreeSet;

/// Offsets of one partition, from where a session began.
#[derive(Debug)]
pub(super) struct Progress {
    /// Handed out or waiting, and not settled.
    open: BTreeSet<i64>,
    /// Behind the last one that was read.
    next: i64,
    /// What the group was told last.
    pub committed: i64,
    /// The group was told that what is before this one may have been handed out.
    pub reserved: i64,
}

impl Progress {
    /// Begins at `offset`, which the group was told, together with `reserved`.
    pub fn from(offset: i64, reserved: i64) -> Self {
        Self { open: BTreeSet::new(), next: offset, committed: offset, reserved }
    }

    /// This one was read.
    pub fn read(&mut self, offset: i64) {
        self.open.insert(offset);
        self.next = self.next.max(offset.saturating_add(1));
    }

    /// This one is settled.
    pub fn settled(&mut self, offset: i64) {
        self.open.remove(&offset);
    }

    /// Everything before this one is settled.
    pub fn floor(&self) -> i64 {
        self.open.first().copied().unwrap_or(self.next)
    }
}

/// What a group has committed for a partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Committed {
    pub offset: i64,
    /// What its metadata says; none: somebody else wrote it, and anything may have been handed out.
    pub reserved: Option<i64>,
}

const RESERVED: &str = "postroom may have handed out before ";

/// What goes along with an offset: nothing before it may be taken for never handed out.
pub(super) fn metadata(reserved: i64) -> String {
    format!("{RESERVED}{reserved}")
}

/// What [`metadata`] said.
pub(super) fn reserved_of(metadata: &str) -> Option<i64> {
    metadata.strip_prefix(RESERVED)?.parse().ok()
}

/// Where a session begins in a partition.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Begin {
    pub offset: i64,
    /// What is before this one may have been handed out before.
    pub known_before: i64,
    /// What a person has to know.
    pub told: Option<Told>,
}

/// What happened to a partition while nobody looked.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Told {
    /// So many were removed before they were received.
    Removed(i64),
    /// The partition ends before what was received.
    WentBack { received: i64, end: i64 },
}

/// From what the group has committed, and the first and last offset that are there.
pub(super) fn begin(committed: Option<&Committed>, low: i64, high: i64) -> Begin {
    match committed {
        // Nobody can have been handed anything: that is told the group first.
        None => Begin { offset: low, known_before: low, told: None },
        Some(Committed { offset, .. }) if *offset > high => {
            let told = Some(Told::WentBack { received: *offset, end: high });
            Begin { offset: low, known_before: high, told }
        }
        Some(Committed { offset, reserved }) => Begin {
            offset: (*offset).max(low),
            known_before: reserved.unwrap_or(high),
            told: (*offset < low).then(|| Told::Removed(low - offset)),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_has_nothing_open_before_it_is_committed() {
        let mut progress = Progress::from(10, 10);
        assert_eq!(progress.floor(), 10);
        [10, 11, 15].into_iter().for_each(|offset| progress.read(offset));
        progress.settled(15);
        progress.settled(11);
        assert_eq!(progress.floor(), 10);
        progress.settled(10);
        assert_eq!(progress.floor(), 16, "offsets have gaps");
        progress.settled(10);
        assert_eq!(progress.floor(), 16);
    }

    #[test]
    fn a_session_begins_where_the_one_before_was_settled() {
        let at = |offset, reserved| Some(Committed { offset, reserved });
        assert_eq!(begin(None, 3, 9), Begin { offset: 3, known_before: 3, told: None });
        assert_eq!(begin(at(5, Some(7)).as_ref(), 3, 9), Begin { offset: 5, known_before: 7, told: None });
        assert_eq!(begin(at(5, None).as_ref(), 3, 9).known_before, 9, "what another program committed");
        let removed = begin(at(1, Some(2)).as_ref(), 3, 9);
        assert_eq!((removed.offset, removed.told), (3, Some(Told::Removed(2))));
        let back = begin(at(12, Some(20)).as_ref(), 3, 9);
        assert_eq!((back.offset, back.known_before), (3, 9));
        assert_eq!(back.told, Some(Told::WentBack { received: 12, end: 9 }));
        assert_eq!(begin(at(9, Some(9)).as_ref(), 3, 9).told, None);
    }

    #[test]
    fn the_metadata_is_read_as_it_was_written() {
        assert_eq!(reserved_of(&metadata(77)), Some(77));
        assert_eq!((reserved_of(""), reserved_of("x 7")), (None, None));
    }
}
