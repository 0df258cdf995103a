//! Blocked keys, operators beside a relay, bounds, and relays that die over a message.

use std::time::Duration;

use postroom::{
    Cause, DeadDeed, DeadFilter, Deed, KeyDeed, MessageId, Operator, Outcome, Place, Report, Side, Source, WaitsFor,
    Want,
};
use postroom_testkit::postgres::Database;

use crate::deaths::{dies, succeeds};
use crate::setup::{ROUTE, claim_all, connector, done, drain, enqueue, prepared, settled, source, store};

fn deed() -> Deed {
    Deed { actor: "test".to_owned(), reason: "because".to_owned() }
}

fn dead(blocks_key: bool) -> Outcome {
    Outcome::Dead { attempts: 8, cause: Cause::Exhausted, error: "no".to_owned(), blocks_key }
}

async fn states(database: &Database, ids: &[MessageId]) -> Vec<Place> {
    let mut states = Vec::new();
    for id in ids {
        states.push(store(database).whereabouts(*id).await.unwrap()[0].state);
    }
    states
}

#[tokio::test]
async fn a_key_blocked_over_its_dead_message_waits_for_the_operator() {
    for way in ["skip", "retry", "discard"] {
        let database = prepared().await;
        let client = database.connect().await;
        let source = source(&database, "relay").await;
        let ids = enqueue(&client, Some("a"), 3).await;
        let claimed = claim_all(&source).await;
        source
            .settle(&[
                settled(claimed[0].token, dead(true)),
                settled(claimed[1].token, Outcome::Queue),
                settled(claimed[2].token, Outcome::Queue),
            ])
            .await
            .unwrap();
        let fourth = enqueue(&client, Some("a"), 1).await;
        let other = enqueue(&client, Some("b"), 1).await;
        let mut claimed = claim_all(&source).await;
        claimed.sort_by_key(|delivery| !delivery.behind);
        assert_eq!(
            claimed.iter().map(|d| (d.message.id, d.behind)).collect::<Vec<_>>(),
            [(fourth[0], true), (other[0], false)]
        );
        source
            .settle(&[settled(claimed[0].token, Outcome::Queue), settled(claimed[1].token, Outcome::Done)])
            .await
            .unwrap();
        assert!(claim_all(&source).await.is_empty());
        assert_eq!(states(&database, &ids).await, [Place::Dead, Place::Blocked, Place::Blocked]);
        let keys = store(&database).waiting_keys(postroom::Side::Out, Some(ROUTE), 10).await.unwrap();
        assert_eq!((keys.len(), keys[0].waits_for, keys[0].messages), (1, WaitsFor::Dead, 3));
        assert_eq!(keys[0].head.as_deref(), Some(ids[0].to_string().as_str()));

        let filter = DeadFilter { id: Some(ids[0]), ..DeadFilter::default() };
        let expected = match way {
            "skip" => {
                assert!(store(&database).act_on_key(ROUTE, "a", KeyDeed::Skip, &deed()).await.unwrap());
                assert!(!store(&database).act_on_key(ROUTE, "a", KeyDeed::Skip, &deed()).await.unwrap());
                [&ids[1..], &fourth].concat()
            }
            "retry" => {
                assert_eq!(
                    store(&database)
                        .act_on_dead(DeadDeed::Retry, Side::Out, &filter, 10, &deed(), &mut |_| ())
                        .await
                        .unwrap()
                        .len(),
                    1
                );
                [&ids[..], &fourth].concat()
            }
            _ => {
                assert_eq!(
                    store(&database)
                        .act_on_dead(DeadDeed::Discard, Side::Out, &filter, 10, &deed(), &mut |_| ())
                        .await
                        .unwrap()
                        .len(),
                    1
                );
                [&ids[1..], &fourth].concat()
            }
        };
        let mut found = Vec::new();
        loop {
            // Each head lets the next one go when it is through.
            let ids = drain(&source).await;
            if ids.is_empty() {
                break;
            }
            found.extend(ids);
        }
        assert_eq!(found, expected, "{way}");
        assert!(store(&database).waiting_keys(postroom::Side::Out, None, 10).await.unwrap().is_empty());
        let left = store(&database).dead_letters(Side::Out, &DeadFilter::default(), 10).await.unwrap();
        assert_eq!(left.len(), usize::from(way == "skip"), "I6");
        enqueue(&client, Some("a"), 1).await;
        assert!(!claim_all(&source).await[0].behind, "the key is free again");
    }
}

