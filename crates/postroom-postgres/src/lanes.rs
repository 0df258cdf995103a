//! What a relay knows of its lanes: positions, what is out, what was lost. No I/O.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::{Duration, Instant};

use postroom::{Delivery, LostLane, MessageId, Origin, ReadId, Token, Watermark};

use crate::log_source::ReadCounters;
use crate::position::{Floors, Found, Position};
use crate::row::{FoundRow, Granted, ParkedRow, Read};

/// Writing positions takes at most about one part in so many of the time.
const WRITE_PART: u32 = 20;
/// With so many messages waiting for it, positions are written at once; with fewer when the relay wants few.
const UNWRITTEN_MAX: usize = 200;
/// With fewer places than lanes, each so many reads look into all lanes, also those that had nothing last time.
const LOOK_EVERY: usize = 8;

#[derive(Default)]
pub(crate) struct Lanes {
    /// The incarnation of the server that all of this was learnt from.
    pub generation: u64,
    pub floors: Floors,
    /// The last read found fresh rows, so the floor is worth raising.
    pub floor_is_stale: bool,
    /// The last read saw no parked messages, and none were parked since: it is of no use to look for them.
    pub none_parked: bool,
    /// The route keeps order within keys.
    pub ordered: bool,
    pub reads: ReadCounters,
    lanes: BTreeMap<u16, Lane>,
    next_token: u64,
    out: HashMap<Token, Out>,
    lost: Vec<LostLane>,
    /// The lane that is asked first next time.
    turn: usize,
    /// There is one claim at a time.
    claims_begun: u64,
    claim_under_way: bool,
    /// When positions were last on their way to the database, and how long that took.
    wrote_at: Option<Instant>,
    wrote_in: Duration,
    /// How many messages the relay wanted last; a small window must not wait for its positions.
    asked: usize,
}

struct Lane {
    epoch: i64,
    position: Position,
    watermark: Watermark<Position>,
    /// Reached, but not written yet.
    unwritten: Option<Position>,
    /// Messages that the stored position has not passed, although everything up to them is settled.
    unwritten_messages: usize,
    /// A position that passes so many of them is on its way to the database; whether it came there is not known yet.
    writing: Option<usize>,
    /// The last read took as much as it was allowed.
    full: bool,
    /// Another relay's share, since the claim of this number: nothing more is claimed here, and it is given back when
    /// nothing of it is out.
    leaving: Option<u64>,
    /// We stop claiming here without a renewal; only ever earlier than the database's own expiry.
    deadline: Instant,
    /// Relays in a row that died holding it.
    deaths: u32,
}

impl Lane {
    fn claimable(&self, now: Instant) -> bool {
        self.deadline > now && self.leaving.is_none()
    }

    fn asked(&self, number: u16, limit: usize) -> Asked {
        Asked { lane: number, epoch: self.epoch, position: self.position.clone(), limit }
    }
}

/// A delivery that was handed out.
pub(crate) struct Out {
    pub lane: u16,
    pub epoch: i64,
    pub seq: i64,
    pub id: MessageId,
    pub key: Option<String>,
    /// The read it came from; none for a parked one.
    pub read: Option<ReadId>,
}

/// What a read asks of one lane.
pub(crate) struct Asked {
    pub lane: u16,
    pub epoch: i64,
    pub position: Position,
    pub limit: usize,
}

impl Lanes {
    /// Forgets everything when the server is not the one any more that told it.
    pub fn belong_to(&mut self, generation: u64) {
        if self.generation != generation {
            for (number, epoch) in self.epochs() {
                self.lose(number, epoch);
            }
            self.floors = Floors::default();
            self.none_parked = false;
            self.generation = generation;
        }
    }

    /// A claim begins; what it brings is of lanes as they are now.
    pub fn begin_claim(&mut self) {
        self.claims_begun += 1;
        self.claim_under_way = true;
    }

    /// The claim has ended, whatever it brought.
    pub fn end_claim(&mut self) {
        self.claim_under_way = false;
    }

