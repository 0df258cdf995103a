//! Comparing what was written with what had an effect, without moving every id.
//!
//! Both sides count the ids of each piece of time and XOR them. Where count and XOR agree, so do the ids, but for a coincidence of one in
//! 2^62; only where they differ are ids read. The time of a message is the one in its id (UUIDv7), so that both sides cut in the same places.

use std::collections::BTreeMap;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::error::StoreError;
use crate::inbox::Consumer;
use crate::message::MessageId;
use crate::topics::TopicFilter;

/// A time from this millisecond since 1970 up to, and without, that one, by the ids of messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// From.
    pub from_ms: i64,
    /// To.
    pub to_ms: i64,
}

impl Span {
    /// The lowest id in it, and the lowest behind it.
    pub fn ids(&self) -> (Uuid, Uuid) {
        (lowest_id(self.from_ms), lowest_id(self.to_ms))
    }

    /// In pieces that begin at multiples of this.
    pub fn cut(self, piece_ms: i64) -> impl Iterator<Item = Self> {
        let piece_ms = piece_ms.max(1);
        let mut from_ms = self.from_ms;
        std::iter::from_fn(move || {
            let to_ms = (from_ms.div_euclid(piece_ms) + 1).saturating_mul(piece_ms).min(self.to_ms);
            let piece = Self { from_ms, to_ms };
            from_ms = to_ms;
            (piece.from_ms < piece.to_ms).then_some(piece)
        })
    }
}

/// The lowest id of this millisecond.
fn lowest_id(ms: i64) -> Uuid {
    let ms = u128::try_from(ms).unwrap_or_default().min((1 << 48) - 1);
    Uuid::from_u128(ms << 80)
}

/// The millisecond in an id.
pub fn id_ms(id: &Uuid) -> i64 {
    i64::try_from(id.as_u128() >> 80).unwrap_or(i64::MAX)
}

/// What is known of the ids of one piece of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct IdPrint {
    /// How many there are.
    pub ids: u64,
    /// The XOR of their lower halves.
    pub xor: u64,
}

impl IdPrint {
    /// With this id too.
    pub fn add(&mut self, id: &Uuid) {
        self.ids += 1;
        self.xor ^= id.as_u64_pair().1;
    }
}

/// By the number of the piece, counted from 1970; pieces without ids are left out.
pub type IdPrints = BTreeMap<i64, IdPrint>;

/// The pieces that differ, with neighbours put together; `piece_ms` is how long a piece is.
pub fn differing(one: &IdPrints, other: &IdPrints, piece_ms: i64) -> Vec<Span> {
    let differs = |piece: &&i64| one.get(*piece) != other.get(*piece);
    let mut pieces: Vec<i64> = one.keys().chain(other.keys()).filter(differs).copied().collect();
    pieces.sort_unstable();
    pieces.dedup();
    let mut spans: Vec<Span> = Vec::new();
    for piece in pieces {
        let span = Span { from_ms: piece * piece_ms, to_ms: (piece + 1) * piece_ms };
        match spans.last_mut() {
            // Not for ever: ids are read span by span.
            Some(last) if last.to_ms == span.from_ms && last.to_ms - last.from_ms < 10 * piece_ms => {
                last.to_ms = span.to_ms
            }
            _ => spans.push(span),
        }
    }
    spans
}

/// Where a message is on its route, as far as it matters whether it can have had an effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// The route has not finished with it.
    Waiting,
    /// A dead letter of the route.
    Dead,
    /// The route is done with it.
    Passed,
    /// The route does not take its topic.
    Unrouted,
}

/// Messages of one tenant and type.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tally {
    /// Tenant.
    pub tenant: Option<String>,
    /// Type.
    #[serde(rename = "type")]
    pub kind: String,
    /// In the outbox.
    pub committed: u64,
    /// Of those, such that the route has not finished with.
    pub waiting: u64,
    /// Of those, dead letters of the route.
    pub dead: u64,
}

/// One change of an aggregate, as the application's own tables have it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AggregateChange {
    /// The aggregate's type; none: any.
    pub aggregate_type: Option<String>,
    /// The aggregate.
    pub aggregate_id: String,
    /// The version that it got; none: any.
    pub aggregate_version: Option<i64>,
}

/// Changes without a message.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Unwritten {
    /// How many.
    pub count: u64,
    /// Of those, at most as many as were asked for.
    pub changes: Vec<AggregateChange>,
}

/// What an inbox has of a span.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Unhandled {
    /// Received, and not handled yet.
    pub waiting: u64,
    /// Among the consumer's dead letters.
    pub dead: u64,
}

/// The end of a store that can be compared with others.
#[async_trait]
pub trait Reconcilable: Send + Sync {
    /// The times in the oldest and the newest id of the outbox that lie in this span; none: there are none. An error if the newest messages
    /// have ids without a time in them.
    async fn outbox_times(&self, plausible: Span) -> Result<Option<Span>, StoreError>;

