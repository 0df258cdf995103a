//! A worker's transactions: each script here ends with the message committed somewhere, or with nothing changed.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use postroom::{
    Admitted, Cause, Consumer, ConsumerStore, Keep, Message, RetryPolicy, Session, Settle, StoreError, Waiting,
    crash_point, tidy_reason,
};
use tokio::sync::watch;

use crate::handler::{HandlerError, OutOfOrder, Stale, chain};
use crate::handlers::{Handlers, Unknown};
use crate::queue::Arrival;
use crate::versions::{Gap, Turn, gap, turn};

/// Runs again at once behind locks and serialization failures; then the message waits in the store.
const AGAIN_IN_PLACE: u32 = 5;
const AGAIN_FIRST: Duration = Duration::from_millis(20);
const AGAIN_CAP: Duration = Duration::from_secs(5);
/// A batch that takes longer is undone, and its messages go one by one.
const BATCH_PATIENCE: Duration = Duration::from_secs(1);

/// What became of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    Applied,
    Merged,
    /// Older than what was handled, by choice without effect.
    Ignored,
    /// Older than what was handled; the compensation has it.
    Compensated,
    Duplicate,
    /// Of a type that nobody handles, by choice without effect.
    Unknown,
    /// It waits in the store behind another of its key.
    Kept,
    /// It waits in the store for an earlier version.
    Early,
    /// It failed and waits in the store.
    Retried,
    Dead,
    /// Another worker has it now.
    Lost,
    /// Nothing became of it; the broker is to deliver it again.
    Requeue,
    /// Of a type that nobody handles, which stops the receiver.
    Refused,
}

/// What became of a message, and how many versions were found missing on the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct End {
    pub fate: Fate,
    pub missing: u64,
}

impl From<Fate> for End {
    fn from(fate: Fate) -> Self {
        Self { fate, missing: 0 }
    }
}

/// What all workers of a receiver share.
pub(crate) struct Shared<F: ConsumerStore> {
    pub consumer: Consumer,
    pub owner: String,
    pub handlers: Handlers<F>,
    pub retry: RetryPolicy,
    pub timeout: Duration,
    pub lease: Duration,
    /// Messages are kept for an application that takes them from the store; no handler is asked.
    pub keeps_all: bool,
    pub open: Box<dyn Fn() -> Box<dyn Session<F>> + Send + Sync>,
    pub stopping: watch::Receiver<bool>,
}

/// Why a script did not end.
enum Trouble {
    /// The store could not do it now; it says nothing about any message.
    Store(StoreError),
    /// The message at this place.
    Message(HandlerError),
    /// The type of a message that stops the receiver.
    Refused,
}

impl From<StoreError> for Trouble {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

/// One worker's end of the store.
pub(crate) struct Desk<F: ConsumerStore> {
    shared: Arc<Shared<F>>,
    session: Box<dyn Session<F>>,
}

impl<F: ConsumerStore> Desk<F> {
    pub fn new(shared: Arc<Shared<F>>) -> Self {
        let session = (shared.open)();
        Self { shared, session }
    }

    /// Handles a batch in one transaction. `None`: it failed as a whole; its messages are to go one by one.
    pub async fn batch(&mut self, batch: &[Arrival]) -> Option<Vec<End>> {
        let messages: Vec<Arc<Message>> =
            batch.iter().map(|arrival| Arc::new(arrival.received.message.clone())).collect();
        let limit = BATCH_PATIENCE.min(self.shared.timeout);
        let ended = guarded(limit, self.fresh(&messages)).await;
        match self.sound(ended) {
            Ok(ends) => Some(ends),
            Err(Trouble::Store(error)) => {
                tracing::debug!("a batch goes one by one: {}", chain(&error));
                None
            }
            Err(Trouble::Message(error)) => {
                tracing::debug!("a batch goes one by one: {error}");
                None
            }
            Err(Trouble::Refused) => None,
        }
    }

