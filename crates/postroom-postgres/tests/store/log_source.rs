//! The log source against a real PostgreSQL: many writers, every kind of pause, rollbacks, restarts.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use postroom::{MessageId, Operator, Retention, Source, Sweep, Token};
use postroom_testkit::chance::Chance;
use postroom_testkit::postgres::Database;
use tokio::time::sleep;
use tokio_postgres::Client;

use crate::setup::{done, prepared, source, store, want};

const WRITERS: u64 = 12;
const KEYS: u64 = 60;
const MESSAGES: usize = 200_000;

/// One message: takes the key's row lock, its number, notes it in the ledger, enqueues it.
const WRITE: &str = "with k as (update numbers set n = n + 1 where key = $1 returning n),
                          l as (insert into ledger select $2, $1, n from k)
                     select postroom.enqueue('orders', 'order.placed', int8send(n), key => $1, id => $2) from k";

async fn write(database: Database, writer: u64, seed: u64, committed: Arc<AtomicUsize>, messages: usize) {
    let mut chance = Chance::new(seed * 1000 + writer);
    let client = database.connect().await;
    let statement = client.prepare(WRITE).await.unwrap();
    while committed.load(Ordering::Relaxed) < messages {
        client.batch_execute("begin").await.unwrap();
        if chance.percent(50) {
            client.query("select pg_current_xact_id()", &[]).await.unwrap();
        }
        if chance.percent(10) {
            sleep(Duration::from_micros(chance.below(15_000))).await;
        }
        // Now and then a large transaction, whose rows do not fit into one read when they come late. Only its first
        // message has a key that others wait for.
        let count = if chance.percent(1) { 300 } else { 1 + chance.below(20) };
        let mut keys: Vec<u64> = (0..count.min(20)).map(|_| chance.below(KEYS)).collect();
        // Locks in one order, so that writers do not deadlock.
        keys.sort_unstable();
        let own = (20..count).map(|_| format!("own-{writer}"));
        let keys = keys.into_iter().map(|key| format!("key-{key:02}")).chain(own);
        for key in keys {
            client.query(&statement, &[&key, MessageId::new().as_uuid()]).await.unwrap();
            if chance.percent(1) {
                sleep(Duration::from_micros(chance.below(3_000))).await;
            }
        }
        if chance.percent(10) {
            sleep(Duration::from_micros(chance.below(20_000))).await;
        }
        if chance.percent(1) {
            sleep(Duration::from_millis(150)).await;
        }
        if chance.percent(10) {
            client.batch_execute("rollback").await.unwrap();
        } else {
            client.batch_execute("commit").await.unwrap();
            committed.fetch_add(count as usize, Ordering::Relaxed);
        }
    }
}

/// What the reader saw, checked as it comes.
#[derive(Default)]
struct Seen {
    ids: HashSet<MessageId>,
    newest: HashMap<String, i64>,
    /// Not consumed by the stored position when the reader was restarted: what was seen of these may come once more.
    repeatable: HashSet<MessageId>,
    repeated: usize,
}

impl Seen {
    fn take(&mut self, delivery: &postroom::Delivery) {
        let id = delivery.message.id;
        if !self.ids.insert(id) {
            assert!(self.repeatable.remove(&id), "I3: {id} came twice without a restart");
            self.repeated += 1;
            return;
        }
        let number = i64::from_be_bytes(delivery.message.payload.as_ref().try_into().unwrap());
        let newest = self.newest.entry(delivery.message.key.clone().unwrap()).or_default();
        assert!(number > *newest, "I4: {number} of {:?} came after {newest}", delivery.message.key);
        *newest = number;
    }
}

/// What the stored positions have not consumed, by their definition and not by the code that reads.
async fn unconsumed(client: &Client) -> HashSet<MessageId> {
    let sql = "select o.id from postroom.outbox o join postroom.lanes l on l.lane = o.lane
                where not (o.seq <= l.position_seq and pg_visible_in_snapshot(o.xid, l.position_snapshot))
                  and not coalesce(o.seq <= l.catch_up_seq and pg_visible_in_snapshot(o.xid, l.catch_up_snapshot), false)";
    client.query(sql, &[]).await.unwrap().iter().map(|row| MessageId::from(row.get::<_, uuid::Uuid>(0))).collect()
}

/// Whatever is written seems to be old, so that it may go as soon as it is finished.
const LONG_AGO: &str = "create function public.long_ago() returns trigger language plpgsql as $$
                        begin new.occurred_at := new.occurred_at - interval '1 hour'; return new; end $$;
                        create trigger long_ago before insert on postroom.outbox for each row execute function public.long_ago()";

