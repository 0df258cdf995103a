//! A worker's transactions: each script here ends with the message committed somewhere, or with nothing changed.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::FutureExt;
use postroom::{
    Admitted, Cause, ConsumerStore, Keep, Kept, Message, MessageId, Session, Settle, StoreError, Waiting, crash_point,
    fingerprint, tidy_reason,
};
use tokio::time::Instant;
use tokio::time::error::Elapsed;

use crate::again::{self, STORE_PATIENCE, stopped_before_try};
use crate::apply::{End, Fate, Trouble, apply, sorted, span};
use crate::bury::{Burial, Buried, Buries};
use crate::handler::{HandlerError, chain};
use crate::handlers::Answer;
use crate::queue::Arrival;
use crate::shared::{Held, Hold, Shared};

/// Runs again at once behind locks and serialization failures; then the message waits in the store.
const AGAIN_IN_PLACE: u32 = 5;
/// A batch that takes longer is undone, and its messages go one by one.
const BATCH_PATIENCE: Duration = Duration::from_secs(1);

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
        let ended = patient(limit, self.fresh(&messages, limit)).await;
        let ended = self.sound(ended);
        match &ended {
            Err(Trouble::Store(error) | Trouble::Begun(error)) => {
                tracing::debug!("a batch goes one by one: {}", chain(error));
            }
            Err(Trouble::Message(error)) => tracing::debug!("a batch goes one by one: {error}"),
            _ => {}
        }
        ended.ok()
    }

    /// Handles one message until something is committed about it, or the receiver stops.
    pub async fn single(&mut self, arrival: &Arrival) -> End {
        let message = Arc::new(arrival.received.message.clone());
        if let Some(reason) = &arrival.unkeepable {
            return self.bury(&message, reason).await.into();
        }
        let mut tries = Tries::default();
        loop {
            let ended = if arrival.careful {
                let charged = patient(Duration::ZERO, self.charge(&message)).await;
                match self.sound(charged) {
                    Ok(Ok(held)) => return self.waiting(held).await,
                    Ok(Err(fate)) => Ok(fate.into()),
                    Err(trouble) => Err(trouble),
                }
            } else {
                let limit = self.shared.timeout;
                let ended = patient(limit, self.fresh(std::slice::from_ref(&message), limit)).await;
                self.sound(ended).map(|ends| ends.first().copied().unwrap_or(Fate::Requeue.into()))
            };
            let trouble = match ended {
                Ok(end) => return end,
                Err(trouble) => trouble,
            };
            let settle = match self.judged(&message, 0, &mut tries, trouble).await {
                Judged::Again => continue,
                Judged::Stopped => return Fate::Requeue.into(),
                Judged::Refused => return Fate::Refused.into(),
                Judged::Unkeepable(reason) => return self.bury(&message, &reason).await.into(),
                Judged::Settle(settle) => settle,
            };
            return self.insist(&message, None, &settle).await.into();
        }
    }

    /// Handles one message that waited in the store, until something is committed about it or the receiver stops.
    pub async fn waiting(&mut self, held: Held<F>) -> End {
        let waiting = &held.waiting;
        let message = Arc::new(waiting.message.clone());
        let mut tries = Tries::default();
        let mut answer = None;
        let settle = loop {
            let limit = self.shared.timeout;
            let ended = patient(limit, self.claimed(waiting, &message, answer.as_ref(), limit)).await;
            let trouble = match self.sound(ended) {
                Ok(end) => return end,
                Err(Trouble::Call) => {
                    // Kept for all tries: what was answered once is not asked for again because the store is away.
                    match self.call(&message, waiting.attempts).await {
                        Ok(answered) => {
                            answer = Some(answered);
                            continue;
                        }
                        Err(trouble) => trouble,
                    }
                }
                Err(trouble) => trouble,
            };
            match self.judged(&message, waiting.attempts, &mut tries, trouble).await {
                Judged::Again => {}
                Judged::Stopped => break Settle::GivenBack,
                Judged::Refused => {
                    self.insist(&message, Some(waiting), &Settle::GivenBack).await;
                    return Fate::Refused.into();
                }
                Judged::Unkeepable(error) => {
                    let attempts = waiting.attempts.saturating_add(1);
                    break Settle::Dead { attempts, cause: Cause::Permanent, error };
                }
                Judged::Settle(settle) => break settle,
            }
        };
        self.insist(&message, Some(waiting), &settle).await.into()
    }

    /// Takes what is due; of those that may have killed who had them, one.
    pub async fn take(&mut self, max: usize, claims_max: u32, suspect: u32) -> Result<Vec<Held<F>>, StoreError> {
        let shared = self.shared.clone();
        let taken = patient(Duration::ZERO, async {
            let mut tx = self.session.begin().await?;
            let taken = F::take(&mut tx, &shared.consumer, &shared.owner, max, shared.lease, claims_max).await?;
            F::commit(tx).await?;
            Ok(taken)
        });
        let taken = taken.await;
        let (mut suspects, others): (Vec<_>, Vec<_>) =
            self.whole(taken)?.into_iter().partition(|waiting| waiting.claims >= suspect);
        // The suspect is the last one.
        let held = others.into_iter().chain(suspects.pop()).map(|waiting| self.hold(waiting)).collect();
        for waiting in suspects {
            self.give_back(waiting.message.id, waiting.claim).await;
        }
        Ok(held)
    }

    fn hold(&self, waiting: Waiting) -> Held<F> {
        Held { _hold: Hold::on(&self.shared, &waiting), waiting }
    }

    /// Renews the claims in hand.
    pub async fn renew(&mut self) {
        let shared = self.shared.clone();
        let claims = shared.in_hand();
        let renewed = patient(Duration::ZERO, async {
            let mut tx = self.session.begin().await?;
            F::renew(&mut tx, &shared.consumer, &claims, shared.lease).await?;
            F::commit(tx).await
        });
        let renewed = renewed.await;
        if let Err(error) = self.whole(renewed) {
            tracing::warn!(consumer = %shared.consumer, "failed to renew the claims of waiting messages: {}", chain(&error));
        }
    }

    /// Gives a claimed message back before anything of it was begun. One that cannot be given back lapses.
    pub async fn give_back(&mut self, id: MessageId, claim: i64) {
        let given = patient(Duration::ZERO, self.settle(id, claim, &Settle::GivenBack)).await;
        let _ = self.whole(given);
    }

    /// A script without a handler: one that hung costs the session.
    fn whole<T>(&mut self, ended: Result<Result<T, StoreError>, Elapsed>) -> Result<T, StoreError> {
        match ended {
            Ok(result) => result,
            Err(elapsed) => {
                self.session = (self.shared.open)();
                Err(StoreError::Unavailable { what: "hear from the store", source: elapsed.into() })
            }
        }
    }

    /// A script: one that hung, or whose handler hung or panicked, costs the session.
    fn sound<T>(&mut self, ended: Result<Result<T, Trouble>, Elapsed>) -> Result<T, Trouble> {
        let trouble = match ended {
            Ok(Err(Trouble::Hung(said))) => Trouble::Message(HandlerError::Again(said.into())),
            Ok(result) => return result,
            Err(elapsed) => {
                Trouble::Begun(StoreError::Unavailable { what: "hear from the store", source: elapsed.into() })
            }
        };
        // Dropping the session ends its transaction, and cancels what the server is doing for it.
        self.session = (self.shared.open)();
        Err(trouble)
    }

    /// What follows from trouble with a message; `before` attempts were used up before. Waits where it is to be tried again
    /// in its place.
    async fn judged(&mut self, message: &Message, before: u32, tries: &mut Tries, trouble: Trouble) -> Judged {
        let failure = match trouble {
            Trouble::Refused => return Judged::Refused,
            Trouble::Store(error) if F::refuses_the_message(&error) => {
                return Judged::Unkeepable(tidy_reason(chain(&error)));
            }
            Trouble::Message(failure) => failure,
            // Not reached: `sound` and `waiting` have dealt with them.
            Trouble::Hung(said) => HandlerError::Again(said.into()),
            Trouble::Call => HandlerError::Again("the call was not made".into()),
            Trouble::Store(error) | Trouble::Begun(error) if matches!(error, StoreError::Busy { .. }) => {
                tries.busy += 1;
                if tries.busy <= AGAIN_IN_PLACE {
                    return self.again(message, &error, tries.busy).await;
                }
                // Somebody holds a lock for long: others have the worker meanwhile. No attempt is used up.
                let error = tidy_reason(chain(&error));
                return Judged::Settle(Settle::Retry { after: again::CAP, attempts: before, error });
            }
            Trouble::Begun(error) => {
                tries.begun += 1;
                if tries.begun <= AGAIN_IN_PLACE {
                    return self.again(message, &error, tries.begun).await;
                }
                // The store goes away whenever this message is handled.
                HandlerError::Again(error.into())
            }
            Trouble::Store(error) => {
                tries.away += 1;
                return self.again(message, &error, tries.away).await;
            }
        };
        Judged::Settle(self.failed(message, before.saturating_add(1), failure))
    }

    async fn again(&mut self, message: &Message, error: &StoreError, tries: u32) -> Judged {
        self.say_again(message, error);
        if stopped_before_try(&self.shared.stopping, tries).await { Judged::Stopped } else { Judged::Again }
    }

    /// What becomes of a failed message; `attempts` counts this one.
    fn failed(&self, message: &Message, attempts: u32, failure: HandlerError) -> Settle {
        let error = tidy_reason(failure.to_string());
        let retry = &self.shared.retry;
        let settle = match failure {
            HandlerError::Reject(_) => Settle::Dead { attempts, cause: Cause::Permanent, error },
            HandlerError::Again(_) if attempts >= retry.attempts_max_of(&message.topic, &message.kind) => {
                Settle::Dead { attempts, cause: Cause::Exhausted, error }
            }
            HandlerError::Again(_) => {
                Settle::Retry { after: retry.wait(attempts, chance_of(message, attempts)), attempts, error }
            }
        };
        match &settle {
            Settle::Dead { cause, error, .. } => {
                tracing::error!(
                    consumer = %self.shared.consumer, id = %message.id, topic = message.topic, r#type = message.kind,
                    tenant = message.tenant_id, aggregate_type = message.aggregate_type, aggregate = message.aggregate_id,
                    version = message.aggregate_version, attempts, payload = %fingerprint(message), cause = cause.as_str(),
                    "a message cannot be handled: {error}"
                );
            }
            Settle::Retry { after, error, .. } => {
                tracing::warn!(
                    consumer = %self.shared.consumer, id = %message.id, topic = message.topic, r#type = message.kind,
                    tenant = message.tenant_id, aggregate_type = message.aggregate_type, aggregate = message.aggregate_id,
                    version = message.aggregate_version, attempts, payload = %fingerprint(message),
                    "failed to handle a message, trying again in {after:?}: {error}"
                );
            }
            _ => {}
        }
        settle
    }

    fn say_again(&self, message: &Message, error: &StoreError) {
        if error.is_transient() {
            tracing::debug!(consumer = %self.shared.consumer, id = %message.id, "the store failed temporarily, trying again: {}", chain(error));
        } else {
            tracing::error!(consumer = %self.shared.consumer, id = %message.id, "the store refuses, trying again: {}", chain(error));
        }
    }

    /// Writes what became of a message, as often as it takes: of one that waits in the store, or of one from the broker, which
    /// is taken charge of.
    async fn insist(&mut self, message: &Message, waiting: Option<&Waiting>, settle: &Settle) -> Fate {
        let mut tries = 0;
        loop {
            let written = match waiting {
                Some(waiting) => patient(Duration::ZERO, self.settle(waiting.message.id, waiting.claim, settle)).await,
                None => patient(Duration::ZERO, self.keep_and_settle(message, settle)).await,
            };
            match self.whole(written) {
                Ok(fate) => return fate,
                Err(error) => {
                    tries += 1;
                    self.say_again(message, &error);
                    if stopped_before_try(&self.shared.stopping, tries).await {
                        return Fate::Requeue;
                    }
                }
            }
        }
    }

    /// Keeps a message from the broker as a dead one, with the queue and the reason.
    async fn bury(&mut self, message: &Message, reason: &str) -> Fate {
        let shared = self.shared.clone();
        let burial = Burial { consumer: &shared.consumer, origin: &shared.origin, reason, stopping: &shared.stopping };
        match burial.of(message, self).await {
            Buried::Kept(Kept::New) => Fate::Dead,
            Buried::Kept(Kept::Duplicate) => Fate::Duplicate,
            Buried::Unkept => Fate::Unkept,
            // Nobody fences a receiver: it claims message by message.
            Buried::Fenced | Buried::Stopped => Fate::Requeue,
        }
    }

    /// Messages from the broker, in one transaction; their handlers have so long together.
    async fn fresh(&mut self, messages: &[Arc<Message>], limit: Duration) -> Result<Vec<End>, Trouble> {
        let shared = &self.shared;
        let mut tx = self.session.begin().await?;
        let arrivals: Vec<_> =
            messages.iter().map(|message| (message.id, message.ordering_key().map(str::to_owned))).collect();
        let admitted = F::admit(&mut tx, &shared.consumer, &arrivals).await?;
        let deadline = Instant::now() + limit;
        let mut ends: Vec<End> = Vec::with_capacity(messages.len());
        let mut kept = Vec::new();
        for (message, admitted) in messages.iter().zip(admitted) {
            ends.push(match admitted {
                Admitted::Duplicate => Fate::Duplicate.into(),
                Admitted::Behind => {
                    kept.push(Message::clone(message));
                    Fate::Kept.into()
                }
                Admitted::New => {
                    let applied = apply(shared, &mut tx, message, 0, false, None);
                    let (end, early) = guarded(deadline, limit, applied).await.map_err(Trouble::begun)?;
                    if let Some(window) = early {
                        let keep = Keep::Early { window };
                        F::keep(&mut tx, &shared.consumer, std::slice::from_ref(message.as_ref()), keep)
                            .await
                            .map_err(|error| Trouble::Store(error).begun())?;
                    }
                    end
                }
            });
        }
        let begun = |error| Trouble::Store(error).begun();
        if !kept.is_empty() {
            F::keep(&mut tx, &shared.consumer, &kept, Keep::Ready).await?;
        }
        crash_point("consume.effect");
        F::commit(tx).await.map_err(begun)?;
        crash_point("consume.committed");
        Ok(ends)
    }

    /// Commits that a message is begun: it is kept in the store, claimed by this worker.
    async fn charge(&mut self, message: &Arc<Message>) -> Result<Result<Held<F>, Fate>, Trouble> {
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
                Ok(Ok(self.hold(Waiting { claim, claims: 1, attempts: 0, window_over: false, message })))
            }
            Some(Admitted::Behind) => {
                F::keep(&mut tx, &shared.consumer, one, Keep::Ready).await?;
                F::commit(tx).await?;
                Ok(Err(Fate::Kept))
            }
            Some(Admitted::Duplicate) | None => {
                // What it repeats is as durable as this commit.
                F::commit(tx).await?;
                Ok(Err(Fate::Duplicate))
            }
        }
    }

    /// A message that waited in the store: its effect and its end in one transaction.
    async fn claimed(
        &mut self,
        waiting: &Waiting,
        message: &Arc<Message>,
        answer: Option<&Answer>,
        limit: Duration,
    ) -> Result<End, Trouble> {
        let shared = &self.shared;
        let begun = |error| Trouble::Store(error).begun();
        let mut tx = self.session.begin().await?;
        let applied = apply(shared, &mut tx, message, waiting.attempts, waiting.window_over, answer);
        let (end, early) = guarded(Instant::now() + limit, limit, applied).await.map_err(Trouble::begun)?;
        let settle = early.map_or(Settle::Done, |window| Settle::Early { window });
        if !F::settle(&mut tx, &shared.consumer, message.id, waiting.claim, &settle).await.map_err(begun)? {
            return Ok(Fate::Lost.into());
        }
        crash_point("consume.effect");
        F::commit(tx).await.map_err(begun)?;
        crash_point("consume.committed");
        Ok(end)
    }

    /// Calls the outside, with no transaction open.
    async fn call(&mut self, message: &Arc<Message>, attempts: u32) -> Result<Answer, Trouble> {
        let shared = &self.shared;
        let Some(handler) = shared.handlers.of(&message.kind) else { return Err(Trouble::Refused) };
        let key = format!("{}/{}", shared.consumer, message.id);
        let span = span(shared, message);
        let limit = shared.timeout;
        let called = async {
            let called = span.around(handler.call(&key, message, attempts)).await;
            called.inspect_err(|error| span.failed(&error.to_string())).map_err(sorted::<F>)
        };
        let answer = match guarded(Instant::now() + limit, limit, called).await {
            Err(Trouble::Hung(said)) => return Err(Trouble::Message(HandlerError::Again(said.into()))),
            other => other.map_err(Trouble::begun)?,
        };
        crash_point("consume.called");
        Ok(answer)
    }

    /// A message from the broker that failed: it is taken charge of and waits, or is dead.
    async fn keep_and_settle(&mut self, message: &Message, settle: &Settle) -> Result<Fate, StoreError> {
        let shared = &self.shared;
        let mut tx = self.session.begin().await?;
        let arrival = [(message.id, message.ordering_key().map(str::to_owned))];
        match F::admit(&mut tx, &shared.consumer, &arrival).await?.first() {
            Some(Admitted::Behind) if !matches!(settle, Settle::Dead { .. }) => {
                // Its attempt is forgotten; its place is not.
                F::keep(&mut tx, &shared.consumer, std::slice::from_ref(message), Keep::Ready).await?;
                F::commit(tx).await?;
                return Ok(Fate::Kept);
            }
            Some(Admitted::New | Admitted::Behind) => {}
            Some(Admitted::Duplicate) | None => {
                F::commit(tx).await?;
                return Ok(Fate::Duplicate);
            }
        }
        let keep = Keep::Claimed { owner: &shared.owner, lease: shared.lease };
        let claim = F::keep(&mut tx, &shared.consumer, std::slice::from_ref(message), keep).await?;
        F::settle(&mut tx, &shared.consumer, message.id, claim, settle).await?;
        F::commit(tx).await?;
        crash_point("consume.kept");
        Ok(fate_of(settle))
    }

    /// Keeps a message that cannot be kept among those that wait.
    async fn committed_dead(&mut self, message: &Message, error: &str) -> Result<Kept, StoreError> {
        let shared = &self.shared;
        let mut tx = self.session.begin().await?;
        // It takes no place in its key: it never has an effect by itself.
        match F::admit(&mut tx, &shared.consumer, &[(message.id, None)]).await?.first() {
            Some(Admitted::New | Admitted::Behind) => {}
            Some(Admitted::Duplicate) | None => {
                F::commit(tx).await?;
                return Ok(Kept::Duplicate);
            }
        }
        F::keep_dead(&mut tx, &shared.consumer, message, error).await?;
        F::commit(tx).await?;
        crash_point("consume.buried");
        Ok(Kept::New)
    }

    async fn settle(&mut self, id: MessageId, claim: i64, settle: &Settle) -> Result<Fate, StoreError> {
        let shared = &self.shared;
        let mut tx = self.session.begin().await?;
        let held = F::settle(&mut tx, &shared.consumer, id, claim, settle).await?;
        F::commit(tx).await?;
        Ok(if held { fate_of(settle) } else { Fate::Lost })
    }
}

