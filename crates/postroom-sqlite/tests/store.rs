//! The SQLite store on a file of its own.

#![allow(clippy::unwrap_used)]

use std::path::PathBuf;
use std::time::Duration;

use postroom::{
    Admission, Cause, Consumer, DeadDeed, DeadFilter, Deed, EnqueueError, GuardError, Inbox, Message, MessageFilter,
    MessageId, Operator, Origin, Outbox, Outcome, PAYLOAD_BYTES_MAX, Route, Settlement, Side, Source, Token,
    TopicFilter, Want,
};
use postroom_sqlite::{Database, Sqlite, SqliteSource, connect, migrate};
use rusqlite::{Connection, TransactionBehavior};
use sqlx::Connection as _;

struct File(PathBuf);

impl Drop for File {
    fn drop(&mut self) {
        for suffix in ["", "-wal", "-shm"] {
            let _ = std::fs::remove_file(format!("{}{suffix}", self.0.display()));
        }
    }
}

fn prepared() -> (File, Connection) {
    let path = std::env::temp_dir().join(format!("postroom-test-{}.db", MessageId::new()));
    let mut connection = connect(&path).unwrap();
    migrate(&mut connection).unwrap();
    (File(path), connection)
}

fn store(file: &File) -> Database {
    Database::new(&file.0)
}

fn route(topics: &[&str]) -> Route {
    let topics = TopicFilter::new(topics.iter().copied()).unwrap();
    Route { topics, lease: Duration::from_secs(600), ..Route::new("orders") }
}

async fn source(file: &File, owner: &str) -> SqliteSource {
    let source = SqliteSource::open(&store(file), &route(&["orders"]), owner).unwrap();
    source.renew(&postroom::Report::default()).await.unwrap();
    source
}

fn enqueue(connection: &mut Connection, messages: &[Message]) {
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
    Sqlite.enqueue_blocking(&tx, messages).unwrap();
    tx.commit().unwrap();
}

fn message(key: &str) -> Message {
    Message::new("orders", "order.placed", "x").key(key)
}

async fn claim(source: &SqliteSource) -> Vec<postroom::Delivery> {
    source.claim(Want::up_to(100)).await.unwrap().deliveries
}

fn settled(token: Token, outcome: Outcome) -> Settlement {
    Settlement { token, outcome }
}

#[tokio::test]
async fn committed_messages_come_out_once_and_in_order_and_rolled_back_ones_never() {
    let (file, mut connection) = prepared();
    let source = source(&file, "relay").await;
    let messages: Vec<Message> = (0..50).map(|_| message("a")).collect();
    for message in &messages {
        let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
        Sqlite.enqueue_blocking(&tx, &[Message::new("orders", "rolled.back", "x")]).unwrap();
        tx.rollback().unwrap();
        enqueue(&mut connection, std::slice::from_ref(message));
    }
    enqueue(&mut connection, &[Message::new("other topic", "k", "x")]);
    let claimed = claim(&source).await;
    let ids: Vec<MessageId> = claimed.iter().map(|delivery| delivery.message.id).collect();
    assert_eq!(ids, messages.iter().map(|message| message.id).collect::<Vec<_>>());
    source.settle(&claimed.iter().map(|d| settled(d.token, Outcome::Done)).collect::<Vec<_>>()).await.unwrap();
    assert!(claim(&source).await.is_empty());
    source.release().await.unwrap();
    let again = self::source(&file, "another").await;
    assert!(claim(&again).await.is_empty(), "what was settled does not come again");
}

#[tokio::test]
async fn what_was_not_settled_comes_again_after_a_crash() {
    let (file, mut connection) = prepared();
    let first = source(&file, "first").await;
    enqueue(&mut connection, &[message("a"), message("a"), message("a")]);
    let claimed = claim(&first).await;
    first.settle(&[settled(claimed[1].token, Outcome::Done)]).await.unwrap();
    connection.execute("update postroom_lanes set expires_ms = 0", []).unwrap();
    let second = source(&file, "second").await;
    assert_eq!(claim(&second).await.len(), 3);
    let stale = first.settle(&[settled(claimed[0].token, Outcome::Done)]).await.unwrap();
    assert_eq!((stale.fenced, stale.lost_lanes.len()), (0, 1), "its position is refused");
    let retry = Outcome::Retry { after: Duration::ZERO, attempts: 1, error: "x".to_owned() };
    let stale = first.settle(&[settled(claimed[2].token, retry)]).await.unwrap();
    assert_eq!((stale.fenced, stale.lost_lanes.len()), (1, 0));
    let parked: i64 = connection.query_row("select count(*) from postroom_parked", [], |row| row.get(0)).unwrap();
    assert_eq!(parked, 0, "I9");
}

