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
    /// Most deliveries claimed and not passed by the stored position: what a crash can repeat.
    pub in_flight_max: usize,
    /// About how many bytes of payloads and headers may be in memory; one message more than this at most.
    pub in_flight_bytes_max: usize,
    /// Order within a key.
    pub order: Order,
    /// What becomes of a key whose message is dead.
    pub on_dead: OnDead,
    /// Most messages a second; none: as many as the sink takes.
    pub rate: Option<u32>,
    /// Refusals in a row after which the sink is left alone for a while; 0: never.
    pub breaker_after: u32,
    /// Longest wait between two polls when there is nothing to do.
    pub poll_idle: Duration,
    /// What becomes of failed messages.
    pub retry: RetryPolicy,
    /// Lanes are renewed this often.
    pub renew_every: Duration,
    /// How the sink likes to be called.
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
    /// A note about a message that travels alone is written; nothing is known of it where it could not be.
    Noted(Noted),
    /// The note is off; false: it may still be there.
    NoteCleared(bool),
    /// A batch came back; an error: the sink was unavailable.
    Published(BatchId, Result<Verdicts, String>),
    /// A settling came back.
    Settled(Option<Settled>),
    /// A probe of the sink came back.
    Probed(Result<(), String>),
    /// Somebody says that there is something to do.
    Woken,
    /// Claim nothing more, finish what is in flight.
    Stop,
}

/// What is to be done. Each ends with the input of its name.
#[derive(Debug)]
pub enum Action {
    /// Call [`postroom::Source::renew`], and add whether the sink says that it is blocked.
    Renew(Report),
    /// Call [`postroom::Source::claim`].
    Claim(Want),
    /// Call [`postroom::Source::note`], with `proven` only if the sink does not say that it is blocked.
    Note {
        /// What travels alone.
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

/// A message that is among the dead letters.
#[derive(Debug, Clone)]
pub struct Death {
    /// The message.
    pub message: Arc<Message>,
    /// Attempts used up.
    pub attempts: u32,
    /// Why it is dead.
    pub cause: Cause,
    /// What was said last.
    pub error: String,
}

/// How a route stands in this process.
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
    /// Why the sink is not published to; none: it is.
    pub sink_down: Option<String>,
    /// It claims nothing more and finishes what is in flight.
    pub stopping: bool,
}

/// What the engine has seen since it began.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Counters {
    /// Deliveries claimed.
    pub claimed: u64,
    /// Verdicts of stored.
    pub stored: u64,
    /// Outcomes that nobody knew.
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
    /// Lanes that turned out to be another relay's, or that another one took: what was in hand of them is repeated.
    pub lanes_lost: u64,
    /// Times the sink was found unavailable, or refused everything.
    pub sink_outages: u64,
}
