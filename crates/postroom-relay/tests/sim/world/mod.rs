//! The simulated world: one clock, one queue of events, a database, a broker, writers, an operator, and relays made of the
//! engine's own code. A seed decides everything; the same seed gives the same history.

mod broker;
mod relays;
mod trouble;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::time::Duration;

use postroom::lane_book::{Asked, Granted, Move, Tenant};
use postroom::{
    Batch, Cause, Change, Entry, FailureKind, Message, MessageId, Noted, OnDead, Order, ParkedState, RetryPolicy,
    Settled, Settlement, SinkLimits, Token, Verdict, Verdicts,
};
use postroom_relay::{Action, BatchId, Engine, EngineOptions, Input};
use postroom_testkit::chance::Chance;

use crate::database::{Database, Place, Row};
use crate::side::{Answer, Ask, Side};

const LANES: u16 = 4;
/// As often as on PostgreSQL.
const POSITIONS_EVERY: Duration = Duration::from_millis(50);
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
    /// Lost answers and cut connections, each of them a fault.
    pub slips: u64,
    /// Alarms of the broker, and relays killed during long ones.
    pub alarms: u64,
    pub kills_in_alarms: u64,
    /// Messages that are dead as poison.
    pub poison: u64,
    /// Rows that retention removed.
    pub removed: u64,
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

impl Known {
    fn new(key: Option<String>, number: u64, nature: Nature) -> Self {
        let (refusals, cuts, stored_at_cut) = (0, 0, None);
        Self { key, number, nature, refusals, cuts, stored_at_cut, judged: false, stored: false, was_dead: false }
    }
}

struct Relay {
    incarnation: u64,
    engine: Option<Engine>,
    side: Side,
    paused_until: Duration,
    stopping: bool,
    /// Something of it waits for an alarm to end.
    blocked: bool,
    step_at: Option<Duration>,
}

enum Op {
    Renew { held: Vec<Tenant>, survived: bool, blocked: bool, deadline: Duration },
    Release { lanes: Vec<Tenant>, renewal: bool },
    Claim(Ask),
    Note { token: Token, place: Place, epoch: i64, proven: bool },
    ClearNote,
    Settle { settlements: Vec<Settlement>, entries: Vec<Entry> },
    Positions { moves: Vec<Move<usize>>, then: Option<Settled> },
    Publish(BatchId, Batch),
    Probe,
}

struct Renewal {
    held: Vec<Tenant>,
    share: usize,
    granted: Vec<Granted<usize>>,
    deadline: Duration,
}

enum Reply {
    Renewed(Option<Renewal>),
    GaveBack { renewal: bool },
    Claimed(Option<Answer>),
    Noted(Noted),
    NoteCleared(bool),
    Settled { settlements: Vec<Settlement>, held: Option<BTreeSet<u16>> },
    Positions { moves: Vec<Move<usize>>, written: Option<HashSet<u16>>, then: Option<Settled> },
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
    Alarm(Duration),
    KillInAlarm,
    Operator,
    /// A step of retention, if the database is there.
    Retain,
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
    /// Connections stay, and nothing is taken until then.
    alarm_until: Duration,
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
    /// The sink keeps back what comes behind a message of its key that was refused, as some do.
    holds_back: bool,
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
            alarm_until: Duration::ZERO,
            relays: (0..relays)
                .map(|_| Relay {
                    incarnation: 0,
                    engine: None,
                    side: Side::default(),
                    paused_until: Duration::ZERO,
                    stopping: false,
                    blocked: false,
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
            holds_back: chance.percent(50),
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
        if !world.calm && world.chance.percent(15) {
            world.long_alarm();
        }
        for _ in 0..world.chance.below(6) {
            let at = world.millis(5_000, 59_000);
            world.at(at, Event::Operator);
        }
        if world.chance.percent(50) {
            for _ in 0..1 + world.chance.below(120) {
                let at = world.millis(1_000, 70_000);
                world.at(at, Event::Retain);
            }
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
                    format!(
                        "{} in flight, {} unfinished, {:?} wakes {:?}",
                        engine.in_flight(),
                        engine.unfinished(),
                        engine.counters(),
                        engine.wake_at()
                    )
                });
                let text = format!("relay {index}: {engine:?} {:?}", relay.side.book);
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
        let Tally { faults, kills, pauses, outages, slips, .. } = self.tally;
        let bound = self.in_flight_max as u64 * 2 * (faults + kills + pauses + outages + slips);
        if !self.calm && self.tally.duplicates > bound {
            self.violated("I3", format!("{} duplicates, the faults explain {bound}", self.tally.duplicates));
        }
        self.tally.dead = self.database.dead.len() as u64;
        let poison = self.database.dead.values().filter(|(.., cause)| *cause == postroom::Cause::Poison);
        self.tally.poison = poison.count() as u64;
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
            Event::Alarm(until) => {
                self.note(|| format!("the broker has an alarm until {:.3}", until.as_secs_f64()));
                self.alarm_until = self.alarm_until.max(until);
                self.tally.alarms += 1;
            }
            Event::KillInAlarm => self.kill_in_alarm(),
            Event::Operator => self.operator(),
            Event::Retain => self.retain(),
            Event::Unpark(key) => self.database.unpark_key(self.now, &key),
        }
    }
}
