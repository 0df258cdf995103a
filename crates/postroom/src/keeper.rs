//! Stores messages from a queue in the inbox table, for applications that take them from there. The runtime that fills an inbox uses a
//! store only through this.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::consumer_store::{Admitted, ConsumerStore, Keep, Session};
use crate::crash::crash_point;
use crate::error::StoreError;
use crate::filler::{FillerReport, FillerSeen, Tenure};
use crate::inbox::Consumer;
use crate::message::{Message, MessageId};

/// How an arrival was stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kept {
    /// It is in the inbox table now.
    New,
    /// It was already there, or it was handled before.
    Duplicate,
}

/// One consumer's inbox table. Each call is a transaction of its own; dropping the future rolls it back.
#[async_trait]
pub trait Keeper: Send + Sync {
    /// The consumer that the inbox belongs to.
    fn consumer(&self) -> &Consumer;

    /// Who fills it; none: no process ever has.
    async fn filler(&self) -> Result<Option<FillerSeen>, StoreError>;

    /// Takes it over from the filler that was seen. None: that filler has renewed its lease since, or another was faster. Waits
    /// until transactions of the old filler have ended.
    async fn take(&self, owner: &str, lease: Duration, seen: Option<&FillerSeen>)
    -> Result<Option<Tenure>, StoreError>;

    /// Renews the lease, and records what the filler reports about itself. False: another filler has taken over.
    async fn renew(&self, tenure: &Tenure, lease: Duration, said: &FillerReport) -> Result<bool, StoreError>;

    /// Gives it back, so that another filler can take it at once.
    async fn leave(&self, tenure: &Tenure) -> Result<(), StoreError>;

    /// Stores these in this order, each once; their ids are distinct. None: the tenure is over, and nothing was stored.
    async fn keep(&self, tenure: &Tenure, messages: &[Message]) -> Result<Option<Vec<Kept>>, StoreError>;

    /// The same without being the filler, for a sender that keeps the order of each key by itself: what it sends again is recognised, so that
    /// one which goes on after another has taken over can add nothing.
    async fn admit(&self, messages: &[Message]) -> Result<Vec<Kept>, StoreError>;

    /// Keeps a message as a dead letter if it cannot be kept among the waiting ones, with all its parts. None: the tenure is over.
    async fn keep_dead(&self, tenure: &Tenure, message: &Message, error: &str) -> Result<Option<Kept>, StoreError>;

    /// Whether the store rejected the call because of what it was asked to keep: another message may succeed.
    fn refuses_the_message(&self, error: &StoreError) -> bool;
}

type Slot<F> = tokio::sync::Mutex<Option<Box<dyn Session<F>>>>;

/// The inbox table of a store, through sessions of one driver.
pub struct SessionKeeper<F: ConsumerStore> {
    consumer: Consumer,
    open: Box<dyn Fn() -> Box<dyn Session<F>> + Send + Sync>,
    /// What is kept.
    keeping: Slot<F>,
    /// The lease: its renewal waits behind nothing else.
    leasing: Slot<F>,
}

/// Runs `$work` in a transaction of the slot's session and commits it where it says so. The session is out of its slot meanwhile: a
/// call that fails or is dropped takes its session with it, and the next one begins with a new one.
macro_rules! in_transaction {
    ($keeper:expr, $slot:ident, |$tx:ident| $work:expr) => {{
        let mut slot = $keeper.$slot.lock().await;
        let mut session = slot.take().unwrap_or_else(|| ($keeper.open)());
        let mut $tx = session.begin().await?;
        let result = $work;
        F::commit($tx).await?;
        *slot = Some(session);
        result
    }};
}

impl<F: ConsumerStore> SessionKeeper<F> {
    /// The inbox of this consumer; `open` makes sessions, of which there are two at a time.
    pub fn new<S: Session<F>>(consumer: Consumer, open: impl Fn() -> S + Send + Sync + 'static) -> Arc<Self> {
        let open = Box::new(move || -> Box<dyn Session<F>> { Box::new(open()) });
        Arc::new(Self { consumer, open, keeping: Slot::default(), leasing: Slot::default() })
    }
}

