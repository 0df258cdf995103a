//! The inbox for any language: everything here is SQL, as an application would write it.

use std::sync::Arc;

use postroom::{Consumer, MessageId, SessionKeeper, Subscription};
use postroom_brokers::in_process::InProcessBroker;
use postroom_consumer::{FillCounters, Filler};
use postroom_postgres::{Connector, Postgres, PostgresSession};
use postroom_testkit::postgres::Database;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio_postgres::Client;
use uuid::Uuid;

use crate::setup::{assert_once, broker, done, postgres, publish, told, until};

struct Keeping {
    stop: oneshot::Sender<()>,
    task: JoinHandle<FillCounters>,
}

impl Keeping {
    async fn stop(self) -> FillCounters {
        self.stop.send(()).unwrap();
        self.task.await.unwrap()
    }
}

fn keeping(database: &Database, broker: &InProcessBroker) -> Keeping {
    let (connector, broker) = (Connector::new(database.url()).unwrap(), broker.clone());
    let open = move || PostgresSession::new(connector.clone());
    let subscribe = move || Ok(Arc::new(broker.subscribe("q", 100)) as Arc<dyn Subscription>);
    let filler = Filler::new(subscribe, SessionKeeper::<Postgres>::new(Consumer::new("billing").unwrap(), open), "one");
    let (stop, stopped) = oneshot::channel::<()>();
    let task = tokio::spawn(async move {
        let stopped = async move {
            let _ = stopped.await;
        };
        filler.run(stopped).await.unwrap()
    });
    Keeping { stop, task }
}

async fn take(client: &Client, max: i32) -> Vec<(Uuid, i64, String)> {
    let sql = "select message_id, claim, convert_from(payload, 'UTF8')
                 from postroom.inbox_take('billing', $1, 'worker', '30 seconds') order by seq";
    let rows = client.query(sql, &[&max]).await.unwrap();
    rows.iter().map(|row| (row.get(0), row.get(1), row.get(2))).collect()
}

