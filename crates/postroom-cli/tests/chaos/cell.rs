//! One schedule: a database, an exchange, writers, a consumer and two or three relays of its own, each relay behind proxies.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use postroom::{Deed, KeyDeed, Operator, Retention, Sweep, WaitsFor};
use postroom_postgres::Database as Store;
use postroom_testkit::chance::Chance;
use postroom_testkit::judge::{Violation, judge};
use postroom_testkit::postgres::Database;
use postroom_testkit::proxy::Link;
use postroom_testkit::rabbitmq::{AuditQueue, QueueKind};
use tokio::task::JoinHandle;

use crate::audit_file::AuditFile;
use crate::relay::{CRASH_POINTS, Relay, TABLE, stopped_well, table_queue};
use crate::rig::{ConsumerTask, KEYS, Rig};
use crate::servers::Servers;
use crate::tally::Outcome;
use crate::writers::{self, Shared};
use crate::{faults, outbox_dump};

const MESSAGES: usize = 3000;
const PARKED_AT_ONCE: usize = 10;

pub struct Cell {
    pub seed: u64,
    pub rig: Rig,
    pub chance: Chance,
    pub relays: Vec<Relay>,
    writers: Vec<JoinHandle<()>>,
    /// What writers and faults have to do with each other.
    pub shared: Shared,
    consumer: Option<ConsumerTask>,
    pub outcome: Outcome,
    /// How many messages the relays may have read again for another reason than a crash.
    read_again: usize,
    /// The outbox was restored in place at least once.
    pub restored: bool,
    /// Order in the inbox table is assured.
    inbox_in_order: bool,
    /// Where relays write everything a second time; none: no small disk can be mounted.
    pub audit: Option<AuditFile>,
    /// URLs of the cell's database through poolers.
    pub pooled: [String; 2],
    /// RabbitMQ is under an alarm; meanwhile a supervisor kills relays that do not get on.
    under_alarm: Arc<AtomicBool>,
    /// Parks keys and lets them go on, all the time.
    operator: JoinHandle<()>,
    /// Removes what is finished, all the time.
    retention: Option<JoinHandle<()>>,
    /// An unrelated transaction that stays open over the whole schedule.
    _long: Option<tokio_postgres::Client>,
}

fn deed() -> Deed {
    Deed { actor: "chaos".to_owned(), reason: "to see what happens".to_owned() }
}

/// An operator who cannot make up his mind. The database may be away; he tries again.
async fn operate(store: Store, mut chance: Chance) {
    loop {
        // Enough of them that a relay that lives for a few seconds meets one.
        let keys: Vec<String> = (0..PARKED_AT_ONCE).map(|_| format!("key-{}", chance.below(KEYS))).collect();
        let pause = Duration::from_millis(20 + chance.below(200));
        for key in &keys {
            let _ = store.act_on_key("orders", key, KeyDeed::Park, &deed()).await;
        }
        tokio::time::sleep(pause).await;
        for key in &keys {
            let _ = store.act_on_key("orders", key, KeyDeed::Unpark, &deed()).await;
        }
    }
}

/// Whatever is written seems to be old, so that it may go as soon as it is finished.
const LONG_AGO: &str = "create function public.long_ago() returns trigger language plpgsql as $$
                        begin new.occurred_at := least(new.occurred_at, clock_timestamp() - interval '1 hour'); return new; end $$;
                        create trigger long_ago before insert on postroom.outbox for each row execute function public.long_ago()";