#[async_trait]
impl<F: ConsumerStore> Buries for Desk<F> {
    async fn keep_dead(&mut self, message: &Message, error: &str) -> Result<Option<Kept>, StoreError> {
        let kept = patient(Duration::ZERO, self.committed_dead(message, error)).await;
        self.whole(kept).map(Some)
    }

    fn refuses_the_message(&self, error: &StoreError) -> bool {
        F::refuses_the_message(error)
    }
}

/// How often a message was tried in its place, and for what.
#[derive(Default)]
struct Tries {
    /// Locks, deadlocks, serialization failures.
    busy: u32,
    /// The store went away after a handler was called.
    begun: u32,
    /// The store could not be reached, or refuses whatever it is asked.
    away: u32,
}

/// What follows from trouble.
enum Judged {
    Again,
    Stopped,
    Refused,
    /// The store refuses it: it is kept as a dead one.
    Unkeepable(String),
    Settle(Settle),
}

/// Gives a script so long for its handlers and as long again as the store may need.
async fn patient<T>(limit: Duration, script: impl Future<Output = T>) -> Result<T, Elapsed> {
    tokio::time::timeout(limit.saturating_add(STORE_PATIENCE), script).await
}

/// Runs what calls a handler; one that hangs or panics is told by the error.
async fn guarded<T>(
    deadline: Instant,
    limit: Duration,
    script: impl Future<Output = Result<T, Trouble>>,
) -> Result<T, Trouble> {
    match tokio::time::timeout_at(deadline, AssertUnwindSafe(script).catch_unwind()).await {
        Ok(Ok(ended)) => ended,
        Ok(Err(panic)) => {
            let said = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
            let said = said.or_else(|| panic.downcast_ref::<String>().cloned());
            Err(Trouble::Hung(format!("its handler panicked: {}", said.unwrap_or_else(|| "without a text".to_owned()))))
        }
        Err(_) => Err(Trouble::Hung(format!("its handler had not ended after {limit:?}"))),
    }
}

fn fate_of(settle: &Settle) -> Fate {
    match settle {
        Settle::Dead { .. } => Fate::Dead,
        Settle::Early { .. } => Fate::Early,
        Settle::Done | Settle::Retry { .. } | Settle::GivenBack => Fate::Retried,
    }
}

/// Spreads retries by the message's own id: no clock and no generator is needed for that.
fn chance_of(message: &Message, attempts: u32) -> f64 {
    let bits = message.id.as_uuid().as_u64_pair().1 ^ u64::from(attempts).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (bits.wrapping_mul(0xd6e8_feb8_6659_fd93) >> 11) as f64 / (1u64 << 53) as f64
}