#[tokio::test]
async fn a_parked_key_waits_until_it_is_unparked_and_keeps_its_order() {
    let database = prepared().await;
    let client = database.connect().await;
    let source = source(&database, "relay").await;
    assert!(store(&database).act_on_key("no-route", "a", KeyDeed::Park, &deed()).await.is_err());
    // The relay knows that nothing is parked.
    enqueue(&client, Some("b"), 1).await;
    assert_eq!(drain(&source).await.len(), 1);
    assert!(store(&database).act_on_key(ROUTE, "a", KeyDeed::Park, &deed()).await.unwrap());
    let ids = enqueue(&client, Some("a"), 5).await;
    // It is not asked for parked ones: what an operator parked is seen all the same.
    let claimed = source.claim(Want { parked: false, ..Want::up_to(100) }).await.unwrap().deliveries;
    assert!(claimed.len() == 5 && claimed.iter().all(|delivery| delivery.behind));
    let settlements: Vec<_> = claimed.iter().map(|delivery| settled(delivery.token, Outcome::Queue)).collect();
    source.settle(&settlements).await.unwrap();
    assert!(claim_all(&source).await.is_empty());
    assert!(store(&database).act_on_key(ROUTE, "a", KeyDeed::Unpark, &deed()).await.unwrap());
    assert_eq!(drain(&source).await, ids);
    let audits: Vec<String> = client
        .query("select action from postroom.audit order by id", &[])
        .await
        .unwrap()
        .iter()
        .map(|row| row.get(0))
        .collect();
    assert_eq!(audits, ["key.park", "key.unpark"], "I20");
}

#[tokio::test]
async fn a_dead_letter_given_back_while_the_relay_records_about_its_key_is_not_forgotten() {
    let database = prepared().await;
    let client = database.connect().await;
    let source = source(&database, "relay").await;
    let ids = enqueue(&client, Some("a"), 2).await;
    let claimed = claim_all(&source).await;
    let retry = Outcome::Retry { after: Duration::ZERO, attempts: 1, error: "no".to_owned() };
    source.settle(&[settled(claimed[0].token, retry), settled(claimed[1].token, dead(false))]).await.unwrap();
    drop(source);
    // As the relay records that the parked one is through: its transaction is about to
    // commit when the operator comes, and nobody is left to be the head as far as it can see.
    let mut relay = database.connect().await;
    let tx = relay.transaction().await.unwrap();
    tx.execute("select from postroom.lanes where route = $1 order by lane for key share", &[&ROUTE]).await.unwrap();
    tx.execute("delete from postroom.parked where route = $1", &[&ROUTE]).await.unwrap();
    tx.execute(include_str!("../../src/log/sql/promote.sql"), &[&ROUTE, &vec!["a"]]).await.unwrap();
    let operator = store(&database);
    let operator = tokio::spawn(async move {
        operator
            .act_on_dead(DeadDeed::Retry, Side::Out, &DeadFilter::default(), 10, &deed(), &mut |_| ())
            .await
            .unwrap()
    });
    // The signal: the operator waits for a lock, or is through already.
    let waits =
        "select count(*) > 0 from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'";
    while !operator.is_finished() && !client.query_one(waits, &[]).await.unwrap().get::<_, bool>(0) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    tx.commit().await.unwrap();
    assert_eq!(operator.await.unwrap().len(), 1);
    client.batch_execute("update postroom.lanes set expires_at = '-infinity'").await.unwrap();
    let another = crate::setup::source(&database, "another").await;
    assert_eq!(drain(&another).await, [ids[1]], "I8: a letter without a head waits for ever");
}

