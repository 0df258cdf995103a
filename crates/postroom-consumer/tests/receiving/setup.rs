//! A database, an in-process broker, and a receiver between them.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postroom::{Batch, Consumer, Message, RetryPolicy, Sink, Subscription, TopicFilter};
use postroom_brokers::in_process::InProcessBroker;
use postroom_consumer::{Handle, HandlerError, Handlers, Incoming, ReceiveCounters, Receiver};
use postroom_postgres::{Connector, Postgres, PostgresSession};
use postroom_testkit::postgres::Database;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_postgres::{Client, Transaction};

const EFFECTS: &str = "create table effects (id text primary key, times integer);
                           create table done (n bigint generated always as identity, key text, what text);
                       create table promises (n int unique deferrable initially deferred)";
pub const EFFECT: &str = "insert into effects values ($1, 1) on conflict (id) do update set times = effects.times + 1";

pub async fn postgres() -> Database {
    let database = Database::create().await;
    postroom_postgres::migrate(&Connector::new(database.url()).unwrap(), 4).await.unwrap();
    database.connect().await.batch_execute(EFFECTS).await.unwrap();
    database
}

pub fn broker() -> InProcessBroker {
    let broker = InProcessBroker::new();
    broker.declare_queue("q", TopicFilter::all());
    broker
}

pub async fn publish(broker: &InProcessBroker, messages: Vec<Message>) {
    broker.sink().publish(&Batch::new(messages)).await.unwrap();
}

/// A message of a key; what its handler does is its payload.
pub fn told(key: &str, what: &str) -> Message {
    Message::new("orders", "told", what.to_owned()).key(key)
}

/// Does what the payload says, and notes it in the order in which it was done.
pub struct DoesAsTold;

#[async_trait]
impl Handle<Postgres, String> for DoesAsTold {
    async fn handle(&self, tx: &mut Transaction<'_>, told: &Incoming<String>) -> Result<(), HandlerError> {
        let failed = |text: &str| Err(HandlerError::Again(text.to_owned().into()));
        match told.body.as_str() {
            "fail" => return failed("told to fail"),
            "fail twice" if told.attempts < 2 => return failed("told to fail twice"),
            "reject" => return Err(HandlerError::reject("told to reject")),
            "panic" => panic!("told to panic"),
            "abort" => std::process::abort(),
            "hang" => std::future::pending().await,
            "hang in the database" => {
                tx.execute("select pg_sleep(3600)", &[]).await?;
            }
            "swallow" => {
                let _ = tx.execute("select 1 / 0", &[]).await;
            }
            _ => {}
        }
        if told.body == "break a deferred promise" {
            tx.execute("insert into promises values (1), (1)", &[]).await?;
        }
        tx.execute(EFFECT, &[&told.message.id.to_string()]).await?;
        let key = told.message.ordering_key();
        tx.execute("insert into done (key, what) values ($1, $2)", &[&key, &told.body]).await?;
        if told.body == "swallow at the end" {
            let _ = tx.execute("select 1 / 0", &[]).await;
        }
        Ok(())
    }
}

pub fn text(message: &Message) -> Result<String, postroom::BoxError> {
    Ok(String::from_utf8(message.payload.to_vec())?)
}

pub fn as_told() -> Handlers<Postgres> {
    Handlers::new().on_decoded("told", text, DoesAsTold)
}

/// Waits that tests can wait for.
pub fn soon(attempts_max: u32) -> RetryPolicy {
    RetryPolicy {
        base: 1.0,
        cap: Duration::from_millis(100),
        jitter: Duration::ZERO,
        attempts_max,
        ..RetryPolicy::default()
    }
}

pub fn receiver(
    database: &Database,
    subscription: impl Subscription + 'static,
    handlers: Handlers<Postgres>,
) -> Receiver<Postgres> {
    receiver_on(database.url(), subscription, handlers)
}

pub fn receiver_on(
    url: &str,
    subscription: impl Subscription + 'static,
    handlers: Handlers<Postgres>,
) -> Receiver<Postgres> {
    let connector = Connector::new(url).unwrap();
    let open = move || PostgresSession::new(connector.clone());
    let consumer = Consumer::new("totals").unwrap();
    Receiver::new(Arc::new(subscription), consumer, handlers, open)
        .unwrap()
        .retry(soon(3))
        .poll(Duration::from_millis(20))
        .lease(Duration::from_secs(1))
}

pub struct Running {
    stop: watch::Sender<bool>,
    task: JoinHandle<ReceiveCounters>,
}

impl Running {
    pub fn start(receiver: Receiver<Postgres>) -> Self {
        let (stop, mut stopped) = watch::channel(false);
        let stopped = async move {
            let _ = stopped.wait_for(|stopped| *stopped).await;
        };
        let task = tokio::spawn(async move { receiver.run(stopped).await.unwrap() });
        Self { stop, task }
    }

    pub async fn stop(self) -> ReceiveCounters {
        self.stop.send(true).unwrap();
        self.task.await.unwrap()
    }

    /// As a crash does it: nothing more is acked or written.
    pub async fn crash(self) {
        self.task.abort();
        let _ = self.task.await;
    }
}

/// Waits until a query says true.
pub async fn until(client: &Client, sql: &str) {
    for _ in 0..18_000 {
        if client.query_one(sql, &[]).await.unwrap().get(0) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("waited in vain until {sql}");
}

/// What was done of a key, in its order.
pub async fn done(client: &Client, key: &str) -> Vec<String> {
    let rows = client.query("select what from done where key = $1 order by n", &[&key]).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

/// No message had its effect twice.
pub async fn assert_once(client: &Client) {
    let most: Option<i32> = client.query_one("select max(times) from effects", &[]).await.unwrap().get(0);
    assert!(most.is_none_or(|most| most == 1), "I5");
}
