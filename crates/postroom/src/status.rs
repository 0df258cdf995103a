//! What `postroom status` shows.

use serde::Serialize;

/// The state of a store.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StoreStatus {
    /// `postgres` or `sqlite`.
    pub store: &'static str,
    /// Number of the newest migration.
    pub schema_version: i64,
    /// Rows kept in the outbox, sent or not; an estimate where counting would be expensive.
    pub outbox_rows: i64,
    /// There are at least so many.
    pub outbox_rows_is_bound: bool,
    /// One entry for each route that a relay has ever run.
    pub routes: Vec<RouteStatus>,
    /// Topics that no route takes, most messages first, at most 20.
    pub unrouted: Vec<UnroutedTopic>,
}

/// A topic that no route takes: its messages go nowhere.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct UnroutedTopic {
    /// The topic.
    pub topic: String,
    /// Messages of it among the newest rows of the outbox; how many rows are looked at is the store's.
    pub messages: i64,
    /// Age of the oldest of those, in seconds, by the database's clock.
    pub oldest_seconds: f64,
}

/// A relay that cannot publish.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SinkDown {
    /// The relay.
    pub relay: String,
    /// For how long, in seconds, by the database's clock.
    pub since_seconds: f64,
    /// Why.
    pub error: String,
}

/// The state of one route.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RouteStatus {
    /// Name of the route.
    pub route: String,
    /// Messages of the outbox that the route has not settled.
    pub backlog: i64,
    /// Counting ended at its bound: there are at least so many.
    pub backlog_is_bound: bool,
    /// Age of the oldest message that is not settled and not parked, in seconds, by the database's clock.
    pub oldest_unsent_seconds: Option<f64>,
    /// Age of the oldest row of the outbox, of whatever topic, that the route has not read, in seconds. Where counting was cut before
    /// it found a message of the route, none is older than this.
    pub oldest_unread_seconds: Option<f64>,
    /// Messages that wait for a retry, for their time, or behind another of their key.
    pub parked: i64,
    /// There are at least so many.
    pub parked_is_bound: bool,
    /// Of those, delayed messages that are not due.
    pub scheduled: i64,
    /// There are at least so many.
    pub scheduled_is_bound: bool,
    /// Dead letters.
    pub dead: i64,
    /// There are at least so many.
    pub dead_is_bound: bool,
    /// Lanes of the route, and how many are held under a valid lease.
    pub lanes: i64,
    /// See `lanes`.
    pub lanes_held: i64,
    /// Relays that hold lanes.
    pub relays: Vec<String>,
    /// Of those that said lately that they are alive, the ones whose sink is down.
    pub sinks_down: Vec<SinkDown>,
}