#[tokio::test]
async fn a_failed_message_parks_its_key_in_order() {
    let (file, mut connection) = prepared();
    let source = source(&file, "relay").await;
    let messages = [message("a"), message("a"), message("b")];
    enqueue(&mut connection, &messages);
    let claimed = claim(&source).await;
    let retry = |attempts| Outcome::Retry { after: Duration::from_secs(3600), attempts, error: "no".to_owned() };
    source
        .settle(&[
            settled(claimed[0].token, retry(1)),
            settled(claimed[1].token, Outcome::Queue),
            settled(claimed[2].token, Outcome::Done),
        ])
        .await
        .unwrap();
    enqueue(&mut connection, &[message("a")]);
    let next = claim(&source).await;
    assert!(next.len() == 1 && next[0].behind);
    source.settle(&[settled(next[0].token, Outcome::Queue)]).await.unwrap();
    connection.execute("update postroom_parked set due_ms = 0 where state = 'retry'", []).unwrap();
    let run = claim(&source).await;
    assert_eq!(run.len(), 3);
    assert!(run.iter().all(|delivery| delivery.origin == Origin::Parked));
    assert_eq!(run[0].message.id, messages[0].id);
    let dead =
        Outcome::Dead { attempts: 8, cause: postroom::Cause::Exhausted, error: "no".to_owned(), blocks_key: false };
    source.settle(&[settled(run[0].token, dead), settled(run[1].token, Outcome::Done)]).await.unwrap();
    source.settle(&[settled(run[2].token, Outcome::Done)]).await.unwrap();
    let status = store(&file).status().await.unwrap();
    let route = &status.routes[0];
    assert_eq!((route.backlog, route.parked, route.dead, route.lanes_held), (0, 0, 1, 1));
}

#[tokio::test]
async fn a_delayed_message_waits_for_its_time() {
    let (file, mut connection) = prepared();
    let source = source(&file, "relay").await;
    enqueue(&mut connection, &[message("a").delay(Duration::from_secs(3600)), message("a")]);
    let claimed = claim(&source).await;
    assert_eq!(claimed.iter().map(|delivery| delivery.scheduled).collect::<Vec<_>>(), [true, false]);
    source
        .settle(&[settled(claimed[0].token, Outcome::Schedule), settled(claimed[1].token, Outcome::Done)])
        .await
        .unwrap();
    assert!(claim(&source).await.is_empty());
    connection.execute("update postroom_parked set due_ms = 0", []).unwrap();
    assert_eq!(claim(&source).await.len(), 1);
}

#[tokio::test]
async fn payload_bytes_in_are_payload_bytes_out() {
    let (file, mut connection) = prepared();
    let source = source(&file, "relay").await;
    let payloads: [Vec<u8>; 4] = [vec![], b"a\0b".to_vec(), vec![0xff, 0xfe, 0xc3], vec![7; PAYLOAD_BYTES_MAX]];
    let messages: Vec<Message> = payloads
        .iter()
        .map(|payload| Message::new("orders", "bytes", payload.clone()).key("k").header("nul", "a\0b"))
        .collect();
    enqueue(&mut connection, &messages);
    connection
        .execute(
            "insert into postroom_outbox (id, topic, type, payload) values (?1, 'orders', 'plain', 'text')",
            [MessageId::new().to_string()],
        )
        .unwrap();
    let found: Vec<std::sync::Arc<Message>> =
        claim(&source).await.into_iter().map(|delivery| delivery.message).collect();
    for (found, payload) in found.iter().zip(&payloads) {
        assert!(found.payload == payload && found.headers["nul"] == "a\0b");
    }
    assert_eq!(found[4].payload.as_ref(), b"text");
    let tx = connection.transaction().unwrap();
    let refused = Sqlite.enqueue_blocking(&tx, &[Message::new("t", "k", vec![0; PAYLOAD_BYTES_MAX + 1])]);
    assert!(matches!(refused, Err(EnqueueError::Limit(_))));
}

#[tokio::test]
async fn sqlx_transactions_write_and_admit() {
    let (file, connection) = prepared();
    let mut sqlx = sqlx::SqliteConnection::connect(&format!("sqlite:{}", file.0.display())).await.unwrap();
    let written = message("a");
    let mut tx = sqlx.begin().await.unwrap();
    Sqlite.enqueue(&mut tx, std::slice::from_ref(&written)).await.unwrap();
    tx.commit().await.unwrap();
    let mut tx = sqlx.begin().await.unwrap();
    let again = Sqlite.enqueue(&mut tx, std::slice::from_ref(&written)).await.unwrap_err();
    assert!(matches!(again, EnqueueError::AlreadyEnqueued { .. }));
    tx.rollback().await.unwrap();
    let consumer = Consumer::new("totals").unwrap();
    for expected in [Admission::New, Admission::Duplicate] {
        let mut tx = sqlx.begin().await.unwrap();
        let admission = Sqlite.admit(&mut tx, &consumer, written.id).await.unwrap();
        assert_eq!(admission, expected);
        tx.commit().await.unwrap();
    }
    drop(connection);
    let source = source(&file, "relay").await;
    assert_eq!(claim(&source).await[0].message.id, written.id);
}

