//! Pure: the judge of histories. It compares what writers noted in their own transactions with what the broker stored and
//! what handlers did, and never asks the code under test.

use std::collections::{HashMap, HashSet};
use std::fmt;

/// A message as its writer noted it in the business transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Committed {
    /// Message id.
    pub id: String,
    /// Key within which order holds.
    pub key: String,
    /// 1, 2, 3, … within the key.
    pub number: i64,
}

/// All that is known about a run.
#[derive(Debug, Clone, Default)]
pub struct History {
    /// What writers committed.
    pub committed: Vec<Committed>,
    /// Ids in the order in which the broker stored them, repeated ones as often as they were.
    pub stored: Vec<String>,
    /// Ids that wait in the outbox or parked.
    pub pending: Vec<String>,
    /// Ids among the dead letters.
    pub dead: Vec<String>,
    /// Effects by id; none where the run had no consumer.
    pub effects: Option<HashMap<String, i64>>,
    /// Most repeated deliveries that the faults of the run explain.
    pub duplicates_max: usize,
}

/// A broken invariant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// Its id in `docs/invariants.md`.
    pub invariant: &'static str,
    /// What was found.
    pub found: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.invariant, self.found)
    }
}

/// Every violation in the history; none is the only good answer.
pub fn judge(history: &History) -> Vec<Violation> {
    let mut violations = Vec::new();
    let mut violated = |invariant, found: String| violations.push(Violation { invariant, found });
    let committed: HashMap<&str, &Committed> =
        history.committed.iter().map(|message| (message.id.as_str(), message)).collect();
    let stored: HashSet<&str> = history.stored.iter().map(String::as_str).collect();
    let pending: HashSet<&str> = history.pending.iter().map(String::as_str).collect();
    let dead: HashSet<&str> = history.dead.iter().map(String::as_str).collect();

    let lost: Vec<&str> = committed
        .keys()
        .filter(|id| !stored.contains(*id) && !pending.contains(*id) && !dead.contains(*id))
        .copied()
        .collect();
    if let Some(first) = lost.first() {
        violated("I1", format!("{} committed messages are nowhere, among them {first}", lost.len()));
    }
    let ghosts = stored.iter().filter(|id| !committed.contains_key(*id)).count();
    if ghosts > 0 {
        violated("I2", format!("{ghosts} messages at the broker were never committed"));
    }
    let duplicates = history.stored.len() - stored.len();
    if duplicates > history.duplicates_max {
        violated("I3", format!("{duplicates} duplicates, the faults explain {}", history.duplicates_max));
    }
    let mut seen = HashSet::new();
    let mut newest: HashMap<&str, i64> = HashMap::new();
    let mut inversions = 0;
    for id in &history.stored {
        let Some(message) = committed.get(id.as_str()) else { continue };
        if !seen.insert(id.as_str()) {
            continue;
        }
        let newest = newest.entry(&message.key).or_default();
        if message.number < *newest {
            inversions += 1;
        }
        *newest = message.number.max(*newest);
    }
    if inversions > 0 {
        violated("I4", format!("{inversions} first occurrences came after a later one of their key"));
    }
    if let Some(effects) = &history.effects {
        let repeated = effects.values().filter(|times| **times > 1).count();
        if repeated > 0 {
            violated("I5", format!("{repeated} messages had more than one effect"));
        }
        let missing = stored.iter().filter(|id| committed.contains_key(*id) && !effects.contains_key(**id)).count();
        if missing > 0 {
            violated("I5", format!("{missing} stored messages had no effect"));
        }
        let from_nowhere = effects.keys().filter(|id| !committed.contains_key(id.as_str())).count();
        if from_nowhere > 0 {
            violated("I2", format!("{from_nowhere} effects have no committed message"));
        }
    }
    violations
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> History {
        let committed = [("a1", "a", 1), ("a2", "a", 2), ("b1", "b", 1)];
        History {
            committed: committed
                .iter()
                .map(|(id, key, number)| Committed { id: (*id).into(), key: (*key).into(), number: *number })
                .collect(),
            stored: vec!["a1".into(), "b1".into(), "a2".into()],
            effects: Some([("a1", 1), ("a2", 1), ("b1", 1)].map(|(id, times)| (id.to_owned(), times)).into()),
            ..History::default()
        }
    }

    fn verdict(history: History) -> Vec<&'static str> {
        judge(&history).into_iter().map(|violation| violation.invariant).collect()
    }

    #[test]
    fn a_good_history_passes() {
        assert_eq!(verdict(good()), Vec::<&str>::new());
    }

    #[test]
    fn a_lost_message_is_found() {
        let mut history = good();
        history.stored.pop();
        assert_eq!(verdict(history.clone()), ["I1"]);
        history.pending.push("a2".into());
        assert!(verdict(history).is_empty());
    }

    #[test]
    fn a_ghost_is_found() {
        let mut history = good();
        history.stored.push("x".into());
        assert!(verdict(history).contains(&"I2"));
    }

    #[test]
    fn unexplained_duplicates_are_found() {
        let mut history = good();
        history.stored.push("a1".into());
        assert_eq!(verdict(history.clone()), ["I3"]);
        history.duplicates_max = 1;
        assert!(verdict(history).is_empty());
    }

    #[test]
    fn an_inversion_is_found_and_a_late_duplicate_is_none() {
        let mut history = good();
        history.stored.swap(0, 2);
        assert_eq!(verdict(history), ["I4"]);
        let mut history = good();
        history.stored.push("a1".into());
        history.duplicates_max = 1;
        assert!(verdict(history).is_empty());
    }

    #[test]
    fn a_repeated_and_a_missing_effect_are_found() {
        let mut history = good();
        history.effects = Some([("a1", 2), ("b1", 1)].map(|(id, times)| (id.to_owned(), times)).into());
        assert_eq!(verdict(history), ["I5", "I5"]);
    }
}
