//! Pure: every decision of the relay. Inputs are a closed enum, time and chance are handed in, and nothing is done here:
//! [`Engine::next`] says what is to be done.
//!
//! Invariants: at most one delivery of a key is with the sink; a delivery is settled as done only after a verdict of
//! `Stored` or `Skipped` on its message; what is claimed from the outbox and not passed by the stored position never exceeds
//! `in_flight_max`; an unreachable sink or store burns no attempt.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use postroom::{
    Batch, Claimed, Delivery, Disposition, Origin, Outcome, RetryPolicy, Settled, Settlement, SinkLimits, Standing,
    Token, Verdicts, Want, decide,
};

use crate::backoff::Backoff;
use crate::chance::Chance;
use crate::keys::Keys;
use crate::parking::Parking;

/// How often parked messages are looked at while nothing says that one became free.
const PARKED_POLL: Duration = Duration::from_millis(100);
/// First wait of an idle poll; it doubles up to the configured one.
const POLL_FIRST: Duration = Duration::from_millis(5);

/// What the engine is told once.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Most deliveries claimed and not passed by the stored position: what a crash can repeat.
    pub in_flight_max: usize,
    /// Longest wait between two polls when there is nothing to do.
    pub poll_idle: Duration,
    /// What becomes of failed messages.
    pub retry: RetryPolicy,
    /// Lanes are renewed this often.
    pub renew_every: Duration,
    /// How the sink likes to be called.
    pub sink: SinkLimits,
    /// Seed of the jitter.
    pub seed: u64,
}

/// Names a batch with the sink.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BatchId(u64);

/// Everything that can happen.
#[derive(Debug)]
pub enum Input {
    /// A renewal came back; `None`: the store could not be reached or refused.
    Renewed(Option<Standing>),
    /// A claim came back.
    Claimed(Option<Claimed>),
    /// A batch came back; `None`: the sink was unavailable.
    Published(BatchId, Option<Verdicts>),
    /// A settling came back.
    Settled(Option<Settled>),
    /// A probe of the sink came back.
    Probed(bool),
    /// Somebody says that there is something to do.
    Woken,
    /// Claim nothing more, finish what is in flight.
    Stop,
}

/// What is to be done. Each ends with the input of its name.
#[derive(Debug)]
pub enum Action {
    /// Call [`postroom::Source::renew`].
    Renew,
    /// Call [`postroom::Source::claim`].
    Claim(Want),
    /// Call [`postroom::Sink::publish`].
    Publish(BatchId, Batch),
    /// Call [`postroom::Source::settle`].
    Settle(Vec<Settlement>),
    /// Call [`postroom::Sink::probe`].
    Probe,
    /// Everything is finished after a stop: release the lanes and end.
    Finish,
}

/// What the engine has seen since it began.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Counters {
    /// Deliveries claimed.
    pub claimed: u64,
    /// Verdicts of stored.
    pub stored: u64,
    /// Outcomes that nobody knew.
    pub unknown: u64,
    /// Failed and parked for another attempt.
    pub retried: u64,
    /// Queued up behind a parked message of their key.
    pub queued: u64,
    /// Parked until they are due.
    pub scheduled: u64,
    /// Dead letters.
    pub dead: u64,
    /// Settlements that changed nothing because the lane was lost.
    pub fenced: u64,
    /// Times the sink was found unavailable.
    pub sink_outages: u64,
}

struct Held {
    delivery: Delivery,
    key: Option<Arc<str>>,
    with_sink: bool,
}

enum SinkState {
    Up,
    Down { probe_at: Duration, probing: bool },
}

