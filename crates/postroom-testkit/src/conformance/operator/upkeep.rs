//! What stores keep, for how long, and how large they become.

use std::time::{Duration, SystemTime};

use postroom::{
    DeadFilter, KeyDeed, MessageId, Outcome, Removed, Retention, Route, Side, Sweep, TopicFilter, TopicRetention,
};

use super::super::source::{claim_all, dead, drain, holding, ids, message, renew, retry, route, settle};
use super::{DAY, Operated, deed, one_dead, written};

/// One pass over the store.
async fn swept<F: Operated>(store: &F, retention: &Retention) -> Removed {
    let (mut sweep, mut removed) = (Sweep::begin(retention), Removed::default());
    while !sweep.is_over() {
        removed += store.operator().retain(retention, &mut sweep).await.expect("retain");
    }
    removed
}

/// I13.
pub async fn what_is_finished_and_old_is_removed_and_nothing_else<F: Operated>(store: F) {
    let topics = TopicFilter::new(["orders", "kept.*"]).expect("patterns");
    let source = store.open(&Route { topics, ..route() }, "relay").await;
    renew(&source).await;
    let aged = |mut message: postroom::Message, topic: &str, days: u32| {
        message.topic = topic.to_owned();
        message.occurred_at = SystemTime::now().checked_sub(days * DAY);
        message
    };
    let finished = aged(message("a"), "orders", 10);
    let dead_one = aged(message("b"), "orders", 10);
    let retried = aged(message("c"), "orders", 10);
    let kept = aged(message("d"), "kept.one", 10);
    let shorter = aged(message("d"), "kept.not", 10);
    let unrouted = aged(message("e"), "ordres", 10);
    let young = aged(message("f"), "orders", 1);
    let last = message("g");
    let messages = [&finished, &dead_one, &retried, &kept, &shorter, &unrouted, &young, &last].map(Clone::clone);
    store.commit(&messages).await;
    let outcome = |id: MessageId| match id {
        id if id == dead_one.id => dead(false),
        id if id == retried.id => retry(1),
        _ => Outcome::Done,
    };
    // Everything is old and nothing is finished: nothing goes.
    let week = Retention { outbox: Some(7 * DAY), ..Retention::default() };
    assert_eq!(swept(&store, &week).await, Removed::default(), "not sent yet");
    let out = claim_all(&source).await;
    assert_eq!(swept(&store, &week).await, Removed::default(), "claimed, and not finished");
    settle(&source, out.iter().map(|delivery| (delivery.token, outcome(delivery.message.id)))).await;
    written(&source).await;
    let unread = aged(message("h"), "orders", 10);
    store.commit(std::slice::from_ref(&unread)).await;

    let of_topic = |patterns: &[&str], outbox| TopicRetention {
        topics: TopicFilter::new(patterns.iter().copied()).expect("patterns"),
        outbox,
    };
    let by_topic =
        Retention { topics: vec![of_topic(&["kept.not"], Some(8 * DAY)), of_topic(&["kept.*"], None)], ..week.clone() };
    assert_eq!(swept(&store, &by_topic).await, Removed { outbox: 3, ..Removed::default() });
    for (message, found_in) in [
        (&finished, None),
        (&dead_one, Some("dead_letters")),
        (&retried, Some("outbox")),
        (&kept, Some("outbox")),
        (&shorter, None),
        (&unrouted, Some("outbox")),
        (&young, Some("outbox")),
        (&unread, Some("outbox")),
    ] {
        let stored = store.operator().message(message.id).await.expect("look").map(|stored| stored.found_in);
        assert_eq!(stored.as_deref(), found_in, "{message:?}");
    }
    assert_eq!(swept(&store, &by_topic).await, Removed::default(), "once");
    assert_eq!(ids(&claim_all(&source).await), [unread.id], "the relay goes on where it was");
    let rest = Retention { outbox: Some(Duration::from_secs(60)), ..Retention::default() };
    assert_eq!(swept(&store, &rest).await, Removed { outbox: 2, ..Removed::default() }, "kept and young");
    assert!(store.audit().await.is_empty(), "what is finished goes without a word");

    store.processed(60 * DAY, 7).await;
    store.processed(Duration::from_secs(60), 3).await;
    let inbox = Retention { inbox: Some(40 * DAY), ..Retention::default() };
    assert_eq!(swept(&store, &inbox).await, Removed { inbox: 7, ..Removed::default() });
    let too_short = Retention { inbox: Some(DAY), ..Retention::default() };
    let refused = store.operator().retain(&too_short, &mut Sweep::begin(&too_short)).await;
    assert!(refused.is_err_and(|error| !error.is_transient()), "below the redelivery horizon");
}

