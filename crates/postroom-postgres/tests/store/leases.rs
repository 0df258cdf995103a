//! Lanes belong to one relay at a time; a stale one changes nothing.

use std::time::{Duration, Instant};

use postroom::{Outcome, Source};

use crate::setup::{claim_all, done, drain, enqueue, open, prepared, renew, route, settled, source};

/// As if every relay had fallen silent for as long as its lease.
const EXPIRE: &str = "update postroom.lanes set expires_at = '-infinity';
                      update postroom.relays set expires_at = '-infinity'";

#[tokio::test]
async fn a_second_relay_stands_by_until_the_lease_expires() {
    let database = prepared().await;
    let client = database.connect().await;
    let first = source(&database, "first").await;
    let second = open(&database, &route(), "second").await.unwrap();
    assert_eq!(renew(&second).await.held, 0);
    let ids = enqueue(&client, Some("a"), 1).await;
    assert!(claim_all(&second).await.is_empty());
    client.batch_execute(EXPIRE).await.unwrap();
    assert_eq!(renew(&second).await.held, 16);
    assert_eq!(drain(&second).await, ids);
    let standing = renew(&first).await;
    assert_eq!((standing.held, standing.lost_lanes.len()), (0, 16));
}

#[tokio::test]
async fn relays_share_the_lanes_as_they_come_and_go() {
    let database = prepared().await;
    let client = database.connect().await;
    let first = source(&database, "first").await;
    enqueue(&client, None, 100).await;
    let in_hand = claim_all(&first).await;
    let second = source(&database, "second").await;
    // What the first has in hand it keeps until it is settled.
    let kept = renew(&first).await;
    assert!(kept.held > 8 && kept.lost_lanes.is_empty());
    let granted = renew(&second).await.held;
    assert_eq!(kept.held + granted, 16);
    first.settle(&done(in_hand.iter().map(|delivery| delivery.token))).await.unwrap();
    assert_eq!(renew(&first).await.held, 8);
    assert_eq!(renew(&second).await.held, 8);
    assert!(drain(&second).await.is_empty(), "a graceful handing over repeats nothing");
    let ids = enqueue(&client, None, 100).await;
    let mut found = [drain(&first).await, drain(&second).await].concat();
    found.sort();
    let mut expected = ids;
    expected.sort();
    assert_eq!(found, expected);

    let third = source(&database, "third").await;
    for relay in [&first, &second, &third, &first, &second, &third] {
        renew(relay).await;
    }
    let held = [renew(&first).await.held, renew(&second).await.held, renew(&third).await.held];
    assert_eq!(held.iter().sum::<usize>(), 16, "{held:?}");
    assert!(held.iter().all(|held| *held <= 6), "{held:?}");
    // One stops in order, one dies.
    third.release().await.unwrap();
    let silent = "update postroom.lanes set expires_at = '-infinity' where owner = 'second'";
    client.batch_execute(silent).await.unwrap();
    client.batch_execute("update postroom.relays set expires_at = '-infinity' where owner = 'second'").await.unwrap();
    assert_eq!(renew(&first).await.held, 16);
}

#[tokio::test]
async fn a_relay_that_only_missed_its_renewal_goes_on_where_it_was() {
    let database = prepared().await;
    let client = database.connect().await;
    let source = source(&database, "relay").await;
    let ids = enqueue(&client, Some("a"), 2).await;
    let claimed = claim_all(&source).await;
    client.batch_execute(EXPIRE).await.unwrap();
    let standing = renew(&source).await;
    assert_eq!((standing.held, standing.lost_lanes.len()), (16, 0));
    source.settle(&done(claimed.iter().map(|delivery| delivery.token))).await.unwrap();
    assert_eq!(claimed.iter().map(|delivery| delivery.message.id).collect::<Vec<_>>(), ids);
    assert!(drain(&source).await.is_empty());
}

#[tokio::test]
async fn a_renewal_and_a_write_of_positions_that_wait_for_each_other_lose_no_lane() {
    let database = prepared().await;
    let client = database.connect().await;
    let source = source(&database, "relay").await;
    enqueue(&client, Some("a"), 1).await;
    let claimed = claim_all(&source).await;
    // With statistics, which is how it is on a server that has run for a minute, plans are others than without.
    client.batch_execute("analyze postroom.lanes").await.unwrap();
    for renews in [true, false] {
        // Somebody's update of our lanes is under way, and commits while ours waits for it.
        let other = database.connect().await;
        other.batch_execute("begin; update postroom.lanes set settled_at = clock_timestamp()").await.unwrap();
        let ours = async {
            if renews {
                renew(&source).await.lost_lanes
            } else {
                source.settle(&done(claimed.iter().map(|delivery| delivery.token))).await.unwrap().lost_lanes
            }
        };
        let theirs = async {
            let sql = "select count(*) > 0 from pg_locks l join pg_stat_activity a using (pid)
                        where not l.granted and a.datname = current_database()";
            let began = Instant::now();
            while !client.query_one(sql, &[]).await.unwrap().get::<_, bool>(0) {
                assert!(began.elapsed() < Duration::from_secs(30), "nobody waits for the lock");
                tokio::task::yield_now().await;
            }
            other.batch_execute("commit").await.unwrap();
        };
        let (lost, ()) = tokio::join!(ours, theirs);
        assert!(lost.is_empty(), "I3: they would be read again from an old position");
    }
    assert_eq!(renew(&source).await.held, 16);
}

