//! The program on a MariaDB of its own: random schedules of faults meet relays, links and the server while writers in any language (the procedure
//! `postroom_enqueue`) go on, and the independent judge looks at what the broker and the inbox have.
//!
//! `cargo xtask chaos --mariadb --schedules N --seed S` runs more of them, and notes the result in `docs/chaos-ledger.jsonl`.

// The length of a pause is the fault itself; everything else waits for signals.
#![allow(clippy::unwrap_used, clippy::disallowed_methods, dead_code)]

#[path = "chaos/tally.rs"]
mod tally;

use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Error, TxOpts};
use postroom::{
    Deed, KeyDeed, MessageId, NewOperation, OperationFilter, OperationId, OperationKind, OperationState, Operator,
    ReplayPlace, Side, WaitsFor,
};
use postroom_mysql::{Database, options_of};
use postroom_testkit::chance::Chance;
use postroom_testkit::judge::{Committed, History, Violation, judge};
use postroom_testkit::proxy::{Link, Proxy};
use postroom_testkit::rabbitmq::{AuditQueue, QueueKind};
use postroom_testkit::services::MysqlServer;
use postroom_testkit::surroundings;
use tally::{Outcome, Tally};

const KEYS: u64 = 200;
const MESSAGES: usize = 3000;
const IN_FLIGHT: usize = 300;
/// At most so many in a schedule, and three fewer at least.
const FAULTS: u64 = 9;
/// Relays of a schedule.
const RELAYS: usize = 3;
const CONSUMER: &str = "table";
/// Nothing here takes as long as this unless it is stuck.
const STUCK: Duration = Duration::from_secs(240);

