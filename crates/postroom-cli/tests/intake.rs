//! Four processes take rows of tables that applications had before, relay them, and die all the time; the independent judge looks at what
//! the broker has, and every row says in the end that it was sent. About a tenth of what is published is refused for a while. On PostgreSQL, and on MariaDB, where the server dies too.

// The length of a pause is the fault itself; everything else waits for signals.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, TxOpts};
use postroom::{Deed, KeyDeed, MessageId, Operator, Side, WaitsFor};
use postroom_testkit::chance::Chance;
use postroom_testkit::judge::{Committed, History, judge};
use postroom_testkit::postgres::Database;
use postroom_testkit::rabbitmq::AuditQueue;
use postroom_testkit::services::MysqlServer;
use postroom_testkit::surroundings;

const KEYS: u64 = 200;
const MESSAGES: usize = 4000;
const IN_FLIGHT: usize = 300;
const FAULTS: usize = 10;
const STUCK: Duration = Duration::from_secs(240);

/// The two tables as the articles print them.
const TABLES: &str = "
    create table outbox_messages (id uuid primary key, aggregate_id uuid not null, aggregate_type text not null, aggregate_version bigint not null default 0,
        type text not null, payload jsonb not null, headers jsonb not null, tenant_id text, occurred_at timestamptz not null,
        visible_at timestamptz not null, attempts int not null default 0, status smallint not null default 0, last_error text,
        routing_key text, partition_key text);
    create index on outbox_messages (status, visible_at);
    create schema billing;
    create table billing.outbox_messages (id uuid primary key, type varchar(255) not null, content jsonb not null,
        occurred_on_utc timestamptz not null, processed_on_utc timestamptz null, error text null);
    create index on billing.outbox_messages (occurred_on_utc) where processed_on_utc is null;
    create table numbers (k text primary key, n bigint not null default 0);
    create table ledger (id uuid primary key, k text, n bigint)";

