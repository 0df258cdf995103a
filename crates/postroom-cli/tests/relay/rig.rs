//! Writers with a ledger, the relay as a process, a consumer with an inbox, and the history they leave.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use postroom::{Consumer, Message, MessageId};
use postroom_brokers::rabbitmq::{Binding, RabbitmqSubscription, RabbitmqSubscriptionOptions};
use postroom_consumer::{Handle, HandlerError, Handlers, Incoming, ReceiveCounters, Receiver};
use postroom_postgres::{Connector, Postgres, PostgresSession, migrate};
use postroom_testkit::chance::Chance;
use postroom_testkit::judge::{Committed, History, judge};
use postroom_testkit::postgres::Database;
use postroom_testkit::rabbitmq::{AuditQueue, QueueKind};
use postroom_testkit::surroundings;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_postgres::{Client, Transaction};

pub const KEYS: u64 = 500;
/// Nothing here takes as long as this unless it is stuck.
const STUCK: Duration = Duration::from_secs(240);

/// One message: takes the key's row lock and number, notes them, enqueues.
const WRITE: &str = "with k as (update numbers set n = n + 1 where key = $1 returning n),
                          l as (insert into ledger select $2, $1, n from k)
                     select postroom.enqueue('orders', 'order.placed', int8send(n), key => $1, id => $2,
                                             routing_key => 'orders.placed') from k";

pub struct Rig {
    pub database: Database,
    pub rabbitmq: String,
    pub exchange: String,
    pub audit: AuditQueue,
    pub dir: PathBuf,
    pub in_flight_max: usize,
    /// More lines of the route's configuration, and of its sink's.
    pub route: String,
    pub sink: String,
}

impl Rig {
    pub async fn new(database: Database, rabbitmq: String) -> Self {
        migrate(&Connector::new(database.url()).unwrap(), 16).await.unwrap();
        let client = database.connect().await;
        client
            .batch_execute(&format!(
                "create table numbers (key text primary key, n bigint not null default 0);
                 insert into numbers (key) select 'key-' || n from generate_series(0, {KEYS} - 1) n;
                 create table ledger (id uuid primary key, key text, n bigint);
                 create table effects (id uuid primary key, times int not null);"
            ))
            .await
            .unwrap();
        let exchange = format!("e-{}", surroundings::unique());
        let audit = AuditQueue::bound(&rabbitmq, &exchange, "orders.#").await;
        Self {
            database,
            rabbitmq,
            exchange,
            audit,
            dir: surroundings::scratch("relay"),
            in_flight_max: 1000,
            route: String::new(),
            sink: String::new(),
        }
    }

    /// On the servers of the test run.
    pub async fn shared() -> Self {
        Self::new(Database::create().await, surroundings::rabbitmq_url()).await
    }

    /// Starts the relay as a process.
    pub fn relay(&self) -> RelayProcess {
        self.relay_over("relay", self.database.url(), &self.rabbitmq, &[])
    }

    /// Starts a relay that reaches its servers by these URLs, with more variables in its environment.
    pub fn relay_over(&self, name: &str, store: &str, broker: &str, variables: &[(&str, String)]) -> RelayProcess {
        self.relay_of(&surroundings::postroom_binary(), name, store, broker, variables)
    }

    /// The same, of another build of the program.
    pub fn relay_of(
        &self,
        program: &Path,
        name: &str,
        store: &str,
        broker: &str,
        variables: &[(&str, String)],
    ) -> RelayProcess {
        let text = format!(
            "[store]\nurl = {store:?}\n[relay]\nin_flight_max = {}\nlease = \"1s\"\npoll_idle = \"50ms\"\n\
             [[routes]]\nname = \"orders\"\n{}[routes.sink]\nkind = \"rabbitmq\"\nurl = {broker:?}\nexchange = {:?}\n{}",
            self.in_flight_max, self.route, self.exchange, self.sink
        );
        self.relay_with(program, name, &text, variables)
    }