    /// Handles one message until something is committed about it, or the receiver stops.
    pub async fn single(&mut self, arrival: &Arrival) -> End {
        let message = Arc::new(arrival.received.message.clone());
        let mut tries = 0;
        loop {
            let handled = if arrival.careful {
                match self.charge(&message).await {
                    Ok(Ok(waiting)) => return self.waiting(waiting).await,
                    Ok(Err(fate)) => Ok(fate.into()),
                    Err(error) => Err(Trouble::Store(error)),
                }
            } else {
                let one = std::slice::from_ref(&message);
                let ended = guarded(self.shared.timeout, self.fresh(one)).await;
                self.sound(ended).map(|ends| ends.first().copied().unwrap_or(Fate::Requeue.into()))
            };
            let (after, attempts, failure) = match handled {
                Ok(end) => return end,
                Err(Trouble::Refused) => return Fate::Refused.into(),
                Err(Trouble::Store(error)) => {
                    tries += 1;
                    self.say_again(&message, &error);
                    if tries <= AGAIN_IN_PLACE || !matches!(error, StoreError::Busy { .. }) {
                        if self.stopped_within(again_after(tries)).await {
                            return Fate::Requeue.into();
                        }
                        continue;
                    }
                    (AGAIN_CAP, 0, HandlerError::Again(error.into()))
                }
                Err(Trouble::Message(failure)) => (Duration::ZERO, 1, failure),
            };
            let settle = self.judged(&message, 0, attempts, after, failure);
            return self.insist(&message, None, &settle).await.into();
        }
    }

    /// Handles one message that waited in the store, until something is committed about it or the receiver stops.
    pub async fn waiting(&mut self, waiting: Waiting) -> End {
        let message = Arc::new(waiting.message.clone());
        let mut tries = 0;
        let settle = loop {
            let ended = guarded(self.shared.timeout, self.claimed(&waiting, &message)).await;
            match self.sound(ended) {
                Ok(end) => return end,
                Err(Trouble::Refused) => {
                    self.insist(&message, Some(&waiting), &Settle::GivenBack).await;
                    return Fate::Refused.into();
                }
                Err(Trouble::Store(error)) => {
                    tries += 1;
                    self.say_again(&message, &error);
                    if tries <= AGAIN_IN_PLACE || !matches!(error, StoreError::Busy { .. }) {
                        if self.stopped_within(again_after(tries)).await {
                            // Its claim lapses, and it is taken again.
                            return Fate::Lost.into();
                        }
                        continue;
                    }
                    let error = HandlerError::Again(error.into());
                    break self.judged(&message, waiting.attempts, waiting.attempts, AGAIN_CAP, error);
                }
                Err(Trouble::Message(failure)) => {
                    let burned = waiting.attempts.saturating_add(1);
                    break self.judged(&message, waiting.attempts, burned, Duration::ZERO, failure);
                }
            }
        };
        self.insist(&message, Some(&waiting), &settle).await.into()
    }

    /// Takes what is due; of those that may have killed who had them, one.
    pub async fn take(&mut self, max: usize, claims_max: u32, suspect: u32) -> Result<Vec<Waiting>, StoreError> {
        let shared = self.shared.clone();
        let mut tx = self.session.begin().await?;
        let taken = F::take(&mut tx, &shared.consumer, &shared.owner, max, shared.lease, claims_max).await?;
        F::commit(tx).await?;
        let (mut suspects, mut others): (Vec<_>, Vec<_>) =
            taken.into_iter().partition(|waiting| waiting.claims >= suspect);
        for waiting in suspects.split_off(suspects.len().min(1)) {
            self.give_back(&waiting).await;
        }
        others.append(&mut suspects);
        Ok(others)
    }

    /// Renews the claims of this receiver.
    pub async fn renew(&mut self) {
        let shared = self.shared.clone();
        let renewed = async {
            let mut tx = self.session.begin().await?;
            F::renew(&mut tx, &shared.consumer, &shared.owner, shared.lease).await?;
            F::commit(tx).await
        };
        match tokio::time::timeout(shared.lease, renewed).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!("failed to renew the claims of waiting messages: {}", chain(&error)),
            Err(_) => self.session = (shared.open)(),
        }
    }

    /// Gives a claimed message back before anything of it was begun.
    pub async fn give_back(&mut self, waiting: &Waiting) {
        // One that cannot be given back lapses.
        let _ = self.settle(waiting, &Settle::GivenBack).await;
    }

