//! The program on a MariaDB of its own: relays and the server die while writers in any language (the procedure `postroom_enqueue`) go on, and the
//! independent judge looks at what the broker and the inbox have.

// The length of a pause is the fault itself; everything else waits for signals.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Error, TxOpts};
use postroom::{
    Deed, KeyDeed, MessageId, NewOperation, OperationFilter, OperationId, OperationKind, OperationState, Operator,
    ReplayPlace, Side, WaitsFor,
};
use postroom_mysql::{Database, options_of};
use postroom_testkit::chance::Chance;
use postroom_testkit::judge::{Committed, History, judge};
use postroom_testkit::rabbitmq::{AuditQueue, QueueKind};
use postroom_testkit::services::MysqlServer;
use postroom_testkit::surroundings;

const KEYS: u64 = 200;
const MESSAGES: usize = 4000;
const IN_FLIGHT: usize = 300;
const FAULTS: usize = 8;
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

/// A relay process; killed when dropped.
struct Relay(Child);

impl Relay {
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

impl Drop for Relay {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deaths_of_relays_and_of_the_server_lose_and_reorder_nothing() {
    let dir = surroundings::scratch("mariadb-relays");
    let mut server = MysqlServer::start(&dir.join("server")).unwrap();
    let mut admin = Conn::new(options_of(&server.url("mysql")).unwrap()).await.unwrap();
    admin.query_drop("create database shop").await.unwrap();
    let (url, rabbit) = (server.url("shop"), surroundings::rabbitmq_url());
    postroom(&["migrate", "--store", &url, "--lanes", "8"]);
    let mut shop = Conn::new(options_of(&url).unwrap()).await.unwrap();
    shop.query_drop("create table numbers (k varchar(32) primary key, n bigint not null default 0)").await.unwrap();
    shop.query_drop("create table ledger (id char(36) primary key, k varchar(32), n bigint)").await.unwrap();
    for key in 0..KEYS {
        shop.exec_drop("insert into numbers (k) values (?)", (format!("key-{key}"),)).await.unwrap();
    }

    let exchange = format!("m-{}", surroundings::unique());
    let audit = AuditQueue::bound(&rabbit, &exchange, "orders.#").await;
    let queue = format!("{CONSUMER}-{exchange}");
    AuditQueue::named(&rabbit, &exchange, "orders.#", &queue, QueueKind::Classic).await;
    let config = dir.join("postroom.toml");
    let text = format!(
        "[store]\nurl = {url:?}\n\
         [relay]\nin_flight_max = {IN_FLIGHT}\nlease = \"1s\"\npoll_idle = \"50ms\"\n\
         [[routes]]\nname = \"orders\"\ntopics = [\"orders\"]\n\
         [routes.sink]\nkind = \"rabbitmq\"\nurl = {rabbit:?}\nexchange = {exchange:?}\n\
         [[inboxes]]\nconsumer = {CONSUMER:?}\n\
         [inboxes.from]\nkind = \"rabbitmq\"\nurl = {rabbit:?}\nqueue = {queue:?}\nprefetch = 200\n"
    );
    std::fs::write(&config, text).unwrap();
    let log: PathBuf = dir.join("relay.log");
    let mut relays: Vec<Relay> = (0..3).map(|_| Relay::start(&config, &log)).collect();

    let seed = 20_260;
    let committed = Arc::new(AtomicUsize::new(0));
    let writers: Vec<_> =
        (0..6).map(|writer| tokio::spawn(write(url.clone(), seed + writer, committed.clone()))).collect();
    let store = Database::new(&url).unwrap();
    let operator = tokio::spawn(operate(store.clone(), Chance::new(seed)));
    let mut chance = Chance::new(seed ^ 7);
    let replay = OperationId::new();
    for fault in 0..FAULTS {
        // A fault for each part of the traffic.
        let from = MESSAGES * fault / (FAULTS + 1);
        until("writers have written more", &log, async || committed.load(Ordering::Relaxed) > from).await;
        if fault == 4 {
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
            store.begin_operation(replay, &again, &deed()).await.unwrap();
        }
        let index = chance.below(relays.len() as u64) as usize;
        match fault {
            2 | 5 => {
                server.kill().unwrap();
                server.start_again().unwrap();
            }
            3 => {
                relays[index].signal("STOP");
                tokio::time::sleep(Duration::from_millis(2500)).await;
                relays[index].signal("CONT");
            }
            _ => relays[index] = Relay::start(&config, &log),
        }
    }
    for writer in writers {
        tokio::time::timeout(STUCK, writer).await.unwrap().unwrap();
    }
    operator.abort();
    for key in store.waiting_keys(Side::Out, None, 10_000).await.unwrap() {
        if key.waits_for == WaitsFor::Parked {
            store.act_on_key(&key.route, &key.key, KeyDeed::Unpark, &deed()).await.unwrap();
        }
    }
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
    assert!(replayed.given_out > 0 && replayed.done == replayed.given_out, "I18: {replayed:?}");
    let mut shop = Conn::new(options_of(&url).unwrap()).await.unwrap();
    let rows: Vec<(String, String, i64)> = shop.query("select id, k, n from ledger").await.unwrap();
    let counted = "select count(*) from postroom_inbox_messages";
    let sent = rows.len() as i64;
    until("the inbox has everything", &log, async || {
        let mut conn = Conn::new(options_of(&url).unwrap()).await.unwrap();
        conn.query_first::<i64, _>(counted).await.unwrap() == Some(sent)
    })
    .await;

    let dead: Vec<String> = shop.query("select id from postroom_dead_letters").await.unwrap();
    assert!(dead.is_empty(), "I7: nobody refused {dead:?}");
    let history = History {
        committed: rows.into_iter().map(|(id, key, number)| Committed { id, key, number }).collect(),
        stored: audit.drain().await.into_iter().map(|stored| stored.id).collect(),
        kept: Some(shop.query("select id from postroom_inbox_messages order by seq").await.unwrap()),
        duplicates_max: FAULTS * 3 * IN_FLIGHT + replayed.given_out as usize,
        ..History::default()
    };
    let violations: Vec<String> = judge(&history).iter().map(ToString::to_string).collect();
    assert!(violations.is_empty(), "{}", violations.join("; "));
    assert!(history.committed.len() >= MESSAGES);

    let status = postroom(&["status", "--store", &url]);
    assert!(status.contains("orders") && status.contains(CONSUMER), "{status}");
    let why = postroom(&["why", &history.committed[0].id, "--store", &url]);
    assert!(why.contains("the broker confirmed it"), "{why}");
    // Every relay says goodbye.
    for relay in &mut relays {
        relay.signal("TERM");
        assert_eq!(relay.0.wait().unwrap().code(), Some(0));
    }
}