const DONE: &str = "select postroom.inbox_done('billing', $1, $2)";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_are_kept_once_and_taken_first_of_each_key() {
    let (database, broker) = (postgres().await, broker());
    let mut client = database.connect().await;
    let messages = vec![told("a", "a1"), told("a", "a2"), told("b", "b1"), told("a", "a3")];
    publish(&broker, messages.clone()).await;
    publish(&broker, messages).await;
    let running = keeping(&database, &broker);
    while broker.unsettled("q") > 0 {
        tokio::task::yield_now().await;
    }
    let counters = running.stop().await;
    assert_eq!((counters.kept, counters.duplicates), (4, 4), "{counters:?}");

    let first = take(&client, 10).await;
    assert_eq!(first.iter().map(|(_, _, what)| what.as_str()).collect::<Vec<_>>(), ["a1", "b1"]);
    assert!(take(&client, 10).await.is_empty(), "a2 waits for a1, which somebody has");
    // Done in the transaction of the effect; rolled back, it was not.
    let (id, claim, what) = &first[0];
    let tx = client.transaction().await.unwrap();
    tx.execute("insert into done (key, what) values ('a', $1)", &[what]).await.unwrap();
    tx.execute(DONE, &[id, claim]).await.unwrap();
    tx.rollback().await.unwrap();
    assert!(take(&client, 10).await.is_empty());
    client.execute(DONE, &[id, claim]).await.unwrap();
    let second = take(&client, 10).await;
    assert_eq!(second[0].2, "a2");
    assert_eq!(second.len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lapsed_claim_changes_nothing_and_one_that_always_lapses_is_dead() {
    let (database, broker) = (postgres().await, broker());
    let client = database.connect().await;
    publish(&broker, vec![told("a", "a1"), told("a", "a2")]).await;
    let running = keeping(&database, &broker);
    while broker.unsettled("q") > 0 {
        tokio::task::yield_now().await;
    }
    running.stop().await;
    let (id, old, _) = take(&client, 1).await.remove(0);
    let lapse = "update postroom.inbox_messages set due_at = '-infinity' where state = 'claimed'";
    client.execute(lapse, &[]).await.unwrap();
    let (again, new, _) = take(&client, 1).await.remove(0);
    assert_eq!(again, id);
    let refused = client.execute(DONE, &[&id, &old]).await.unwrap_err();
    let refused = refused.as_db_error().unwrap();
    assert!(refused.message().contains("has lapsed") && refused.hint().unwrap().contains("roll back"), "{refused}");
    // Renewed by its owner it holds.
    let renewed: i64 = client.query_one("select postroom.inbox_renew('billing', 'worker')", &[]).await.unwrap().get(0);
    assert_eq!(renewed, 1);
    assert_ne!(old, new);
    for _ in 0..9 {
        client.execute(lapse, &[]).await.unwrap();
        take(&client, 1).await;
    }
    client.execute(lapse, &[]).await.unwrap();
    let next = take(&client, 1).await;
    assert_eq!(next.first().map(|(_, _, what)| what.as_str()), Some("a2"), "its key goes on");
    let cause: String =
        client.query_one("select cause from postroom.dead_consume where message_id = $1", &[&id]).await.unwrap().get(0);
    assert_eq!(cause, "poison");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failure_is_tried_again_and_dead_after_its_attempts() {
    let (database, broker) = (postgres().await, broker());
    let client = database.connect().await;
    publish(&broker, vec![told("a", "a1"), told("a", "a2")]).await;
    let running = keeping(&database, &broker);
    while broker.unsettled("q") > 0 {
        tokio::task::yield_now().await;
    }
    running.stop().await;
    let fail =
        "select postroom.inbox_fail('billing', $1, $2, 'no funds', retry_after => interval '0', attempts_max => 3)";
    let mut dead = Vec::new();
    for _ in 0..3 {
        let (id, claim, what) = take(&client, 10).await.remove(0);
        assert_eq!(what, "a1", "a2 waits behind it");
        dead.push(client.query_one(fail, &[&id, &claim]).await.unwrap().get::<_, bool>(0));
    }
    assert_eq!(dead, [false, false, true]);
    assert_eq!(take(&client, 10).await[0].2, "a2");
    let row =
        client.query_one("select attempts, cause, history->1->>'error' from postroom.dead_consume", &[]).await.unwrap();
    assert_eq!((row.get::<_, i32>(0), row.get::<_, &str>(1), row.get::<_, &str>(2)), (3, "exhausted", "no funds"));
}

#[tokio::test]
async fn a_key_whose_messages_are_all_behind_one_another_is_let_go() {
    let database = postgres().await;
    let client = database.connect().await;
    // As it is left when a message was set aside for its version and let go before any take saw it.
    let rows = "insert into postroom.inbox_messages (consumer, message_id, state, ordering_key, topic, type, payload, content_type)
                select 'billing', gen_random_uuid(), state, 'k', 'orders', 'told', convert_to(n::text, 'UTF8'), 'text/plain'
                  from unnest(array['behind', 'new', 'behind']) with ordinality r (state, n)";
    client.execute(rows, &[]).await.unwrap();
    let mut taken = Vec::new();
    for _ in 0..3 {
        let (id, claim, what) = take(&client, 10).await.remove(0);
        client.execute(DONE, &[&id, &claim]).await.unwrap();
        taken.push(what);
    }
    assert_eq!(taken, ["1", "2", "3"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_workers_take_everything_once_and_in_order() {
    const KEYS: usize = 20;
    let (database, broker) = (postgres().await, broker());
    let client = database.connect().await;
    let messages: Vec<_> = (0..1000).map(|n| told(&format!("k{}", n % KEYS), &n.to_string())).collect();
    publish(&broker, messages).await;
    // Taken while they arrive.
    let running = keeping(&database, &broker);
    let workers: Vec<_> = (0..8)
        .map(|worker| {
            let database = database.clone();
            tokio::spawn(async move {
                let mut client = database.connect().await;
                let (mut n, mut idle) = (0, 0);
                while idle < 50 {
                    let taken = take(&client, 5).await;
                    if taken.is_empty() {
                        idle += 1;
                        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
                    }
                    for (id, claim, what) in taken {
                        idle = 0;
                        n += 1;
                        let tx = client.transaction().await.unwrap();
                        tx.execute(crate::setup::EFFECT, &[&id.to_string()]).await.unwrap();
                        let key = format!("k{}", what.parse::<usize>().unwrap() % KEYS);
                        tx.execute("insert into done (key, what) values ($1, $2)", &[&key, &what]).await.unwrap();
                        tx.execute(DONE, &[&id, &claim]).await.unwrap();
                        // Some are rolled back, and tried again when their claim lapses.
                        if n % 50 == worker {
                            tx.rollback().await.unwrap();
                            let give_up = "update postroom.inbox_messages set due_at = '-infinity' where message_id = $1 and claim = $2";
                            client.execute(give_up, &[&id, &claim]).await.unwrap();
                        } else {
                            tx.commit().await.unwrap();
                        }
                    }
                }
            })
        })
        .collect();
    for worker in workers {
        worker.await.unwrap();
    }
    running.stop().await;
    until(&client, "select count(*) = 1000 from effects").await;
    assert_once(&client).await;
    for key in 0..KEYS {
        let done: Vec<usize> =
            done(&client, &format!("k{key}")).await.iter().map(|what| what.parse().unwrap()).collect();
        assert!(done.is_sorted(), "{done:?}");
    }
}

#[tokio::test]
async fn admission_and_versions_are_one_call_in_the_callers_transaction() {
    let database = postgres().await;
    let client = database.connect().await;
    let id = Uuid::from(MessageId::new());
    let admit = "select postroom.inbox_admit('billing', $1)";
    let mut said = Vec::new();
    for _ in 0..2 {
        said.push(client.query_one(admit, &[&id]).await.unwrap().get::<_, bool>(0));
    }
    assert_eq!(said, [true, false]);
    let more = [id, MessageId::new().into(), MessageId::new().into()];
    let new = client.query("select postroom.inbox_admit_many('billing', $1)", &[&more.as_slice()]).await.unwrap();
    assert_eq!(new.len(), 2);
    let newer = "select postroom.inbox_newer('billing', 'order', 'o-1', $1::bigint)";
    let mut said = Vec::new();
    for version in [2i64, 1, 2, 3] {
        said.push(client.query_one(newer, &[&version]).await.unwrap().get::<_, bool>(0));
    }
    assert_eq!(said, [true, false, false, true]);
    client.batch_execute("create table order_view (id text primary key, state text, version bigint)").await.unwrap();
    let upsert = postroom::NewerUpsert::new("public.order_view", &["id"], &["state"], "version").postgres();
    let mut changed = Vec::new();
    for (state, version) in [("paid", 2i64), ("placed", 1), ("paid", 2), ("shipped", 3)] {
        changed.push(client.execute(&upsert, &[&"o-1", &state, &version]).await.unwrap());
    }
    assert_eq!(changed, [1, 0, 0, 1]);
}

#[tokio::test]
async fn the_inbox_is_pruned_by_age_in_steps_and_never_below_the_horizon() {
    let database = postgres().await;
    let client = database.connect().await;
    let fill = "insert into postroom.inbox (consumer, message_id, processed_at)
                select 'billing', gen_random_uuid(), clock_timestamp() - n * interval '1 hour' from generate_series(1, 1000) n";
    client.execute(fill, &[]).await.unwrap();
    let prune = "select postroom.inbox_prune($1::text::interval, 100)";
    let refused = client.query_one(prune, &[&"13 days"]).await.unwrap_err();
    assert!(refused.as_db_error().unwrap().message().contains("redelivery horizon"), "{refused}");
    let mut pruned = Vec::new();
    loop {
        let step: i64 = client.query_one(prune, &[&"14 days"]).await.unwrap().get(0);
        pruned.push(step);
        if step < 100 {
            break;
        }
    }
    let left: i64 = client.query_one("select count(*) from postroom.inbox", &[]).await.unwrap().get(0);
    assert_eq!((pruned.iter().sum::<i64>() + left, left), (1000, 335), "{pruned:?}");
}

/// What waits was written while the clock was an hour ahead.
const NOTED_AHEAD: &str = "update postroom.inbox_messages set due_at = due_at + interval '1 hour', waits_since = waits_since + interval '1 hour'";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_and_retries_do_not_wait_for_a_clock_that_went_back() {
    let (database, broker) = (postgres().await, broker());
    let client = database.connect().await;
    publish(&broker, vec![told("a", "a1"), told("b", "b1")]).await;
    let running = keeping(&database, &broker);
    until(&client, "select count(*) = 2 from postroom.inbox_messages").await;
    running.stop().await;
    let taken = take(&client, 10).await;
    assert_eq!(taken.len(), 2);
    let fail = "select postroom.inbox_fail('billing', $1, $2, 'no', retry_after => '10 milliseconds')";
    client.query(fail, &[&taken[0].0, &taken[0].1]).await.unwrap();
    // As it looks when the clock has gone back: what was noted with the clock of before lies in the future.
    client.batch_execute("update postroom.inbox_clocks set at = at + interval '1 hour'").await.unwrap();
    client.batch_execute(NOTED_AHEAD).await.unwrap();
    // The first take sees the clock, and brings what is due by then.
    until(&client, "select exists (select from postroom.inbox_take('billing', 10))").await;
    let waits = "select extract(epoch from max(due_at) - clock_timestamp())::float8 from postroom.inbox_messages";
    let waits: f64 = client.query_one(waits, &[]).await.unwrap().get(0);
    assert!(waits < 60.0, "the other claim ends after its own lease, in {waits} s");
}

/// It went forth and back between two takes, and what came meanwhile waited behind another message of its key.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_waits_for_a_clock_that_no_take_saw_ahead() {
    let (database, broker) = (postgres().await, broker());
    let client = database.connect().await;
    publish(&broker, vec![told("a", "a1"), told("a", "a2"), told("b", "b1")]).await;
    let running = keeping(&database, &broker);
    until(&client, "select count(*) = 3 from postroom.inbox_messages").await;
    running.stop().await;
    let first = take(&client, 10).await;
    assert_eq!(first.len(), 2, "the first of each key");
    let fail = "select postroom.inbox_fail('billing', $1, $2, 'no', retry_after => '10 milliseconds')";
    for taken in &first {
        client.query(fail, &[&taken.0, &taken.1]).await.unwrap();
    }
    client.batch_execute(NOTED_AHEAD).await.unwrap();
    // Within the time that passes between two looks.
    until(&client, "select count(*) = 2 from postroom.inbox_take('billing', 10)").await;
    client.batch_execute("update postroom.inbox_messages set state = 'done' where state = 'claimed'").await.unwrap();
    until(&client, "select count(*) = 1 from postroom.inbox_take('billing', 10)").await;
}
