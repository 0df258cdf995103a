//! Compares messages with changes before them and effects behind them.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::{Instant, UNIX_EPOCH};

use postroom::{
    ConsumerCompared, DayCompared, Fate, IdPrint, IdPrints, MessageId, Reconciled, Span, Store, StoreError, Tally,
    TopicFilter, Unwritten, differing, id_ms,
};

use super::{Comparison, Inbox};
use crate::exit::{self, Failure};

/// Ids are counted by pieces of this length, and read only where two pieces differ.
const PIECE_MS: i64 = 60_000;
/// One query is about at most so much time.
const QUERY_MS: i64 = 6 * 3_600_000;
/// No message is older: 2020-01-01. And none is written a day ahead of the database's clock.
const OLDEST_MS: i64 = 1_577_836_800_000;
const DAY_MS: i64 = 24 * 3_600_000;
/// How far back open ones are followed.
const OPEN_MS: i64 = 30 * DAY_MS;
/// Ids that one query looks up.
const LOOKED_UP: usize = 1_000;

/// The clock of the application that dates a change, and the one that dates the id of its message, differ by no more than this; nor do a transaction's
/// begin and its message.
const APART_MS: i64 = 3_600_000;

/// From when to when, in milliseconds since 1970; none: as configured.
#[derive(Debug, Clone, Copy, Default)]
pub struct Asked {
    pub from_ms: Option<i64>,
    pub to_ms: Option<i64>,
}

