//! Keys that wait, as an operator sees them.

use serde::Serialize;

/// A key of which messages wait.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct WaitingKey {
    /// Route on which it waits.
    pub route: String,
    /// The key.
    pub key: String,
    /// What it waits for: `retry` (its first message failed and is tried again), `dead` (its message is dead, and the route
    /// blocks such keys) or `parked` (an operator parked it).
    pub waits_for: String,
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
    /// The key goes on without the dead message that blocks it; the message stays among the dead letters.
    Skip,
}

impl KeyDeed {
    /// The word in the audit row.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Park => "key.park",
            Self::Unpark => "key.unpark",
            Self::Skip => "key.skip",
        }
    }
}

/// One message on one route: where it is and what comes next.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Whereabouts {
    /// The route.
    pub route: String,
    /// `waiting`, `scheduled`, `retry`, `queued`, `blocked`, `dead`, `acked`, `passed` (sent or passed
    /// by, nobody knows which) or `not_taken`.
    pub state: &'static str,
    /// The key within which it is ordered.
    pub key: Option<String>,
    /// Attempts burned.
    pub attempts: i64,
    /// What it waits for and what happens next, in words.
    pub because: Vec<String>,
    /// Its last failures.
    pub history: Vec<crate::FailedAttempt>,
}