#[tokio::test]
async fn a_dead_letter_that_its_relay_has_not_passed_cannot_be_discarded() {
    let database = prepared().await;
    let client = database.connect().await;
    let source = source(&database, "relay").await;
    // Both in one lane; the first is still out when the second dies.
    enqueue(&client, Some("a"), 2).await;
    let claimed = claim_all(&source).await;
    source.settle(&[settled(claimed[1].token, dead(false))]).await.unwrap();
    let everything = DeadFilter::default();
    assert!(
        store(&database)
            .act_on_dead(DeadDeed::Discard, Side::Out, &everything, 10, &deed(), &mut |_| ())
            .await
            .unwrap()
            .is_empty()
    );
    source.settle(&done([claimed[0].token])).await.unwrap();
    assert_eq!(
        store(&database)
            .act_on_dead(DeadDeed::Discard, Side::Out, &everything, 10, &deed(), &mut |_| ())
            .await
            .unwrap()
            .len(),
        1
    );
    client.batch_execute("update postroom.lanes set expires_at = '-infinity'").await.unwrap();
    let another = crate::setup::source(&database, "another").await;
    assert!(claim_all(&another).await.is_empty(), "a discarded message does not come back");
}

#[tokio::test]
async fn the_failures_of_a_message_are_kept_with_it() {
    let database = prepared().await;
    let client = database.connect().await;
    let source = source(&database, "relay").await;
    enqueue(&client, Some("a"), 1).await;
    for attempts in 1..=39 {
        let claimed = claim_all(&source).await;
        let error = format!("failure {attempts}");
        source
            .settle(&[settled(claimed[0].token, Outcome::Retry { after: Duration::ZERO, attempts, error })])
            .await
            .unwrap();
    }
    let claimed = claim_all(&source).await;
    source.settle(&[settled(claimed[0].token, dead(false))]).await.unwrap();
    let letter = &store(&database).dead_letters(Side::Out, &DeadFilter::default(), 10).await.unwrap()[0];
    assert_eq!(letter.history.len(), 32);
    assert_eq!(letter.history[30].error, "failure 39");
    assert_eq!(letter.history[31].error, "no");
}

#[tokio::test]
async fn one_busy_key_does_not_take_every_place() {
    let database = prepared().await;
    let client = database.connect().await;
    let source = source(&database, "relay").await;
    enqueue(&client, Some("hot"), 300).await;
    let others = enqueue(&client, None, 30).await;
    let want = Want { lane_messages_max: 20, ..Want::up_to(100) };
    let mut claimed = Vec::new();
    for _ in 0..20 {
        claimed.extend(source.claim(want).await.unwrap().deliveries);
    }
    let hot = claimed.iter().filter(|delivery| delivery.message.key.is_some()).count();
    assert!(hot <= 20, "I24: {hot}");
    // Those that share its lane come behind it; all others are here.
    assert!(claimed.len() - hot > others.len() / 2, "{}", claimed.len());
}

#[tokio::test]
async fn a_read_brings_about_as_many_bytes_as_were_asked_for_and_nothing_is_left_out() {
    let database = prepared().await;
    let client = database.connect().await;
    let source = source(&database, "relay").await;
    // Half of them late: their transactions took their seqs before the others, and commit after the first reads.
    let mut late = database.connect().await;
    let late = late.transaction().await.unwrap();
    let write = "insert into postroom.outbox (topic, type, payload, key)
                 select 'orders', 'order.placed', convert_to(repeat('x', 100000), 'UTF8'), 'key-' || n % 7
                   from generate_series(1, 60) n";
    late.execute(write, &[]).await.unwrap();
    client.execute(write, &[]).await.unwrap();
    let want = Want { bytes: 1_000_000, ..Want::up_to(500) };
    let mut commits = Some(late);
    let mut found = Vec::new();
    loop {
        let claimed = source.claim(want).await.unwrap();
        let bytes: usize = claimed.deliveries.iter().map(|delivery| delivery.message.payload.len()).sum();
        assert!(bytes <= 1_100_000, "I19: {bytes}");
        let empty = claimed.deliveries.is_empty() && !claimed.more;
        found.extend(claimed.deliveries);
        if found.len() >= 30
            && let Some(tx) = commits.take()
        {
            tx.commit().await.unwrap();
        } else if empty {
            break;
        }
    }
    let mut ids: Vec<MessageId> = found.iter().map(|delivery| delivery.message.id).collect();
    ids.sort();
    ids.dedup();
    assert_eq!((ids.len(), found.len()), (120, 120), "I1");
}

