//! Handlers that fail, hang, panic and die: only their key waits, and nothing is lost.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use postroom::{Message, RetryPolicy};
use postroom_consumer::{Call, HandlerError, Handlers, Incoming, ReceiverFailed, Unknown};
use postroom_postgres::Postgres;
use tokio_postgres::Transaction;

use crate::setup::{Running, as_told, assert_once, broker, done, postgres, publish, receiver, soon, text, told, until};

const DEAD: &str = "select count(*) = 1 from postroom.dead_consume";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failing_message_holds_only_its_key_and_is_dead_after_its_attempts() {
    let (database, broker) = (postgres().await, broker());
    let client = database.connect().await;
    let first = told("a", "fail");
    let id = first.id;
    let mut messages = vec![told("a", "before"), first, told("a", "after")];
    messages.extend((0..20).map(|n| told("b", &n.to_string())));
    publish(&broker, messages).await;
    // The wait is long enough to see that the others do not wait for it.
    let retry = RetryPolicy { jitter: Duration::from_millis(600), ..soon(3) };
    let running = Running::start(receiver(&database, broker.subscribe("q", 4), as_told()).retry(retry));
    until(&client, "select count(*) = 20 from done where key = 'b'").await;
    assert_eq!(done(&client, "a").await, ["before"], "what comes after waits behind it");
    assert_eq!(broker.unsettled("q"), 0, "what waits is kept in the store, not at the broker");
    until(&client, DEAD).await;
    until(&client, "select count(*) = 2 from done where key = 'a'").await;
    assert_eq!(done(&client, "a").await, ["before", "after"]);
    let counters = running.stop().await;
    assert_eq!((counters.retried, counters.dead, counters.kept), (2, 1, 1), "{counters:?}");
    let sql =
        "select message_id, attempts, cause, error, jsonb_array_length(history), convert_from(payload, 'UTF8'), type
                 from postroom.dead_consume";
    let row = client.query_one(sql, &[]).await.unwrap();
    assert_eq!(row.get::<_, uuid::Uuid>(0), *id.as_uuid());
    assert_eq!((row.get::<_, i32>(1), row.get::<_, &str>(2), row.get::<_, &str>(3)), (3, "exhausted", "told to fail"));
    assert_eq!((row.get::<_, i32>(4), row.get::<_, &str>(5), row.get::<_, &str>(6)), (3, "fail", "told"));
    assert_once(&client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_passes_later_has_its_effect_once_and_in_its_place() {
    let (database, broker) = (postgres().await, broker());
    let client = database.connect().await;
    let messages = vec![told("a", "fail twice"), told("a", "1"), told("a", "2")];
    // Delivered again while it waits: known, and acked.
    publish(&broker, messages.clone()).await;
    publish(&broker, messages).await;
    let running = Running::start(receiver(&database, broker.subscribe("q", 2), as_told()));
    until(&client, "select count(*) = 3 from done").await;
    assert_eq!(done(&client, "a").await, ["fail twice", "1", "2"]);
    let counters = running.stop().await;
    assert_eq!((counters.applied, counters.duplicates, counters.dead), (3, 3, 0), "{counters:?}");
    assert_once(&client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rejected_an_unreadable_and_an_unknown_message_are_dead_at_once() {
    let (database, broker) = (postgres().await, broker());
    let client = database.connect().await;
    let unreadable = Message::new("orders", "told", vec![0xff, 0xfe]).key("b");
    publish(&broker, vec![told("a", "reject"), unreadable, Message::new("orders", "nobody's", ""), told("a", "1")])
        .await;
    let running = Running::start(receiver(&database, broker.subscribe("q", 9), as_told()));
    until(&client, "select count(*) = 3 from postroom.dead_consume").await;
    until(&client, "select count(*) = 1 from done").await;
    let counters = running.stop().await;
    assert_eq!((counters.dead, counters.retried), (3, 0), "{counters:?}");
    let causes = "select count(*) = 3 from postroom.dead_consume where cause = 'permanent' and attempts = 1";
    until(&client, causes).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unknown_type_is_ignored_or_stops_the_receiver_where_that_is_wanted() {
    let (database, broker) = (postgres().await, broker());
    publish(&broker, vec![Message::new("orders", "nobody's", "")]).await;
    let handlers = as_told().unknown(Unknown::Fail);
    let stopped = receiver(&database, broker.subscribe("q", 9), handlers).run(std::future::pending()).await;
    assert!(matches!(stopped, Err(ReceiverFailed::UnknownType(kind)) if kind == "nobody's"));
    assert_eq!(broker.unsettled("q"), 1, "it was given back");
    let handlers = as_told().unknown(Unknown::Ignore);
    let running = Running::start(receiver(&database, broker.subscribe("q", 9), handlers));
    while broker.unsettled("q") > 0 {
        tokio::task::yield_now().await;
    }
    assert_eq!(running.stop().await.unknown, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hanging_and_a_panicking_handler_delay_only_their_key_and_are_dead_in_the_end() {
    let (database, broker) = (postgres().await, broker());
    let client = database.connect().await;
    let mut messages = vec![told("a", "hang"), told("b", "panic"), told("c", "hang in the database")];
    messages.extend(["a", "b", "c"].map(|key| told(key, "after")));
    messages.extend((0..50).map(|n| told(&format!("k{n}"), "other")));
    publish(&broker, messages).await;
    let receiver = receiver(&database, broker.subscribe("q", 100), as_told());
    let running = Running::start(receiver.timeout(Duration::from_millis(700)).concurrency(4));
    until(&client, "select count(*) = 50 from done where what = 'other'").await;
    until(&client, "select count(*) = 3 from postroom.dead_consume").await;
    until(&client, "select count(*) = 3 from done where what = 'after'").await;
    until(&client, "select count(*) = 0 from pg_stat_activity where datname = current_database() and query like '%pg_sleep(3600)%' and pid <> pg_backend_pid() and state = 'active'").await;
    let counters = running.stop().await;
    assert_eq!((counters.applied, counters.dead), (53, 3), "{counters:?}");
    let errors = "select string_agg(error, '; ' order by ordering_key) from postroom.dead_consume";
    let errors: String = client.query_one(errors, &[]).await.unwrap().get(0);
    assert!(errors.contains("had not ended") && errors.contains("told to panic"), "{errors}");
    assert_once(&client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_that_somebody_holds_burns_no_attempt() {
    let (database, broker) = (postgres().await, broker());
    let client = database.connect().await;
    let message = told("a", "1");
    let id = message.id.to_string();
    // Somebody else is in the middle of the same effect.
    let mut other = database.connect().await;
    let tx = other.transaction().await.unwrap();
    tx.execute(crate::setup::EFFECT, &[&id]).await.unwrap();
    publish(&broker, vec![message]).await;
    let running = Running::start(receiver(&database, broker.subscribe("q", 9), as_told()).retry(soon(1)));
    // Longer than the wait for a lock: it has been told "again" at least once.
    until(
        &client,
        "select coalesce(max(clock_timestamp() - query_start) > interval '4 seconds', false) from pg_stat_activity
                     where wait_event_type = 'Lock' and datname = current_database()",
    )
    .await;
    until(
        &client,
        "select count(*) = 0 from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()
                      and clock_timestamp() - query_start > interval '4 seconds'",
    )
    .await;
    tx.rollback().await.unwrap();
    until(&client, "select count(*) = 1 from done").await;
    let counters = running.stop().await;
    assert_eq!((counters.applied, counters.retried, counters.dead), (1, 0, 0), "{counters:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_swallows_a_database_error_is_not_taken_for_done() {
    let (database, broker) = (postgres().await, broker());
    let client = database.connect().await;
    let bad = ["swallow", "swallow at the end", "break a deferred promise"];
    let mut messages: Vec<Message> = bad.iter().map(|what| told(what, what)).collect();
    messages.push(told("b", "1"));
    publish(&broker, messages).await;
    let running = Running::start(receiver(&database, broker.subscribe("q", 9), as_told()));
    until(&client, "select count(*) = 3 from postroom.dead_consume where cause = 'exhausted'").await;
    until(&client, "select count(*) = 1 from done").await;
    running.stop().await;
}

/// Counts calls, and fails or dies where it is told.
struct Pays {
    calls: Arc<AtomicUsize>,
}

#[async_trait]
impl Call<Postgres, String> for Pays {
    type Answer = String;

    async fn call(&self, key: &str, incoming: &Incoming<String>) -> Result<String, HandlerError> {
        let call = self.calls.fetch_add(1, Ordering::SeqCst);
        assert_eq!(key, format!("totals/{}", incoming.message.id));
        if incoming.body == "hang" && call == 0 {
            std::future::pending::<()>().await;
        }
        Ok(format!("paid with {key}"))
    }

    async fn done(
        &self,
        tx: &mut Transaction<'_>,
        incoming: &Incoming<String>,
        said: &String,
    ) -> Result<(), HandlerError> {
        tx.execute(crate::setup::EFFECT, &[&incoming.message.id.to_string()]).await?;
        tx.execute("insert into done (key, what) values ('paid', $1)", &[said]).await?;
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_outside_is_intended_first_and_repeated_with_its_key_after_a_crash() {
    let (database, broker) = (postgres().await, broker());
    let client = database.connect().await;
    let calls = Arc::new(AtomicUsize::new(0));
    let handlers = || {
        Handlers::new().on_call("pay", Pays { calls: calls.clone() }).on_decoded("told", text, crate::setup::DoesAsTold)
    };
    publish(&broker, vec![Message::json("payments", "pay", &"hang").unwrap().key("a")]).await;
    let running = Running::start(receiver(&database, broker.subscribe("q", 9), handlers()));
    while calls.load(Ordering::SeqCst) == 0 {
        tokio::task::yield_now().await;
    }
    until(&client, "select count(*) = 1 from postroom.inbox_messages where state = 'claimed'").await;
    running.crash().await;
    let running = Running::start(receiver(&database, broker.subscribe("q", 9), handlers()));
    until(&client, "select count(*) = 1 from done where key = 'paid'").await;
    while broker.unsettled("q") > 0 {
        tokio::task::yield_now().await;
    }
    running.stop().await;
    assert_eq!(calls.load(Ordering::SeqCst), 2);
    assert_once(&client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_waits_in_the_store_does_not_wait_for_the_broker_to_have_nothing_more() {
    let (database, broker) = (postgres().await, broker());
    let client = database.connect().await;
    publish(&broker, vec![told("a", "fail twice"), told("a", "after")]).await;
    publish(&broker, (0..5000).map(|n| told(&format!("k{}", n % 50), "other")).collect()).await;
    let receiver = receiver(&database, broker.subscribe("q", 500), as_told()).concurrency(1).batch_max(1);
    let running = Running::start(receiver);
    until(&client, "select count(*) = 2 from done where key = 'a'").await;
    assert!(broker.unsettled("q") > 0, "the broker had more all the time");
    running.crash().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_waits_for_its_version() {
    let (database, broker) = (postgres().await, broker());
    let client = database.connect().await;
    let calls = Arc::new(AtomicUsize::new(0));
    let window = postroom_consumer::Versions::InOrder {
        window: Duration::from_secs(60),
        first: Some(1),
        late: postroom_consumer::Stale::Ignore,
    };
    let handlers =
        Handlers::new().on_call("pay", Pays { calls: calls.clone() }).compensation(Nobody).versions("order", window);
    let version = |n: i64| Message::json("payments", "pay", &"now").unwrap().aggregate("order", "o", n);
    publish(&broker, vec![version(2)]).await;
    let running = Running::start(receiver(&database, broker.subscribe("q", 9), handlers));
    until(&client, "select count(*) = 1 from postroom.inbox_messages where state in ('aside', 'early')").await;
    assert_eq!(calls.load(Ordering::SeqCst), 0);
    publish(&broker, vec![version(1), version(1)]).await;
    until(&client, "select count(*) = 2 from done where key = 'paid'").await;
    until(&client, "select count(*) = 3 from postroom.inbox").await;
    until(&client, "select count(*) = 0 from postroom.inbox_messages where state <> 'done'").await;
    while broker.unsettled("q") > 0 {
        tokio::task::yield_now().await;
    }
    let counters = running.stop().await;
    assert_eq!((calls.load(Ordering::SeqCst), counters.ignored), (2, 1), "{counters:?}");
}

struct Nobody;

#[async_trait]
impl postroom_consumer::Compensate<Postgres> for Nobody {
    async fn compensate(
        &self,
        _: &mut Transaction<'_>,
        what: &postroom_consumer::OutOfOrder<'_>,
    ) -> Result<(), HandlerError> {
        Err(HandlerError::reject(format!("{what:?}")))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_gives_back_what_was_not_begun_and_finishes_the_rest() {
    let (database, broker) = (postgres().await, broker());
    let client = database.connect().await;
    publish(&broker, vec![told("a", "hang"), told("b", "1"), told("a", "2")]).await;
    let receiver = receiver(&database, broker.subscribe("q", 9), as_told()).batch_max(1);
    let running = Running::start(receiver.stop_deadline(Duration::from_millis(300)));
    until(&client, "select count(*) = 1 from done").await;
    let counters = running.stop().await;
    assert_eq!(counters.applied, 1);
    assert_eq!(broker.unsettled("q"), 2, "the one that hung and the one behind it are the broker's again");
    let inbox: i64 = client.query_one("select count(*) from postroom.inbox", &[]).await.unwrap().get(0);
    assert_eq!(inbox, 1, "nothing half");
}
