//! One schedule: a database, an exchange, writers, a consumer and two or three relays of its own, each relay behind proxies.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use postroom::{Deed, KeyDeed};
use postroom_postgres::{Connector, act_on_key, waiting_keys};
use postroom_testkit::chance::Chance;
use postroom_testkit::judge::{Violation, judge};
use postroom_testkit::postgres::Database;
use postroom_testkit::proxy::{Link, Proxy};
use tokio::task::JoinHandle;

use crate::rig::{ConsumerTask, KEYS, RelayProcess, Rig};
use crate::servers::Servers;
use crate::tally::Outcome;

const MESSAGES: usize = 3000;
/// Every place at which a relay can be told to die.
const CRASH_POINTS: &[&str] = &[
    "claim.read",
    "claim.parked",
    "publish.before",
    "publish.after",
    "settle.begin",
    "record.before_commit",
    "record.after_commit",
    "positions.before",
    "positions.after",
    "renew.after",
    "give_back.after",
    "release.before",
];

pub struct Cell {
    pub seed: u64,
    rig: Rig,
    chance: Chance,
    relays: Vec<Relay>,
    writers: Vec<JoinHandle<()>>,
    committed: Arc<AtomicUsize>,
    consumer: Option<ConsumerTask>,
    outcome: Outcome,
    /// Parks keys and lets them go on, all the time.
    operator: JoinHandle<()>,
    /// An unrelated transaction that stays open over the whole schedule.
    _long: Option<tokio_postgres::Client>,
}

struct Relay {
    name: String,
    store: Proxy,
    broker: Proxy,
    store_url: String,
    broker_url: String,
    process: Option<RelayProcess>,
}

/// The URL with another `HOST:PORT`.
fn through(url: &str, address: &str) -> String {
    let (before, after) = url.split_once('@').unwrap();
    let (_, path) = after.split_once('/').unwrap();
    format!("{before}@{address}/{path}")
}

fn target(url: &str) -> String {
    url.split_once('@').unwrap().1.split_once('/').unwrap().0.to_owned()
}

impl Relay {
    async fn new(rig: &Rig, index: usize) -> Self {
        let (store, broker) = (Proxy::to(&target(rig.database.url())).await, Proxy::to(&target(&rig.rabbitmq)).await);
        let (store_url, broker_url) =
            (through(rig.database.url(), &store.address()), through(&rig.rabbitmq, &broker.address()));
        let mut relay = Self { name: format!("relay-{index}"), store, broker, store_url, broker_url, process: None };
        relay.start(rig, &[]);
        relay
    }

    fn start(&mut self, rig: &Rig, variables: &[(&str, String)]) {
        self.process = Some(rig.relay_over(&self.name, &self.store_url, &self.broker_url, variables));
    }

    /// Starts again as a relay that will die at this place, and waits for that for a while; whether it did.
    fn die_at(&mut self, rig: &Rig, place: &str, times: u64, wait: Duration) -> bool {
        if let Some(mut process) = self.process.take() {
            process.kill();
        }
        let mark = rig.dir.join(format!("{}-{place}.mark", self.name));
        let _ = std::fs::remove_file(&mark);
        let variables =
            [("POSTROOM_CRASH_AT", format!("{place}:{times}")), ("POSTROOM_CRASH_MARK", mark.display().to_string())];
        self.start(rig, &variables);
        let Some(process) = &mut self.process else { return false };
        if place == "release.before" {
            // It dies on its way out. Sent before it has begun, the signal would just kill it.
            std::thread::sleep(wait / 2);
            process.signal("TERM");
        }
        let died = process.dies_within(wait);
        if !died {
            process.kill();
        }
        // It leaves its mark and aborts at once; the kill may come in between.
        let hit = mark.exists();
        self.start(rig, &[]);
        hit
    }
}

/// 69: it was started while the database was away, said so, and ended before it was told to.
fn stopped_well(code: Option<i32>) -> bool {
    matches!(code, Some(0 | 69))
}

fn deed() -> Deed {
    Deed { actor: "chaos".to_owned(), reason: "to see what happens".to_owned() }
}

