//! Pure: every decision of the relay. Inputs are a closed enum, time and chance are handed in, and nothing is done here:
//! [`Engine::next`] says what is to be done.
//!
//! Invariants: of a key, at most one delivery is with the sink (with pipelined order: one run, in one batch); a delivery is
//! settled as done only after a verdict of `Stored` or `Skipped` on its message; what is claimed from the outbox and not
//! passed by the stored position never exceeds `in_flight_max`; an unreachable sink or store uses up no attempt.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use postroom::{Delivery, Settlement, Token, tidy_reason};

use crate::backoff::Backoff;
use crate::breaker::Breaker;
use crate::chance::Chance;
use crate::keys::Keys;
use crate::parking::Parking;
use crate::protocol::{Action, BatchId, Counters, Death, EngineOptions, Input, RouteNow};
use crate::rate::Rate;
use crate::suspects::Suspects;
use crate::window::Window;

mod batches;
mod claims;
mod deaths;
mod leases;
mod settles;
mod verdicts;

/// How often parked messages are looked at while nothing says that one became free.
const PARKED_POLL: Duration = Duration::from_millis(100);
/// First wait of an idle poll; it doubles up to the configured one.
const POLL_FIRST: Duration = Duration::from_millis(5);
/// How soon a position is written that nothing else writes.
const FLUSH_AFTER: Duration = Duration::from_millis(50);

struct Held {
    delivery: Delivery,
    key: Option<Arc<str>>,
    with_sink: bool,
    bytes: usize,
    /// It ended its connection, or relays died over it: it travels alone.
    suspected: bool,
    /// The store is told before it travels.
    to_note: bool,
    /// Its lane is somebody else's: it is not published again.
    lost: bool,
}

/// The state of one route's relay.
pub struct Engine {
    options: EngineOptions,
    chance: Chance,
    held: HashMap<Token, Held>,
    held_bytes: usize,
    keys: Keys,
    parking: Parking,
    batches: HashMap<BatchId, Vec<Token>>,
    /// What is with the sink, or is about to be, is one message that travels alone.
    lone_under_way: bool,
    /// It waits for the store to note it.
    noting: Option<Token>,
    /// It is noted and goes out next.
    noted: Option<Token>,
    /// The store has a note about it. Nothing else begins before that is taken off: whoever dies over something else would be
    /// counted against this one.
    note_stands: Option<Token>,
    /// The note is being taken off, without a settlement that would do it.
    clearing: bool,
    /// It could not be; not before this it is tried again.
    clear_at: Option<Duration>,
    suspects: Suspects,
    /// Something was stored since this process began and since the sink was last found lost.
    proven: bool,
    next_batch: u64,
    pending: Vec<Settlement>,
    /// The settlements under way; they are tried again when the store could not take them.
    settling: Option<Vec<Settlement>>,
    settle_number: u64,
    settle_at: Duration,
    /// A position is to be written by then, although nothing may be left to settle.
    flush_at: Option<Duration>,
    settle_backoff: Backoff,
    claiming: Option<u64>,
    /// The claim under way looks at parked messages too.
    claiming_parked: bool,
    /// The last claim, and the last look for parked messages.
    found_nothing: bool,
    /// The last renewal did not reach the store.
    store_away: bool,
    claim_number: u64,
    claim_at: Duration,
    claim_wait: Duration,
    claim_backoff: Backoff,
    woken: bool,
    parked_at: Duration,
    lanes_held: usize,
    /// Settled, but not passed by the stored position: a crash repeats these too.
    settled_ahead: usize,
    renewing: bool,
    renew_at: Duration,
    renew_backoff: Backoff,
    breaker: Breaker,
    rate: Rate,
    window: Window,
    stopping: bool,
    finished: bool,
    counters: Counters,
    /// Recorded, and not asked for yet.
    deaths: Vec<Death>,
}

impl Engine {
    /// An engine that has not begun.
    pub fn new(options: EngineOptions) -> Self {
        let store_backoff = || Backoff::new(Duration::from_millis(50), Duration::from_secs(2));
        Self {
            chance: Chance::new(options.seed),
            held: HashMap::new(),
            held_bytes: 0,
            keys: Keys::default(),
            parking: Parking::default(),
            batches: HashMap::new(),
            lone_under_way: false,
            noting: None,
            noted: None,
            note_stands: None,
            clearing: false,
            clear_at: None,
            suspects: Suspects::default(),
            proven: false,
            next_batch: 0,
            pending: Vec::new(),
            settling: None,
            settle_number: 0,
            settle_at: Duration::ZERO,
            flush_at: None,
            settle_backoff: store_backoff(),
            claiming: None,
            claiming_parked: false,
            found_nothing: false,
            store_away: false,
            claim_number: 0,
            claim_at: Duration::ZERO,
            claim_wait: POLL_FIRST,
            claim_backoff: store_backoff(),
            woken: false,
            parked_at: Duration::ZERO,
            lanes_held: 0,
            settled_ahead: 0,
            renewing: false,
            renew_at: Duration::ZERO,
            renew_backoff: store_backoff(),
            breaker: Breaker::new(options.sink.batch_messages_max, options.breaker_after),
            rate: Rate::new(options.rate),
            window: Window::new(options.in_flight_max),
            stopping: false,
            finished: false,
            counters: Counters::default(),
            deaths: Vec::new(),
            options,
        }
    }