    /// What becomes of a failed message. `attempts` are those burned now, `before` those before it.
    fn judged(&self, message: &Message, before: u32, attempts: u32, after: Duration, failure: HandlerError) -> Settle {
        let (id, kind) = (message.id, message.kind.as_str());
        let error = tidy_reason(failure.to_string());
        let settle = match failure {
            HandlerError::Reject(_) => Settle::Dead { attempts, cause: Cause::Permanent, error },
            HandlerError::Again(_) if attempts > before => {
                let retry = &self.shared.retry;
                if attempts >= retry.attempts_max_of(&message.topic, kind) {
                    Settle::Dead { attempts, cause: Cause::Exhausted, error }
                } else {
                    let chance = chance_of(message, attempts);
                    Settle::Retry { after: retry.wait(attempts, chance).max(after), attempts, error }
                }
            }
            HandlerError::Again(_) => Settle::Retry { after, attempts, error },
        };
        match &settle {
            Settle::Dead { cause, error, .. } => {
                tracing::error!(%id, kind, attempts, cause = cause.as_str(), "a message cannot be handled: {error}");
            }
            Settle::Retry { after, error, .. } => {
                tracing::warn!(%id, kind, attempts, "failed to handle a message, trying again in {after:?}: {error}");
            }
            _ => {}
        }
        settle
    }

    fn say_again(&self, message: &Message, error: &StoreError) {
        if error.is_transient() {
            tracing::debug!(id = %message.id, "the store says again: {}", chain(error));
        } else {
            tracing::error!(id = %message.id, "the store refuses, trying again: {}", chain(error));
        }
    }

    /// Writes what became of a message, as often as it takes: of one that waits in the store, or of one from the broker, which
    /// is taken charge of.
    async fn insist(&mut self, message: &Message, waiting: Option<&Waiting>, settle: &Settle) -> Fate {
        let mut tries = 0;
        loop {
            let written = match waiting {
                Some(waiting) => self.settle(waiting, settle).await,
                None => self.keep_and_settle(message, settle).await,
            };
            match written {
                Ok(fate) => return fate,
                Err(error) => {
                    tries += 1;
                    self.say_again(message, &error);
                    if self.stopped_within(again_after(tries)).await {
                        return Fate::Requeue;
                    }
                }
            }
        }
    }

    /// Whether the receiver stops within this time.
    async fn stopped_within(&mut self, wait: Duration) -> bool {
        let mut stopping = self.shared.stopping.clone();
        tokio::time::timeout(wait, stopping.wait_for(|stopping| *stopping)).await.is_ok()
    }

    /// A handler that hung or panicked costs the connection, and counts as a failed attempt.
    fn sound<T>(&mut self, ended: Result<Result<T, Trouble>, String>) -> Result<T, Trouble> {
        ended.unwrap_or_else(|failure| {
            // Dropping the session ends its transaction, and cancels what the server is doing for it.
            self.session = (self.shared.open)();
            Err(Trouble::Message(HandlerError::Again(failure.into())))
        })
    }

    /// Messages from the broker, in one transaction.
    async fn fresh(&mut self, messages: &[Arc<Message>]) -> Result<Vec<End>, Trouble> {
        let shared = &self.shared;
        let mut tx = self.session.begin().await?;
        let arrivals: Vec<_> =
            messages.iter().map(|message| (message.id, message.ordering_key().map(str::to_owned))).collect();
        let admitted = F::admit(&mut tx, &shared.consumer, &arrivals).await?;
        let mut ends: Vec<End> = Vec::with_capacity(messages.len());
        let mut kept = Vec::new();
        for (message, admitted) in messages.iter().zip(admitted) {
            ends.push(match admitted {
                Admitted::Duplicate => Fate::Duplicate.into(),
                Admitted::Behind => {
                    kept.push(Message::clone(message));
                    Fate::Kept.into()
                }
                Admitted::New if shared.keeps_all => {
                    kept.push(Message::clone(message));
                    Fate::Kept.into()
                }
                Admitted::New => {
                    let (end, early) = apply(shared, &mut tx, message, 0, false, None).await?;
                    if let Some(window) = early {
                        let keep = Keep::Early { window };
                        F::keep(&mut tx, &shared.consumer, std::slice::from_ref(message.as_ref()), keep).await?;
                    }
                    end
                }
            });
        }
        if !kept.is_empty() {
            F::keep(&mut tx, &shared.consumer, &kept, Keep::Ready).await?;
        }
        crash_point("consume.effect");
        F::commit(tx).await?;
        crash_point("consume.committed");
        Ok(ends)
    }

