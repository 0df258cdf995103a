//! What a route is, apart from the relay that carries it out.

use std::time::Duration;

use serde::Serialize;

use crate::order::{OnDead, Order, StartAt};
use crate::retry::RetryPolicy;
use crate::topics::TopicFilter;

/// A route as it is configured: one value for its source, its relay and the configuration file.
#[derive(Debug, Clone, PartialEq)]
pub struct Route {
    /// Its name; its positions are stored under it.
    pub name: String,
    /// Which topics it takes.
    pub topics: TopicFilter,
    /// Order within a key.
    pub order: Order,
    /// What happens to a key after a dead letter.
    pub on_dead: OnDead,
    /// Where it begins on its first run.
    pub start_at: StartAt,
    /// How long a relay keeps its lanes after its last renewal.
    pub lease: Duration,
    /// Most messages in a second; none: as many as the sink accepts.
    pub rate: Option<u32>,
    /// After this many rejections in a row, of any messages, publishing pauses for 1 s, then 2 s, up to 30 s, with one message
    /// tried between the pauses; 0, the default: never. For sinks with a single service behind them: with a broker, messages that
    /// no queue takes would delay all others.
    pub breaker_after: u32,
    /// When a failed message is tried again, and how often.
    pub retry: RetryPolicy,
}

impl Route {
    /// A route of all topics, in order, from the oldest message on, with a lease of 15 s.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            topics: TopicFilter::all(),
            order: Order::default(),
            on_dead: OnDead::default(),
            start_at: StartAt::default(),
            lease: Duration::from_secs(15),
            rate: None,
            breaker_after: 0,
            retry: RetryPolicy::default(),
        }
    }

    /// The settings that the store keeps.
    pub fn settings(&self) -> RouteSettings {
        RouteSettings { topics: self.topics.clone(), order: Some(self.order), on_dead: Some(self.on_dead) }
    }
}

/// A route's settings, kept in the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteSettings {
    /// Which topics it takes.
    pub topics: TopicFilter,
    /// Order within a key; none: not decided yet.
    pub order: Option<Order>,
    /// What happens to a key after a dead letter; none: not decided yet.
    pub on_dead: Option<OnDead>,
}

impl RouteSettings {
    /// The settings after a relay was started with `given`: topics are added, and order and on_dead become the stricter of
    /// both. So a relay with an older configuration can neither drop messages nor weaken a guarantee.
    pub fn with(&self, given: &Self) -> Self {
        let mut patterns = self.topics.patterns().to_vec();
        if !patterns.iter().any(|pattern| pattern == "*") {
            patterns.extend(
                given.topics.patterns().iter().filter(|pattern| !self.topics.patterns().contains(pattern)).cloned(),
            );
        }
        let order = match (self.order, given.order) {
            (None, order) | (order, None) => order,
            (Some(Order::Key), _) | (_, Some(Order::Key)) => Some(Order::Key),
            (Some(Order::Pipelined), _) | (_, Some(Order::Pipelined)) => Some(Order::Pipelined),
            (Some(Order::None), Some(Order::None)) => Some(Order::None),
        };
        let on_dead = match (self.on_dead, given.on_dead) {
            (None, on_dead) | (on_dead, None) => on_dead,
            (Some(OnDead::Skip), Some(OnDead::Skip)) => Some(OnDead::Skip),
            (Some(OnDead::Block), _) | (_, Some(OnDead::Block)) => Some(OnDead::Block),
        };
        // Both were filters, so this one is.
        let topics = TopicFilter::new(patterns).unwrap_or_else(|_| self.topics.clone());
        Self { topics, order, on_dead }
    }
}

/// What an operator changes of a route; what is none stays unchanged.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RouteChange {
    /// Which topics it takes.
    pub topics: Option<TopicFilter>,
    /// Order within a key.
    pub order: Option<Order>,
    /// What happens to a key after a dead letter.
    pub on_dead: Option<OnDead>,
}

impl RouteChange {
    /// The settings after the change.
    pub fn of(&self, before: &RouteSettings) -> RouteSettings {
        RouteSettings {
            topics: self.topics.clone().unwrap_or_else(|| before.topics.clone()),
            order: self.order.or(before.order),
            on_dead: self.on_dead.or(before.on_dead),
        }
    }
}

/// A route as an operator sees it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ShownRoute {
    /// Its name.
    pub route: String,
    /// Patterns of the topics that it takes.
    pub topics: Vec<String>,
    /// Order within a key; none: no relay of this version has run it yet.
    pub order: Option<Order>,
    /// What happens to a key after a dead letter; none: no relay of this version has run it yet.
    pub on_dead: Option<OnDead>,
    /// Counts the changes.
    pub revision: i64,
    /// Who changed it last: a relay that started, or a person.
    pub set_by: String,
    /// How long ago that was, in seconds, by the database's clock.
    pub set_seconds_ago: f64,
}

impl ShownRoute {
    /// What is shown of a route with these settings.
    pub fn new(
        route: String,
        settings: &RouteSettings,
        (revision, set_by, set_seconds_ago): (i64, String, f64),
    ) -> Self {
        Self {
            route,
            topics: settings.topics.patterns().to_vec(),
            order: settings.order,
            on_dead: settings.on_dead,
            revision,
            set_by,
            set_seconds_ago,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(topics: &[&str], order: Order, on_dead: OnDead) -> RouteSettings {
        let topics = TopicFilter::new(topics.iter().copied()).unwrap();
        RouteSettings { topics, order: Some(order), on_dead: Some(on_dead) }
    }

    #[test]
    fn a_start_adds_topics_and_never_loosens() {
        let known = settings(&["orders"], Order::Pipelined, OnDead::Skip);
        let wider = known.with(&settings(&["orders", "billing"], Order::Key, OnDead::Block));
        assert_eq!(wider, settings(&["orders", "billing"], Order::Key, OnDead::Block));
        assert_eq!(wider.with(&settings(&["orders"], Order::None, OnDead::Skip)), wider);
        let all = settings(&["*"], Order::None, OnDead::Skip);
        assert_eq!(all.with(&settings(&["orders"], Order::None, OnDead::Skip)), all);
    }
}
