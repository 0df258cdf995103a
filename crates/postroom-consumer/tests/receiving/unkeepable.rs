//! What cannot be kept among the messages that wait is kept as dead, whoever receives it, and never vanishes at the broker.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use postroom::{
    Answer, Arrival, Bound, Cause, Consumer, DeadDeed, DeadFilter, Deed, Message, Operator, Receipt, SessionKeeper,
    Side, Subscription, UNREADABLE_HEADER, Unavailable,
};
use postroom_brokers::in_process::{InProcessBroker, InProcessSubscription};
use postroom_consumer::{FillCounters, Filler};
use postroom_postgres::{Connector, PostgresSession};
use postroom_sqlite::SqliteSession;
use postroom_testkit::postgres::Database;
use postroom_testkit::surroundings;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::setup::{Running, as_told, assert_once, broker, postgres, publish, receiver, told, until};

/// Messages of the topic `foreign` carry no id of ours.
struct Foreign(InProcessSubscription);

#[async_trait]
impl Subscription for Foreign {
    fn origin(&self) -> String {
        self.0.origin()
    }

    async fn receive(&self, max: Bound) -> Result<Arrival, Unavailable> {
        let mut arrival = self.0.receive(max).await?;
        if let Arrival::Messages(received) = &mut arrival {
            for received in received.iter_mut().filter(|received| received.message.topic == "foreign") {
                received.id = None;
            }
        }
        Ok(arrival)
    }

    async fn settle(&self, answers: &[(Receipt, Answer)]) -> Result<(), Unavailable> {
        assert!(answers.iter().all(|(_, answer)| *answer != Answer::Reject), "the broker would drop it");
        self.0.settle(answers).await
    }

    async fn close(&self) {
        self.0.close().await;
    }
}

/// Five that cannot be kept, among others of their keys.
fn hostile() -> Vec<Message> {
    let foreign = Message::new("foreign", "told", vec![0, 0xff, 0xfe]).key("a");
    let long = "k".repeat(3000);
    let mut wide = Message::new("orders", "told", "wide").aggregate("t".repeat(3000), "o", 7);
    wide.occurred_at = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(9_300_000_000_000));
    let marked = Message::new("orders", "told", "marked").key("a").header(UNREADABLE_HEADER, "tables nested too deep");
    let nul = Message::new("or\0ders", "told", "n\0ul").key("b\0").tenant("t".repeat(600)).header("h", "v\0");
    let keyed = Message::new("orders", "told", "long").key(long);
    vec![told("a", "1"), foreign, told("a", "2"), wide, marked, nul, keyed, told("a", "3")]
}

fn filter(error: &str) -> DeadFilter {
    DeadFilter { error: Some(error.to_owned()), ..DeadFilter::default() }
}

fn deed() -> Deed {
    Deed { actor: "a person".to_owned(), reason: "now it can be handled".to_owned() }
}

struct Filling {
    stop: oneshot::Sender<()>,
    task: JoinHandle<FillCounters>,
}

impl Filling {
    async fn stop(self) -> FillCounters {
        self.stop.send(()).unwrap();
        self.task.await.unwrap()
    }
}

macro_rules! filling {
    ($broker:expr, $store:ty, $open:expr) => {{
        let (stop, stopped) = oneshot::channel::<()>();
        let broker: InProcessBroker = $broker.clone();
        let subscribe = move || Ok(Arc::new(Foreign(broker.subscribe("q", 100))) as Arc<dyn Subscription>);
        let filler =
            Filler::new(subscribe, SessionKeeper::<$store>::new(Consumer::new("totals").unwrap(), $open), "one");
        let task = tokio::spawn(async move {
            let stopped = async move {
                let _ = stopped.await;
            };
            filler.run(stopped).await.unwrap()
        });
        Filling { stop, task }
    }};
}

fn filling(database: &Database, broker: &InProcessBroker) -> Filling {
    let connector = Connector::new(database.url()).unwrap();
    filling!(broker, postroom_postgres::Postgres, move || PostgresSession::new(connector.clone()))
}

