//! The simulated world: one clock, one queue of events, a database, a broker, writers, an operator, and relays made of the
//! engine's own code. A seed decides everything; the same seed gives the same history.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::Duration;

use postroom::{
    Batch, FailureKind, Message, MessageId, OnDead, Order, RetryPolicy, Settled, Settlement, SinkLimits, Verdict,
    Verdicts,
};
use postroom_relay::{Action, BatchId, Engine, EngineOptions, Input};
use postroom_testkit::chance::Chance;

use crate::database::{Database, Entry, Granted, Place, Row};
use crate::side::{Answer, Asked, Side};

const LANES: u16 = 4;
const LEASE: Duration = Duration::from_secs(5);
/// Writers and faults end here; then everything has to come to rest.
const HEALED_AT: Duration = Duration::from_secs(60);
/// By then nothing may be left; longer than all attempts of a message take.
const RESTED_BY: Duration = Duration::from_secs(60 + 3600);
const ATTEMPTS_MAX: u32 = 4;

/// A broken invariant, at a time of the simulation.
#[derive(Debug)]
pub struct Violation {
    pub invariant: &'static str,
    pub found: String,
    pub at: Duration,
}

/// What a run did, so that a report can say that faults really happened.
#[derive(Debug, Default, Clone, Copy)]
pub struct Tally {
    pub messages: u64,
    pub faults: u64,
    pub kills: u64,
    pub pauses: u64,
    pub outages: u64,
    pub duplicates: u64,
    pub dead: u64,
    pub fenced: u64,
    pub steps: u64,
}

/// How the sink and the process take a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Nature {
    Good,
    /// Refused so often, then stored.
    Flaky(u32),
    Permanent,
    KillsConnection,
    KillsProcess,
}

struct Known {
    key: Option<String>,
    number: u64,
    nature: Nature,
    /// Verdicts that it failed, and times that it was alone when the connection ended, others stored between.
    refusals: u32,
    cuts: u32,
    stored_at_cut: Option<u64>,
    /// The last batch with it brought a verdict on it.
    judged: bool,
    /// First stored so many messages ago.
    stored: bool,
    /// Was dead once: an operator may send it out of its order.
    was_dead: bool,
}

struct Relay {
    incarnation: u64,
    engine: Option<Engine>,
    side: Side,
    paused_until: Duration,
    stopping: bool,
    /// The survived flag of the renewal under way.
    step_at: Option<Duration>,
}

enum Op {
    Renew { held: Vec<(u16, i64)>, survived: bool, deadline: Duration },
    Release { lanes: Vec<(u16, i64)>, renewal: bool },
    Claim(Asked),
    MarkAlone(postroom::Claimed, Place, i64),
    Settle { settlements: Vec<Settlement>, entries: Vec<Entry> },
    Positions { moves: Vec<(u16, i64, usize)>, then: Option<Settled> },
    Publish(BatchId, Batch),
    Probe,
}

struct Renewal {
    held: Vec<(u16, i64)>,
    share: usize,
    granted: Vec<Granted>,
    deadline: Duration,
}

enum Reply {
    Renewed(Option<Renewal>),
    GaveBack { renewal: bool },
    Claimed(Option<Answer>),
    Marked(postroom::Claimed, u32),
    Settled { settlements: Vec<Settlement>, held: Option<BTreeSet<u16>> },
    Positions { moves: Vec<(u16, i64, usize)>, written: Option<BTreeSet<u16>>, then: Option<Settled> },
    Published(BatchId, Result<Verdicts, String>),
    Probed(bool),
}

enum Event {
    Step(usize, u64),
    Effect(usize, u64, Op),
    Reply(usize, u64, Reply),
    Write,
    Commit(Vec<(MessageId, u16)>, Vec<Row>),
    Fault,
    Start(usize),
    Database(bool),
    Sink(bool),
    Operator,
    Unpark(String),
}

pub struct World {
    now: Duration,
    chance: Chance,
    events: BTreeMap<(Duration, u64), Event>,
    next_event: u64,
    database: Database,
    database_up: bool,
    sink_up: bool,
    relays: Vec<Relay>,
    known: HashMap<MessageId, Known>,
    committed: Vec<MessageId>,
    numbers: HashMap<String, u64>,
    /// Newest first occurrence at the broker by key.
    newest: HashMap<String, u64>,
    order: Order,
    on_dead: OnDead,
    in_flight_max: usize,
    calm: bool,
    poison: bool,
    tally: Tally,
    violation: Option<Violation>,
    next_id: u64,
    stored: u64,
    log: VecDeque<String>,
}

