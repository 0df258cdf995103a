//! Pure: dead letters as incidents. Letters that died of the same thing are one group.

use std::collections::HashMap;

use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::dead_letter::{DeadCursor, Side};
use crate::delivery::Cause;

/// So much of an error counts: what comes later is rarely what it is about.
const ERROR_CHARS: usize = 300;
/// Names of messages that a group shows.
const SAMPLES: usize = 3;

/// What a dead letter died of, without anything else of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Headline {
    /// Route, or consumer.
    pub route: String,
    /// Its place among the dead letters of the route.
    pub seq: i64,
    /// Message id.
    pub id: String,
    /// Type.
    pub kind: String,
    /// Why it is dead.
    pub cause: Cause,
    /// The last error.
    pub error: String,
    /// How long ago it died, in seconds, by the database's clock.
    pub died_seconds_ago: f64,
}

impl Headline {
    /// Where its letter is.
    pub fn cursor(&self) -> DeadCursor {
        DeadCursor { route: self.route.clone(), seq: self.seq, id: self.id.clone() }
    }
}

/// Dead letters of one route or consumer that died of the same thing.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DeadGroup {
    /// Its name: the same as long as side, route, type, cause and the error without its changing parts are the same.
    pub group: String,
    /// Route, or consumer.
    pub route: String,
    /// Type of the messages.
    #[serde(rename = "type")]
    pub kind: String,
    /// Why they are dead.
    pub cause: Cause,
    /// The error, with `#` for numbers and ids and `…` for what is in quotes.
    pub error: String,
    /// How many.
    pub messages: u64,
    /// How long ago the first and the last of them died, in seconds.
    pub first_seconds_ago: f64,
    /// See `first_seconds_ago`.
    pub last_seconds_ago: f64,
    /// Of those, died within the last hour, and in the hour before it: the trend.
    pub last_hour: u64,
    /// See `last_hour`.
    pub hour_before: u64,
    /// Ids of a few of them.
    pub samples: Vec<String>,
    /// What people wrote about the group, newest first.
    pub notes: Vec<DeadNote>,
}

/// What somebody wrote about a group.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DeadNote {
    /// When, by the database's clock, in seconds ago.
    pub seconds_ago: f64,
    /// Who.
    pub actor: String,
    /// What.
    pub note: String,
}

/// An error without what differs from message to message: numbers, ids, and what is in quotes.
pub fn normal_error(error: &str) -> String {
    let mut normal = String::with_capacity(error.len().min(ERROR_CHARS));
    let mut chars = error.chars().take(ERROR_CHARS).peekable();
    let mut quote: Option<char> = None;
    let mut word = String::new();
    let end_word = |word: &mut String, normal: &mut String| {
        // A word with a digit is a number, an id or a name made from one.
        if word.chars().any(|c| c.is_ascii_digit()) {
            normal.push('#');
        } else {
            normal.push_str(word);
        }
        word.clear();
    };
    while let Some(c) = chars.next() {
        if let Some(open) = quote {
            if c == open {
                quote = None;
                normal.push(c);
            }
            continue;
        }
        if c.is_alphanumeric() || c == '-' || c == '_' {
            word.push(c);
            continue;
        }
        let before = word.chars().last();
        end_word(&mut word, &mut normal);
        let apostrophe = c == '\'' && before.is_some() && chars.peek().is_some_and(|next| next.is_alphanumeric());
        if matches!(c, '"' | '\'' | '`') && !apostrophe {
            quote = Some(c);
            normal.push(c);
            normal.push('…');
        } else if c.is_whitespace() {
            if !normal.ends_with(' ') {
                normal.push(' ');
            }
        } else {
            normal.push(c);
        }
    }
    end_word(&mut word, &mut normal);
    normal.trim().to_owned()
}

impl Headline {
    /// The name of its group.
    pub fn group(&self, side: Side) -> String {
        self.group_of(side, &normal_error(&self.error))
    }

