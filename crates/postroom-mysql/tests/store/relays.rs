//! Four relays beside each other, failures, and relays that die: nothing is lost, no key is out of order, no message is stuck.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Opts, TxOpts};
use postroom::{Message, Origin, Outbox, Outcome, Report, Settlement, Source, Want};
use postroom_mysql::{Mysql, MysqlSource};
use postroom_testkit::chance::Chance;
use postroom_testkit::conformance::Fixture;
use postroom_testkit::conformance::source::route;

use crate::fixture::Shop;

const MESSAGES: usize = 5_000;
const KEYS: u64 = 40;
const DEATHS_MAX: usize = 12;

/// What came out, by key: how far in order, and how often again.
#[derive(Default)]
struct Published {
    last: HashMap<String, i64>,
    repeated: usize,
}

impl Published {
    fn publish(&mut self, message: &Message) {
        let (Some(key), Some(version)) = (&message.key, message.aggregate_version) else { return };
        let last = self.last.entry(key.clone()).or_default();
        assert!(version <= *last + 1, "I4: version {version} of {key} was published after {last}");
        self.repeated += usize::from(version <= *last);
        *last = version.max(*last);
    }
}

struct World {
    opts: Opts,
    published: Mutex<Published>,
    over: AtomicBool,
    deaths: AtomicUsize,
    retried: AtomicUsize,
    again: AtomicUsize,
}

async fn write(opts: Opts, mut chance: Chance) {
    let mut conn = Conn::new(opts).await.unwrap();
    let mut committed = 0;
    while committed < MESSAGES / 4 {
        let mut tx = conn.start_transaction(TxOpts::default()).await.unwrap();
        let (key, count) = (format!("key-{}", chance.below(KEYS)), 1 + chance.below(4));
        tx.exec_drop("update numbers set n = n + ? where `key` = ?", (count, &key)).await.unwrap();
        let last: u64 = tx.exec_first("select n from numbers where `key` = ?", (&key,)).await.unwrap().unwrap();
        let message = |n: u64| {
            let mut message = Message::new("orders", "order.placed", "x").key(&key);
            message.aggregate_version = Some(n as i64);
            message
        };
        let messages: Vec<_> = (last + 1 - count..=last).map(message).collect();
        Mysql.enqueue(&mut tx, &messages).await.unwrap();
        if chance.percent(10) {
            tx.rollback().await.unwrap();
        } else {
            tx.commit().await.unwrap();
            committed += messages.len();
        }
    }
}

/// Relays until everything is out; dies now and then between a publication and its record, and begins again under another name.
async fn relay(world: Arc<World>, name: usize, mut chance: Chance) {
    for life in 0.. {
        let owner = format!("relay-{name}-{life}");
        let source = MysqlSource::open(&world.opts, &route(), owner.as_str()).await.unwrap();
        let mut renewed: Option<Instant> = None;
        loop {
            if world.over.load(Ordering::Relaxed) {
                source.release().await.unwrap();
                return;
            }
            if renewed.is_none_or(|at| at.elapsed() > Duration::from_millis(200)) {
                source.renew(&Report::default()).await.unwrap();
                renewed = Some(Instant::now());
            }
            let claimed = source.claim(Want::up_to(1 + chance.below(100) as usize)).await.unwrap();
            if claimed.deliveries.is_empty() {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            let (mut waiting, mut outcomes) = (HashSet::new(), Vec::new());
            for delivery in &claimed.deliveries {
                let key = delivery.message.key.clone();
                let outcome = if delivery.behind || waiting.contains(&key) {
                    // A parked one that waits behind another stays what it is.
                    if delivery.origin == Origin::Parked { Outcome::Release } else { Outcome::Queue }
                } else if chance.percent(10) {
                    world.retried.fetch_add(1, Ordering::Relaxed);
                    waiting.insert(key);
                    let after = Duration::from_millis(chance.below(50));
                    Outcome::Retry { after, attempts: delivery.attempts + 1, error: "not now".to_owned() }
                } else {
                    world.published.lock().unwrap().publish(&delivery.message);
                    Outcome::Done
                };
                outcomes.push(Settlement { token: delivery.token, outcome });
            }
            if !outcomes.is_empty() && chance.percent(8) && world.deaths.fetch_add(1, Ordering::Relaxed) < DEATHS_MAX {
                break;
            }
            // As the engine does: what could not be recorded now is recorded again.
            while let Err(error) = source.settle(&outcomes).await {
                assert!(error.is_transient(), "{error:?}");
                world.again.fetch_add(1, Ordering::Relaxed);
            }
        }
        drop(source);
        // Its lease runs out.
        let mut conn = Conn::new(world.opts.clone()).await.unwrap();
        conn.exec_drop("update postroom_lanes set expires_at = '1970-01-02' where owner = ?", (&owner,)).await.unwrap();
        conn.exec_drop("delete from postroom_relays where owner = ?", (&owner,)).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn four_relays_with_failures_and_deaths_lose_nothing_and_keep_each_key_in_order() {
    let seed = std::env::var("POSTROOM_TEST_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(20_261_124);
    println!("seed {seed}");
    let shop = Shop::create().await;
    shop.run("create table numbers (`key` varchar(20) primary key, n bigint not null default 0)").await;
    for key in 0..KEYS {
        shop.run(&format!("insert into numbers (`key`) values ('key-{key}')")).await;
    }
    let world = Arc::new(World {
        opts: shop.opts.clone(),
        published: Mutex::default(),
        over: AtomicBool::new(false),
        deaths: AtomicUsize::new(0),
        retried: AtomicUsize::new(0),
        again: AtomicUsize::new(0),
    });
    let relays: Vec<_> = (0..4).map(|n| tokio::spawn(relay(world.clone(), n, Chance::new(seed + n as u64)))).collect();
    let writers: Vec<_> = (0..4).map(|n| tokio::spawn(write(shop.opts.clone(), Chance::new(seed + 100 + n)))).collect();
    for writer in writers {
        writer.await.unwrap();
    }
    let numbers: Vec<(String, i64)> =
        shop.connect().await.query("select `key`, n from numbers where n > 0").await.unwrap();
    let all_is_out = || {
        let published = world.published.lock().unwrap();
        numbers.iter().all(|(key, n)| published.last.get(key) == Some(n))
    };
    let out = async {
        while !all_is_out() {
            assert!(!relays.iter().any(tokio::task::JoinHandle::is_finished), "a relay ended");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        // What is out is recorded too.
        let open = "select (select count(*) from postroom_parked)
                         + (select count(*) from postroom_outbox o join postroom_lanes l on l.lane = o.lane
                             where o.place is null or o.place > l.position)";
        while shop.connect().await.query_first(open).await.unwrap() != Some(0_i64) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(180), out).await.expect("a message is stuck");
    world.over.store(true, Ordering::Relaxed);
    for relay in relays {
        relay.await.unwrap();
    }
    let (deaths, retried) = (world.deaths.load(Ordering::Relaxed), world.retried.load(Ordering::Relaxed));
    // Such as after a deadlock.
    println!("{} records were written again", world.again.load(Ordering::Relaxed));
    println!("{deaths} deaths, {retried} retried, {} repeated", world.published.lock().unwrap().repeated);
    assert!(deaths > 2 && retried > 100, "the test does not test it");
}