/// Runs one seed to its end.
pub fn run(seed: u64) -> Result<Tally, (Violation, Vec<String>)> {
    let mut world = World::new(seed);
    world.run();
    match world.violation {
        None => Ok(world.tally),
        Some(violation) => Err((violation, world.log.into())),
    }
}

impl World {
    fn new(seed: u64) -> Self {
        let mut chance = Chance::new(seed);
        let order = match chance.below(10) {
            0..7 => Order::Key,
            7..9 => Order::Pipelined,
            _ => Order::None,
        };
        let on_dead = if order != Order::None && chance.percent(30) { OnDead::Block } else { OnDead::Skip };
        let relays = 1 + chance.below(3) as usize;
        let mut world = Self {
            now: Duration::ZERO,
            events: BTreeMap::new(),
            next_event: 0,
            database: Database::new(LANES),
            database_up: true,
            sink_up: true,
            relays: (0..relays)
                .map(|_| Relay {
                    incarnation: 0,
                    engine: None,
                    side: Side::default(),
                    paused_until: Duration::ZERO,
                    stopping: false,
                    step_at: None,
                })
                .collect(),
            known: HashMap::new(),
            committed: Vec::new(),
            numbers: HashMap::new(),
            newest: HashMap::new(),
            order,
            on_dead,
            in_flight_max: [4, 16, 64][chance.below(3) as usize],
            // One run in eight has no faults at all: there must not be a single duplicate.
            calm: chance.percent(12),
            poison: chance.percent(25),
            tally: Tally::default(),
            violation: None,
            next_id: 1,
            stored: 0,
            log: VecDeque::new(),
            chance,
        };
        for relay in 0..relays {
            let at = world.millis(0, 2000);
            world.at(at, Event::Start(relay));
        }
        for _ in 0..10 + world.chance.below(60) {
            let at = world.millis(0, 40_000);
            world.at(at, Event::Write);
        }
        if !world.calm {
            for _ in 0..1 + world.chance.below(8) {
                let at = world.millis(500, 45_000);
                world.at(at, Event::Fault);
            }
        }
        for _ in 0..world.chance.below(6) {
            let at = world.millis(5_000, 59_000);
            world.at(at, Event::Operator);
        }
        world
    }

    fn millis(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_micros(from * 1000 + self.chance.below((to - from) * 1000))
    }

    fn soon(&mut self, from: u64, to: u64) -> Duration {
        self.now + self.millis(from, to)
    }

    fn at(&mut self, at: Duration, event: Event) {
        self.next_event += 1;
        self.events.insert((at.max(self.now), self.next_event), event);
    }

    fn note(&mut self, text: impl FnOnce() -> String) {
        if self.log.len() == 2000 {
            self.log.pop_front();
        }
        let line = format!("{:>10.3} {}", self.now.as_secs_f64(), text());
        self.log.push_back(line);
    }

    fn violated(&mut self, invariant: &'static str, found: String) {
        let at = self.now;
        self.violation.get_or_insert(Violation { invariant, found, at });
    }

    fn run(&mut self) {
        while self.violation.is_none() {
            let Some(((at, _), event)) = self.events.pop_first() else { break };
            self.now = at;
            self.tally.steps += 1;
            self.happens(event);
            if self.now > HEALED_AT && self.tally.steps.is_multiple_of(16) && self.at_rest() {
                break;
            }
            if self.now > RESTED_BY {
                break;
            }
        }
        if self.violation.is_none() {
            self.judge_the_end();
        }
        self.tally.messages = self.committed.len() as u64;
        for relay in &self.relays {
            if let Some(engine) = &relay.engine {
                self.tally.fenced += engine.counters().fenced;
            }
        }
    }

    /// Whether everything committed has come to its end.
    fn at_rest(&self) -> bool {
        self.database.parked.is_empty()
            && self.database.lanes.iter().all(|lane| lane.position == lane.log.len())
            && self.database.blocked.is_empty()
    }

