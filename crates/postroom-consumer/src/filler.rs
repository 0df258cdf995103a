//! Fills an inbox for applications that take messages from the store: of all processes that do it for one consumer, one at a
//! time, the others stand by.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use postroom::{BoxError, Consumer, ConsumerStore, FillerSeen, Session, StoreError, Subscription, Tenure};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio::time::error::Elapsed;

use crate::counters::ReceiveCounters;
use crate::handler::chain;
use crate::receiver::{Receiver, ReceiverFailed};

/// Longest time between two renewals, and between two looks of one that stands by.
const LOOK_EVERY: Duration = Duration::from_secs(1);
const LOOK_RETRY_CAP: Duration = Duration::from_secs(2);
/// What the store is asked about the lease takes no longer than this unless it hangs.
const STORE_PATIENCE: Duration = Duration::from_secs(10);
/// What is in work at a stop is one transaction, without a handler.
const STOP_DEADLINE: Duration = Duration::from_secs(5);

type Subscribe = dyn Fn() -> Result<Arc<dyn Subscription>, BoxError> + Send + Sync;
type Open<F> = dyn Fn() -> Box<dyn Session<F>> + Send + Sync;

/// Keeps every message of a queue in the store, once and in the order of the queue, for applications that take them from
/// there with `postroom.inbox_take`.
///
/// Start as many as you like for one consumer: one fills, by a lease in the store, and the others stand by. It is subscribed
/// to the broker only while it holds the lease, and whatever it keeps is fenced by the lease's epoch, so one that hung and
/// comes back keeps nothing. Order over a change of hands needs a broker that delivers to one subscription at a time: then
/// what the last filler had not acked comes first.
pub struct Filler<F: ConsumerStore> {
    subscribe: Box<Subscribe>,
    consumer: Consumer,
    open: Arc<Open<F>>,
    owner: String,
    lease: Duration,
}

/// How a look at the lease ended.
enum Look {
    Taken(Tenure, Option<String>),
    Theirs(FillerSeen),
}

/// What one that stands by has seen: the last renewal, and since when by its own clock.
struct Watched {
    /// Epoch and renewal.
    last: (i64, i64),
    since: Instant,
}

impl<F: ConsumerStore> Filler<F> {
    /// A filler named `owner`, which is no other process's name. `subscribe` makes a new subscription for each time that this
    /// one fills; when it is dropped, the broker has back what it did not ack.
    pub fn new<S: Session<F>>(
        subscribe: impl Fn() -> Result<Arc<dyn Subscription>, BoxError> + Send + Sync + 'static,
        consumer: Consumer,
        owner: impl Into<String>,
        open: impl Fn() -> S + Send + Sync + 'static,
    ) -> Self {
        Self {
            subscribe: Box::new(subscribe),
            consumer,
            open: Arc::new(move || Box::new(open())),
            owner: owner.into(),
            lease: Duration::from_secs(15),
        }
    }

    /// How long the inbox stays with this filler after its last renewal; 15 s, at least 1 s.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease.clamp(Duration::from_secs(1), Duration::from_secs(365 * 24 * 3600));
        self
    }

    /// Runs until `stop` resolves: then what is in work is finished, and the inbox is given back at once. A broker or a store
    /// that cannot be reached is tried again.
    pub async fn run(self, stop: impl Future<Output = ()>) -> Result<ReceiveCounters, ReceiverFailed> {
        let mut counters = ReceiveCounters::default();
        let mut lease = Lease { session: (self.open)(), filler: &self };
        let mut stop = std::pin::pin!(stop);
        loop {
            let tenure = tokio::select! {
                biased;
                () = &mut stop => return Ok(counters),
                tenure = lease.stand_by() => tenure,
            };
            let subscription = match (self.subscribe)() {
                Ok(subscription) => subscription,
                Err(error) => {
                    lease.leave(&tenure).await;
                    return Err(ReceiverFailed::Subscribe(error));
                }
            };
            let open = self.open.clone();
            let receiver = Receiver::filling(subscription, self.consumer.clone(), tenure.clone(), move || open());
            let (ending, mut ended) = watch::channel(false);
            let mut filling = Box::pin(receiver.stop_deadline(STOP_DEADLINE).run(async move {
                let _ = ended.wait_for(|ended| *ended).await;
            }));
            let (mut stopping, mut lost) = (false, false);
            let filled = {
                let mut holding = std::pin::pin!(lease.hold(&tenure));
                loop {
                    tokio::select! {
                        biased;
                        filled = &mut filling => break filled,
                        () = &mut stop, if !stopping => {
                            stopping = true;
                            let _ = ending.send(true);
                        }
                        () = &mut holding, if !lost => {
                            lost = true;
                            let _ = ending.send(true);
                        }
                    }
                }
            };
            drop(filling);
            match filled {
                Ok(seen) => counters.add(&seen),
                Err(ReceiverFailed::Fenced(seen)) => counters.add(&seen),
                Err(failed) => {
                    lease.leave(&tenure).await;
                    return Err(failed);
                }
            }
            if stopping {
                lease.leave(&tenure).await;
                return Ok(counters);
            }
        }
    }
}

/// The lease, as one process sees it.
struct Lease<'a, F: ConsumerStore> {
    session: Box<dyn Session<F>>,
    filler: &'a Filler<F>,
}

