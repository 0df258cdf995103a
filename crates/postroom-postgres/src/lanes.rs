//! What a relay knows of its lanes: positions, what is out, what was lost. No I/O.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Instant;

use postroom::{Delivery, Origin, ReadId, Settlement, Token, Watermark};

use crate::log_source::ReadCounters;
use crate::position::{Floors, Found, Position};
use crate::row::{FoundRow, Granted, ParkedRow, Read};

#[derive(Default)]
pub(crate) struct Lanes {
    /// The incarnation of the server that all of this was learnt from.
    pub generation: u64,
    /// The incarnation whose cluster was last compared with the stored one.
    pub rebased: u64,
    pub floors: Floors,
    /// The last read found fresh rows, so the floor is worth raising.
    pub floor_is_stale: bool,
    pub reads: ReadCounters,
    lanes: BTreeMap<u16, Lane>,
    next_token: u64,
    out: HashMap<Token, Out>,
    /// Out when their lane was lost, and not settled since.
    fenced: HashSet<Token>,
    lost: Vec<u16>,
    /// The lane that is asked first next time.
    turn: usize,
    /// There is one claim at a time.
    claims_begun: u64,
    claim_under_way: bool,
}

struct Lane {
    epoch: i64,
    position: Position,
    watermark: Watermark<Position>,
    /// Reached, but not written yet.
    unwritten: Option<Position>,
    /// The last read took as much as it was allowed.
    full: bool,
    /// Another relay's share, since the claim of this number: nothing more is claimed here, and it is given back when
    /// nothing of it is out.
    leaving: Option<u64>,
    /// We stop claiming here without a renewal; only ever earlier than the database's own expiry.
    deadline: Instant,
}

impl Lane {
    fn claimable(&self, now: Instant) -> bool {
        self.deadline > now && self.leaving.is_none()
    }
}

/// A delivery that was handed out.
pub(crate) struct Out {
    pub lane: u16,
    pub epoch: i64,
    pub seq: i64,
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
    /// those that had more last time.
    pub fn ask(&mut self, want: usize) -> Vec<Asked> {
        let now = Instant::now();
        let mut lanes: Vec<(&u16, &Lane)> = self.lanes.iter().filter(|(_, lane)| lane.claimable(now)).collect();
        if lanes.is_empty() {
            return Vec::new();
        }
        let count = lanes.len();
        lanes.rotate_left(self.turn % count);
        self.turn = self.turn.wrapping_add(1);
        let full = lanes.iter().filter(|(_, lane)| lane.full).count();
        let rest = want.saturating_sub(count);
        let even = if full == 0 { rest } else { rest / 2 } / count;
        let extra = (rest - even * count).checked_div(full).unwrap_or(0);
        let asked = lanes.into_iter().take(want).map(|(number, lane)| Asked {
            lane: *number,
            epoch: lane.epoch,
            position: lane.position.clone(),
            limit: 1 + even + if lane.full { extra } else { 0 },
        });
        asked.collect()
    }