    fn judge_the_end(&mut self) {
        let dead: BTreeSet<MessageId> = self.database.dead.values().map(|(row, ..)| row.message.id).collect();
        let lost: Vec<&MessageId> =
            self.committed.iter().filter(|id| !self.known[*id].stored && !dead.contains(*id)).collect();
        if let Some(first) = lost.first() {
            let waiting = !self.at_rest();
            let (invariant, what) = if waiting { ("I8", "still wait") } else { ("I1", "are nowhere") };
            let found = format!("{} messages {what} long after the last fault, among them {first}", lost.len());
            self.violated(invariant, found);
        } else if !self.at_rest() {
            let (parked, blocked) = (self.database.parked.len(), self.database.blocked.len());
            self.violated("I8", format!("not at rest: {parked} parked, {blocked} blocked keys"));
        }
        if self.violation.is_some() {
            for index in 0..self.relays.len() {
                let relay = &self.relays[index];
                let engine = relay.engine.as_ref().map(|engine| {
                    format!("{} {:?} wakes {:?}", engine.describe(), engine.counters(), engine.wake_at())
                });
                let text = format!("relay {index}: {engine:?} {}", relay.side.describe());
                self.note(|| text);
            }
            let (lanes, parked) = (
                format!(
                    "{:?}",
                    self.database
                        .lanes
                        .iter()
                        .map(|lane| (&lane.owner, lane.position, lane.log.len(), lane.deaths))
                        .collect::<Vec<_>>()
                ),
                self.database.parked.len(),
            );
            self.note(|| format!("lanes {lanes}, parked {parked}"));
        }
        if self.calm && self.tally.duplicates > 0 {
            self.violated("I3", format!("{} duplicates without a fault", self.tally.duplicates));
        }
        let bound = self.in_flight_max as u64
            * 2
            * (self.tally.faults + self.tally.kills + self.tally.pauses + 4 * u64::from(self.poison))
            * 2;
        if !self.calm && self.tally.duplicates > bound {
            self.violated("I3", format!("{} duplicates, the faults explain {bound}", self.tally.duplicates));
        }
        self.tally.dead = self.database.dead.len() as u64;
    }

    fn happens(&mut self, event: Event) {
        match event {
            Event::Start(relay) => self.start(relay),
            Event::Step(relay, incarnation) => self.steps(relay, incarnation),
            Event::Effect(relay, incarnation, op) => self.effect(relay, incarnation, op),
            Event::Reply(relay, incarnation, reply) => self.replied(relay, incarnation, reply),
            Event::Write => self.write(),
            Event::Commit(ids, rows) => self.commit(ids, rows),
            Event::Fault => self.fault(),
            Event::Database(up) => self.database_up = up,
            Event::Sink(up) => self.sink_up = up,
            Event::Operator => self.operator(),
            Event::Unpark(key) => self.database.unpark_key(self.now, &key),
        }
    }

    // --- writers and the operator ---

    fn write(&mut self) {
        let mut rows = Vec::new();
        let mut ids = Vec::new();
        for _ in 0..1 + self.chance.below(4) {
            let id = MessageId::from(uuid::Uuid::from_u128(u128::from(self.next_id)));
            self.next_id += 1;
            let key = self.chance.percent(85).then(|| format!("k{}", self.chance.below(6)));
            let nature = match self.chance.below(100) {
                0..80 => Nature::Good,
                80..92 => Nature::Flaky(1 + self.chance.below(6) as u32),
                92..96 => Nature::Permanent,
                96..98 if self.poison && !self.calm => Nature::KillsConnection,
                98..100 if self.poison && !self.calm => Nature::KillsProcess,
                _ => Nature::Good,
            };
            let mut message = Message::new("orders", "order.placed", "x");
            message.id = id;
            message.key.clone_from(&key);
            let lane = key.as_ref().map_or(self.next_id, |key| u64::from(key.as_bytes()[1])) % u64::from(LANES);
            let number = match &key {
                Some(key) => {
                    let number = self.numbers.entry(key.clone()).or_default();
                    *number += 1;
                    *number
                }
                None => 0,
            };
            let known = Known {
                key: key.clone(),
                number,
                nature,
                refusals: 0,
                cuts: 0,
                stored_at_cut: None,
                judged: false,
                stored: false,
                was_dead: false,
            };
            self.known.insert(id, known);
            ids.push((id, lane as u16));
            rows.push(Row { message, key });
        }
        // Numbers are taken under the keys' row locks, so commits of a key are in their order: at once here.
        self.happens(Event::Commit(ids, rows));
    }

