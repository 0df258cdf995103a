//! What every `Operator` promises to people and programs.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postroom::{
    Cause, DeadDeed, DeadFilter, DeadLetter, Deed, KeyDeed, ListedPlace, MessageFilter, MessageId, OnDead, Operator,
    Order, Outcome, Place, Report, Route, RouteChange, Side, Source, TopicFilter, WaitsFor,
};

mod archive;
mod operations;
mod upkeep;

pub use archive::*;
pub use operations::*;
pub use upkeep::*;

use super::source::{Outbox, claim_all, dead, drain, holding, ids, ids_of, message, renew, retry, route, settle};

/// A store with an outbox and an operator's end.
#[async_trait]
pub trait Operated: Outbox {
    /// The operator's end of it.
    fn operator(&self) -> Arc<dyn Operator>;

    /// The rows of the audit table, oldest first: actor, action, reason, and how many messages.
    async fn audit(&self) -> Vec<(String, String, String, usize)>;

    /// Messages that a consumer noted as processed so long ago.
    async fn processed(&self, age: Duration, count: usize);

    /// Dead letters of both sides, audit rows, and what is archived or came back, are so much older than they were.
    async fn grow_older(&self, by: Duration);

    /// The last step of each operation was so long ago; negative: a clock that was ahead has noted it.
    async fn stepped_ago(&self, seconds: f64);
}

/// The tests of one implementation.
#[macro_export]
macro_rules! operator_conforms {
    ($fixture:ty) => {
        $crate::conformance_cases!(
            $fixture,
            operator: a_store_that_nobody_used_is_shown_as_such
            what_waits_is_counted_and_found
            a_key_waits_for_its_retry_and_is_listed
            a_parked_key_sends_nothing_until_it_is_unparked
            a_blocked_key_goes_on_without_its_dead_message_when_it_is_skipped
            dead_letters_are_found_by_each_condition
            what_is_retried_goes_out_again_in_front_of_its_key
            what_is_discarded_never_comes_back
            a_letter_that_the_position_has_not_passed_is_not_discarded
            a_route_is_changed_for_every_relay_at_once
            what_cannot_be_done_changes_nothing_and_leaves_no_audit_row
            the_inbox_is_not_pruned_below_its_horizon
            topics_that_no_route_takes_are_named
            a_message_is_called_acked_only_where_that_is_known
            sinks_are_shown_as_their_relays_said
            messages_are_listed_by_each_condition
            a_message_is_shown_with_everything_that_is_stored
            a_route_that_is_gone_is_forgotten_and_nothing_of_it_by_mistake
            what_is_finished_and_old_is_removed_and_nothing_else
            what_blocks_a_key_or_is_too_young_does_not_expire
            sizes_are_known_and_noted_once_an_hour
            work_waits_as_long_as_something_due_is_not_done
            what_was_sent_is_replayed_in_order_with_its_id_and_nothing_else_is
            what_is_replayed_says_of_which_operation_it_is
            what_is_replayed_behind_waits_for_what_waits
            a_canary_goes_first_and_the_rest_waits
            a_paused_operation_gives_out_nothing_until_it_is_resumed
            an_operation_keeps_to_its_rate_whatever_the_clock_does
            dead_letters_are_grouped_and_acted_on_by_group
            a_report_is_true_whatever_others_do_meanwhile
            what_leaves_for_an_archive_leaves_once_and_nothing_else_does
            what_comes_back_is_sent_only_by_a_replay
        );
    };
}

const DAY: Duration = Duration::from_secs(24 * 3600);

pub(super) fn deed() -> Deed {
    Deed { actor: "ann".to_owned(), reason: "ticket 7".to_owned() }
}

async fn places<F: Operated>(store: &F, id: MessageId) -> Vec<Place> {
    let found = store.operator().whereabouts(id).await.expect("look for a message");
    found.iter().map(|place| place.state).collect()
}

/// Settles one message of a fresh outbox as dead; returns it and those behind it, which are queued up.
async fn one_dead<F: Operated>(store: &F, source: &Arc<dyn Source>, blocks_key: bool) -> [postroom::Message; 3] {
    let messages = [message("a"), message("a"), message("a")];
    store.commit(&messages).await;
    let out = claim_all(source).await;
    assert_eq!(ids(&out), ids_of(&messages));
    let behind = || if blocks_key { Outcome::Queue } else { Outcome::Done };
    settle(source, [(out[0].token, dead(blocks_key)), (out[1].token, behind()), (out[2].token, behind())]).await;
    written(source).await;
    messages
}

