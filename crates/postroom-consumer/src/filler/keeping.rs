//! From the broker into the inbox table, in the order of the queue, as long as a tenure lasts.

use std::collections::VecDeque;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postroom::{
    Answer, Arrival, Bound, Happened, Keeper, Kept, Live, Message, MessageSpan, Observed, Observer, Received, Step,
    StoreError, Subscription, Tenure, tidy_reason,
};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::{FillCounters, FillerFailed, InboxNow};
use crate::again::{STORE_PATIENCE, stopped_before_try};
use crate::bury::{Burial, Buried, Buries};
use crate::handler::chain;
use crate::in_hand::InHand;
use crate::pump::{self, answer};
use crate::unkeepable::{problem, without_nul};

/// Most of a transaction.
const BATCH_MAX: usize = 500;
/// What is taken from the subscription at once.
const RECEIVED_AT_ONCE: Bound = Bound { messages: BATCH_MAX, bytes: 8 << 20 };
/// While another process still has the queue the broker refuses this one: order over a takeover waits for that.
const RECEIVE_RETRY_CAP: Duration = Duration::from_secs(3);
/// So many tries of one message take about a second.
const TELL_AFTER_TRIES: u32 = 5;
/// What is in work at a stop is one transaction.
const STOP_DEADLINE: Duration = Duration::from_secs(5);

/// How it ended.
pub(super) enum Ended {
    Stopped,
    /// Another process fills the inbox now.
    Fenced,
}

/// What became of a message.
enum Fate {
    Kept(Kept),
    Dead(Kept),
    /// The store refuses it even as a dead one.
    Unkept,
    Fenced,
    /// The filler stops; nothing became of it.
    Stopped,
}

/// Who is told what happens.
pub(super) struct Told {
    pub observer: Arc<dyn Observer>,
    pub live: Live<InboxNow>,
    /// Why the last try to receive failed.
    pub trouble: Live<Option<String>>,
    /// Why what was received cannot be stored.
    pub stuck: Live<Option<String>>,
}

pub(super) struct Keeping {
    told: Told,
    subscription: Arc<dyn Subscription>,
    keeper: Arc<dyn Keeper>,
    tenure: Tenure,
    stopping: watch::Receiver<bool>,
    in_hand: InHand,
    /// Received, not kept yet, in the order of the queue.
    waiting: VecDeque<Received>,
    /// Most of the next transaction: one after a batch failed, doubled when one did not.
    batch_max: usize,
}

impl Keeping {
    pub fn new(
        subscription: Arc<dyn Subscription>,
        keeper: Arc<dyn Keeper>,
        tenure: Tenure,
        stopping: watch::Receiver<bool>,
        told: Told,
    ) -> Self {
        let in_hand = InHand::new(subscription.clone());
        Self { told, subscription, keeper, tenure, stopping, in_hand, waiting: VecDeque::new(), batch_max: BATCH_MAX }
    }

