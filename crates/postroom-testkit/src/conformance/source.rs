//! What every `Source` promises to the engine.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postroom::{
    Cause, Delivery, Message, MessageId, Order, Origin, Outcome, Report, Route, Settlement, Source, Standing, Token,
    TopicFilter, Want,
};

use super::Fixture;
use crate::chance::Chance;

/// A store with an outbox, and what the suite has to do beside its source.
#[async_trait]
pub trait Outbox: Fixture {
    /// A transaction that has written and not ended. `()` where writers take turns.
    type Open: Send;

    /// A source for a relay of this name; it holds nothing yet.
    async fn open(&self, route: &Route, owner: &str) -> Arc<dyn Source>;

    /// Writes messages in one transaction, and commits it.
    async fn commit(&self, messages: &[Message]);

    /// Writes messages in one transaction, and rolls it back.
    async fn roll_back(&self, messages: &[Message]);

    /// Writes messages in a transaction that stays open; none: writers take turns here.
    async fn begin(&self, messages: &[Message]) -> Option<Self::Open>;

    /// Commits it.
    async fn end(&self, open: Self::Open);

    /// As if every relay had been silent for longer than its lease.
    async fn expire(&self);

    /// As if the time had come for whatever is parked.
    async fn make_due(&self);
}

/// The tests of one implementation.
#[macro_export]
macro_rules! source_conforms {
    ($fixture:ty) => {
        $crate::conformance_cases!(
            $fixture,
            source: what_was_committed_comes_out_in_order_and_what_was_rolled_back_never
            bytes_columns_and_headers_come_out_as_they_were_written
            a_route_takes_its_topics_and_no_others
            what_commits_late_is_not_passed_over
            what_was_settled_does_not_come_again_after_a_crash
            what_was_not_settled_comes_again_after_a_crash
            a_crash_among_late_messages_repeats_those_that_were_not_settled
            a_settling_may_be_repeated
            two_relays_never_have_the_same_message
            a_relay_that_lost_its_lanes_changes_nothing_and_is_told
            a_relay_that_stops_leaves_nothing_to_repeat
            a_claim_brings_no_more_than_was_asked_for
            a_failed_message_holds_up_its_key_and_nobody_else
            without_order_a_failed_message_waits_alone
            a_delayed_message_waits_for_its_time
            a_dead_message_stays_dead
            a_dead_message_that_blocks_its_key_keeps_the_others_parked
            nothing_is_lost_or_reordered_whatever_becomes_of_each_message
        );
    };
}

/// The route of all cases, with a lease that does not end by itself.
pub fn route() -> Route {
    Route { lease: Duration::from_secs(600), ..Route::new("orders") }
}

pub(super) fn message(key: &str) -> Message {
    Message::new("orders", "order.placed", "x").key(key)
}

pub(super) fn retry(attempts: u32) -> Outcome {
    Outcome::Retry { after: Duration::from_secs(3600), attempts, error: "the broker said no".to_owned() }
}

pub(super) fn dead(blocks_key: bool) -> Outcome {
    Outcome::Dead { attempts: 8, cause: Cause::Exhausted, error: "the broker said no".to_owned(), blocks_key }
}

pub(super) async fn renew(source: &Arc<dyn Source>) -> Standing {
    source.renew(&Report::default()).await.expect("renew")
}

/// A source that holds every lane.
pub(super) async fn holding<F: Outbox>(outbox: &F, owner: &str) -> Arc<dyn Source> {
    let source = outbox.open(&route(), owner).await;
    assert!(renew(&source).await.held > 0, "{owner} holds nothing");
    source
}

/// Everything that there is now, in the order in which it is to go out.
pub(super) async fn claim_all(source: &Arc<dyn Source>) -> Vec<Delivery> {
    let mut deliveries = Vec::new();
    loop {
        let claimed = source.claim(Want::up_to(100)).await.expect("claim");
        let empty = claimed.deliveries.is_empty() && !claimed.more;
        deliveries.extend(claimed.deliveries);
        if empty {
            return deliveries;
        }
    }
}

pub(super) async fn settle(source: &Arc<dyn Source>, outcomes: impl IntoIterator<Item = (Token, Outcome)>) {
    let settlements: Vec<Settlement> =
        outcomes.into_iter().map(|(token, outcome)| Settlement { token, outcome }).collect();
    let settled = source.settle(&settlements).await.expect("settle");
    assert_eq!((settled.fenced, settled.lost_lanes.len()), (0, 0));
}