fn run(arguments: &[&str]) -> String {
    let output = surroundings::postroom().args(arguments).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{arguments:?}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

async fn until(what: &str, log: &Path, holds: impl AsyncFn() -> bool) {
    let began = Instant::now();
    while !holds().await {
        if began.elapsed() > STUCK {
            let log = std::fs::read_to_string(log).unwrap_or_default();
            let tail: Vec<&str> = log.lines().rev().take(20).collect();
            panic!("waited in vain until {what}; the processes' last words:\n{}", tail.join("\n"));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Each transaction takes numbers of some keys, notes them, and writes a row for each; a tenth are rolled back.
async fn write(url: String, seed: u64, committed: Arc<AtomicUsize>) {
    let (mut chance, mut client) = (Chance::new(seed), postroom_testkit::postgres::connect(&url).await);
    while committed.load(Ordering::Relaxed) < MESSAGES {
        let tx = client.transaction().await.unwrap();
        let mut keys: Vec<u64> = (0..1 + chance.below(6)).map(|_| chance.below(KEYS)).collect();
        keys.sort_unstable();
        for key in &keys {
            let (name, id) = (format!("key-{key}"), MessageId::new());
            let sql = "update numbers set n = n + 1 where k = $1 returning n";
            let n: i64 = tx.query_one(sql, &[&name]).await.unwrap().get(0);
            tx.execute("insert into ledger values ($1, $2, $3)", &[id.as_uuid(), &name, &n]).await.unwrap();
            let sql = if key % 2 == 0 {
                "insert into outbox_messages (id, aggregate_id, aggregate_type, aggregate_version, type, payload, headers, occurred_at, visible_at,
                                              routing_key, partition_key)
                 values ($1, gen_random_uuid(), 'orders', $3, 'order.placed', '{}', '{\"h\": \"v\"}', clock_timestamp(), clock_timestamp(),
                         'orders.placed', $2)"
            } else {
                "insert into billing.outbox_messages (id, type, content, occurred_on_utc)
                 values ($1, 'orders', jsonb_build_object('Key', $2::text, 'Number', $3::bigint), clock_timestamp())"
            };
            tx.execute(sql, &[id.as_uuid(), &name, &n]).await.unwrap();
        }
        if chance.percent(10) {
            tx.rollback().await.unwrap();
        } else {
            tx.commit().await.unwrap();
            committed.fetch_add(keys.len(), Ordering::Relaxed);
        }
    }
}

/// A tenth of the time no queue takes the messages, so that about as many of them fail and are tried again.
async fn refuse(audit: Arc<AuditQueue>, exchange: String, mut chance: Chance, over: Arc<AtomicBool>) {
    while !over.load(Ordering::Relaxed) {
        tokio::time::sleep(Duration::from_millis(180 + chance.below(180))).await;
        audit.is_bound(&exchange, "orders.#", false).await;
        tokio::time::sleep(Duration::from_millis(15 + chance.below(30))).await;
        audit.is_bound(&exchange, "orders.#", true).await;
    }
}

/// A short patience, so that the test is.
const RETRY: &str = "[routes.retry]\nbase = 1.0\ncap = \"1s\"\njitter = \"100ms\"\nattempts_max = 1000\n";

fn deed() -> Deed {
    Deed { actor: "intake".to_owned(), reason: "a test".to_owned() }
}

/// An operator who cannot make up his mind.
async fn operate(store: postroom_postgres::Database, mut chance: Chance) {
    loop {
        let keys: Vec<String> = (0..10).map(|_| format!("key-{}", chance.below(KEYS))).collect();
        for what in [KeyDeed::Park, KeyDeed::Unpark] {
            for key in &keys {
                let _ = store.act_on_key("orders", key, what, &deed()).await;
            }
            tokio::time::sleep(Duration::from_millis(20 + chance.below(150))).await;
        }
    }
}

/// A process of `postroom run`; killed when dropped.
struct Process(Child);

impl Process {
    fn start(config: &Path, log: &Path) -> Self {
        let log = std::fs::File::options().create(true).append(true).open(log).unwrap();
        let mut command = Command::new(surroundings::postroom_binary());
        surroundings::without_tests(&mut command);
        let command = command.args(["run", "--config"]).arg(config);
        Self(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap())
    }

    fn signal(&self, name: &str) {
        let pid = self.0.id().to_string();
        assert!(Command::new("kill").args([&format!("-{name}"), &pid]).status().unwrap().success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_of_tables_that_exist_are_sent_in_order_and_marked_whoever_dies() {
    let dir = surroundings::scratch("intake");
    let database = Database::create().await;
    let (url, rabbit) = (database.url().to_owned(), surroundings::rabbitmq_url());
    run(&["migrate", "--store", &url]);
    let client = database.connect().await;
    client.batch_execute(TABLES).await.unwrap();
    client
        .batch_execute(&format!("insert into numbers (k) select 'key-' || n from generate_series(0, {}) n", KEYS - 1))
        .await
        .unwrap();
    let exchange = format!("i-{}", surroundings::unique());
    let audit = Arc::new(AuditQueue::bound(&rabbit, &exchange, "orders.#").await);
    let config = dir.join("postroom.toml");
    let text = format!(
        "[store]\nurl = {url:?}\n\
         [relay]\nin_flight_max = {IN_FLIGHT}\nlease = \"1s\"\npoll_idle = \"50ms\"\n\
         [[routes]]\nname = \"orders\"\ntopics = [\"orders\"]\n\
         {RETRY}[routes.sink]\nkind = \"rabbitmq\"\nurl = {rabbit:?}\nexchange = {exchange:?}\n\
         [[intake]]\nname = \"shop\"\npreset = \"status-codes\"\nevery = \"50ms\"\n\
         [[intake]]\nname = \"billing\"\npreset = \"processed-on\"\ntable = \"billing.outbox_messages\"\nevery = \"50ms\"\n\
         [intake.message]\nkey = \"${{content:/Key}}\"\nrouting_key = \"orders.billed\"\n"
    );
    std::fs::write(&config, text).unwrap();
    let checked = run(&["check", "--config", config.to_str().unwrap()]);
    assert!(
        checked.contains("intake billing, table billing.outbox_messages: its columns, values and rights are there"),
        "{checked}"
    );
    let log = dir.join("run.log");
    let mut processes: Vec<Process> = (0..4).map(|_| Process::start(&config, &log)).collect();

    let seed = 20_261;
    let committed = Arc::new(AtomicUsize::new(0));
    let writers: Vec<_> =
        (0..6).map(|writer| tokio::spawn(write(url.clone(), seed + writer, committed.clone()))).collect();
    let over = Arc::new(AtomicBool::new(false));
    let refusing = tokio::spawn(refuse(audit.clone(), exchange.clone(), Chance::new(seed), over.clone()));
    let failed = AtomicUsize::new(0);
    let store = postroom_postgres::Database::new(&url).unwrap();
    let operator = tokio::spawn(operate(store.clone(), Chance::new(seed)));
    let mut chance = Chance::new(seed ^ 7);
    for fault in 0..FAULTS {
        let from = MESSAGES * fault / (FAULTS + 1);
        until("writers have written more", &log, async || committed.load(Ordering::Relaxed) > from).await;
        let waiting = "select count(*) from postroom.parked where attempts > 0";
        let waiting: i64 = client.query_one(waiting, &[]).await.unwrap().get(0);
        failed.fetch_max(waiting as usize, Ordering::Relaxed);
        let index = chance.below(processes.len() as u64) as usize;
        if fault == 3 {
            processes[index].signal("STOP");
            tokio::time::sleep(Duration::from_millis(2500)).await;
            processes[index].signal("CONT");
        } else {
            // The one before is killed.
            processes[index] = Process::start(&config, &log);
        }
    }
    for writer in writers {
        tokio::time::timeout(STUCK, writer).await.unwrap().unwrap();
    }
    operator.abort();
    over.store(true, Ordering::Relaxed);
    refusing.await.unwrap();
    assert!(failed.load(Ordering::Relaxed) > 0, "some were refused");
    for key in store.waiting_keys(Side::Out, None, 10_000).await.unwrap() {
        if key.waits_for == WaitsFor::Parked {
            store.act_on_key(&key.route, &key.key, KeyDeed::Unpark, &deed()).await.unwrap();
        }
    }
    let unsent = "select (select count(*) from outbox_messages where status <> 1)
                       + (select count(*) from billing.outbox_messages where processed_on_utc is null)
                       + (select count(*) from postroom.intake_rows)";
    until("every row says that it was sent", &log, async || {
        client.query_one(unsent, &[]).await.unwrap().get::<_, i64>(0) == 0
    })
    .await;
    let rows = client.query("select id::text, k, n from ledger", &[]).await.unwrap();
    let history = History {
        committed: rows.iter().map(|row| Committed { id: row.get(0), key: row.get(1), number: row.get(2) }).collect(),
        stored: audit.drain().await.into_iter().map(|stored| stored.id).collect(),
        duplicates_max: FAULTS * IN_FLIGHT,
        ..History::default()
    };
    let violations: Vec<String> = judge(&history).iter().map(ToString::to_string).collect();
    assert!(violations.is_empty(), "{}", violations.join("; "));
    assert!(history.committed.len() >= MESSAGES);
    let list = run(&["intake", "list", "--config", config.to_str().unwrap()]);
    assert!(list.contains("billing.outbox_messages") && !list.contains("refused "), "{list}");
    // Every process says goodbye.
    for process in &mut processes {
        process.signal("TERM");
        assert_eq!(process.0.wait().unwrap().code(), Some(0));
    }
}

const TASK: &str = "
    create table task (id bigint not null auto_increment primary key, user_id varchar(64) not null, topic varchar(64) not null,
        message_id varchar(64) not null, message text not null, state varchar(16) not null, create_time datetime(6) not null, update_time datetime(6),
        key (state, create_time))";

/// Like [`write`], in the manner of the third article: a task for each message, with its topic.
async fn write_tasks(url: String, seed: u64, committed: Arc<AtomicUsize>) {
    let (mut chance, opts) = (Chance::new(seed), postroom_mysql::options_of(&url).unwrap());
    while committed.load(Ordering::Relaxed) < MESSAGES {
        // A server that dies under a writer costs it its transaction, as it would an application.
        match Conn::new(opts.clone()).await {
            Ok(mut conn) => drop(write_tasks_on(&mut conn, &mut chance, &committed).await),
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

async fn write_tasks_on(
    conn: &mut Conn,
    chance: &mut Chance,
    committed: &AtomicUsize,
) -> Result<(), mysql_async::Error> {
    while committed.load(Ordering::Relaxed) < MESSAGES {
        let mut tx = conn.start_transaction(TxOpts::default()).await?;
        let mut keys: Vec<u64> = (0..1 + chance.below(6)).map(|_| chance.below(KEYS)).collect();
        keys.sort_unstable();
        for key in &keys {
            let (key, id) = (format!("key-{key}"), MessageId::new().to_string());
            tx.exec_drop("update numbers set n = last_insert_id(n + 1) where k = ?", (&key,)).await?;
            let n = tx.last_insert_id().unwrap_or_default();
            tx.exec_drop("insert into ledger values (?, ?, ?)", (&id, &key, n)).await?;
            let sql = "insert into task (user_id, topic, message_id, message, state, create_time) values (?, 'orders', ?, ?, 'create', sysdate(6))";
            tx.exec_drop(sql, (&key, &id, n.to_string())).await?;
        }
        if chance.percent(10) {
            tx.rollback().await?;
        } else {
            tx.commit().await?;
            committed.fetch_add(keys.len(), Ordering::Relaxed);
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tasks_on_mariadb_are_sent_in_order_and_marked_whoever_dies() {
    let dir = surroundings::scratch("intake-mariadb");
    let mut server = MysqlServer::start(&dir.join("server")).unwrap();
    let mut admin = Conn::new(postroom_mysql::options_of(&server.url("mysql")).unwrap()).await.unwrap();
    admin.query_drop("create database shop").await.unwrap();
    let (url, rabbit) = (server.url("shop"), surroundings::rabbitmq_url());
    run(&["migrate", "--store", &url, "--lanes", "8"]);
    let connect = async || Conn::new(postroom_mysql::options_of(&url).unwrap()).await.unwrap();
    let mut shop = connect().await;
    for sql in [
        TASK,
        "create table numbers (k varchar(32) primary key, n bigint not null default 0)",
        "create table ledger (id char(36) primary key, k varchar(32), n bigint)",
    ] {
        shop.query_drop(sql).await.unwrap();
    }
    for key in 0..KEYS {
        shop.exec_drop("insert into numbers (k) values (?)", (format!("key-{key}"),)).await.unwrap();
    }
    let exchange = format!("t-{}", surroundings::unique());
    let audit = Arc::new(AuditQueue::bound(&rabbit, &exchange, "orders.#").await);
    let config = dir.join("postroom.toml");
    let text = format!(
        "[store]\nurl = {url:?}\n\
         [relay]\nin_flight_max = {IN_FLIGHT}\nlease = \"1s\"\npoll_idle = \"50ms\"\n\
         [[routes]]\nname = \"orders\"\ntopics = [\"orders\"]\n\
         {RETRY}[routes.sink]\nkind = \"rabbitmq\"\nurl = {rabbit:?}\nexchange = {exchange:?}\n\
         [[intake]]\nname = \"tasks\"\npreset = \"task-states\"\nevery = \"50ms\"\n"
    );
    std::fs::write(&config, text).unwrap();
    run(&["check", "--config", config.to_str().unwrap()]);
    let log = dir.join("run.log");
    let mut processes: Vec<Process> = (0..4).map(|_| Process::start(&config, &log)).collect();
    let seed = 20_262;
    let committed = Arc::new(AtomicUsize::new(0));
    let writers: Vec<_> =
        (0..4).map(|writer| tokio::spawn(write_tasks(url.clone(), seed + writer, committed.clone()))).collect();
    let over = Arc::new(AtomicBool::new(false));
    let refusing = tokio::spawn(refuse(audit.clone(), exchange.clone(), Chance::new(seed), over.clone()));
    let mut chance = Chance::new(seed ^ 7);
    for fault in 0..FAULTS {
        let from = MESSAGES * fault / (FAULTS + 1);
        until("writers have written more", &log, async || committed.load(Ordering::Relaxed) > from).await;
        if fault % 5 == 2 {
            server.kill().unwrap();
            server.start_again().unwrap();
        } else {
            let index = chance.below(processes.len() as u64) as usize;
            processes[index] = Process::start(&config, &log);
        }
    }
    for writer in writers {
        tokio::time::timeout(STUCK, writer).await.unwrap().unwrap();
    }
    over.store(true, Ordering::Relaxed);
    refusing.await.unwrap();
    let unsent =
        "select (select count(*) from task where state <> 'completed') + (select count(*) from postroom_intake_rows)";
    until("every task is completed", &log, async || {
        connect().await.query_first::<i64, _>(unsent).await.unwrap() == Some(0)
    })
    .await;
    let rows: Vec<(String, String, i64)> = connect().await.query("select id, k, n from ledger").await.unwrap();
    let history = History {
        committed: rows.into_iter().map(|(id, key, number)| Committed { id, key, number }).collect(),
        stored: audit.drain().await.into_iter().map(|stored| stored.id).collect(),
        duplicates_max: FAULTS * 4 * IN_FLIGHT,
        ..History::default()
    };
    let violations: Vec<String> = judge(&history).iter().map(ToString::to_string).collect();
    assert!(violations.is_empty(), "{}", violations.join("; "));
    assert!(history.committed.len() >= MESSAGES);
    for process in &mut processes {
        process.signal("TERM");
        assert_eq!(process.0.wait().unwrap().code(), Some(0));
    }
}