    /// What was seen so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Deliveries claimed and not settled.
    pub fn in_flight(&self) -> usize {
        self.held.len()
    }

    /// How the route stands.
    pub fn standing(&self) -> RouteNow {
        RouteNow {
            counters: self.counters,
            lanes: self.lanes_held,
            in_flight: self.held.len(),
            in_flight_bytes: self.held_bytes,
            with_sink: self.batches.values().map(Vec::len).sum(),
            settled_ahead: self.settled_ahead,
            sink_down: self.breaker.open_because().map(str::to_owned),
            sink_blocked: None,
            stopping: self.stopping,
            store_away: self.store_away,
            idle: self.found_nothing && self.lanes_held > 0 && self.held.is_empty() && self.unrecorded() == 0,
        }
    }

    /// Whether publishing is possible, as far as is known, and nothing is with the sink: only the sink itself can notice that its
    /// broker has gone.
    pub fn is_connected_and_idle(&self) -> bool {
        self.breaker.open_because().is_none() && self.batches.is_empty()
    }

    /// Messages that the store has recorded as dead since this was asked last.
    pub fn take_deaths(&mut self) -> Vec<Death> {
        std::mem::take(&mut self.deaths)
    }

    /// Takes in what happened at `now`, a monotonic time since any beginning.
    pub fn on(&mut self, now: Duration, input: Input) {
        match input {
            Input::Renewed(standing) => self.renewed(now, standing),
            Input::Claimed(claimed) => self.claimed(now, claimed),
            Input::Noted(noted) => self.noted(noted),
            Input::NoteCleared(done) => self.note_cleared(now, done),
            Input::Published(batch, verdicts) => self.published(now, batch, verdicts),
            Input::Settled(settled) => self.settled(now, settled),
            Input::Probed(result) => self.breaker.probed(now, result.map_err(tidy_reason)),
            Input::SinkLost(why) => self.sink_is_lost(now, tidy_reason(why)),
            Input::Woken => self.woken = true,
            Input::Stop => self.stopping = true,
        }
    }

    /// What is to be done at `now`.
    pub fn next(&mut self, now: Duration) -> Vec<Action> {
        let mut actions = Vec::new();
        if self.finished {
            return actions;
        }
        if !self.renewing && now >= self.renew_at {
            self.renewing = true;
            actions.push(Action::Renew(self.report()));
        }
        self.clear_at.take_if(|at| now >= *at);
        if self.breaker.begins_probe(now) {
            actions.push(Action::Probe);
        }
        while let Some(action) = self.next_batch(now) {
            actions.push(action);
        }
        let flush = self.flush_at.is_some_and(|at| now >= at);
        if self.settling.is_none() && (flush || !self.pending.is_empty()) && now >= self.settle_at {
            self.flush_at = None;
            let settlements = std::mem::take(&mut self.pending);
            self.settle_number += 1;
            self.settling = Some(settlements.clone());
            actions.push(Action::Settle(settlements));
        }
        if let Some(want) = self.want(now) {
            self.claim_number += 1;
            self.claiming = Some(self.claim_number);
            self.claiming_parked = want.parked;
            self.woken = false;
            actions.push(Action::Claim(want));
        }
        if self.stopping && self.is_idle() {
            self.finished = true;
            actions.push(Action::Finish);
        }
        actions
    }

    /// When [`Engine::next`] is to be called again although nothing happened.
    pub fn wake_at(&self) -> Option<Duration> {
        let mut times = Vec::new();
        if !self.renewing {
            times.push(self.renew_at);
        }
        times.extend(self.breaker.probe_at());
        let permitted = self.breaker.permits(self.options.sink.batches_in_flight_max);
        if self.keys.has_ready() && !self.lone_under_way && permitted.is_some_and(|(_, max)| self.batches.len() < max) {
            times.extend(self.rate.free_at());
        }
        if self.settling.is_none() && !self.pending.is_empty() {
            times.push(self.settle_at);
        } else if self.settling.is_none() {
            times.extend(self.flush_at.map(|at| at.max(self.settle_at)));
        }
        times.extend(self.clear_at);
        if self.can_claim() {
            times.push(self.claim_at);
        }
        times.into_iter().min()
    }

    fn is_idle(&self) -> bool {
        // A renewal under way may take lanes that nobody would give back.
        self.held.is_empty()
            && self.pending.is_empty()
            && self.settling.is_none()
            && self.claiming.is_none()
            && !self.renewing
    }

    fn let_go(&mut self, token: &Token) {
        if let Some(held) = self.held.remove(token) {
            self.held_bytes -= held.bytes;
        }
    }
}
