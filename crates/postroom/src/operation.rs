//! Operations: something that is done to many messages, step by step, and that survives the death of whoever does it.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::dead_group::Headline;
use crate::dead_letter::Side;
use crate::message::MessageId;
use crate::words::words;

/// Names an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct OperationId(Uuid);

impl OperationId {
    /// A new one.
    #[allow(clippy::new_without_default, reason = "a new identity is not a default value")]
    pub fn new() -> Self {
        Self(MessageId::new().into())
    }

    /// As a UUID.
    pub fn as_uuid(&self) -> &Uuid {
        &self.0
    }
}

impl From<Uuid> for OperationId {
    fn from(id: Uuid) -> Self {
        Self(id)
    }
}

impl FromStr for OperationId {
    type Err = uuid::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Uuid::from_str(text).map(Self)
    }
}

impl fmt::Display for OperationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OperationKind {
    /// Messages that a route has finished with are sent once more, with the same ids.
    Replay,
    /// Dead letters are given back to their relay or consumer.
    Retry,
    /// Dead letters are deleted.
    Discard,
}

words!(OperationKind { Replay => "replay", Retry => "retry", Discard => "discard" });

/// How an operation stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OperationState {
    /// It goes on while a relay process runs.
    Running,
    /// Its canary is over; it goes on when somebody says so.
    Waiting,
    /// Somebody paused it.
    Paused,
    /// Everything has an outcome.
    Done,
    /// Somebody ended it; what was given out before goes its way.
    Cancelled,
}

words!(OperationState { Running => "running", Waiting => "waiting", Paused => "paused", Done => "done", Cancelled => "cancelled" });

/// Where replayed messages stand among those of their key that are not sent yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReplayPlace {
    /// In front of them: new messages of the key wait until the replayed ones are sent.
    #[default]
    Before,
    /// Behind those that wait in the store, also those that come to wait meanwhile.
    Behind,
}

words!(ReplayPlace { Before => "before", Behind => "behind" });

/// What somebody tells an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Steer {
    /// Give out nothing more for now.
    Pause,
    /// Go on, also after a canary.
    Resume,
    /// Give out nothing more, ever.
    Cancel,
}

words!(Steer { Pause => "pause", Resume => "resume", Cancel => "cancel" });

/// Which messages; they must match every condition that is given.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OperationFilter {
    /// One of these.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ids: Vec<MessageId>,
    /// That happened, or for dead letters died, at this time or later, in milliseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since_ms: Option<i64>,
    /// That happened, or died, before this time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until_ms: Option<i64>,
    /// Of this topic.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub topic: Option<String>,
    /// Of this type.
    #[serde(rename = "type", default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Of this key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Of this tenant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant_id: Option<String>,
    /// Of the aggregate with this id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub aggregate_id: Option<String>,
    /// Dead letters whose error contains this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Dead letters of this group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
}

impl OperationFilter {
    /// Whether it has no condition at all.
    pub fn is_everything(&self) -> bool {
        *self == Self::default()
    }
}

/// An operation that is about to begin.
#[derive(Debug, Clone, PartialEq)]
pub struct NewOperation {
    /// What is done.
    pub kind: OperationKind,
    /// To messages of which side; a replay is always of those that go out.
    pub side: Side,
    /// On this route, or at this consumer.
    pub route: String,
    /// To which messages.
    pub filter: OperationFilter,
    /// How many matched when it was looked at, for the report; none: nobody looked.
    pub planned: Option<u64>,
    /// So many first, and then it waits, or goes on if none of them failed.
    pub canary: Option<u32>,
    /// After a canary of which none failed it goes on without being told.
    pub goes_on: bool,
    /// At most so many messages a second.
    pub rate: Option<u32>,
    /// Where replayed messages stand.
    pub place: ReplayPlace,
    /// Replayed messages get new ids, so that no inbox recognises them.
    pub new_ids: bool,
}

/// One message that an operation may be about.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// What a dead letter died of; of a message in the outbox its error is empty.
    pub headline: Headline,
    /// Topic.
    pub topic: String,
    /// Key within which it is ordered.
    pub key: Option<String>,
    /// When it happened, or died, in milliseconds since 1970.
    pub at_ms: i64,
    /// The operation can do its work on it; a replay only works on what the route has finished with.
    pub ready: bool,
}

/// Candidates in their order, from a bounded number of rows.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Candidates {
    /// Those that match every condition that a store knows.
    pub found: Vec<Candidate>,
    /// Everything up to this seq was looked at.
    pub to_seq: i64,
    /// There is nothing behind it.
    pub all_read: bool,
}

