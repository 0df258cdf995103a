//! Dead letters as an operator sees them, and what an operator can do about them.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::delivery::Cause;
use crate::message::{Headers, MessageId};
use crate::words::words;

/// Which side's dead letters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Side {
    /// A relay could not send them.
    #[default]
    Out,
    /// A consumer could not handle them; the route of such a letter is its consumer.
    In,
}

words!(Side { Out => "out", In => "in" });

/// What an operator does to dead letters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeadDeed {
    /// They are returned to their relay or consumer with the same ids; their count of attempts starts again at zero.
    Retry,
    /// They are deleted permanently; the audit row keeps their ids.
    Discard,
}

words!(DeadDeed { Retry => "retry", Discard => "discard" });

impl DeadDeed {
    /// The action in the audit row.
    pub fn action(self, side: Side) -> &'static str {
        match (side, self) {
            (Side::Out, Self::Retry) => "dead.retry",
            (Side::Out, Self::Discard) => "dead.discard",
            (Side::In, Self::Retry) => "inbox.retry",
            (Side::In, Self::Discard) => "inbox.discard",
        }
    }
}

/// Which dead letters; they must match every condition that is given.
#[derive(Debug, Clone, Default, Serialize)]
pub struct DeadFilter {
    /// Of this route, or of this consumer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub route: Option<String>,
    /// Of this message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<MessageId>,
    /// Of this topic.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub topic: Option<String>,
    /// Of this type.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Of this tenant.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant_id: Option<String>,
    /// Of this aggregate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub aggregate_id: Option<String>,
    /// Whose error contains this text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// That died at most this long ago, by the database's clock.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub newer_than: Option<Duration>,
    /// That died at least this long ago, by the database's clock.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub older_than: Option<Duration>,
}

impl DeadFilter {
    /// Whether it has no condition at all.
    pub fn is_everything(&self) -> bool {
        serde_json::to_value(self).is_ok_and(|value| value.as_object().is_some_and(serde_json::Map::is_empty))
    }
}

/// A place among the dead letters of one side, which are in the order of route (or consumer) and seq.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeadCursor {
    /// Route, or consumer.
    pub route: String,
    /// Its place in the outbox.
    pub seq: i64,
    /// Message id: a database that was put back from a backup can give a place a second time (MySQL).
    pub id: String,
}

impl DeadCursor {
    /// In front of everything of this route, or consumer.
    pub fn before(route: &str) -> Self {
        Self { route: route.to_owned(), seq: i64::MIN, id: String::new() }
    }
}

/// A message that no relay sends any more, or that no consumer handles any more, without its payload.
#[derive(Debug, Clone, Serialize)]
pub struct DeadLetter {
    /// Route that it died on, or consumer.
    pub route: String,
    /// Its place in the outbox.
    pub seq: i64,
    /// Message id.
    pub id: String,
    /// Topic.
    pub topic: String,
    /// Type.
    #[serde(rename = "type")]
    pub kind: String,
    /// Key within which it was ordered.
    pub key: Option<String>,
    /// Tenant.
    pub tenant_id: Option<String>,
    /// Aggregate.
    pub aggregate_id: Option<String>,
    /// Attempts used up.
    pub attempts: i64,
    /// Why it is a dead letter.
    pub cause: Cause,
    /// The last error.
    pub error: String,
    /// How long ago it died, in seconds, by the database's clock.
    pub died_seconds_ago: f64,
    /// Size of the payload.
    pub payload_bytes: i64,
    /// Headers.
    pub headers: Headers,
    /// Its last failures, oldest first.
    pub history: Vec<FailedAttempt>,
    /// Lane that it belongs to.
    #[serde(skip)]
    pub lane: i16,
}

impl DeadLetter {
    /// Where it is.
    pub fn cursor(&self) -> DeadCursor {
        DeadCursor { route: self.route.clone(), seq: self.seq, id: self.id.clone() }
    }
}

/// One failed attempt.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct FailedAttempt {
    /// When, by the database's clock.
    pub at: String,
    /// Attempts used up so far, including this one if it used one up.
    pub attempt: i64,
    /// What the sink reported.
    pub error: String,
}

/// What an operator does, with the row that is written about it in the same transaction.
#[derive(Debug, Clone)]
pub struct Deed {
    /// Who does it.
    pub actor: String,
    /// Why; not empty.
    pub reason: String,
}