    /// Messages whose ids lie outside this span, counted up to 10,000: most of those that are not UUIDv7 do.
    async fn outbox_outside(&self, span: Span) -> Result<u64, StoreError>;

    /// The ids of messages of these topics, piece by piece.
    async fn outbox_prints(&self, topics: &TopicFilter, span: Span, piece_ms: i64) -> Result<IdPrints, StoreError>;

    /// The ids themselves.
    async fn outbox_ids(&self, topics: &TopicFilter, span: Span) -> Result<Vec<MessageId>, StoreError>;

    /// The time in the oldest id that a consumer's inbox has; none: it has none.
    async fn inbox_begins(&self, consumer: &Consumer) -> Result<Option<i64>, StoreError>;

    /// The ids that a consumer has in its inbox, piece by piece.
    async fn inbox_prints(&self, consumer: &Consumer, span: Span, piece_ms: i64) -> Result<IdPrints, StoreError>;

    /// The ids themselves.
    async fn inbox_ids(&self, consumer: &Consumer, span: Span) -> Result<Vec<MessageId>, StoreError>;

    /// Of the ids of a span, those that a consumer has received without an effect so far.
    async fn inbox_unhandled(&self, consumer: &Consumer, span: Span) -> Result<Unhandled, StoreError>;

    /// Which of these ids are dead letters of a consumer.
    async fn dead_at(&self, consumer: &Consumer, ids: &[MessageId]) -> Result<Vec<MessageId>, StoreError>;

    /// Where messages are on a route; those that are not in the outbox are left out.
    async fn fates(&self, route: &str, ids: &[MessageId]) -> Result<Vec<(MessageId, Fate)>, StoreError>;

    /// Messages of these topics by tenant and type.
    async fn tallies(&self, route: &str, topics: &TopicFilter, span: Span) -> Result<Vec<Tally>, StoreError>;

    /// Asks the application's own tables: rows of tenant, type and how many changes there were in this span, in that order. The query's two
    /// parameters are the times.
    async fn business(&self, query: &str, span: Span) -> Result<Vec<(Option<String>, String, u64)>, StoreError>;

    /// Asks the application's own tables for the changes of a span, as rows of aggregate type, aggregate id and version, and returns those of which
    /// the outbox has no message of these topics whose id has a time in `written`. The query's two parameters are the times of `changed`.
    async fn unwritten(
        &self,
        query: &str,
        topics: &TopicFilter,
        changed: Span,
        written: Span,
        limit: usize,
    ) -> Result<Unwritten, StoreError>;

    /// Keeps the result of a comparison; old ones of the same name are forgotten.
    async fn note_reconciled(&self, result: &Reconciled) -> Result<(), StoreError>;

    /// The newest result of each comparison, or of the one with this name.
    async fn reconciled(&self, name: Option<&str>) -> Result<Vec<Reconciled>, StoreError>;
}

/// The result of one comparison.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Reconciled {
    /// Which one.
    pub name: String,
    /// When it was made, in milliseconds since 1970, by the database's clock.
    pub at_ms: i64,
    /// About which messages. What is younger may be on its way.
    pub span: Span,
    /// How long it took.
    pub took_seconds: f64,
    /// Changes and messages by day, tenant and type.
    pub days: Vec<DayCompared>,
    /// Messages and effects at each consumer.
    pub consumers: Vec<ConsumerCompared>,
    /// Changes of aggregates without a message.
    #[serde(default)]
    pub unwritten: u64,
    /// Of those, at most [`ConsumerCompared::SHOWN`].
    #[serde(default)]
    pub unwritten_changes: Vec<AggregateChange>,
    /// Messages whose ids have no time of this century's in them, which therefore could not be compared.
    pub not_compared: u64,
    /// What else could not be compared, in words.
    pub notes: Vec<String>,
    /// How often it is made, in seconds; none: nobody said so.
    #[serde(default)]
    pub every_seconds: Option<f64>,
    /// It was asked for about less than what is compared from time to time, so it is not kept.
    #[serde(default)]
    pub partial: bool,
    /// Why changes could not be compared; none: they were, or nobody asked.
    #[serde(default)]
    pub business_trouble: Option<String>,
    /// The same for changes of aggregates.
    #[serde(default)]
    pub changes_trouble: Option<String>,
    /// Changes from this time on were not looked at; the next comparison begins there, at the latest.
    #[serde(default)]
    pub business_open_ms: Option<i64>,
    /// Why it failed as a whole; then the rest is what was known before. None: it did not.
    #[serde(default)]
    pub trouble: Option<String>,
}

impl Reconciled {
    /// Messages that consumers lack.
    pub fn missing(&self) -> u64 {
        self.consumers.iter().map(|consumer| consumer.missing).sum()
    }

    /// Messages that consumers have and the outbox has not.
    pub fn strangers(&self) -> u64 {
        self.consumers.iter().map(|consumer| consumer.strangers).sum()
    }

    /// Days, tenants and types of which changes and messages differ.
    pub fn days_that_differ(&self) -> u64 {
        self.days.iter().filter(|day| day.differs()).count() as u64
    }