impl Candidates {
    /// Leaves those of the filter's group, which no store knows.
    pub fn of_group(mut self, side: Side, filter: &OperationFilter) -> Self {
        if let Some(group) = &filter.group {
            self.found.retain(|candidate| candidate.headline.group(side) == *group);
        }
        self
    }

    /// At most so many of them; what is left out comes with the next look.
    pub fn at_most(mut self, count: usize) -> Self {
        if self.found.len() > count {
            self.found.truncate(count);
            self.all_read = false;
            if let Some(last) = self.found.last() {
                self.to_seq = last.headline.seq;
            }
        }
        self
    }
}

/// What an operation would do, as far as its messages were looked at.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Survey {
    /// Messages that match.
    pub matching: u64,
    /// Of those, messages that the operation would leave alone: not finished yet, or dead already.
    pub not_ready: u64,
    /// When the oldest and the newest of them happened, in milliseconds since 1970.
    pub oldest_ms: Option<i64>,
    /// See `oldest_ms`.
    pub newest_ms: Option<i64>,
    /// How many of each topic and type.
    pub by_type: BTreeMap<String, u64>,
    /// Ids of the first ones.
    pub samples: Vec<MessageId>,
    /// Keys among them that are parked or blocked, so that these messages would wait; at most 20.
    pub blocked_keys: Vec<String>,
    /// Of the first [`SAMPLED`](Self::SAMPLED), how many each consumer of this database has in its inbox: it would take them for
    /// duplicates, unless they get new ids.
    pub remembered_by: BTreeMap<String, u64>,
    /// How many were asked for `remembered_by`.
    pub asked: u64,
    /// How far it has come.
    #[serde(skip)]
    pub to_seq: i64,
    /// Everything was looked at.
    pub complete: bool,
}

impl Survey {
    /// Messages that are asked for whether inboxes remember them.
    pub const SAMPLED: usize = 10_000;
    const SHOWN: usize = 5;
    const TYPES: usize = 50;

    /// Adds what was found; returns the ids that inboxes are asked for, and the keys.
    pub fn add(&mut self, candidates: &Candidates) -> (Vec<MessageId>, Vec<String>) {
        let (mut ids, mut keys) = (Vec::new(), Vec::new());
        for candidate in &candidates.found {
            self.matching += 1;
            self.not_ready += u64::from(!candidate.ready);
            self.oldest_ms = Some(self.oldest_ms.map_or(candidate.at_ms, |at| at.min(candidate.at_ms)));
            self.newest_ms = Some(self.newest_ms.map_or(candidate.at_ms, |at| at.max(candidate.at_ms)));
            let of = format!("{} {}", candidate.topic, candidate.headline.kind);
            let of = if self.by_type.len() < Self::TYPES || self.by_type.contains_key(&of) {
                of
            } else {
                "others".to_owned()
            };
            *self.by_type.entry(of).or_default() += 1;
            let Ok(id) = candidate.headline.id.parse::<MessageId>() else { continue };
            if candidate.ready && self.samples.len() < Self::SHOWN {
                self.samples.push(id);
            }
            if (self.asked as usize) < Self::SAMPLED {
                self.asked += 1;
                ids.push(id);
            }
            keys.extend(candidate.key.clone());
        }
        self.to_seq = candidates.to_seq;
        self.complete = candidates.all_read;
        keys.sort_unstable();
        keys.dedup();
        (ids, keys)
    }
}

/// An operation as people see it: while it runs, its progress; at its end, its report.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ShownOperation {
    /// Its name.
    pub id: OperationId,
    /// What is done.
    pub kind: OperationKind,
    /// To messages of which side.
    pub side: Side,
    /// On which route, or at which consumer.
    pub route: String,
    /// To which messages.
    pub filter: OperationFilter,
    /// How it stands.
    pub state: OperationState,
    /// What it waits for.
    pub note: Option<String>,
    /// See [`NewOperation`].
    pub canary: Option<i64>,
    /// See [`NewOperation`].
    pub goes_on: bool,
    /// See [`NewOperation`].
    pub rate: Option<i64>,
    /// See [`NewOperation`].
    pub place: ReplayPlace,
    /// See [`NewOperation`].
    pub new_ids: bool,
    /// Messages that matched when it began; none: nobody looked.
    pub planned: Option<i64>,
    /// Messages that match and were looked at so far: given out or left alone.
    pub matched: i64,
    /// Matched when it began and were gone when it came to them, such as what retention deleted; known when everything was looked at.
    pub gone: i64,
    /// Of those, left alone: not finished yet, dead, or gone in the meantime.
    pub left_alone: i64,
    /// Given out; for a discard, deleted.
    pub given_out: i64,
    /// Published, handled or deleted: the relay or the consumer has recorded that.
    pub done: i64,
    /// Became dead letters, by cause.
    pub failed: BTreeMap<String, i64>,
    /// An operator removed them before they had an outcome.
    pub removed: i64,
    /// Given out, and without an outcome so far.
    pub pending: i64,
    /// Everything that matches was looked at.
    pub read_all: bool,
    /// Of everything that matched, the part that is done; none before everything was looked at.
    pub coverage: Option<f64>,
    /// How long ago it began, in seconds.
    pub began_seconds_ago: f64,
    /// How long it took, or takes so far, in seconds, pauses included.
    pub lasted_seconds: f64,
    /// Done per second since it began.
    pub per_second: f64,
    /// Who began it, and why.
    pub actor: String,
    /// See `actor`.
    pub reason: String,
}