    /// Takes in what a read found.
    pub fn take_in(&mut self, asked: Vec<Asked>, read: Read) -> (Vec<Delivery>, bool) {
        let floor = match self.floors.floor(read.xmax) {
            _ if cfg!(seeded_bug = "floor_at_the_newest_seq") => i64::MAX / 2,
            floor => floor,
        };
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
            let late_more = late.len() > ask.limit;
            late.truncate(ask.limit);
            let full = late_more || fresh.len() + late.len() >= ask.limit;
            fresh.truncate(if late_more { 0 } else { ask.limit - late.len() });
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
                let out = Out { lane: ask.lane, epoch: ask.epoch, seq: row.seq, key, read: Some(id) };
                deliveries.push(Delivery {
                    token: self.hand_out(out),
                    lane: ask.lane,
                    origin: Origin::Outbox,
                    attempts: 0,
                    scheduled: row.scheduled,
                    behind: row.behind,
                    message,
                });
            }
        }
        (deliveries, more)
    }

    /// Takes in parked messages that can go out.
    pub fn take_in_parked(&mut self, rows: Vec<ParkedRow>) -> Vec<Delivery> {
        let mut deliveries = Vec::with_capacity(rows.len());
        for ParkedRow { lane, seq, key, attempts, message } in rows {
            let Some(epoch) = self.lanes.get(&lane).map(|lane| lane.epoch) else { continue };
            let token = self.hand_out(Out { lane, epoch, seq, key, read: None });
            let (origin, scheduled, behind) = (Origin::Parked, false, false);
            deliveries.push(Delivery { token, lane, origin, attempts, scheduled, behind, message });
        }
        deliveries
    }

    /// Takes in what a renewal of `held` brought.
    pub fn renewed(&mut self, held: &[(u16, i64)], granted: Vec<Granted>, deadline: Instant) {
        let kept: HashSet<u16> = granted.iter().map(|granted| granted.lane).collect();
        for Granted { lane: number, epoch, kept, position } in granted {
            match self.lanes.get_mut(&number) {
                Some(lane) if kept && lane.epoch == epoch => lane.deadline = deadline,
                _ => {
                    if let Some(before) = self.lanes.get(&number).map(|lane| lane.epoch) {
                        self.lose(number, before);
                    }
                    let watermark = Watermark::default();
                    let (unwritten, full, leaving) = (None, true, None);
                    let lane = Lane { epoch, position, watermark, unwritten, full, leaving, deadline };
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
            claimed && lane.unwritten.is_none() && !busy.contains(number)
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
            self.lost.push(number);
            let fenced = &mut self.fenced;
            self.out.retain(|token, out| {
                let gone = out.lane == number && out.epoch == epoch;
                if gone {
                    fenced.insert(*token);
                }
                !gone
            });
        }
    }

    /// One delivery is settled and recorded.
    pub fn settle(&mut self, token: Token) {
        let Some(out) = self.out.remove(&token) else { return };
        let Some(lane) = self.lanes.get_mut(&out.lane).filter(|lane| lane.epoch == out.epoch) else { return };
        if let Some(read) = out.read {
            lane.watermark.settled(read);
        }
        if let Some(position) = lane.watermark.advance() {
            lane.unwritten = Some(position);
        }
    }

    /// How many of these deliveries had lost their lane; each is counted once. What the relay dropped of a lost lane is
    /// never settled, and is forgotten with the next settling.
    pub fn take_fenced(&mut self, settlements: &[Settlement]) -> usize {
        let count = settlements.iter().filter(|settlement| self.fenced.remove(&settlement.token)).count();
        if self.lanes.is_empty() || settlements.is_empty() {
            return count;
        }
        if let Some(oldest) = settlements.iter().map(|settlement| settlement.token).min() {
            self.fenced.retain(|token| *token >= oldest);
        }
        count
    }

    /// Deliveries that are settled while their lane's position waits for an older one: a crash repeats these too.
    pub fn settled_ahead(&self) -> usize {
        self.lanes.values().map(|lane| lane.watermark.settled_ahead()).sum()
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

    pub fn take_unwritten(&mut self) -> Vec<(u16, i64, Position)> {
        let lanes = self.lanes.iter_mut();
        lanes.filter_map(|(number, lane)| lane.unwritten.take().map(|at| (*number, lane.epoch, at))).collect()
    }

    /// Positions that could not be written; a newer one has precedence.
    pub fn put_back_unwritten(&mut self, moves: Vec<(u16, i64, Position)>) {
        for (number, epoch, position) in moves {
            if let Some(lane) = self.lanes.get_mut(&number).filter(|lane| lane.epoch == epoch) {
                lane.unwritten.get_or_insert(position);
            }
        }
    }

    pub fn take_lost(&mut self) -> Vec<u16> {
        std::mem::take(&mut self.lost)
    }

    /// Everything was given back.
    pub fn forget(&mut self) {
        self.lanes.clear();
        self.out.clear();
        self.fenced.clear();
    }

    fn hand_out(&mut self, out: Out) -> Token {
        let token = Token(self.next_token);
        self.next_token += 1;
        self.out.insert(token, out);
        token
    }
}