    fn commit(&mut self, ids: Vec<(MessageId, u16)>, rows: Vec<Row>) {
        for ((id, lane), row) in ids.into_iter().zip(rows) {
            self.database.lanes[usize::from(lane)].log.push(row);
            self.committed.push(id);
        }
    }

    fn operator(&mut self) {
        let ordered = self.order != Order::None;
        match self.chance.below(3) {
            0 => {
                let key = format!("k{}", self.chance.below(6));
                self.note(|| format!("operator parks {key}"));
                self.database.park_key(&key);
                let at = self.soon(100, 5000);
                self.at(at, Event::Unpark(key));
            }
            _ => self.decide_about_the_dead(ordered),
        }
    }

    fn decide_about_the_dead(&mut self, ordered: bool) {
        let places: Vec<Place> = self.database.dead.keys().copied().collect();
        if places.is_empty() {
            return;
        }
        let place = places[self.chance.below(places.len() as u64) as usize];
        if self.chance.percent(50) {
            self.note(|| format!("operator retries {place:?}"));
            self.database.retry_dead(self.now, place, ordered);
        } else {
            self.note(|| format!("operator skips {place:?}"));
            self.database.skip(place);
        }
    }

    // --- faults ---

    fn fault(&mut self) {
        self.tally.faults += 1;
        let relay = self.chance.below(self.relays.len() as u64) as usize;
        match self.chance.below(7) {
            0 | 1 => {
                self.note(|| format!("relay {relay} is killed"));
                self.kill(relay);
            }
            2 => {
                let until = self.soon(100, 12_000);
                self.note(|| format!("relay {relay} is paused until {:.3}", until.as_secs_f64()));
                self.relays[relay].paused_until = until;
                self.tally.pauses += 1;
            }
            3 => {
                self.note(|| "the sink goes down".to_owned());
                self.sink_up = false;
                self.tally.outages += 1;
                let at = self.soon(50, 15_000);
                self.at(at, Event::Sink(true));
            }
            4 => {
                self.note(|| "the database goes down".to_owned());
                self.database_up = false;
                self.tally.outages += 1;
                let at = self.soon(50, 10_000);
                self.at(at, Event::Database(true));
            }
            5 => {
                self.note(|| format!("relay {relay} is stopped gracefully"));
                self.stop(relay);
            }
            _ => {
                // A flapping sink: down and up in quick succession.
                for _ in 0..5 {
                    let (down, up) = (self.soon(0, 2000), self.soon(2000, 2500));
                    self.at(down, Event::Sink(false));
                    self.at(up, Event::Sink(true));
                }
                let last = self.now + Duration::from_millis(2500);
                self.at(last, Event::Sink(true));
                self.tally.outages += 5;
            }
        }
    }

    fn kill(&mut self, relay: usize) {
        self.tally.kills += 1;
        self.relays[relay].incarnation += 1;
        self.relays[relay].engine = None;
        let at = self.soon(10, 8000);
        self.at(at, Event::Start(relay));
    }

    fn stop(&mut self, relay: usize) {
        if let Some(engine) = &mut self.relays[relay].engine {
            engine.on(self.now, Input::Stop);
            self.relays[relay].stopping = true;
            self.step_soon(relay);
        }
    }

    // --- relays ---

    fn start(&mut self, index: usize) {
        if self.relays[index].engine.is_some() {
            return;
        }
        let retry = RetryPolicy {
            base: 2.0,
            cap: Duration::from_secs(10),
            jitter: Duration::from_millis(500),
            attempts_max: ATTEMPTS_MAX,
            limits: Vec::new(),
        };
        let options = EngineOptions {
            in_flight_max: self.in_flight_max,
            in_flight_bytes_max: 1 << 20,
            order: self.order,
            on_dead: self.on_dead,
            rate: None,
            breaker_after: 10,
            poll_idle: Duration::from_millis(500),
            retry,
            renew_every: Duration::from_secs(1),
            sink: SinkLimits { batch_messages_max: 8, batches_in_flight_max: 3 },
            seed: self.chance.number(),
        };
        let relay = &mut self.relays[index];
        relay.incarnation += 1;
        relay.side = Side::new(format!("relay-{index}-{}", relay.incarnation));
        relay.engine = Some(Engine::new(options));
        relay.stopping = false;
        relay.paused_until = Duration::ZERO;
        relay.step_at = None;
        self.step_soon(index);
    }