impl ShownOperation {
    /// Fills in what follows from the other numbers.
    pub fn finished(mut self) -> Self {
        self.matched = self.given_out + self.left_alone;
        let meant = self.matched.max(self.planned.unwrap_or(0));
        self.gone = if self.read_all { meant - self.matched } else { 0 };
        self.coverage = self.read_all.then(|| if meant == 0 { 1.0 } else { self.done as f64 / meant as f64 });
        self.per_second = if self.lasted_seconds > 0.0 { self.done as f64 / self.lasted_seconds } else { 0.0 };
        self
    }
}

/// What became, at one consumer of this database, of the messages that an operation gave out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct OperationEffects {
    /// The consumer.
    pub consumer: String,
    /// Handled since the operation began.
    pub effects: i64,
    /// Handled before it: it took the repeated ones for duplicates.
    pub suppressed: i64,
    /// Received, and not handled yet.
    pub waiting: i64,
    /// Among the consumer's dead letters.
    pub dead: i64,
    /// None of these: not received yet, not for this consumer, or forgotten by its inbox.
    pub missing: i64,
}

/// What a step of all operations did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stepped {
    /// Messages given out.
    pub given_out: u64,
    /// Operations that may give out more at once.
    pub going_on: usize,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::delivery::Cause;

    fn candidate(seq: i64, error: &str) -> Candidate {
        let headline = Headline {
            route: "orders".to_owned(),
            seq,
            id: MessageId::new().to_string(),
            kind: "order.placed".to_owned(),
            cause: Cause::Permanent,
            error: error.to_owned(),
            died_seconds_ago: 0.0,
        };
        Candidate {
            headline,
            topic: "orders".to_owned(),
            key: Some(format!("k{seq}")),
            at_ms: seq * 10,
            ready: seq != 2,
        }
    }

    #[test]
    fn what_is_cut_comes_with_the_next_look() {
        let all = Candidates { found: (1..=5).map(|seq| candidate(seq, "")).collect(), to_seq: 90, all_read: true };
        let some = all.clone().at_most(3);
        assert_eq!((some.found.len(), some.to_seq, some.all_read), (3, 3, false));
        assert_eq!(all.clone().at_most(5), all);
    }

    #[test]
    fn a_group_is_chosen_by_what_its_letters_died_of() {
        let found =
            vec![candidate(1, "order 1 is unknown"), candidate(2, "no stock"), candidate(3, "order 3 is unknown")];
        let group = found[0].headline.group(Side::Out);
        let filter = OperationFilter { group: Some(group), ..OperationFilter::default() };
        let chosen = Candidates { found, to_seq: 3, all_read: true }.of_group(Side::Out, &filter);
        assert_eq!(chosen.found.iter().map(|candidate| candidate.headline.seq).collect::<Vec<_>>(), [1, 3]);
    }

    #[test]
    fn a_survey_counts_and_samples() {
        let mut survey = Survey::default();
        let page = Candidates { found: (1..=7).map(|seq| candidate(seq, "")).collect(), to_seq: 7, all_read: true };
        let (ids, keys) = survey.add(&page);
        assert_eq!((ids.len(), keys.len(), survey.matching, survey.not_ready), (7, 7, 7, 1));
        assert_eq!((survey.oldest_ms, survey.newest_ms, survey.samples.len()), (Some(10), Some(70), 5));
        assert_eq!(survey.by_type["orders order.placed"], 7);
        assert!(survey.complete);
    }

    #[test]
    fn a_filter_survives_its_way_through_the_store() {
        let filter =
            OperationFilter { ids: vec![MessageId::new()], kind: Some("a".to_owned()), ..OperationFilter::default() };
        let json = serde_json::to_string(&filter).unwrap_or_default();
        assert_eq!(serde_json::from_str::<OperationFilter>(&json).ok(), Some(filter));
        assert!(OperationFilter::default().is_everything());
    }
}
