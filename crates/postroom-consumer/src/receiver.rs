//! The loop between a subscription, the store and the handlers.

use std::collections::VecDeque;
use std::future::Future;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use postroom::{
    Answer, Bound, Consumer, ConsumerStore, Happened, Live, MessageId, MessageSpan, Observed, Observer, Receipt,
    Received, RetryPolicy, Session, Step, StoreError, Subscription,
};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::apply::{End, Fate};
use crate::counters::ReceiveCounters;
use crate::desk::Desk;
use crate::handler::chain;
use crate::handlers::{Handlers, InvalidHandlers};
use crate::in_hand::InHand;
use crate::pump::{self, ACK_TIMEOUT, answer, requeue_later};
use crate::queue::{Arrival, Queue, Slot};
use crate::shared::{Held, Shared};
use crate::unkeepable::{problem, without_nul};

const RECEIVE_RETRY_CAP: Duration = Duration::from_secs(30);
/// What is taken from the subscription at once; its own bound on unsettled deliveries holds for all together.
const RECEIVED_AT_ONCE: Bound = Bound { messages: 64, bytes: 8 << 20 };
const TAKE_RETRY_CAP: Duration = Duration::from_secs(10);
/// Longer than this is never meant.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);
/// From this many claims in a row without a word a message is handled alone: it may have killed whoever had it.
const ALONE_FROM_CLAIMS: u32 = 2;
/// A message with so many claims in a row without a word is dead.
const CLAIMS_MAX: u32 = 5;

/// Why a receiver stopped by itself.
#[derive(Debug, thiserror::Error)]
pub enum ReceiverFailed {
    /// A message of a type that nobody handles, where that was to stop it.
    #[error("handle a message of type {0:?}: no handler takes it; it was given back to the broker")]
    UnknownType(String),
    /// A fault of the runtime itself.
    #[error("run a worker")]
    Worker(#[source] tokio::task::JoinError),
}

/// Receives until it is stopped. A crash at any moment loses nothing: what is not acked comes again, and the inbox knows
/// whether it had its effect.
pub struct Receiver<F: ConsumerStore> {
    subscription: Arc<dyn Subscription>,
    consumer: Consumer,
    handlers: Handlers<F>,
    open: Box<dyn Fn() -> Box<dyn Session<F>> + Send + Sync>,
    concurrency: usize,
    batch_max: usize,
    retry: RetryPolicy,
    timeout: Duration,
    lease: Duration,
    poll: Duration,
    stop_deadline: Duration,
    observer: Arc<dyn Observer>,
    live: Live<ReceiverNow>,
}

/// How a receiver stands in this process.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct ReceiverNow {
    /// What it has seen so far.
    pub counters: ReceiveCounters,
    /// Received, in work or not begun yet.
    pub received: usize,
    /// Claimed in the store, in work or not begun yet.
    pub claimed: usize,
    /// Workers that handle messages now.
    pub working: usize,
}

impl<F: ConsumerStore> Receiver<F> {
    /// A receiver whose workers each have a session of their own, made by `open`.
    pub fn new<S: Session<F>>(
        subscription: Arc<dyn Subscription>,
        consumer: Consumer,
        handlers: Handlers<F>,
        open: impl Fn() -> S + Send + Sync + 'static,
    ) -> Result<Self, InvalidHandlers> {
        handlers.check()?;
        Ok(Self {
            subscription,
            consumer,
            handlers,
            open: Box::new(move || Box::new(open())),
            concurrency: 8,
            batch_max: 50,
            retry: RetryPolicy::default(),
            timeout: Duration::from_secs(60),
            lease: Duration::from_secs(10),
            poll: Duration::from_millis(250),
            stop_deadline: Duration::from_secs(20),
            observer: Arc::new(()),
            live: Live::new(),
        })
    }

    /// Tells an observer what happens, once a batch.
    pub fn observed_by(mut self, observer: Arc<dyn Observer>) -> Self {
        self.observer = observer;
        self
    }

    /// Says here how the receiver stands, whenever something has changed.
    pub fn shown_in(mut self, live: Live<ReceiverNow>) -> Self {
        self.live = live;
        self
    }

    /// Messages, or batches of them, in work at once; 8. Each has a connection.
    pub fn concurrency(mut self, workers: usize) -> Self {
        self.concurrency = workers.max(1);
        self
    }

    /// Most messages handled in one transaction; 50. A batch in which a handler fails, or that takes longer than a second, is
    /// undone, and its messages go one by one.
    pub fn batch_max(mut self, messages: usize) -> Self {
        self.batch_max = messages.max(1);
        self
    }