async fn settled(broker: &InProcessBroker) {
    while broker.unsettled("q") > 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_filler_keeps_as_dead_what_it_cannot_keep_and_the_others_are_kept_in_order() {
    let (database, broker) = (postgres().await, broker());
    let client = database.connect().await;
    publish(&broker, hostile()).await;
    let running = filling(&database, &broker);
    settled(&broker).await;
    let counters = running.stop().await;
    assert_eq!((counters.kept, counters.dead, counters.requeued), (3, 5, 0), "{counters:?}");
    let sql = "select string_agg(convert_from(payload, 'UTF8'), ' ' order by seq) from postroom.inbox_messages";
    assert_eq!(client.query_one(sql, &[]).await.unwrap().get::<_, String>(0), "1 2 3");

    let store = postroom_postgres::Database::new(database.url()).unwrap();
    let dead = store.dead_letters(Side::In, &filter("queue \"q\": its "), 100).await.unwrap();
    assert_eq!(dead.len(), 4);
    let of = async |error: &str| {
        let found = store.dead_letters(Side::In, &filter(error), 9).await.unwrap();
        assert_eq!(found.len(), 1, "{error}: {found:?}");
        let payload = store.dead_payload(Side::In, "totals", found[0].seq).await.unwrap();
        (found.into_iter().next().unwrap(), payload.unwrap())
    };
    let (foreign, payload) = of("no message id").await;
    assert_eq!((foreign.cause, payload), (Cause::Permanent, vec![0, 0xff, 0xfe]));
    assert!(foreign.error.contains(&foreign.id));
    let (marked, _) = of("tables nested too deep").await;
    assert_eq!(marked.headers[UNREADABLE_HEADER], "tables nested too deep");
    let (nul, payload) = of("tenant id has more than").await;
    assert_eq!((nul.topic.as_str(), payload), ("or\u{fffd}ders", b"n\0ul".to_vec()));
    assert_eq!((nul.key.as_deref(), nul.headers["h"].as_str()), (Some("b\u{fffd}"), "v\0"));
    let (keyed, _) = of("key has more than").await;
    assert_eq!(keyed.key.map(|key| key.len()), Some(3000), "all of it");

    // The same deliveries again: those with an id are known; the one without gets another id, and is not taken for the first.
    let running = filling(&database, &broker);
    publish(&broker, hostile()[1..2].to_vec()).await;
    settled(&broker).await;
    assert_eq!(running.stop().await.dead, 1);

    // They can be retried: an application takes them from the store.
    let all = DeadFilter::default();
    let retried = store.act_on_dead(DeadDeed::Retry, Side::In, &all, 100, &deed(), &mut |_| ()).await.unwrap();
    assert_eq!(retried.len(), 6);
    let taken = "select count(*) from postroom.inbox_take('totals', 100)";
    let taken: i64 = client.query_one(taken, &[]).await.unwrap().get(0);
    assert_eq!(taken, 4, "of each key the first");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_receiver_with_handlers_keeps_them_as_dead_too_and_a_retry_has_the_effect() {
    let (database, broker) = (postgres().await, broker());
    let client = database.connect().await;
    publish(&broker, hostile()).await;
    let running = Running::start(receiver(&database, Foreign(broker.subscribe("q", 100)), as_told()));
    settled(&broker).await;
    until(&client, "select count(*) = 3 from done").await;
    until(&client, "select count(*) = 5 from postroom.dead_consume where cause = 'permanent'").await;
    let store = postroom_postgres::Database::new(database.url()).unwrap();
    for error in ["key has more than", "tables nested"] {
        let retried =
            store.act_on_dead(DeadDeed::Retry, Side::In, &filter(error), 9, &deed(), &mut |_| ()).await.unwrap();
        assert_eq!(retried.len(), 1);
    }
    until(&client, "select count(*) = 1 from done where what = 'long'").await;
    until(&client, "select count(*) = 1 from done where what = 'marked'").await;
    let counters = running.stop().await;
    assert_eq!((counters.dead, counters.applied), (5, 5), "{counters:?}");
    assert_once(&client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_keeps_them_as_dead_too() {
    let path = surroundings::scratch("unkeepable").join("inbox.db");
    let mut file = postroom_sqlite::connect(&path).unwrap();
    postroom_sqlite::migrate(&mut file).unwrap();
    let broker = broker();
    publish(&broker, hostile()).await;
    let open = {
        let path = path.clone();
        move || SqliteSession::new(&path)
    };
    let running = filling!(broker, postroom_sqlite::Sqlite, open);
    settled(&broker).await;
    let counters = running.stop().await;
    assert_eq!((counters.kept, counters.dead), (3, 5), "{counters:?}");
    let store = postroom_sqlite::Database::new(&path);
    let dead = store.dead_letters(Side::In, &filter("queue \"q\""), 100).await.unwrap();
    assert_eq!(dead.len(), 5);
    let foreign = dead.iter().find(|letter| letter.topic == "foreign").unwrap();
    let payload = store.dead_payload(Side::In, "totals", foreign.seq).await.unwrap().unwrap();
    assert_eq!(payload, [0, 0xff, 0xfe]);
    let all = DeadFilter::default();
    let retried = store.act_on_dead(DeadDeed::Retry, Side::In, &all, 100, &deed(), &mut |_| ()).await.unwrap();
    assert_eq!(retried.len(), 5);
    let rows: i64 = file.query_row("select count(*) from postroom_inbox_messages", [], |row| row.get(0)).unwrap();
    assert_eq!(rows, 8);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_store_refuses_is_dead_and_what_it_refuses_even_so_goes_back_to_the_broker() {
    let (database, broker) = (postgres().await, broker());
    let client = database.connect().await;
    let refusals = "alter table postroom.inbox_messages add check (topic not like 'refused%');
                    alter table postroom.dead_consume add check (octet_length(topic) = char_length(topic));
                    alter table postroom.dead_consume add check (topic <> 'refused for ever')";
    client.batch_execute(refusals).await.unwrap();
    let refused = |topic: &str| Message::new(topic, "told", vec![0xff]).key("a");
    let messages = vec![told("a", "1"), refused("refused \u{6f22}"), refused("refused for ever"), told("a", "2")];
    publish(&broker, messages).await;
    let running = filling(&database, &broker);
    until(&client, "select count(*) = 2 from postroom.inbox_messages").await;
    let plain = "select count(*) = 1 from postroom.dead_consume where topic = 'refused ?' and payload = '\\xff'
                    and error like 'queue \"q\": keep received messages%' and error not like '%Failing row%'";
    until(&client, plain).await;
    let counters = running.stop().await;
    assert_eq!((counters.kept, counters.dead, counters.requeued), (2, 1, 1), "{counters:?}");
    assert_eq!(broker.unsettled("q"), 1, "nothing is dropped");
}