    fn step_soon(&mut self, index: usize) {
        let (at, incarnation) = (self.now, self.relays[index].incarnation);
        self.at(at, Event::Step(index, incarnation));
    }

    /// The relay's driver: does what the engine asks for, and comes again when the engine says.
    fn steps(&mut self, index: usize, incarnation: u64) {
        if self.relays[index].incarnation != incarnation || self.relays[index].engine.is_none() {
            return;
        }
        if self.relays[index].paused_until > self.now {
            let at = self.relays[index].paused_until;
            self.at(at, Event::Step(index, incarnation));
            return;
        }
        let now = self.now;
        let Some(engine) = self.relays[index].engine.as_mut() else { return };
        let actions = engine.next(now);
        let wake_at = engine.wake_at();
        let in_flight = engine.in_flight();
        // As many parked ones may come with a claim.
        if in_flight > 2 * self.in_flight_max {
            self.violated("I19", format!("{in_flight} in flight, {} were permitted", self.in_flight_max));
        }
        for action in actions {
            let side = &mut self.relays[index].side;
            let op = match action {
                Action::Renew(report) => {
                    Op::Renew { held: side.held(), survived: report.survived, deadline: now + LEASE }
                }
                Action::Claim(want) => Op::Claim(side.ask(now, want)),
                Action::Settle(settlements) => {
                    let entries = side.entries(&settlements);
                    Op::Settle { settlements, entries }
                }
                Action::Publish(id, batch) => Op::Publish(id, batch),
                Action::Probe => Op::Probe,
                Action::Finish => {
                    let lanes = side.held();
                    self.relays[index].engine = None;
                    self.relays[index].incarnation += 1;
                    let incarnation = self.relays[index].incarnation;
                    // What is not written of the positions is written before the lanes are given back.
                    let moves = self.relays[index].side.begin_write();
                    if self.database_up {
                        let owner = self.relays[index].side.owner.clone();
                        for (lane, epoch, at) in moves {
                            self.write_position(&owner, lane, epoch, at);
                        }
                        self.database.release(&owner, &lanes);
                        self.database.relays.remove(&owner);
                    }
                    let at = self.soon(10, 3000);
                    let _ = incarnation;
                    self.at(at, Event::Start(index));
                    return;
                }
            };
            self.send(index, op);
        }
        if let Some(at) = wake_at
            && self.relays[index].step_at.is_none_or(|planned| at < planned || planned <= now)
        {
            self.relays[index].step_at = Some(at);
            let at = at.max(now + Duration::from_micros(100));
            self.at(at, Event::Step(index, incarnation));
        }
    }

    fn send(&mut self, index: usize, op: Op) {
        let slow = !self.calm && self.chance.percent(3);
        let at = if slow { self.soon(5, 3000) } else { self.soon(0, 8) };
        let incarnation = self.relays[index].incarnation;
        self.at(at, Event::Effect(index, incarnation, op));
    }

    fn answer(&mut self, index: usize, incarnation: u64, reply: Reply) {
        let slow = !self.calm && self.chance.percent(3);
        let at = if slow { self.soon(5, 3000) } else { self.soon(0, 8) };
        self.at(at, Event::Reply(index, incarnation, reply));
    }

