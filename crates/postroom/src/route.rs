//! What a route is, apart from the relay that carries it out.

use serde::Serialize;

use crate::order::{OnDead, Order};
use crate::topics::TopicFilter;

/// A route's settings, kept in the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteSettings {
    /// Which topics it takes.
    pub topics: TopicFilter,
    /// Order within a key; none: not decided yet.
    pub order: Option<Order>,
    /// What becomes of a key whose message is dead; none: not decided yet.
    pub on_dead: Option<OnDead>,
}

impl RouteSettings {
    /// What the route is after a relay was started with `given`: topics are added, order and on_dead become as strict as the
    /// stricter of both. So a relay with an older configuration can neither drop messages nor loosen a promise.
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

/// What an operator changes of a route; what is none stays.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RouteChange {
    /// Which topics it takes.
    pub topics: Option<TopicFilter>,
    /// Order within a key.
    pub order: Option<Order>,
    /// What becomes of a key whose message is dead.
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
    /// Order within a key; none: no relay of this version ran it yet.
    pub order: Option<&'static str>,
    /// What becomes of a key whose message is dead; none: likewise.
    pub on_dead: Option<&'static str>,
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
            order: settings.order.map(|order| order.as_str()),
            on_dead: settings.on_dead.map(|on_dead| on_dead.as_str()),
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
