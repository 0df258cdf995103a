//! Retention removes nothing that is not finished, whatever the database does meanwhile.

use std::time::Duration;

use postroom::{Archivable, Deed, MessageId, Operator, Removed, Retention, Route, Segment, Source, Sweep};
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

/// A segment of everything that has expired.
async fn begun(database: &Database) -> Option<Segment> {
    let retention = Retention { outbox: Some(Duration::from_secs(60)), ..Retention::default() };
    let (mut sweep, mut found) = (Sweep::begin(&retention), Vec::new());
    while !sweep.is_over() {
        found.extend(store(database).find_expired(&retention, &mut sweep).await.unwrap());
    }
    store(database).begin_segment(&found).await.unwrap()
}

/// Between its begin and its end everything may happen to the table.
#[tokio::test]
async fn the_end_of_a_segment_removes_its_own_messages_and_only_while_they_are_finished() {
    let database = prepared().await;
    let client = database.connect().await;
    let relay = source_of(&database, &route(), "relay").await;
    let sent = enqueue(&client, Some("b"), 50).await;
    assert_eq!(drain(&relay).await, sent);
    while relay.settle(&[]).await.unwrap().unwritten {}
    client.batch_execute(AGED).await.unwrap();
    let segment = begun(&database).await.unwrap().id;
    let end = async || store(&database).end_segment(segment).await.unwrap();
    client.batch_execute("update postroom.settings set system_identifier = system_identifier + 1").await.unwrap();
    assert_eq!(end().await, 0, "positions of another cluster");
    client.batch_execute("update postroom.settings set system_identifier = system_identifier - 1").await.unwrap();
    let slow = source_of(&database, &Route { name: "slow".to_owned(), ..route() }, "slow").await;
    assert_eq!(end().await, 0, "a route that begins with what is oldest has not read them");
    slow.release().await.unwrap();
    let deed = Deed { actor: "ann".to_owned(), reason: "x".to_owned() };
    assert!(store(&database).forget_route("slow", true, &deed).await.unwrap().unwrap().done);

    // The same places, and other messages in them, as after a sequence that was set back by somebody who knew how.
    client.batch_execute("update postroom.outbox set id = gen_random_uuid()").await.unwrap();
    assert_eq!(store(&database).segment_messages(segment).await.unwrap(), [], "they are not in the segment");
    assert_eq!(end().await, 0);
    let left: i64 = client.query_one("select count(*) from postroom.outbox", &[]).await.unwrap().get(0);
    assert_eq!(left, 50);
    // What came back before keeps its time from nobody else's message either.
    client
        .batch_execute(
            "insert into postroom.archive_restored (id, lane, seq, stays_until)
             select gen_random_uuid(), lane, seq, now() - interval '1 day' from postroom.outbox",
        )
        .await
        .unwrap();
    store(&database).forget_restored().await.unwrap();
    let left: i64 = client.query_one("select count(*) from postroom.outbox", &[]).await.unwrap().get(0);
    assert_eq!(left, 50);
    let segment = begun(&database).await.unwrap().id;
    assert_eq!(store(&database).end_segment(segment).await.unwrap(), 50);
}

/// Two processes that archive at once: one segment is under way at a time, and a message is in one of them.
#[tokio::test]
async fn processes_that_archive_at_once_share_no_message() {
    let database = prepared().await;
    let client = database.connect().await;
    let relay = source_of(&database, &route(), "relay").await;
    for _ in 0..4 {
        let sent = enqueue(&client, Some("b"), 50).await;
        assert_eq!(drain(&relay).await, sent);
    }
    while relay.settle(&[]).await.unwrap().unwritten {}
    client.batch_execute(AGED).await.unwrap();
    let archives = async || {
        let mut ids = Vec::new();
        for _ in 0..20 {
            let Some(segment) = begun(&database).await else { continue };
            let messages = store(&database).segment_messages(segment.id).await.unwrap();
            ids.extend(messages.into_iter().map(|message| message.id));
            store(&database).end_segment(segment.id).await.unwrap();
        }
        ids
    };
    let (mut one, other) = tokio::join!(archives(), archives());
    one.extend(other);
    let all = one.len();
    one.sort_unstable();
    one.dedup();
    assert_eq!((one.len(), all), (200, 200));
}
