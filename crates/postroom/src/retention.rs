//! How long a store keeps what is finished.

use std::time::Duration;

use serde::Serialize;

use crate::topics::TopicFilter;

/// How long a store keeps what is finished; none: for ever. What is not finished is kept whatever its age: messages that a route has not
/// passed or that no route takes, parked messages, dead letters that block their key.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Retention {
    /// Messages of the outbox that every route has finished with, by `occurred_at`; at least a minute.
    pub outbox: Option<Duration>,
    /// The same for these topics, the first that fits.
    pub topics: Vec<TopicRetention>,
    /// Dead letters of both sides, since they died; at least a day.
    pub dead: Option<Duration>,
    /// Inbox rows, since they were processed; at least the redelivery horizon of the store's settings (14 days unless it was
    /// changed).
    pub inbox: Option<Duration>,
    /// Audit rows; at least 30 days.
    pub audit: Option<Duration>,
}

/// How long messages of some topics are kept.
#[derive(Debug, Clone, PartialEq)]
pub struct TopicRetention {
    /// The topics.
    pub topics: TopicFilter,
    /// How long; none: for ever.
    pub outbox: Option<Duration>,
}

impl Retention {
    /// The shortest time for which messages of these topics are kept; none: for ever.
    pub fn shortest_of(&self, topics: &TopicFilter) -> Option<Duration> {
        let of_pattern = |pattern: &String| -> Vec<Option<Duration>> {
            if !pattern.ends_with('*') {
                let first = self.topics.iter().find(|entry| entry.topics.takes(pattern));
                return vec![first.map_or(self.outbox, |entry| entry.outbox)];
            }
            // Any of these topics may be among the messages.
            let begins = pattern.trim_end_matches('*');
            let meets = |other: &String| match other.strip_suffix('*') {
                Some(prefix) => prefix.starts_with(begins) || begins.starts_with(prefix),
                None => other.starts_with(begins),
            };
            let entries = self.topics.iter().filter(|entry| entry.topics.patterns().iter().any(meets));
            entries.map(|entry| entry.outbox).chain([self.outbox]).collect()
        };
        topics.patterns().iter().flat_map(of_pattern).flatten().min()
    }

    /// What can expire.
    pub fn parts(&self) -> Vec<Part> {
        let outbox = self.outbox.is_some() || self.topics.iter().any(|topics| topics.outbox.is_some());
        let asked = [
            (outbox, Part::Outbox),
            (self.dead.is_some(), Part::Dead),
            (self.inbox.is_some(), Part::Inbox),
            (self.audit.is_some(), Part::Audit),
        ];
        asked.into_iter().filter(|(asked, _)| *asked).map(|(_, part)| part).collect()
    }
}

/// What expires by an age of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Messages of the outbox.
    Outbox,
    /// Dead letters of both sides.
    Dead,
    /// Inbox rows.
    Inbox,
    /// Audit rows.
    Audit,
}

/// How far one pass over a store has come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sweep {
    /// What is left, in this order.
    pub parts: Vec<Part>,
    /// Of the outbox: the lane, and the last seq that was looked at.
    pub lane: i16,
    /// See `lane`.
    pub after: i64,
}

impl Sweep {
    /// A pass from the beginning.
    pub fn begin(retention: &Retention) -> Self {
        Self { parts: retention.parts(), lane: 0, after: 0 }
    }

    /// Nothing is left to look at.
    pub fn is_over(&self) -> bool {
        self.parts.is_empty()
    }

    /// This part is done.
    pub fn next_part(&mut self) {
        if !self.parts.is_empty() {
            self.parts.remove(0);
        }
    }
}

/// How many rows were removed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Removed {
    /// Messages of the outbox.
    pub outbox: u64,
    /// Dead letters of both sides.
    pub dead: u64,
    /// Inbox rows.
    pub inbox: u64,
    /// Audit rows.
    pub audit: u64,
}

impl std::ops::AddAssign for Removed {
    fn add_assign(&mut self, more: Self) {
        self.outbox += more.outbox;
        self.dead += more.dead;
        self.inbox += more.inbox;
        self.audit += more.audit;
    }
}

impl Removed {
    /// Adds some of one part.
    pub fn add(&mut self, part: Part, rows: u64) {
        let count = match part {
            Part::Outbox => &mut self.outbox,
            Part::Dead => &mut self.dead,
            Part::Inbox => &mut self.inbox,
            Part::Audit => &mut self.audit,
        };
        *count += rows;
    }

    /// All of them.
    pub fn total(&self) -> u64 {
        self.outbox + self.dead + self.inbox + self.audit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comparison_is_bounded_by_the_retention_of_its_own_topics() {
        let hours = |hours: u64| Duration::from_secs(hours * 3600);
        let entry = |topic: &str, outbox| TopicRetention { topics: TopicFilter::new([topic]).unwrap(), outbox };
        let topics = vec![entry("orders", Some(hours(30))), entry("metrics.*", Some(hours(2))), entry("kept", None)];
        let retention = Retention { outbox: Some(hours(90)), topics, ..Retention::default() };
        for (patterns, shortest) in [
            (&["orders"][..], Some(hours(30))),
            (&["kept"], None),
            (&["others"], Some(hours(90))),
            (&["orders", "metrics.cpu"], Some(hours(2))),
            (&["metrics.cpu.*"], Some(hours(2))),
            (&["m*"], Some(hours(2))),
            (&["k*"], Some(hours(90))),
            (&["*"], Some(hours(2))),
        ] {
            let filter = TopicFilter::new(patterns.iter().copied()).unwrap();
            assert_eq!(retention.shortest_of(&filter), shortest, "{patterns:?}");
        }
    }
}
