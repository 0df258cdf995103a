//! Keys that wait, as an operator sees them.

use serde::Serialize;

use crate::words::words;

/// What a key waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitsFor {
    /// Its first message failed and is tried again.
    Retry,
    /// One of its messages is a dead letter, and the route blocks such keys.
    Dead,
    /// An operator parked it.
    Parked,
}

words!(WaitsFor { Retry => "retry", Dead => "dead", Parked => "parked" });

/// A key of which messages wait.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct WaitingKey {
    /// Route on which it waits, or consumer.
    pub route: String,
    /// The key.
    pub key: String,
    /// What it waits for.
    pub waits_for: WaitsFor,
    /// Message at its head, if it has one.
    pub head: Option<String>,
    /// Messages parked in it.
    pub messages: i64,
    /// Attempts of the message at its head.
    pub attempts: i64,
    /// How long it has waited, in seconds, by the database's clock.
    pub since_seconds: f64,
    /// Until the next attempt, in seconds; none: it waits for an operator.
    pub retry_in_seconds: Option<f64>,
    /// The last error, or the operator's reason.
    pub reason: Option<String>,
}

/// What an operator does to a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyDeed {
    /// Nothing more of the key is sent; its messages queue up.
    Park,
    /// Ends a `Park`.
    Unpark,
    /// The key continues without the dead message that blocks it; the message stays among the dead letters.
    Skip,
}

words!(KeyDeed { Park => "park", Unpark => "unpark", Skip => "skip" });

impl KeyDeed {
    /// The action in the audit row.
    pub fn action(self) -> &'static str {
        match self {
            Self::Park => "key.park",
            Self::Unpark => "key.unpark",
            Self::Skip => "key.skip",
        }
    }
}

/// What is known of a message that was put back from an archive, on a route that has passed it.
pub const CAME_BACK: &str = "it came back from the archive: a route that existed when it was archived had finished with it, and a newer one has passed it \
                             without sending it; a replay sends it";

/// Where a message is on a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// In the outbox, not yet passed by the route's position.
    Waiting,
    /// Delayed, and not due yet.
    Scheduled,
    /// It failed and is tried again.
    Retry,
    /// Behind another message of its key.
    Queued,
    /// Its key waits for an operator.
    Blocked,
    /// Among the dead letters.
    Dead,
    /// The broker confirmed it.
    Acked,
    /// It was dead, and an operator discarded it.
    Discarded,
    /// Sent or skipped; it is not known which.
    Passed,
    /// Not a message of this route: the route does not take its topic, or it began after the message was written.
    NotTaken,
}

words!(Place {
    Waiting => "waiting",
    Scheduled => "scheduled",
    Retry => "retry",
    Queued => "queued",
    Blocked => "blocked",
    Dead => "dead",
    Acked => "acked",
    Discarded => "discarded",
    Passed => "passed",
    NotTaken => "not_taken",
});

/// One message on one route: where it is and what comes next.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Whereabouts {
    /// The route.
    pub route: String,
    /// Where it is.
    pub state: Place,
    /// The key within which it is ordered.
    pub key: Option<String>,
    /// Attempts used up.
    pub attempts: i64,
    /// What it waits for and what happens next, in words.
    pub because: Vec<String>,
    /// Its last failures.
    pub history: Vec<crate::FailedAttempt>,
}