    /// Runs until it is stopped or another process has the inbox. Then the session with the broker is closed: what is not kept
    /// goes back, in the order of the queue.
    pub async fn run(mut self, counters: &mut FillCounters) -> Result<Ended, FillerFailed> {
        let (pump, mut arrivals) = mpsc::channel(1);
        // A set, so that the task ends with this future.
        let mut receiving = JoinSet::new();
        receiving.spawn(pump::receive(
            self.subscription.clone(),
            pump,
            RECEIVED_AT_ONCE,
            RECEIVE_RETRY_CAP,
            self.told.trouble.clone(),
            self.keeper.consumer().clone(),
        ));
        let mut stopping = self.stopping.clone();
        self.told.live.set(InboxNow { counters: *counters, filling: true, waiting: 0 });
        let ended = loop {
            if *stopping.borrow() {
                break Ok(Ended::Stopped);
            }
            // What is there already makes larger transactions.
            while self.waiting.len() < BATCH_MAX
                && let Ok(arrival) = arrivals.try_recv()
            {
                self.arrived(arrival);
            }
            if self.waiting.is_empty() {
                tokio::select! {
                    biased;
                    _ = stopping.wait_for(|stopping| *stopping) => {}
                    Some(Err(error)) = receiving.join_next() => break Err(FillerFailed::Worker(error)),
                    Some(arrival) = arrivals.recv() => self.arrived(arrival),
                }
                continue;
            }
            let (before, began) = (*counters, Instant::now());
            let mut watch = stopping.clone();
            let hurried = async {
                let _ = watch.wait_for(|stopping| *stopping).await;
                tokio::time::sleep(STOP_DEADLINE).await;
            };
            tokio::select! {
                biased;
                fenced = self.keep_some(counters) => if fenced {
                    break Ok(Ended::Fenced);
                },
                () = hurried => break Ok(Ended::Stopped),
            }
            self.tell(&before, counters, began.elapsed());
        };
        receiving.shutdown().await;
        while let Ok(arrival) = arrivals.try_recv() {
            self.arrived(arrival);
        }
        counters.requeued += self.waiting.len() as u64;
        let _ = tokio::time::timeout(STOP_DEADLINE, self.subscription.close()).await;
        ended
    }

    fn tell(&self, before: &FillCounters, now: &FillCounters, took: Duration) {
        let since = |now: u64, before: u64| now.saturating_sub(before) as usize;
        let event = Happened::Kept {
            kept: since(now.kept, before.kept),
            duplicates: since(now.duplicates, before.duplicates),
            dead: since(now.dead, before.dead),
            took,
        };
        self.told.observer.event(Observed::Inbox(self.keeper.consumer().as_str()), &event);
        self.told.live.set(InboxNow { counters: *now, filling: true, waiting: self.waiting.len() });
    }

    fn arrived(&mut self, arrival: Arrival) {
        match arrival {
            Arrival::Messages(received) => {
                for mut received in received {
                    without_nul(&mut received.message);
                    let consumer = self.keeper.consumer().as_str();
                    drop(MessageSpan::begin(Step::Receive, &received.message, self.subscription.system(), consumer));
                    self.in_hand.add(received.receipt);
                    self.waiting.push_back(received);
                }
            }
            Arrival::Revoked(partition) => {
                let in_hand = &self.in_hand;
                self.waiting.retain(|received| {
                    let kept = received.partition != partition;
                    if !kept {
                        in_hand.remove(received.receipt);
                    }
                    kept
                });
            }
        }
    }

    /// Keeps the first messages that wait, and answers the broker. True: another process has the inbox.
    async fn keep_some(&mut self, counters: &mut FillCounters) -> bool {
        let unkeepable = self.waiting.front().and_then(problem);
        let count = if unkeepable.is_some() { 1 } else { self.together() };
        let messages: Vec<Message> = self.waiting.iter().take(count).map(|received| received.message.clone()).collect();
        let fates = match (unkeepable, messages.as_slice()) {
            (Some(reason), [one]) => vec![self.bury(one, &reason).await],
            (_, [one]) => vec![self.keep_one(one).await],
            (_, many) => match self.asked(self.keeper.keep(&self.tenure, many)).await {
                Ok(Some(kept)) => kept.into_iter().map(Fate::Kept).collect(),
                Ok(None) => vec![Fate::Fenced],
                Err(error) => {
                    tracing::debug!("the messages of a batch are stored one by one: {}", chain(&error));
                    self.batch_max = 1;
                    return false;
                }
            },
        };
        self.batch_max = (self.batch_max * 2).min(BATCH_MAX);
        let mut answers = Vec::with_capacity(fates.len());
        let mut written = Vec::new();
        for fate in fates {
            let counter = match fate {
                Fate::Fenced => {
                    counters.fenced += count as u64;
                    self.waiting.drain(..count.min(self.waiting.len()));
                    return true;
                }
                Fate::Stopped => return false,
                Fate::Kept(Kept::New) => &mut counters.kept,
                Fate::Dead(Kept::New) => &mut counters.dead,
                Fate::Kept(Kept::Duplicate) | Fate::Dead(Kept::Duplicate) => &mut counters.duplicates,
                Fate::Unkept => &mut counters.requeued,
            };
            *counter += 1;
            let Some(received) = self.waiting.pop_front() else { break };
            if matches!(fate, Fate::Kept(Kept::New)) {
                written.extend(received.message.occurred_at);
            }
            if matches!(fate, Fate::Unkept) {
                let in_hand = self.in_hand.clone();
                pump::requeue_later(self.subscription.clone(), received.receipt, in_hand, self.stopping.clone());
            } else {
                answers.push((received.receipt, Answer::Ack));
            }
        }
        let of = Observed::Inbox(self.keeper.consumer().as_str());
        self.told.observer.through(of, &mut written.into_iter());
        answer(Instant::now(), self.subscription.as_ref(), &answers).await;
        self.in_hand.remove_all(&answers);
        false
    }