#[tokio::test]
async fn a_stale_epoch_changes_nothing() {
    let database = prepared().await;
    let client = database.connect().await;
    let stale = source(&database, "stale").await;
    let ids = enqueue(&client, Some("a"), 3).await;
    let claimed = claim_all(&stale).await;
    client.batch_execute(EXPIRE).await.unwrap();
    let new = source(&database, "new").await;

    let state = "select (select string_agg(l::text, ';' order by lane) from postroom.lanes l)
                     || (select count(*) from postroom.parked) || (select count(*) from postroom.dead_letters)";
    let before: String = client.query_one(state, &[]).await.unwrap().get(0);
    let retry = Outcome::Retry { after: Duration::ZERO, attempts: 1, error: "x".to_owned() };
    let dead =
        Outcome::Dead { attempts: 1, cause: postroom::Cause::Permanent, error: "x".to_owned(), blocks_key: false };
    let settlements =
        [settled(claimed[0].token, Outcome::Done), settled(claimed[1].token, retry), settled(claimed[2].token, dead)];
    let outcome = stale.settle(&settlements).await.unwrap();
    assert_eq!(outcome.fenced, 3, "I9: losing the lease is counted, not hidden");
    assert!(!outcome.lost_lanes.is_empty());
    let after: String = client.query_one(state, &[]).await.unwrap().get(0);
    assert_eq!(before, after);
    assert_eq!(drain(&new).await, ids);
}

#[tokio::test]
async fn a_position_of_a_stale_epoch_is_not_written() {
    let database = prepared().await;
    let client = database.connect().await;
    let stale = source(&database, "stale").await;
    let ids = enqueue(&client, Some("a"), 3).await;
    let claimed = claim_all(&stale).await;
    client.batch_execute(EXPIRE).await.unwrap();
    let new = source(&database, "new").await;
    let outcome = stale.settle(&done(claimed.iter().map(|delivery| delivery.token))).await.unwrap();
    assert!(!outcome.lost_lanes.is_empty());
    assert_eq!(drain(&new).await, ids);
}

#[tokio::test]
async fn released_lanes_are_free_at_once() {
    let database = prepared().await;
    let first = source(&database, "first").await;
    first.release().await.unwrap();
    let second = source(&database, "second").await;
    assert_eq!(renew(&second).await.held, 16);
}

#[tokio::test]
async fn lanes_are_asked_in_turns_when_little_is_wanted() {
    let database = prepared().await;
    let client = database.connect().await;
    let source = source(&database, "relay").await;
    let mut ids = enqueue(&client, None, 200).await;
    let mut found = Vec::new();
    // Three at a time from sixteen lanes: every lane comes up within six reads.
    for _ in 0..200 {
        let claimed = source.claim(crate::setup::want(3)).await.unwrap().deliveries;
        assert!(claimed.len() <= 3);
        source.settle(&done(claimed.iter().map(|delivery| delivery.token))).await.unwrap();
        found.extend(claimed.into_iter().map(|delivery| delivery.message.id));
    }
    ids.sort();
    found.sort();
    assert_eq!(found, ids);
}

#[tokio::test]
async fn a_parked_head_in_hand_when_its_lane_was_lost_is_claimed_again_after_the_lane_came_back() {
    let database = prepared().await;
    let client = database.connect().await;
    let relay = source(&database, "relay").await;
    let ids = enqueue(&client, Some("a"), 1).await;
    let claimed = claim_all(&relay).await;
    let retry = Outcome::Retry { after: Duration::ZERO, attempts: 1, error: "x".to_owned() };
    relay.settle(&[settled(claimed[0].token, retry)]).await.unwrap();
    assert_eq!(claim_all(&relay).await.len(), 1);
    client.batch_execute(EXPIRE).await.unwrap();
    let other = source(&database, "other").await;
    assert_eq!(renew(&relay).await.lost_lanes.len(), 16);
    other.release().await.unwrap();
    assert_eq!(renew(&relay).await.held, 16);
    assert_eq!(drain(&relay).await, ids);
}

#[tokio::test]
async fn a_route_that_passes_other_topics_writes_how_far_it_came_and_gives_its_lanes_back() {
    let database = prepared().await;
    let client = database.connect().await;
    let mut other_topic = route();
    other_topic.topics = postroom::TopicFilter::new(["billing"]).unwrap();
    let first = crate::setup::source_of(&database, &other_topic, "first").await;
    enqueue(&client, None, 50).await;
    assert!(claim_all(&first).await.is_empty());
    first.settle(&[]).await.unwrap();
    let passed: i64 = client.query_one("select max(position_seq) from postroom.lanes", &[]).await.unwrap().get(0);
    assert_eq!(passed, 50);
    enqueue(&client, None, 50).await;
    assert!(claim_all(&first).await.is_empty());
    let second = source(&database, "second").await;
    renew(&first).await;
    first.settle(&[]).await.unwrap();
    renew(&first).await;
    assert_eq!(renew(&second).await.held, 8);
}
