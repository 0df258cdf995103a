//! Messages that meet trouble: parked, queued behind each other, dead.

use std::time::Duration;

use postroom::{Cause, Delivery, Outcome, Source, Want};

use crate::setup::{claim_all, done, drain, enqueue, prepared, settled, source};

fn retry(after: Duration, attempts: u32) -> Outcome {
    Outcome::Retry { after, attempts, error: "refused".to_owned() }
}

async fn parked_only(source: &postroom_postgres::LogSource) -> Vec<Delivery> {
    source.claim(Want::up_to(500)).await.unwrap().deliveries
}

/// What is parked and due. It is not looked for with each claim where looking has taken long, as on a busy machine.
async fn due_now(source: &postroom_postgres::LogSource) -> Vec<Delivery> {
    for _ in 0..600 {
        let found = parked_only(source).await;
        if !found.is_empty() {
            return found;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("nothing is due");
}

#[tokio::test]
async fn a_failed_message_parks_its_key_and_later_ones_queue_up_in_order() {
    let database = prepared().await;
    let client = database.connect().await;
    let source = source(&database, "relay").await;
    let ids = enqueue(&client, Some("a"), 3).await;
    let others = enqueue(&client, Some("b"), 2).await;
    let claimed = claim_all(&source).await;
    let of = |id| claimed.iter().find(|delivery| delivery.message.id == id).unwrap().token;
    let mut settlements = vec![
        settled(of(ids[0]), retry(Duration::from_secs(3600), 1)),
        settled(of(ids[1]), Outcome::Queue),
        settled(of(ids[2]), Outcome::Queue),
    ];
    settlements.extend(done(others.iter().map(|id| of(*id))));
    source.settle(&settlements).await.unwrap();
    assert!(parked_only(&source).await.is_empty(), "the head is not due, so nobody goes");

    // A message that is written now is told that its key is parked.
    let fourth = enqueue(&client, Some("a"), 1).await;
    let claimed = claim_all(&source).await;
    assert!(claimed[0].behind && claimed[0].message.id == fourth[0]);
    source.settle(&[settled(claimed[0].token, Outcome::Queue)]).await.unwrap();

    client.execute("update postroom.parked set due_at = clock_timestamp() where state = 'retry'", &[]).await.unwrap();
    let run = due_now(&source).await;
    let order: Vec<_> = run.iter().map(|delivery| delivery.message.id).collect();
    assert_eq!(order, [ids, fourth].concat());
    assert_eq!(run.iter().map(|delivery| delivery.attempts).collect::<Vec<_>>(), [1, 0, 0, 0]);
    assert!(parked_only(&source).await.is_empty(), "what is in hand is not handed out again");

    // The head fails again, the others go back behind it.
    let mut again = vec![settled(run[0].token, retry(Duration::ZERO, 2))];
    again.extend(run[1..].iter().map(|delivery| settled(delivery.token, Outcome::Release)));
    source.settle(&again).await.unwrap();
    let run = due_now(&source).await;
    assert_eq!(run.len(), 4);
    assert_eq!(run[0].attempts, 2);
    source.settle(&done(run.iter().map(|delivery| delivery.token))).await.unwrap();
    let left: i64 = client.query_one("select count(*) from postroom.parked", &[]).await.unwrap().get(0);
    assert_eq!(left, 0);
    enqueue(&client, Some("a"), 1).await;
    assert!(!claim_all(&source).await[0].behind, "the key is free again");
}

#[tokio::test]
async fn the_next_message_of_a_key_becomes_its_head_when_only_the_head_is_through() {
    let database = prepared().await;
    let client = database.connect().await;
    let first = source(&database, "relay").await;
    let ids = enqueue(&client, Some("a"), 2).await;
    let claimed = claim_all(&first).await;
    let outcomes = [retry(Duration::ZERO, 1), Outcome::Queue];
    let settlements: Vec<_> = claimed.iter().zip(outcomes).map(|(d, outcome)| settled(d.token, outcome)).collect();
    first.settle(&settlements).await.unwrap();
    let run = due_now(&first).await;
    first.settle(&done([run[0].token])).await.unwrap();
    // The second is still in the hand of the first relay, which dies.
    first.release().await.unwrap();
    let second = source(&database, "another").await;
    assert_eq!(drain(&second).await, [ids[1]]);
}

#[tokio::test]
async fn a_delayed_message_waits_for_its_time_and_holds_up_nobody() {
    let database = prepared().await;
    let client = database.connect().await;
    let source = source(&database, "relay").await;
    let sql = "select postroom.enqueue('orders', 'reminder', 'x'::text, key => 'a', delay => '1 hour')";
    client.query_one(sql, &[]).await.unwrap();
    let claimed = claim_all(&source).await;
    assert!(claimed[0].scheduled);
    source.settle(&[settled(claimed[0].token, Outcome::Schedule)]).await.unwrap();
    let at_once = enqueue(&client, Some("a"), 1).await;
    let next = claim_all(&source).await;
    assert_eq!((next.len(), next[0].message.id, next[0].behind), (1, at_once[0], false));
    client.execute("update postroom.parked set due_at = clock_timestamp()", &[]).await.unwrap();
    let due = due_now(&source).await;
    assert_eq!((due.len(), due[0].message.kind.as_str(), due[0].scheduled), (1, "reminder", false));
}

#[tokio::test]
async fn a_dead_letter_keeps_the_whole_message_and_leaves_its_key_free() {
    let database = prepared().await;
    let client = database.connect().await;
    let source = source(&database, "relay").await;
    let ids = enqueue(&client, Some("a"), 3).await;
    let claimed = claim_all(&source).await;
    let dead =
        |attempts| Outcome::Dead { attempts, cause: Cause::Exhausted, error: "no route".to_owned(), blocks_key: false };
    source
        .settle(&[
            settled(claimed[0].token, dead(8)),
            settled(claimed[1].token, retry(Duration::ZERO, 1)),
            settled(claimed[2].token, Outcome::Queue),
        ])
        .await
        .unwrap();
    // The second dies as a parked message; the third goes on.
    let run = due_now(&source).await;
    source.settle(&[settled(run[0].token, dead(9)), settled(run[1].token, Outcome::Done)]).await.unwrap();
    let rows = client
        .query("select id, attempts, cause, error, payload, key from postroom.dead_letters order by seq", &[])
        .await
        .unwrap();
    let found: Vec<(uuid::Uuid, i32)> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
    assert_eq!(found, [(ids[0].into(), 8), (ids[1].into(), 9)]);
    assert_eq!(rows[0].get::<_, &[u8]>(4), b"x");
    let left: i64 = client.query_one("select count(*) from postroom.parked", &[]).await.unwrap().get(0);
    assert_eq!(left, 0);
}

#[tokio::test]
async fn recording_the_same_outcomes_twice_changes_nothing_more() {
    let database = prepared().await;
    let client = database.connect().await;
    let source = source(&database, "relay").await;
    enqueue(&client, Some("a"), 2).await;
    let claimed = claim_all(&source).await;
    let settlements =
        [settled(claimed[0].token, retry(Duration::from_secs(3600), 1)), settled(claimed[1].token, Outcome::Queue)];
    source.settle(&settlements).await.unwrap();
    source.settle(&settlements).await.unwrap();
    let count: i64 = client.query_one("select count(*) from postroom.parked", &[]).await.unwrap().get(0);
    assert_eq!(count, 2);
}

#[tokio::test]
async fn what_was_parked_or_buried_before_a_crash_is_not_read_again() {
    let database = prepared().await;
    let client = database.connect().await;
    let first = source(&database, "first").await;
    let ids = enqueue(&client, Some("a"), 3).await;
    let claimed = claim_all(&first).await;
    let of = |id| claimed.iter().find(|delivery| delivery.message.id == id).unwrap().token;
    let dead = Outcome::Dead { attempts: 8, cause: Cause::Exhausted, error: "no route".to_owned(), blocks_key: false };
    // The second of the key stays open, so that no position passes the read; then the relay dies.
    let settlements = [settled(of(ids[0]), dead), settled(of(ids[2]), retry(Duration::from_secs(3600), 1))];
    first.settle(&settlements).await.unwrap();
    drop(first);
    client
        .batch_execute("update postroom.lanes set expires_at = '-infinity'; delete from postroom.relays")
        .await
        .unwrap();
    let second = source(&database, "second").await;
    assert_eq!(drain(&second).await, [ids[1]]);
}

#[tokio::test]
async fn a_follower_never_overtakes_a_second_head_of_its_key() {
    let database = prepared().await;
    let client = database.connect().await;
    let source = source(&database, "relay").await;
    let sql = "select postroom.enqueue('orders', 'reminder', 'x'::text, key => 'a', delay => '1 hour')";
    client.query_one(sql, &[]).await.unwrap();
    let ids = enqueue(&client, Some("a"), 2).await;
    let claimed = claim_all(&source).await;
    source
        .settle(&[
            settled(claimed[0].token, Outcome::Schedule),
            settled(claimed[1].token, retry(Duration::from_secs(3600), 1)),
            settled(claimed[2].token, Outcome::Queue),
        ])
        .await
        .unwrap();
    // The delayed one comes due, fails, and is due again before the other head.
    client
        .execute("update postroom.parked set due_at = clock_timestamp() where state = 'scheduled'", &[])
        .await
        .unwrap();
    let due = due_now(&source).await;
    source.settle(&[settled(due[0].token, retry(Duration::ZERO, 1))]).await.unwrap();
    let due = due_now(&source).await;
    assert_eq!(due.iter().map(|delivery| delivery.message.kind.as_str()).collect::<Vec<_>>(), ["reminder"]);
    source.settle(&done([due[0].token])).await.unwrap();
    assert!(parked_only(&source).await.is_empty(), "the second head still waits for its time");
    client.execute("update postroom.parked set due_at = clock_timestamp() where state = 'retry'", &[]).await.unwrap();
    let mut out = Vec::new();
    while out.len() < ids.len() {
        let run = due_now(&source).await;
        source.settle(&done(run.iter().map(|delivery| delivery.token))).await.unwrap();
        out.extend(run.iter().map(|delivery| delivery.message.id));
    }
    assert_eq!(out, ids);
}
