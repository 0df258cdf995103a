//! Transactions that stay open, here and elsewhere in the cluster: they delay nobody but themselves.

use postroom::{Route, StartAt};
use postroom_testkit::postgres::Database;

use crate::setup::{drain, enqueue, open, prepared, route, source, source_of};

#[tokio::test]
async fn a_transaction_held_open_delays_no_other_message() {
    let database = prepared().await;
    let client = database.connect().await;
    let source = source(&database, "relay").await;

    // One holds an id and a written message, one only a snapshot, one an id in another database of the cluster.
    let holder = database.connect().await;
    holder.batch_execute("begin").await.unwrap();
    let held = enqueue(&holder, Some("others"), 1).await;
    let reader = database.connect().await;
    reader.batch_execute("begin isolation level repeatable read; select count(*) from postroom.outbox").await.unwrap();
    let elsewhere = Database::create().await.connect().await;
    elsewhere.batch_execute("begin; select pg_current_xact_id()").await.unwrap();

    // Everything that commits while they stay open comes out with the next read, read after read, for as long as they
    // stay: the number of rounds stands for the time, and each round is a signal.
    for round in 0..200 {
        let written = enqueue(&client, Some("others"), 5).await;
        assert_eq!(drain(&source).await, written, "round {round}");
    }
    holder.batch_execute("commit").await.unwrap();
    assert_eq!(drain(&source).await, held);
    assert!(source.reads().late >= 1, "the held message was a late row");
    elsewhere.batch_execute("commit").await.unwrap();
    reader.batch_execute("commit").await.unwrap();
    assert_eq!(drain(&source).await, []);
}

#[tokio::test]
async fn an_id_assigned_before_and_used_after_many_reads_loses_nothing() {
    let database = prepared().await;
    let client = database.connect().await;
    let source = source(&database, "relay").await;
    let early = database.connect().await;
    early.batch_execute("begin; select pg_current_xact_id()").await.unwrap();
    for _ in 0..20 {
        enqueue(&client, None, 3).await;
        drain(&source).await;
    }
    let written = enqueue(&early, None, 2).await;
    let meanwhile = enqueue(&client, None, 2).await;
    assert_eq!(drain(&source).await.len(), meanwhile.len());
    early.batch_execute("commit").await.unwrap();
    let mut late = drain(&source).await;
    late.sort();
    let mut expected = written;
    expected.sort();
    assert_eq!(late, expected);
}

#[tokio::test]
async fn rolled_back_messages_and_savepoints_never_come_out() {
    let database = prepared().await;
    let client = database.connect().await;
    let source = source(&database, "relay").await;
    client.batch_execute("begin").await.unwrap();
    enqueue(&client, None, 3).await;
    client.batch_execute("rollback").await.unwrap();
    client.batch_execute("begin").await.unwrap();
    let kept = enqueue(&client, Some("k"), 1).await;
    client.batch_execute("savepoint s").await.unwrap();
    enqueue(&client, Some("k"), 1).await;
    client.batch_execute("rollback to savepoint s").await.unwrap();
    let after = enqueue(&client, Some("k"), 1).await;
    client.batch_execute("commit").await.unwrap();
    assert_eq!(drain(&source).await, [kept, after].concat());
}

#[tokio::test]
async fn a_route_that_starts_now_takes_what_commits_later_and_nothing_before() {
    let database = prepared().await;
    let client = database.connect().await;
    let open = database.connect().await;
    enqueue(&client, None, 5).await;
    open.batch_execute("begin").await.unwrap();
    let later = enqueue(&open, Some("k"), 1).await;
    enqueue(&client, None, 5).await;
    let from_now = Route { name: "new".to_owned(), start_at: StartAt::Now, ..route() };
    let source = source_of(&database, &from_now, "relay").await;
    assert_eq!(drain(&source).await, []);
    open.batch_execute("commit").await.unwrap();
    let fresh = enqueue(&client, Some("k"), 1).await;
    assert_eq!(drain(&source).await, [later, fresh].concat());
}

#[tokio::test]
async fn a_sequence_that_caches_values_is_refused() {
    let database = prepared().await;
    database.connect().await.batch_execute("alter sequence postroom.outbox_seq_seq cache 10").await.unwrap();
    let refused = open(&database, &route(), "relay").await.err().unwrap();
    assert!(refused.to_string().contains("cache 1"), "{refused}");
}
