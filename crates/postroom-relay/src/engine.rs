//! Pure: every decision of the relay. Inputs are a closed enum, time and chance are handed in, and nothing is done here:
//! [`Engine::next`] says what is to be done.
//!
//! Invariants: of a key, at most one delivery is with the sink (with pipelined order: one run, in one batch); a delivery is
//! settled as done only after a verdict of `Stored` or `Skipped` on its message; what is claimed from the outbox and not
//! passed by the stored position never exceeds `in_flight_max`; an unreachable sink or store burns no attempt.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use postroom::{
    Batch, Cause, Claimed, Delivery, Disposition, FailureKind, OnDead, Order, Origin, Outcome, Report, Settled,
    Settlement, Standing, Token, Verdict, Verdicts, Want, decide, tidy_reason,
};

use crate::backoff::Backoff;
use crate::breaker::Breaker;
use crate::chance::Chance;
use crate::keys::Keys;
use crate::parking::Parking;
use crate::protocol::{Action, BatchId, Counters, EngineOptions, Input};
use crate::rate::Rate;
use crate::suspects::Suspects;

/// How often parked messages are looked at while nothing says that one became free.
const PARKED_POLL: Duration = Duration::from_millis(100);
/// First wait of an idle poll; it doubles up to the configured one.
const POLL_FIRST: Duration = Duration::from_millis(5);
/// How soon a position is written that nothing else writes.
const FLUSH_AFTER: Duration = Duration::from_millis(50);
/// How many relays have to die in a row with this message alone in flight until it is poison.
const DEATHS_MAX: u32 = 3;

struct Held {
    delivery: Delivery,
    key: Option<Arc<str>>,
    with_sink: bool,
    bytes: usize,
    /// Travels alone: it ended its connection, or relays died over it.
    alone: bool,
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
    /// The batch under way is one message that travels alone.
    alone: bool,
    suspects: Suspects,
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
    /// Relays that died before this one, and how many messages are through since that is known.
    deaths: u32,
    through_since_deaths: usize,
    survived: bool,
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
            suspects: Suspects::default(),
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
            deaths: 0,
            through_since_deaths: 0,
            survived: false,
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
        if self.breaker.begins_probe(now) {
            actions.push(Action::Probe);
        }
        while let Some(publish) = self.next_batch(now) {
            actions.push(publish);
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
        if self.can_claim() {
            times.push(self.claim_at);
        }
        times.into_iter().min()
    }

    /// One message at a time, because relays died before.
    fn is_alone(&self) -> bool {
        self.deaths > 0 && self.window() == 1
    }

    /// What a renewal says about this relay.
    fn report(&self) -> Report {
        Report { sink_down: self.breaker.open_because().map(str::to_owned), survived: self.survived }
    }

    fn is_idle(&self) -> bool {
        // A renewal under way may take lanes that nobody would give back.
        self.held.is_empty()
            && self.pending.is_empty()
            && self.settling.is_none()
            && self.claiming.is_none()
            && !self.renewing
    }

    /// Deliveries that may be in flight: fewer after each relay that died holding our lanes, down to one alone.
    fn window(&self) -> usize {
        let shift = 3 * self.deaths.saturating_sub(1).min(10);
        (self.options.in_flight_max >> shift).max(1)
    }

    fn can_claim(&self) -> bool {
        // Reading for a handful of free places costs as much as for many.
        !self.stopping
            && self.claiming.is_none()
            && self.lanes_held > 0
            // Alone it would be noted as the one in flight, and blamed for a death, without ever having been published.
            && !(self.is_alone() && self.breaker.open_because().is_some())
            && self.credit() >= self.window().div_ceil(4)
            && self.bytes_left() >= self.options.in_flight_bytes_max.div_ceil(4)
    }

    fn want(&mut self, now: Duration) -> Option<Want> {
        if !self.can_claim() || (now < self.claim_at && !self.woken) {
            return None;
        }
        let alone = self.is_alone();
        // One at a time the parked ones take turns with the others.
        let parked = now >= self.parked_at && !(alone && self.claiming_parked);
        if parked {
            self.parked_at = now + PARKED_POLL;
        }
        let window = self.window();
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
        self.window().saturating_sub(self.held.len() + self.settled_ahead)
    }

    fn bytes_left(&self) -> usize {
        self.options.in_flight_bytes_max.saturating_sub(self.held_bytes)
    }

