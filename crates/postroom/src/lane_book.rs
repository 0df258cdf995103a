//! Pure: what a relay knows of its lanes. How far each was read, what is out, which position is to be written, what was lost.
//!
//! Every source keeps one, and so does the simulation of the relay. Times are counted from whatever moment the caller likes.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use crate::delivery::{Change, Delivery, Entry, Origin, Settlement, Token};
use crate::message::{Message, MessageId};
use crate::operation::OperationId;
use crate::source::LostLane;
use crate::watermark::{StepId, Watermark};

/// Writing positions takes at most about one part in so many of the time.
const WRITE_PART: u32 = 20;
/// One write that waited for a lock must not keep the next ones away.
const WRITE_PAUSE_MAX: Duration = Duration::from_secs(1);
/// With so many messages waiting for it, positions are written at once; with fewer when the relay wants few.
const UNWRITTEN_MAX: usize = 200;
/// With fewer places than lanes, each so many reads look into all lanes, also those that had nothing last time.
const LOOK_EVERY: usize = 8;

/// A tenure of a lane: its number and its epoch.
pub type Tenant = (u16, i64);

/// The lanes of one relay on one route. `P` is how its store says how far a lane is consumed.
#[derive(Debug)]
pub struct LaneBook<P> {
    lanes: BTreeMap<u16, Lane<P>>,
    next_token: u64,
    out: HashMap<Token, HandedOut>,
    lost: Vec<LostLane>,
    /// Lanes that were lost under these epochs, and of which the store was not told that the one who had them lives.
    outlived: Vec<Tenant>,
    /// The lane that is asked first next time.
    turn: usize,
    /// There is one claim at a time.
    claims_begun: u64,
    claim_under_way: bool,
    /// When positions were last on their way to the store, and how long that took.
    wrote_at: Option<Duration>,
    wrote_in: Duration,
    /// How many messages the relay wanted last; a small window must not wait for its positions.
    wanted: usize,
}

#[derive(Debug)]
struct Lane<P> {
    epoch: i64,
    position: P,
    watermark: Watermark<P>,
    /// Reached, but not written yet.
    unwritten: Option<P>,
    /// Messages that the stored position has not passed, although everything up to them is settled.
    unwritten_messages: usize,
    /// A position that passes so many of them is on its way to the store; whether it came there is not known yet.
    writing: Option<usize>,
    /// The last read took as much as it was allowed.
    full: bool,
    /// Another relay's share, since the claim of this number: nothing more is claimed here, and it is given back when
    /// nothing of it is out.
    leaving: Option<u64>,
    /// We stop claiming here without a renewal; only ever earlier than the store's own expiry.
    deadline: Duration,
    /// Relays in a row that died holding it.
    deaths: u32,
}

/// A lane that a renewal kept or took.
#[derive(Debug, Clone)]
pub struct Granted<P> {
    /// Its number.
    pub lane: u16,
    /// Its tenure.
    pub epoch: i64,
    /// It was ours before, in the same tenure.
    pub kept: bool,
    /// The position in the store.
    pub position: P,
    /// Relays in a row that died holding it.
    pub deaths: u32,
}

/// What a read asks of one lane.
#[derive(Debug, Clone)]
pub struct Asked<P> {
    /// Its number.
    pub lane: u16,
    /// Its tenure.
    pub epoch: i64,
    /// How far it was read.
    pub position: P,
    /// Most messages.
    pub limit: usize,
}

/// How far a read of one lane came.
#[derive(Debug)]
pub struct Reached<P> {
    /// Where the next read begins: behind its last row. With no row it need not be written.
    pub position: P,
    /// It took as much as it was allowed: there may be more.
    pub full: bool,
}

/// A row that a read passed.
#[derive(Debug)]
pub struct Passed<P> {
    /// The position behind it.
    pub position: P,
    /// Its message; none: it does not go out.
    pub found: Option<Found>,
}

