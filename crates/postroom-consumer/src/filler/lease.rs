//! The lease on an inbox, as one process sees it: standing by, holding, giving back.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use postroom::{FillerReport, FillerSeen, Happened, Keeper, Observed, Observer, StoreError, Tenure};
use tokio::time::Instant;

use crate::handler::chain;

/// Longest time between two renewals, and between two looks of one that stands by.
const LOOK_EVERY: Duration = Duration::from_secs(1);
const LOOK_RETRY_CAP: Duration = Duration::from_secs(2);
/// What the store is asked about the lease takes no longer than this unless it hangs.
const STORE_PATIENCE: Duration = Duration::from_secs(10);

/// A stop waits no longer than this for a look at the lease that is on its way.
const STOP_PATIENCE: Duration = Duration::from_secs(2);

/// How standing by ended.
pub(super) enum StoodBy {
    Took(Tenure),
    Stopped,
}

/// How a look at the lease ended.
enum Look {
    Taken(Tenure, Option<String>),
    Theirs(FillerSeen),
}

/// What one that stands by has seen: the last renewal, and since when by its own clock.
#[derive(Clone, Copy)]
struct Watched {
    /// Epoch and renewal.
    last: (i64, i64),
    since: Instant,
}

/// The lease, as one process sees it.
pub(super) struct Lease<'a> {
    pub keeper: &'a dyn Keeper,
    pub owner: &'a str,
    pub length: Duration,
    pub observer: &'a dyn Observer,
}

impl Lease<'_> {
    /// The store answered: this process has the inbox, or knows who has it.
    fn answered(&self, has_it: bool, began: Instant) {
        let event = Happened::Renewed { lanes: usize::from(has_it), took: began.elapsed() };
        self.observer.event(Observed::Inbox(self.keeper.consumer().as_str()), &event);
    }

    fn failed(&self, what: &'static str) {
        self.observer.event(Observed::Inbox(self.keeper.consumer().as_str()), &Happened::StoreFailed { what });
    }

    fn every(&self) -> Duration {
        (self.length / 3).min(LOOK_EVERY)
    }

    /// Waits until the inbox is ours or `stop` resolves. Says once who has it.
    ///
    /// A look that may have taken the inbox is never dropped at a stop: it would stay ours, with nobody to give it back.
    pub async fn stand_by(&self, mut stop: Pin<&mut impl Future<Output = ()>>) -> StoodBy {
        let consumer = self.keeper.consumer();
        let mut watched: Option<Watched> = None;
        let mut said = false;
        let mut retry = self.every();
        loop {
            let began = Instant::now();
            let looked = {
                let mut look = std::pin::pin!(self.asked(self.look_and_take(watched)));
                tokio::select! {
                    biased;
                    () = &mut stop => {
                        if let Ok(Ok(Look::Taken(tenure, _))) = tokio::time::timeout(STOP_PATIENCE, look).await {
                            self.leave(&tenure).await;
                        }
                        return StoodBy::Stopped;
                    }
                    looked = &mut look => looked,
                }
            };
            let pause = match looked {
                Ok(Look::Taken(tenure, before)) => {
                    self.answered(true, began);
                    match before {
                        Some(before) => {
                            tracing::warn!(%consumer, epoch = tenure.epoch, "took over filling the inbox from {before}");
                        }
                        None => tracing::info!(%consumer, epoch = tenure.epoch, "filling the inbox"),
                    }
                    return StoodBy::Took(tenure);
                }
                Ok(Look::Theirs(seen)) => {
                    self.answered(false, began);
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
                    self.every()
                }
                Err(error) => {
                    self.failed("find out who fills the inbox");
                    tracing::warn!(%consumer, "failed to find out who fills the inbox, trying again in {retry:?}: {}", chain(&error));
                    let pause = retry;
                    retry = (retry * 2).min(LOOK_RETRY_CAP);
                    pause
                }
            };
            tokio::select! {
                biased;
                () = &mut stop => return StoodBy::Stopped,
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// Looks who has the inbox, and takes it where that one's lease is over: by the database's clock, or since nobody was seen
    /// to renew it for as long as it holds. So a database clock that goes back does not keep a dead filler in its place. The
    /// taking names the renewal that was seen, so nothing can change hands between the two.
    async fn look_and_take(&self, watched: Option<Watched>) -> Result<Look, StoreError> {
        let now = Instant::now();
        let seen = self.keeper.filler().await?;
        if let Some(seen) = &seen {
            let ours = seen.owner.as_deref() == Some(self.owner);
            let stale = watched.is_some_and(|watched| {
                watched.last == (seen.epoch, seen.renewal) && now.saturating_duration_since(watched.since) >= seen.lease
            });
            if !(seen.free || ours || stale) {
                return Ok(Look::Theirs(seen.clone()));
            }
        }
        if let Some(tenure) = self.keeper.take(self.owner, self.length, seen.as_ref()).await? {
            let before = seen.and_then(|seen| seen.owner).filter(|before| before != self.owner);
            return Ok(Look::Taken(tenure, before));
        }
        // Somebody was faster.
        self.keeper.filler().await?.map(Look::Theirs).ok_or_else(|| {
            let source = "its row was deleted in the meantime".into();
            StoreError::Busy { what: "take an inbox to fill", source }
        })
    }

    /// Renews the lease, with what this filler says about itself; returns when it is lost, or could not be renewed for as long as it holds.
    pub async fn hold(&self, tenure: &Tenure, said: impl Fn() -> FillerReport) {
        let consumer = self.keeper.consumer();
        let mut until = Instant::now() + self.length;
        loop {
            tokio::time::sleep(self.every()).await;
            let began = Instant::now();
            match self.asked(self.keeper.renew(tenure, self.length, &said())).await {
                Ok(true) => {
                    self.answered(true, began);
                    until = began + self.length;
                }
                Ok(false) => {
                    tracing::warn!(%consumer, "another process has taken over filling the inbox; this one stores nothing more");
                    return;
                }
                Err(error) if Instant::now() >= until => {
                    tracing::warn!(
                        %consumer, "the lease on the inbox could not be renewed in time; unstored messages go back to the broker: {}",
                        chain(&error)
                    );
                    return;
                }
                Err(error) => {
                    self.failed("renew the lease on the inbox");
                    tracing::warn!(%consumer, "failed to renew the lease on the inbox: {}", chain(&error));
                }
            }
        }
    }

    /// Gives the inbox back. One that cannot be given back expires.
    pub async fn leave(&self, tenure: &Tenure) {
        if let Err(error) = self.asked(self.keeper.leave(tenure)).await {
            let consumer = self.keeper.consumer();
            tracing::warn!(%consumer, "the inbox was not given back; the lease will expire: {}", chain(&error));
        }
    }

    /// A question that hangs is given up.
    async fn asked<T>(&self, question: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
        let patience = STORE_PATIENCE.min(self.length);
        let answered = tokio::time::timeout(patience, question).await;
        answered.unwrap_or_else(|elapsed| {
            Err(StoreError::Unavailable { what: "get an answer from the store", source: elapsed.into() })
        })
    }
}
