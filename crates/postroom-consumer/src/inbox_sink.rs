//! Publishing without a broker: a message goes straight into the inbox table of its consumer, in this or another database.

use std::collections::HashSet;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use postroom::{
    Batch, FailureKind, Keeper, Message, MessageId, Sink, SinkLimits, StoreError, Unavailable, Verdict, Verdicts,
    tidy_reason,
};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};

use crate::handler::chain;
use crate::unkeepable::{too_long, without_nul};

const BATCH_MESSAGES_MAX: usize = 500;
const BATCH_BYTES_MAX: usize = 8 << 20;

/// Puts messages into the inbox of one consumer. A batch is one transaction, and what is there already is recognised by its id: so each message
/// is there exactly once, whatever is sent again.
///
/// The order within a key is that of the relay. Several relays may send to one inbox, and a [`Filler`](crate::Filler) may fill it besides.
pub struct InboxSink {
    /// Those that no batch uses now.
    free: Mutex<Vec<Arc<dyn Keeper>>>,
    turns: Semaphore,
    keepers: usize,
    shown: String,
    deadline: Duration,
    down: Mutex<Option<String>>,
}

/// A keeper that one batch uses; it comes back when the batch ends or is dropped.
struct Lent<'s> {
    sink: &'s InboxSink,
    keeper: Arc<dyn Keeper>,
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        self.sink.free.lock().unwrap_or_else(PoisonError::into_inner).push(self.keeper.clone());
    }
}

impl InboxSink {
    /// Into the inbox of these keepers, which are all of one store and one consumer; as many batches are in progress at a time. `shown` is what people
    /// know the store by, without secrets.
    pub fn new(keepers: Vec<Arc<dyn Keeper>>, shown: impl Into<String>) -> Self {
        Self {
            turns: Semaphore::new(keepers.len()),
            keepers: keepers.len(),
            free: Mutex::new(keepers),
            shown: shown.into(),
            deadline: Duration::from_secs(30),
            down: Mutex::default(),
        }
    }

    /// How long a batch may take; 30 s.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    fn unavailable(&self, error: impl Into<postroom::BoxError>) -> Unavailable {
        let error = error.into();
        *self.down() = Some(chain(error.as_ref()));
        Unavailable::new(format!("the inbox in {}", self.shown), error)
    }

    fn down(&self) -> std::sync::MutexGuard<'_, Option<String>> {
        self.down.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A keeper, when there is one that no batch uses.
    async fn lent(&self, by: Instant) -> Result<(tokio::sync::SemaphorePermit<'_>, Lent<'_>), Unavailable> {
        let turn = timeout_at(by, self.turns.acquire()).await;
        let turn = turn.map_err(|elapsed| self.unavailable(elapsed))?.map_err(|error| self.unavailable(error))?;
        let keeper = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let keeper = keeper.ok_or_else(|| self.unavailable("it has no keepers"))?;
        Ok((turn, Lent { sink: self, keeper }))
    }

    /// A call that hangs is given up; its transaction ends with it.
    async fn asked<T>(by: Instant, call: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
        let answered = timeout_at(by, call).await;
        answered.unwrap_or_else(|elapsed| {
            Err(StoreError::Unavailable { what: "get an answer from the store", source: elapsed.into() })
        })
    }

    /// The verdict on a message that is sent alone; an error: the store cannot be asked.
    async fn one(keeper: &dyn Keeper, message: &Message, by: Instant) -> Result<Verdict, StoreError> {
        match Self::asked(by, keeper.admit(std::slice::from_ref(message))).await {
            Ok(_) => Ok(Verdict::Stored),
            Err(error) if keeper.refuses_the_message(&error) => {
                let reason = format!("the inbox cannot keep it: {}", tidy_reason(chain(&error)));
                Ok(Verdict::failed(FailureKind::Permanent, reason))
            }
            Err(error @ StoreError::Busy { .. }) => Ok(Verdict::failed(FailureKind::Busy, tidy_reason(chain(&error)))),
            Err(error) => Err(error),
        }
    }
}

#[async_trait]
impl Sink for InboxSink {
    fn system(&self) -> &'static str {
        "postroom"
    }

    fn limits(&self) -> SinkLimits {
        SinkLimits {
            batch_messages_max: BATCH_MESSAGES_MAX,
            batch_bytes_max: BATCH_BYTES_MAX,
            batches_in_flight_max: self.keepers.max(1),
        }
    }

    async fn publish(&self, batch: &Batch) -> Result<Verdicts, Unavailable> {
        let by = Instant::now() + self.deadline;
        let (_turn, lent) = self.lent(by).await?;
        let mut verdicts = batch.silent();
        let (mut messages, mut places): (Vec<Message>, Vec<usize>) = (Vec::new(), Vec::new());
        let mut ids: HashSet<MessageId> = HashSet::new();
        // Behind one of its key that was not stored, no other is sent.
        let mut held_up: HashSet<String> = HashSet::new();
        for (place, message) in batch.messages().iter().enumerate() {
            let key = message.ordering_key();
            if key.is_some_and(|key| held_up.contains(key)) {
                verdicts.judge(place, Verdict::NotSent);
                continue;
            }
            if let Some(reason) = too_long(message) {
                verdicts.judge(place, Verdict::failed(FailureKind::Permanent, reason));
                held_up.extend(key.map(str::to_owned));
                continue;
            }
            places.push(place);
            // One that is in a batch twice is there once.
            if ids.insert(message.id) {
                let mut message = Message::clone(message);
                without_nul(&mut message);
                messages.push(message);
            }
        }
        if messages.is_empty() {
            return Ok(verdicts);
        }
        match Self::asked(by, lent.keeper.admit(&messages)).await {
            Ok(_) => {
                places.into_iter().for_each(|place| {
                    verdicts.judge(place, Verdict::Stored);
                });
                *self.down() = None;
                return Ok(verdicts);
            }
            Err(error @ (StoreError::Unavailable { .. } | StoreError::Schema { .. })) => {
                return Err(self.unavailable(error));
            }
            Err(error) => tracing::debug!("the messages of a batch are stored one by one: {}", chain(&error)),
        }
        let mut any = false;
        for place in places {
            let Some(message) = batch.messages().get(place) else { continue };
            let key = message.ordering_key().map(str::to_owned);
            if key.as_ref().is_some_and(|key| held_up.contains(key)) {
                verdicts.judge(place, Verdict::NotSent);
                continue;
            }
            let mut message = Message::clone(message);
            without_nul(&mut message);
            match Self::one(lent.keeper.as_ref(), &message, by).await {
                Ok(verdict) => {
                    any = true;
                    if verdict != Verdict::Stored {
                        held_up.extend(key);
                    }
                    verdicts.judge(place, verdict);
                }
                // It is about none of them: the store is away, or has changed its mind about this program.
                Err(error) if any => {
                    let why = tidy_reason(chain(&error));
                    *self.down() = Some(why.clone());
                    verdicts.judge(place, Verdict::Unknown(why));
                    return Ok(verdicts);
                }
                Err(error) => return Err(self.unavailable(error)),
            }
        }
        Ok(verdicts)
    }

    async fn probe(&self) -> Result<(), Unavailable> {
        let by = Instant::now() + self.deadline;
        let (_turn, lent) = self.lent(by).await?;
        Self::asked(by, lent.keeper.filler()).await.map_err(|error| self.unavailable(error))?;
        *self.down() = None;
        Ok(())
    }

    fn disconnected(&self) -> Option<String> {
        let down = self.down();
        Some(format!("the inbox in {} could not be used: {}", self.shown, down.as_ref()?))
    }

    async fn close(&self) {}
}
