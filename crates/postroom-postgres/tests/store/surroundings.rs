//! Databases of other encodings, poolers, and other settings of a route.

use postroom::{OnDead, Operator, Order, Outcome, Route, Source, TopicFilter};
use postroom_postgres::migrate;
use postroom_testkit::postgres::Database;

use crate::setup::{
    claim_all, connector, drain, enqueue, open, prepared, renew, route, settled, source, source_of, store,
};

/// A database in this encoding, beside the others.
async fn encoded(encoding: &str) -> Database {
    let database = Database::create().await;
    let name = database.url().rsplit('/').next().unwrap().to_owned();
    let server = database.url().replace(&format!("/{name}"), "/postgres");
    let admin = postroom_testkit::postgres::connect(&server).await;
    admin.batch_execute(&format!("drop database {name}")).await.unwrap();
    let sql = format!("create database {name} encoding '{encoding}' locale 'C' template template0");
    admin.batch_execute(&sql).await.unwrap();
    database
}

#[tokio::test]
async fn a_latin1_database_is_migrated_whole_and_errors_that_it_cannot_hold_are_recorded_all_the_same() {
    let database = encoded("LATIN1").await;
    migrate(&connector(&database), 4).await.unwrap();
    let client = database.connect().await;
    let relay = source(&database, "relay").await;
    let ids = enqueue(&client, Some("m\u{fc}ller"), 2).await;
    let claimed = claim_all(&relay).await;
    assert_eq!(claimed[0].message.key.as_deref(), Some("m\u{fc}ller"));
    let error = "the broker said \u{201e}no\u{201c} \u{1f4a5}".to_owned();
    let retry = Outcome::Retry { after: std::time::Duration::ZERO, attempts: 1, error };
    relay.settle(&[settled(claimed[0].token, retry), settled(claimed[1].token, Outcome::Queue)]).await.unwrap();
    assert_eq!(drain(&relay).await, ids);
}

#[tokio::test]
async fn a_key_that_is_not_utf8_is_set_aside_alone() {
    let database = encoded("SQL_ASCII").await;
    migrate(&connector(&database), 4).await.unwrap();
    let client = database.connect().await;
    let relay = source(&database, "relay").await;
    let before = enqueue(&client, Some("a"), 1).await;
    let bad =
        "select postroom.enqueue('orders', 'order.placed', 'x'::text, key => convert_from('\\xff61', 'SQL_ASCII'))";
    let bad: postroom::MessageId = client.query_one(bad, &[]).await.unwrap().get::<_, uuid::Uuid>(0).into();
    let after = enqueue(&client, Some("b"), 3).await;
    let claimed = claim_all(&relay).await;
    let unreadable: Vec<_> = claimed.iter().filter(|delivery| delivery.unreadable.is_some()).collect();
    assert_eq!(unreadable.iter().map(|delivery| delivery.message.id).collect::<Vec<_>>(), [bad]);
    assert_eq!(claimed.len(), before.len() + after.len() + 1, "I26: nobody else is held up");
    let dead = Outcome::Dead {
        attempts: 0,
        cause: postroom::Cause::Permanent,
        error: unreadable[0].unreadable.clone().unwrap(),
        blocks_key: false,
    };
    relay.settle(&[settled(unreadable[0].token, dead)]).await.unwrap();
    let filter = postroom::DeadFilter::default();
    let letters = store(&database).dead_letters(postroom::Side::Out, &filter, 10).await.unwrap();
    assert!(letters[0].error.contains("not UTF-8: key"), "{:?}", letters[0]);
    assert_eq!(letters[0].key.as_deref(), Some("\u{fffd}a"));
}

fn with(topics: &[&str], order: Order, on_dead: OnDead) -> Route {
    let topics = TopicFilter::new(topics.iter().copied()).unwrap();
    Route { topics, order, on_dead, ..route() }
}

/// An old relay and a new one share the route, as they do in a rolling restart; nothing of the new topic is passed over.
#[tokio::test]
async fn topics_added_by_a_rolling_restart_are_taken_by_every_relay_at_once() {
    let database = prepared().await;
    let client = database.connect().await;
    let old = source_of(&database, &with(&["orders"], Order::None, OnDead::Skip), "old").await;
    let wider = with(&["orders", "billing"], Order::Key, OnDead::Block);
    let new = open(&database, &wider, "new").await.unwrap();
    let mut expected = Vec::new();
    for n in 0..100 {
        let sql = "select postroom.enqueue('billing', 'bill.sent', 'x'::text, key => $1)";
        let row = client.query_one(sql, &[&format!("key-{n}")]).await.unwrap();
        expected.push(postroom::MessageId::from(row.get::<_, uuid::Uuid>(0)));
    }
    // The old one has every lane still, and has not renewed since.
    let mut out = drain(&old).await;
    let standing = renew(&old).await;
    assert_eq!((standing.order, standing.on_dead), (Some(Order::Key), Some(OnDead::Block)), "the stricter ones");
    renew(&new).await;
    out.extend(drain(&new).await);
    out.sort();
    expected.sort();
    assert_eq!(out, expected, "I1");

    // One with the old configuration that crashed comes back: it drops nothing.
    let again = open(&database, &with(&["orders"], Order::None, OnDead::Skip), "old again").await.unwrap();
    drop((old, new, again));
    let row = client
        .query_one(
            "select r.topics, r.ordering, r.on_dead, r.revision,
                    (select count(*) from postroom.route_revisions v where v.route = r.name)
               from postroom.routes r",
            &[],
        )
        .await
        .unwrap();
    let topics: Vec<String> = row.get(0);
    assert_eq!(topics, ["orders", "billing"]);
    assert_eq!((row.get::<_, &str>(1), row.get::<_, &str>(2)), ("key", "block"));
    assert_eq!((row.get::<_, i32>(3), row.get::<_, i64>(4)), (2, 2), "each change is kept");
}

#[tokio::test]
async fn a_schema_that_is_too_new_for_the_program_is_refused_with_both_numbers() {
    let database = prepared().await;
    let client = database.connect().await;
    client.batch_execute("update postroom.settings set oldest_program = 99").await.unwrap();
    let store = postroom_postgres::Database::new(database.url()).unwrap();
    let refused = postroom_postgres::LogSource::open(&store, &crate::setup::route(), "relay").await.err().unwrap();
    let refused = refused.to_string();
    assert!(refused.contains("version 99") && refused.contains("newer postroom"), "{refused}");
    // A schema that is newer, and works with this program.
    client
        .batch_execute("update postroom.settings set oldest_program = 13; insert into postroom.migrations values (99, 'later', 'x')")
        .await
        .unwrap();
    postroom_postgres::LogSource::open(&store, &crate::setup::route(), "relay").await.unwrap();
}