/// Claims everything and settles it as done, until nothing comes any more.
pub(super) async fn drain(source: &Arc<dyn Source>) -> Vec<MessageId> {
    let mut out = Vec::new();
    loop {
        let deliveries = claim_all(source).await;
        if deliveries.is_empty() {
            return out;
        }
        settle(source, deliveries.iter().map(|delivery| (delivery.token, Outcome::Done))).await;
        out.extend(ids(&deliveries));
    }
}

pub(super) fn ids(deliveries: &[Delivery]) -> Vec<MessageId> {
    deliveries.iter().map(|delivery| delivery.message.id).collect()
}

pub(super) fn ids_of(messages: &[Message]) -> Vec<MessageId> {
    messages.iter().map(|message| message.id).collect()
}

pub(super) fn sorted(mut ids: Vec<MessageId>) -> Vec<MessageId> {
    ids.sort_unstable();
    ids
}

/// I1, I2, I4.
pub async fn what_was_committed_comes_out_in_order_and_what_was_rolled_back_never<F: Outbox>(outbox: F) {
    let source = holding(&outbox, "relay").await;
    let messages: Vec<Message> = (0..60).map(|n| message(["a", "b", "c"][n % 3])).collect();
    for pair in messages.chunks(2) {
        outbox.roll_back(&[message("a"), message("b")]).await;
        outbox.commit(pair).await;
    }
    let out = claim_all(&source).await;
    assert_eq!(sorted(ids(&out)), sorted(ids_of(&messages)));
    for key in ["a", "b", "c"] {
        let of_key = |message: &&Message| message.key.as_deref() == Some(key);
        let expected: Vec<MessageId> = messages.iter().filter(of_key).map(|message| message.id).collect();
        let found: Vec<MessageId> =
            out.iter().map(|delivery| delivery.message.as_ref()).filter(of_key).map(|message| message.id).collect();
        assert_eq!(found, expected, "I4: key {key}");
    }
    assert!(out.iter().all(|delivery| delivery.origin == Origin::Outbox && delivery.attempts == 0 && !delivery.behind));
    assert!(claim_all(&source).await.is_empty(), "what is out does not come twice");
}

/// I6.
pub async fn bytes_columns_and_headers_come_out_as_they_were_written<F: Outbox>(outbox: F) {
    let source = holding(&outbox, "relay").await;
    let payloads: [Vec<u8>; 4] = [vec![], b"a\0b".to_vec(), vec![0xff, 0xfe, 0xc3, 0x28], vec![7; 100_000]];
    let messages: Vec<Message> = payloads
        .iter()
        .map(|payload| {
            Message::new("orders", "order.placed", payload.clone())
                .key("k\u{e9}y")
                .routing_key("to.here")
                .content_type("application/x")
                .tenant("t-1")
                .aggregate("order", "o-1", i64::MAX)
                .header("traceparent", "00-1-2-01")
                .header("quote", "a \"b\" \\c \u{1f4ee}")
        })
        .collect();
    outbox.commit(&messages).await;
    let out = claim_all(&source).await;
    assert_eq!(out.len(), messages.len());
    for (found, written) in out.iter().zip(&messages) {
        let found = &found.message;
        assert!(found.payload == written.payload, "{} bytes came out differently", written.payload.len());
        assert_eq!((&found.id, &found.topic, &found.kind), (&written.id, &written.topic, &written.kind));
        assert_eq!((&found.key, &found.routing_key), (&written.key, &written.routing_key));
        assert_eq!((&found.content_type, &found.headers), (&written.content_type, &written.headers));
        assert_eq!((&found.tenant_id, &found.aggregate_type), (&written.tenant_id, &written.aggregate_type));
        assert_eq!((&found.aggregate_id, found.aggregate_version), (&written.aggregate_id, written.aggregate_version));
    }
}

/// A topic that is not the route's is passed, and does not hold anything up.
pub async fn a_route_takes_its_topics_and_no_others<F: Outbox>(outbox: F) {
    let topics = TopicFilter::new(["orders", "billing.*"]).expect("a filter");
    let source = outbox.open(&Route { topics, ..route() }, "relay").await;
    renew(&source).await;
    let of = |topic: &str| Message::new(topic, "k", "x").key("k");
    let messages = [of("orders"), of("orders.late"), of("billing.sent"), of("billing"), of("other"), of("orders")];
    outbox.commit(&messages).await;
    let taken = [0, 2, 5].map(|place: usize| messages[place].id);
    assert_eq!(drain(&source).await, taken);
}