/// Retention that waits for nothing but what `postroom run` waits for: nothing is kept for a route that is not registered. The
/// database may be away, or being restored; it tries again.
async fn retain(store: Store, mut chance: Chance, routes: usize) {
    let retention = Retention { outbox: Some(Duration::from_secs(60)), ..Retention::default() };
    loop {
        if store.routes().await.map_or(0, |known| known.len()) < routes {
            tokio::time::sleep(Duration::from_millis(20)).await;
            continue;
        }
        let mut sweep = Sweep::begin(&retention);
        while !sweep.is_over() && store.retain(&retention, &mut sweep).await.is_ok() {}
        tokio::time::sleep(Duration::from_millis(20 + chance.below(300))).await;
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
        let long = if chance.percent(50) {
            let client = rig.database.connect().await;
            client.batch_execute("begin; select pg_current_xact_id()").await.unwrap();
            Some(client)
        } else {
            None
        };
        let consumer = rig.consume().await;
        // Declared before anything is published, so that it misses nothing.
        let kind = if chance.percent(50) { QueueKind::Classic } else { QueueKind::QuorumWithOneActive };
        AuditQueue::named(&rig.rabbitmq, &rig.exchange, "orders.#", &table_queue(&rig), kind).await;
        // docs/receiving.md
        let inbox_in_order = kind == QueueKind::Classic;
        let audit = AuditFile::on_a_small_disk(&rig.dir);
        let retention = if seed.is_multiple_of(2) {
            rig.database.connect().await.batch_execute(LONG_AGO).await.unwrap();
            let store = Store::new(rig.database.url()).unwrap();
            Some(tokio::spawn(retain(store, Chance::new(seed ^ 0x13), 1 + usize::from(audit.is_some()))))
        } else {
            None
        };
        let name = rig.database.url().rsplit('/').next().unwrap();
        let pooled = servers.poolers.each_ref().map(|pooler| pooler.url(name));
        let mut relays = Vec::new();
        for index in 0..2 + chance.below(2) as usize {
            relays.push(Relay::new(&rig, index, audit.as_ref().map(AuditFile::path)).await);
        }
        let (shared, writers) = writers::write(rig.database.url(), messages, seed);
        let outcome = Outcome::default();
        let operator = tokio::spawn(operate(Store::new(rig.database.url()).unwrap(), Chance::new(seed ^ 0x0b)));
        Self {
            seed,
            rig,
            chance,
            relays,
            writers,
            shared,
            consumer: Some(consumer),
            outcome,
            read_again: 0,
            restored: false,
            inbox_in_order,
            audit,
            pooled,
            under_alarm: servers.under_alarm.clone(),
            operator,
            retention,
            _long: long,
        }
    }

    /// Five to nine faults, one after the other, some of them overlapping; and kills as long as the broker is under an alarm.
    pub async fn trouble(mut self) -> Self {
        let mut faults = 5 + self.chance.below(5);
        loop {
            let killing = self.under_alarm.load(Ordering::Relaxed);
            if faults == 0 && !killing {
                return self;
            }
            let pause = if killing { 300 } else { 50 + self.chance.below(500) };
            tokio::time::sleep(Duration::from_millis(pause)).await;
            faults = if killing { faults } else { faults - 1 };
            self = tokio::task::spawn_blocking(move || {
                let what = if killing { faults::kill(&mut self) } else { faults::inflict_one(&mut self) };
                self.outcome.faults.push(if killing { "relay kill -9 under an alarm" } else { what });
                self
            })
            .await
            .unwrap();
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
                // Each try begins with a start and with the lanes of a dead process, so on a slow machine a longer one is needed,
                // not one more.
                let mut wait = Duration::from_secs(5);
                while !hit && began.elapsed() < Duration::from_secs(150) {
                    self.outcome.faults.push("relay dead at a crash point");
                    // So many deaths in a row would make the relay go in steps of one message; that is tested elsewhere.
                    tokio::runtime::Handle::current().block_on(async {
                        let client = self.rig.database.connect().await;
                        // In the order in which relays lock them.
                        let forget = "with l as materialized (select route, lane from postroom.lanes order by route, lane for update)
                                      update postroom.lanes o set deaths = 0 from l where o.route = l.route and o.lane = l.lane";
                        client.batch_execute(forget).await.unwrap();
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
                            hit = first[0].die_at(rig, place, 1, wait + Duration::from_secs(3));
                            others.join()
                        });
                        comes_again.unwrap();
                    } else {
                        hit = self.relays[0].die_at(&self.rig, place, 1, wait);
                    }
                    wait = wait * 3 / 2;
                }
                println!(
                    "{place}: reached {hit}, {:.1} s, {} committed",
                    began.elapsed().as_secs_f64(),
                    self.shared.committed.load(Ordering::Relaxed)
                );
                if !hit {
                    // Whether there was anything to do, and what held it up.
                    let before = self.shared.committed.load(Ordering::Relaxed);
                    std::thread::sleep(Duration::from_secs(5));
                    let stands = "select format('%s in the outbox, lanes held %s, parked %s, suspects %s, prepared %s, waiting for locks %s, old transactions: %s',
                                                (select count(*) from postroom.outbox), (select count(*) from postroom.lanes where owner is not null),
                                                (select count(*) from postroom.parked), (select count(*) from postroom.suspects),
                                                (select count(*) from pg_prepared_xacts),
                                                (select count(*) from pg_stat_activity where wait_event_type = 'Lock'),
                                                (select string_agg(concat_ws(' ', pid, state, wait_event, pg_blocking_pids(pid)::text, left(query, 60)), '; ')
                                                   from pg_stat_activity where xact_start < now() - interval '4 s'))";
                    let stands: String = tokio::runtime::Handle::current().block_on(async {
                        let client = self.rig.database.connect().await;
                        client.query_one(stands, &[]).await.unwrap().get(0)
                    });
                    let committed = self.shared.committed.load(Ordering::Relaxed);
                    println!("{place} was not reached: {before} committed, {committed} five seconds later; {stands}");
                    missed.push(*place);
                }
            }
            // Enough was written.
            self.shared.committed.store(usize::MAX / 2, Ordering::Relaxed);
            (self, missed)
        });
        missed.await.unwrap()
    }

    /// The relays may read everything again that is still in the table.
    pub fn everything_may_come_again(&mut self) {
        self.read_again += MESSAGES;
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

    /// Waits until every relay that runs has renewed: one that was started a moment ago does not listen for signals yet.
    async fn begun(&mut self) {
        let runs =
            |relay: &mut Relay| relay.process.as_mut().is_some_and(|process| !process.dies_within(Duration::ZERO));
        let running = self.relays.iter_mut().map(runs).filter(|runs| *runs).count() as i64;
        let client = self.rig.database.connect().await;
        let alive = "select count(distinct owner) from postroom.relays where expires_at > clock_timestamp()";
        self.rig
            .until("every relay has renewed", async || {
                client.query_one(alive, &[]).await.unwrap().get::<_, i64>(0) >= running
            })
            .await;
    }

    /// Waits until everything has come to rest, and lets the judge look at it.
    pub async fn judge(mut self, server_faults: usize) -> Outcome {
        for writer in self.writers.drain(..) {
            tokio::time::timeout(writers::STUCK, writer).await.expect("a writer is stuck").unwrap();
        }
        self.operator.abort();
        self.retention.iter().for_each(JoinHandle::abort);
        let store = Store::new(self.rig.database.url()).unwrap();
        // A server that had no space for its log ends by itself a moment later, and comes back by itself.
        self.rig
            .until("the database answers", async || store.waiting_keys(postroom::Side::Out, None, 1).await.is_ok())
            .await;
        for key in store.waiting_keys(postroom::Side::Out, None, 10_000).await.unwrap() {
            if key.waits_for == WaitsFor::Parked {
                store.act_on_key(&key.route, &key.key, KeyDeed::Unpark, &deed()).await.unwrap();
            }
        }
        self.rig.drained().await;
        self.rig.effective().await;
        self.table_filled().await;
        self.begun().await;
        for relay in &mut self.relays {
            if let Some(process) = relay.process.take() {
                let (code, _) = process.terminate();
                if !stopped_well(code, self.restored) {
                    let found = format!("a relay told to stop ended with {code:?}");
                    self.outcome.violations.push(Violation { invariant: "I12", found });
                }
            }
        }
        if let Some(consumer) = self.consumer.take() {
            consumer.stop().await;
        }
        let faults = self.outcome.faults.len() + server_faults * self.relays.len();
        let mut history = self.rig.history(2 * faults * self.rig.in_flight_max + self.read_again, true).await;
        history.files = self.audit.as_ref().map(AuditFile::lines);
        history.kept = Some(self.kept().await);
        self.outcome.messages = history.committed.len();
        self.outcome.duplicates = history.stored.len().saturating_sub(history.committed.len());
        // A lane may then reuse the number of another one, below a message that waits: nothing tells their order any more
        // (docs/decisions/0016).
        let order_is_known = !self.outcome.faults.contains(&"sequence set back");
        let inbox = |found: &Violation| found.found.contains("in the inbox table");
        let judged = judge(&history).into_iter();
        let in_order = self.inbox_in_order;
        let found = judged.filter(|found| found.invariant != "I4" || (order_is_known && (in_order || !inbox(found))));
        self.outcome.violations.extend(found);
        if !history.dead.is_empty() {
            let found = format!("{} messages are dead, and nobody ever refused one", history.dead.len());
            self.outcome.violations.push(Violation { invariant: "I7", found });
        }
        let refused = self.dead_consume().await;
        if let Some(first) = refused.first() {
            let found =
                format!("{} messages that nobody refused are dead at the receiving end: {first}", refused.len());
            self.outcome.violations.push(Violation { invariant: "I7", found });
        }
        if !self.outcome.violations.is_empty() {
            println!("seed {}: what is left of a violation is in {}", self.seed, self.rig.dir.display());
            outbox_dump::keep_a_copy(self.rig.database.url(), &self.rig.dir);
            if let Some(audit) = &self.audit {
                audit.keep_a_copy(&self.rig.dir);
            }
        }
        // A server that recovers looks at the files of every database; hundreds of them would make that the test.
        if self.outcome.violations.is_empty() {
            self.rig.database.drop().await;
        }
        self.outcome
    }

    /// Waits until the relays have kept every committed message in the inbox table.
    async fn table_filled(&self) {
        let client = self.rig.database.connect().await;
        self.rig
            .until("every message is in the inbox table", async || {
                let sql = "select (select count(*) from ledger)
                                  <= (select count(*) from postroom.inbox_messages where consumer = $1)
                                   + (select count(*) from postroom.dead_consume where consumer = $1)";
                client.query_one(sql, &[&TABLE]).await.unwrap().get(0)
            })
            .await;
    }

    /// Ids in the inbox table, in the order in which whoever takes them gets those of a key.
    async fn kept(&self) -> Vec<String> {
        let sql = "select message_id from postroom.inbox_messages where consumer = $1 order by seq";
        let rows = self.rig.database.connect().await.query(sql, &[&TABLE]).await.unwrap();
        rows.iter().map(|row| row.get::<_, uuid::Uuid>(0).to_string()).collect()
    }

    async fn dead_consume(&self) -> Vec<String> {
        let sql = "select format('%s by %s: %s', message_id, consumer, error) from postroom.dead_consume";
        self.rig.database.connect().await.query(sql, &[]).await.unwrap().iter().map(|row| row.get(0)).collect()
    }
}