#[async_trait]
impl<F: ConsumerStore> Keeper for SessionKeeper<F> {
    fn consumer(&self) -> &Consumer {
        &self.consumer
    }

    async fn filler(&self) -> Result<Option<FillerSeen>, StoreError> {
        Ok(in_transaction!(self, leasing, |tx| F::filler(&mut tx, &self.consumer).await?))
    }

    async fn take(
        &self,
        owner: &str,
        lease: Duration,
        seen: Option<&FillerSeen>,
    ) -> Result<Option<Tenure>, StoreError> {
        Ok(in_transaction!(self, leasing, |tx| F::take_inbox(&mut tx, &self.consumer, owner, lease, seen).await?))
    }

    async fn renew(&self, tenure: &Tenure, lease: Duration, said: &FillerReport) -> Result<bool, StoreError> {
        Ok(in_transaction!(self, leasing, |tx| F::renew_inbox(&mut tx, &self.consumer, tenure, lease, said).await?))
    }

    async fn leave(&self, tenure: &Tenure) -> Result<(), StoreError> {
        in_transaction!(self, leasing, |tx| F::leave_inbox(&mut tx, &self.consumer, tenure).await?);
        Ok(())
    }

    async fn keep(&self, tenure: &Tenure, messages: &[Message]) -> Result<Option<Vec<Kept>>, StoreError> {
        let consumer = &self.consumer;
        let kept = in_transaction!(self, keeping, |tx| {
            if !F::fence_inbox(&mut tx, consumer, tenure).await? {
                return Ok(None);
            }
            admit::<F>(&mut tx, consumer, messages).await?
        });
        crash_point("keep.committed");
        Ok(Some(kept))
    }

    async fn admit(&self, messages: &[Message]) -> Result<Vec<Kept>, StoreError> {
        let kept = in_transaction!(self, keeping, |tx| admit::<F>(&mut tx, &self.consumer, messages).await?);
        crash_point("keep.committed");
        Ok(kept)
    }

    async fn keep_dead(&self, tenure: &Tenure, message: &Message, error: &str) -> Result<Option<Kept>, StoreError> {
        let consumer = &self.consumer;
        Ok(in_transaction!(self, keeping, |tx| {
            if !F::fence_inbox(&mut tx, consumer, tenure).await? {
                return Ok(None);
            }
            // It takes no place in its key: it never has an effect by itself.
            match F::admit(&mut tx, consumer, &[(message.id, None)]).await?.first() {
                Some(Admitted::New | Admitted::Behind) => {
                    F::keep_dead(&mut tx, consumer, message, error).await?;
                    Some(Kept::New)
                }
                Some(Admitted::Duplicate) | None => Some(Kept::Duplicate),
            }
        }))
    }

    fn refuses_the_message(&self, error: &StoreError) -> bool {
        F::refuses_the_message(error)
    }
}

/// Admits messages and keeps those that are new, in this transaction.
async fn admit<F: ConsumerStore>(
    tx: &mut F::Tx<'_>,
    consumer: &Consumer,
    messages: &[Message],
) -> Result<Vec<Kept>, StoreError> {
    let arrivals: Vec<(MessageId, Option<String>)> =
        messages.iter().map(|message| (message.id, message.ordering_key().map(str::to_owned))).collect();
    let admitted = F::admit(tx, consumer, &arrivals).await?;
    let is_new = |admitted: &Admitted| matches!(admitted, Admitted::New | Admitted::Behind);
    let new = messages.iter().zip(&admitted).filter(|(_, admitted)| is_new(admitted));
    let new: Vec<Message> = new.map(|(message, _)| message.clone()).collect();
    if !new.is_empty() {
        F::keep(tx, consumer, &new, Keep::Ready).await?;
    }
    crash_point("keep.written");
    let kept = |admitted: &Admitted| if is_new(admitted) { Kept::New } else { Kept::Duplicate };
    Ok(admitted.iter().map(kept).collect())
}
