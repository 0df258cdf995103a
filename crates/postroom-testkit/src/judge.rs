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

/// A line of a file that a sink appended to, as an independent reader of JSON understands it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Line {
    /// A whole object with this message id.
    Message(String),
    /// Ended by a newline, but not a whole object with an id.
    Broken,
    /// The end of the file without a newline, and not a whole object.
    Torn,
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
    /// Lines of the files that everything was written to as well, oldest file first; none where the run had no such sink.
    ///
    /// All files but the last were rotated away.
    pub files: Option<Vec<Vec<Line>>>,
    /// Ids in the inbox table in the order of its sequence; none where nobody filled one.
    pub kept: Option<Vec<String>>,
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
    let inversions = inversions(history.stored.iter().map(String::as_str), &committed);
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
    if let Some(files) = &history.files {
        violations.extend(judge_files(files, &committed, history.duplicates_max));
    }
    if let Some(kept) = &history.kept {
        violations.extend(judge_kept(kept, &committed));
    }
    violations
}

/// What a file sink promises: every message is there as a whole line, in order within its key.
fn judge_files(files: &[Vec<Line>], committed: &HashMap<&str, &Committed>, duplicates_max: usize) -> Vec<Violation> {
    let mut violations = Vec::new();
    let mut violated = |invariant, found: String| violations.push(Violation { invariant, found });
    for (place, file) in files.iter().enumerate() {
        let broken = file.iter().filter(|line| **line == Line::Broken).count();
        if broken > 0 {
            violated("I29", format!("{broken} lines of file {} of {} are not whole", place + 1, files.len()));
        }
    }
    // A relay that dies within a write leaves a torn end, and the next write cuts it off. After a rotation no write comes.
    if files.last().is_some_and(|last| last.contains(&Line::Torn)) {
        violated("I29", "the newest file ends with a torn line".to_owned());
    }
    let written: Vec<&str> = files
        .iter()
        .flatten()
        .filter_map(|line| match line {
            Line::Message(id) => Some(id.as_str()),
            Line::Broken | Line::Torn => None,
        })
        .collect();
    let distinct: HashSet<&str> = written.iter().copied().collect();
    let lost: Vec<&&str> = committed.keys().filter(|id| !distinct.contains(*id)).collect();
    if let Some(first) = lost.first() {
        violated("I1", format!("{} committed messages are in no file, among them {first}", lost.len()));
    }
    let ghosts = distinct.iter().filter(|id| !committed.contains_key(*id)).count();
    if ghosts > 0 {
        violated("I2", format!("{ghosts} messages in the files were never committed"));
    }
    let duplicates = written.len() - distinct.len();
    if duplicates > duplicates_max {
        violated("I3", format!("{duplicates} duplicates in the files, the faults explain {duplicates_max}"));
    }
    let inversions = inversions(written.into_iter(), committed);
    if inversions > 0 {
        violated("I4", format!("{inversions} first occurrences in the files came after a later one of their key"));
    }
    violations
}

/// What an inbox table promises: every message once, in order within its key.
fn judge_kept(kept: &[String], committed: &HashMap<&str, &Committed>) -> Vec<Violation> {
    let mut violations = Vec::new();
    let mut violated = |invariant, found: String| violations.push(Violation { invariant, found });
    let distinct: HashSet<&str> = kept.iter().map(String::as_str).collect();
    let lost: Vec<&&str> = committed.keys().filter(|id| !distinct.contains(*id)).collect();
    if let Some(first) = lost.first() {
        violated("I1", format!("{} committed messages are not in the inbox table, among them {first}", lost.len()));
    }
    let ghosts = distinct.iter().filter(|id| !committed.contains_key(*id)).count();
    if ghosts > 0 {
        violated("I2", format!("{ghosts} messages in the inbox table were never committed"));
    }
    let repeated = kept.len() - distinct.len();
    if repeated > 0 {
        violated("I5", format!("{repeated} messages are in the inbox table more than once"));
    }
    let inversions = inversions(kept.iter().map(String::as_str), committed);
    if inversions > 0 {
        violated("I4", format!("{inversions} messages in the inbox table came after a later one of their key"));
    }
    violations
}

/// How many first occurrences came after a later message of their key.
fn inversions<'a>(ids: impl Iterator<Item = &'a str>, committed: &HashMap<&str, &'a Committed>) -> usize {
    let mut seen = HashSet::new();
    let mut newest: HashMap<&str, i64> = HashMap::new();
    let mut inversions = 0;
    for id in ids {
        let Some(message) = committed.get(id) else { continue };
        if !seen.insert(id) {
            continue;
        }
        let newest = newest.entry(&message.key).or_default();
        if message.number < *newest {
            inversions += 1;
        }
        *newest = message.number.max(*newest);
    }
    inversions
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
            files: Some(vec![vec![line("a1"), Line::Torn], vec![line("b1"), line("a2")]]),
            kept: Some(vec!["a1".into(), "a2".into(), "b1".into()]),
            ..History::default()
        }
    }

    fn line(id: &str) -> Line {
        Line::Message(id.to_owned())
    }

    fn with_files(files: Vec<Vec<Line>>) -> History {
        History { files: Some(files), ..good() }
    }

    fn with_kept(ids: &[&str]) -> History {
        History { kept: Some(ids.iter().map(|id| (*id).to_owned()).collect()), ..good() }
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

    #[test]
    fn a_lost_line_and_one_from_nowhere_are_found() {
        assert_eq!(verdict(with_files(vec![vec![line("a1"), line("b1")]])), ["I1"]);
        assert_eq!(verdict(with_files(vec![])), ["I1"]);
        assert_eq!(verdict(with_files(vec![vec![line("a1"), line("a2"), line("b1"), line("x")]])), ["I2"]);
    }

    #[test]
    fn a_broken_line_is_found_and_so_is_a_torn_one_unless_its_file_was_rotated_away() {
        let whole = || vec![line("a1"), line("a2"), line("b1")];
        assert!(verdict(with_files(vec![vec![Line::Torn], whole()])).is_empty());
        assert_eq!(verdict(with_files(vec![vec![Line::Broken], whole()])), ["I29"]);
        assert_eq!(verdict(with_files(vec![[whole(), vec![Line::Broken]].concat()])), ["I29"]);
        assert_eq!(verdict(with_files(vec![[whole(), vec![Line::Torn]].concat()])), ["I29"]);
        assert_eq!(verdict(with_files(vec![vec![line("a1"), line("a2"), Line::Torn]])), ["I29", "I1"]);
    }

    #[test]
    fn an_inversion_in_the_files_and_unexplained_duplicates_are_found() {
        assert_eq!(verdict(with_files(vec![vec![line("a2")], vec![line("a1"), line("b1")]])), ["I4"]);
        let mut history = with_files(vec![vec![line("a1"), line("a2")], vec![line("a1"), line("b1")]]);
        assert_eq!(verdict(history.clone()), ["I3"]);
        history.duplicates_max = 1;
        assert!(verdict(history).is_empty());
    }

    #[test]
    fn an_inbox_table_that_lacks_repeats_or_inverts_messages_is_found() {
        assert_eq!(verdict(with_kept(&["a1", "b1"])), ["I1"]);
        assert_eq!(verdict(with_kept(&["a1", "a2", "b1", "x"])), ["I2"]);
        assert_eq!(verdict(with_kept(&["a1", "a2", "b1", "a1"])), ["I5"]);
        assert_eq!(verdict(with_kept(&["a2", "b1", "a1"])), ["I4"]);
    }
}