/// A message that a read found and that is to go out.
#[derive(Debug)]
pub struct Found {
    /// Its place in the outbox.
    pub seq: i64,
    /// Its key for order, if it waits for others of that key.
    pub key: Option<String>,
    /// As in [`Delivery`].
    pub attempts: u32,
    /// As in [`Delivery`].
    pub scheduled: bool,
    /// As in [`Delivery`].
    pub behind: bool,
    /// As in [`Delivery`].
    pub deaths: u32,
    /// As in [`Delivery`].
    pub doubts: u32,
    /// As in [`Delivery`].
    pub unreadable: Option<String>,
    /// As in [`Delivery`].
    pub replay: Option<OperationId>,
    /// The message itself.
    pub message: Message,
}

/// A delivery that is out.
#[derive(Debug, Clone)]
pub struct HandedOut {
    /// Its lane.
    pub lane: u16,
    /// The tenure in which it was read.
    pub epoch: i64,
    /// Its place in the outbox.
    pub seq: i64,
    /// Its message.
    pub id: MessageId,
    /// Its key for order.
    pub key: Option<String>,
    /// Its place among what its lane handed out; none for a parked one.
    step: Option<StepId>,
}

impl HandedOut {
    /// It came from the parked messages.
    pub fn parked(&self) -> bool {
        self.step.is_none()
    }
}

/// A position on its way to the store.
#[derive(Debug, Clone)]
pub struct Move<P> {
    /// Its lane.
    pub lane: u16,
    /// The tenure in which it was reached.
    pub epoch: i64,
    /// Everything up to here is settled.
    pub position: P,
}

impl<P> Default for LaneBook<P> {
    fn default() -> Self {
        Self {
            lanes: BTreeMap::new(),
            next_token: 0,
            out: HashMap::new(),
            lost: Vec::new(),
            outlived: Vec::new(),
            turn: 0,
            claims_begun: 0,
            claim_under_way: false,
            wrote_at: None,
            wrote_in: Duration::ZERO,
            wanted: 0,
        }
    }
}

impl<P> Lane<P> {
    fn claimable(&self, now: Duration) -> bool {
        self.deadline > now && self.leaving.is_none()
    }
}

impl<P: Clone> LaneBook<P> {
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
    pub fn ask(&mut self, now: Duration, want: usize, lane_max: usize) -> Vec<Asked<P>> {
        let has_room = |lane: &Lane<P>| lane.watermark.open() < lane_max;
        let mut lanes: Vec<(&u16, &Lane<P>)> =
            self.lanes.iter().filter(|(_, lane)| lane.claimable(now) && has_room(lane)).collect();
        if lanes.is_empty() || want == 0 {
            return Vec::new();
        }
        let count = lanes.len();
        lanes.rotate_left(self.turn % count);
        self.turn = self.turn.wrapping_add(1);
        let asked = |number: u16, lane: &Lane<P>, limit: usize| {
            let limit = limit.min(lane_max - lane.watermark.open());
            Asked { lane: number, epoch: lane.epoch, position: lane.position.clone(), limit }
        };
        let full = lanes.iter().filter(|(_, lane)| lane.full).count();
        if want < count && full < count {
            let all = full == 0 || self.turn.is_multiple_of(LOOK_EVERY);
            lanes.retain(|(_, lane)| all || lane.full);
            let some = lanes.into_iter().take(if all { count } else { want });
            return some.map(|(number, lane)| asked(*number, lane, 1)).collect();
        }
        let rest = want.saturating_sub(count);
        let even = if full == 0 { rest } else { rest / 2 } / count;
        let extra = (rest - even * count).checked_div(full).unwrap_or(0);
        let some = lanes.into_iter().take(want);
        some.map(|(number, lane)| asked(*number, lane, 1 + even + if lane.full { extra } else { 0 })).collect()
    }

    /// These lanes had something that was not taken in.
    pub fn have_more(&mut self, lanes: &[Tenant]) {
        for (number, epoch) in lanes {
            if let Some(lane) = self.lane_mut(*number, *epoch) {
                lane.full = true;
            }
        }
    }

    /// Whether this tenure is still ours.
    pub fn holds(&self, number: u16, epoch: i64) -> bool {
        self.lanes.get(&number).is_some_and(|lane| lane.epoch == epoch)
    }

