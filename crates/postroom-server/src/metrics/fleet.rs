//! Many stores as one: how they stand, and the sum of what was seen in each of them last.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use postroom::RouteStatus;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::registry::Unit;

use super::labels::{Values, gauge, named};
use crate::fleet::{StandingWord, StoreStanding};

/// So many stores are shown by name: more would be more time series than anybody asked for.
const NAMES_MAX: usize = 100;
/// What was seen in a store longer ago is not counted.
const STALE_AFTER: Duration = Duration::from_secs(600);

#[derive(Debug, Default)]
struct Known {
    standing: Vec<StoreStanding>,
    left_out: Vec<String>,
    seen: HashMap<Arc<str>, (Instant, Vec<RouteStatus>)>,
}

/// What is known of many stores; clones share it.
#[derive(Debug, Clone, Default)]
pub struct FleetShown(Arc<Mutex<Known>>);

#[derive(Default)]
struct Sum {
    backlog: i64,
    is_bound: bool,
    oldest: f64,
    dead: i64,
}

impl FleetShown {
    /// Nothing is known yet.
    pub fn new() -> Self {
        Self::default()
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How all of them stand.
    pub fn set(&self, standing: Vec<StoreStanding>) {
        let mut known = self.known();
        known.seen.retain(|store, _| standing.binary_search_by(|one| one.store.cmp(store)).is_ok());
        known.standing = standing;
    }

    /// Databases that cannot be worked at as they are named, in words.
    pub fn set_left_out(&self, left_out: Vec<String>) {
        self.known().left_out = left_out;
    }

    /// Databases that cannot be worked at as they are named, in words.
    pub fn left_out(&self) -> Vec<String> {
        self.known().left_out.clone()
    }

    /// How all of them stood last.
    pub fn standing(&self) -> Vec<StoreStanding> {
        self.known().standing.clone()
    }

    /// What was seen in one.
    pub fn seen(&self, store: &Arc<str>, routes: Vec<RouteStatus>) {
        self.known().seen.insert(store.clone(), (Instant::now(), routes));
    }
}

impl Collector for FleetShown {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let e = &mut encoder;
        let known = self.known();
        let of_state = |word: StandingWord| {
            let count = known.standing.iter().filter(|one| one.state == word).count();
            (vec![("state", word.as_str().to_owned())], count as f64)
        };
        let states = StandingWord::ALL.into_iter().map(of_state).collect();
        gauge(e, "stores", None, "Stores by state: working, waiting for a place, resting, down", &states)?;
        let left_out = vec![(Vec::new(), known.left_out.len() as f64)];
        let help = "Databases that were found and are left out, because of their names or URLs";
        gauge(e, "stores_left_out", None, help, &left_out)?;
        let down = |one: &&StoreStanding| one.state == StandingWord::Down;
        let few = known.standing.len() <= NAMES_MAX;
        let shown = known.standing.iter().filter(|one| few || down(one)).take(NAMES_MAX);
        let up: Values =
            shown.map(|one| (vec![("store", named(&one.store))], f64::from(u8::from(!down(&one))))).collect();
        let help = "1: the store was reached when it was looked at last; 0: it was not. Of more than 100 stores, only those that are down";
        gauge(e, "store_reached", None, help, &up)?;
        let mut sums: BTreeMap<&str, Sum> = BTreeMap::new();
        for (at, routes) in known.seen.values() {
            if at.elapsed() >= STALE_AFTER {
                continue;
            }
            for route in routes {
                let sum = sums.entry(&route.route).or_default();
                sum.backlog += route.backlog;
                sum.is_bound |= route.backlog_is_bound;
                let oldest = route.oldest_unsent_seconds.or(route.oldest_unread_seconds.filter(|_| route.backlog > 0));
                sum.oldest = sum.oldest.max(oldest.map_or(0.0, |seconds| seconds + at.elapsed().as_secs_f64()));
                sum.dead += route.dead;
            }
        }
        let of = |value: &dyn Fn(&Sum) -> f64| -> Values {
            sums.iter().map(|(route, sum)| (vec![("route", named(route))], value(sum))).collect()
        };
        let help = "Messages that are neither sent nor dead in all stores, as each was seen last";
        gauge(e, "backlog_messages", None, help, &of(&|sum| sum.backlog as f64))?;
        let help = "1: counting ended at its limit in a store, and the backlog is at least what is shown";
        gauge(e, "backlog_is_bound", None, help, &of(&|sum| f64::from(u8::from(sum.is_bound))))?;
        let help =
            "Age of the oldest message that was neither sent nor dead when its store was seen last; 0: there was none";
        gauge(e, "oldest_unfinished", Some(Unit::Seconds), help, &of(&|sum| sum.oldest))?;
        gauge(e, "dead_letters", None, "Dead letters of a route in all stores", &of(&|sum| sum.dead as f64))
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::registry::Registry;

    use super::*;

    fn standing(count: usize) -> Vec<StoreStanding> {
        let one = |n: usize| StoreStanding {
            store: format!("s{n:04}").into(),
            state: if n.is_multiple_of(10) { StandingWord::Down } else { StandingWord::Resting },
            why: None,
            since: None,
        };
        (0..count).map(one).collect()
    }

    fn text(shown: &FleetShown) -> String {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(shown.clone()));
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        text
    }

    #[test]
    fn many_stores_make_few_time_series() {
        let shown = FleetShown::new();
        shown.set(standing(50));
        assert_eq!(text(&shown).matches("store_reached{").count(), 50);
        shown.set(standing(5_000));
        let text = text(&shown);
        assert_eq!(text.matches("store_reached{").count(), 100);
        assert!(
            text.contains("stores{state=\"down\"} 500") && text.contains("stores{state=\"resting\"} 4500"),
            "{text}"
        );
    }
}