/// Positions are written by and by.
async fn written(source: &Arc<dyn Source>) {
    while source.settle(&[]).await.expect("settle").unwritten {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub async fn a_store_that_nobody_used_is_shown_as_such<F: Operated>(store: F) {
    let operator = store.operator();
    let status = operator.status().await.expect("status");
    assert!(status.schema_version > 0 && status.routes.is_empty() && status.outbox_rows == 0, "{status:?}");
    assert!(operator.routes().await.expect("routes").is_empty());
    assert!(operator.waiting_keys(postroom::Side::Out, None, 10).await.expect("keys").is_empty());
    assert!(operator.whereabouts(MessageId::new()).await.expect("whereabouts").is_empty());
    for side in [Side::Out, Side::In] {
        assert!(operator.dead_letters(side, &DeadFilter::default(), 10).await.expect("dead letters").is_empty());
        assert_eq!(operator.dead_payload(side, "orders", 1).await.expect("a payload"), None);
    }
    assert!(store.audit().await.is_empty(), "looking writes nothing");
}

pub async fn what_waits_is_counted_and_found<F: Operated>(store: F) {
    let source = holding(&store, "relay").await;
    let messages = [message("a"), message("b"), message("c").delay(Duration::from_secs(3600)), message("d")];
    store.commit(&messages).await;
    let status = store.operator().status().await.expect("status");
    assert_eq!((status.routes.len(), status.outbox_rows), (1, 4));
    let route = &status.routes[0];
    assert_eq!((route.backlog, route.parked, route.dead, route.lanes), (4, 0, 0, route.lanes_held));
    assert!(route.oldest_unsent_seconds.is_some());
    let [relay] = route.relays.as_slice() else { panic!("{:?}", route.relays) };
    assert_eq!((relay.name.as_str(), relay.alive, relay.lanes), ("relay", true, route.lanes));
    assert!(relay.seen_seconds_ago.is_some() && relay.link.trouble.is_none(), "{relay:?}");
    for message in &messages {
        assert_eq!(places(&store, message.id).await, [Place::Waiting]);
    }
    let out = claim_all(&source).await;
    let outcome = |id: MessageId| match id {
        id if id == messages[0].id => Outcome::Done,
        id if id == messages[1].id => retry(1),
        id if id == messages[2].id => Outcome::Schedule,
        _ => dead(false),
    };
    settle(&source, out.iter().map(|delivery| (delivery.token, outcome(delivery.message.id)))).await;
    written(&source).await;
    let status = store.operator().status().await.expect("status");
    let route = &status.routes[0];
    // What is parked and not delayed is unsent too.
    assert_eq!((route.backlog, route.parked, route.scheduled, route.dead), (1, 2, 1, 1));
    assert_eq!((route.retrying, route.last_failure.as_deref()), (1, Some("the broker said no")));
    assert!(route.oldest_unsent_seconds.is_some() && route.oldest_unread_seconds.is_none(), "{route:?}");
    for (message, place) in messages.iter().zip([Place::Acked, Place::Retry, Place::Scheduled, Place::Dead]) {
        assert_eq!(places(&store, message.id).await, [place]);
    }
    let found = store.operator().whereabouts(messages[1].id).await.expect("whereabouts");
    assert_eq!((found[0].attempts, found[0].key.as_deref()), (1, Some("b")));
    assert!(found[0].because.iter().any(|line| line.contains("the broker said no")), "{:?}", found[0].because);
    let other = store.open(&Route { topics: other_topics(), name: "other".to_owned(), ..self::route() }, "x").await;
    renew(&other).await;
    assert_eq!(places(&store, messages[0].id).await, [Place::Acked, Place::NotTaken], "by the names of the routes");
}

fn other_topics() -> TopicFilter {
    TopicFilter::new(["billing"]).expect("a filter")
}

pub async fn a_key_waits_for_its_retry_and_is_listed<F: Operated>(store: F) {
    let source = holding(&store, "relay").await;
    let messages = [message("a"), message("a"), message("b")];
    store.commit(&messages).await;
    let out = claim_all(&source).await;
    let outcome = |id: MessageId| match id {
        id if id == messages[0].id => retry(3),
        id if id == messages[1].id => Outcome::Queue,
        _ => Outcome::Done,
    };
    settle(&source, out.iter().map(|delivery| (delivery.token, outcome(delivery.message.id)))).await;
    for route in [None, Some("orders")] {
        let keys = store.operator().waiting_keys(postroom::Side::Out, route, 10).await.expect("keys");
        assert_eq!(keys.len(), 1, "{keys:?}");
        let key = &keys[0];
        assert_eq!((key.route.as_str(), key.key.as_str(), key.waits_for), ("orders", "a", WaitsFor::Retry));
        assert_eq!((key.messages, key.attempts, key.head.clone()), (2, 3, Some(messages[0].id.to_string())));
        assert!(key.retry_in_seconds.is_some_and(|seconds| seconds > 3000.0), "{key:?}");
        assert_eq!(key.reason.as_deref(), Some("the broker said no"));
    }
    assert!(store.operator().waiting_keys(postroom::Side::Out, Some("other"), 10).await.expect("keys").is_empty());
    assert_eq!(places(&store, messages[1].id).await, [Place::Queued]);
}

/// I12.
pub async fn a_parked_key_sends_nothing_until_it_is_unparked<F: Operated>(store: F) {
    let (source, operator) = (holding(&store, "relay").await, store.operator());
    assert!(operator.act_on_key("orders", "a", KeyDeed::Park, &deed()).await.expect("park"));
    assert!(!operator.act_on_key("orders", "a", KeyDeed::Park, &deed()).await.expect("park"), "it is parked already");
    renew(&source).await;
    let messages = [message("a"), message("a"), message("b")];
    store.commit(&messages).await;
    let mut free = Vec::new();
    for delivery in claim_all(&source).await {
        if !delivery.behind {
            free.push(delivery.message.id);
        }
        let outcome = if delivery.behind { Outcome::Queue } else { Outcome::Done };
        settle(&source, [(delivery.token, outcome)]).await;
    }
    assert_eq!(free, [messages[2].id]);
    store.make_due().await;
    assert_eq!(drain(&source).await, []);
    let keys = operator.waiting_keys(postroom::Side::Out, None, 10).await.expect("keys");
    assert_eq!((keys[0].waits_for, keys[0].messages, keys[0].retry_in_seconds), (WaitsFor::Parked, 2, None));
    assert_eq!(keys[0].reason.as_deref(), Some("ticket 7"));
    assert_eq!(places(&store, messages[0].id).await, [Place::Blocked]);
    assert!(!operator.act_on_key("orders", "a", KeyDeed::Skip, &deed()).await.expect("skip"), "no message is dead");
    assert!(operator.act_on_key("orders", "a", KeyDeed::Unpark, &deed()).await.expect("unpark"));
    assert!(!operator.act_on_key("orders", "a", KeyDeed::Unpark, &deed()).await.expect("unpark"));
    store.make_due().await;
    assert_eq!(drain(&source).await, ids_of(&messages[..2]), "I4");
    let audit = store.audit().await;
    let row = |action: &str| ("ann".to_owned(), action.to_owned(), "ticket 7".to_owned(), 0);
    assert_eq!(audit, [row("key.park"), row("key.unpark")], "a row for each deed, and none for what was no deed");
}

pub async fn a_blocked_key_goes_on_without_its_dead_message_when_it_is_skipped<F: Operated>(store: F) {
    let route = Route { on_dead: OnDead::Block, ..route() };
    let source = store.open(&route, "relay").await;
    renew(&source).await;
    let messages = one_dead(&store, &source, true).await;
    let keys = store.operator().waiting_keys(postroom::Side::Out, None, 10).await.expect("keys");
    assert_eq!((keys[0].waits_for, keys[0].messages), (WaitsFor::Dead, 2));
    assert_eq!(keys[0].head, Some(messages[0].id.to_string()));
    assert_eq!(drain(&source).await, []);
    assert!(store.operator().act_on_key("orders", "a", KeyDeed::Skip, &deed()).await.expect("skip"));
    store.make_due().await;
    assert_eq!(drain(&source).await, ids_of(&messages[1..]));
    let left = store.operator().dead_letters(Side::Out, &DeadFilter::default(), 10).await.expect("dead letters");
    assert_eq!(left.len(), 1, "the dead message stays among the dead letters");
}

pub async fn dead_letters_are_found_by_each_condition<F: Operated>(store: F) {
    let source = holding(&store, "relay").await;
    let mut message = message("a").tenant("t-1").aggregate("order", "o-1", 3).header("h", "v");
    message.payload = vec![0, 0xff].into();
    let other = postroom::Message::new("billing", "bill.sent", "y");
    store.commit(&[message.clone(), other.clone()]).await;
    let out = claim_all(&source).await;
    for delivery in &out {
        let error = if delivery.message.id == message.id { "no such customer" } else { "too large" }.to_owned();
        let cause = if delivery.message.id == message.id { Cause::Permanent } else { Cause::Poison };
        settle(&source, [(delivery.token, Outcome::Dead { attempts: 5, cause, error, blocks_key: false })]).await;
    }
    let find = async |filter: DeadFilter| {
        let found = store.operator().dead_letters(Side::Out, &filter, 10).await.expect("dead letters");
        found.into_iter().map(|letter| letter.id).collect::<Vec<_>>()
    };
    let some = |text: &str| Some(text.to_owned());
    let none = DeadFilter::default;
    let hour = Some(Duration::from_secs(3600));
    let matching = [
        DeadFilter { id: Some(message.id), ..none() },
        DeadFilter { topic: some("orders"), ..none() },
        DeadFilter { kind: some("order.placed"), ..none() },
        DeadFilter { tenant_id: some("t-1"), ..none() },
        DeadFilter { aggregate_id: some("o-1"), ..none() },
        DeadFilter { error: some("customer"), newer_than: hour, route: some("orders"), ..none() },
    ];
    for filter in matching {
        assert_eq!(find(filter.clone()).await, [message.id.to_string()], "{filter:?}");
    }
    for filter in [
        DeadFilter { route: some("other"), ..none() },
        DeadFilter { older_than: hour, ..none() },
        // Text, and not a pattern.
        DeadFilter { error: some("%"), ..none() },
        DeadFilter { error: some("_o such"), ..none() },
    ] {
        assert!(find(filter.clone()).await.is_empty(), "{filter:?}");
    }
    assert_eq!(find(none()).await.len(), 2);
    let operator = store.operator();
    assert_eq!(operator.dead_letters(Side::Out, &none(), 1).await.expect("dead letters").len(), 1);
    assert!(operator.dead_letters(Side::In, &none(), 10).await.expect("dead letters").is_empty());
    let all = operator.dead_letters(Side::Out, &none(), 10).await.expect("dead letters");
    let behind = async |letter: &DeadLetter, filter: DeadFilter| {
        let found = operator.dead_letters_behind(Some(&letter.cursor()), Side::Out, &filter, 1).await;
        found.expect("a page").into_iter().map(|letter| letter.id).collect::<Vec<_>>()
    };
    assert_eq!(behind(&all[0], none()).await, [all[1].id.as_str()]);
    assert!(behind(&all[0], DeadFilter { error: some("%"), ..none() }).await.is_empty());
    assert!(behind(&all[1], none()).await.is_empty());
    let filter = DeadFilter { id: Some(message.id), ..none() };
    let letter = operator.dead_letters(Side::Out, &filter, 10).await.expect("dead letters").remove(0);
    assert_eq!((letter.attempts, letter.cause, letter.payload_bytes), (5, Cause::Permanent, 2));
    assert_eq!((letter.error.as_str(), letter.headers["h"].as_str()), ("no such customer", "v"));
    assert_eq!((letter.key.as_deref(), letter.tenant_id.as_deref()), (Some("a"), Some("t-1")));
    assert_eq!(letter.history.last().map(|failed| failed.error.as_str()), Some("no such customer"));
    let payload = operator.dead_payload(Side::Out, "orders", letter.seq).await.expect("a payload");
    assert_eq!(payload, Some(vec![0, 0xff]));
}

pub async fn what_is_retried_goes_out_again_in_front_of_its_key<F: Operated>(store: F) {
    let source = store.open(&Route { on_dead: OnDead::Block, ..route() }, "relay").await;
    renew(&source).await;
    let messages = one_dead(&store, &source, true).await;
    let filter = DeadFilter { id: Some(messages[0].id), ..DeadFilter::default() };
    let done = store
        .operator()
        .act_on_dead(DeadDeed::Retry, Side::Out, &filter, 10, &deed(), &mut |_| ())
        .await
        .expect("retry");
    assert_eq!(done.iter().map(|letter| letter.id.clone()).collect::<Vec<_>>(), [messages[0].id.to_string()]);
    store.make_due().await;
    let first = claim_all(&source).await;
    assert_eq!((first[0].message.id, first[0].attempts), (messages[0].id, 0), "with its id, and all its attempts");
    settle(&source, first.iter().map(|delivery| (delivery.token, Outcome::Done))).await;
    let mut out = ids(&first);
    out.extend(drain(&source).await);
    assert_eq!(out, ids_of(&messages), "I4");
    let again = store
        .operator()
        .act_on_dead(DeadDeed::Retry, Side::Out, &filter, 10, &deed(), &mut |_| ())
        .await
        .expect("retry");
    assert!(again.is_empty(), "it is dead no more");
    let row = ("ann".to_owned(), "dead.retry".to_owned(), "ticket 7".to_owned(), 1);
    assert_eq!(store.audit().await, [row]);
}

pub async fn what_is_discarded_never_comes_back<F: Operated>(store: F) {
    let source = store.open(&Route { on_dead: OnDead::Block, ..route() }, "relay").await;
    renew(&source).await;
    let messages = one_dead(&store, &source, true).await;
    let all = DeadFilter::default();
    let done = store
        .operator()
        .act_on_dead(DeadDeed::Discard, Side::Out, &all, 10, &deed(), &mut |_| ())
        .await
        .expect("discard");
    assert_eq!(done.len(), 1);
    store.make_due().await;
    assert_eq!(drain(&source).await, ids_of(&messages[1..]), "its key goes on");
    source.release().await.expect("release");
    let next = holding(&store, "next").await;
    assert_eq!(drain(&next).await, []);
    let row = ("ann".to_owned(), "dead.discard".to_owned(), "ticket 7".to_owned(), 1);
    assert_eq!(store.audit().await, [row]);
}

/// A crash of the relay would read it again and send it, although a person was told that it is gone.
pub async fn a_letter_that_the_position_has_not_passed_is_not_discarded<F: Operated>(store: F) {
    let source = holding(&store, "relay").await;
    // One key, so that both are in one lane.
    store.commit(&[message("a"), message("a")]).await;
    let out = claim_all(&source).await;
    // The first is open, so no position passes the second.
    settle(&source, [(out[1].token, dead(false))]).await;
    let all = DeadFilter::default();
    let done = store
        .operator()
        .act_on_dead(DeadDeed::Discard, Side::Out, &all, 10, &deed(), &mut |_| ())
        .await
        .expect("discard");
    assert!(done.is_empty(), "{done:?}");
    assert_eq!(store.operator().dead_letters(Side::Out, &all, 10).await.expect("dead letters").len(), 1);
    assert!(store.audit().await.is_empty());
    settle(&source, [(out[0].token, Outcome::Done)]).await;
    written(&source).await;
    let done = store
        .operator()
        .act_on_dead(DeadDeed::Discard, Side::Out, &all, 10, &deed(), &mut |_| ())
        .await
        .expect("discard");
    assert_eq!(done.len(), 1);
}

pub async fn a_route_is_changed_for_every_relay_at_once<F: Operated>(store: F) {
    let operator = store.operator();
    let change = RouteChange { topics: Some(other_topics()), ..RouteChange::default() };
    assert_eq!(operator.set_route("orders", &change, &deed()).await.expect("set the route"), None, "there is none");
    assert!(store.audit().await.is_empty());
    let source = holding(&store, "relay").await;
    let routes = operator.routes().await.expect("routes");
    assert_eq!(routes.len(), 1);
    assert_eq!((routes[0].topics.as_slice(), routes[0].order), (&["*".to_owned()][..], Some(Order::Key)));
    let now = operator.set_route("orders", &change, &deed()).await.expect("set the route").expect("the route");
    assert_eq!((now.topics, now.order), (other_topics(), Some(Order::Key)), "what is not named stays");
    let billing = postroom::Message::new("billing", "bill.sent", "x");
    store.commit(&[message("a"), billing.clone()]).await;
    assert_eq!(drain(&source).await, [billing.id], "without a restart");
    let change = RouteChange { order: Some(Order::None), on_dead: Some(OnDead::Skip), ..RouteChange::default() };
    operator.set_route("orders", &change, &deed()).await.expect("set the route").expect("the route");
    assert_eq!(renew(&source).await.order, Some(Order::None), "the relay is told");
    let routes = operator.routes().await.expect("routes");
    assert_eq!((routes[0].order, routes[0].set_by.as_str()), (Some(Order::None), "ann"));
    let actions: Vec<String> = store.audit().await.into_iter().map(|(_, action, ..)| action).collect();
    assert_eq!(actions, ["route.set", "route.set"]);
}

pub async fn what_cannot_be_done_changes_nothing_and_leaves_no_audit_row<F: Operated>(store: F) {
    let operator = store.operator();
    let error = operator.act_on_key("nowhere", "a", KeyDeed::Park, &deed()).await.expect_err("there is no such route");
    assert!(!error.is_transient());
    let _source = holding(&store, "relay").await;
    for (what, side) in [(DeadDeed::Retry, Side::Out), (DeadDeed::Discard, Side::In)] {
        let done = operator
            .act_on_dead(what, side, &DeadFilter::default(), 10, &deed(), &mut |_| ())
            .await
            .expect("nothing to do");
        assert!(done.is_empty());
    }
    assert!(store.audit().await.is_empty());
}

pub async fn the_inbox_is_not_pruned_below_its_horizon<F: Operated>(store: F) {
    store.processed(60 * DAY, 7).await;
    store.processed(Duration::from_secs(60), 3).await;
    let operator = store.operator();
    let mut seen = 0;
    let refused = operator.prune_inbox(Duration::from_secs(1), &deed(), &mut |pruned| seen = pruned).await;
    assert!(refused.is_err_and(|error| !error.is_transient()));
    assert_eq!(operator.prune_inbox(30 * DAY, &deed(), &mut |pruned| seen = pruned).await.expect("prune"), 7);
    assert_eq!(seen, 7, "progress is told");
    assert_eq!(operator.prune_inbox(30 * DAY, &deed(), &mut |_| {}).await.expect("prune"), 0);
    let actions: Vec<String> = store.audit().await.into_iter().map(|(_, action, ..)| action).collect();
    assert_eq!(actions, ["inbox.prune"], "a run that prunes nothing leaves no row");
}

pub async fn topics_that_no_route_takes_are_named<F: Operated>(store: F) {
    let orders = Route { topics: TopicFilter::new(["orders", "billing.*"]).expect("patterns"), ..route() };
    let source = store.open(&orders, "relay").await;
    renew(&source).await;
    let mistyped = || postroom::Message::new("ordres", "order.placed", "x");
    store.commit(&[message("a"), mistyped(), mistyped(), postroom::Message::new("billing.paid", "k", "x")]).await;
    drain(&source).await;
    let unrouted = store.operator().unrouted_topics().await.expect("unrouted topics");
    let named: Vec<(&str, i64)> = unrouted.iter().map(|topic| (topic.topic.as_str(), topic.messages)).collect();
    assert_eq!(named, [("ordres", 2)]);
    assert_eq!(store.operator().status().await.expect("status").unrouted[0].topic, "ordres");
    // Whoever widens the route later reads what comes then.
    let change = RouteChange { topics: Some(TopicFilter::all()), ..RouteChange::default() };
    store.operator().set_route(&orders.name, &change, &deed()).await.expect("set");
    assert!(store.operator().unrouted_topics().await.expect("unrouted topics").is_empty());
}

pub async fn a_message_is_called_acked_only_where_that_is_known<F: Operated>(store: F) {
    let orders = Route { topics: TopicFilter::new(["orders"]).expect("patterns"), ..route() };
    let source = store.open(&orders, "relay").await;
    renew(&source).await;
    let (sent, discarded) = (message("a"), message("b"));
    let other = postroom::Message::new("billing", "k", "x");
    store.commit(&[sent.clone(), discarded.clone(), other.clone()]).await;
    let out = claim_all(&source).await;
    let outcome = |id: MessageId| if id == sent.id { Outcome::Done } else { dead(false) };
    let settlements: Vec<_> = out.iter().map(|delivery| (delivery.token, outcome(delivery.message.id))).collect();
    settle(&source, settlements).await;
    written(&source).await;
    let all = DeadFilter::default();
    store.operator().act_on_dead(DeadDeed::Discard, Side::Out, &all, 10, &deed(), &mut |_| ()).await.expect("discard");
    assert_eq!(places(&store, sent.id).await, [Place::Acked]);
    assert_eq!(places(&store, discarded.id).await, [Place::Discarded]);
    let why = store.operator().whereabouts(discarded.id).await.expect("look")[0].because.join(" ");
    assert!(why.contains("ann") && why.contains("ticket 7"), "{why}");
    assert_eq!(places(&store, other.id).await, [Place::NotTaken]);
    // The audit row names no route: with a second one nobody knows on which of them the message was dead.
    let second = store.open(&Route { name: "second".to_owned(), ..route() }, "second").await;
    renew(&second).await;
    drain(&second).await;
    written(&second).await;
    assert_eq!(places(&store, discarded.id).await, [Place::Passed, Place::Passed]);
    assert_eq!(places(&store, sent.id).await, [Place::Acked, Place::Acked]);
    // A topic that a route has taken only since: what it has passed, nobody sent.
    let both = TopicFilter::new(["orders", "billing"]).expect("patterns");
    let change = RouteChange { topics: Some(both), ..RouteChange::default() };
    store.operator().set_route("orders", &change, &deed()).await.expect("change").expect("a route");
    let at_orders = store.operator().whereabouts(other.id).await.expect("look");
    let at_orders = at_orders.iter().find(|place| place.route == "orders").expect("orders");
    assert_eq!(at_orders.state, Place::Passed, "{:?}", at_orders.because);
}

pub async fn sinks_are_shown_as_their_relays_said<F: Operated>(store: F) {
    let source = holding(&store, "host/7/0199c9a2-7d2e-7bd0-a8d2-0b6d9c1c9a01").await;
    let relay = async || store.operator().status().await.expect("status").routes[0].relays[0].clone();
    let sink = Some("rabbitmq amqp://broker".to_owned());
    let down = Report { sink: sink.clone(), sink_down: Some("connection refused".to_owned()), ..Report::default() };
    source.renew(&down).await.expect("renew");
    let shown = relay().await;
    assert_eq!((shown.short_name(), &shown.link.name), ("host/7", &sink));
    let trouble = shown.link.trouble.expect("trouble");
    assert_eq!((trouble.blocked, trouble.error.as_str()), (false, "connection refused"));
    let blocked = Report { sink: sink.clone(), sink_blocked: Some("an alarm".to_owned()), ..Report::default() };
    source.renew(&blocked).await.expect("renew");
    let trouble = relay().await.link.trouble.expect("trouble");
    assert_eq!((trouble.blocked, trouble.error.as_str()), (true, "an alarm"));
    source.renew(&Report { sink, ..Report::default() }).await.expect("renew");
    assert_eq!(relay().await.link.trouble, None);
    source.release().await.expect("release");
    assert!(store.operator().status().await.expect("status").routes[0].relays.is_empty());
}

pub async fn messages_are_listed_by_each_condition<F: Operated>(store: F) {
    let source = holding(&store, "relay").await;
    let messages =
        [message("a"), message("b"), message("c").delay(Duration::from_secs(3600)), message("d"), message("b")];
    store.commit(&messages).await;
    let out = claim_all(&source).await;
    let outcome = |id: MessageId| match id {
        id if id == messages[0].id => Outcome::Done,
        id if id == messages[1].id => retry(2),
        id if id == messages[2].id => Outcome::Schedule,
        id if id == messages[3].id => dead(false),
        _ => Outcome::Queue,
    };
    settle(&source, out.iter().map(|delivery| (delivery.token, outcome(delivery.message.id)))).await;
    written(&source).await;
    let unread = message("e");
    store.commit(std::slice::from_ref(&unread)).await;
    let other = postroom::Message::new("nobody.takes.it", "k", "x");
    let find = async |filter: MessageFilter| {
        let listed = store.operator().messages(&filter, 100).await.expect("messages");
        assert_eq!(listed.next, None, "{listed:?}");
        let mut found: Vec<(String, ListedPlace)> =
            listed.messages.into_iter().map(|message| (message.id, message.state)).collect();
        found.sort_unstable_by(|a, b| a.0.cmp(&b.0));
        found
    };
    let none = MessageFilter::default;
    let mut all: Vec<(String, ListedPlace)> = [
        (&messages[0], ListedPlace::Done),
        (&messages[1], ListedPlace::Retry),
        (&messages[2], ListedPlace::Scheduled),
        (&messages[3], ListedPlace::Dead),
        (&messages[4], ListedPlace::Queued),
        (&unread, ListedPlace::Waiting),
    ]
    .map(|(message, place)| (message.id.to_string(), place))
    .into();
    all.sort_unstable_by(|a, b| a.0.cmp(&b.0));
    assert_eq!(find(none()).await, all);
    for (id, place) in &all {
        let found = find(MessageFilter { place: Some(*place), ..none() }).await;
        assert_eq!(found, [(id.clone(), *place)]);
    }
    let of_key = find(MessageFilter { key: Some("b".to_owned()), ..none() }).await;
    assert_eq!(of_key.len(), 2, "{of_key:?}");
    assert_eq!(find(MessageFilter { topic: Some("orders".to_owned()), ..none() }).await.len(), 6);
    for filter in [
        MessageFilter { topic: Some(other.topic.clone()), ..none() },
        MessageFilter { route: Some("other".to_owned()), ..none() },
        MessageFilter { older_than: Some(Duration::from_secs(3600)), ..none() },
    ] {
        assert_eq!(find(filter.clone()).await, [], "{filter:?}");
    }
    let recent = MessageFilter { newer_than: Some(Duration::from_secs(3600)), ..none() };
    assert_eq!(find(recent).await.len(), 6);
    let cut = store.operator().messages(&none(), 2).await.expect("messages");
    assert_eq!((cut.messages.len(), cut.next.is_some()), (2, true));
    assert_eq!(cut.messages[0].id, unread.id.to_string(), "the newest first");
    // Page by page, the list is the same: nothing twice and nothing left out.
    let whole = store.operator().messages(&none(), 100).await.expect("messages");
    let whole: Vec<_> = whole.messages.into_iter().map(|message| (message.id, message.route)).collect();
    for limit in [1, 2] {
        let mut paged = Vec::new();
        let mut after = None;
        loop {
            let filter = MessageFilter { after, ..none() };
            let page = store.operator().messages(&filter, limit).await.expect("a page");
            assert!(page.messages.len() as i64 <= limit);
            paged.extend(page.messages.into_iter().map(|message| (message.id, message.route)));
            let Some(next) = page.next else { break };
            after = Some(next.parse().expect("a place"));
        }
        assert_eq!(paged, whole);
    }
    // One that no route takes is nobody's, and must be found all the same.
    let change = RouteChange { topics: Some(TopicFilter::new(["orders"]).expect("a name")), ..RouteChange::default() };
    store.operator().set_route("orders", &change, &deed()).await.expect("set").expect("a route");
    store.commit(std::slice::from_ref(&other)).await;
    let unrouted = [(other.id.to_string(), ListedPlace::Unrouted)];
    assert_eq!(find(MessageFilter { topic: Some(other.topic.clone()), ..none() }).await, unrouted);
    assert_eq!(find(MessageFilter { place: Some(ListedPlace::Unrouted), ..none() }).await, unrouted);
    assert_eq!(find(MessageFilter { route: Some("orders".to_owned()), ..none() }).await.len(), 6);
    assert_eq!(find(none()).await.len(), 7);
}

pub async fn a_message_is_shown_with_everything_that_is_stored<F: Operated>(store: F) {
    let mut message = message("a").tenant("t-1").aggregate("order", "o-1", 3).header("h", "v").routing_key("r.k");
    message.payload = vec![0, 0xff].into();
    store.commit(std::slice::from_ref(&message)).await;
    let shown = store.operator().message(message.id).await.expect("a message").expect("it is stored");
    assert_eq!((shown.id.as_str(), shown.topic.as_str()), (message.id.to_string().as_str(), "orders"));
    assert_eq!((shown.key.as_deref(), shown.routing_key.as_deref()), (Some("a"), Some("r.k")));
    assert_eq!((shown.headers["h"].as_str(), shown.payload), ("v", vec![0, 0xff]));
    assert_eq!((shown.tenant_id.as_deref(), shown.aggregate_version), (Some("t-1"), Some(3)));
    assert_eq!(shown.found_in, "outbox");
    assert_eq!(store.operator().message(MessageId::new()).await.expect("a look"), None);
}

/// I6, I20.
pub async fn a_route_that_is_gone_is_forgotten_and_nothing_of_it_by_mistake<F: Operated>(store: F) {
    let operator = store.operator();
    let forget = async |discard| operator.forget_route("orders", discard, &deed()).await.expect("forget");
    assert_eq!(forget(true).await, None, "it never ran");
    let source = holding(&store, "relay").await;
    one_dead(&store, &source, false).await;
    let unread = message("z");
    store.commit(std::slice::from_ref(&unread)).await;
    let running = forget(true).await.expect("a route");
    assert_eq!((running.done, running.relays), (false, 1), "a relay runs it");
    source.release().await.expect("release");
    let kept = forget(false).await.expect("a route");
    assert_eq!((kept.done, kept.unread, kept.parked, kept.dead, kept.relays), (false, 1, 0, 1, 0));
    assert_eq!(operator.routes().await.expect("routes").len(), 1);
    assert!(store.audit().await.is_empty(), "nothing was changed");
    let gone = forget(true).await.expect("a route");
    assert!(gone.done && gone.dead == 1, "{gone:?}");
    assert!(operator.routes().await.expect("routes").is_empty());
    assert!(operator.dead_letters(Side::Out, &DeadFilter::default(), 10).await.expect("dead letters").is_empty());
    let row = ("ann".to_owned(), "route.forget".to_owned(), "ticket 7".to_owned(), 1);
    assert_eq!(store.audit().await, [row], "the ids of what was deleted");
    // One of the same name begins anew, with what is left.
    let again = holding(&store, "again").await;
    assert!(drain(&again).await.contains(&unread.id));
}