    /// The same with a configuration of the caller's own.
    pub fn relay_with(
        &self,
        program: &Path,
        name: &str,
        configuration: &str,
        variables: &[(&str, String)],
    ) -> RelayProcess {
        // A file for each: one that was just started may still be reading its own.
        let config = self.dir.join(format!("{name}-{}.toml", surroundings::unique()));
        std::fs::write(&config, configuration).unwrap();
        let log = std::fs::File::options().create(true).append(true).open(self.dir.join("relay.log")).unwrap();
        let mut command = Command::new(program);
        surroundings::without_tests(&mut command);
        let child = command
            .args(["run", "--json", "--config"])
            .arg(&config)
            .envs(variables.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .unwrap();
        RelayProcess(child)
    }

    /// Eight writers that commit `messages` messages in all; a tenth of their transactions roll back.
    pub fn write(&self, messages: usize, seed: u64) -> (Arc<AtomicUsize>, Vec<JoinHandle<()>>) {
        println!("seed {seed}");
        let committed = Arc::new(AtomicUsize::new(0));
        let writers = (0..8)
            .map(|writer| {
                let (url, committed) = (self.database.url().to_owned(), committed.clone());
                tokio::spawn(async move {
                    let mut chance = Chance::new(seed * 100 + writer);
                    while committed.load(Ordering::Relaxed) < messages {
                        // A database that is restarted under a writer costs it its transaction, as it would an application.
                        let client = connect_patiently(&url).await;
                        let _ = write_until(&client, &mut chance, &committed, messages).await;
                    }
                })
            })
            .collect();
        (committed, writers)
    }

    /// Commits a few messages now.
    pub async fn write_some(&self, messages: usize) {
        let client = self.database.connect().await;
        let committed = AtomicUsize::new(0);
        write_until(&client, &mut Chance::new(messages as u64), &committed, messages).await.unwrap();
    }

    /// A consumer with an inbox on a queue of its own, which counts effects in its own transaction.
    pub async fn consume(&self) -> ConsumerTask {
        self.consume_with(Handlers::new().on_decoded("order.placed", |message| Ok(message.clone()), CountsEffects))
            .await
    }

    /// The same with handlers of the caller's own.
    pub async fn consume_with(&self, handlers: Handlers<Postgres>) -> ConsumerTask {
        let queue = format!("effects-{}", self.exchange);
        let options = RabbitmqSubscriptionOptions {
            url: self.rabbitmq.clone(),
            queue: queue.clone(),
            bind: vec![Binding::new(&self.exchange, "orders.#")],
            prefetch: 500,
            unsettled_bytes_max: 64 << 20,
        };
        let (subscription, consumer) =
            (Arc::new(RabbitmqSubscription::new(options).unwrap()), Consumer::new("effects").unwrap());
        let connector = Connector::new(self.database.url()).unwrap();
        let open = move || PostgresSession::new(connector.clone());
        let receiver = Receiver::new(subscription, consumer, handlers, open).unwrap();
        // Declared before anything is published, so that it misses nothing.
        AuditQueue::named(&self.rabbitmq, &self.exchange, "orders.#", &queue, QueueKind::Classic).await;
        let (stop, mut stopped) = watch::channel(false);
        let task = tokio::spawn(async move {
            receiver
                .run(async move {
                    let _ = stopped.wait_for(|stopped| *stopped).await;
                })
                .await
                .unwrap()
        });
        ConsumerTask { stop, task }
    }

    /// Waits until the relay has nothing left, by the store's own word.
    pub async fn drained(&self) {
        self.until("the backlog is empty", async || {
            let store = postroom_postgres::Database::new(self.database.url()).unwrap();
            let Ok(status) = postroom::Operator::status(&store).await else { return false };
            status.routes.iter().all(|route| route.backlog == 0 && route.parked == 0) && !status.routes.is_empty()
        })
        .await;
    }

    /// Waits until every committed message had its effect.
    pub async fn effective(&self) {
        self.until("every message had its effect", async || {
            let sql = "select (select count(*) from ledger) = (select count(*) from effects)";
            // A server that came back from a full disk may restart once more.
            let Ok((client, connection)) = tokio_postgres::connect(self.database.url(), tokio_postgres::NoTls).await
            else {
                return false;
            };
            tokio::spawn(connection);
            client.query_one(sql, &[]).await.is_ok_and(|row| row.get(0))
        })
        .await;
    }

    /// Waits for a signal, and fails with the relay's log when it never comes.
    pub async fn until(&self, what: &str, holds: impl AsyncFn() -> bool) {
        let began = Instant::now();
        while !holds().await {
            if began.elapsed() > STUCK {
                let log = std::fs::read_to_string(self.dir.join("relay.log")).unwrap_or_default();
                let tail: Vec<&str> = log.lines().rev().take(20).collect();
                let state = self.state().await;
                panic!("waited in vain until {what}; {state}\nthe relay's last words:\n{}", tail.join("\n"));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// What the store says of itself, for whoever has to find out why something is stuck.
    async fn state(&self) -> String {
        let store = postroom_postgres::Database::new(self.database.url()).unwrap();
        let status = postroom::Operator::status(&store).await;
        let Ok((client, connection)) = tokio_postgres::connect(self.database.url(), tokio_postgres::NoTls).await else {
            return format!("{status:?}; the database cannot be reached");
        };
        tokio::spawn(connection);
        let mut state = format!("{status:?}");
        for (what, sql) in [
            (
                "lanes",
                "select json_agg(l)::text from (select route, lane, owner, epoch, expires_at - clock_timestamp() as left, position_seq from postroom.lanes) l",
            ),
            (
                "parked",
                "select json_agg(p)::text from (select route, seq, lane, ordering_key, state, attempts, due_at - clock_timestamp() as due_in, last_error from postroom.parked limit 20) p",
            ),
            ("blocked", "select json_agg(b)::text from (select * from postroom.blocked_keys limit 20) b"),
            ("relays", "select json_agg(r)::text from postroom.relays r"),
            (
                "sessions",
                "select json_agg(a)::text from (select pid, application_name, state, wait_event, clock_timestamp() - xact_start as age, left(query, 80) as query from pg_stat_activity where datname = current_database()) a",
            ),
            ("prepared", "select json_agg(x)::text from pg_prepared_xacts x"),
            (
                "numbers of committed messages, of effects, of what only the one or the other has",
                "select json_build_array((select count(*) from ledger), (select count(*) from effects),
                        (select json_agg(x) from (select l.*, i.*, o.seq from ledger l
                            left join postroom.inbox i on i.message_id = l.id and i.consumer = 'effects'
                            left join postroom.outbox o on o.id = l.id
                            where not exists (select from effects e where e.id = l.id) limit 10) x),
                        (select json_agg(x) from (select e.* from effects e
                            where not exists (select from ledger l where e.id = l.id) limit 10) x))::text",
            ),
        ] {
            let told = client.query_one(sql, &[]).await.map(|row| row.get::<_, Option<String>>(0));
            state.push_str(&format!("\n{what}: {told:?}"));
        }
        state
    }

    /// What writers, broker and consumer say now.
    pub async fn history(&self, duplicates_max: usize, with_effects: bool) -> History {
        let client = self.database.connect().await;
        let text = |sql: &'static str| {
            let client = &client;
            async move {
                let rows = client.query(sql, &[]).await.unwrap();
                rows.iter().map(|row| row.get::<_, uuid::Uuid>(0).to_string()).collect::<Vec<_>>()
            }
        };
        let rows = client.query("select id, key, n from ledger", &[]).await.unwrap();
        let committed = rows
            .iter()
            .map(|row| Committed { id: row.get::<_, uuid::Uuid>(0).to_string(), key: row.get(1), number: row.get(2) })
            .collect();
        let effects = if with_effects {
            let rows = client.query("select id, times from effects", &[]).await.unwrap();
            Some(
                rows.iter()
                    .map(|row| (row.get::<_, uuid::Uuid>(0).to_string(), i64::from(row.get::<_, i32>(1))))
                    .collect::<HashMap<_, _>>(),
            )
        } else {
            None
        };
        History {
            committed,
            stored: self.audit.drain().await.into_iter().map(|stored| stored.id).collect(),
            pending: text("select id from postroom.parked").await,
            dead: text("select id from postroom.dead_letters").await,
            effects,
            duplicates_max,
            ..History::default()
        }
    }
}

/// Asserts that the judge finds nothing.
pub fn assert_clean(history: &History) {
    let violations = judge(history);
    assert!(violations.is_empty(), "{}", violations.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "));
}

async fn connect_patiently(url: &str) -> Client {
    let began = Instant::now();
    loop {
        match tokio_postgres::connect(url, tokio_postgres::NoTls).await {
            Ok((client, connection)) => {
                tokio::spawn(connection);
                return client;
            }
            Err(error) if began.elapsed() > STUCK => panic!("the database does not come back: {error}"),
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

async fn write_until(
    client: &Client,
    chance: &mut Chance,
    committed: &AtomicUsize,
    messages: usize,
) -> Result<(), tokio_postgres::Error> {
    let write = client.prepare(WRITE).await?;
    while committed.load(Ordering::Relaxed) < messages {
        client.batch_execute("begin").await?;
        let mut keys: Vec<u64> = (0..1 + chance.below(9)).map(|_| chance.below(KEYS)).collect();
        keys.sort_unstable();
        for key in &keys {
            client.query(&write, &[&format!("key-{key}"), MessageId::new().as_uuid()]).await?;
        }
        if chance.percent(10) {
            client.batch_execute("rollback").await?;
        } else {
            client.batch_execute("commit").await?;
            committed.fetch_add(keys.len(), Ordering::Relaxed);
        }
    }
    Ok(())
}

pub struct CountsEffects;

#[async_trait]
impl Handle<Postgres, Message> for CountsEffects {
    async fn handle(&self, tx: &mut Transaction<'_>, incoming: &Incoming<Message>) -> Result<(), HandlerError> {
        let sql = "insert into effects values ($1, 1) on conflict (id) do update set times = effects.times + 1";
        tx.execute(sql, &[incoming.message.id.as_uuid()]).await?;
        Ok(())
    }
}

pub struct ConsumerTask {
    stop: watch::Sender<bool>,
    task: JoinHandle<ReceiveCounters>,
}

impl ConsumerTask {
    pub async fn stop(self) -> ReceiveCounters {
        self.stop.send(true).unwrap();
        self.task.await.unwrap()
    }
}

/// The relay as a process; killed when dropped.
pub struct RelayProcess(Child);

impl RelayProcess {
    pub fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    /// Whether it still runs.
    pub fn lives(&mut self) -> bool {
        !self.dies_within(Duration::ZERO)
    }

    /// Waits until it is dead by itself, at most so long.
    pub fn dies_within(&mut self, limit: Duration) -> bool {
        let began = Instant::now();
        loop {
            if self.0.try_wait().unwrap().is_some() {
                return true;
            }
            if began.elapsed() >= limit {
                return false;
            }
            #[expect(
                clippy::disallowed_methods,
                reason = "nothing signals the end of a child without blocking for it"
            )]
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Its exit code, once it has ended.
    pub fn code(&mut self) -> Option<i32> {
        self.0.try_wait().unwrap().and_then(|status| status.code())
    }

    pub fn signal(&self, name: &str) {
        let pid = self.0.id().to_string();
        assert!(Command::new("kill").args([&format!("-{name}"), &pid]).status().unwrap().success());
    }

    /// SIGTERM, unless it has ended by itself; returns the exit code and what it printed.
    pub fn terminate(mut self) -> (Option<i32>, String) {
        if self.lives() {
            self.signal("TERM");
        }
        let mut printed = String::new();
        std::io::Read::read_to_string(self.0.stdout.as_mut().unwrap(), &mut printed).unwrap();
        (self.0.wait().unwrap().code(), printed)
    }
}

impl Drop for RelayProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
