//! Retention removes nothing that is not finished, whatever the database does meanwhile.

use std::time::Duration;

use postroom::{Deed, MessageId, Operator, Removed, Retention, Route, Source, Sweep};
use postroom_testkit::postgres::Database;

use crate::setup::{drain, enqueue, prepared, route, source_of, store};

async fn swept(database: &Database) -> Removed {
    let retention = Retention { outbox: Some(Duration::from_secs(60)), ..Retention::default() };
    let (mut sweep, mut removed) = (Sweep::begin(&retention), Removed::default());
    while !sweep.is_over() {
        removed += store(database).retain(&retention, &mut sweep).await.unwrap();
    }
    removed
}

/// Written long ago, as far as the table tells.
const AGED: &str = "update postroom.outbox set occurred_at = occurred_at - interval '1 hour'";

#[tokio::test]
async fn a_transaction_that_is_older_than_the_retention_loses_nothing() {
    let database = prepared().await;
    let client = database.connect().await;
    let relay = source_of(&database, &route(), "relay").await;
    // It takes its places before all others, and commits after they are gone.
    let mut slow = database.connect().await;
    let tx = slow.transaction().await.unwrap();
    let sql = "insert into postroom.outbox (topic, type, key, payload, occurred_at)
               select 'orders', 'order.placed', 'a', 'x', now() - interval '2 hours' from generate_series(1, 40) returning id";
    let rows = tx.query(sql, &[]).await.unwrap();
    let mut late: Vec<MessageId> = rows.iter().map(|row| MessageId::from(row.get::<_, uuid::Uuid>(0))).collect();
    // Of the same lane: its position stands behind them.
    let sent = enqueue(&client, Some("a"), 100).await;
    assert_eq!(drain(&relay).await, sent);
    while relay.settle(&[]).await.unwrap().unwritten {}
    client.batch_execute(AGED).await.unwrap();
    assert_eq!(swept(&database).await.outbox, 100, "what is finished goes, although the transaction is open");
    tx.commit().await.unwrap();
    assert_eq!(swept(&database).await.outbox, 0, "behind the position, and not passed by it");
    let mut read = Vec::new();
    while read.len() < late.len() {
        let more = drain(&relay).await;
        assert!(!more.is_empty(), "{} of {} were read", read.len(), late.len());
        read.extend(more);
    }
    late.sort_unstable();
    read.sort_unstable();
    assert_eq!(read, late);
    while relay.settle(&[]).await.unwrap().unwritten {}
    assert_eq!(swept(&database).await.outbox, 40);
}

#[tokio::test]
async fn nothing_is_removed_while_positions_may_not_be_those_of_this_table() {
    let database = prepared().await;
    let client = database.connect().await;
    let relay = source_of(&database, &route(), "relay").await;
    let sent = enqueue(&client, Some("b"), 50).await;
    assert_eq!(drain(&relay).await, sent);
    while relay.settle(&[]).await.unwrap().unwritten {}
    client.batch_execute(AGED).await.unwrap();
    let own = "(select oid from pg_database where datname = current_database())";
    for (breaks, repairs) in [
        (
            "update postroom.settings set system_identifier = system_identifier + 1".to_owned(),
            "update postroom.settings set system_identifier = system_identifier - 1".to_owned(),
        ),
        (
            "update postroom.settings set database_oid = 1".to_owned(),
            format!("update postroom.settings set database_oid = {own}"),
        ),
        (
            "select setval('postroom.outbox_seq_seq', 3)".to_owned(),
            "select setval('postroom.outbox_seq_seq', 1000)".to_owned(),
        ),
    ] {
        client.batch_execute(&breaks).await.unwrap();
        assert_eq!(swept(&database).await.outbox, 0, "{breaks}");
        client.batch_execute(&repairs).await.unwrap();
    }
    // A route that lost its position in a lane, and one that has not come so far.
    client
        .batch_execute("create temporary table lost as select * from postroom.lanes; delete from postroom.lanes")
        .await
        .unwrap();
    assert_eq!(swept(&database).await.outbox, 0, "no positions");
    client.batch_execute("insert into postroom.lanes select * from lost").await.unwrap();
    let slow = source_of(&database, &Route { name: "slow".to_owned(), ..route() }, "slow").await;
    assert_eq!(swept(&database).await.outbox, 0, "the other route has read nothing");
    slow.release().await.unwrap();
    let deed = Deed { actor: "ann".to_owned(), reason: "x".to_owned() };
    assert!(store(&database).forget_route("slow", true, &deed).await.unwrap().unwrap().done);
    assert_eq!(swept(&database).await.outbox, 50);
}

#[tokio::test]
async fn one_process_removes_at_a_time() {
    let database = prepared().await;
    let mut other = database.connect().await;
    let relay = source_of(&database, &route(), "relay").await;
    let sent = enqueue(&other, Some("b"), 20).await;
    assert_eq!(drain(&relay).await, sent);
    while relay.settle(&[]).await.unwrap().unwritten {}
    other.batch_execute(AGED).await.unwrap();
    let tx = other.transaction().await.unwrap();
    tx.execute("select pg_advisory_xact_lock($1)", &[&0x706f_7374_7265_7461_i64]).await.unwrap();
    assert_eq!(swept(&database).await.outbox, 0);
    tx.commit().await.unwrap();
    assert_eq!(swept(&database).await.outbox, 20);
}