/// An operator who cannot make up his mind. The database may be away; he tries again.
async fn operate(connector: Connector, mut chance: Chance) {
    loop {
        let key = format!("key-{}", chance.below(KEYS));
        let pause = Duration::from_millis(20 + chance.below(200));
        let _ = act_on_key(&connector, "orders", &key, KeyDeed::Park, &deed()).await;
        tokio::time::sleep(pause).await;
        let _ = act_on_key(&connector, "orders", &key, KeyDeed::Unpark, &deed()).await;
    }
}

impl Cell {
    pub async fn begin(seed: u64, servers: &Servers) -> Self {
        Self::begin_with(seed, servers, MESSAGES).await
    }

    pub async fn begin_with(seed: u64, servers: &Servers, messages: usize) -> Self {
        let mut chance = Chance::new(seed);
        let database = Database::create_on(&servers.postgres.url("postgres")).await;
        let mut rig = Rig::new(database, servers.rabbit.url()).await;
        rig.in_flight_max = [50, 300, 1000][chance.below(3) as usize];
        rig.sink = "publish_deadline_seconds = 3\n".to_owned();
        let long = if chance.percent(50) {
            let client = rig.database.connect().await;
            client.batch_execute("begin; select pg_current_xact_id()").await.unwrap();
            Some(client)
        } else {
            None
        };
        let consumer = rig.consume().await;
        let mut relays = Vec::new();
        for index in 0..2 + chance.below(2) as usize {
            relays.push(Relay::new(&rig, index).await);
        }
        let (committed, writers) = rig.write(messages, seed);
        let outcome = Outcome::default();
        let operator = tokio::spawn(operate(Connector::new(rig.database.url()).unwrap(), Chance::new(seed ^ 0x0b)));
        Self { operator, seed, rig, chance, relays, writers, committed, consumer: Some(consumer), outcome, _long: long }
    }

    /// Five to nine faults, one after the other, some of them overlapping.
    pub async fn trouble(mut self) -> Self {
        let faults = 5 + self.chance.below(5);
        for _ in 0..faults {
            let pause = 50 + self.chance.below(500);
            tokio::time::sleep(Duration::from_millis(pause)).await;
            self = tokio::task::spawn_blocking(move || {
                let what = self.fault();
                self.outcome.faults.push(what);
                self
            })
            .await
            .unwrap();
        }
        self
    }