    fn next_batch(&mut self, now: Duration) -> Option<Action> {
        let (messages_max, batches_max) = self.breaker.permits(self.options.sink.batches_in_flight_max)?;
        if self.alone || self.batches.len() >= batches_max || !self.keys.has_ready() {
            return None;
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
        let mut messages = Vec::with_capacity(tokens.len());
        for token in &tokens {
            if let Some(held) = self.held.get_mut(token) {
                held.with_sink = true;
                messages.push(held.delivery.message.clone());
            }
        }
        if tokens.is_empty() {
            return None;
        }
        self.rate.took(tokens.len());
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
        self.options.order = standing.order.unwrap_or(self.options.order);
        self.options.on_dead = standing.on_dead.unwrap_or(self.options.on_dead);
        if standing.deaths > self.deaths {
            self.through_since_deaths = 0;
        }
        if standing.deaths != self.deaths {
            self.survived = false;
        }
        self.deaths = standing.deaths;
        self.lose(&standing.lost_lanes);
    }

    /// Deliveries of a lost lane that nobody has seen are dropped; those with the sink end as fenced.
    fn lose(&mut self, lanes: &[u16]) {
        if lanes.is_empty() {
            return;
        }
        self.counters.lanes_lost += lanes.len() as u64;
        let gone: Vec<Token> = self
            .held
            .iter()
            .filter(|(_, held)| lanes.contains(&held.delivery.lane) && !held.with_sink)
            .map(|(token, _)| *token)
            .filter(|token| !self.is_settling(token))
            .collect();
        for token in &gone {
            self.let_go(token);
        }
        for held in self.held.values_mut().filter(|held| lanes.contains(&held.delivery.lane)) {
            held.lost = true;
        }
        self.suspects.lose(lanes);
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
        let (deaths, attempts) = (delivery.deaths, delivery.attempts);
        let unreadable = delivery.unreadable.clone();
        let suspicious = self.suspects.contains(delivery.message.id);
        let alone = suspicious || deaths > 0 || self.is_alone();
        let held = Held { delivery, key: key.clone(), with_sink: false, bytes, alone, lost: false };
        self.held.insert(token, held);
        self.held_bytes += bytes;
        if let Some(error) = unreadable {
            // It alone is set aside: its key, which may be what cannot be read, goes on.
            self.counters.dead += 1;
            let outcome = Outcome::Dead { attempts, cause: Cause::Permanent, error, blocks_key: false };
            self.pending.push(Settlement { token, outcome });
        } else if deaths >= DEATHS_MAX && !scheduled && !behind {
            let error = format!("{deaths} relays in a row died with this message alone in flight");
            if let Some(key) = &key {
                self.keys.hold(key);
            }
            self.bury(token, attempts.saturating_add(1), Cause::Poison, error);
        } else if scheduled {
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
            self.parking.queue(key, self.settle_number + 1);
        }
    }

    fn published(&mut self, now: Duration, batch: BatchId, verdicts: Result<Verdicts, String>) {
        let tokens = self.batches.remove(&batch).unwrap_or_default();
        self.alone = false;
        let mut verdicts = match verdicts {
            Ok(verdicts) => verdicts,
            Err(why) => {
                let why = tidy_reason(why);
                if cfg!(seeded_bug = "outage_burns_an_attempt") {
                    for token in tokens {
                        let after = Duration::from_secs(3);
                        self.park(token, Outcome::Retry { after, attempts: 1, error: "unavailable".to_owned() });
                    }
                } else {
                    self.again(tokens, &why);
                }
                self.sink_is_lost(now, why);
                return;
            }
        };
        let lone = tokens.len() == 1;
        let mut first: Option<Verdict> = None;
        let mut again = Vec::new();
        let mut unknown = String::new();
        for token in tokens {
            let Some(held) = self.held.get_mut(&token) else { continue };
            held.with_sink = false;
            let mut verdict = verdicts.take(held.delivery.message.id);
            if cfg!(seeded_bug = "one_verdict_for_the_batch") {
                verdict = first.get_or_insert(verdict).clone();
            }
            if cfg!(seeded_bug = "silence_is_success") && matches!(verdict, Verdict::Unknown(_)) {
                verdict = Verdict::Stored;
            }
            match &verdict {
                Verdict::Stored => self.breaker.stored(),
                Verdict::Failed(failure) if matches!(failure.kind, FailureKind::Transient | FailureKind::Busy) => {
                    if self.breaker.refused(now, &failure.reason) {
                        self.counters.sink_outages += 1;
                    }
                }
                Verdict::Unknown(why) => unknown = tidy_reason(why.clone()),
                Verdict::Failed(_) | Verdict::Skipped => {}
            }
            let Delivery { message, attempts, .. } = &held.delivery;
            let disposition = decide(verdict, message, *attempts, &self.options.retry, self.chance.next());
            match disposition {
                Disposition::Done => {
                    self.counters.stored += 1;
                    self.through(token, Outcome::Done);
                }
                Disposition::Dead { attempts, cause, error } => self.bury(token, attempts, cause, error),
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
            self.breaker.batch_came_back();
        } else {
            if lone {
                self.again(again, &unknown);
            } else {
                // Nobody can tell which of them it was: from now on one by one.
                for token in again.into_iter().rev() {
                    self.put_back(token);
                }
            }
            self.sink_is_lost(now, unknown);
        }
    }

    /// A batch ended without verdicts. In company nobody knows whose fault it was; what was alone comes under suspicion: the
    /// second time it is set aside, with its key, so that others show whether the sink takes them. When others were stored
    /// between two of its failures, that is a verdict on the message, and burns an attempt.
    fn again(&mut self, tokens: Vec<Token>, why: &str) {
        let [token] = tokens[..] else {
            for token in tokens.into_iter().rev() {
                self.put_back(token);
            }
            return;
        };
        let Some(held) = self.held.get_mut(&token) else { return };
        if held.lost {
            return self.put_back(token);
        }
        held.alone = true;
        let Delivery { message, lane, attempts, .. } = &held.delivery;
        let under_way: usize = self.batches.values().map(Vec::len).sum();
        let suspicion = self.suspects.failed(message.id, *lane, self.counters.stored, under_way as u64);
        let others_passed = suspicion.others_passed || cfg!(seeded_bug = "outage_makes_poison");
        let attempts = attempts.saturating_add(u32::from(others_passed));
        let error = format!("published alone, it ended the connection {} times: {why}", suspicion.failures);
        let attempts_max = self.options.retry.attempts_max_of(&message.topic, &message.kind);
        if attempts >= attempts_max && others_passed && !cfg!(seeded_bug = "poison_goes_round_for_ever") {
            self.bury(token, attempts, Cause::Poison, error);
        } else if suspicion.failures > 1 && !cfg!(seeded_bug = "a_suspect_keeps_its_place") {
            held.with_sink = false;
            let after = self.options.retry.wait(suspicion.failures - 1, self.chance.next());
            self.counters.retried += 1;
            self.park(token, Outcome::Retry { after, attempts, error });
        } else {
            self.put_back(token);
        }
    }

    fn put_back(&mut self, token: Token) {
        let Some(held) = self.held.get_mut(&token) else { return };
        held.with_sink = false;
        if held.lost {
            let key = held.key.clone();
            self.let_go(&token);
            key.iter().for_each(|key| self.keys.free(key));
            return;
        }
        match held.key.clone() {
            // One before it in its batch failed; it has to stay behind that one.
            Some(key) if self.parking.stops(&key) => self.queue_up(token, Some(key)),
            key if held.alone => self.keys.put_back_last(key.as_ref(), token),
            key => self.keys.put_back(key.as_ref(), token),
        }
    }

    /// Makes a dead letter of a delivery; its key goes on or waits, as configured.
    fn bury(&mut self, token: Token, attempts: u32, cause: Cause, error: String) {
        self.counters.dead += 1;
        let keyed = self.held.get(&token).is_some_and(|held| held.key.is_some());
        let blocks_key = keyed && self.options.on_dead == OnDead::Block;
        let outcome = Outcome::Dead { attempts, cause, error, blocks_key };
        if blocks_key && !cfg!(seeded_bug = "block_lets_the_key_go_on") {
            self.park(token, outcome);
        } else if cfg!(seeded_bug = "key_goes_on_before_the_dead_letter_is_written") {
            self.through(token, outcome);
        } else {
            // Its key goes on when the dead letter is written. Sooner, a crash would bring the message back, and it could
            // be stored after those behind it.
            self.pending.push(Settlement { token, outcome });
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
        self.parking.stop(key.clone(), self.settle_number + 1);
        for waiting in self.keys.stop(&key) {
            self.queue_up(waiting, Some(key.clone()));
        }
    }

    fn sink_is_lost(&mut self, now: Duration, why: String) {
        if self.breaker.lost(now, why) {
            self.counters.sink_outages += 1;
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
        for Settlement { token, outcome } in &settlements {
            let through = matches!(outcome, Outcome::Done | Outcome::Dead { .. });
            self.through_since_deaths += usize::from(through);
            if through && let Some(held) = self.held.get(token) {
                self.suspects.clear(held.delivery.message.id);
                if let (Outcome::Dead { blocks_key: false, .. }, Some(key)) = (outcome, &held.key) {
                    self.keys.free(key);
                }
            }
            self.let_go(token);
        }
        if self.deaths > 0 && self.through_since_deaths > self.options.in_flight_max {
            // More than the relay before this one can have had in flight.
            self.survived = true;
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
        self.keys.waiting() + self.batches.values().map(Vec::len).sum::<usize>()
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
