//! The contract for every language: the plain insert, in the caller's transaction; and the schema.

use mysql_async::prelude::Queryable;
use mysql_async::{Error, TxOpts};
use postroom::{
    EnqueueError, LANES_DEFAULT, Message, MessageId, MigrateError, Outbox, Report, Route, TopicFilter, Want,
};
use postroom_mysql::{Mysql, migrate, print_sql};
use postroom_testkit::conformance::Fixture;
use postroom_testkit::conformance::source::{Outbox as _, route};

use crate::fixture::Shop;

#[tokio::test]
async fn a_plain_insert_needs_three_columns_and_cannot_choose_the_rest() {
    let shop = Shop::create().await;
    let mut conn = shop.connect().await;
    conn.query_drop("insert into postroom_outbox (topic, type, payload) values ('orders', 'order.placed', 'plain')")
        .await
        .unwrap();
    conn.query_drop("insert into postroom_outbox (topic, type, payload, place, lane, bytes) values ('orders', 'order.placed', 'x', 7, 99, -1)")
        .await
        .unwrap();
    let sql = "select id, place, lane, bytes, content_type from postroom_outbox order by seq";
    let rows: Vec<(String, Option<i64>, i64, i64, String)> = conn.query(sql).await.unwrap();
    for (id, place, lane, bytes, content_type) in &rows {
        let id: MessageId = id.parse().unwrap();
        assert_eq!(id.as_uuid().get_version_num(), 7);
        assert_eq!((place, content_type.as_str()), (&None, "application/octet-stream"));
        assert!((0..4).contains(lane) && *bytes > 512, "{rows:?}");
    }
    let upper = "insert into postroom_outbox (id, topic, type, payload) values ('01A20985-C373-71E1-8A04-893E311AA5F5', 't', 'k', '')";
    conn.query_drop(upper).await.unwrap();
    assert!(conn.query_drop(upper.to_lowercase()).await.is_err(), "the same id in other letters");
    for (columns, values) in [
        ("id", "'nope'"),
        ("headers", "'[]'"),
        ("headers", "'{'"),
        ("`key`", "''"),
        ("routing_key", "repeat('x', 256)"),
        ("content_type", "''"),
    ] {
        let sql = format!(
            "insert into postroom_outbox (topic, type, payload, {columns}) values ('orders', 'x', '', {values})"
        );
        assert!(matches!(conn.query_drop(&sql).await, Err(Error::Server(_))), "{sql}");
    }
    // Without a strict mode the server cuts texts off, and only warns.
    conn.query_drop("set session sql_mode = ''").await.unwrap();
    for (column, length) in
        [("`key`", 600), ("routing_key", 300), ("tenant_id", 600), ("aggregate_id", 600), ("aggregate_type", 300)]
    {
        let sql = format!(
            "insert into postroom_outbox (topic, type, payload, {column}) values ('orders', 'x', '', repeat('x', {length}))"
        );
        assert!(matches!(conn.query_drop(&sql).await, Err(Error::Server(_))), "{sql}");
    }
    let sql = "insert into postroom_outbox (topic, type, payload) values (repeat('x', 300), 'x', '')";
    assert!(matches!(conn.query_drop(sql).await, Err(Error::Server(_))));
    let sql = "insert into postroom_outbox (topic, type, payload) values ('orders', 'x', repeat('x', 1048577))";
    assert!(matches!(conn.query_drop(sql).await, Err(Error::Server(_))));
}

#[tokio::test]
async fn an_id_is_written_once() {
    let shop = Shop::create().await;
    let mut conn = shop.connect().await;
    let message = Message::new("orders", "order.placed", "x");
    let mut tx = conn.start_transaction(TxOpts::default()).await.unwrap();
    Mysql.enqueue(&mut tx, std::slice::from_ref(&message)).await.unwrap();
    tx.commit().await.unwrap();
    let mut tx = conn.start_transaction(TxOpts::default()).await.unwrap();
    let error = Mysql.enqueue(&mut tx, std::slice::from_ref(&message)).await.unwrap_err();
    assert!(matches!(error, EnqueueError::AlreadyEnqueued { .. }), "{error}");
}

#[tokio::test]
async fn migrating_again_changes_nothing_and_a_run_that_ended_half_way_is_finished() {
    let shop = Shop::empty().await;
    assert_eq!(migrate(&shop.opts, Some(4)).await.unwrap().applied.len(), 2);
    assert_eq!(migrate(&shop.opts, None).await.unwrap().applied.len(), 0);
    let error = migrate(&shop.opts, Some(8)).await.unwrap_err();
    assert!(matches!(error, MigrateError::OtherLanes { schema: 4, asked: 8 }), "{error}");
    shop.run("delete from postroom_migrations").await;
    shop.run("drop table postroom_parked").await;
    assert_eq!(migrate(&shop.opts, None).await.unwrap().applied.len(), 2);
    shop.run("select * from postroom_parked").await;
    shop.run("update postroom_migrations set checksum = 'x'").await;
    assert!(matches!(migrate(&shop.opts, None).await, Err(MigrateError::Changed { number: 1, .. })));
    shop.run("insert into postroom_migrations (number, name, checksum) values (999, 'future', '')").await;
    shop.run("update postroom_migrations set checksum = 'x' where number = 1").await;
    assert!(migrate(&shop.opts, None).await.is_err());
    let script = print_sql(None, true).unwrap();
    assert!(script.contains(&format!("% {LANES_DEFAULT};")), "{script}");
}

#[tokio::test]
async fn processes_that_migrate_at_once_do_not_meet() {
    let shop = Shop::empty().await;
    let runs: Vec<_> = (0..4)
        .map(|_| {
            let opts = shop.opts.clone();
            tokio::spawn(async move { migrate(&opts, Some(4)).await })
        })
        .collect();
    let mut applied = 0;
    for run in runs {
        applied += run.await.unwrap().unwrap().applied.len();
    }
    assert_eq!(applied, 2, "one of them does all of it");
}

#[tokio::test]
async fn a_topic_that_another_relay_adds_is_taken_at_once_by_every_relay() {
    let shop = Shop::create().await;
    let topics = |topics: &[&str]| Route { topics: TopicFilter::new(topics.iter().copied()).unwrap(), ..route() };
    let before = shop.open(&topics(&["orders"]), "before").await;
    assert_eq!(before.renew(&Report::default()).await.unwrap().held, 4);
    // As in a rolling restart: the lanes are the older relay's yet.
    let _after = shop.open(&topics(&["orders", "billing"]), "after").await;
    let message = Message::new("billing", "invoice.sent", "x");
    shop.commit(std::slice::from_ref(&message)).await;
    let claimed = before.claim(Want::up_to(10)).await.unwrap();
    let ids: Vec<_> = claimed.deliveries.iter().map(|delivery| delivery.message.id).collect();
    assert_eq!(ids, [message.id], "I1: it was passed by");
}
