//! Pure: what a relay knows of its lanes on PostgreSQL, beside the book that every store keeps: which server told it, and how a
//! read with late rows moves a position.

use std::collections::BTreeMap;
use std::time::Duration;

use postroom::lane_book::{Asked, Found, LaneBook, Passed, Reached};
use postroom::{Delivery, Message};

use crate::log::position::{Ends, Floors, Position};
use crate::log::row::{FoundRow, ParkedRow, Read};
use crate::log::source::ReadCounters;

/// A look for parked messages that brought none and took longer than this takes at most one part in so many of the time.
const LOOK_IS_CHEAP: Duration = Duration::from_millis(20);
const LOOK_PART: u32 = 20;
const LOOK_AGAIN_MAX: Duration = Duration::from_secs(5);
/// A floor costs a transaction id.
const CHECKPOINT_EVERY: Duration = Duration::from_secs(1);
/// About as many seqs may lie between a floor and a position before a new floor is asked for sooner.
const FLOOR_BEHIND_MAX: i64 = 1000;

#[derive(Default)]
pub(crate) struct Lanes {
    pub book: LaneBook<Position>,
    /// The incarnation of the server that all of this was learnt from.
    pub generation: u64,
    pub floors: Floors,
    /// The last read found fresh rows, so the floor is worth raising.
    pub floor_is_stale: bool,
    /// When a floor was last asked for.
    pub checkpoint_at: Option<Duration>,
    /// What was parked or dead when lanes were taken has seqs up to this one.
    pub dealt_with: i64,
    /// Whether the route has parked messages or blocked keys; none: nobody has looked.
    pub any_parked: Option<bool>,
    /// How often we parked so far; who began to look before the last time does not know of it.
    pub parks: u64,
    /// Not before this it is looked for parked messages again.
    look_at: Duration,
    /// The last look was dear, and brought nothing.
    look_was_dear: bool,
    /// The route keeps order within keys.
    pub ordered: bool,
    pub reads: ReadCounters,
}

impl Lanes {
    /// Forgets everything when the server is not the one any more that told it.
    pub fn belong_to(&mut self, generation: u64) {
        if self.generation != generation {
            self.book.lose_all();
            self.floors = Floors::default();
            self.any_parked = None;
            self.generation = generation;
        }
    }

    /// Whether a floor is worth a transaction id: once a second, or when each read has to pass over many rows again for lack of
    /// it.
    pub fn wants_checkpoint(&self, now: Duration, asked: &[Asked<Position>]) -> bool {
        let long = |ask: &Asked<Position>| ask.position.seq - ask.position.floor > FLOOR_BEHIND_MAX;
        self.floor_is_stale
            && (self.checkpoint_at.is_none_or(|at| now.saturating_sub(at) >= CHECKPOINT_EVERY)
                || asked.iter().any(long))
    }

    /// We parked something, or what was parked may have become claimable.
    pub fn parked(&mut self) {
        self.parks += 1;
        self.any_parked = Some(true);
        self.look_at = Duration::ZERO;
    }

    pub fn may_look(&self, now: Duration) -> bool {
        now >= self.look_at
    }

    /// A look has ended. Rows that were deleted, and that somebody's snapshot keeps alive, can make it dear; so one that brought
    /// nothing for the second time is repeated the later the longer it took.
    pub fn look_took(&mut self, now: Duration, took: Duration, brought: bool) {
        let dear = !brought && took > LOOK_IS_CHEAP;
        let before = std::mem::replace(&mut self.look_was_dear, dear);
        self.look_at = if dear && before { now + (took * LOOK_PART).min(LOOK_AGAIN_MAX) } else { Duration::ZERO };
    }

    /// What somebody found who began to look when so much was parked by us.
    pub fn looked(&mut self, any_parked: bool, parks: u64) {
        if any_parked || self.parks == parks {
            self.any_parked = Some(any_parked);
        }
    }

    /// Takes in what a read found; whether there is more.
    pub fn take_in(&mut self, asked: Vec<Asked<Position>>, read: Read) -> (Vec<Delivery>, bool) {
        let floor = self.floors.floor(read.xmax);
        let mut by_lane: BTreeMap<u16, (Vec<FoundRow>, Vec<FoundRow>)> = BTreeMap::new();
        for row in read.rows {
            let (late, fresh) = by_lane.entry(row.lane).or_default();
            if row.late { late.push(row) } else { fresh.push(row) }
        }
        let mut deliveries = Vec::new();
        let mut more = false;
        for ask in asked {
            let (mut late, mut fresh) = by_lane.remove(&ask.lane).unwrap_or_default();
            if !self.book.holds(ask.lane, ask.epoch) {
                continue;
            }
            // Seqs of late rows lie below those of fresh ones: where a late row is cut, every fresh one is.
            let (late_cut, fresh_cut) = (late.iter().any(|row| row.cut), fresh.iter().any(|row| row.cut));
            late.retain(|row| !row.cut);
            fresh.retain(|row| !row.cut);
            if late_cut && late.is_empty() {
                // Nothing of it fitted in: it stays as it is.
                self.book.have_more(&[(ask.lane, ask.epoch)]);
                more = true;
                continue;
            }
            let late_more = late_cut || late.len() > ask.limit;
            late.truncate(ask.limit);
            let full = late_more || fresh_cut || fresh.len() + late.len() >= ask.limit;
            fresh.truncate(if late_more { 0 } else { ask.limit.saturating_sub(late.len()) });
            self.reads.late += late.len() as u64;
            self.reads.fresh += fresh.len() as u64;
            self.reads.catch_ups += u64::from(late_more);
            self.floor_is_stale |= !fresh.is_empty();

            let after = |ends: &Ends| ask.position.after(&read.snapshot, floor, ends);
            let last = |rows: &[FoundRow]| rows.last().map(|row| row.seq);
            let ends = Ends { late_last: last(&late), late_more, fresh_last: last(&fresh) };
            let position = after(&ends);
            more |= full || position.catch_up.is_some();
            let mut rows = Vec::with_capacity(late.len() + fresh.len());
            // A relay that begins in the middle of the late rows catches up with the rest of them.
            for row in late {
                let late_more = late_more || Some(row.seq) != ends.late_last;
                let behind = Ends { late_last: Some(row.seq), late_more, fresh_last: None };
                rows.push(Passed { position: after(&behind), found: row.found() });
            }
            for row in fresh {
                let behind = Ends { fresh_last: Some(row.seq), ..ends };
                rows.push(Passed { position: after(&behind), found: row.found() });
            }
            if rows.is_empty() && ask.position.catch_up.is_some() {
                rows.push(Passed { position: position.clone(), found: None });
            }
            deliveries.extend(self.book.took_in(&ask, Reached { position, full }, rows));
        }
        (deliveries, more)
    }

    /// Takes in parked messages that can go out.
    pub fn take_in_parked(&mut self, rows: Vec<ParkedRow>) -> Vec<Delivery> {
        rows.into_iter().filter_map(|ParkedRow { lane, found }| self.book.took_in_parked(lane, found)).collect()
    }
}

impl FoundRow {
    /// None: another route's, or dealt with already.
    fn found(self) -> Option<Found> {
        let Self { seq, scheduled, behind, unreadable, message, .. } = self;
        let message: Message = message?;
        let key = message.ordering_key().map(str::to_owned);
        Some(Found {
            seq,
            key,
            attempts: 0,
            scheduled,
            behind,
            deaths: 0,
            doubts: 0,
            unreadable,
            replay: None,
            message,
        })
    }
}
