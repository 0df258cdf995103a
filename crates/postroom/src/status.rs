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
    /// One entry for each consumer that has an inbox in this database.
    pub inboxes: Vec<InboxStatus>,
    /// Topics that no route takes, most messages first, at most 20.
    pub unrouted: Vec<UnroutedTopic>,
    /// The newest result of each comparison of messages with effects, by name, at most 100.
    pub reconciled: Vec<ReconciledStatus>,
}

/// What a comparison found last.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ReconciledStatus {
    /// Its name.
    pub name: String,
    /// When it was made, in seconds before now.
    pub seconds_ago: f64,
    /// How often it is to be made, in seconds; none: not known.
    pub every_seconds: Option<f64>,
    /// Messages that consumers lack.
    pub missing: i64,
    /// Messages that consumers have and the outbox has not.
    pub strangers: i64,
    /// Days, tenants and types of which business changes and messages differ.
    pub days: i64,
    /// Changes of aggregates without a message.
    pub unwritten: i64,
    /// Messages that could not be compared, since their ids have no time in them.
    pub not_compared: i64,
    /// Sides (consumers, and the business query) that could not be compared at all.
    pub troubles: i64,
}

/// A topic that no route takes: its messages are not sent.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct UnroutedTopic {
    /// The topic.
    pub topic: String,
    /// Messages of it among the newest rows of the outbox; the store decides how many rows it reads.
    pub messages: i64,
    /// Age of the oldest of those, in seconds, by the database's clock.
    pub oldest_seconds: f64,
}

/// What a relay or a filler is connected to, and whether that works.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct LinkStatus {
    /// The sink of a relay or the source of a filler, without secrets; none: a version before 14 of the schema runs there.
    pub name: Option<String>,
    /// Why it does not work now; none: it works, as far as its process reported.
    pub trouble: Option<LinkTrouble>,
}

/// Why messages do not get through a link.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LinkTrouble {
    /// The link is up, but the other end accepts nothing for now, such as a broker with a memory alarm.
    pub blocked: bool,
    /// For how long, in seconds, by the database's clock.
    pub since_seconds: f64,
    /// The reason.
    pub error: String,
}

/// A process that works for a route or an inbox.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct WorkerStatus {
    /// Its whole name, unique among all.
    pub name: String,
    /// Its lease is valid by the database's clock. One whose lease has expired is listed only while it still owns something.
    pub alive: bool,
    /// Time since its last renewal, in seconds, by the database's clock; none: unknown.
    pub seen_seconds_ago: Option<f64>,
    /// Lanes that it owns; for an inbox 1 or 0.
    pub lanes: i64,
    /// What it publishes to or receives from.
    pub link: LinkStatus,
}

impl WorkerStatus {
    /// Its name without the part that only makes it unique: what was configured, or host and process id.
    pub fn short_name(&self) -> &str {
        let unique = |part: &str| part.len() == 36 && part.bytes().filter(|byte| *byte == b'-').count() == 4;
        let mut end = 0;
        for part in self.name.split('/') {
            if unique(part) {
                break;
            }
            end += part.len() + 1;
        }
        self.name.get(..end.saturating_sub(1)).filter(|short| !short.is_empty()).unwrap_or(&self.name)
    }
}

/// The state of one route.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RouteStatus {
    /// Name of the route.
    pub route: String,
    /// Messages that are neither sent nor dead: those not read yet and those parked, without delayed ones that are parked until
    /// their time.
    pub backlog: i64,
    /// Counting ended at its bound: there are at least so many.
    pub backlog_is_bound: bool,
    /// Age of the oldest message of the backlog among those looked at, in seconds, by the database's clock.
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
    /// Of the parked ones, messages that failed and will be tried again.
    pub retrying: i64,
    /// There are at least so many.
    pub retrying_is_bound: bool,
    /// The last error of one of those, of the one that is tried again last.
    pub last_failure: Option<String>,
    /// Dead letters.
    pub dead: i64,
    /// There are at least so many.
    pub dead_is_bound: bool,
    /// Lanes of the route, and how many are held under a valid lease.
    pub lanes: i64,
    /// See `lanes`.
    pub lanes_held: i64,
    /// Relays that are alive, and those that still own lanes although their lease has expired.
    pub relays: Vec<WorkerStatus>,
}

/// The state of one consumer's inbox.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct InboxStatus {
    /// The consumer.
    pub consumer: String,
    /// Messages kept in the store that are neither handled nor dead.
    pub waiting: i64,
    /// Of those, messages that failed at least once and will be tried again.
    pub retrying: i64,
    /// Counting ended at its bound: there are at least so many.
    pub waiting_is_bound: bool,
    /// The last error of one of those, of the one that is tried again last.
    pub last_failure: Option<String>,
    /// Age of the oldest waiting message among those looked at, since it was received, in seconds, by the database's clock.
    pub oldest_seconds: Option<f64>,
    /// Dead letters.
    pub dead: i64,
    /// There are at least so many.
    pub dead_is_bound: bool,
    /// Who fills the inbox table from a queue; none: nobody, as when the application receives by itself.
    pub filler: Option<WorkerStatus>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_name_is_what_a_person_gave() {
        let of = |name: &str| {
            let link = LinkStatus::default();
            WorkerStatus { name: name.to_owned(), alive: true, seen_seconds_ago: None, lanes: 0, link }
                .short_name()
                .to_owned()
        };
        let unique = "0199c9a2-7d2e-7bd0-a8d2-0b6d9c1c9a01";
        assert_eq!(of(&format!("relay-a/{unique}")), "relay-a");
        assert_eq!(of(&format!("host/4711/{unique}/2")), "host/4711");
        assert_eq!((of("relay"), of(unique)), ("relay".to_owned(), unique.to_owned()));
    }
}