    /// Commits that a message is begun: it is kept in the store, claimed by this worker.
    async fn charge(&mut self, message: &Arc<Message>) -> Result<Result<Waiting, Fate>, StoreError> {
        let shared = &self.shared;
        let mut tx = self.session.begin().await?;
        let arrival = [(message.id, message.ordering_key().map(str::to_owned))];
        let admitted = F::admit(&mut tx, &shared.consumer, &arrival).await?;
        let one = std::slice::from_ref(message.as_ref());
        match admitted.first() {
            Some(Admitted::New) => {
                let keep = Keep::Claimed { owner: &shared.owner, lease: shared.lease };
                let claim = F::keep(&mut tx, &shared.consumer, one, keep).await?;
                F::commit(tx).await?;
                crash_point("consume.charged");
                let message = Message::clone(message);
                Ok(Ok(Waiting { claim, claims: 1, attempts: 0, window_over: false, message }))
            }
            Some(Admitted::Behind) => {
                F::keep(&mut tx, &shared.consumer, one, Keep::Ready).await?;
                F::commit(tx).await?;
                Ok(Err(Fate::Kept))
            }
            Some(Admitted::Duplicate) | None => Ok(Err(Fate::Duplicate)),
        }
    }

    /// A message that waited in the store: its effect and its end in one transaction.
    async fn claimed(&mut self, waiting: &Waiting, message: &Arc<Message>) -> Result<End, Trouble> {
        let shared = &self.shared;
        let mut answer = None;
        if let Some(handler) = shared.handlers.of(&message.kind).filter(|handler| handler.calls()) {
            let key = format!("{}/{}", shared.consumer, message.id);
            answer = Some(handler.call(&key, message, waiting.attempts).await.map_err(sorted::<F>)?);
            crash_point("consume.called");
        }
        let mut tx = self.session.begin().await?;
        let (end, early) = apply(shared, &mut tx, message, waiting.attempts, waiting.window_over, answer).await?;
        let settle = early.map_or(Settle::Done, |window| Settle::Early { window });
        if !F::settle(&mut tx, &shared.consumer, message.id, waiting.claim, &settle).await? {
            return Ok(Fate::Lost.into());
        }
        crash_point("consume.effect");
        F::commit(tx).await?;
        crash_point("consume.committed");
        Ok(end)
    }

    /// A message from the broker that failed: it is taken charge of and waits, or is dead.
    async fn keep_and_settle(&mut self, message: &Message, settle: &Settle) -> Result<Fate, StoreError> {
        let shared = &self.shared;
        let mut tx = self.session.begin().await?;
        let arrival = [(message.id, message.ordering_key().map(str::to_owned))];
        if F::admit(&mut tx, &shared.consumer, &arrival).await?.first() == Some(&Admitted::Duplicate) {
            return Ok(Fate::Duplicate);
        }
        let keep = Keep::Claimed { owner: &shared.owner, lease: shared.lease };
        let claim = F::keep(&mut tx, &shared.consumer, std::slice::from_ref(message), keep).await?;
        F::settle(&mut tx, &shared.consumer, message.id, claim, settle).await?;
        F::commit(tx).await?;
        crash_point("consume.kept");
        Ok(fate_of(settle))
    }

    async fn settle(&mut self, waiting: &Waiting, settle: &Settle) -> Result<Fate, StoreError> {
        let shared = &self.shared;
        let mut tx = self.session.begin().await?;
        let held = F::settle(&mut tx, &shared.consumer, waiting.message.id, waiting.claim, settle).await?;
        F::commit(tx).await?;
        Ok(if held { fate_of(settle) } else { Fate::Lost })
    }
}

/// Runs a script that calls handlers; the error says how one hung or panicked.
async fn guarded<T>(limit: Duration, script: impl Future<Output = T>) -> Result<T, String> {
    match tokio::time::timeout(limit, AssertUnwindSafe(script).catch_unwind()).await {
        Ok(Ok(ended)) => Ok(ended),
        Ok(Err(panic)) => {
            let said = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
            let said = said.or_else(|| panic.downcast_ref::<String>().cloned());
            Err(format!("its handler panicked: {}", said.unwrap_or_else(|| "without a text".to_owned())))
        }
        Err(_) => Err(format!("its handler had not ended after {limit:?}")),
    }
}

