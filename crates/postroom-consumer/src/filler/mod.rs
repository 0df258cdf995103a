//! Fills an inbox for applications that take messages from the store: of all processes that do this for one consumer, one fills
//! at a time, and the others stand by.

mod keeping;
mod lease;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use postroom::{BoxError, FillerReport, Keeper, Live, Observer, Subscription};
use tokio::sync::watch;

use keeping::{Ended, Keeping, Told};
use lease::{Lease, StoodBy};

/// What a filler has seen. Every delivery is counted once.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct FillCounters {
    /// Kept in the inbox table.
    pub kept: u64,
    /// Already there, or handled before.
    pub duplicates: u64,
    /// Kept as dead letters, because they cannot be kept among the waiting ones.
    pub dead: u64,
    /// Given back to the broker.
    pub requeued: u64,
    /// Not kept, since another process fills the inbox now; the broker delivers them to that one.
    pub fenced: u64,
}

/// Why a filler stopped by itself.
#[derive(Debug, thiserror::Error)]
pub enum FillerFailed {
    /// The runtime itself failed.
    #[error("receive")]
    Worker(#[source] tokio::task::JoinError),
    /// It could not subscribe.
    #[error("subscribe")]
    Subscribe(#[source] BoxError),
}

type Subscribe = dyn Fn() -> Result<Arc<dyn Subscription>, BoxError> + Send + Sync;

/// Keeps every message of a queue in the store, once and in the order of the queue, for applications that take them from
/// there with `postroom.inbox_take`.
///
/// Start as many as you like for one consumer: one fills, by a lease in the store, and the others stand by. It is subscribed
/// to the broker only while it holds the lease, and whatever it keeps is fenced by the lease's epoch, so a filler that hung and
/// comes back stores nothing. Order across a takeover requires a broker that delivers to one subscription at a time: then
/// the messages that the last filler had not acked come first.
pub struct Filler {
    subscribe: Box<Subscribe>,
    keeper: Arc<dyn Keeper>,
    owner: String,
    lease: Duration,
    observer: Arc<dyn Observer>,
    live: Live<InboxNow>,
}

/// The state of an inbox in this process.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct InboxNow {
    /// What was seen since the filler began.
    pub counters: FillCounters,
    /// This process fills it; otherwise it stands by.
    pub filling: bool,
    /// Received, and not kept yet.
    pub waiting: usize,
}

impl Filler {
    /// A filler named `owner`, a name that no other process has. `subscribe` makes a new subscription each time that this
    /// filler starts to fill; when it is closed, the broker has back what was not acked.
    pub fn new(
        subscribe: impl Fn() -> Result<Arc<dyn Subscription>, BoxError> + Send + Sync + 'static,
        keeper: Arc<dyn Keeper>,
        owner: impl Into<String>,
    ) -> Self {
        Self {
            subscribe: Box::new(subscribe),
            keeper,
            owner: owner.into(),
            lease: Duration::from_secs(15),
            observer: Arc::new(()),
            live: Live::new(),
        }
    }

    /// Tells an observer what happens, once for each batch.
    pub fn observed_by(mut self, observer: Arc<dyn Observer>) -> Self {
        self.observer = observer;
        self
    }

    /// Publishes the inbox's state here, after every batch.
    pub fn shown_in(mut self, live: Live<InboxNow>) -> Self {
        self.live = live;
        self
    }

    /// How long the inbox stays with this filler after its last renewal; 15 s, at least 1 s.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease.clamp(Duration::from_secs(1), Duration::from_secs(365 * 24 * 3600));
        self
    }

    /// Runs until `stop` resolves: then it finishes the transaction in progress and gives the inbox back at once. A broker or a store
    /// that cannot be reached is tried again.
    pub async fn run(self, stop: impl Future<Output = ()>) -> Result<FillCounters, FillerFailed> {
        let mut counters = FillCounters::default();
        let observer = self.observer.as_ref();
        let lease = Lease { keeper: self.keeper.as_ref(), owner: &self.owner, length: self.lease, observer };
        let mut stop = std::pin::pin!(stop);
        loop {
            self.live.set(InboxNow { counters, filling: false, waiting: 0 });
            let tenure = match lease.stand_by(stop.as_mut()).await {
                StoodBy::Took(tenure) => tenure,
                StoodBy::Stopped => return Ok(counters),
            };
            let subscription = match (self.subscribe)() {
                Ok(subscription) => subscription,
                Err(error) => {
                    lease.leave(&tenure).await;
                    return Err(FillerFailed::Subscribe(error));
                }
            };
            let (ending, ended) = watch::channel(false);
            let told = Told {
                observer: self.observer.clone(),
                live: self.live.clone(),
                trouble: Live::new(),
                stuck: Live::new(),
            };
            let (link, trouble, stuck) = (subscription.clone(), told.trouble.clone(), told.stuck.clone());
            let said = move || FillerReport {
                source: Some(link.origin()),
                source_down: if link.is_connected() {
                    stuck.now()
                } else {
                    Some(trouble.now().unwrap_or_else(|| "not connected yet".to_owned()))
                },
            };
            let keeping = Keeping::new(subscription, self.keeper.clone(), tenure.clone(), ended, told);
            let mut keeping = Box::pin(keeping.run(&mut counters));
            let (mut stopping, mut lost) = (false, false);
            let end = {
                let mut holding = std::pin::pin!(lease.hold(&tenure, said));
                loop {
                    tokio::select! {
                        biased;
                        end = &mut keeping => break end,
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
            drop(keeping);
            match end {
                Ok(Ended::Stopped | Ended::Fenced) => {}
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