/// The state of one route's relay.
pub struct Engine {
    options: EngineOptions,
    chance: Chance,
    held: HashMap<Token, Held>,
    keys: Keys,
    parking: Parking,
    batches: HashMap<BatchId, Vec<Token>>,
    next_batch: u64,
    pending: Vec<Settlement>,
    /// The settlements under way; they are tried again when the store could not take them.
    settling: Option<Vec<Settlement>>,
    settle_number: u64,
    settle_at: Duration,
    settle_backoff: Backoff,
    claiming: Option<u64>,
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
    sink: SinkState,
    sink_backoff: Backoff,
    /// Most messages in a batch for now: one after trouble, doubled with every success.
    ramp: usize,
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
            keys: Keys::default(),
            parking: Parking::default(),
            batches: HashMap::new(),
            next_batch: 0,
            pending: Vec::new(),
            settling: None,
            settle_number: 0,
            settle_at: Duration::ZERO,
            settle_backoff: store_backoff(),
            claiming: None,
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
            sink: SinkState::Down { probe_at: Duration::ZERO, probing: false },
            sink_backoff: Backoff::new(Duration::from_millis(100), Duration::from_secs(5)),
            ramp: options.sink.batch_messages_max,
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
            Input::Published(batch, verdicts) => self.published(now, batch, verdicts),
            Input::Settled(settled) => self.settled(now, settled),
            Input::Probed(reachable) => self.probed(now, reachable),
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
            actions.push(Action::Renew);
        }
        if let SinkState::Down { probe_at, probing } = &mut self.sink
            && !*probing
            && now >= *probe_at
        {
            *probing = true;
            actions.push(Action::Probe);
        }
        while let Some(publish) = self.next_batch() {
            actions.push(publish);
        }
        if self.settling.is_none() && !self.pending.is_empty() && now >= self.settle_at {
            let settlements = std::mem::take(&mut self.pending);
            self.settle_number += 1;
            self.settling = Some(settlements.clone());
            actions.push(Action::Settle(settlements));
        }
        if let Some(want) = self.want(now) {
            self.claim_number += 1;
            self.claiming = Some(self.claim_number);
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
        if let SinkState::Down { probe_at, probing: false } = self.sink {
            times.push(probe_at);
        }
        if self.settling.is_none() && !self.pending.is_empty() {
            times.push(self.settle_at);
        }
        if self.can_claim() {
            times.push(self.claim_at);
        }
        times.into_iter().min()
    }

    fn is_idle(&self) -> bool {
        self.held.is_empty() && self.pending.is_empty() && self.settling.is_none() && self.claiming.is_none()
    }

    fn can_claim(&self) -> bool {
        // Reading for a handful of free places costs as much as for many.
        !self.stopping
            && self.claiming.is_none()
            && self.lanes_held > 0
            && self.credit() >= self.options.in_flight_max.div_ceil(4)
    }

    fn want(&mut self, now: Duration) -> Option<Want> {
        if !self.can_claim() || (now < self.claim_at && !self.woken) {
            return None;
        }
        let parked = now >= self.parked_at;
        if parked {
            self.parked_at = now + PARKED_POLL;
        }
        Some(Want { messages: self.credit(), parked })
    }

    /// How many more deliveries a crash may repeat.
    fn credit(&self) -> usize {
        self.options.in_flight_max.saturating_sub(self.held.len() + self.settled_ahead)
    }

    fn next_batch(&mut self) -> Option<Action> {
        let together = if self.ramp < self.options.sink.batch_messages_max { 1 } else { usize::MAX };
        let batches_max = self.options.sink.batches_in_flight_max.min(together);
        if !matches!(self.sink, SinkState::Up) || self.batches.len() >= batches_max || !self.keys.has_ready() {
            return None;
        }
        let mut tokens = Vec::new();
        let mut messages = Vec::new();
        while messages.len() < self.ramp
            && let Some(token) = self.keys.pop()
        {
            if let Some(held) = self.held.get_mut(&token) {
                held.with_sink = true;
                messages.push(held.delivery.message.clone());
                tokens.push(token);
            }
        }
        if tokens.is_empty() {
            return None;
        }
        if cfg!(seeded_bug = "settle_before_confirm") {
            self.pending.extend(tokens.iter().map(|token| Settlement { token: *token, outcome: Outcome::Done }));
        }
        let id = BatchId(self.next_batch);
        self.next_batch += 1;
        self.batches.insert(id, tokens);
        Some(Action::Publish(id, Batch::new(messages)))
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
        self.lose(&standing.lost_lanes);
    }

    /// Deliveries of a lost lane that nobody has seen are dropped; those with the sink end as fenced.
    fn lose(&mut self, lanes: &[u16]) {
        if lanes.is_empty() {
            return;
        }
        let gone: Vec<Token> = self
            .held
            .iter()
            .filter(|(_, held)| lanes.contains(&held.delivery.lane) && !held.with_sink)
            .map(|(token, _)| *token)
            .filter(|token| !self.is_settling(token))
            .collect();
        for token in &gone {
            self.held.remove(token);
        }
        let held = &self.held;
        self.keys.forget(|token| !held.contains_key(token));
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
        let key: Option<Arc<str>> = delivery.message.ordering_key().map(Arc::from);
        let scheduled = delivery.scheduled;
        let behind = delivery.origin == Origin::Outbox
            && key.as_ref().is_some_and(|key| {
                delivery.behind || (self.parking.holds(key) && !cfg!(seeded_bug = "forgets_what_is_being_parked"))
            });
        self.held.insert(token, Held { delivery, key: key.clone(), with_sink: false });
        if scheduled {
            self.counters.scheduled += 1;
            self.pending.push(Settlement { token, outcome: Outcome::Schedule });
        } else if behind {
            self.queue_up(token, key);
        } else {
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
            self.parking.park(key, self.settle_number + 1);
        }
    }

    fn published(&mut self, now: Duration, batch: BatchId, verdicts: Option<Verdicts>) {
        let tokens = self.batches.remove(&batch).unwrap_or_default();
        let Some(mut verdicts) = verdicts else {
            for token in tokens.into_iter().rev() {
                if cfg!(seeded_bug = "outage_burns_an_attempt") {
                    let after = Duration::from_secs(3);
                    self.park(token, Outcome::Retry { after, attempts: 1, error: "unavailable".to_owned() });
                } else {
                    self.put_back(token);
                }
            }
            self.sink_is_down(now);
            return;
        };
        let mut first: Option<postroom::Verdict> = None;
        let mut again = Vec::new();
        for token in tokens {
            let Some(held) = self.held.get_mut(&token) else { continue };
            held.with_sink = false;
            let mut verdict = verdicts.take(held.delivery.message.id);
            if cfg!(seeded_bug = "one_verdict_for_the_batch") {
                verdict = first.get_or_insert(verdict).clone();
            }
            let Delivery { message, attempts, .. } = &held.delivery;
            let disposition = decide(verdict, message, *attempts, &self.options.retry, self.chance.next());
            match disposition {
                Disposition::Done => {
                    self.counters.stored += 1;
                    self.through(token, Outcome::Done);
                }
                Disposition::Dead { attempts, cause, error } => {
                    self.counters.dead += 1;
                    self.through(token, Outcome::Dead { attempts, cause, error });
                }
                Disposition::Retry { after, attempts, error } => {
                    self.counters.retried += 1;
                    self.park(token, Outcome::Retry { after, attempts, error });
                }
                Disposition::Again => {
                    self.counters.unknown += 1;
                    again.push(token);
                }
            }
        }
        if again.is_empty() {
            self.ramp = (self.ramp * 2).min(self.options.sink.batch_messages_max);
        } else {
            for token in again.into_iter().rev() {
                self.put_back(token);
            }
            self.sink_is_down(now);
        }
    }

    fn put_back(&mut self, token: Token) {
        if let Some(held) = self.held.get_mut(&token) {
            held.with_sink = false;
            self.keys.put_back(held.key.as_ref(), token);
        }
    }

    /// Settles a delivery and lets the next of its key go.
    fn through(&mut self, token: Token, outcome: Outcome) {
        self.pending.push(Settlement { token, outcome });
        if let Some(key) = self.held.get(&token).and_then(|held| held.key.clone()) {
            self.keys.free(&key);
        }
    }

    /// Parks a delivery; what waits in its key queues up behind it.
    fn park(&mut self, token: Token, outcome: Outcome) {
        self.pending.push(Settlement { token, outcome });
        let Some(key) = self.held.get(&token).and_then(|held| held.key.clone()) else { return };
        self.parking.park(key.clone(), self.settle_number + 1);
        for waiting in self.keys.stop(&key) {
            self.queue_up(waiting, Some(key.clone()));
        }
    }

    fn sink_is_down(&mut self, now: Duration) {
        self.ramp = 1;
        if matches!(self.sink, SinkState::Up) {
            self.counters.sink_outages += 1;
            self.sink = SinkState::Down { probe_at: now + self.sink_backoff.failed(), probing: false };
        }
    }

    fn probed(&mut self, now: Duration, reachable: bool) {
        if reachable {
            self.sink = SinkState::Up;
            self.sink_backoff.succeeded();
        } else {
            self.sink = SinkState::Down { probe_at: now + self.sink_backoff.failed(), probing: false };
        }
    }

    fn settled(&mut self, now: Duration, settled: Option<Settled>) {
        let Some(settlements) = self.settling.take() else { return };
        let Some(settled) = settled else {
            // The same again, before what came after it: order among settlements of a key is kept.
            let later = std::mem::replace(&mut self.pending, settlements);
            self.pending.extend(later);
            self.settle_at = now + self.settle_backoff.failed();
            return;
        };
        self.settle_backoff.succeeded();
        for settlement in &settlements {
            self.held.remove(&settlement.token);
        }
        self.counters.fenced += settled.fenced as u64;
        self.settled_ahead = settled.settled_ahead;
        self.parking.settled(self.settle_number, self.claiming);
        self.lose(&settled.lost_lanes);
        self.lanes_held = self.lanes_held.saturating_sub(settled.lost_lanes.len());
        if settled.more_parked {
            self.parked_at = now;
            self.claim_at = self.claim_at.min(now);
        }
    }

    /// Whether everything claimed has been settled or is waiting for nothing but the sink; for reports at a stop.
    pub fn unfinished(&self) -> usize {
        self.keys.waiting() + self.batches.values().map(Vec::len).sum::<usize>()
    }
}