/// Compares; `progress` is told how many ids were counted.
pub async fn compare(
    comparison: &Comparison,
    asked: Asked,
    mut progress: impl FnMut(u64) + Send,
) -> Result<Reconciled, StoreError> {
    let Comparison { options, route, store, inboxes, kept } = comparison;
    let kept = *kept;
    let began = Instant::now();
    let now = store.vitals().await?.now;
    let at_ms = now.duration_since(UNIX_EPOCH).map_or(0, |since| i64::try_from(since.as_millis()).unwrap_or(i64::MAX));
    let ms = |duration: std::time::Duration| i64::try_from(duration.as_millis()).unwrap_or(i64::MAX);
    let settled = at_ms - ms(options.settles);
    let to_ms = asked.to_ms.map_or(settled, |to| to.min(settled));
    let usual_from_ms = to_ms - ms(options.window);
    let mut span = Span { from_ms: asked.from_ms.unwrap_or(usual_from_ms), to_ms };
    let mut notes = Vec::new();
    // What was not received the last time is looked at again, however long ago its id was made: it may have been sent since. And nothing is
    // left out between two comparisons, however long nobody made one.
    let last = store.reconciled(Some(&options.name)).await?.into_iter().next();
    let open = last.iter().flat_map(|last| &last.consumers).filter_map(|one| one.oldest_open_ms);
    let open = open.chain(last.iter().filter_map(|last| last.business_open_ms));
    let left = open.chain(last.iter().map(|last| last.span.to_ms)).min();
    if asked.from_ms.is_none() {
        span.from_ms = left.map_or(span.from_ms, |left| span.from_ms.min(left.max(span.from_ms - OPEN_MS)));
    }
    // A comparison of another time that was asked for does not look at it.
    let still_left = left.filter(|left| *left < span.from_ms || *left >= span.to_ms);
    let leaves_out = |from: i64| from > usual_from_ms || left.is_some_and(|left| left < from);
    let partial = to_ms < settled || asked.from_ms.is_some_and(leaves_out);
    if span.from_ms >= span.to_ms {
        notes.push("nothing of this time has settled yet".to_owned());
        span.from_ms = span.to_ms;
    }
    let whole = span;
    // What has another time in its id has none: it is not UUIDv7.
    let plausible = Span { from_ms: OLDEST_MS, to_ms: at_ms + DAY_MS };
    let not_compared = store.outbox_outside(plausible).await?;
    let mut messages_begin = None;
    match store.outbox_times(plausible).await? {
        // What the inboxes have is not in it any more.
        None => {
            notes.push("the outbox is empty, so there is nothing to compare with the consumers".to_owned());
            span.from_ms = span.to_ms;
        }
        Some(times) if times.from_ms > span.from_ms => {
            messages_begin = Some(times.from_ms);
            notes.push(format!(
                "the oldest message in the outbox is of {}; what was before it is not compared",
                at(times.from_ms)
            ));
            span.from_ms = times.from_ms.min(span.to_ms);
        }
        Some(_) => {}
    }
    let mut result = Reconciled {
        name: options.name.clone(),
        at_ms,
        span,
        took_seconds: 0.0,
        days: Vec::new(),
        consumers: Vec::new(),
        unwritten: 0,
        unwritten_changes: Vec::new(),
        not_compared,
        notes,
        every_seconds: Some(options.every.as_secs_f64()),
        partial,
        business_trouble: None,
        changes_trouble: None,
        business_open_ms: still_left,
        trouble: None,
    };
    // The messages of older changes have been deleted.
    let kept_from_ms = kept.map(|kept| at_ms - ms(kept) + APART_MS);
    let too_short = kept_from_ms.filter(|from_ms| *from_ms >= whole.to_ms && whole.to_ms > whole.from_ms).map(|_| {
        "[retention] deletes messages before they could be compared with changes; keep them an hour longer than `settles`"
            .to_owned()
    });
    if let Some(from_ms) = kept_from_ms.filter(|from_ms| *from_ms > whole.from_ms)
        && (options.business.is_some() || options.changes.is_some())
    {
        let note = format!(
            "[retention] deletes messages, so changes before {} are not compared",
            at(from_ms.min(whole.to_ms))
        );
        result.notes.push(note);
    }
    let from = |begin: Option<i64>| {
        let from_ms = [begin, kept_from_ms].into_iter().flatten().fold(whole.from_ms, i64::max);
        Span { from_ms: from_ms.min(whole.to_ms), ..whole }
    };
    if let Some(query) = &options.business {
        match days(comparison, query, from(messages_begin)).await {
            Ok(days) => (result.days, result.business_trouble) = (days, too_short.clone()),
            Err(error) => {
                result.days = last.iter().flat_map(|last| last.days.clone()).collect();
                result.business_trouble = Some(told(&error));
            }
        }
    }
    if let Some(query) = &options.changes {
        let from = from(messages_begin.map(|begin| begin.saturating_add(APART_MS)));
        if messages_begin.is_some() && from.from_ms > whole.from_ms && whole.to_ms > whole.from_ms {
            result.notes.push(match from.from_ms < from.to_ms {
                true => format!("changes before {} are not compared", at(from.from_ms)),
                false => "no change is compared: the messages do not reach back far enough yet".to_owned(),
            });
        }
        match unwritten(comparison, query, from).await {
            Ok(found) => {
                (result.unwritten, result.unwritten_changes) = (found.count, found.changes);
                result.changes_trouble = too_short;
            }
            Err(error) => {
                if let Some(last) = &last {
                    (result.unwritten, result.unwritten_changes) = (last.unwritten, last.unwritten_changes.clone());
                }
                result.changes_trouble = Some(told(&error));
            }
        }
    }
    if result.business_trouble.is_some() || result.changes_trouble.is_some() {
        result.business_open_ms = [Some(whole.from_ms), still_left].into_iter().flatten().min();
    }
    let (mut counted, mut seen) = (0, Seen::new());
    for inbox in inboxes {
        let topics = inbox.topics.as_ref().unwrap_or(&options.topics);
        let mut more = |ids: u64| {
            counted += ids;
            progress(counted);
        };
        let from_ms = inbox.since_ms.map_or(span.from_ms, |since| since.clamp(span.from_ms, span.to_ms));
        let span = Span { from_ms, ..span };
        // A database that is away keeps nobody from comparing the others. What was left out is looked at the next time.
        let in_time = match inbox.since_ms {
            Some(since) if since > at_ms => Err(StoreError::Refused {
                what: "compare this consumer",
                source: format!("its `since`, {}, has not come yet", at(since)).into(),
            }),
            _ => inbox.store.inbox_begins(&inbox.consumer).await,
        };
        let found = match in_time {
            Ok(begins) => consumer(store.as_ref(), route, inbox, topics, span, &mut seen, &mut more)
                .await
                .map(|compared| (begins, compared)),
            Err(error) => Err(error),
        };
        let (begins, mut compared) = match found {
            Ok(found) => found,
            Err(error) => {
                let before = || {
                    last.iter().flat_map(|last| &last.consumers).filter(|one| inbox.consumer.as_str() == one.consumer)
                };
                // Its URL may have been changed since.
                let before = before().find(|one| one.store == inbox.store.shown()).or_else(|| before().next()).cloned();
                let before = before.unwrap_or_default();
                result.consumers.push(ConsumerCompared {
                    consumer: inbox.consumer.to_string(),
                    store: inbox.store.shown(),
                    oldest_open_ms: [Some(from_ms), still_left].into_iter().flatten().min(),
                    trouble: Some(told(&error)),
                    missing: before.missing,
                    missing_ids: before.missing_ids,
                    strangers: before.strangers,
                    stranger_ids: before.stranger_ids,
                    ..ConsumerCompared::default()
                });
                continue;
            }
        };
        match begins {
            None => result.notes.push(format!(
                "the inbox of {} in {} is empty: is the consumer's name right, and is this its database?",
                inbox.consumer,
                inbox.store.shown()
            )),
            Some(begins) if begins > span.from_ms => result.notes.push(format!(
                "the inbox of {} begins at {}; if the consumer began then, set `since`, and if older rows were deleted there, compare a shorter time",
                inbox.consumer,
                at(begins)
            )),
            Some(_) => {}
        }
        compared.oldest_open_ms = [compared.oldest_open_ms, still_left].into_iter().flatten().min();
        if compared.expected == 0 && compared.received > 0 {
            result.notes.push(format!(
                "there is no message of {topics}, and {} has received {}: are the topics right?",
                inbox.consumer, compared.received
            ));
            result.not_compared += compared.received;
        }
        result.consumers.push(compared);
    }
    result.took_seconds = began.elapsed().as_secs_f64();
    Ok(result)
}