    fn group_of(&self, side: Side, error: &str) -> String {
        let mut digest = Sha256::new();
        for part in [side.as_str(), &self.route, &self.kind, self.cause.as_str(), error] {
            digest.update((part.len() as u64).to_be_bytes());
            digest.update(part.as_bytes());
        }
        digest.finalize().iter().take(6).map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Groups headlines that arrive one after the other.
#[derive(Debug)]
pub struct Grouping {
    side: Side,
    groups: HashMap<String, DeadGroup>,
    /// More of them: the letters of others are counted only.
    others: u64,
}

/// Groups that are kept; letters of further ones are counted.
const GROUPS_MAX: usize = 1_000;

impl Grouping {
    /// No letter yet.
    pub fn new(side: Side) -> Self {
        Self { side, groups: HashMap::new(), others: 0 }
    }

    /// One more.
    pub fn add(&mut self, letter: &Headline) {
        const HOUR: f64 = 3600.0;
        let error = normal_error(&letter.error);
        let name = letter.group_of(self.side, &error);
        if self.groups.len() >= GROUPS_MAX && !self.groups.contains_key(&name) {
            self.others += 1;
            return;
        }
        let group = self.groups.entry(name.clone()).or_insert_with(|| DeadGroup {
            group: name,
            route: letter.route.clone(),
            kind: letter.kind.clone(),
            cause: letter.cause,
            error,
            messages: 0,
            first_seconds_ago: letter.died_seconds_ago,
            last_seconds_ago: letter.died_seconds_ago,
            last_hour: 0,
            hour_before: 0,
            samples: Vec::new(),
            notes: Vec::new(),
        });
        group.messages += 1;
        group.first_seconds_ago = group.first_seconds_ago.max(letter.died_seconds_ago);
        group.last_seconds_ago = group.last_seconds_ago.min(letter.died_seconds_ago);
        group.last_hour += u64::from(letter.died_seconds_ago < HOUR);
        group.hour_before += u64::from((HOUR..2.0 * HOUR).contains(&letter.died_seconds_ago));
        if group.samples.len() < SAMPLES {
            group.samples.push(letter.id.clone());
        }
    }

    /// The groups, largest first, and how many letters are of groups that are not among them.
    pub fn end(self) -> (Vec<DeadGroup>, u64) {
        let mut groups: Vec<DeadGroup> = self.groups.into_values().collect();
        groups.sort_by(|a, b| b.messages.cmp(&a.messages).then_with(|| a.group.cmp(&b.group)));
        (groups, self.others)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_from_message_to_message_is_left_out() {
        for (error, normal) in [
            ("order 4711 is unknown", "order # is unknown"),
            ("order 0199c9a2-7d2e-7bd0-a8d2-0b6d9c1c9a01 is unknown", "order # is unknown"),
            ("no such customer \"Ann O'Neil\" (id c-17)", "no such customer \"…\" (id #)"),
            ("column 'name' can't be null", "column '…' can't be null"),
            ("  timeout\n after 3.5 s ", "timeout after #.# s"),
            ("", ""),
        ] {
            assert_eq!(normal_error(error), normal);
        }
        assert_eq!(normal_error(&"x ".repeat(10_000)).len(), 299, "a long one is cut");
    }

    #[test]
    fn letters_that_died_of_the_same_thing_are_one_group() {
        let letter = |id: &str, kind: &str, error: &str, ago: f64| Headline {
            route: "orders".to_owned(),
            seq: 1,
            id: id.to_owned(),
            kind: kind.to_owned(),
            cause: Cause::Permanent,
            error: error.to_owned(),
            died_seconds_ago: ago,
        };
        let mut grouping = Grouping::new(Side::Out);
        grouping.add(&letter("a", "order.placed", "order 1 is unknown", 7000.0));
        grouping.add(&letter("b", "order.placed", "order 2 is unknown", 60.0));
        grouping.add(&letter("c", "order.paid", "order 2 is unknown", 60.0));
        let other_side = letter("a", "order.placed", "order 1 is unknown", 0.0).group(Side::In);
        let (groups, others) = grouping.end();
        assert_eq!((groups.len(), others), (2, 0));
        let first = &groups[0];
        assert_eq!((first.messages, first.last_hour, first.hour_before), (2, 1, 1));
        assert_eq!((first.first_seconds_ago, first.last_seconds_ago), (7000.0, 60.0));
        assert_eq!(
            (first.error.as_str(), first.samples.as_slice()),
            ("order # is unknown", &["a".to_owned(), "b".to_owned()][..])
        );
        assert!(groups.iter().all(|group| group.group.len() == 12 && group.group != other_side));
    }
}
