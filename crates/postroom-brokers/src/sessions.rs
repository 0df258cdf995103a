//! What a receiver sees of a broker that is talked to in sessions, one after the other, each with a task of its own.

use std::future::Future;
use std::sync::{Arc, Mutex as StdMutex, MutexGuard, PoisonError};
use std::time::Duration;

use postroom::{Answer, Arrival, Bound, Receipt, Unavailable};
use tokio::sync::{Mutex, Notify};

/// A session that ends tells the broker first.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// A session with a broker.
pub(crate) trait Session {
    /// As receipts have it.
    fn number(&self) -> u64;

    /// Why it is over.
    fn over(&self) -> Option<String>;

    /// Rings when something has arrived, was given back, or it is over.
    fn arrived(&self) -> &Notify;

    /// Hands out what is there.
    fn take(&self, max: Bound) -> Option<Arrival>;

    fn settle(&self, answers: &[(Receipt, Answer)]);

    /// Nobody receives any more.
    fn leave(&self);

    /// Waits until its task has ended.
    fn gone(&self) -> impl Future<Output = ()> + Send;
}

/// One session at a time.
pub(crate) struct Sessions<S: Session> {
    /// Only those that receive wait on this one.
    opening: Mutex<()>,
    current: StdMutex<Option<Arc<S>>>,
}

impl<S: Session> Default for Sessions<S> {
    fn default() -> Self {
        Self { opening: Mutex::default(), current: StdMutex::default() }
    }
}

impl<S: Session> Drop for Sessions<S> {
    fn drop(&mut self) {
        if let Some(session) = self.slot().take() {
            session.leave();
        }
    }
}

impl<S: Session> Sessions<S> {
    fn slot(&self) -> MutexGuard<'_, Option<Arc<S>>> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The session; `begin` begins one where there is none.
    pub async fn current<E>(&self, begin: impl Future<Output = Result<Arc<S>, E>>) -> Result<Arc<S>, E> {
        let _one = self.opening.lock().await;
        if let Some(session) = self.slot().clone() {
            return Ok(session);
        }
        let session = begin.await?;
        *self.slot() = Some(session.clone());
        Ok(session)
    }

    pub fn is_connected(&self) -> bool {
        self.slot().as_ref().is_some_and(|session| session.over().is_none())
    }

    /// What arrives in this session; why it is over, after which the next one is another.
    pub async fn receive(&self, session: &Arc<S>, max: Bound) -> Result<Arrival, String> {
        loop {
            let heard = session.arrived().notified();
            if let Some(why) = session.over() {
                self.slot().take_if(|current| Arc::ptr_eq(current, session));
                return Err(why);
            }
            if let Some(arrival) = session.take(max) {
                return Ok(arrival);
            }
            heard.await;
        }
    }

    /// Answers of a session that is over settle nothing.
    pub fn settle(
        &self,
        answers: &[(Receipt, Answer)],
        unavailable: impl Fn(&'static str) -> Unavailable,
    ) -> Result<(), Unavailable> {
        let gone = || unavailable("the session that the message came in is over; it comes again");
        let session = self.slot().clone().ok_or_else(gone)?;
        session.settle(answers);
        let is_stale = answers.iter().any(|(receipt, _)| receipt.session() != session.number());
        if is_stale || session.over().is_some() { Err(gone()) } else { Ok(()) }
    }

    pub async fn close(&self) {
        let Some(session) = self.slot().take() else { return };
        session.leave();
        let _ = tokio::time::timeout(CLOSE_TIMEOUT, session.gone()).await;
    }
}