    /// An operation reaches its server. What was sent before a crash arrives all the same; what a process that died never
    /// read, nobody reads.
    fn effect(&mut self, index: usize, incarnation: u64, op: Op) {
        let owner = self.relays[index].side.owner.clone();
        let alive = self.relays[index].incarnation == incarnation;
        // A stale side is the side of another incarnation: a dead process' database calls are not carried out later.
        if !alive && !matches!(op, Op::Publish(..)) {
            return;
        }
        // The answer of a statement may be lost although it was carried out.
        let lost = !self.calm && self.chance.percent(2);
        let up = self.database_up;
        let reply = match op {
            Op::Renew { held, survived, deadline } => {
                if survived {
                    self.note(|| format!("relay {index} has survived"));
                }
                let done = up.then(|| self.database.renew(self.now, &owner, &held, LEASE, survived));
                Reply::Renewed(done.filter(|_| !lost).map(|(share, granted)| Renewal {
                    held,
                    share,
                    granted,
                    deadline,
                }))
            }
            Op::Release { lanes, renewal } => {
                if up {
                    self.database.release(&owner, &lanes);
                }
                Reply::GaveBack { renewal }
            }
            Op::Claim(asked) => {
                let answer = (up && !lost).then(|| {
                    let parked = if asked.want.parked {
                        let limit = asked.want.messages;
                        self.database.read_parked(self.now, &asked.parked_lanes, &asked.in_hand, limit)
                    } else {
                        Vec::new()
                    };
                    let read = |(lane, epoch, from, limit): &(u16, i64, usize, usize)| {
                        (*lane, *epoch, self.database.read(*lane, *from, *limit))
                    };
                    let fresh = asked.lanes.iter().map(read).collect();
                    Answer { asked, parked, fresh }
                });
                Reply::Claimed(answer)
            }
            Op::MarkAlone(claimed, place, epoch) => {
                let id = claimed.deliveries[0].message.id;
                self.note(|| format!("relay {index} marks {place:?} {id}"));
                let deaths = if up { self.database.mark_alone(&owner, epoch, place) } else { 0 };
                Reply::Marked(claimed, deaths)
            }
            Op::Settle { settlements, entries } => {
                let held = up.then(|| {
                    self.check_attempts(&entries);
                    for entry in &entries {
                        let row = &self.database.lanes[usize::from(entry.place.0)].log[entry.place.1];
                        let number = self.known[&row.message.id].number;
                        let text = format!(
                            "relay {index} records {:?} of {:?} {number} at {:?}, parked {}",
                            entry.outcome, row.key, entry.place, entry.parked
                        );
                        self.note(|| text);
                    }
                    self.database.record(self.now, &owner, self.order != Order::None, &entries)
                });
                Reply::Settled { settlements, held: held.filter(|_| !lost) }
            }
            Op::Positions { moves, then } => {
                let written = up.then(|| {
                    let mut written = BTreeSet::new();
                    for (lane, epoch, at) in &moves {
                        if self.write_position(&owner, *lane, *epoch, *at) {
                            written.insert(*lane);
                        }
                    }
                    written
                });
                Reply::Positions { moves, written: written.filter(|_| !lost), then }
            }
            Op::Probe => Reply::Probed(self.sink_up),
            Op::Publish(id, batch) => {
                let Some(verdicts) = self.publish(index, alive, &batch) else { return };
                Reply::Published(id, verdicts)
            }
        };
        if alive {
            self.answer(index, incarnation, reply);
        }
    }

    /// Everything that a position passes has to be stored, parked or dead: nobody will read it again.
    fn write_position(&mut self, owner: &str, lane: u16, epoch: i64, at: usize) -> bool {
        let before = self.database.lanes[usize::from(lane)].position;
        if !self.database.write_position(owner, lane, epoch, at) {
            return false;
        }
        if at < before {
            self.violated("I9", format!("the position of lane {lane} went back from {before} to {at}"));
        }
        for index in before..at {
            let id = self.database.lanes[usize::from(lane)].log[index].message.id;
            let place = (lane, index);
            let kept = self.database.parked.contains_key(&place) || self.database.dead.contains_key(&place);
            if !kept && !self.known[&id].stored {
                self.violated("I1a", format!("the position passed {id}, which is not stored, parked or dead"));
            }
        }
        true
    }

    /// Only verdicts burn attempts.
    fn check_attempts(&mut self, entries: &[Entry]) {
        for entry in entries {
            let (attempts, poison) = match &entry.outcome {
                postroom::Outcome::Retry { attempts, .. } => (*attempts, false),
                postroom::Outcome::Dead { attempts, cause, .. } => (*attempts, *cause == postroom::Cause::Poison),
                postroom::Outcome::Done if entry.parked => {
                    let id = self.database.lanes[usize::from(entry.place.0)].log[entry.place.1].message.id;
                    if !self.known[&id].stored {
                        self.violated("I1a", format!("{id} is settled as done and was never stored"));
                    }
                    continue;
                }
                _ => continue,
            };
            let id = self.database.lanes[usize::from(entry.place.0)].log[entry.place.1].message.id;
            let known = self.known.get_mut(&id);
            let Some(known) = known else { continue };
            let (refusals, nature) = (known.refusals + known.cuts, known.nature);
            if let postroom::Outcome::Dead { .. } = entry.outcome {
                known.was_dead = true;
            }
            let guilty = poison && nature == Nature::KillsProcess;
            if attempts > refusals && !guilty {
                self.violated(
                    "I7",
                    format!("{id} burned {attempts} attempts after {refusals} verdicts (poison: {poison})"),
                );
            }
        }
    }