#[tokio::test]
async fn what_a_dead_relay_had_queued_up_does_not_overtake_what_it_had_in_hand() {
    let database = prepared().await;
    let client = database.connect().await;
    let (source, _) = succeeds(&database, 0).await;
    // Two are in hand when the operator parks the key; two more queue up, and the relay dies.
    let mut ids = enqueue(&client, Some("a"), 2).await;
    assert_eq!(claim_all(&source).await.len(), 2);
    store(&database).act_on_key(ROUTE, "a", KeyDeed::Park, &deed()).await.unwrap();
    ids.extend(enqueue(&client, Some("a"), 2).await);
    let claimed = claim_all(&source).await;
    let queued: Vec<_> = claimed.iter().map(|delivery| settled(delivery.token, Outcome::Queue)).collect();
    assert_eq!(queued.len(), 2);
    source.settle(&queued).await.unwrap();
    dies(&database, source).await;
    store(&database).act_on_key(ROUTE, "a", KeyDeed::Unpark, &deed()).await.unwrap();
    let (source, _) = succeeds(&database, 1).await;
    assert_eq!(drain(&source).await, ids, "I4");
}

#[tokio::test]
async fn why_tells_what_a_message_waits_for() {
    let database = prepared().await;
    let client = database.connect().await;
    let id = MessageId::new();
    assert!(store(&database).whereabouts(id).await.unwrap().is_empty());
    let ids = enqueue(&client, Some("a"), 3).await;
    assert!(store(&database).whereabouts(ids[0]).await.unwrap().is_empty(), "no route has run");
    let source = source(&database, "relay").await;
    assert_eq!(states(&database, &ids).await, [Place::Waiting; 3]);
    let claimed = claim_all(&source).await;
    let retry = Outcome::Retry { after: Duration::from_secs(60), attempts: 1, error: "no route".to_owned() };
    source
        .settle(&[
            settled(claimed[0].token, retry),
            settled(claimed[1].token, Outcome::Queue),
            settled(claimed[2].token, Outcome::Queue),
        ])
        .await
        .unwrap();
    assert_eq!(states(&database, &ids).await, [Place::Retry, Place::Queued, Place::Queued]);
    let place = &store(&database).whereabouts(ids[1]).await.unwrap()[0];
    assert!(place.because[0].contains(&ids[0].to_string()), "{:?}", place.because);
    assert!(place.because.iter().any(|line| line.contains("relay holds its lane")), "{:?}", place.because);
    let down = Report { sink_down: Some("connection refused".to_owned()), ..Report::default() };
    source.renew(&down).await.unwrap();
    let place = &store(&database).whereabouts(ids[0]).await.unwrap()[0];
    assert!(place.because.iter().any(|line| line.contains("sink has been down")), "{:?}", place.because);
    assert_eq!(place.history[0].error, "no route");
    let other = enqueue(&client, Some("b"), 1).await;
    drain(&source).await;
    assert_eq!(states(&database, &other).await, [Place::Acked]);
}