    fn fault(&mut self) -> &'static str {
        let index = self.chance.below(self.relays.len() as u64) as usize;
        let chance = &mut self.chance;
        let relay = &mut self.relays[index];
        let short = Duration::from_millis(200 + chance.below(2300));
        match chance.below(12) {
            0 | 1 => {
                if let Some(mut process) = relay.process.take() {
                    process.kill();
                }
                relay.start(&self.rig, &[]);
                "relay kill -9"
            }
            2..=4 => {
                let place = CRASH_POINTS[chance.below(CRASH_POINTS.len() as u64) as usize];
                let times = 1 + chance.below(20);
                if relay.die_at(&self.rig, place, times, Duration::from_millis(1500)) {
                    self.outcome.crashed_at.push(place);
                    "relay dead at a crash point"
                } else {
                    "relay kill -9"
                }
            }
            5 => {
                // Longer than its lease of a second.
                if let Some(process) = &relay.process {
                    process.signal("STOP");
                    std::thread::sleep(Duration::from_millis(1200 + chance.below(1500)));
                    process.signal("CONT");
                }
                "relay paused beyond its lease"
            }
            6 => {
                if let Some(process) = relay.process.take() {
                    let (code, _) = process.terminate();
                    if !stopped_well(code) {
                        let found = format!("a relay told to stop ended with {code:?}");
                        self.outcome.violations.push(Violation { invariant: "I12", found });
                    }
                }
                relay.start(&self.rig, &[]);
                "relay SIGTERM"
            }
            7 => {
                if chance.percent(50) {
                    relay.store.reset()
                } else {
                    relay.broker.reset()
                }
                "link reset"
            }
            8 => {
                let link = if chance.percent(50) { &relay.store } else { &relay.broker };
                link.set(Link::BlackHole);
                std::thread::sleep(short);
                link.set(Link::Open);
                "link black"
            }
            9 | 10 => {
                let link = if chance.percent(50) { &relay.store } else { &relay.broker };
                link.set(Link::RepliesLost);
                std::thread::sleep(short);
                link.set(Link::Open);
                // What lost a reply never gets an answer again; the other end has to notice by itself, or be cut.
                if chance.percent(70) {
                    link.reset();
                }
                "replies lost"
            }
            _ => {
                let link = if chance.percent(50) { &relay.store } else { &relay.broker };
                link.set(Link::Throttled(20_000));
                std::thread::sleep(short);
                link.set(Link::Open);
                "link throttled"
            }
        }
    }

    pub async fn die_at_every_crash_point(mut self) -> (Self, Vec<&'static str>) {
        let missed = tokio::task::spawn_blocking(move || {
            let mut missed = Vec::new();
            // Alone it has every lane, and so it comes past every place.
            self.relays[1..].iter_mut().filter_map(|relay| relay.process.take()).for_each(|mut relay| relay.kill());
            for place in CRASH_POINTS {
                let began = Instant::now();
                let mut hit = false;
                while !hit && began.elapsed() < Duration::from_secs(60) {
                    self.outcome.faults.push("relay dead at a crash point");
                    // So many deaths in a row would make the relay go in steps of one message; that is tested elsewhere.
                    tokio::runtime::Handle::current().block_on(async {
                        let client = self.rig.database.connect().await;
                        client.batch_execute("update postroom.lanes set deaths = 0").await.unwrap();
                    });
                    if *place == "give_back.after" {
                        // It takes every lane while it is alone, and gives some back to those that come again.
                        let comes_again = std::thread::scope(|scope| {
                            let (first, others) = self.relays.split_at_mut(1);
                            let rig = &self.rig;
                            others
                                .iter_mut()
                                .filter_map(|relay| relay.process.take())
                                .for_each(|mut relay| relay.kill());
                            let others = scope.spawn(move || {
                                std::thread::sleep(Duration::from_secs(4));
                                others.iter_mut().for_each(|relay| relay.start(rig, &[]));
                            });
                            hit = first[0].die_at(rig, place, 1, Duration::from_secs(8));
                            others.join()
                        });
                        comes_again.unwrap();
                        continue;
                    }
                    hit = self.relays[0].die_at(&self.rig, place, 1, Duration::from_secs(5));
                }
                if !hit {
                    missed.push(*place);
                }
            }
            // Enough was written.
            self.committed.store(usize::MAX / 2, Ordering::Relaxed);
            (self, missed)
        });
        missed.await.unwrap()
    }

    pub fn heal(&mut self) {
        for relay in &self.relays {
            relay.store.set(Link::Open);
            relay.broker.set(Link::Open);
        }
        for relay in &mut self.relays {
            // What a supervisor does with one that could not begin while the database was away.
            if relay.process.as_mut().is_none_or(|process| process.dies_within(Duration::ZERO)) {
                relay.start(&self.rig, &[]);
            }
        }
    }

    /// Waits until everything has come to rest, and lets the judge look at it.
    pub async fn judge(mut self, server_faults: usize) -> Outcome {
        for writer in self.writers.drain(..) {
            writer.await.unwrap();
        }
        self.operator.abort();
        let connector = Connector::new(self.rig.database.url()).unwrap();
        for key in waiting_keys(&connector, None, 10_000).await.unwrap() {
            if key.waits_for == "parked" {
                act_on_key(&connector, &key.route, &key.key, KeyDeed::Unpark, &deed()).await.unwrap();
            }
        }
        self.rig.drained().await;
        self.rig.effective().await;
        for relay in &mut self.relays {
            if let Some(process) = relay.process.take() {
                let (code, _) = process.terminate();
                if !stopped_well(code) {
                    let found = format!("a relay told to stop ended with {code:?}");
                    self.outcome.violations.push(Violation { invariant: "I12", found });
                }
            }
        }
        if let Some(consumer) = self.consumer.take() {
            consumer.stop().await;
        }
        let faults = self.outcome.faults.len() + server_faults * self.relays.len();
        let history = self.rig.history(2 * faults * self.rig.in_flight_max, true).await;
        self.outcome.messages = history.committed.len();
        self.outcome.duplicates = history.stored.len().saturating_sub(history.committed.len());
        self.outcome.violations.extend(judge(&history));
        if !history.dead.is_empty() {
            let found = format!("{} messages are dead, and nobody ever refused one", history.dead.len());
            self.outcome.violations.push(Violation { invariant: "I7", found });
        }
        // A server that recovers looks at the files of every database; hundreds of them would make that the test.
        if self.outcome.violations.is_empty() {
            self.rig.database.drop().await;
        }
        self.outcome
    }
}