/// I1: rows that become visible after later ones were read.
pub async fn what_commits_late_is_not_passed_over<F: Outbox>(outbox: F) {
    let source = holding(&outbox, "relay").await;
    let late = [message("late"), message("late")];
    let Some(open) = outbox.begin(&late).await else { return };
    let early: Vec<Message> = (0..20).map(|n| message(&format!("early-{n}"))).collect();
    outbox.commit(&early).await;
    assert_eq!(sorted(drain(&source).await), sorted(ids_of(&early)), "I2: nothing of an open transaction");
    outbox.end(open).await;
    assert_eq!(drain(&source).await, ids_of(&late), "I1, I4");
    // The same over a restart in between.
    let late = [message("late"), message("late")];
    let Some(open) = outbox.begin(&late).await else { return };
    outbox.commit(&early_again()).await;
    drain(&source).await;
    source.release().await.expect("release");
    outbox.end(open).await;
    let next = holding(&outbox, "next").await;
    assert_eq!(drain(&next).await, ids_of(&late), "I1 after a restart");
}

fn early_again() -> Vec<Message> {
    (0..20).map(|n| message(&format!("early-{n}"))).collect()
}

pub async fn what_was_settled_does_not_come_again_after_a_crash<F: Outbox>(outbox: F) {
    let source = holding(&outbox, "first").await;
    let messages: Vec<Message> = (0..30).map(|n| message(&format!("key-{n}"))).collect();
    outbox.commit(&messages).await;
    drain(&source).await;
    let next = after_a_crash(&outbox, source).await;
    assert_eq!(drain(&next).await, [], "I3");
}