#[test]
fn migrating_again_changes_nothing_and_a_changed_schema_is_refused() {
    let (_file, mut connection) = prepared();
    assert!(migrate(&mut connection).unwrap().applied.is_empty());
    connection.execute("update postroom_migrations set checksum = 'x'", []).unwrap();
    assert!(migrate(&mut connection).is_err());
}

#[test]
fn a_guard_that_fails_rolls_back_business_rows_and_messages_with_an_error_of_its_own() {
    let (_file, mut connection) = prepared();
    connection.execute_batch("create table orders (id integer primary key); insert into orders values (1)").unwrap();
    let mut attempt = |sql: &str, id: i64| {
        let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
        Sqlite.enqueue_blocking(&tx, &[message("a")]).unwrap();
        Sqlite.execute_guarded_blocking(&tx, "place the order", 1, sql, [id])?;
        tx.commit().unwrap();
        Ok::<(), GuardError>(())
    };
    attempt("insert into orders values (?1)", 2).unwrap();
    let taken = attempt("insert into orders values (?1)", 1).unwrap_err();
    assert!(matches!(&taken, GuardError::Conflict { constraint, .. } if constraint == "orders.id"), "{taken}");
    let none = attempt("delete from orders where id = ?1", 9).unwrap_err();
    assert!(matches!(none, GuardError::RowCount { actual: 0, .. }));
    let messages: i64 = connection.query_row("select count(*) from postroom_outbox", [], |row| row.get(0)).unwrap();
    assert_eq!(messages, 1);
}

/// Claims, settles as done, renews, until these have come out, however often a claim brings nothing.
async fn until_out(source: &SqliteSource, expected: &[MessageId]) -> Vec<MessageId> {
    let mut out = Vec::new();
    for _ in 0..20 {
        source.renew(&postroom::Report::default()).await.unwrap();
        let deliveries = claim(source).await;
        out.extend(deliveries.iter().map(|delivery| delivery.message.id));
        let done = |token| Settlement { token, outcome: Outcome::Done };
        source.settle(&deliveries.iter().map(|delivery| done(delivery.token)).collect::<Vec<_>>()).await.unwrap();
        if expected.iter().all(|id| out.contains(id)) {
            return out;
        }
    }
    panic!("I1: some of {} messages were passed over, {} came", expected.len(), out.len());
}

fn written(connection: &mut Connection, count: usize) -> Vec<MessageId> {
    let messages: Vec<Message> = (0..count).map(|_| message("a")).collect();
    enqueue(connection, &messages);
    messages.iter().map(|message| message.id).collect()
}

#[tokio::test]
async fn an_outbox_that_was_emptied_and_counts_from_one_again_loses_nothing() {
    for count in [5, 20, 50] {
        let (file, mut connection) = prepared();
        let relay = source(&file, "relay").await;
        let before = written(&mut connection, 20);
        assert_eq!(until_out(&relay, &before).await, before);
        connection.execute_batch("delete from postroom_outbox; delete from sqlite_sequence").unwrap();
        let new = written(&mut connection, count);
        assert_eq!(until_out(&relay, &new).await, new, "{count} after 20, under a running relay");

        relay.release().await.unwrap();
        connection.execute_batch("delete from postroom_outbox; delete from sqlite_sequence").unwrap();
        let new = written(&mut connection, 3 * count + 100);
        let next = source(&file, "the next relay").await;
        assert_eq!(until_out(&next, &new).await, new, "{count}, while nobody relays");
    }
}