    fn publish(&mut self, index: usize, alive: bool, batch: &Batch) -> Option<Result<Verdicts, String>> {
        let answer = self.take(index, alive, batch);
        let [message] = batch.messages() else { return answer };
        let unjudged = match &answer {
            Some(Ok(_)) => !self.known[&message.id].judged,
            Some(Err(_)) => true,
            None => false,
        };
        let stored = self.stored;
        if let Some(known) = self.known.get_mut(&message.id).filter(|_| unjudged) {
            known.cuts += u32::from(known.stored_at_cut.is_some_and(|before| stored > before));
            known.stored_at_cut = Some(stored);
        }
        answer
    }

    /// The broker takes a batch. None: the process died over it, or nobody is left to hear.
    fn take(&mut self, index: usize, alive: bool, batch: &Batch) -> Option<Result<Verdicts, String>> {
        if self.order == Order::Key {
            let keys: Vec<&str> = batch.messages().iter().filter_map(|message| message.ordering_key()).collect();
            if keys.iter().collect::<BTreeSet<_>>().len() < keys.len() {
                self.violated("I4", "two messages of a key in one batch, with strict order".to_owned());
            }
        }
        if !self.sink_up {
            return Some(Err("connection refused".to_owned()));
        }
        let mut verdicts = batch.silent();
        let cut = !self.calm && self.chance.percent(2);
        let cut_after = self.chance.below(batch.messages().len() as u64 + 1) as usize;
        for (position, message) in batch.messages().iter().enumerate() {
            if cut && position >= cut_after {
                return Some(Err("connection reset".to_owned()));
            }
            let Some(known) = self.known.get_mut(&message.id) else {
                self.violated("I2", format!("{} was never written", message.id));
                return None;
            };
            match known.nature {
                Nature::KillsProcess => {
                    if alive {
                        let id = message.id;
                        self.note(|| format!("relay {index} dies over {id}"));
                        self.kill(index);
                    }
                    return None;
                }
                Nature::KillsConnection => return Some(Err("frame too large".to_owned())),
                Nature::Permanent => {
                    known.refusals += 1;
                    known.judged = true;
                    verdicts.judge(message.id, Verdict::failed(FailureKind::Permanent, "never"));
                }
                Nature::Flaky(left) if left > 0 => {
                    known.nature = Nature::Flaky(left - 1);
                    known.refusals += 1;
                    known.judged = true;
                    verdicts.judge(message.id, Verdict::failed(FailureKind::Transient, "not now"));
                }
                Nature::Good | Nature::Flaky(_) => {
                    self.store(message.id);
                    // Sometimes nobody knows.
                    let judged = self.calm || !self.chance.percent(1);
                    if let Some(known) = self.known.get_mut(&message.id) {
                        known.judged = judged;
                    }
                    if judged {
                        verdicts.judge(message.id, Verdict::Stored);
                    }
                }
            }
        }
        // Stored, and the answer is lost.
        if !self.calm && self.chance.percent(2) {
            return Some(Err("connection reset".to_owned()));
        }
        Some(Ok(verdicts))
    }

    fn store(&mut self, id: MessageId) {
        let Some(known) = self.known.get_mut(&id) else { return };
        let text = format!("stored {:?} {} {id} again {}", known.key, known.number, known.stored);
        self.note(|| text);
        let Some(known) = self.known.get_mut(&id) else { return };
        self.stored += 1;
        if known.stored {
            self.tally.duplicates += 1;
            return;
        }
        known.stored = true;
        let (Some(key), number, was_dead) = (known.key.clone(), known.number, known.was_dead) else { return };
        if was_dead {
            return;
        }
        let newest = self.newest.entry(key.clone()).or_default();
        let before = *newest;
        *newest = before.max(number);
        // With pipelined order a fault may let what is behind overtake; without a fault even a refusal may.
        if number < before && self.order == Order::Key {
            self.violated("I4", format!("{key}: number {number} first came after number {before}"));
        }
    }

    // --- answers ---

