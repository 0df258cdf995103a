//! Pure: how far a lane has been read.

use std::sync::Arc;

/// Consumed is every row visible in `snapshot` with a seq up to `seq`; while a catch-up runs, also every row visible in
/// its snapshot with a seq up to its seq.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Position {
    /// Text of a `pg_snapshot`: `xmin:xmax:xip,…`.
    pub snapshot: Arc<str>,
    pub seq: i64,
    /// Every transaction not older than the snapshot's xmax takes its seqs above this.
    pub floor: i64,
    pub catch_up: Option<CatchUp>,
}

/// A set of late rows on its way: too large for one read, or handed out and not all settled yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CatchUp {
    pub snapshot: Arc<str>,
    pub seq: i64,
}

/// Where a read of one lane ended.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Ends {
    /// Seq of the last late row that was kept, and whether there are more late rows.
    pub late_last: Option<i64>,
    pub late_more: bool,
    /// Seq of the last fresh row that was kept.
    pub fresh_last: Option<i64>,
}

impl Position {
    /// The position after a read under `snapshot` that ended at `ends`; `floor` belongs to that snapshot.
    pub fn after(&self, snapshot: &Arc<str>, floor: i64, ends: &Ends) -> Self {
        let floor = floor.max(self.floor);
        match (&self.catch_up, ends.late_more, ends.late_last) {
            // There are more late rows: stay where we are, remember how far we came and under which snapshot.
            (None, true, Some(seq)) => {
                Self { catch_up: Some(CatchUp { snapshot: snapshot.clone(), seq }), ..self.clone() }
            }
            (Some(running), true, Some(seq)) => {
                Self { catch_up: Some(CatchUp { snapshot: running.snapshot.clone(), seq }), ..self.clone() }
            }
            // The catch-up is complete: everything visible in its snapshot up to our seq is consumed. The floor of the old
            // position is kept: it is older, so it is true of the newer snapshot too.
            (Some(running), _, _) => {
                Self { snapshot: running.snapshot.clone(), seq: self.seq, floor: self.floor, catch_up: None }
            }
            (None, _, _) => {
                Self { snapshot: snapshot.clone(), seq: ends.fresh_last.unwrap_or(self.seq), floor, catch_up: None }
            }
        }
    }
}

/// The `xmax` of a snapshot's text: the first id that had not completed, with all later ones.
pub(crate) fn xmax(snapshot: &str) -> Option<u64> {
    snapshot.split(':').nth(1)?.parse().ok()
}

/// What tells rows that went astray: those of transactions at or after the oldest of these snapshots' xmax can be at or below
/// a floor only if the sequence went back. None where no position has a floor yet, or all are catching up.
pub(crate) fn astray_bounds<'a>(positions: impl Iterator<Item = &'a Position>) -> Option<(u64, i64)> {
    let settled = positions.filter(|position| position.catch_up.is_none() && position.floor > 0);
    settled.filter_map(|position| Some((xmax(&position.snapshot)?, position.floor))).fold(
        None,
        |bounds, (xmax, floor)| {
            let (oldest, highest) = bounds.unwrap_or((xmax, floor));
            Some((oldest.min(xmax), highest.max(floor)))
        },
    )
}

/// Pairs of a seq and a transaction id taken after it was read. Of those whose id is older than a snapshot's xmax, the
/// largest seq is the snapshot's floor.
#[derive(Debug, Default)]
pub(crate) struct Floors {
    proven: i64,
    pending: Vec<(i64, u64)>,
}

impl Floors {
    pub fn checkpoint(&mut self, seq: i64, xid: u64) {
        self.pending.push((seq, xid));
    }

    /// The floor for a snapshot with this xmax. A pair once older than a snapshot stays older than all later ones.
    pub fn floor(&mut self, xmax: u64) -> i64 {
        let proven = &mut self.proven;
        self.pending.retain(|(seq, xid)| {
            if *xid < xmax {
                *proven = (*proven).max(*seq);
            }
            *xid >= xmax
        });
        self.proven
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seq: i64) -> Position {
        Position { snapshot: "10:20:12".into(), seq, floor: 3, catch_up: None }
    }

    #[test]
    fn a_read_moves_to_its_snapshot_and_its_last_fresh_row() {
        let now: Arc<str> = "15:30:".into();
        let next = at(100).after(&now, 90, &Ends { fresh_last: Some(120), ..Ends::default() });
        assert_eq!(next, Position { snapshot: now.clone(), seq: 120, floor: 90, catch_up: None });
        let empty = at(100).after(&now, 90, &Ends::default());
        assert_eq!((empty.seq, &empty.snapshot), (100, &now));
    }

    #[test]
    fn more_late_rows_than_a_read_takes_are_caught_up_under_one_snapshot() {
        let (first, second, third): (Arc<str>, Arc<str>, Arc<str>) =
            ("15:30:".into(), "16:31:".into(), "17:32:".into());
        let more = |last| Ends { late_last: Some(last), late_more: true, fresh_last: None };
        let begun = at(100).after(&first, 90, &more(40));
        assert_eq!((begun.snapshot.as_ref(), begun.seq), ("10:20:12", 100));
        assert_eq!(begun.catch_up, Some(CatchUp { snapshot: first.clone(), seq: 40 }));
        let further = begun.after(&second, 95, &more(60));
        assert_eq!(further.catch_up, Some(CatchUp { snapshot: first.clone(), seq: 60 }));
        let done = further.after(&third, 96, &Ends { late_last: Some(70), ..Ends::default() });
        assert_eq!(done, Position { snapshot: first, seq: 100, floor: 3, catch_up: None });
    }

    #[test]
    fn a_floor_counts_only_once_its_id_is_older_than_the_snapshot() {
        let mut floors = Floors::default();
        floors.checkpoint(50, 7);
        floors.checkpoint(80, 9);
        assert_eq!(floors.floor(7), 0);
        assert_eq!(floors.floor(8), 50);
        assert_eq!(floors.floor(10), 80);
    }

    #[test]
    fn astray_rows_are_looked_for_from_the_oldest_snapshot_to_the_highest_floor() {
        let older = Position { snapshot: "5:9:".into(), seq: 40, floor: 30, catch_up: None };
        let without_floor = Position { snapshot: "1:1:".into(), seq: 0, floor: 0, catch_up: None };
        assert_eq!(astray_bounds([at(100), older, without_floor.clone()].iter()), Some((9, 30)));
        assert_eq!(astray_bounds([without_floor].iter()), None);
    }

    #[test]
    fn xmax_is_the_middle_part() {
        assert_eq!(xmax("10:20:12,13"), Some(20));
        assert_eq!(xmax("nonsense"), None);
    }
}