#[tokio::test]
async fn a_file_restored_in_place_or_replaced_under_a_running_relay_loses_nothing_new() {
    for replaced in [false, true] {
        let (file, mut connection) = prepared();
        let relay = source(&file, "relay").await;
        let before = written(&mut connection, 20);
        assert_eq!(until_out(&relay, &before).await, before);
        let copy = File(file.0.with_extension("copy"));
        connection.execute("vacuum into ?1", [copy.0.to_str().unwrap()]).unwrap();
        let forgotten = written(&mut connection, 20);
        assert_eq!(until_out(&relay, &forgotten).await, forgotten);
        if replaced {
            drop(connection);
            std::fs::rename(&copy.0, &file.0).unwrap();
            for suffix in ["-wal", "-shm"] {
                let _ = std::fs::remove_file(format!("{}{suffix}", file.0.display()));
            }
        } else {
            // What `.restore` does: pages are written over those of the file.
            connection
                .execute_batch(&format!(
                    "attach '{}' as backup;
                     begin immediate;
                     delete from postroom_outbox; insert into postroom_outbox select * from backup.postroom_outbox;
                     delete from postroom_lanes; insert into postroom_lanes select * from backup.postroom_lanes;
                     delete from sqlite_sequence where name = 'postroom_outbox';
                     insert into sqlite_sequence select * from backup.sqlite_sequence where name = 'postroom_outbox';
                     commit",
                    copy.0.display()
                ))
                .unwrap();
        }
        let mut connection = connect(&file.0).unwrap();
        let new = written(&mut connection, 10);
        let out = until_out(&relay, &new).await;
        assert_eq!(out, new, "replaced: {replaced}");
    }
}

#[tokio::test]
async fn a_relay_with_fewer_topics_or_a_looser_order_takes_what_the_route_takes() {
    let (file, mut connection) = prepared();
    let loose = Route { order: postroom::Order::None, ..route(&["orders"]) };
    let old = SqliteSource::open(&store(&file), &loose, "old").unwrap();
    old.renew(&postroom::Report::default()).await.unwrap();
    let _new = SqliteSource::open(&store(&file), &route(&["orders", "billing"]), "new").unwrap();
    let billing = Message::new("billing", "bill.sent", "x");
    enqueue(&mut connection, std::slice::from_ref(&billing));
    assert_eq!(until_out(&old, &[billing.id]).await, [billing.id]);
    let standing = old.renew(&postroom::Report::default()).await.unwrap();
    assert_eq!(standing.order, Some(postroom::Order::Key));
}

/// SQLite takes any bytes for text, so operators meet such rows; one of them must not hide the others, nor get stuck.
#[tokio::test]
async fn a_text_that_is_not_utf8_is_shown_and_can_be_retried_and_discarded() {
    let (file, connection) = prepared();
    let bad = "cast(x'6fff' as text)";
    let ids: Vec<MessageId> = (0..2).map(|_| MessageId::new()).collect();
    for id in &ids {
        let sql = format!(
            "insert into postroom_outbox (id, topic, type, key, payload) values ('{id}', 'orders', {bad}, {bad}, {bad})"
        );
        connection.execute_batch(&sql).unwrap();
    }
    let sql = format!(
        "insert into postroom_outbox (id, topic, type, payload) values ('{}', {bad}, 't', 'x')",
        MessageId::new()
    );
    connection.execute_batch(&sql).unwrap();
    let (operator, relay) = (store(&file), source(&file, "relay").await);
    let status = operator.status().await.unwrap();
    assert_eq!(status.unrouted.len(), 1, "{status:?}");
    let all = MessageFilter::default();
    assert_eq!(operator.messages(&all, 10).await.unwrap().messages.len(), 3);

    let bury = async || {
        let claimed = claim(&relay).await;
        for delivery in &claimed {
            let outcome = Outcome::Dead {
                attempts: 0,
                error: "it is not UTF-8".to_owned(),
                cause: Cause::Permanent,
                blocks_key: false,
            };
            let settled = relay.settle(&[settled(delivery.token, outcome)]).await.unwrap();
            assert_eq!(settled.fenced, 0);
        }
        claimed.len()
    };
    assert_eq!(bury().await, 2);
    let deed = Deed { actor: "ann".to_owned(), reason: "x".to_owned() };
    let shown = operator.dead_letters(Side::Out, &DeadFilter::default(), 10).await.unwrap();
    assert_eq!(shown.iter().map(|letter| letter.kind.as_str()).collect::<Vec<_>>(), ["o\u{fffd}", "o\u{fffd}"]);
    let why = operator.whereabouts(ids[0]).await.unwrap();
    assert_eq!(why[0].key.as_deref(), Some("o\u{fffd}"));
    let filter = DeadFilter::default();
    assert_eq!(
        operator.act_on_dead(DeadDeed::Retry, Side::Out, &filter, 10, &deed, &mut |_| ()).await.unwrap().len(),
        2
    );
    assert_eq!(bury().await + bury().await, 2, "none waits behind the other for ever");
    assert_eq!(
        operator.act_on_dead(DeadDeed::Discard, Side::Out, &filter, 10, &deed, &mut |_| ()).await.unwrap().len(),
        2
    );
}