fn postroom(arguments: &[&str]) -> String {
    let output = surroundings::postroom().args(arguments).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

async fn until(what: &str, log: &Path, holds: impl AsyncFn() -> bool) {
    let began = Instant::now();
    while !holds().await {
        if began.elapsed() > STUCK {
            let log = std::fs::read_to_string(log).unwrap_or_default();
            let tail: Vec<&str> = log.lines().rev().take(20).collect();
            panic!("waited in vain until {what}; the relays' last words:\n{}", tail.join("\n"));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Each transaction takes numbers of some keys, notes them, and enqueues; a tenth are rolled back.
async fn write(url: String, seed: u64, committed: Arc<AtomicUsize>) {
    let (mut chance, opts) = (Chance::new(seed), options_of(&url).unwrap());
    while committed.load(Ordering::Relaxed) < MESSAGES {
        // A server that dies under a writer costs it its transaction, as it would an application.
        match Conn::new(opts.clone()).await {
            Ok(mut conn) => drop(write_on(&mut conn, &mut chance, &committed).await),
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

async fn write_on(conn: &mut Conn, chance: &mut Chance, committed: &AtomicUsize) -> Result<(), Error> {
    while committed.load(Ordering::Relaxed) < MESSAGES {
        let mut tx = conn.start_transaction(TxOpts::default()).await?;
        let mut keys: Vec<u64> = (0..1 + chance.below(6)).map(|_| chance.below(KEYS)).collect();
        keys.sort_unstable();
        for key in &keys {
            let (key, id) = (format!("key-{key}"), MessageId::new().to_string());
            tx.exec_drop("update numbers set n = last_insert_id(n + 1) where k = ?", (&key,)).await?;
            let n = tx.last_insert_id().unwrap_or_default();
            tx.exec_drop("insert into ledger values (?, ?, ?)", (&id, &key, n)).await?;
            let sql = "call postroom_enqueue('orders', 'order.placed', ?, json_object('id', ?, 'key', ?, 'routing_key', 'orders.placed'))";
            tx.exec_drop(sql, (n.to_string(), &id, &key)).await?;
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

/// An operator who cannot make up his mind.
async fn operate(store: Database, mut chance: Chance) {
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

fn deed() -> Deed {
    Deed { actor: "mariadb".to_owned(), reason: "a test".to_owned() }
}

/// A relay process behind two links of its own; killed when dropped.
struct Relay {
    process: Child,
    started: Instant,
    config: PathBuf,
    log: PathBuf,
    store: Proxy,
    broker: Proxy,
}

/// The URL with another `HOST:PORT`, and the one that it has.
fn through(url: &str, address: &str) -> (String, String) {
    let (before, after) = url.split_once('@').unwrap();
    let (target, path) = after.split_once('/').unwrap();
    (format!("{before}@{address}/{path}"), target.to_owned())
}

impl Relay {
    async fn begin(dir: &Path, index: usize, url: &str, rabbit: &str, exchange: &str) -> Self {
        let store = Proxy::to(&through(url, "").1).await;
        let broker = Proxy::to(&through(rabbit, "").1).await;
        let (url, rabbit) = (through(url, &store.address()).0, through(rabbit, &broker.address()).0);
        let config = dir.join(format!("relay-{index}.toml"));
        let queue = queue_of(exchange);
        let text = format!(
            "[store]\nurl = {url:?}\n\
             [relay]\nin_flight_max = {IN_FLIGHT}\nlease = \"1s\"\npoll_idle = \"50ms\"\n\
             [[routes]]\nname = \"orders\"\ntopics = [\"orders\"]\n\
             [routes.sink]\nkind = \"rabbitmq\"\nurl = {rabbit:?}\nexchange = {exchange:?}\n\
             [[inboxes]]\nconsumer = {CONSUMER:?}\n\
             [inboxes.from]\nkind = \"rabbitmq\"\nurl = {rabbit:?}\nqueue = {queue:?}\nprefetch = 200\n"
        );
        std::fs::write(&config, text).unwrap();
        let log = dir.join("relay.log");
        Self { process: start(&config, &log), started: Instant::now(), config, log, store, broker }
    }

    fn signal(&self, name: &str) {
        let pid = self.process.id().to_string();
        assert!(Command::new("kill").args([&format!("-{name}"), &pid]).status().unwrap().success());
    }

    fn starts(&mut self) {
        self.process = start(&self.config, &self.log);
        self.started = Instant::now();
    }

    /// Whatever it does now ends; another process takes its place.
    fn killed(&mut self) {
        let _ = self.process.kill();
        self.process.wait().unwrap();
        self.starts();
    }

    /// What a supervisor does with one that could not begin while the server was away.
    fn lives_again(&mut self) {
        if self.process.try_wait().unwrap().is_some() {
            self.starts();
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn start(config: &Path, log: &Path) -> Child {
    let log = std::fs::File::options().create(true).append(true).open(log).unwrap();
    let mut command = Command::new(surroundings::postroom_binary());
    surroundings::without_tests(&mut command);
    let command = command.args(["run", "--config"]).arg(config);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap()
}

fn queue_of(exchange: &str) -> String {
    format!("{CONSUMER}-{exchange}")
}

/// One fault, from its beginning to its end.
async fn inflict(relays: &mut [Relay], server: &mut MysqlServer, chance: &mut Chance) -> &'static str {
    let relay = &mut relays[chance.below(RELAYS as u64) as usize];
    let while_it_lasts = Duration::from_millis(300 + chance.below(2200));
    match chance.below(12) {
        0..=2 => {
            relay.killed();
            "relay kill -9"
        }
        3 => {
            // One that was started a moment ago does not listen for signals yet.
            tokio::time::sleep(Duration::from_secs(2).saturating_sub(relay.started.elapsed())).await;
            relay.signal("TERM");
            let code = relay.process.wait().unwrap().code();
            // 69: the fault before this one keeps it from the store.
            assert!(matches!(code, Some(0 | 69)), "I12: {code:?}");
            relay.starts();
            "relay SIGTERM"
        }
        4 => {
            relay.signal("STOP");
            tokio::time::sleep(Duration::from_millis(2500)).await;
            relay.signal("CONT");
            "relay paused beyond its lease"
        }
        5 | 6 => {
            server.kill().unwrap();
            server.start_again().unwrap();
            "mariadb kill -9"
        }
        7 => {
            relay.store.reset();
            relay.broker.reset();
            "link reset"
        }
        fault => {
            let (link, what) = match fault {
                8 | 9 => (Link::BlackHole, "link black"),
                10 => (Link::RepliesLost, "replies lost"),
                _ => (Link::Throttled(20_000), "link throttled"),
            };
            let end = if chance.percent(60) { &relay.store } else { &relay.broker };
            end.set(link);
            tokio::time::sleep(while_it_lasts).await;
            // Connections of which something was lost do not go on as if nothing had been.
            end.reset();
            end.set(Link::Open);
            what
        }
    }
}

/// Writers, an operator, a replay and faults, until everything has come to rest; and what the judge says of it.
async fn schedule(seed: u64, server: &mut MysqlServer) -> Outcome {
    let dir = surroundings::scratch("mariadb-relays");
    let (name, rabbit) = (format!("shop_{seed}"), surroundings::rabbitmq_url());
    let mut admin = Conn::new(options_of(&server.url("mysql")).unwrap()).await.unwrap();
    admin.query_drop(format!("create database {name}")).await.unwrap();
    let url = server.url(&name);
    postroom(&["migrate", "--store", &url, "--lanes", "8"]);
    let mut shop = Conn::new(options_of(&url).unwrap()).await.unwrap();
    shop.query_drop("create table numbers (k varchar(32) primary key, n bigint not null default 0)").await.unwrap();
    shop.query_drop("create table ledger (id char(36) primary key, k varchar(32), n bigint)").await.unwrap();
    for key in 0..KEYS {
        shop.exec_drop("insert into numbers (k) values (?)", (format!("key-{key}"),)).await.unwrap();
    }
    let exchange = format!("m-{}", surroundings::unique());
    let audit = AuditQueue::bound(&rabbit, &exchange, "orders.#").await;
    AuditQueue::named(&rabbit, &exchange, "orders.#", &queue_of(&exchange), QueueKind::Classic).await;
    let mut relays = Vec::new();
    for index in 0..RELAYS {
        relays.push(Relay::begin(&dir, index, &url, &rabbit, &exchange).await);
    }
    let log = dir.join("relay.log");

    let committed = Arc::new(AtomicUsize::new(0));
    let writers: Vec<_> =
        (0..6).map(|writer| tokio::spawn(write(url.clone(), seed * 100 + writer, committed.clone()))).collect();
    let store = Database::new(&url).unwrap();
    let operator = tokio::spawn(operate(store.clone(), Chance::new(seed)));
    let mut chance = Chance::new(seed ^ 7);
    let (mut outcome, replay, faults) = (Outcome::default(), OperationId::new(), FAULTS - chance.below(4));
    for fault in 0..faults {
        // A fault for each part of the traffic.
        let from = MESSAGES * fault as usize / (faults as usize + 1);
        until("writers have written more", &log, async || committed.load(Ordering::Relaxed) > from).await;
        if fault == faults / 2 {
            // What was sent until now is sent once more, before new messages of its keys, whoever dies meanwhile.
            let again = NewOperation {
                kind: OperationKind::Replay,
                side: Side::Out,
                route: "orders".to_owned(),
                filter: OperationFilter::default(),
                planned: None,
                canary: None,
                goes_on: false,
                rate: None,
                place: ReplayPlace::Before,
                new_ids: false,
            };
            until("the replay is begun", &log, async || store.begin_operation(replay, &again, &deed()).await.is_ok())
                .await;
        }
        outcome.faults.push(inflict(&mut relays, server, &mut chance).await);
    }
    for writer in writers {
        tokio::time::timeout(STUCK, writer).await.unwrap().unwrap();
    }
    relays.iter_mut().for_each(Relay::lives_again);
    operator.abort();
    until("every key may go on", &log, async || {
        let Ok(keys) = store.waiting_keys(Side::Out, None, 10_000).await else { return false };
        for key in keys.iter().filter(|key| key.waits_for == WaitsFor::Parked) {
            let _ = store.act_on_key(&key.route, &key.key, KeyDeed::Unpark, &deed()).await;
        }
        keys.iter().all(|key| key.waits_for != WaitsFor::Parked)
    })
    .await;
    until("the backlog is empty", &log, async || {
        let status = store.status().await.unwrap();
        status.routes.iter().all(|route| route.backlog == 0 && route.parked == 0)
    })
    .await;
    until("the replay is over", &log, async || {
        let found = store.operations(Some(replay), 1).await.unwrap();
        found[0].state == OperationState::Done
    })
    .await;
    let replayed = store.operations(Some(replay), 1).await.unwrap().remove(0);
    if replayed.done != replayed.given_out {
        let found = format!("a replay gave out {} and says that {} are done", replayed.given_out, replayed.done);
        outcome.violations.push(Violation { invariant: "I18", found });
    }
    let mut shop = Conn::new(options_of(&url).unwrap()).await.unwrap();
    let rows: Vec<(String, String, i64)> = shop.query("select id, k, n from ledger").await.unwrap();
    let sent = rows.len() as i64;
    until("the inbox has everything", &log, async || {
        let mut conn = Conn::new(options_of(&url).unwrap()).await.unwrap();
        conn.query_first::<i64, _>("select count(*) from postroom_inbox_messages").await.unwrap() == Some(sent)
    })
    .await;
    let history = History {
        committed: rows.into_iter().map(|(id, key, number)| Committed { id, key, number }).collect(),
        stored: audit.drain().await.into_iter().map(|stored| stored.id).collect(),
        dead: shop.query("select id from postroom_dead_letters").await.unwrap(),
        kept: Some(shop.query("select id from postroom_inbox_messages order by seq").await.unwrap()),
        duplicates_max: faults as usize * RELAYS * IN_FLIGHT + replayed.given_out as usize,
        ..History::default()
    };
    outcome.messages = history.committed.len();
    outcome.duplicates = history.stored.len().saturating_sub(history.committed.len());
    outcome.violations.extend(judge(&history));
    if !history.dead.is_empty() {
        let found = format!("{} messages are dead, and nobody ever refused one", history.dead.len());
        outcome.violations.push(Violation { invariant: "I7", found });
    }
    let status = postroom(&["status", "--store", &url]);
    assert!(status.contains("orders") && status.contains(CONSUMER), "{status}");
    let why = postroom(&["why", &history.committed[0].id, "--store", &url]);
    assert!(why.contains("the broker confirmed it"), "{why}");
    // Every relay says goodbye.
    for relay in &mut relays {
        relay.signal("TERM");
        let code = relay.process.wait().unwrap().code();
        if code != Some(0) {
            let found = format!("a relay told to stop ended with {code:?}");
            outcome.violations.push(Violation { invariant: "I12", found });
        }
    }
    if outcome.violations.is_empty() {
        admin = Conn::new(options_of(&server.url("mysql")).unwrap()).await.unwrap();
        admin.query_drop(format!("drop database {name}")).await.unwrap();
    }
    outcome
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_schedules_of_faults_break_no_invariant() {
    let number = |variable: &str, usual: u64| std::env::var(variable).map_or(usual, |text| text.parse().unwrap());
    let (schedules, first) = (number("POSTROOM_CHAOS_SCHEDULES", 2), number("POSTROOM_CHAOS_SEED", 1));
    let mut server = MysqlServer::start(&surroundings::scratch("mariadb-chaos").join("server")).unwrap();
    let mut tally = Tally::new(first);
    for seed in first..first + schedules {
        match AssertUnwindSafe(schedule(seed, &mut server)).catch_unwind().await {
            Ok(outcome) => tally.add(seed, outcome),
            Err(panic) => {
                let text = panic.downcast_ref::<String>().cloned();
                tally.stuck(seed, &text.unwrap_or_else(|| "it panicked".to_owned()));
            }
        }
        println!("{}", tally.line());
        // After each one, so that a run that is interrupted has said what it saw.
        if let Ok(file) = std::env::var("POSTROOM_CHAOS_SUMMARY") {
            std::fs::write(file, tally.json()).unwrap();
        }
    }
    assert!(tally.violations.is_empty(), "{:#?}", tally.violations);
}
