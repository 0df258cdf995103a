//! Nothing is passed by, whatever the order of commits, and no key is out of order.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use mysql_async::prelude::Queryable;
use mysql_async::{Opts, TxOpts};
use postroom::{Delivery, Message, MessageId, Outbox, Outcome, Report, Settlement, Source, Token, Want};
use postroom_mysql::{Mysql, MysqlSource};
use postroom_testkit::chance::Chance;
use postroom_testkit::conformance::Fixture;
use postroom_testkit::conformance::source::route;

use crate::fixture::Shop;

const WRITERS: u64 = 8;
const MESSAGES: usize = 12_000;
const KEYS: u64 = 60;

/// Writes until there are enough: transactions of some messages of one key each, which are open for a while, and some of which are rolled back.
async fn write(opts: Opts, writer: u64, seed: u64, committed: Arc<AtomicUsize>) {
    let mut chance = Chance::new(seed + writer);
    let mut conn = mysql_async::Conn::new(opts).await.unwrap();
    conn.query_drop("set session transaction isolation level repeatable read").await.unwrap();
    while committed.load(Ordering::Relaxed) < MESSAGES {
        let mut tx = conn.start_transaction(TxOpts::default()).await.unwrap();
        let (key, count) = (format!("key-{}", chance.below(KEYS)), 1 + chance.below(5));
        // Allocated before the row of the key is locked: its seq says nothing of the order of commits.
        if chance.percent(30) {
            let other = Message::new("orders", "order.noted", "x");
            Mysql.enqueue(&mut tx, std::slice::from_ref(&other)).await.unwrap();
            tx.exec_drop("insert into ledger (id) values (?)", (other.id.to_string(),)).await.unwrap();
        }
        tx.exec_drop("update numbers set n = n + ? where `key` = ?", (count, &key)).await.unwrap();
        let last: u64 = tx.exec_first("select n from numbers where `key` = ?", (&key,)).await.unwrap().unwrap();
        let message = |n: u64| {
            let mut message = Message::new("orders", "order.placed", "x").key(&key);
            message.aggregate_version = Some(n as i64);
            message
        };
        let messages: Vec<_> = (last + 1 - count..=last).map(message).collect();
        Mysql.enqueue(&mut tx, &messages).await.unwrap();
        for message in &messages {
            tx.exec_drop("insert into ledger (id) values (?)", (message.id.to_string(),)).await.unwrap();
        }
        if chance.percent(40) {
            tokio::time::sleep(Duration::from_millis(chance.below(20))).await;
        }
        if chance.percent(15) {
            tx.rollback().await.unwrap();
        } else {
            tx.commit().await.unwrap();
            committed.fetch_add(messages.len(), Ordering::Relaxed);
        }
    }
}

#[derive(Default)]
struct Seen {
    ids: HashSet<MessageId>,
    /// May come once more: they were not settled when a reader died.
    repeatable: HashSet<MessageId>,
    versions: HashMap<String, i64>,
    repeated: usize,
}

impl Seen {
    fn take(&mut self, delivery: &Delivery) {
        let message = &delivery.message;
        if !self.ids.insert(message.id) {
            assert!(self.repeatable.contains(&message.id), "I1: {:?} came again without a crash", message.id);
            self.repeated += 1;
        }
        if let (Some(key), Some(version)) = (&message.key, message.aggregate_version) {
            let last = self.versions.entry(key.clone()).or_default();
            assert!(version > *last, "I4: version {version} of {key} came after {last}");
            *last = version;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_committed_message_is_read_once_and_in_the_order_of_its_key() {
    let seed = std::env::var("POSTROOM_TEST_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(20_261_123);
    println!("seed {seed}");
    let shop = Shop::create().await;
    shop.run("create table numbers (`key` varchar(20) primary key, n bigint not null default 0)").await;
    shop.run("create table ledger (id char(36) primary key)").await;
    for key in 0..KEYS {
        shop.run(&format!("insert into numbers (`key`) values ('key-{key}')")).await;
    }
    let committed = Arc::new(AtomicUsize::new(0));
    let write = |writer| tokio::spawn(write(shop.opts.clone(), writer, seed, committed.clone()));
    let writers: Vec<_> = (0..WRITERS).map(write).collect();

    let open = async |owner: String| {
        let source = MysqlSource::open(&shop.opts, &route(), owner).await.unwrap();
        assert_eq!(source.renew(&Report::default()).await.unwrap().held, 4);
        source
    };
    let mut chance = Chance::new(seed);
    let (mut reader, mut seen, mut restarts) = (open("reader-0".to_owned()).await, Seen::default(), 0);
    let mut held: Vec<(Token, MessageId)> = Vec::new();
    let (mut idle, mut claims) = (0, 0_u64);
    while idle < 3 {
        let finished = writers.iter().all(tokio::task::JoinHandle::is_finished);
        claims += 1;
        let claimed = reader.claim(Want::up_to(1 + chance.below(400) as usize)).await.unwrap();
        assert!(claimed.lost_lanes.is_empty());
        for delivery in &claimed.deliveries {
            seen.take(delivery);
            held.push((delivery.token, delivery.message.id));
        }
        idle = if finished && claimed.deliveries.is_empty() && !claimed.more { idle + 1 } else { 0 };
        if !held.is_empty() && chance.percent(70) {
            let count = 1 + chance.below(held.len() as u64) as usize;
            let done = held.drain(..count).map(|(token, _)| Settlement { token, outcome: Outcome::Done });
            reader.settle(&done.collect::<Vec<_>>()).await.unwrap();
        }
        if claims.is_multiple_of(40) {
            // A crash: the next reader begins at the stored positions.
            restarts += 1;
            drop(reader);
            shop.run("update postroom_lanes set expires_at = '1970-01-02'").await;
            shop.run("delete from postroom_relays").await;
            let sql = "select o.id from postroom_outbox o join postroom_lanes l on l.lane = o.lane where o.place > l.position";
            let again: Vec<String> = shop.connect().await.query(sql).await.unwrap();
            seen.repeatable = again.iter().map(|id| id.parse().unwrap()).collect();
            seen.versions.clear();
            held.clear();
            reader = open(format!("reader-{restarts}")).await;
        }
    }
    for writer in writers {
        writer.await.unwrap();
    }
    let mut conn = shop.connect().await;
    let ledger: Vec<String> = conn.query("select id from ledger").await.unwrap();
    let ledger: HashSet<MessageId> = ledger.iter().map(|id| id.parse().unwrap()).collect();
    let late =
        "select count(*) from postroom_outbox o join postroom_outbox e on e.lane = o.lane and e.place = o.place - 1
                 where o.seq < e.seq";
    let late: Option<i64> = conn.query_first(late).await.unwrap();
    println!(
        "{} committed, {late:?} late, {restarts} restarts, {} repeated, {claims} claims",
        ledger.len(),
        seen.repeated
    );
    assert_eq!(ledger.difference(&seen.ids).count(), 0, "I1: committed messages were never read");
    assert_eq!(seen.ids.difference(&ledger).count(), 0, "I2: a message was read that was never committed");
    assert!(late > Some(100), "hardly a message was committed after one with a higher seq: the test does not test it");
    assert!(restarts > 2);
}