    /// When a failed message is tried again, and when it is dead.
    pub fn retry(mut self, retry: RetryPolicy) -> Self {
        self.retry = retry;
        self
    }

    /// How long a handler may take for one message; 60 s. One that takes longer is dropped at its next await, its
    /// transaction is rolled back, and the attempt has failed. A handler that blocks its thread cannot be dropped.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout.min(LONGEST);
        self
    }

    /// How long a claim on a waiting message holds without a renewal; 10 s. After a crash it is the longest wait until
    /// another worker takes the message.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease.clamp(Duration::from_secs(1), LONGEST);
        self
    }

    /// How often the store is asked for waiting messages that are due; 250 ms.
    pub fn poll(mut self, poll: Duration) -> Self {
        self.poll = poll.clamp(Duration::from_millis(10), LONGEST);
        self
    }

    /// How long a stop waits for handlers; 20 s. What has not ended then is rolled back and given back to the broker.
    pub fn stop_deadline(mut self, deadline: Duration) -> Self {
        self.stop_deadline = deadline.min(LONGEST);
        self
    }

    /// Runs until `stop` resolves: then what is in work is finished, and the rest is given back to the broker. A broker or a
    /// store that cannot be reached is tried again.
    pub async fn run(self, stop: impl Future<Output = ()>) -> Result<ReceiveCounters, ReceiverFailed> {
        let (stopping, stopped) = watch::channel(false);
        let shared = Arc::new(Shared {
            owner: format!("{}/{}", self.consumer, MessageId::new()),
            consumer: self.consumer,
            system: self.subscription.system(),
            handlers: self.handlers,
            retry: self.retry,
            timeout: self.timeout,
            lease: self.lease,
            origin: self.subscription.origin(),
            claims: Mutex::default(),
            open: self.open,
            stopping: stopped,
        });
        let (pump, arrivals) = mpsc::channel(1);
        // A set, so that the task ends with this future.
        let mut receiving = JoinSet::new();
        receiving.spawn(pump::receive(
            self.subscription.clone(),
            pump,
            RECEIVED_AT_ONCE,
            RECEIVE_RETRY_CAP,
            Live::new(),
            shared.consumer.clone(),
        ));
        let desks = (0..self.concurrency).map(|_| Desk::new(shared.clone())).collect();
        let running = Running {
            in_hand: InHand::new(self.subscription.clone()),
            subscription: self.subscription,
            desks,
            taker: Some(Desk::new(shared.clone())),
            renewer: Some(Desk::new(shared.clone())),
            shared,
            stopping,
            queue: Queue::default(),
            jobs: JoinSet::new(),
            working: 0,
            claimed: VecDeque::new(),
            suspect: None,
            suspect_since: Instant::now(),
            alone: false,
            batch_max: self.batch_max,
            batch_now: self.batch_max,
            poll: self.poll,
            next_take: Instant::now(),
            next_renewal: Instant::now(),
            take_wait: self.poll,
            stop_deadline: self.stop_deadline,
            counters: ReceiveCounters::default(),
            received: 0,
            observer: self.observer,
            live: self.live,
        };
        running.run(stop, arrivals, &mut receiving).await
    }
}

/// A waiting message that was handled.
struct Handled {
    kind: String,
    written: Option<SystemTime>,
    end: End,
}

/// What a task brought back, with the desk that it worked at, and how long it took.
enum Done<F: ConsumerStore> {
    /// None: the batch failed as a whole.
    Batch(Desk<F>, Vec<Arrival>, Option<Vec<End>>, Duration),
    Waiting(Desk<F>, Handled, Duration),
    Taken(Desk<F>, usize, Result<Vec<Held<F>>, StoreError>),
    Renewed(Desk<F>),
}

struct Running<F: ConsumerStore> {
    subscription: Arc<dyn Subscription>,
    in_hand: InHand,
    shared: Arc<Shared<F>>,
    stopping: watch::Sender<bool>,
    queue: Queue,
    desks: Vec<Desk<F>>,
    /// Reserved connections: neither taking nor renewing waits for a worker.
    taker: Option<Desk<F>>,
    renewer: Option<Desk<F>>,
    jobs: JoinSet<Done<F>>,
    /// Jobs that handle messages.
    working: usize,
    claimed: VecDeque<Held<F>>,
    /// A message that may have killed those who had it.
    suspect: Option<Held<F>>,
    suspect_since: Instant,
    /// The suspect is in work, and nothing else.
    alone: bool,
    batch_max: usize,
    /// One when a batch has failed, doubled when one has not.
    batch_now: usize,
    poll: Duration,
    next_take: Instant,
    next_renewal: Instant,
    take_wait: Duration,
    stop_deadline: Duration,
    counters: ReceiveCounters,
    /// In the queue or in work.
    received: usize,
    observer: Arc<dyn Observer>,
    live: Live<ReceiverNow>,
}

