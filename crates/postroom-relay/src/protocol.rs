//! What goes into the engine and what comes out of it.

use std::sync::Arc;
use std::time::Duration;

use postroom::{
    Batch, Cause, Claimed, Message, Noted, OnDead, Order, Report, RetryPolicy, Settled, Settlement, SinkLimits,
    Standing, Token, Verdicts, Want,
};

/// What the engine is told once.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Most deliveries that are claimed but not yet covered by a saved position: what a crash can repeat.
    pub in_flight_max: usize,
    /// Limit on the bytes of payloads and headers in memory, which one message may exceed.
    pub in_flight_bytes_max: usize,
    /// Order within a key.
    pub order: Order,
    /// What happens to a key after a dead letter.
    pub on_dead: OnDead,
    /// Most messages in a second; none: as many as the sink accepts.
    pub rate: Option<u32>,
    /// Rejections in a row after which publishing pauses; 0: never.
    pub breaker_after: u32,
    /// Longest wait between two polls when there is nothing to do.
    pub poll_idle: Duration,
    /// What happens to failed messages.
    pub retry: RetryPolicy,
    /// Lanes are renewed this often.
    pub renew_every: Duration,
    /// How many messages the sink accepts at once.
    pub sink: SinkLimits,
    /// Seed of the jitter.
    pub seed: u64,
}

/// Names a batch with the sink.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BatchId(pub(crate) u64);

/// Everything that can happen.
#[derive(Debug)]
pub enum Input {
    /// A renewal came back; `None`: the store could not be reached or refused.
    Renewed(Option<Standing>),
    /// A claim came back.
    Claimed(Option<Claimed>),
    /// A note about a message that is published alone is recorded; nothing is known if it could not be recorded.
    Noted(Noted),
    /// The note is cleared; false: it may still be there.
    NoteCleared(bool),
    /// A batch came back; an error: the sink was unavailable.
    Published(BatchId, Result<Verdicts, String>),
    /// The answer to settled messages came back.
    Settled(Option<Settled>),
    /// A probe of the sink came back.
    Probed(Result<(), String>),
    /// The sink says that its connection is gone, though nothing is being published.
    SinkLost(String),
    /// Somebody says that there is something to do.
    Woken,
    /// Claim nothing more, finish what is in flight.
    Stop,
}

/// What to do. Each ends with the input of the same name.
#[derive(Debug)]
pub enum Action {
    /// Call [`postroom::Source::renew`], and add whether the sink says that it is blocked.
    Renew(Report),
    /// Call [`postroom::Source::claim`].
    Claim(Want),
    /// Call [`postroom::Source::note`], with `proven` only if the sink does not say that it is blocked.
    Note {
        /// The delivery that is published alone.
        token: Token,
        /// The sink stored something since this process began.
        proven: bool,
    },
    /// Call [`postroom::Source::clear_note`].
    ClearNote,
    /// Call [`postroom::Sink::publish`].
    Publish(BatchId, Batch),
    /// Call [`postroom::Source::settle`].
    Settle(Vec<Settlement>),
    /// Call [`postroom::Sink::probe`].
    Probe,
    /// Everything is finished after a stop: release the lanes and end.
    Finish,
}

/// A message that became a dead letter.
#[derive(Debug, Clone)]
pub struct Death {
    /// The message.
    pub message: Arc<Message>,
    /// Attempts used up.
    pub attempts: u32,
    /// Why it is dead.
    pub cause: Cause,
    /// The last error.
    pub error: String,
}

/// The state of a route in this process.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct RouteNow {
    /// What was seen since the relay began.
    pub counters: Counters,
    /// Lanes held.
    pub lanes: usize,
    /// Deliveries claimed and not settled.
    pub in_flight: usize,
    /// Bytes of their payloads and headers.
    pub in_flight_bytes: usize,
    /// Of those, with the sink.
    pub with_sink: usize,
    /// Settled, and not covered by a saved position yet.
    pub settled_ahead: usize,
    /// Why nothing is published to the sink; none: publishing is possible.
    pub sink_down: Option<String>,
    /// Why the sink accepts nothing for now although its connection is up, such as a memory alarm.
    pub sink_blocked: Option<String>,
    /// It claims nothing more and finishes the messages in flight.
    pub stopping: bool,
    /// The last renewal did not reach the store.
    pub store_away: bool,
    /// It holds lanes, its last claim found nothing, and nothing is in flight or to be recorded.
    pub idle: bool,
}

/// What the engine has seen since it began.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Counters {
    /// Deliveries claimed.
    pub claimed: u64,
    /// Verdicts of stored.
    pub stored: u64,
    /// Unknown outcomes.
    pub unknown: u64,
    /// Failed and parked for another attempt.
    pub retried: u64,
    /// Queued up behind a parked message of their key.
    pub queued: u64,
    /// Parked until they are due.
    pub scheduled: u64,
    /// Dead letters.
    pub dead: u64,
    /// Settlements that changed nothing because the lane was lost.
    pub fenced: u64,
    /// Lanes that turned out to be another relay's, or that another one took: their messages in flight are repeated.
    pub lanes_lost: u64,
    /// How often the sink was unavailable, or rejected everything.
    pub sink_outages: u64,
}