    /// How many of the first messages go together: up to one that cannot be kept, or whose id is among them already, which is two
    /// deliveries of one message.
    fn together(&self) -> usize {
        let mut ids = std::collections::HashSet::new();
        let fits = |received: &&Received| problem(received).is_none() && ids.insert(received.message.id);
        self.waiting.iter().take(self.batch_max).take_while(fits).count().max(1)
    }

    /// Keeps one message until that is committed, or the filler stops.
    async fn keep_one(&self, message: &Message) -> Fate {
        let mut tries = 0;
        let mut outage = None;
        loop {
            match self.asked(self.keeper.keep(&self.tenure, std::slice::from_ref(message))).await {
                Ok(Some(kept)) => {
                    pump::stored_again(self.keeper.consumer(), &mut outage);
                    self.told.stuck.set(None);
                    return Fate::Kept(kept.first().copied().unwrap_or(Kept::Duplicate));
                }
                Ok(None) => return Fate::Fenced,
                Err(error) if self.keeper.refuses_the_message(&error) => {
                    return self.bury(message, &tidy_reason(chain(&error))).await;
                }
                Err(error) => {
                    tries += 1;
                    let why = format!("store what {} brought: {}", self.subscription.origin(), chain(&error));
                    // A moment is nothing that anybody has to know of.
                    if tries >= TELL_AFTER_TRIES || !error.is_transient() {
                        outage.get_or_insert_with(pump::Outage::begin).tell(self.keeper.consumer(), &why);
                        self.told.stuck.set(Some(format!("failed to {why}")));
                    }
                    if stopped_before_try(&self.stopping, tries).await {
                        return Fate::Stopped;
                    }
                }
            }
        }
    }

    /// Keeps a message as a dead one, with the queue and the reason.
    async fn bury(&self, message: &Message, reason: &str) -> Fate {
        let burial = Burial {
            consumer: self.keeper.consumer(),
            origin: &self.subscription.origin(),
            reason,
            stopping: &self.stopping,
        };
        match burial.of(message, &mut &*self).await {
            Buried::Kept(kept) => Fate::Dead(kept),
            Buried::Unkept => Fate::Unkept,
            Buried::Fenced => Fate::Fenced,
            Buried::Stopped => Fate::Stopped,
        }
    }

    /// A call that hangs is given up; its transaction ends with it.
    async fn asked<T>(&self, call: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
        let answered = tokio::time::timeout(STORE_PATIENCE, call).await;
        answered.unwrap_or_else(|elapsed| {
            Err(StoreError::Unavailable { what: "get an answer from the store", source: elapsed.into() })
        })
    }
}

#[async_trait]
impl Buries for &Keeping {
    async fn keep_dead(&mut self, message: &Message, error: &str) -> Result<Option<Kept>, StoreError> {
        self.asked(self.keeper.keep_dead(&self.tenure, message, error)).await
    }

    fn refuses_the_message(&self, error: &StoreError) -> bool {
        self.keeper.refuses_the_message(error)
    }
}