impl<F: ConsumerStore> Running<F> {
    async fn run(
        mut self,
        stop: impl Future<Output = ()>,
        mut arrivals: mpsc::Receiver<postroom::Arrival>,
        receiving: &mut JoinSet<()>,
    ) -> Result<ReceiveCounters, ReceiverFailed> {
        let mut stop = std::pin::pin!(stop);
        let failed = loop {
            self.begin();
            self.show();
            let wake = self.wake();
            tokio::select! {
                biased;
                () = &mut stop => break None,
                Some(done) = self.jobs.join_next() => match done {
                    Ok(done) => if let Some(failed) = self.ended(done) {
                        break Some(failed);
                    },
                    Err(error) => break Some(ReceiverFailed::Worker(error)),
                },
                Some(Err(error)) = receiving.join_next() => break Some(ReceiverFailed::Worker(error)),
                Some(arrival) = arrivals.recv() => self.arrived(arrival),
                () = tokio::time::sleep_until(wake) => {}
            }
        };
        receiving.abort_all();
        self.stop(arrivals).await;
        self.show();
        failed.map_or(Ok(self.counters), Err)
    }

    /// When there is something to begin that nothing else says.
    fn wake(&self) -> Instant {
        let far = Instant::now() + Duration::from_secs(60);
        let take = if self.taker.is_some() { self.next_take } else { far };
        let renewal = if self.renewer.is_some() { self.next_renewal } else { far };
        take.min(renewal)
    }

    /// Nothing more is begun. Jobs that wait for the store give up, those in a handler go on until the deadline.
    async fn stop(&mut self, mut arrivals: mpsc::Receiver<postroom::Arrival>) {
        let deadline = Instant::now() + self.stop_deadline;
        let _ = self.stopping.send(true);
        let idle: Vec<Held<F>> = std::mem::take(&mut self.claimed).into_iter().chain(self.suspect.take()).collect();
        let mut claims: Vec<_> = idle.iter().map(|held| (held.waiting.message.id, held.waiting.claim)).collect();
        drop(idle);
        loop {
            self.give_back(&mut claims);
            self.begin_renewal();
            let renewal = if self.renewer.is_some() { self.next_renewal } else { deadline };
            tokio::select! {
                done = self.jobs.join_next() => match done {
                    Some(Ok(done)) => drop(self.ended(done)),
                    Some(Err(_)) => {}
                    None => break,
                },
                () = tokio::time::sleep_until(renewal.min(deadline)) => {}
            }
            // What a take brought meanwhile is not begun any more either.
            let more = std::mem::take(&mut self.claimed).into_iter().chain(self.suspect.take());
            claims.extend(more.map(|held| (held.waiting.message.id, held.waiting.claim)));
            if Instant::now() >= deadline {
                break;
            }
        }
        claims.extend(self.shared.in_hand());
        // Dropped jobs roll back; their messages are the broker's again when the subscription ends. One that blocks its thread
        // is left behind.
        let _ = tokio::time::timeout(ACK_TIMEOUT, self.jobs.shutdown()).await;
        if !claims.is_empty() {
            let mut desk = Desk::new(self.shared.clone());
            let giving = async {
                for (id, claim) in claims {
                    desk.give_back(id, claim).await;
                }
            };
            // Those that cannot be given back lapse.
            let _ = tokio::time::timeout(ACK_TIMEOUT, giving).await;
        }
        receiving_ended(&mut arrivals, |received| self.queue.push(Arrival::of(received)));
        self.received = 0;
        let left: Vec<(Receipt, Answer)> =
            self.queue.drain().into_iter().map(|arrival| (arrival.received.receipt, Answer::Requeue)).collect();
        self.counters.requeued += left.len() as u64;
        answer(Instant::now(), self.subscription.as_ref(), &left).await;
        // A connection that hangs gives back by its end.
        let _ = tokio::time::timeout(ACK_TIMEOUT, self.subscription.close()).await;
    }