    /// Takes in the rows of a read of one lane, in the order in which they are to go out; nothing when the lane was lost.
    pub fn took_in(
        &mut self,
        asked: &Asked<P>,
        reached: Reached<P>,
        rows: impl IntoIterator<Item = Passed<P>>,
    ) -> Vec<Delivery> {
        let Some(lane) = self.lane_mut(asked.lane, asked.epoch) else { return Vec::new() };
        (lane.position, lane.full) = (reached.position, reached.full);
        let mut steps = Vec::new();
        for Passed { position, found } in rows {
            match found {
                Some(found) => steps.push((lane.watermark.handed_out(position), found)),
                None => lane.watermark.passed(position),
            }
        }
        if let Some(position) = lane.watermark.advance() {
            lane.unwritten = Some(position);
        }
        steps.into_iter().map(|(step, found)| self.hand_out((asked.lane, asked.epoch), found, Some(step))).collect()
    }

    /// Takes in a parked message that can go out; none when its lane is not ours.
    pub fn took_in_parked(&mut self, lane: u16, found: Found) -> Option<Delivery> {
        let epoch = self.lanes.get(&lane)?.epoch;
        Some(self.hand_out((lane, epoch), found, None))
    }

    /// Takes in what a renewal of `held` brought.
    pub fn renewed(&mut self, held: &[Tenant], granted: Vec<Granted<P>>, deadline: Duration) {
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
    pub fn keep_to(&mut self, share: usize) -> Vec<Tenant> {
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
            let written = lane.unwritten.is_none() && lane.writing.is_none();
            claimed && written && !busy.contains(number)
        });
        leaving.map(|(number, lane)| (*number, lane.epoch)).collect()
    }

    /// Lanes were given back; nothing of them is out.
    pub fn gave_back(&mut self, given: &[Tenant]) {
        for (number, epoch) in given {
            if self.holds(*number, *epoch) {
                self.lanes.remove(number);
            }
        }
    }

    /// Forgets a lane that is not ours any more, and everything of it that is out; whether it was ours until now.
    pub fn lose(&mut self, number: u16, epoch: i64) -> bool {
        let held = self.holds(number, epoch);
        if held {
            self.lanes.remove(&number);
            self.lost.push(LostLane { lane: number, before: Token(self.next_token) });
            self.outlived.retain(|(lane, _)| *lane != number);
            self.outlived.push((number, epoch));
            self.out.retain(|_, out| !(out.lane == number && out.epoch == epoch));
        }
        held
    }

    /// Every lane is lost: the store is not the one that granted them.
    pub fn lose_all(&mut self) {
        for (number, epoch) in self.held() {
            self.lose(number, epoch);
        }
        // Epochs of another store mean nothing in this one.
        self.outlived.clear();
    }

    /// Lanes that were lost, with their epochs. Where another relay has taken one as from a dead relay, that was no death.
    pub fn outlived(&self) -> Vec<Tenant> {
        self.outlived.clone()
    }

    /// The store was told of these.
    pub fn forgiven(&mut self, told: &[Tenant]) {
        self.outlived.retain(|lost| !told.contains(lost));
    }

    /// What these settlements leave in the store beside positions. `ordered`: the route keeps order within keys.
    pub fn entries(&self, settlements: &[Settlement], ordered: bool) -> Vec<Entry> {
        let entry = |settlement: &Settlement| {
            let HandedOut { lane, epoch, seq, id, key, step } = self.out.get(&settlement.token)?;
            let parked = step.is_none();
            let change = Change::of(&settlement.outcome, parked)?;
            // Without order a message waits for no other, but those that an operator gave back do.
            let key = key.clone().filter(|_| ordered || parked);
            Some(Entry { lane: *lane, epoch: *epoch, seq: *seq, id: *id, key, parked, change })
        };
        settlements.iter().filter_map(entry).collect()
    }

    /// One delivery is settled and recorded; false when its lane was lost, and nothing was.
    pub fn settle(&mut self, token: Token) -> bool {
        let Some(out) = self.out.remove(&token) else { return false };
        let Some(lane) = self.lane_mut(out.lane, out.epoch) else { return false };
        if let Some(step) = out.step {
            lane.watermark.settled(step);
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

    /// A delivery that is out; none when it is settled or its lane was lost.
    pub fn out(&self, token: Token) -> Option<&HandedOut> {
        self.out.get(&token)
    }

    /// The lanes held.
    pub fn held(&self) -> Vec<Tenant> {
        self.lanes.iter().map(|(number, lane)| (*number, lane.epoch)).collect()
    }

    /// Lanes whose lease has not run out by our own clock, and that are not to be given back.
    pub fn claimable(&self, now: Duration) -> Vec<u16> {
        self.lanes.iter().filter(|(_, lane)| lane.claimable(now)).map(|(number, _)| *number).collect()
    }

    /// How far a lane was read; none when it is not held.
    pub fn position(&self, number: u16) -> Option<&P> {
        self.lanes.get(&number).map(|lane| &lane.position)
    }

    /// Parked messages that are out: lane and seq.
    pub fn parked_in_hand(&self) -> impl Iterator<Item = (u16, i64)> + '_ {
        self.out.values().filter(|out| out.parked()).map(|out| (out.lane, out.seq))
    }

    /// The relay wants so many messages.
    pub fn wants(&mut self, messages: usize) {
        self.wanted = messages;
    }

    /// Whether it is time to write positions: not so often that writing is most of what is done, and at once when many
    /// messages would be repeated after a crash, or when another relay waits for a lane of which nothing is out any more.
    pub fn due(&self, now: Duration, every: Duration) -> bool {
        let pause = self.wrote_in.saturating_mul(WRITE_PART).min(WRITE_PAUSE_MAX);
        let wait = if every.is_zero() { every } else { every.max(pause) };
        let many = (self.wanted / 4).clamp(1, UNWRITTEN_MAX);
        let messages: usize = self.lanes.values().map(|lane| lane.unwritten_messages).sum();
        let due = messages >= many || self.wrote_at.is_none_or(|at| now.saturating_sub(at) >= wait);
        let leaves = |lane: &Lane<P>| lane.leaving.is_some() && lane.watermark.open() == 0;
        self.lanes.values().any(|lane| lane.unwritten.is_some() && (due || leaves(lane)))
    }

    /// A position was reached and is not on its way to the store.
    pub fn has_unwritten(&self) -> bool {
        self.lanes.values().any(|lane| lane.unwritten.is_some())
    }

    /// Begins to write: takes the positions that are to be written. One write at a time: an older position must not come after
    /// a newer one.
    pub fn begin_write(&mut self, now: Duration) -> Vec<Move<P>> {
        self.wrote_at = Some(now);
        let lanes = self.lanes.iter_mut();
        let taken = lanes.filter_map(|(number, lane)| {
            let position = lane.unwritten.take()?;
            lane.writing = Some(lane.unwritten_messages);
            Some(Move { lane: *number, epoch: lane.epoch, position })
        });
        taken.collect()
    }

    /// A write has ended, and everything of it was written for these lanes; the others are not ours any more. None: it is not
    /// known whether anything was written. That is put back; a newer position has precedence.
    pub fn end_write(&mut self, now: Duration, moves: Vec<Move<P>>, written: Option<&HashSet<u16>>) {
        if let Some(written) = written {
            self.wrote_in = self.wrote_at.map_or(Duration::ZERO, |at| now.saturating_sub(at));
            for Move { lane, epoch, .. } in &moves {
                if !written.contains(lane) {
                    self.lose(*lane, *epoch);
                }
            }
        }
        for Move { lane: number, epoch, position } in moves {
            let Some(lane) = self.lane_mut(number, epoch) else { continue };
            let passed = lane.writing.take().unwrap_or_default();
            if written.is_some() {
                lane.unwritten_messages -= passed;
            } else {
                lane.unwritten.get_or_insert(position);
            }
        }
    }

    /// Relays in a row that died holding one of these lanes.
    pub fn deaths(&self) -> u32 {
        self.lanes.values().map(|lane| lane.deaths).max().unwrap_or_default()
    }

    /// Lanes lost since this was last asked.
    pub fn take_lost(&mut self) -> Vec<LostLane> {
        std::mem::take(&mut self.lost)
    }

    /// Everything was given back.
    pub fn forget(&mut self) {
        self.lanes.clear();
        self.out.clear();
        self.lost.clear();
        self.outlived.clear();
    }

    fn lane_mut(&mut self, number: u16, epoch: i64) -> Option<&mut Lane<P>> {
        self.lanes.get_mut(&number).filter(|lane| lane.epoch == epoch)
    }

    fn hand_out(&mut self, (lane, epoch): Tenant, found: Found, step: Option<StepId>) -> Delivery {
        let Found { seq, key, attempts, scheduled, behind, deaths, doubts, unreadable, replay, message } = found;
        let token = Token(self.next_token);
        self.next_token += 1;
        self.out.insert(token, HandedOut { lane, epoch, seq, id: message.id, key, step });
        let origin = if step.is_some() { Origin::Outbox } else { Origin::Parked };
        Delivery {
            token,
            lane,
            origin,
            attempts,
            scheduled,
            behind,
            deaths,
            doubts,
            unreadable,
            replay,
            message: Arc::new(message),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LATE: Duration = Duration::from_secs(60);

    fn holding(lanes: u16) -> LaneBook<i64> {
        let mut book = LaneBook::default();
        let granted = (0..lanes).map(|lane| Granted { lane, epoch: 1, kept: false, position: 0, deaths: 0 }).collect();
        book.renewed(&[], granted, LATE);
        book
    }

    fn found(seq: i64) -> Found {
        let message = Message::new("orders", "order.placed", "x");
        let (attempts, deaths, doubts) = (0, 0, 0);
        let (scheduled, behind, unreadable, replay) = (false, false, None, None);
        Found { seq, key: None, attempts, scheduled, behind, deaths, doubts, unreadable, replay, message }
    }

    fn read(book: &mut LaneBook<i64>, asked: &Asked<i64>, rows: i64) -> Vec<Delivery> {
        let from = asked.position;
        let reached = Reached { position: from + rows, full: rows as usize >= asked.limit };
        book.took_in(
            asked,
            reached,
            (from + 1..=from + rows).map(|seq| Passed { position: seq, found: Some(found(seq)) }),
        )
    }

    #[test]
    fn what_is_settled_counts_until_its_position_is_known_to_be_written() {
        let mut book = holding(1);
        let asked = book.ask(Duration::ZERO, 10, 10);
        let deliveries = read(&mut book, &asked[0], 3);
        for (settled, delivery) in (1..).zip(&deliveries) {
            assert!(book.settle(delivery.token));
            assert_eq!(book.settled_ahead(), settled, "I3: a crash now repeats them");
        }
        for written in [None, Some(HashSet::from([0]))] {
            let moves = book.begin_write(Duration::ZERO);
            assert_eq!((moves.len(), book.settled_ahead()), (1, 3));
            book.end_write(Duration::ZERO, moves, written.as_ref());
        }
        assert_eq!((book.settled_ahead(), book.has_unwritten()), (0, false));
    }

    #[test]
    fn a_lane_is_not_given_back_while_its_position_is_on_its_way() {
        let mut book = holding(1);
        let asked = book.ask(Duration::ZERO, 10, 10);
        let deliveries = read(&mut book, &asked[0], 1);
        book.settle(deliveries[0].token);
        assert!(book.keep_to(0).is_empty(), "unwritten");
        let moves = book.begin_write(Duration::ZERO);
        assert_eq!(moves.len(), 1);
        book.begin_claim();
        book.end_claim();
        assert!(book.keep_to(0).is_empty(), "I3: whoever takes it now would begin at the old position");
        book.end_write(Duration::ZERO, moves, Some(&HashSet::from([0])));
        assert_eq!(book.keep_to(0), [(0, 1)]);
    }

    #[test]
    fn what_a_read_of_an_earlier_tenure_brings_is_thrown_away() {
        let mut book = holding(2);
        let asked = book.ask(Duration::ZERO, 10, 10);
        let of_lane_1 = asked.iter().find(|asked| asked.lane == 1).unwrap();
        let again = Granted { lane: 1, epoch: 2, kept: false, position: 0, deaths: 0 };
        let kept = Granted { lane: 0, epoch: 1, kept: true, position: 0, deaths: 0 };
        book.renewed(&[(0, 1), (1, 1)], vec![kept, again], LATE);
        assert!(read(&mut book, of_lane_1, 3).is_empty());
        assert_eq!((book.take_lost().len(), book.position(1)), (1, Some(&0)));
    }

    #[test]
    fn a_lane_whose_position_was_refused_is_lost_with_what_is_out() {
        let mut book = holding(2);
        let asked = book.ask(Duration::ZERO, 10, 10);
        let mut out = Vec::new();
        for asked in &asked {
            let deliveries = read(&mut book, asked, 2);
            book.settle(deliveries[0].token);
            out.push(deliveries[1].token);
        }
        for token in &out {
            assert!(book.settle(*token));
        }
        let asked = book.ask(Duration::ZERO, 10, 10);
        let open: Vec<Token> = asked.iter().flat_map(|asked| read(&mut book, asked, 1)).map(|d| d.token).collect();
        let moves = book.begin_write(Duration::ZERO);
        book.end_write(Duration::ZERO, moves, Some(&HashSet::from([1])));
        assert_eq!(book.held(), [(1, 1)]);
        assert_eq!(open.iter().filter(|token| book.out(**token).is_some()).count(), 1);
        assert_eq!((book.take_lost().len(), book.settled_ahead()), (1, 0));
    }

    #[test]
    fn few_places_over_many_lanes_are_looked_for_in_all_of_them() {
        let mut book = holding(16);
        // Nothing in any of them, so that none is known to have more.
        for asked in book.ask(Duration::ZERO, 32, 100) {
            read(&mut book, &asked, 0);
        }
        assert_eq!(book.ask(Duration::ZERO, 2, 100).len(), 16);
        book.have_more(&[(3, 1), (4, 1), (5, 1)]);
        let asked: Vec<u16> = book.ask(Duration::ZERO, 2, 100).iter().map(|asked| asked.lane).collect();
        assert!(asked.len() == 2 && asked.iter().all(|lane| (3..6).contains(lane)), "{asked:?}");
        assert!(book.ask(LATE, 2, 100).is_empty(), "its lease has run out");
    }

    #[test]
    fn positions_are_due_by_time_by_number_and_when_a_lane_is_to_leave() {
        let every = Duration::from_millis(50);
        let mut book = holding(1);
        book.wants(2000);
        let asked = book.ask(Duration::ZERO, 100, 1000);
        let deliveries = read(&mut book, &asked[0], 2);
        assert!(!book.due(Duration::ZERO, every), "nothing was reached");
        book.settle(deliveries[0].token);
        book.settle(deliveries[1].token);
        assert!(book.due(Duration::ZERO, every), "never written");
        let moves = book.begin_write(Duration::ZERO);
        book.end_write(Duration::from_millis(10), moves, Some(&HashSet::from([0])));
        let asked = book.ask(Duration::ZERO, 100, 1000);
        let deliveries = read(&mut book, &asked[0], 1);
        book.settle(deliveries[0].token);
        assert!(!book.due(Duration::from_millis(199), every), "the last write took 10 ms");
        assert!(book.due(Duration::from_millis(200), every));
        let moves = book.begin_write(Duration::from_millis(200));
        book.end_write(Duration::from_secs(20), moves, Some(&HashSet::from([0])));
        let asked = book.ask(Duration::ZERO, 100, 1000);
        let deliveries = read(&mut book, &asked[0], 1);
        book.settle(deliveries[0].token);
        let second = Duration::from_millis(1200);
        assert!(
            !book.due(second - every, every) && book.due(second, every),
            "one that waited for a lock delays it a second"
        );
        book.wants(4);
        assert!(book.due(Duration::from_millis(201), every), "a small window must not wait");
        book.wants(2000);
        book.keep_to(0);
        assert!(book.due(Duration::from_millis(201), every), "another relay waits for it");
    }
}