fn told(error: &StoreError) -> String {
    Failure::of(exit::FAILURE, error).text
}

/// A time for people.
pub fn at(ms: i64) -> String {
    crate::operations::at(ms)
}

/// Changes and messages by day, tenant and type.
async fn days(comparison: &Comparison, query: &str, span: Span) -> Result<Vec<DayCompared>, StoreError> {
    let Comparison { options, route, store, .. } = comparison;
    let mut days = Days::new();
    for piece in span.cut(QUERY_MS) {
        // A piece is never of two days.
        let day: String = at(piece.from_ms).chars().take(10).collect();
        for tally in store.tallies(route, &options.topics, piece).await? {
            let entry = entry(&mut days, &day, &tally.tenant, &tally.kind);
            entry.messages.committed += tally.committed;
            entry.messages.waiting += tally.waiting;
            entry.messages.dead += tally.dead;
        }
        for (tenant, kind, changes) in store.business(query, piece).await? {
            let entry = entry(&mut days, &day, &tenant, &kind);
            entry.changes = Some(entry.changes.unwrap_or(0) + changes);
        }
    }
    Ok(days.into_values().collect())
}

/// Changes of aggregates without a message.
async fn unwritten(comparison: &Comparison, query: &str, span: Span) -> Result<Unwritten, StoreError> {
    let Comparison { options, store, .. } = comparison;
    let mut all = Unwritten::default();
    for changed in span.cut(APART_MS) {
        let written = Span { from_ms: changed.from_ms - APART_MS, to_ms: changed.to_ms + APART_MS };
        let room = ConsumerCompared::SHOWN - all.changes.len();
        let found = store.unwritten(query, &options.topics, changed, written, room.max(1)).await?;
        all.count += found.count;
        all.changes.extend(found.changes.into_iter().take(room));
    }
    Ok(all)
}

type Days = BTreeMap<(String, Option<String>, String), DayCompared>;

fn entry<'a>(days: &'a mut Days, day: &str, tenant: &Option<String>, kind: &str) -> &'a mut DayCompared {
    days.entry((day.to_owned(), tenant.clone(), kind.to_owned())).or_insert_with(|| DayCompared {
        day: day.to_owned(),
        messages: Tally { tenant: tenant.clone(), kind: kind.to_owned(), committed: 0, waiting: 0, dead: 0 },
        changes: Some(0),
    })
}

