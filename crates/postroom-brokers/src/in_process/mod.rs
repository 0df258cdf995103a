//! A broker inside the process: queues, confirms, redelivery and a log, in memory. It needs no server, and it is what
//! `postroom demo` runs on. Nothing survives the process; use it between parts of one application, or in tests.

mod subscription;

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use postroom::{Batch, FailureKind, Message, MessageId, Sink, SinkLimits, TopicFilter, Unavailable, Verdict, Verdicts};
use tokio::sync::Notify;

pub use subscription::InProcessSubscription;

/// The broker; clones share it.
#[derive(Clone, Default)]
pub struct InProcessBroker(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    arrived: Notify,
}

#[derive(Default)]
struct State {
    queues: BTreeMap<String, Queue>,
    log: VecDeque<Message>,
    handed_out: VecDeque<MessageId>,
    stopped: bool,
    next_tag: u64,
    next_session: u64,
}

struct Queue {
    takes: TopicFilter,
    ready: VecDeque<Waiting>,
    /// Handed out and not settled: tag, session, message.
    unacked: BTreeMap<u64, (u64, Message)>,
}

/// How many messages and deliveries the broker's own account remembers.
pub const LOG_MAX: usize = 200_000;

fn remember<T>(account: &mut VecDeque<T>, entry: T) {
    if account.len() == LOG_MAX {
        account.pop_front();
    }
    account.push_back(entry);
}

struct Waiting {
    message: Message,
    redelivered: bool,
}

/// The broker is stopped.
#[derive(Debug, thiserror::Error)]
#[error("the broker is stopped")]
struct Stopped;

impl InProcessBroker {
    /// A broker without queues.
    pub fn new() -> Self {
        Self::default()
    }

    /// Declares a queue that takes these topics. Declaring it again changes nothing.
    pub fn declare_queue(&self, name: &str, takes: TopicFilter) {
        let queue = Queue { takes, ready: VecDeque::new(), unacked: BTreeMap::new() };
        self.state().queues.entry(name.to_owned()).or_insert(queue);
    }

    /// Its publish side.
    pub fn sink(&self) -> InProcessSink {
        InProcessSink(self.clone())
    }

    /// Its receive side for one queue, which must have been declared; at most `prefetch` deliveries unsettled.
    pub fn subscribe(&self, queue: &str, prefetch: usize) -> InProcessSubscription {
        let session = {
            let mut state = self.state();
            state.next_session += 1;
            state.next_session
        };
        InProcessSubscription::new(self.clone(), queue.to_owned(), session, prefetch)
    }

    /// Stops accepting and handing out messages until [`InProcessBroker::start`]; queues keep what they have.
    pub fn stop(&self) {
        self.state().stopped = true;
        self.0.arrived.notify_waiters();
    }

    /// Resumes after [`InProcessBroker::stop`].
    pub fn start(&self) {
        self.state().stopped = false;
        self.0.arrived.notify_waiters();
    }

    /// The last [`LOG_MAX`] messages that were stored, in their order: the broker's own account.
    pub fn log(&self) -> Vec<Message> {
        self.state().log.iter().cloned().collect()
    }

    /// The ids of the last [`LOG_MAX`] deliveries that were handed out, repeated ones as often as they were, in their order.
    pub fn handed_out(&self) -> Vec<MessageId> {
        self.state().handed_out.iter().copied().collect()
    }

    /// Messages of a queue that are not settled, handed out or not.
    pub fn unsettled(&self, queue: &str) -> usize {
        self.state().queues.get(queue).map_or(0, |queue| queue.ready.len() + queue.unacked.len())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The publish side of an [`InProcessBroker`].
#[derive(Clone)]
pub struct InProcessSink(InProcessBroker);

#[async_trait]
impl Sink for InProcessSink {
    fn system(&self) -> &'static str {
        "in_process"
    }

    fn limits(&self) -> SinkLimits {
        SinkLimits { batch_messages_max: 250, batch_bytes_max: usize::MAX, batches_in_flight_max: 4 }
    }

    async fn publish(&self, batch: &Batch) -> Result<Verdicts, Unavailable> {
        let mut verdicts = batch.silent();
        {
            let mut state = self.0.state();
            if state.stopped {
                return Err(Unavailable::new("the in-process broker", Stopped));
            }
            for (place, message) in batch.messages().iter().enumerate() {
                let mut routed = false;
                for queue in state.queues.values_mut().filter(|queue| queue.takes.takes(&message.topic)) {
                    queue.ready.push_back(Waiting { message: Message::clone(message), redelivered: false });
                    routed = true;
                }
                if routed {
                    remember(&mut state.log, Message::clone(message));
                    verdicts.judge(place, Verdict::Stored);
                } else {
                    let reason = format!("no queue takes topic {:?}; declare one", message.topic);
                    verdicts.judge(place, Verdict::failed(FailureKind::Transient, reason));
                }
            }
        }
        self.0.0.arrived.notify_waiters();
        Ok(verdicts)
    }

    async fn probe(&self) -> Result<(), Unavailable> {
        if self.0.state().stopped { Err(Unavailable::new("the in-process broker", Stopped)) } else { Ok(()) }
    }

    async fn close(&self) {}
}