fn fate_of(settle: &Settle) -> Fate {
    match settle {
        Settle::Dead { .. } => Fate::Dead,
        Settle::Early { .. } => Fate::Early,
        Settle::Done | Settle::Retry { .. } | Settle::GivenBack => Fate::Retried,
    }
}

fn again_after(tries: u32) -> Duration {
    AGAIN_FIRST.saturating_mul(1 << tries.min(10)).min(AGAIN_CAP)
}

/// Spreads retries by the message's own id: no clock and no generator is needed for that.
fn chance_of(message: &Message, attempts: u32) -> f64 {
    let bits = message.id.as_uuid().as_u64_pair().1 ^ u64::from(attempts).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (bits.wrapping_mul(0xd6e8_feb8_6659_fd93) >> 11) as f64 / (1u64 << 53) as f64
}

fn sorted<F: ConsumerStore>(error: HandlerError) -> Trouble {
    match error {
        HandlerError::Again(error) => match F::sort(error) {
            Ok(store) => Trouble::Store(store),
            Err(error) => Trouble::Message(HandlerError::Again(error)),
        },
        rejected => Trouble::Message(rejected),
    }
}

/// Has the effect of one message in the transaction. Also returns the window, if it is to wait for an earlier version.
async fn apply<F: ConsumerStore>(
    shared: &Shared<F>,
    tx: &mut F::Tx<'_>,
    message: &Arc<Message>,
    attempts: u32,
    window_over: bool,
    answer: Option<Box<dyn std::any::Any + Send>>,
) -> Result<(End, Option<Duration>), Trouble> {
    let (handlers, consumer) = (&shared.handlers, &shared.consumer);
    let mut missing = 0;
    let mut merge_into = None;
    let versioned = handlers.version_of(message);
    if let Some((versions, aggregate, version)) = &versioned {
        let last = F::version(tx, consumer, aggregate).await?;
        match turn(*versions, last, *version, window_over) {
            Turn::Now => {}
            Turn::Early(window) => return Ok((Fate::Early.into(), Some(window))),
            Turn::Stale(Stale::Ignore, _) => return Ok((Fate::Ignored.into(), None)),
            Turn::Stale(Stale::Merge, last) => merge_into = Some(last),
            Turn::Stale(Stale::Compensate, handled) => {
                let late = OutOfOrder::Late { aggregate, message, handled };
                handlers.compensate(tx, &late).await.map_err(sorted::<F>)?;
                return Ok((Fate::Compensated.into(), None));
            }
            Turn::WindowOver { expected, window } => {
                let between = F::waiting_versions(tx, consumer, aggregate, expected - 1, *version).await?;
                match gap(expected, *version, &between) {
                    Gap::Waits => return Ok((Fate::Early.into(), Some(window))),
                    Gap::LetGo => {
                        F::set_version(tx, consumer, aggregate, expected - 1).await?;
                        return Ok((Fate::Early.into(), Some(window)));
                    }
                    Gap::Missing(versions) => {
                        missing = versions.clone().count() as u64;
                        let last_missing = *versions.end();
                        let gap = OutOfOrder::Missing { aggregate, versions, next: message };
                        handlers.compensate(tx, &gap).await.map_err(sorted::<F>)?;
                        F::set_version(tx, consumer, aggregate, last_missing).await?;
                        if last_missing + 1 != *version {
                            return Ok((End { fate: Fate::Early, missing }, Some(window)));
                        }
                    }
                }
            }
        }
    }
    let fate = match handlers.of(&message.kind) {
        Some(handler) => {
            handler.handle(tx, message, attempts, merge_into, answer).await.map_err(sorted::<F>)?;
            if merge_into.is_some() { Fate::Merged } else { Fate::Applied }
        }
        None => match handlers.on_unknown() {
            Unknown::Ignore => Fate::Unknown,
            Unknown::Fail => return Err(Trouble::Refused),
            Unknown::DeadLetter => {
                let error = format!("no handler takes type {:?}", message.kind);
                return Err(Trouble::Message(HandlerError::reject(error)));
            }
        },
    };
    if let Some((_, aggregate, version)) = versioned.filter(|_| merge_into.is_none()) {
        F::set_version(tx, consumer, &aggregate, version).await?;
    }
    Ok((End { fate, missing }, None))
}
