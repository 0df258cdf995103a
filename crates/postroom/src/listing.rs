//! Messages as an operator looks them up: by topic, key, place and age.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::Serialize;

use crate::message::Headers;
use crate::words::words;

/// Where listed messages are on their route. Everything that the position has passed is one state here: `why` tells more about one message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ListedPlace {
    /// In the outbox, and not yet read by the route.
    Waiting,
    /// Delayed, and parked until its time.
    Scheduled,
    /// It failed and is tried again.
    Retry,
    /// Behind another message of its key.
    Queued,
    /// Among the dead letters.
    Dead,
    /// The route is done with it: the broker confirmed it, or it was discarded or skipped.
    Done,
    /// No route takes its topic: nobody sends it.
    Unrouted,
}

words!(ListedPlace {
    Waiting => "waiting",
    Scheduled => "scheduled",
    Retry => "retry",
    Queued => "queued",
    Dead => "dead",
    Done => "done",
    Unrouted => "unrouted",
});

/// Which messages; they must match every condition that is given.
#[derive(Debug, Clone, Default)]
pub struct MessageFilter {
    /// On this route.
    pub route: Option<String>,
    /// Of this topic.
    pub topic: Option<String>,
    /// Of this key (or, without one, this aggregate).
    pub key: Option<String>,
    /// In this place.
    pub place: Option<ListedPlace>,
    /// Written at most this long ago, by the database's clock.
    pub newer_than: Option<Duration>,
    /// Written at least this long ago, by the database's clock.
    pub older_than: Option<Duration>,
    /// Behind this one on the list.
    pub after: Option<ListedAfter>,
}

impl MessageFilter {
    /// Why no message can fulfil these conditions, so that nobody searches everything for it; none: some may.
    pub fn contradiction(&self) -> Option<&'static str> {
        let (newer, older) = (self.newer_than, self.older_than);
        if newer.zip(older).is_some_and(|(newer, older)| newer <= older) {
            Some("no message is at the same time newer than the one age and older than the other")
        } else if self.route.is_some() && self.place == Some(ListedPlace::Unrouted) {
            Some("a message in the state unrouted is on no route")
        } else {
            None
        }
    }
}

/// Where a page ends and the next one begins; written as `SEQ`, `SEQ.ID` or `SEQ.ID.ROUTE`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedAfter {
    /// The lowest seq of the page.
    pub seq: i64,
    /// Its last entry; none: everything with this seq is on the page.
    pub entry: Option<ListedEntry>,
}

/// One entry of a page, among those with its seq.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedEntry {
    /// Its message's id, as the store writes it.
    pub id: String,
    /// Its route.
    pub route: Option<String>,
}

impl fmt::Display for ListedAfter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.seq)?;
        let Some(ListedEntry { id, route }) = &self.entry else { return Ok(()) };
        write!(f, ".{id}")?;
        route.as_ref().map_or(Ok(()), |route| write!(f, ".{route}"))
    }
}

impl FromStr for ListedAfter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parse = || {
            let mut parts = text.splitn(3, '.');
            let seq = parts.next()?.parse().ok().filter(|seq| *seq > 0)?;
            let Some(id) = parts.next() else { return Some(Self { seq, entry: None }) };
            let digits = id.chars().filter(|c| *c != '-');
            let is_id = digits.clone().count() == 32 && digits.into_iter().all(|c| c.is_ascii_hexdigit());
            let entry = ListedEntry { id: id.to_owned(), route: parts.next().map(str::to_owned) };
            is_id.then_some(Self { seq, entry: Some(entry) })
        };
        parse().ok_or_else(|| "use what the page before has as `next`".to_owned())
    }
}

/// The result of a search for messages.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Listed {
    /// One entry for each message and route that takes its topic, and one for each message that no route takes; in the order in which they
    /// were written, newest first.
    pub messages: Vec<ListedMessage>,
    /// Where the next page begins, as [`MessageFilter::after`] takes it; none: this was the last. A page looks at a bounded number of rows, so
    /// one with few messages, or none, may have a next one.
    pub next: Option<String>,
}

impl Listed {
    /// A page of what was `found` with its seqs, in order: of up to `limit` entries and one more, which tells that there are more. `read_to`:
    /// the seq to which all rows were read; none: to the end.
    pub fn page(mut found: Vec<(ListedMessage, i64)>, limit: i64, read_to: Option<i64>) -> Self {
        let limit = usize::try_from(limit).unwrap_or_default();
        let more = found.len() > limit;
        found.truncate(limit);
        let next = if more {
            found.last().map(|(message, seq)| {
                let entry = ListedEntry { id: message.id.clone(), route: message.route.clone() };
                ListedAfter { seq: *seq, entry: Some(entry) }
            })
        } else {
            read_to.map(|seq| ListedAfter { seq, entry: None })
        };
        let messages = found.into_iter().map(|(message, _)| message).collect();
        Self { messages, next: next.map(|next| next.to_string()) }
    }
}

/// One message on one route, without payload and headers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ListedMessage {
    /// The route; none takes its topic.
    pub route: Option<String>,
    /// Message id.
    pub id: String,
    /// Where it is.
    pub state: ListedPlace,
    /// Topic.
    pub topic: String,
    /// Type.
    #[serde(rename = "type")]
    pub kind: String,
    /// Key within which it is ordered.
    pub key: Option<String>,
    /// Attempts used up.
    pub attempts: i64,
    /// Age in seconds, by the database's clock.
    pub age_seconds: f64,
}

/// One message with everything that the store has of it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StoredMessage {
    /// Message id.
    pub id: String,
    /// Topic.
    pub topic: String,
    /// Type.
    #[serde(rename = "type")]
    pub kind: String,
    /// Key, if it was given.
    pub key: Option<String>,
    /// Routing key, if it was given.
    pub routing_key: Option<String>,
    /// Content type.
    pub content_type: String,
    /// Headers.
    pub headers: Headers,
    /// Tenant.
    pub tenant_id: Option<String>,
    /// Aggregate type.
    pub aggregate_type: Option<String>,
    /// Aggregate id.
    pub aggregate_id: Option<String>,
    /// Aggregate version.
    pub aggregate_version: Option<i64>,
    /// Age in seconds, by the database's clock.
    pub age_seconds: f64,
    /// Which table this copy is from: `outbox`, `parked`, `dead_letters`, `inbox_messages` or `dead_consume`.
    pub found_in: String,
    /// The payload.
    #[serde(skip)]
    pub payload: Vec<u8>,
}

/// What forgetting a route removed, or what prevents it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Forgotten {
    /// Messages that its position has not passed; with `unread_is_bound`, at least so many.
    pub unread: i64,
    /// See `unread`.
    pub unread_is_bound: bool,
    /// Parked messages.
    pub parked: i64,
    /// Dead letters.
    pub dead: i64,
    /// Relays that run it.
    pub relays: i64,
    /// The route is gone, and all of these with it. False: nothing was changed.
    pub done: bool,
}