/// A crash that comes when every position that was reached is written; who takes over.
async fn after_a_crash<F: Outbox>(outbox: &F, source: Arc<dyn Source>) -> Arc<dyn Source> {
    while source.settle(&[]).await.expect("settle").unwritten {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    outbox.expire().await;
    drop(source);
    holding(outbox, "next").await
}

pub async fn what_was_not_settled_comes_again_after_a_crash<F: Outbox>(outbox: F) {
    let source = holding(&outbox, "first").await;
    let messages: Vec<Message> = (0..30).map(|_| message("a")).collect();
    outbox.commit(&messages).await;
    let out = claim_all(&source).await;
    let done = |delivery: &Delivery| (delivery.token, Outcome::Done);
    // One in the middle is settled before those before it, which are not.
    settle(&source, out[..10].iter().chain(&out[15..20]).map(done)).await;
    let next = after_a_crash(&outbox, source).await;
    assert_eq!(drain(&next).await, ids_of(&messages[10..]), "I1, I3, I4: what follows the last one without a gap");
}

pub async fn a_crash_among_late_messages_repeats_those_that_were_not_settled<F: Outbox>(outbox: F) {
    let source = holding(&outbox, "first").await;
    let late: Vec<Message> = (0..10).map(|_| message("late")).collect();
    let Some(open) = outbox.begin(&late).await else { return };
    let early = early_again();
    outbox.commit(&early).await;
    assert_eq!(sorted(drain(&source).await), sorted(ids_of(&early)));
    outbox.end(open).await;
    let fresh: Vec<Message> = (0..10).map(|_| message("late")).collect();
    outbox.commit(&fresh).await;
    let out = claim_all(&source).await;
    let all: Vec<MessageId> = ids_of(&late).into_iter().chain(ids_of(&fresh)).collect();
    assert_eq!(ids(&out), all, "I4");
    settle(&source, out[..4].iter().map(|delivery| (delivery.token, Outcome::Done))).await;
    let second = after_a_crash(&outbox, source).await;
    let out = claim_all(&second).await;
    assert_eq!(ids(&out), all[4..], "I1, I3, I4: in the middle of the late ones");
    settle(&second, out[..8].iter().map(|delivery| (delivery.token, Outcome::Done))).await;
    let third = after_a_crash(&outbox, second).await;
    assert_eq!(drain(&third).await, all[12..], "I1, I3, I4: in the middle of the others");
}

/// As the engine does after an error of which nobody knows what it left behind.
pub async fn a_settling_may_be_repeated<F: Outbox>(outbox: F) {
    let source = holding(&outbox, "relay").await;
    let messages = [message("a"), message("b"), message("c")];
    outbox.commit(&messages).await;
    let out = claim_all(&source).await;
    let settlements: Vec<Settlement> = [Outcome::Done, retry(1), dead(false)]
        .into_iter()
        .zip(&out)
        .map(|(outcome, delivery)| Settlement { token: delivery.token, outcome })
        .collect();
    source.settle(&settlements).await.expect("settle");
    source.settle(&settlements).await.expect("settle again");
    outbox.make_due().await;
    assert_eq!(drain(&source).await, [out[1].message.id], "once, and nothing else");
}

pub async fn two_relays_never_have_the_same_message<F: Outbox>(outbox: F) {
    let first = holding(&outbox, "first").await;
    let second = outbox.open(&route(), "second").await;
    for _ in 0..3 {
        renew(&second).await;
        renew(&first).await;
    }
    let messages: Vec<Message> = (0..100).map(|n| message(&format!("key-{n}"))).collect();
    outbox.commit(&messages).await;
    let (mine, theirs) = (claim_all(&first).await, claim_all(&second).await);
    let all: HashSet<MessageId> = ids(&mine).into_iter().chain(ids(&theirs)).collect();
    assert_eq!(mine.len() + theirs.len(), all.len(), "I9: one lane, one relay");
    assert_eq!(all, ids_of(&messages).into_iter().collect());
}

/// I9: a stale relay can publish what it had, and cannot record anything.
pub async fn a_relay_that_lost_its_lanes_changes_nothing_and_is_told<F: Outbox>(outbox: F) {
    let stale = holding(&outbox, "stale").await;
    let messages: Vec<Message> = (0..4).map(|n| message(&format!("key-{n}"))).collect();
    outbox.commit(&messages).await;
    let out = claim_all(&stale).await;
    outbox.expire().await;
    let owner = holding(&outbox, "owner").await;
    let mut lost = 0;
    for (delivery, outcome) in out.iter().zip([retry(1), dead(true), Outcome::Queue, Outcome::Done]) {
        let settlement = Settlement { token: delivery.token, outcome };
        let settled = stale.settle(&[settlement]).await.expect("settle");
        lost += settled.fenced.max(settled.lost_lanes.len());
    }
    assert!(lost > 0, "losing a lane is told");
    assert_eq!(sorted(drain(&owner).await), sorted(ids_of(&messages)), "nothing was recorded for the owner's messages");
    outbox.make_due().await;
    assert_eq!(drain(&owner).await, [], "and nothing was parked");
    assert_eq!(renew(&stale).await.held, 0);
}

pub async fn a_relay_that_stops_leaves_nothing_to_repeat<F: Outbox>(outbox: F) {
    let source = holding(&outbox, "first").await;
    let messages: Vec<Message> = (0..30).map(|n| message(&format!("key-{n}"))).collect();
    outbox.commit(&messages).await;
    drain(&source).await;
    source.release().await.expect("release");
    let next = holding(&outbox, "next").await;
    assert_eq!(drain(&next).await, [], "I3");
    let more = [message("a")];
    outbox.commit(&more).await;
    assert_eq!(drain(&next).await, ids_of(&more));
}

pub async fn a_claim_brings_no_more_than_was_asked_for<F: Outbox>(outbox: F) {
    let source = holding(&outbox, "relay").await;
    let messages: Vec<Message> = (0..200).map(|n| message(&format!("key-{n}"))).collect();
    outbox.commit(&messages).await;
    let one = source.claim(Want { single: true, ..Want::up_to(100) }).await.expect("claim");
    assert!(one.deliveries.len() == 1 && one.more);
    let few = source.claim(Want { parked: false, ..Want::up_to(7) }).await.expect("claim");
    assert!((1..=7).contains(&few.deliveries.len()) && few.more, "{} for 7", few.deliveries.len());
    let bytes = source.claim(Want { bytes: 1, ..Want::up_to(100) }).await.expect("claim");
    assert!((1..100).contains(&bytes.deliveries.len()), "{} within one byte a lane", bytes.deliveries.len());
    let rest = few.deliveries.into_iter().chain(one.deliveries).chain(bytes.deliveries);
    let mut out: Vec<MessageId> = rest.map(|delivery| delivery.message.id).collect();
    out.extend(ids(&claim_all(&source).await));
    assert_eq!(sorted(out), sorted(ids_of(&messages)), "I1: what did not fit comes later");
}

/// I4 and I7: the first failure stops its key, and others flow.
pub async fn a_failed_message_holds_up_its_key_and_nobody_else<F: Outbox>(outbox: F) {
    let source = holding(&outbox, "relay").await;
    let of_a = [message("a"), message("a"), message("a"), message("a")];
    let other = message("b");
    outbox.commit(&of_a[..2]).await;
    outbox.commit(std::slice::from_ref(&other)).await;
    let out = claim_all(&source).await;
    let outcome = |delivery: &Delivery| match delivery.message.id {
        id if id == of_a[0].id => retry(1),
        id if id == of_a[1].id => Outcome::Queue,
        _ => Outcome::Done,
    };
    settle(&source, out.iter().map(|delivery| (delivery.token, outcome(delivery)))).await;
    outbox.commit(&of_a[2..3]).await;
    let behind = claim_all(&source).await;
    assert_eq!(ids(&behind), [of_a[2].id]);
    assert!(behind[0].behind, "it is told that another of its key is parked");
    settle(&source, [(behind[0].token, Outcome::Queue)]).await;
    outbox.make_due().await;
    outbox.commit(&of_a[3..]).await;
    let (mut out, mut attempts) = (Vec::new(), Vec::new());
    loop {
        let deliveries = claim_all(&source).await;
        if deliveries.is_empty() {
            break;
        }
        let mut outcomes = Vec::new();
        for delivery in &deliveries {
            outcomes.push((delivery.token, if delivery.behind { Outcome::Queue } else { Outcome::Done }));
            if !delivery.behind {
                out.push(delivery.message.id);
                attempts.push(delivery.attempts);
            }
        }
        settle(&source, outcomes).await;
    }
    assert_eq!(out, ids_of(&of_a), "I4");
    assert_eq!(attempts, [1, 0, 0, 0]);
}

pub async fn without_order_a_failed_message_waits_alone<F: Outbox>(outbox: F) {
    let source = outbox.open(&Route { order: Order::None, ..route() }, "relay").await;
    renew(&source).await;
    let messages = [message("a"), message("a"), message("a")];
    outbox.commit(&messages).await;
    let out = claim_all(&source).await;
    let outcomes = [retry(1), retry(1), Outcome::Done];
    settle(&source, out.iter().map(|delivery| delivery.token).zip(outcomes)).await;
    let more = message("a");
    outbox.commit(std::slice::from_ref(&more)).await;
    assert_eq!(drain(&source).await, [more.id]);
    outbox.make_due().await;
    assert_eq!(sorted(drain(&source).await), sorted(ids_of(&messages[..2])), "each by itself");
}

pub async fn a_delayed_message_waits_for_its_time<F: Outbox>(outbox: F) {
    let source = holding(&outbox, "relay").await;
    let messages = [message("a").delay(Duration::from_secs(3600)), message("a")];
    outbox.commit(&messages).await;
    let out = claim_all(&source).await;
    assert_eq!(out.iter().map(|delivery| delivery.scheduled).collect::<Vec<_>>(), [true, false]);
    settle(&source, [(out[0].token, Outcome::Schedule), (out[1].token, Outcome::Done)]).await;
    assert_eq!(drain(&source).await, []);
    outbox.make_due().await;
    assert_eq!(drain(&source).await, [messages[0].id], "it held up nobody, and came when it was due");
}

pub async fn a_dead_message_stays_dead<F: Outbox>(outbox: F) {
    let source = holding(&outbox, "first").await;
    let messages = [message("a"), message("a")];
    outbox.commit(&messages).await;
    let out = claim_all(&source).await;
    settle(&source, [(out[0].token, dead(false)), (out[1].token, Outcome::Done)]).await;
    outbox.make_due().await;
    assert_eq!(drain(&source).await, []);
    source.release().await.expect("release");
    let next = holding(&outbox, "next").await;
    assert_eq!(drain(&next).await, [], "its key goes on without it");
}

/// Nothing of the key goes out until an operator decides, not even after a restart.
pub async fn a_dead_message_that_blocks_its_key_keeps_the_others_parked<F: Outbox>(outbox: F) {
    let source = holding(&outbox, "first").await;
    outbox.commit(&[message("a"), message("a"), message("b")]).await;
    let out = claim_all(&source).await;
    let mut of_a = 0;
    let outcomes: Vec<(Token, Outcome)> = out
        .iter()
        .map(|delivery| match delivery.message.key.as_deref() {
            Some("a") => {
                of_a += 1;
                (delivery.token, if of_a == 1 { dead(true) } else { Outcome::Queue })
            }
            _ => (delivery.token, Outcome::Done),
        })
        .collect();
    settle(&source, outcomes).await;
    outbox.commit(&[message("a")]).await;
    for delivery in claim_all(&source).await {
        assert!(delivery.behind, "{} is behind what blocks its key", delivery.message.id);
        settle(&source, [(delivery.token, Outcome::Queue)]).await;
    }
    outbox.make_due().await;
    assert!(claim_all(&source).await.is_empty());
    source.release().await.expect("release");
    let next = holding(&outbox, "next").await;
    assert!(claim_all(&next).await.into_iter().all(|delivery| delivery.behind));
}

/// A year of a route in a second: random outcomes, crashes, takeovers and writers, as the engine would settle them.
pub async fn nothing_is_lost_or_reordered_whatever_becomes_of_each_message<F: Outbox>(outbox: F) {
    const MESSAGES: usize = 600;
    let seed = std::env::var("POSTROOM_TEST_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(20_261_122);
    println!("seed {seed}");
    let mut chance = Chance::new(seed);
    let mut committed: Vec<(MessageId, usize)> = Vec::new();
    let (mut seen, mut buried): (Vec<(MessageId, usize)>, HashSet<MessageId>) = (Vec::new(), HashSet::new());
    let mut source = holding(&outbox, "relay-0").await;
    let mut idle = 0;
    for turn in 1.. {
        while committed.len() < MESSAGES && chance.percent(60) {
            let batch: Vec<(Message, usize)> = (0..=chance.below(6))
                .map(|_| {
                    let key = chance.below(9) as usize;
                    (message(&format!("key-{key}")), key)
                })
                .collect();
            let messages: Vec<Message> = batch.iter().map(|(message, _)| message.clone()).collect();
            if chance.percent(15) {
                outbox.roll_back(&messages).await;
            } else {
                outbox.commit(&messages).await;
                committed.extend(batch.iter().map(|(message, key)| (message.id, *key)));
            }
        }
        if chance.percent(10) {
            // A crash with or without a word.
            if chance.percent(50) {
                source.release().await.expect("release");
            } else {
                outbox.expire().await;
            }
            source = holding(&outbox, &format!("relay-{turn}")).await;
        }
        let claimed = source.claim(Want::up_to(1 + chance.below(60) as usize)).await.expect("claim");
        let mut parked_keys: HashSet<Option<String>> = HashSet::new();
        let mut outcomes = Vec::new();
        for delivery in &claimed.deliveries {
            let key = delivery.message.key.clone();
            let outcome = if delivery.behind || parked_keys.contains(&key) {
                // A parked one that waits behind another stays what it is.
                if delivery.origin == Origin::Parked { Outcome::Release } else { Outcome::Queue }
            } else {
                match chance.below(20) {
                    0..=1 => retry(delivery.attempts + 1),
                    2 => dead(false),
                    _ => Outcome::Done,
                }
            };
            let number = committed.iter().position(|(id, _)| *id == delivery.message.id);
            let number = number.unwrap_or_else(|| panic!("I2: {} was never committed", delivery.message.id));
            match &outcome {
                Outcome::Done => seen.push((delivery.message.id, number)),
                Outcome::Dead { .. } => drop(buried.insert(delivery.message.id)),
                _ => drop(parked_keys.insert(key)),
            }
            outcomes.push((delivery.token, outcome));
        }
        settle(&source, outcomes).await;
        outbox.make_due().await;
        let over = committed.len() >= MESSAGES && claimed.deliveries.is_empty() && !claimed.more;
        idle = if over { idle + 1 } else { 0 };
        if idle > 3 {
            break;
        }
        assert!(turn < 20_000, "I8: it does not come to an end");
    }
    let done: HashSet<MessageId> = seen.iter().map(|(id, _)| *id).collect();
    let lost = committed.iter().filter(|(id, _)| !done.contains(id) && !buried.contains(id)).count();
    assert_eq!(lost, 0, "I1: {lost} of {} were lost", committed.len());
    // The first time that each went out, in its key: never an older one after a newer.
    let (mut first, mut newest): (HashSet<MessageId>, HashMap<usize, usize>) = (HashSet::new(), HashMap::new());
    for (id, number) in &seen {
        if first.insert(*id) {
            let newest = newest.entry(committed[*number].1).or_insert(*number);
            assert!(*number >= *newest, "I4: message {number} went out after message {newest} of its key");
            *newest = *number;
        }
    }
}