    /// The sides that could not be compared at all, each with the reason.
    pub fn troubles(&self) -> Vec<(&str, &str)> {
        let own = [
            ("the comparison", &self.trouble),
            ("business", &self.business_trouble),
            ("changes", &self.changes_trouble),
        ];
        let own = own.into_iter().filter_map(|(side, trouble)| Some((side, trouble.as_deref()?)));
        let consumers = self.consumers.iter().filter_map(|one| Some((one.consumer.as_str(), one.trouble.as_deref()?)));
        own.chain(consumers).collect()
    }

    /// Whether there is any difference, or something that nobody could compare.
    pub fn differs(&self) -> bool {
        self.missing() + self.strangers() + self.days_that_differ() + self.unwritten + self.not_compared > 0
            || !self.troubles().is_empty()
    }
}

/// One day, tenant and type.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DayCompared {
    /// The day (UTC), as `2026-11-22`.
    pub day: String,
    /// Messages.
    #[serde(flatten)]
    pub messages: Tally,
    /// Business changes; none: nobody asked.
    pub changes: Option<u64>,
}

impl DayCompared {
    /// There are more changes than messages, or fewer.
    pub fn differs(&self) -> bool {
        self.changes.is_some_and(|changes| changes != self.messages.committed)
    }
}

/// One consumer.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct ConsumerCompared {
    /// Its name.
    pub consumer: String,
    /// In which database, without secrets.
    pub store: String,
    /// Messages that it should have.
    pub expected: u64,
    /// Messages of the time that its inbox has.
    pub received: u64,
    /// Of those, such that wait for being handled.
    pub waiting: u64,
    /// Of those, or in place of them, its dead letters.
    pub dead: u64,
    /// Not received, since the route has not sent them yet.
    pub unsent: u64,
    /// Not received, since they are dead letters of the route.
    pub dead_on_route: u64,
    /// Not received, since the route does not take their topic.
    pub unrouted: u64,
    /// The time in the oldest id of those that are not received, or were not looked at; the next comparison begins there, at the latest.
    pub oldest_open_ms: Option<i64>,
    /// Sent, and not received: lost on the way, or forgotten by the inbox.
    pub missing: u64,
    /// Received, and not in the outbox: removed from there, or of another sender.
    pub strangers: u64,
    /// Ids of missing ones, at most [`SHOWN`](Self::SHOWN).
    pub missing_ids: Vec<MessageId>,
    /// Ids of those that are not in the outbox, at most as many.
    pub stranger_ids: Vec<MessageId>,
    /// Ids that were read because counts or XORs differed.
    pub ids_read: u64,
    /// Why it could not be compared, for example since its database is away; then what is missing and strange is what was known before, and
    /// the other counts are 0. None: it was compared.
    #[serde(default)]
    pub trouble: Option<String>,
}

impl ConsumerCompared {
    /// Ids that a result keeps.
    pub const SHOWN: usize = 10_000;
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_span_is_cut_at_round_times() {
        let pieces: Vec<_> = Span { from_ms: 5, to_ms: 25 }.cut(10).map(|piece| (piece.from_ms, piece.to_ms)).collect();
        assert_eq!(pieces, [(5, 10), (10, 20), (20, 25)]);
        assert_eq!(Span { from_ms: 5, to_ms: 5 }.cut(10).count(), 0);
    }

    #[test]
    fn ids_of_a_span_are_between_its_bounds() {
        let id = MessageId::new();
        let ms = id_ms(id.as_uuid());
        let (from, to) = Span { from_ms: ms, to_ms: ms + 1 }.ids();
        assert!(from <= *id.as_uuid() && *id.as_uuid() < to);
        assert_eq!(lowest_id(-5), Uuid::nil());
    }

    proptest! {
        #[test]
        fn what_differs_is_in_a_differing_span(times in proptest::collection::vec(0i64..2_000, 0..60), lost in 0usize..60) {
            let ids: Vec<Uuid> = times.iter().enumerate().map(|(n, ms)| Uuid::from_u128(((*ms as u128) << 80) | (n as u128 + 1))).collect();
            let prints = |changed: &dyn Fn(usize, Uuid) -> Option<Uuid>| {
                let mut prints = IdPrints::new();
                for id in ids.iter().enumerate().filter_map(|(n, id)| changed(n, *id)) {
                    prints.entry(id_ms(&id) / 100).or_default().add(&id);
                }
                prints
            };
            let all = prints(&|_, id| Some(id));
            let one_less = prints(&|n, id| (n != lost).then_some(id));
            // As many as before.
            let one_other = prints(&|n, id| Some(if n == lost { Uuid::from_u128(id.as_u128() ^ (1 << 60)) } else { id }));
            for changed in [one_less, one_other] {
                let spans = differing(&all, &changed, 100);
                match times.get(lost) {
                    Some(ms) => prop_assert!(spans.iter().any(|span| span.from_ms <= *ms && *ms < span.to_ms)),
                    None => prop_assert!(spans.is_empty()),
                }
            }
        }
    }
}