fn ids_of(prints: &IdPrints) -> u64 {
    prints.values().map(|print: &IdPrint| print.ids).sum()
}

/// What the outbox has of pieces that were counted for another consumer. Where the two sides differ, it is asked again.
type Seen = HashMap<(i64, Vec<String>), IdPrints>;

/// Messages and effects of one consumer.
async fn consumer(
    store: &dyn Store,
    route: &str,
    inbox: &Inbox,
    topics: &TopicFilter,
    span: Span,
    seen: &mut Seen,
    progress: &mut (dyn FnMut(u64) + Send),
) -> Result<ConsumerCompared, StoreError> {
    let Inbox { consumer, store: theirs, .. } = inbox;
    let mut compared =
        ConsumerCompared { consumer: consumer.to_string(), store: theirs.shown(), ..ConsumerCompared::default() };
    for piece in span.cut(QUERY_MS) {
        // Messages first: what arrives in between is no stranger.
        let of_piece = (piece.from_ms, topics.patterns().to_vec());
        let written = match seen.get(&of_piece) {
            Some(prints) => prints.clone(),
            None => {
                let prints = store.outbox_prints(topics, piece, PIECE_MS).await?;
                progress(ids_of(&prints));
                seen.insert(of_piece, prints.clone());
                prints
            }
        };
        let received = theirs.inbox_prints(consumer, piece, PIECE_MS).await?;
        let unhandled = theirs.inbox_unhandled(consumer, piece).await?;
        compared.expected += ids_of(&written);
        compared.received += ids_of(&received);
        compared.waiting += unhandled.waiting;
        compared.dead += unhandled.dead;
        progress(ids_of(&received));
        for differs in differing(&written, &received, PIECE_MS) {
            let differs = Span { from_ms: differs.from_ms.max(piece.from_ms), to_ms: differs.to_ms.min(piece.to_ms) };
            let written = store.outbox_ids(topics, differs).await?;
            let received = theirs.inbox_ids(consumer, differs).await?;
            compared.ids_read += (written.len() + received.len()) as u64;
            let (has, had): (HashSet<_>, HashSet<_>) = (received.iter().collect(), written.iter().collect());
            let lacking: Vec<MessageId> = written.iter().filter(|id| !has.contains(id)).copied().collect();
            let strange: Vec<MessageId> = received.iter().filter(|id| !had.contains(id)).copied().collect();
            for some in lacking.chunks(LOOKED_UP) {
                judge(store, route, inbox, some, &mut compared).await?;
            }
            for some in strange.chunks(LOOKED_UP) {
                // One of another topic is no stranger.
                let known: HashSet<_> = store.fates(route, some).await?.into_iter().map(|(id, _)| id).collect();
                let strangers = some.iter().filter(|id| !known.contains(id));
                for id in strangers {
                    compared.strangers += 1;
                    keep(&mut compared.stranger_ids, *id);
                }
            }
        }
    }
    Ok(compared)
}

fn keep(ids: &mut Vec<MessageId>, id: MessageId) {
    if ids.len() < ConsumerCompared::SHOWN {
        ids.push(id);
    }
}

/// Why a consumer lacks these.
async fn judge(
    store: &dyn Store,
    route: &str,
    inbox: &Inbox,
    ids: &[MessageId],
    compared: &mut ConsumerCompared,
) -> Result<(), StoreError> {
    let fates = store.fates(route, ids).await?;
    // Kept as a dead letter without having been in the inbox; it is among the dead already.
    let dead: HashSet<MessageId> = inbox.store.dead_at(&inbox.consumer, ids).await?.into_iter().collect();
    for (id, fate) in fates {
        let settled = dead.contains(&id) || fate == Fate::Unrouted;
        if !settled {
            let at = id_ms(id.as_uuid());
            compared.oldest_open_ms = Some(compared.oldest_open_ms.map_or(at, |oldest| oldest.min(at)));
        }
        match fate {
            Fate::Unrouted => compared.unrouted += 1,
            Fate::Waiting => compared.unsent += 1,
            Fate::Dead => compared.dead_on_route += 1,
            Fate::Passed if dead.contains(&id) => {}
            Fate::Passed => {
                compared.missing += 1;
                keep(&mut compared.missing_ids, id);
            }
        }
    }
    Ok(())
}
