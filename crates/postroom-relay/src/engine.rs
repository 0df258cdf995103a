//! Pure: every decision of the relay. Inputs are a closed enum, time and chance are handed in, and nothing is done here:
//! [`Engine::next`] says what is to be done.
//!
//! Invariants: of a key, at most one delivery is with the sink (with pipelined order: one run, in one batch); a delivery is
//! settled as done only after a verdict of `Stored` or `Skipped` on its message; what is claimed from the outbox and not
//! passed by the stored position never exceeds `in_flight_max`; an unreachable sink or store burns no attempt.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use postroom::{
    Batch, Cause, Claimed, Delivery, LostLane, Noted, Order, Origin, Outcome, Report, Settled, Settlement, Standing,
    Token, Want, tidy_reason,
};

use crate::backoff::Backoff;
use crate::breaker::Breaker;
use crate::chance::Chance;
use crate::keys::Keys;
use crate::parking::Parking;
use crate::protocol::{Action, BatchId, Counters, EngineOptions, Input};
use crate::rate::Rate;
use crate::suspects::Suspects;
use crate::window::Window;

mod alone;
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
    /// Travels alone: it ended its connection, or relays died over it.
    alone: bool,
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
    alone: bool,
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
            alone: false,
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
        if self.stopping && (self.is_idle() || cfg!(seeded_bug = "stops_with_messages_in_flight")) {
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
        if self.keys.has_ready() && !self.alone && permitted.is_some_and(|(_, max)| self.batches.len() < max) {
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

    /// What a renewal says about this relay; whether the sink is blocked only the one who carries it out knows.
    fn report(&self) -> Report {
        Report {
            sink_down: self.breaker.open_because().map(str::to_owned),
            sink_blocked: None,
            survived: self.window.survived(),
        }
    }

    fn is_idle(&self) -> bool {
        // A renewal under way may take lanes that nobody would give back.
        self.held.is_empty()
            && self.pending.is_empty()
            && self.settling.is_none()
            && self.claiming.is_none()
            && !self.renewing
    }

    fn can_claim(&self) -> bool {
        // Reading for a handful of free places costs as much as for many.
        !self.stopping
            && self.claiming.is_none()
            && self.lanes_held > 0
            && self.credit() >= self.window.size().div_ceil(4)
            && self.bytes_left() >= self.options.in_flight_bytes_max.div_ceil(4)
    }

    fn want(&mut self, now: Duration) -> Option<Want> {
        if !self.can_claim() || (now < self.claim_at && !self.woken) {
            return None;
        }
        let alone = self.window.is_alone();
        // One at a time the parked ones take turns with the others.
        let parked = now >= self.parked_at && !(alone && self.claiming_parked);
        if parked {
            self.parked_at = now + PARKED_POLL;
        }
        let window = self.window.size();
        Some(Want {
            messages: self.credit(),
            bytes: self.bytes_left(),
            // Fair shares with some slack; a lane has to have one place.
            lane_messages_max: (window / 16).max(2 * window / self.lanes_held.max(1)).max(1),
            parked,
            alone,
        })
    }

    /// How many more deliveries a crash may repeat.
    fn credit(&self) -> usize {
        self.window.size().saturating_sub(self.held.len() + self.settled_ahead)
    }

    fn bytes_left(&self) -> usize {
        self.options.in_flight_bytes_max.saturating_sub(self.held_bytes)
    }

    /// The next batch, or a message that has to be noted before it travels alone.
    fn next_batch(&mut self, now: Duration) -> Option<Action> {
        if let Some(token) = self.noted.take() {
            if self.held.get(&token).is_some_and(|held| !held.lost) {
                return Some(self.publish(vec![token]));
            }
            self.alone = false;
            self.put_back(token);
        }
        let (messages_max, batches_max) = self.breaker.permits(self.options.sink.batches_in_flight_max)?;
        if self.alone || self.batches.len() >= batches_max || !self.keys.has_ready() {
            return None;
        }
        if let Some(token) = self.note_stands {
            return self.clear_note(now, token);
        }
        let messages_max = messages_max.min(self.rate.permits(now));
        let mut tokens: Vec<Token> = Vec::new();
        // Runs that begin with a message that travels alone, and let others go first.
        let mut aside: Vec<Vec<Token>> = Vec::new();
        while tokens.len() < messages_max {
            let run_max = if self.options.order == Order::Pipelined { messages_max - tokens.len() } else { 1 };
            let run = self.keys.pop(run_max);
            if run.is_empty() {
                break;
            }
            if !run.iter().any(|token| self.held.get(token).is_some_and(|held| held.alone)) {
                tokens.extend(run);
            } else if self.breaker.on_trial() {
                aside.push(run);
            } else {
                // It goes when nothing else is under way, and nothing new begins before.
                aside.insert(0, run);
                break;
            }
        }
        if tokens.is_empty() && self.batches.is_empty() && !aside.is_empty() {
            let mut run = aside.remove(0).into_iter();
            tokens.extend(run.next());
            self.unpop(run, Keys::put_back);
            self.alone = true;
        }
        let put_back = if self.breaker.on_trial() { Keys::put_back_last } else { Keys::put_back };
        aside.into_iter().for_each(|run| self.unpop(run.into_iter(), put_back));
        if tokens.is_empty() {
            return None;
        }
        if let [token] = tokens[..]
            && self.alone
            && let Some(note) = self.begin_note(token)
        {
            return Some(note);
        }
        Some(self.publish(tokens))
    }

    fn publish(&mut self, tokens: Vec<Token>) -> Action {
        let mut messages = Vec::with_capacity(tokens.len());
        for token in &tokens {
            if let Some(held) = self.held.get_mut(token) {
                held.with_sink = true;
                messages.push(held.delivery.message.clone());
            }
        }
        self.rate.took(tokens.len());
        if cfg!(seeded_bug = "settle_before_confirm") {
            self.pending.extend(tokens.iter().map(|token| Settlement { token: *token, outcome: Outcome::Done }));
        }
        let id = BatchId(self.next_batch);
        self.next_batch += 1;
        self.batches.insert(id, tokens);
        Action::Publish(id, Batch::new(messages))
    }

    fn renewed(&mut self, now: Duration, standing: Option<Standing>) {
        self.renewing = false;
        let Some(standing) = standing else {
            self.renew_at = now + self.renew_backoff.failed().min(self.options.renew_every);
            return;
        };
        self.renew_backoff.succeeded();
        self.renew_at = now + self.options.renew_every;
        if standing.held > self.lanes_held {
            self.claim_at = now;
        }
        self.lanes_held = standing.held;
        self.settled_ahead = standing.settled_ahead;
        self.options.order = standing.order.unwrap_or(self.options.order);
        self.options.on_dead = standing.on_dead.unwrap_or(self.options.on_dead);
        self.window.deaths_are(standing.deaths);
        self.lose(&standing.lost_lanes);
    }

    /// Deliveries of a lost lane that nobody has seen are dropped; those with the sink end as fenced.
    fn lose(&mut self, lanes: &[LostLane]) {
        if lanes.is_empty() {
            return;
        }
        self.counters.lanes_lost += lanes.len() as u64;
        // What was claimed after the lane came back is of the new tenure, and here to stay.
        let is_lost = |token: &Token, held: &Held| {
            let of_it = |lost: &LostLane| {
                lost.lane == held.delivery.lane && (*token < lost.before || cfg!(seeded_bug = "loses_what_came_after"))
            };
            lanes.iter().any(of_it)
        };
        let settlements = self.pending.iter().chain(self.settling.iter().flatten());
        let settling: HashSet<Token> = settlements.map(|settlement| settlement.token).collect();
        let gone: Vec<Token> = self
            .held
            .iter()
            .filter(|(token, held)| is_lost(token, held) && !held.with_sink && !settling.contains(token))
            .map(|(token, _)| *token)
            .collect();
        for token in &gone {
            self.let_go(token);
        }
        for (token, held) in &mut self.held {
            held.lost |= is_lost(token, held);
        }
        // Whoever has the lane now has the note as well.
        self.note_stands.take_if(|token| self.held.get(token).is_none_or(|held| held.lost));
        let numbers: Vec<u16> = lanes.iter().map(|lost| lost.lane).collect();
        self.suspects.lose(&numbers);
        let held = &self.held;
        self.keys.forget(|token| !held.contains_key(token));
    }

    fn let_go(&mut self, token: &Token) {
        if let Some(held) = self.held.remove(token) {
            self.held_bytes -= held.bytes;
        }
    }

    /// Puts what was popped, and not published, back in its order; the key is the next or the last to go.
    fn unpop(
        &mut self,
        run: impl DoubleEndedIterator<Item = Token>,
        put_back: fn(&mut Keys, Option<&Arc<str>>, Token),
    ) {
        for token in run.rev() {
            let key = self.held.get(&token).and_then(|held| held.key.clone());
            put_back(&mut self.keys, key.as_ref(), token);
        }
    }

    fn is_settling(&self, token: &Token) -> bool {
        let mut settlements = self.pending.iter().chain(self.settling.iter().flatten());
        settlements.any(|settlement| settlement.token == *token)
    }

    fn claimed(&mut self, now: Duration, claimed: Option<Claimed>) {
        let number = self.claiming.take().unwrap_or(self.claim_number);
        let Some(claimed) = claimed else {
            self.claim_at = now + self.claim_backoff.failed();
            return;
        };
        self.claim_backoff.succeeded();
        self.lose(&claimed.lost_lanes);
        self.lanes_held = self.lanes_held.saturating_sub(claimed.lost_lanes.len());
        if claimed.unwritten {
            self.flush_at.get_or_insert(now + FLUSH_AFTER);
        }
        self.counters.claimed += claimed.deliveries.len() as u64;
        if claimed.more {
            self.claim_at = now;
            self.claim_wait = POLL_FIRST;
        } else {
            if !claimed.deliveries.is_empty() {
                self.claim_wait = POLL_FIRST;
            }
            self.claim_at = now + self.claim_wait;
            self.claim_wait = (self.claim_wait * 2).min(self.options.poll_idle);
        }
        for delivery in claimed.deliveries {
            self.take_in(delivery);
        }
        self.parking.claimed(number);
    }

    fn take_in(&mut self, delivery: Delivery) {
        let token = delivery.token;
        let key: Option<Arc<str>> = match self.options.order {
            Order::None => None,
            Order::Key | Order::Pipelined => delivery.message.ordering_key().map(Arc::from),
        };
        let scheduled = delivery.scheduled;
        let behind = key.as_ref().is_some_and(|key| match delivery.origin {
            Origin::Outbox => {
                delivery.behind || (self.parking.holds(key) && !cfg!(seeded_bug = "forgets_what_is_being_parked"))
            }
            Origin::Parked => self.parking.stops(key) && !cfg!(seeded_bug = "follower_overtakes_the_failed_one"),
        });
        let bytes = delivery.message.weight();
        let (deaths, doubts, attempts) = (delivery.deaths, delivery.doubts, delivery.attempts);
        let unreadable = delivery.unreadable.clone();
        let to_note = deaths > 0 || doubts > 0 || self.window.is_alone();
        let alone = to_note || self.suspects.contains(delivery.message.id);
        let held = Held { delivery, key: key.clone(), with_sink: false, bytes, alone, to_note, lost: false };
        self.held.insert(token, held);
        self.held_bytes += bytes;
        if let Some(error) = unreadable {
            // It alone is set aside: its key, which may be what cannot be read, goes on.
            self.counters.dead += 1;
            let outcome = Outcome::Dead { attempts, cause: Cause::Permanent, error, blocks_key: false };
            self.pending.push(Settlement { token, outcome });
        } else if scheduled {
            self.counters.scheduled += 1;
            self.pending.push(Settlement { token, outcome: Outcome::Schedule });
        } else if behind {
            self.queue_up(token, key);
        } else if !self.condemned(token, Noted { deaths, doubts, proven: self.proven }, key.as_ref()) {
            self.keys.push(key.as_ref(), token);
        }
    }

    fn queue_up(&mut self, token: Token, key: Option<Arc<str>>) {
        let parked = self.held.get(&token).is_some_and(|held| held.delivery.origin == Origin::Parked);
        if parked {
            self.pending.push(Settlement { token, outcome: Outcome::Release });
            return;
        }
        self.counters.queued += 1;
        self.pending.push(Settlement { token, outcome: Outcome::Queue });
        if let Some(key) = key {
            self.parking.queue(key, self.settle_number + 1);
        }
    }

    fn settled(&mut self, now: Duration, settled: Option<Settled>) {
        let Some(settlements) = self.settling.take() else { return };
        let Some(settled) = settled else {
            // The same again, before what came after it: order among settlements of a key is kept.
            let later = std::mem::replace(&mut self.pending, settlements);
            self.pending.extend(later);
            self.settle_at = now + self.settle_backoff.failed();
            // There may have been nothing in it but positions to write, which fill the window until they are written.
            self.flush_at = Some(self.settle_at);
            return;
        };
        self.settle_backoff.succeeded();
        for Settlement { token, outcome } in &settlements {
            let through = matches!(outcome, Outcome::Done | Outcome::Dead { .. });
            if through {
                self.window.through();
            }
            if through && let Some(held) = self.held.get(token) {
                self.suspects.clear(held.delivery.message.id, held.delivery.lane);
                if let (Outcome::Dead { blocks_key: false, .. }, Some(key)) = (outcome, &held.key) {
                    self.keys.free(key);
                }
            }
            self.let_go(token);
            self.note_stands.take_if(|noted| noted == token);
        }
        self.counters.fenced += settled.fenced as u64;
        self.flush_at = settled.unwritten.then_some(now + FLUSH_AFTER);
        self.settled_ahead = settled.settled_ahead;
        self.parking.settled(self.settle_number, self.claiming);
        self.lose(&settled.lost_lanes);
        self.lanes_held = self.lanes_held.saturating_sub(settled.lost_lanes.len());
        if settled.more_parked {
            self.parked_at = now;
            self.claim_at = self.claim_at.min(now);
        }
    }

    /// Deliveries that wait for the sink or are with it.
    pub fn unfinished(&self) -> usize {
        let noting = usize::from(self.noting.is_some() || self.noted.is_some());
        self.keys.waiting() + noting + self.batches.values().map(Vec::len).sum::<usize>()
    }

    /// Deliveries whose outcome is known and has not reached the store.
    pub fn unrecorded(&self) -> usize {
        self.pending.len() + self.settling.as_ref().map_or(0, Vec::len)
    }

    /// Deliveries whose outcome the store knows while their lane's position has not passed them.
    pub fn settled_ahead(&self) -> usize {
        self.settled_ahead
    }
}