#[tokio::test]
async fn a_notification_wakes_and_its_loss_costs_nothing() {
    let database = prepared().await;
    let (wake, other) = (postroom::Wake::new(), postroom::Wake::new());
    let _listener = postroom_postgres::Listener::new(connector(&database), vec![wake.clone(), other.clone()]);
    // It says so once when it begins to listen.
    wake.notified().await;
    other.notified().await;
    let notifier = postroom_postgres::Notifier::new(connector(&database), Duration::from_millis(10));
    for _ in 0..100 {
        notifier.notify();
    }
    wake.notified().await;
    other.notified().await;
    // The connection is cut: it listens again, and says so, since it may have missed one.
    let client = database.connect().await;
    let cut = "select count(pg_terminate_backend(pid)) from pg_stat_activity
                where datname = current_database() and query like 'listen%'";
    let count: i64 = client.query_one(cut, &[]).await.unwrap().get(0);
    assert_eq!(count, 1);
    wake.notified().await;
}

#[tokio::test]
async fn a_route_without_order_parks_messages_alone() {
    let database = prepared().await;
    let client = database.connect().await;
    let unordered = postroom::Route { order: postroom::Order::None, ..crate::setup::route() };
    let source = crate::setup::source_of(&database, &unordered, "relay").await;
    let ids = enqueue(&client, Some("a"), 2).await;
    let claimed = claim_all(&source).await;
    let retry = |after| Outcome::Retry { after: Duration::from_secs(after), attempts: 1, error: "no".to_owned() };
    source.settle(&[settled(claimed[0].token, retry(3600)), settled(claimed[1].token, retry(0))]).await.unwrap();
    assert_eq!(drain(&source).await, [ids[1]], "it waits for no other of its key");
    // What an operator gives back goes out too, one after the other, however many there are of a key.
    let more = enqueue(&client, Some("a"), 5).await;
    let claimed = claim_all(&source).await;
    let buried: Vec<_> = claimed.iter().map(|delivery| settled(delivery.token, dead(false))).collect();
    source.settle(&buried).await.unwrap();
    assert_eq!(
        store(&database)
            .act_on_dead(DeadDeed::Retry, Side::Out, &DeadFilter::default(), 2, &deed(), &mut |_| ())
            .await
            .unwrap()
            .len(),
        2
    );
    let first = claim_all(&source).await;
    assert_eq!(
        store(&database)
            .act_on_dead(DeadDeed::Retry, Side::Out, &DeadFilter::default(), 10, &deed(), &mut |_| ())
            .await
            .unwrap()
            .len(),
        3
    );
    source.settle(&done(first.iter().map(|delivery| delivery.token))).await.unwrap();
    let mut found = first.len();
    while let late @ 1.. = drain(&source).await.len() {
        found += late;
    }
    assert_eq!(found, more.len(), "I8: one without a head waits for ever");
}

#[tokio::test]
async fn many_dead_letters_are_given_back_in_steps_that_hold_up_no_relay_for_long() {
    let database = prepared().await;
    let client = database.connect().await;
    let relay = source(&database, "relay").await;
    let letters = "insert into postroom.dead_letters (route, seq, lane, attempts, cause, error, id, topic, type, payload, content_type,
                                                      occurred_at)
                   select $1, n, 0, 8, 'exhausted', 'no', gen_random_uuid(), 'orders', 'order.placed', '', 'x', now()
                     from generate_series(1, 2500) n";
    client.execute(letters, &[&ROUTE]).await.unwrap();
    let moved = store(&database)
        .act_on_dead(DeadDeed::Retry, Side::Out, &DeadFilter::default(), 2200, &deed(), &mut |_| ())
        .await
        .unwrap();
    assert_eq!(moved.len(), 2200);
    let steps: Vec<i32> = client
        .query("select cardinality(message_ids) from postroom.audit order by id", &[])
        .await
        .unwrap()
        .iter()
        .map(|row| row.get(0))
        .collect();
    assert_eq!(steps, [1000, 1000, 200], "I20: each step with its own audit row");
    assert_eq!(drain(&relay).await.len(), 2200);
}