    /// Gives claims back of which nothing was begun.
    fn give_back(&mut self, claims: &mut Vec<(MessageId, i64)>) {
        if claims.is_empty() {
            return;
        }
        let Some(mut desk) = self.taker.take() else { return };
        let claims = std::mem::take(claims);
        self.jobs.spawn(async move {
            for (id, claim) in claims {
                desk.give_back(id, claim).await;
            }
            // The taker comes back with nothing.
            Done::Taken(desk, 1, Ok(Vec::new()))
        });
    }

    fn arrived(&mut self, arrival: postroom::Arrival) {
        let received = match arrival {
            postroom::Arrival::Messages(received) => received,
            // What is in work goes on: the inbox knows it when it is handed out elsewhere.
            postroom::Arrival::Revoked(partition) => {
                for arrival in self.queue.revoke(partition) {
                    self.received -= 1;
                    self.in_hand.remove(arrival.received.receipt);
                }
                return;
            }
        };
        for mut received in received {
            self.in_hand.add(received.receipt);
            without_nul(&mut received.message);
            let mut arrival = Arrival::of(received);
            if let Some(reason) = problem(&arrival.received) {
                (arrival.single, arrival.unkeepable) = (true, Some(reason));
            } else {
                let message = &arrival.received.message;
                let (system, consumer) = (self.subscription.system(), self.shared.consumer.as_str());
                drop(MessageSpan::begin(Step::Receive, message, system, consumer));
                let calls = self.shared.handlers.of(&message.kind).is_some_and(|handler| handler.calls());
                arrival.careful = arrival.received.redelivered || calls;
            }
            self.received += 1;
            self.queue.push(arrival);
        }
    }

    /// Begins whatever can be begun.
    fn begin(&mut self) {
        let now = Instant::now();
        while !self.alone && self.suspect.is_none() && !self.desks.is_empty() {
            // What waited in the store is older than what comes from the broker.
            if let Some(waiting) = self.claimed.pop_front() {
                self.handle_waiting(waiting);
            } else if self.queue.has_ready() {
                let batch = self.queue.pop(self.batch_now);
                self.handle_batch(batch);
            } else {
                break;
            }
        }
        // One that never ends must not hold up everything: then the suspect is handled beside it.
        let waited = self.suspect_since.elapsed() > self.shared.timeout;
        if (self.working == 0 || (waited && !self.alone && !self.desks.is_empty()))
            && let Some(suspect) = self.suspect.take()
        {
            self.alone = true;
            self.handle_waiting(suspect);
        }
        self.begin_renewal();
        // At least one place: what waits in the store must not wait for the broker to have nothing more.
        let room = self.desks.len().max(1).saturating_sub(self.claimed.len());
        if now >= self.next_take
            && room > 0
            && !self.alone
            && self.suspect.is_none()
            && let Some(mut desk) = self.taker.take()
        {
            self.jobs.spawn(async move {
                let taken = desk.take(room, CLAIMS_MAX, ALONE_FROM_CLAIMS).await;
                Done::Taken(desk, room, taken)
            });
        }
        if now >= self.next_take {
            self.next_take = now + self.take_wait;
        }
    }

    fn begin_renewal(&mut self) {
        let now = Instant::now();
        if now < self.next_renewal {
            return;
        }
        let Some(mut desk) = self.renewer.take() else { return };
        self.next_renewal = now + self.shared.lease / 3;
        if self.shared.in_hand().is_empty() {
            self.renewer = Some(desk);
            return;
        }
        self.jobs.spawn(async move {
            desk.renew().await;
            Done::Renewed(desk)
        });
    }

    fn handle_batch(&mut self, batch: Vec<Arrival>) {
        let Some(mut desk) = self.desks.pop() else { return self.queue.put_back(batch) };
        self.working += 1;
        let (subscription, stopping) = (self.subscription.clone(), self.shared.stopping.clone());
        let in_hand = self.in_hand.clone();
        let began = Instant::now();
        self.jobs.spawn(async move {
            let ends = match batch.as_slice() {
                [one] => Some(vec![desk.single(one).await]),
                many => desk.batch(many).await,
            };
            let mut answers = Vec::with_capacity(batch.len());
            for (arrival, end) in batch.iter().zip(ends.iter().flatten()) {
                let receipt = arrival.received.receipt;
                answers.push(match end.fate {
                    Fate::Unkept => {
                        requeue_later(subscription.clone(), receipt, in_hand.clone(), stopping.clone());
                        continue;
                    }
                    Fate::Requeue | Fate::Refused => (receipt, Answer::Requeue),
                    _ => (receipt, Answer::Ack),
                });
            }
            answer(Instant::now(), subscription.as_ref(), &answers).await;
            in_hand.remove_all(&answers);
            Done::Batch(desk, batch, ends, began.elapsed())
        });
    }