    /// Divides `want` among the lanes: one each first, in turns; then half of the rest evenly, and the other half among
    /// those that had more last time. No lane may have more than `lane_max` deliveries out or settled ahead.
    ///
    /// With fewer places than lanes, those that had more last time are asked, in turns; and now and then, or when there are none
    /// such, all lanes at once, so that a few places over many lanes do not take many reads that find nothing.
    pub fn ask(&mut self, want: usize, lane_max: usize) -> Vec<Asked> {
        let now = Instant::now();
        let has_room = |lane: &Lane| lane.watermark.open() < lane_max;
        let mut lanes: Vec<(&u16, &Lane)> =
            self.lanes.iter().filter(|(_, lane)| lane.claimable(now) && has_room(lane)).collect();
        if lanes.is_empty() {
            return Vec::new();
        }
        let count = lanes.len();
        lanes.rotate_left(self.turn % count);
        self.turn = self.turn.wrapping_add(1);
        let full = lanes.iter().filter(|(_, lane)| lane.full).count();
        if want < count && full < count && !cfg!(seeded_bug = "few_places_are_looked_for_lane_by_lane") {
            let all = full == 0 || self.turn.is_multiple_of(LOOK_EVERY);
            lanes.retain(|(_, lane)| all || lane.full);
            let asked = lanes.into_iter().take(if all { count } else { want });
            return asked.map(|(number, lane)| lane.asked(*number, 1)).collect();
        }
        let rest = want.saturating_sub(count);
        let even = if full == 0 { rest } else { rest / 2 } / count;
        let extra = (rest - even * count).checked_div(full).unwrap_or(0);
        let asked = lanes.into_iter().take(want).map(|(number, lane)| {
            let limit = 1 + even + if lane.full { extra } else { 0 };
            lane.asked(*number, limit.min(lane_max - lane.watermark.open()))
        });
        asked.collect()
    }

    /// These lanes had something that was not taken in.
    pub fn have_more(&mut self, lanes: &[(u16, i64)]) {
        for (number, epoch) in lanes {
            if let Some(lane) = self.lanes.get_mut(number).filter(|lane| lane.epoch == *epoch) {
                lane.full = true;
            }
        }
    }