    fn replied(&mut self, index: usize, incarnation: u64, reply: Reply) {
        if self.relays[index].incarnation != incarnation || self.relays[index].engine.is_none() {
            return;
        }
        if self.relays[index].paused_until > self.now {
            let at = self.relays[index].paused_until;
            self.at(at, Event::Reply(index, incarnation, reply));
            return;
        }
        let side = &mut self.relays[index].side;
        let input = match reply {
            Reply::Renewed(None) => Input::Renewed(None),
            Reply::Renewed(Some(Renewal { held, share, granted, deadline })) => {
                let lanes = side.renewed(&held, share, granted, deadline);
                if lanes.is_empty() {
                    Input::Renewed(Some(side.standing()))
                } else {
                    return self.send(index, Op::Release { lanes, renewal: true });
                }
            }
            Reply::GaveBack { renewal } => {
                if !renewal {
                    return;
                }
                Input::Renewed(Some(side.standing()))
            }
            Reply::Claimed(None) => {
                side.claim_failed();
                Input::Claimed(None)
            }
            Reply::Claimed(Some(answer)) => {
                let alone = answer.asked.want.alone;
                let claimed = side.claimed(answer);
                let first = claimed.deliveries.first().map(|delivery| delivery.token);
                match first.filter(|_| alone).and_then(|token| side.place_of(token)) {
                    Some((place, epoch)) => return self.send(index, Op::MarkAlone(claimed, place, epoch)),
                    None => {
                        let moves = side.begin_write();
                        if !moves.is_empty() {
                            self.send(index, Op::Positions { moves, then: None });
                        }
                        Input::Claimed(Some(claimed))
                    }
                }
            }
            Reply::Marked(mut claimed, deaths) => {
                for delivery in &mut claimed.deliveries {
                    delivery.deaths = deaths;
                }
                Input::Claimed(Some(claimed))
            }
            Reply::Settled { held: None, .. } => Input::Settled(None),
            Reply::Settled { settlements, held: Some(held) } => {
                let recorded: BTreeSet<u16> = side.entries(&settlements).iter().map(|entry| entry.place.0).collect();
                for lane in recorded {
                    if !held.contains(&lane) {
                        side.lose(lane);
                    }
                }
                let fenced = side.settled(&settlements);
                let moves = side.begin_write();
                let settled =
                    Settled { lost_lanes: Vec::new(), fenced, more_parked: true, settled_ahead: side.settled_ahead() };
                return self.send(index, Op::Positions { moves, then: Some(settled) });
            }
            Reply::Positions { moves, written, then } => {
                if let Some(written) = &written {
                    for (lane, epoch, _) in &moves {
                        if !written.contains(lane) && side.held().contains(&(*lane, *epoch)) {
                            side.lose(*lane);
                        }
                    }
                }
                side.end_write(moves, written.is_some());
                match then {
                    None => return,
                    Some(mut settled) => {
                        settled.lost_lanes = side.take_lost();
                        settled.settled_ahead = side.settled_ahead();
                        Input::Settled(Some(settled))
                    }
                }
            }
            Reply::Published(id, verdicts) => Input::Published(id, verdicts),
            Reply::Probed(up) => Input::Probed(if up { Ok(()) } else { Err("connection refused".to_owned()) }),
        };
        let now = self.now;
        if let Some(engine) = self.relays[index].engine.as_mut() {
            engine.on(now, input);
        }
        self.steps(index, incarnation);
        // After everything has healed an operator decides about the keys that are blocked over dead messages, and new
        // traffic shows that the sink takes messages.
        if self.now > HEALED_AT && self.chance.below(15) == 0 {
            let blocked: Vec<Place> = self.database.blocked.iter().filter_map(|(_, place)| *place).collect();
            for place in blocked {
                self.database.skip(place);
            }
            if self.now < RESTED_BY - Duration::from_secs(120) && self.poison {
                self.write_good();
            }
        }
    }

    /// One more good message.
    fn write_good(&mut self) {
        let id = MessageId::from(uuid::Uuid::from_u128(u128::from(self.next_id)));
        self.next_id += 1;
        let mut message = Message::new("orders", "order.placed", "x");
        message.id = id;
        let known = Known {
            key: None,
            number: 0,
            nature: Nature::Good,
            refusals: 0,
            cuts: 0,
            stored_at_cut: None,
            judged: false,
            stored: false,
            was_dead: false,
        };
        self.known.insert(id, known);
        let lane = (self.next_id % u64::from(LANES)) as u16;
        self.commit(vec![(id, lane)], vec![Row { message, key: None }]);
    }
}