    fn handle_waiting(&mut self, held: Held<F>) {
        let Some(mut desk) = self.desks.pop() else { return self.claimed.push_front(held) };
        self.working += 1;
        let began = Instant::now();
        self.jobs.spawn(async move {
            let (kind, written) = (held.waiting.message.kind.clone(), held.waiting.message.occurred_at);
            let end = desk.waiting(held).await;
            Done::Waiting(desk, Handled { kind, written, end }, began.elapsed())
        });
    }

    fn happened(&self, event: &Happened) {
        self.observer.event(Observed::Inbox(self.shared.consumer.as_str()), event);
    }

    /// Tells what became of messages, each with the time at which it was written.
    fn handled(&mut self, ends: &[(End, Option<SystemTime>)], took: Duration) {
        let before = self.counters;
        ends.iter().for_each(|(end, _)| self.counters.count(*end));
        self.happened(&self.counters.since(&before, took));
        let mut applied = ends.iter().filter(|(end, _)| end.fate == Fate::Applied).filter_map(|(_, written)| *written);
        self.observer.through(Observed::Inbox(self.shared.consumer.as_str()), &mut applied);
    }

    fn show(&self) {
        self.live.set(ReceiverNow {
            counters: self.counters,
            received: self.received,
            claimed: self.shared.in_hand().len(),
            working: self.working,
        });
    }

    /// Takes in what a task brought back. Returns what stops the receiver.
    fn ended(&mut self, done: Done<F>) -> Option<ReceiverFailed> {
        let now = Instant::now();
        match done {
            Done::Batch(desk, batch, ends, took) => {
                self.desks.push(desk);
                self.working -= 1;
                self.received -= if ends.is_some() { batch.len() } else { 0 };
                let slots: Vec<Slot> = batch.iter().map(|arrival| Slot::of(&arrival.received)).collect();
                let mut failed = None;
                match ends {
                    Some(ends) => {
                        let written = batch.iter().map(|arrival| arrival.received.message.occurred_at);
                        self.handled(&ends.iter().copied().zip(written).collect::<Vec<_>>(), took);
                        for (arrival, end) in batch.iter().zip(ends) {
                            if end.fate == Fate::Refused {
                                let kind = arrival.received.message.kind.clone();
                                failed = Some(ReceiverFailed::UnknownType(kind));
                            }
                        }
                        if batch.len() > 1 || self.batch_now == 1 {
                            self.batch_now = (self.batch_now * 2).min(self.batch_max);
                        }
                    }
                    None => {
                        self.batch_now = 1;
                        self.queue
                            .put_back(batch.into_iter().map(|arrival| Arrival { single: true, ..arrival }).collect());
                    }
                }
                self.queue.release(slots);
                failed
            }
            Done::Waiting(desk, Handled { kind, written, end }, took) => {
                self.desks.push(desk);
                self.working -= 1;
                self.alone = false;
                self.handled(&[(end, written)], took);
                // The next of its key may go now.
                self.next_take = now;
                (end.fate == Fate::Refused).then_some(ReceiverFailed::UnknownType(kind))
            }
            Done::Taken(desk, room, Ok(taken)) => {
                self.taker = Some(desk);
                self.take_wait = self.poll;
                if taken.len() >= room {
                    self.next_take = now;
                }
                for held in taken {
                    if held.waiting.claims >= ALONE_FROM_CLAIMS {
                        self.suspect = Some(held);
                        self.suspect_since = now;
                    } else {
                        self.claimed.push_back(held);
                    }
                }
                None
            }
            Done::Taken(desk, _, Err(error)) => {
                self.taker = Some(desk);
                tracing::warn!(
                    consumer = %self.shared.consumer,
                    "failed to take waiting messages, trying again in {:?}: {}",
                    self.take_wait,
                    chain(&error)
                );
                self.happened(&Happened::StoreFailed { what: "take waiting messages" });
                self.next_take = now + self.take_wait;
                self.take_wait = (self.take_wait * 2).min(TAKE_RETRY_CAP);
                None
            }
            Done::Renewed(desk) => {
                self.renewer = Some(desk);
                None
            }
        }
    }
}

/// What the subscription had brought when it was given up.
fn receiving_ended(arrivals: &mut mpsc::Receiver<postroom::Arrival>, mut each: impl FnMut(Received)) {
    arrivals.close();
    while let Ok(arrival) = arrivals.try_recv() {
        if let postroom::Arrival::Messages(received) = arrival {
            received.into_iter().for_each(&mut each);
        }
    }
}