/// Removes what is finished, all the time.
async fn retain(database: Database, removed: Arc<AtomicUsize>) {
    let retention = Retention { outbox: Some(Duration::from_secs(60)), ..Retention::default() };
    let store = store(&database);
    loop {
        let mut sweep = Sweep::begin(&retention);
        while !sweep.is_over() {
            let step = store.retain(&retention, &mut sweep).await.unwrap();
            removed.fetch_add(step.outbox as usize, Ordering::Relaxed);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_committed_message_is_read_exactly_once() {
    read_exactly_once(MESSAGES, false).await;
}

/// Every transaction is older than the retention, and many are still open when what came after them is removed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_committed_message_is_read_exactly_once_while_retention_removes_what_is_finished() {
    read_exactly_once(MESSAGES / 2, true).await;
}

async fn read_exactly_once(messages: usize, retained: bool) {
    let seed = std::env::var("POSTROOM_TEST_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(20_261_121);
    println!("seed {seed}");
    let database = prepared().await;
    let setup = database.connect().await;
    setup
        .batch_execute(
            "create table numbers (key text primary key, n bigint not null default 0);
             insert into numbers (key) select 'key-' || to_char(n, 'FM00') from generate_series(0, 99) n;
             insert into numbers (key) select 'own-' || n from generate_series(0, 99) n;
             create table ledger (id uuid, key text, n bigint);",
        )
        .await
        .unwrap();
    let (committed, removed) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let mut reader = source(&database, "reader-0").await;
    // It ends with the test.
    let mut retaining = tokio::task::JoinSet::new();
    if retained {
        setup.batch_execute(LONG_AGO).await.unwrap();
        retaining.spawn(retain(database.clone(), removed.clone()));
    }
    let write = |writer| write(database.clone(), writer, seed, committed.clone(), messages);
    let writers: Vec<_> = (0..WRITERS).map(|writer| tokio::spawn(write(writer))).collect();

    let mut chance = Chance::new(seed);
    let mut seen = Seen::default();
    let (mut late, mut catch_ups, mut restarts, mut claims) = (0, 0, 0, 0u64);
    let mut held: Vec<(Token, MessageId)> = Vec::new();
    let mut idle = 0;
    while idle < 3 {
        let finished = writers.iter().all(tokio::task::JoinHandle::is_finished);
        claims += 1;
        let limit = if chance.percent(60) { 1 + chance.below(40) } else { 1 + chance.below(800) };
        let claimed = reader.claim(want(limit as usize)).await.unwrap();
        for delivery in &claimed.deliveries {
            seen.take(delivery);
            held.push((delivery.token, delivery.message.id));
        }
        idle = if finished && claimed.deliveries.is_empty() && !claimed.more { idle + 1 } else { 0 };
        // Settled in any order, some later than others.
        if !held.is_empty() && chance.percent(70) {
            let count = 1 + chance.below(held.len() as u64) as usize;
            let from = chance.below((held.len() - count + 1) as u64) as usize;
            let settled: Vec<Token> = held.drain(from..from + count).map(|(token, _)| token).collect();
            reader.settle(&done(settled)).await.unwrap();
        }
        if claims.is_multiple_of(300) || held.len() > 5_000 {
            // A crash: what was not settled is forgotten, the next reader begins at the stored position.
            restarts += 1;
            late += reader.reads().late;
            catch_ups += reader.reads().catch_ups;
            drop(reader);
            setup
                .batch_execute("update postroom.lanes set expires_at = '-infinity'; delete from postroom.relays")
                .await
                .unwrap();
            seen.repeatable = unconsumed(&setup).await.intersection(&seen.ids).copied().collect();
            held.clear();
            reader = source(&database, &format!("reader-{restarts}")).await;
        }
    }
    for writer in writers {
        writer.await.unwrap();
    }
    late += reader.reads().late;
    catch_ups += reader.reads().catch_ups;

    let rows = setup.query("select id from ledger", &[]).await.unwrap();
    let ledger: HashSet<MessageId> = rows.iter().map(|row| MessageId::from(row.get::<_, uuid::Uuid>(0))).collect();
    println!(
        "{} committed, {} read, {late} of them late, {catch_ups} catch-ups, {restarts} restarts, {} repeated, {claims} claims",
        ledger.len(),
        seen.ids.len(),
        seen.repeated
    );
    assert!(ledger.len() >= messages);
    let lost = ledger.difference(&seen.ids).count();
    assert_eq!(lost, 0, "I1: {lost} committed messages were never read");
    assert_eq!(seen.ids.difference(&ledger).count(), 0, "I2: a message was read that was never committed");
    if let Some(Err(error)) = retaining.try_join_next() {
        panic!("retention failed: {error}");
    }
    let removed = removed.load(Ordering::Relaxed);
    assert!(!retained || removed > messages / 10, "only {removed} were removed meanwhile: the test does not test it");
    assert!(late > 1_000, "the late path was hardly used ({late}): the test does not test it");
    assert!(catch_ups > 10, "late rows never outgrew a read ({catch_ups}): the test does not test it");
    assert!(restarts > 5);
}