/// I6, I13.
pub async fn what_blocks_a_key_or_is_too_young_does_not_expire<F: Operated>(store: F) {
    let source = holding(&store, "relay").await;
    let [blocking, ..] = one_dead(&store, &source, true).await;
    let other = message("z");
    store.commit(std::slice::from_ref(&other)).await;
    let out = claim_all(&source).await;
    settle(&source, out.iter().map(|delivery| (delivery.token, dead(false)))).await;
    written(&source).await;
    let retention = Retention { dead: Some(30 * DAY), audit: Some(90 * DAY), ..Retention::default() };
    assert_eq!(swept(&store, &retention).await, Removed::default());
    store.grow_older(31 * DAY).await;
    assert_eq!(swept(&store, &retention).await, Removed { dead: 1, ..Removed::default() });
    let letters = store.operator().dead_letters(Side::Out, &DeadFilter::default(), 10).await.expect("letters");
    assert_eq!(letters.iter().map(|letter| letter.id.clone()).collect::<Vec<_>>(), [blocking.id.to_string()]);
    let audit = store.audit().await;
    assert_eq!(audit.len(), 1, "{audit:?}");
    assert_eq!((audit[0].0.as_str(), audit[0].1.as_str(), audit[0].3), ("retention", "dead.expire", 1));
    store.grow_older(91 * DAY).await;
    assert_eq!(swept(&store, &retention).await, Removed { audit: 1, ..Removed::default() });
    let audit = store.audit().await;
    assert_eq!(
        audit.iter().map(|row| row.1.as_str()).collect::<Vec<_>>(),
        ["audit.expire"],
        "the trail says that it was cut"
    );
}

/// M73.
pub async fn sizes_are_known_and_noted_once_an_hour<F: Operated>(store: F) {
    let operator = store.operator();
    let empty = operator.vitals().await.expect("vitals");
    store.commit(&[message("a"), message("b")]).await;
    for _ in 0..2 {
        operator.note_sizes().await.expect("note the sizes");
    }
    let vitals = operator.vitals().await.expect("vitals");
    let off = vitals.now.duration_since(SystemTime::now()).unwrap_or_else(|behind| behind.duration());
    assert!(off < Duration::from_secs(60), "the database's clock: {off:?}");
    assert!(vitals.bytes > 0 && vitals.bytes >= empty.bytes, "{vitals:?}");
    assert!(vitals.tables.iter().any(|table| table.table.ends_with("outbox")), "{vitals:?}");
    // One note is not a growth, and one that is young is none either.
    assert!(vitals.growth.is_none() && vitals.tables.iter().all(|table| table.growth.is_none()), "{vitals:?}");
}

/// For those who look at many stores in turn: never no where something has committed and is due.
pub async fn work_waits_as_long_as_something_due_is_not_done<F: Operated>(store: F) {
    let operator = store.operator();
    let orders = ["orders".to_owned()];
    let waits = async || operator.work_waits(&orders).await.expect("look whether work waits");
    assert!(waits().await, "the route is not registered");
    let source = holding(&store, "relay").await;
    assert!(!waits().await);
    assert!(operator.work_waits(&["orders".to_owned(), "other".to_owned()]).await.expect("work"), "the other is not");
    let done = async || {
        while !drain(&source).await.is_empty() {}
        written(&source).await;
    };
    store.commit(&[message("a"), message("b")]).await;
    assert!(waits().await);
    done().await;
    assert!(!waits().await, "everything is sent");
    // A row that commits after later ones were read is seen, whether its transaction was known or not.
    if let Some(open) = store.begin(&[message("late")]).await {
        store.commit(&[message("c")]).await;
        done().await;
        store.end(open).await;
        assert!(waits().await, "I1");
        done().await;
        assert!(!waits().await);
    }
    // What is parked counts when it is due.
    store.commit(&[message("d")]).await;
    let out = claim_all(&source).await;
    settle(&source, [(out[0].token, retry(1))]).await;
    written(&source).await;
    assert!(!waits().await, "its time has not come");
    store.make_due().await;
    assert!(waits().await);
    done().await;
    assert!(!waits().await);
    // What an operator holds back does not.
    assert!(operator.act_on_key("orders", "e", KeyDeed::Park, &deed()).await.expect("park"));
    renew(&source).await;
    store.commit(&[message("e")]).await;
    let out = claim_all(&source).await;
    settle(&source, [(out[0].token, Outcome::Queue)]).await;
    written(&source).await;
    store.make_due().await;
    assert!(!waits().await, "the key is parked");
    assert!(operator.act_on_key("orders", "e", KeyDeed::Unpark, &deed()).await.expect("unpark"));
    store.make_due().await;
    assert!(waits().await);
}