impl<F: ConsumerStore> Lease<'_, F> {
    fn every(&self) -> Duration {
        (self.filler.lease / 3).min(LOOK_EVERY)
    }

    /// Waits until the inbox is ours. Says once who has it.
    async fn stand_by(&mut self) -> Tenure {
        let consumer = &self.filler.consumer;
        let mut watched: Option<Watched> = None;
        let mut said = false;
        let mut retry = self.every();
        loop {
            match self.look(watched.as_ref()).await {
                Ok(Look::Taken(tenure, before)) => {
                    match before {
                        Some(before) => {
                            tracing::warn!(%consumer, epoch = tenure.epoch, "took over filling the inbox from {before}");
                        }
                        None => tracing::info!(%consumer, epoch = tenure.epoch, "filling the inbox"),
                    }
                    return tenure;
                }
                Ok(Look::Theirs(seen)) => {
                    retry = self.every();
                    if !said {
                        let owner = seen.owner.as_deref().unwrap_or("another");
                        tracing::info!(%consumer, "standing by: {owner} fills the inbox");
                        said = true;
                    }
                    let last = (seen.epoch, seen.renewal);
                    if watched.as_ref().is_none_or(|watched| watched.last != last) {
                        watched = Some(Watched { last, since: Instant::now() });
                    }
                    tokio::time::sleep(self.every()).await;
                }
                Err(error) => {
                    tracing::warn!(%consumer, "failed to see who fills the inbox, trying again in {retry:?}: {}", chain(&error));
                    tokio::time::sleep(retry).await;
                    retry = (retry * 2).min(LOOK_RETRY_CAP);
                }
            }
        }
    }

    async fn look(&mut self, watched: Option<&Watched>) -> Result<Look, StoreError> {
        let looked = tokio::time::timeout(self.patience(), self.look_and_take(watched)).await;
        self.whole(looked)
    }

    /// Looks who has the inbox, and takes it where that one's lease is over: by the database's clock, or since nobody was seen
    /// to renew it for as long as it holds. So a database clock that goes back does not keep a dead filler in its place.
    async fn look_and_take(&mut self, watched: Option<&Watched>) -> Result<Look, StoreError> {
        let (consumer, owner) = (&self.filler.consumer, self.filler.owner.as_str());
        let now = Instant::now();
        let mut tx = self.session.begin().await?;
        let seen = F::filler(&mut tx, consumer).await?;
        if let Some(seen) = &seen {
            let ours = seen.owner.as_deref() == Some(owner);
            let stale = watched.is_some_and(|watched| {
                watched.last == (seen.epoch, seen.renewal) && now.saturating_duration_since(watched.since) >= seen.lease
            });
            if !(seen.free || ours || stale) {
                return Ok(Look::Theirs(seen.clone()));
            }
        }
        if let Some(tenure) = F::take_inbox(&mut tx, consumer, owner, self.filler.lease, seen.as_ref()).await? {
            F::commit(tx).await?;
            let before = seen.and_then(|seen| seen.owner).filter(|before| before != owner);
            return Ok(Look::Taken(tenure, before));
        }
        // Somebody was faster.
        F::filler(&mut tx, consumer).await?.map(Look::Theirs).ok_or_else(|| {
            let source = "its row was deleted meanwhile".into();
            StoreError::Busy { what: "take an inbox to fill", source }
        })
    }

    /// Renews the lease; returns when it is lost, or could not be renewed for as long as it holds.
    async fn hold(&mut self, tenure: &Tenure) {
        let (consumer, lease) = (&self.filler.consumer, self.filler.lease);
        let mut until = Instant::now() + lease;
        loop {
            tokio::time::sleep(self.every()).await;
            let began = Instant::now();
            let renewed = tokio::time::timeout(self.patience(), self.renew(tenure)).await;
            match self.whole(renewed) {
                Ok(true) => until = began + lease,
                Ok(false) => {
                    tracing::warn!(%consumer, "another process has taken over filling the inbox; nothing more is kept here");
                    return;
                }
                Err(error) if Instant::now() >= until => {
                    tracing::warn!(
                        %consumer, "the lease on the inbox could not be renewed in time; what was not kept goes back to the broker: {}",
                        chain(&error)
                    );
                    return;
                }
                Err(error) => tracing::warn!(%consumer, "failed to renew the lease on the inbox: {}", chain(&error)),
            }
        }
    }

    async fn renew(&mut self, tenure: &Tenure) -> Result<bool, StoreError> {
        let mut tx = self.session.begin().await?;
        let renewed = F::renew_inbox(&mut tx, &self.filler.consumer, tenure, self.filler.lease).await?;
        F::commit(tx).await?;
        Ok(renewed)
    }

    /// Gives the inbox back. One that cannot be given back expires.
    async fn leave(&mut self, tenure: &Tenure) {
        let left = tokio::time::timeout(self.patience(), self.give_back(tenure)).await;
        if let Err(error) = self.whole(left) {
            let consumer = &self.filler.consumer;
            tracing::warn!(%consumer, "the inbox was not given back; the lease will expire: {}", chain(&error));
        }
    }

    async fn give_back(&mut self, tenure: &Tenure) -> Result<(), StoreError> {
        let mut tx = self.session.begin().await?;
        F::leave_inbox(&mut tx, &self.filler.consumer, tenure).await?;
        F::commit(tx).await
    }

    fn patience(&self) -> Duration {
        STORE_PATIENCE.min(self.filler.lease)
    }

    /// A question that hung costs the session.
    fn whole<T>(&mut self, asked: Result<Result<T, StoreError>, Elapsed>) -> Result<T, StoreError> {
        match asked {
            Ok(answered) => answered,
            Err(elapsed) => {
                self.session = (self.filler.open)();
                Err(StoreError::Unavailable { what: "hear from the store", source: elapsed.into() })
            }
        }
    }
}