    /// Takes in what a read found.
    pub fn take_in(&mut self, asked: Vec<Asked>, read: Read) -> (Vec<Delivery>, bool) {
        let floor = match self.floors.floor(read.xmax) {
            _ if cfg!(seeded_bug = "floor_at_the_newest_seq") => i64::MAX / 2,
            floor => floor,
        };
        self.none_parked = !read.any_parked;
        let mut by_lane: BTreeMap<u16, (Vec<FoundRow>, Vec<FoundRow>)> = BTreeMap::new();
        for row in read.rows {
            let (late, fresh) = by_lane.entry(row.lane).or_default();
            if row.late { late.push(row) } else { fresh.push(row) }
        }
        let mut deliveries = Vec::new();
        let mut more = false;
        for ask in asked {
            let (mut late, mut fresh) = by_lane.remove(&ask.lane).unwrap_or_default();
            let Some(lane) = self.lanes.get_mut(&ask.lane).filter(|lane| lane.epoch == ask.epoch) else { continue };
            if cfg!(seeded_bug = "cursor_by_id") {
                late.clear();
            }
            // Seqs of late rows lie below those of fresh ones: where a late row is cut, every fresh one is.
            let (late_cut, fresh_cut) = (late.iter().any(|row| row.cut), fresh.iter().any(|row| row.cut));
            late.retain(|row| !row.cut);
            fresh.retain(|row| !row.cut);
            if late_cut && late.is_empty() {
                // Nothing of it fitted in: it stays as it is.
                (lane.full, more) = (true, true);
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

            let last = |rows: &[FoundRow]| rows.last().map(|row| row.seq);
            let found = Found { late_last: last(&late), late_more, fresh_last: last(&fresh) };
            let next = ask.position.after(&read.snapshot, floor, &found);
            let moved = next.seq != ask.position.seq || !late.is_empty() || ask.position.catch_up.is_some();
            lane.position = next.clone();
            lane.full = full;
            more |= full || next.catch_up.is_some();
            if !moved {
                // Nothing found: the newer snapshot is ours in memory and need not be written.
                continue;
            }
            let rows: Vec<FoundRow> = late.into_iter().chain(fresh).filter(|row| row.message.is_some()).collect();
            let id = lane.watermark.opened(next, rows.len());
            if let Some(position) = lane.watermark.advance() {
                lane.unwritten = Some(position);
            }
            for row in rows {
                let Some(message) = row.message else { continue };
                let key = message.ordering_key().map(str::to_owned);
                let out = Out { lane: ask.lane, epoch: ask.epoch, seq: row.seq, id: message.id, key, read: Some(id) };
                deliveries.push(Delivery {
                    token: self.hand_out(out),
                    lane: ask.lane,
                    origin: Origin::Outbox,
                    attempts: 0,
                    scheduled: row.scheduled,
                    behind: row.behind,
                    deaths: 0,
                    unreadable: row.unreadable,
                    doubts: 0,
                    message,
                });
            }
        }
        (deliveries, more)
    }

    /// Takes in parked messages that can go out.
    pub fn take_in_parked(&mut self, rows: Vec<ParkedRow>) -> Vec<Delivery> {
        let mut deliveries = Vec::with_capacity(rows.len());
        for ParkedRow { lane, seq, key, attempts, deaths, doubts, message, unreadable } in rows {
            let Some(epoch) = self.lanes.get(&lane).map(|lane| lane.epoch) else { continue };
            let token = self.hand_out(Out { lane, epoch, seq, id: message.id, key, read: None });
            let (origin, scheduled, behind) = (Origin::Parked, false, false);
            deliveries.push(Delivery {
                token,
                lane,
                origin,
                attempts,
                scheduled,
                behind,
                deaths,
                doubts,
                unreadable,
                message,
            });
        }
        deliveries
    }

    /// Takes in what a renewal of `held` brought.
    pub fn renewed(&mut self, held: &[(u16, i64)], granted: Vec<Granted>, deadline: Instant) {
        let kept: HashSet<u16> = granted.iter().map(|granted| granted.lane).collect();
        for Granted { lane: number, epoch, kept, position, deaths } in granted {
            match self.lanes.get_mut(&number) {
                Some(lane) if kept && lane.epoch == epoch => (lane.deadline, lane.deaths) = (deadline, deaths),
                _ => {
                    if let Some(before) = self.lanes.get(&number).map(|lane| lane.epoch) {
                        self.lose(number, before);
                    }
                    let lane = Lane {
                        epoch,
                        position,
                        watermark: Watermark::default(),
                        unwritten: None,
                        unwritten_messages: 0,
                        writing: None,
                        full: true,
                        leaving: None,
                        deadline,
                        deaths,
                    };
                    self.lanes.insert(number, lane);
                }
            }
        }
        for (number, epoch) in held {
            if !kept.contains(number) {
                self.lose(*number, *epoch);
            }
        }
    }

    /// Keeps to its share: marks lanes beyond it as leaving, those with the least to do first, and returns the lanes that
    /// can be given back now, with nothing out and nothing left to write.
    pub fn keep_to(&mut self, share: usize) -> Vec<(u16, i64)> {
        let staying = self.lanes.values().filter(|lane| lane.leaving.is_none()).count();
        let mut candidates: Vec<(bool, u16)> = self
            .lanes
            .iter()
            .filter(|(_, lane)| lane.leaving.is_some() == (staying < share))
            .map(|(number, lane)| (lane.full, *number))
            .collect();
        candidates.sort_unstable();
        // More relays than before: some lanes leave. Fewer: some that were to leave may stay.
        for (_, number) in candidates.into_iter().take(staying.abs_diff(share)) {
            if let Some(lane) = self.lanes.get_mut(&number) {
                lane.leaving = (staying > share).then_some(self.claims_begun);
            }
        }
        let busy: HashSet<u16> = self.out.values().map(|out| out.lane).collect();
        let leaving = self.lanes.iter().filter(|(number, lane)| {
            // A claim that began before the lane was to leave may still bring something of it.
            let claimed = lane.leaving.is_some_and(|since| !self.claim_under_way || self.claims_begun > since);
            let written =
                lane.unwritten.is_none() && (lane.writing.is_none() || cfg!(seeded_bug = "gives_back_while_writing"));
            claimed && written && !busy.contains(number)
        });
        leaving.map(|(number, lane)| (*number, lane.epoch)).collect()
    }

    /// A lane was given back; nothing of it is out.
    pub fn gave_back(&mut self, given: &[(u16, i64)]) {
        for (number, epoch) in given {
            if self.lanes.get(number).is_some_and(|lane| lane.epoch == *epoch) {
                self.lanes.remove(number);
            }
        }
    }

    /// Forgets a lane that is not ours any more, and everything of it that is out.
    pub fn lose(&mut self, number: u16, epoch: i64) {
        if self.lanes.get(&number).is_some_and(|lane| lane.epoch == epoch) {
            self.lanes.remove(&number);
            tracing::warn!(
                lane = number,
                epoch,
                "lost a lane; what was in hand of it is published again by whoever has it"
            );
            self.lost.push(LostLane { lane: number, before: Token(self.next_token) });
            self.out.retain(|_, out| !(out.lane == number && out.epoch == epoch));
        }
    }

    /// One delivery is settled and recorded; false when its lane was lost, and nothing was.
    pub fn settle(&mut self, token: Token) -> bool {
        let Some(out) = self.out.remove(&token) else { return false };
        let Some(lane) = self.lanes.get_mut(&out.lane).filter(|lane| lane.epoch == out.epoch) else { return false };
        if let Some(read) = out.read {
            lane.watermark.settled(read);
        }
        let ahead = lane.watermark.settled_ahead();
        if let Some(position) = lane.watermark.advance() {
            lane.unwritten = Some(position);
            lane.unwritten_messages += ahead - lane.watermark.settled_ahead();
        }
        true
    }

    /// Deliveries that are settled while their lane's position waits for an older one, or is not written: a crash repeats
    /// these too.
    pub fn settled_ahead(&self) -> usize {
        self.lanes.values().map(|lane| lane.watermark.settled_ahead() + lane.unwritten_messages).sum()
    }

    pub fn out_of(&self, token: Token) -> Option<&Out> {
        self.out.get(&token)
    }

    pub fn epochs(&self) -> Vec<(u16, i64)> {
        self.lanes.iter().map(|(number, lane)| (*number, lane.epoch)).collect()
    }

    pub fn held(&self) -> usize {
        self.lanes.len()
    }

    /// Lanes whose lease has not run out by our own clock.
    pub fn claimable(&self) -> Vec<i16> {
        let now = Instant::now();
        self.lanes.iter().filter(|(_, lane)| lane.claimable(now)).map(|(number, _)| *number as i16).collect()
    }

    pub fn parked_in_hand(&self) -> Vec<i64> {
        self.out.values().filter(|out| out.read.is_none()).map(|out| out.seq).collect()
    }

    /// The relay wants so many messages.
    pub fn wanted(&mut self, messages: usize) {
        self.asked = messages;
    }

    /// Whether it is time to write positions: not so often that writing is most of what is done, and at once when many
    /// messages would be repeated after a crash, or when another relay waits for a lane.
    pub fn positions_are_due(&self, every: Duration) -> bool {
        let wait = if every.is_zero() { every } else { every.max(self.wrote_in * WRITE_PART) };
        let many = (self.asked / 4).clamp(1, UNWRITTEN_MAX);
        let messages: usize = self.lanes.values().map(|lane| lane.unwritten_messages).sum();
        let due = messages >= many || self.wrote_at.is_none_or(|at| at.elapsed() >= wait);
        self.lanes.values().any(|lane| lane.unwritten.is_some() && (due || lane.leaving.is_some()))
    }

    pub fn has_unwritten(&self) -> bool {
        self.lanes.values().any(|lane| lane.unwritten.is_some())
    }

    /// Positions were written, and it took so long.
    pub fn wrote_in(&mut self, took: Duration) {
        self.wrote_in = took;
    }

    /// Begins to write: takes the positions that are to be written.
    pub fn begin_write(&mut self) -> Vec<(u16, i64, Position)> {
        self.wrote_at = Some(Instant::now());
        let lanes = self.lanes.iter_mut();
        let taken = lanes.filter_map(|(number, lane)| {
            lane.unwritten.take().map(|at| {
                lane.writing = Some(lane.unwritten_messages);
                (*number, lane.epoch, at)
            })
        });
        taken.collect()
    }

    /// A write has ended. What could not be written is put back; a newer position has precedence.
    pub fn end_write(&mut self, moves: Vec<(u16, i64, Position)>, written: bool) {
        for (number, epoch, position) in moves {
            if let Some(lane) = self.lanes.get_mut(&number).filter(|lane| lane.epoch == epoch) {
                let passed = lane.writing.take().unwrap_or_default();
                if written {
                    lane.unwritten_messages -= passed;
                } else {
                    lane.unwritten.get_or_insert(position);
                }
            }
        }
    }

    /// Relays in a row that died holding one of these lanes.
    pub fn deaths(&self) -> u32 {
        self.lanes.values().map(|lane| lane.deaths).max().unwrap_or_default()
    }

    pub fn take_lost(&mut self) -> Vec<LostLane> {
        std::mem::take(&mut self.lost)
    }

    /// Everything was given back.
    pub fn forget(&mut self) {
        self.lanes.clear();
        self.out.clear();
    }

    fn hand_out(&mut self, out: Out) -> Token {
        let token = Token(self.next_token);
        self.next_token += 1;
        self.out.insert(token, out);
        token
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holding_one_lane() -> Lanes {
        let mut lanes = Lanes::default();
        let position = Position { snapshot: "10:20:".into(), seq: 0, floor: 0, catch_up: None };
        let granted = Granted { lane: 3, epoch: 1, kept: false, position, deaths: 0 };
        lanes.renewed(&[], vec![granted], Instant::now() + Duration::from_secs(60));
        lanes
    }

    #[test]
    fn what_is_settled_counts_until_its_position_is_known_to_be_written() {
        let mut lanes = holding_one_lane();
        let asked = lanes.ask(10, 10);
        let row = |seq| FoundRow {
            lane: 3,
            seq,
            late: false,
            scheduled: false,
            behind: false,
            cut: false,
            message: Some(postroom::Message::new("orders", "order.placed", "x")),
            unreadable: None,
        };
        let read = Read {
            snapshot: "15:30:".into(),
            xmax: 30,
            drawn: 3,
            any_parked: false,
            astray: false,
            unregistered: false,
            rows: (1..=3).map(row).collect(),
        };
        let (deliveries, _) = lanes.take_in(asked, read);
        for (settled, delivery) in (1..).zip(&deliveries) {
            assert!(lanes.settle(delivery.token));
            assert_eq!(lanes.settled_ahead(), settled, "I3: a crash now repeats them");
        }
        for written in [false, true] {
            let moves = lanes.begin_write();
            assert_eq!((moves.len(), lanes.settled_ahead()), (1, 3));
            lanes.end_write(moves, written);
        }
        assert_eq!((lanes.settled_ahead(), lanes.has_unwritten()), (0, false));
    }

    #[test]
    fn a_lane_is_not_given_back_while_its_position_is_on_its_way() {
        let mut lanes = holding_one_lane();
        let reached = Position { snapshot: "15:30:".into(), seq: 7, floor: 0, catch_up: None };
        if let Some(lane) = lanes.lanes.get_mut(&3) {
            lane.unwritten = Some(reached);
        }
        assert!(lanes.keep_to(0).is_empty(), "unwritten");
        let moves = lanes.begin_write();
        assert_eq!(moves.len(), 1);
        lanes.begin_claim();
        lanes.end_claim();
        assert!(lanes.keep_to(0).is_empty(), "I3: whoever takes it now would begin at the old position");
        lanes.end_write(moves, true);
        assert_eq!(lanes.keep_to(0), [(3, 1)]);
    }
}
