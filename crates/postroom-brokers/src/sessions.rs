//! What a receiver sees of a broker that is talked to in sessions, one after the other, each with a task of its own.

use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex as StdMutex, MutexGuard, PoisonError};
use std::time::Duration;

use postroom::{Answer, Arrival, Bound, Receipt, Unavailable};
use tokio::sync::{Mutex, Notify};

/// A session that ends tells the broker first.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// What a session has handed out, and hears back.
pub(crate) trait Held {
    /// Hands out what is there.
    fn take(&mut self, max: Bound) -> Option<Arrival>;

    fn settle(&mut self, answers: &[(Receipt, Answer)]);
}

/// A session with a broker, as its task and a receiver share it.
pub(crate) struct Session<H> {
    /// As receipts have it.
    number: u64,
    state: StdMutex<State<H>>,
    /// Something has arrived, was given back, or it is over.
    arrived: Notify,
    /// Something was settled, or it is to end.
    told: Notify,
    gone: Notify,
}

pub(crate) struct State<H> {
    pub held: H,
    /// Nobody receives any more.
    pub leaves: bool,
    /// Why its task has ended.
    over: Option<String>,
}

/// No two sessions of a process share a number.
pub(crate) fn number() -> u64 {
    static SESSIONS: AtomicU64 = AtomicU64::new(1);
    SESSIONS.fetch_add(1, Ordering::Relaxed)
}

impl<H> Session<H> {
    pub fn new(number: u64, held: H) -> Self {
        let state = StdMutex::new(State { held, leaves: false, over: None });
        Self { number, state, arrived: Notify::new(), told: Notify::new(), gone: Notify::new() }
    }

    pub fn state(&self) -> MutexGuard<'_, State<H>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The receiver may look.
    pub fn has_arrived(&self) {
        self.arrived.notify_waiters();
    }

    /// Waits until something was settled, or nobody receives any more.
    pub async fn told(&self) {
        self.told.notified().await;
    }

    /// Its task has ended.
    pub fn ended(&self, how: Result<(), String>) {
        let why = how.err().unwrap_or_else(|| "the session was closed".to_owned());
        self.state().over = Some(why);
        self.arrived.notify_waiters();
        self.gone.notify_waiters();
    }

    fn over(&self) -> Option<String> {
        self.state().over.clone()
    }

    /// With what was settled.
    fn leave(&self) {
        self.state().leaves = true;
        self.told.notify_one();
    }

    async fn gone(&self) {
        let gone = self.gone.notified();
        if self.over().is_none() {
            gone.await;
        }
    }
}

impl<H: Held> Session<H> {
    fn settle(&self, answers: &[(Receipt, Answer)]) {
        self.state().held.settle(answers);
        self.told.notify_one();
        // What was given back can be taken again.
        self.arrived.notify_waiters();
    }
}

/// One session at a time.
pub(crate) struct Sessions<H> {
    /// Only those that receive wait on this one.
    opening: Mutex<()>,
    current: StdMutex<Option<Arc<Session<H>>>>,
}

impl<H> Default for Sessions<H> {
    fn default() -> Self {
        Self { opening: Mutex::default(), current: StdMutex::default() }
    }
}

impl<H> Drop for Sessions<H> {
    fn drop(&mut self) {
        if let Some(session) = self.slot().take() {
            session.leave();
        }
    }
}

impl<H> Sessions<H> {
    fn slot(&self) -> MutexGuard<'_, Option<Arc<Session<H>>>> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<H: Held> Sessions<H> {
    /// The session; `begin` begins one where there is none.
    pub async fn current<E>(
        &self,
        begin: impl Future<Output = Result<Arc<Session<H>>, E>>,
    ) -> Result<Arc<Session<H>>, E> {
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
    pub async fn receive(&self, session: &Arc<Session<H>>, max: Bound) -> Result<Arrival, String> {
        loop {
            let heard = session.arrived.notified();
            if let Some(why) = session.over() {
                self.slot().take_if(|current| Arc::ptr_eq(current, session));
                return Err(why);
            }
            if let Some(arrival) = session.state().held.take(max) {
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
        let is_stale = answers.iter().any(|(receipt, _)| receipt.session() != session.number);
        if is_stale || session.over().is_some() { Err(gone()) } else { Ok(()) }
    }

    pub async fn close(&self) {
        let Some(session) = self.slot().take() else { return };
        session.leave();
        let _ = tokio::time::timeout(CLOSE_TIMEOUT, session.gone()).await;
    }
}
