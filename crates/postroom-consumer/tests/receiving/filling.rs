//! Several fillers of one inbox: one fills, the others stand by, and one that was replaced keeps nothing.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use postroom::{
    Admitted, Consumer, ConsumerStore, FillerStore, Keep, Message, Session, SessionKeeper, Subscription, Tenure,
    Transactions,
};
use postroom_brokers::in_process::InProcessBroker;
use postroom_consumer::{FillCounters, Filler};
use postroom_postgres::{Connector, Postgres, PostgresSession, SqlxPostgres, SqlxSession};
use postroom_sqlite::{Sqlite, SqliteSession};
use postroom_testkit::postgres::Database;
use postroom_testkit::services::PostgresServer;
use postroom_testkit::surroundings;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::setup::{broker, postgres, publish, told, until};

const LEASE: Duration = Duration::from_secs(60);

fn billing() -> Consumer {
    Consumer::new("billing").unwrap()
}

async fn take<F: FillerStore + ConsumerStore>(session: &mut impl Session<F>, owner: &str) -> Option<Tenure> {
    let mut tx = session.begin().await.unwrap();
    let seen = F::filler(&mut tx, &billing()).await.unwrap();
    let taken = F::take_inbox(&mut tx, &billing(), owner, LEASE, seen.as_ref()).await.unwrap();
    F::commit(tx).await.unwrap();
    taken
}

/// What every store promises about the lease.
async fn one_at_a_time<F: FillerStore + ConsumerStore, S: Session<F>>(open: impl Fn() -> S) {
    let (mut one, mut other) = (open(), open());
    let first = take::<F>(&mut one, "one").await.unwrap();
    let mut tx = one.begin().await.unwrap();
    let seen = F::filler(&mut tx, &billing()).await.unwrap().unwrap();
    assert_eq!((seen.owner.as_deref(), seen.epoch, seen.lease, seen.free), (Some("one"), first.epoch, LEASE, false));
    drop(tx);

    // A renewal between the look and the taking: the look is worth nothing.
    let mut tx = one.begin().await.unwrap();
    // The clock of a store has ticks.
    let mut renewed = seen.clone();
    while renewed.renewal == seen.renewal {
        assert!(F::renew_inbox(&mut tx, &billing(), &first, LEASE, &Default::default()).await.unwrap());
        renewed = F::filler(&mut tx, &billing()).await.unwrap().unwrap();
    }
    F::commit(tx).await.unwrap();
    let mut tx = other.begin().await.unwrap();
    assert_eq!(F::take_inbox(&mut tx, &billing(), "other", LEASE, Some(&seen)).await.unwrap(), None);
    drop(tx);

    // Taken over: the first one is fenced, can neither renew nor give back, and keeps nothing.
    let second = take::<F>(&mut other, "other").await.unwrap();
    assert!(second.epoch > first.epoch);
    let mut tx = one.begin().await.unwrap();
    assert!(!F::renew_inbox(&mut tx, &billing(), &first, LEASE, &Default::default()).await.unwrap());
    F::leave_inbox(&mut tx, &billing(), &first).await.unwrap();
    assert!(!F::fence_inbox(&mut tx, &billing(), &first).await.unwrap(), "it would keep messages");
    F::commit(tx).await.unwrap();
    let mut tx = other.begin().await.unwrap();
    assert!(F::fence_inbox(&mut tx, &billing(), &second).await.unwrap());
    drop(tx);

    // Given back it is free at once, and the epoch goes on.
    let mut tx = other.begin().await.unwrap();
    F::leave_inbox(&mut tx, &billing(), &second).await.unwrap();
    F::commit(tx).await.unwrap();
    let mut tx = one.begin().await.unwrap();
    let seen = F::filler(&mut tx, &billing()).await.unwrap().unwrap();
    assert_eq!((seen.owner, seen.free), (None, true));
    drop(tx);
    let third = take::<F>(&mut one, "one").await.unwrap();
    assert!(third.epoch > second.epoch);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_fills_at_a_time_and_a_stale_tenure_is_fenced() {
    let database = postgres().await;
    let connector = Connector::new(database.url()).unwrap();
    one_at_a_time::<Postgres, _>(|| PostgresSession::new(connector.clone())).await;
    let database = postgres().await;
    let pool = sqlx::postgres::PgPoolOptions::new().connect(database.url()).await.unwrap();
    one_at_a_time::<SqlxPostgres, _>(|| SqlxSession::new(pool.clone())).await;
    let path = surroundings::scratch("filling").join("inbox.db");
    postroom_sqlite::migrate(&mut postroom_sqlite::connect(&path).unwrap()).unwrap();
    one_at_a_time::<Sqlite, _>(|| SqliteSession::new(&path)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_takeover_waits_for_a_transaction_that_passed_its_fence_and_renewals_do_not() {
    let database = postgres().await;
    let client = database.connect().await;
    let connector = Connector::new(database.url()).unwrap();
    let open = || PostgresSession::new(connector.clone());
    let (mut zombie, mut renewer) = (open(), open());
    let old = take::<Postgres>(&mut zombie, "zombie").await.unwrap();
    let mut tx = zombie.begin().await.unwrap();
    assert!(Postgres::fence_inbox(&mut tx, &billing(), &old).await.unwrap());
    let kept = told("a", "1");
    let arrival = [(kept.id, kept.key.clone())];
    assert_eq!(Postgres::admit(&mut tx, &billing(), &arrival).await.unwrap(), [Admitted::New]);
    Postgres::keep(&mut tx, &billing(), &[kept], Keep::Ready).await.unwrap();

    let mut renewal = renewer.begin().await.unwrap();
    assert!(
        Postgres::renew_inbox(&mut renewal, &billing(), &old, LEASE, &Default::default()).await.unwrap(),
        "it is not held up"
    );
    Postgres::commit(renewal).await.unwrap();

    let mut other = open();
    let takeover = tokio::spawn(async move { take::<Postgres>(&mut other, "other").await });
    let waits =
        "select count(*) > 0 from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()";
    until(&client, waits).await;
    assert!(!takeover.is_finished());
    Postgres::commit(tx).await.unwrap();
    let new = takeover.await.unwrap().unwrap();
    assert!(new.epoch > old.epoch);
    let kept: i64 = client.query_one("select count(*) from postroom.inbox_messages", &[]).await.unwrap().get(0);
    assert_eq!(kept, 1, "what it kept was committed before anybody else could begin");

    // One that hangs in its transaction holds the takeover up for five seconds, not for ever.
    let mut hung = open();
    let tenure = take::<Postgres>(&mut hung, "hung").await.unwrap();
    let mut tx = hung.begin().await.unwrap();
    assert!(Postgres::fence_inbox(&mut tx, &billing(), &tenure).await.unwrap());
    let mut other = open();
    while take_patiently(&mut other).await.is_none() {}
    drop(tx);

    // Nor does one that hangs while it takes the inbox, or while it renews its lease.
    let mut tx = hung.begin().await.unwrap();
    let seen = Postgres::filler(&mut tx, &billing()).await.unwrap();
    assert!(Postgres::take_inbox(&mut tx, &billing(), "hung", LEASE, seen.as_ref()).await.unwrap().is_some());
    while take_patiently(&mut other).await.is_none() {}
    drop(tx);
    let tenure = take::<Postgres>(&mut open(), "renews").await.unwrap();
    let mut renewing = open();
    let mut tx = renewing.begin().await.unwrap();
    assert!(Postgres::renew_inbox(&mut tx, &billing(), &tenure, LEASE, &Default::default()).await.unwrap());
    while take_patiently(&mut other).await.is_none() {}
    drop(tx);
}

/// A lock timeout is no answer.
async fn take_patiently(session: &mut PostgresSession) -> Option<Tenure> {
    let mut tx = session.begin().await.ok()?;
    let seen = Postgres::filler(&mut tx, &billing()).await.ok()?;
    let taken = Postgres::take_inbox(&mut tx, &billing(), "other", LEASE, seen.as_ref()).await.ok()?;
    Postgres::commit(tx).await.ok()?;
    taken
}

/// A filler of the queue `q`, and how often it subscribed.
struct Filling {
    stop: watch::Sender<bool>,
    task: JoinHandle<FillCounters>,
    subscribed: Arc<AtomicUsize>,
}

impl Filling {
    fn start<F: ConsumerStore, S: Session<F>>(
        broker: &InProcessBroker,
        owner: &str,
        open: impl Fn() -> S + Send + Sync + 'static,
    ) -> Self
    where
        for<'c> <F as Transactions>::Tx<'c>: Send,
    {
        let (stop, mut stopped) = watch::channel(false);
        let subscribed = Arc::new(AtomicUsize::new(0));
        let (broker, count) = (broker.clone(), subscribed.clone());
        let subscribe = move || {
            count.fetch_add(1, Ordering::SeqCst);
            Ok(Arc::new(broker.subscribe("q", 100)) as Arc<dyn Subscription>)
        };
        let filler =
            Filler::new(subscribe, SessionKeeper::<F>::new(billing(), open), owner).lease(Duration::from_secs(1));
        let stopped = async move {
            let _ = stopped.wait_for(|stopped| *stopped).await;
        };
        let task = tokio::spawn(async move { filler.run(stopped).await.unwrap() });
        Self { stop, task, subscribed }
    }

    fn on(database: &Database, broker: &InProcessBroker, owner: &str) -> Self {
        let connector = Connector::new(database.url()).unwrap();
        Self::start::<Postgres, _>(broker, owner, move || PostgresSession::new(connector.clone()))
    }

    fn on_file(path: &Path, broker: &InProcessBroker, owner: &str) -> Self {
        let path = path.to_owned();
        Self::start::<Sqlite, _>(broker, owner, move || SqliteSession::new(&path))
    }

    fn subscribed(&self) -> usize {
        self.subscribed.load(Ordering::SeqCst)
    }

    async fn stop(self) -> FillCounters {
        self.stop.send(true).unwrap();
        self.task.await.unwrap()
    }
}

async fn settled(broker: &InProcessBroker) {
    while broker.unsettled("q") > 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn numbered(numbers: std::ops::Range<usize>) -> Vec<Message> {
    numbers.map(|n| told(&format!("k{}", n % 7), &n.to_string())).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_fillers_one_is_subscribed_and_the_other_takes_over_when_it_stops_or_dies() {
    let (database, broker) = (postgres().await, broker());
    let client = database.connect().await;
    let first = Filling::on(&database, &broker, "first");
    publish(&broker, numbered(0..500)).await;
    settled(&broker).await;
    let second = Filling::on(&database, &broker, "second");
    publish(&broker, numbered(500..1000)).await;
    settled(&broker).await;
    // Long enough for the second one to have looked.
    let renewed = "select epoch = 1 and owner = 'first' and expires_at > clock_timestamp() from postroom.inbox_fillers";
    for _ in 0..3 {
        tokio::time::sleep(Duration::from_millis(400)).await;
        assert_eq!((first.subscribed(), second.subscribed()), (1, 0), "it stands by");
        until(&client, renewed).await;
    }
    assert_eq!(first.stop().await.kept, 1000);
    publish(&broker, numbered(1000..1500)).await;
    settled(&broker).await;
    // As a crash does it: the lease has to expire.
    second.task.abort();
    let third = Filling::on(&database, &broker, "third");
    publish(&broker, numbered(1500..2000)).await;
    settled(&broker).await;
    assert_eq!(third.stop().await.fenced, 0);
    until(&client, "select owner is null and epoch = 3 from postroom.inbox_fillers").await;
    let inverted =
        "select count(*) from (select convert_from(payload, 'UTF8')::int as n, lag(convert_from(payload, 'UTF8')::int)
                      over (partition by key order by seq) as before from postroom.inbox_messages) m where before > n";
    assert_eq!(client.query_one(inverted, &[]).await.unwrap().get::<_, i64>(0), 0, "order within a key");
    until(&client, "select count(*) = 2000 from postroom.inbox_messages").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_while_the_inbox_is_being_taken_gives_it_back() {
    let server = PostgresServer::start(&surroundings::scratch("taking").join("postgres")).unwrap();
    let database = Database::create_on(&server.url("postgres")).await;
    postroom_postgres::migrate(&Connector::new(database.url()).unwrap(), 4).await.unwrap();
    let broker = broker();
    // The taking's commit waits for a standby that is not there.
    server.sql("alter system set synchronous_standby_names = 'nobody'").unwrap();
    server.sql("select pg_reload_conf()").unwrap();
    let filling = Filling::on(&database, &broker, "one");
    let observer = database.connect().await;
    let commits = "select count(*) > 0 from pg_stat_activity where wait_event = 'SyncRep'";
    until(&observer, commits).await;
    filling.stop.send(true).unwrap();
    // A filler that leaves without an answer does it now.
    tokio::time::sleep(Duration::from_millis(200)).await;
    server.forget_standby().unwrap();
    filling.task.await.unwrap();
    until(&observer, "select count(*) = 0 from pg_stat_activity where wait_event = 'SyncRep'").await;
    until(&observer, "select count(*) = 1 from postroom.inbox_fillers").await;
    let owner: Option<String> =
        observer.query_one("select owner from postroom.inbox_fillers", &[]).await.unwrap().get(0);
    assert_eq!(owner, None, "nobody would fill it before the lease ends");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_fillers_of_one_file_the_other_stands_by_too() {
    let path = surroundings::scratch("filling").join("inbox.db");
    let mut file = postroom_sqlite::connect(&path).unwrap();
    postroom_sqlite::migrate(&mut file).unwrap();
    let broker = broker();
    let first = Filling::on_file(&path, &broker, "first");
    publish(&broker, numbered(0..100)).await;
    settled(&broker).await;
    let second = Filling::on_file(&path, &broker, "second");
    publish(&broker, numbered(100..200)).await;
    settled(&broker).await;
    assert_eq!(second.subscribed(), 0);
    assert_eq!(first.stop().await.kept, 200);
    publish(&broker, numbered(200..300)).await;
    settled(&broker).await;
    assert_eq!(second.stop().await.kept, 100);
    let rows: i64 = file.query_row("select count(*) from postroom_inbox_messages", [], |row| row.get(0)).unwrap();
    assert_eq!(rows, 300);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_filler_that_was_replaced_keeps_nothing_more() {
    let (database, broker) = (postgres().await, broker());
    let client = database.connect().await;
    let first = Filling::on(&database, &broker, "first");
    publish(&broker, numbered(0..10)).await;
    settled(&broker).await;
    // Taken over while it hangs; the other has a long lease.
    let steal = "update postroom.inbox_fillers set owner = 'other', epoch = epoch + 1, lease_ms = 3600000,
                        expires_at = clock_timestamp() + interval '1 hour'";
    client.execute(steal, &[]).await.unwrap();
    publish(&broker, numbered(10..500)).await;
    for _ in 0..20 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let kept: i64 = client.query_one("select count(*) from postroom.inbox_messages", &[]).await.unwrap().get(0);
        assert_eq!(kept, 10, "the other one fills");
    }
    assert_eq!(broker.unsettled("q"), 490, "the broker has them back");
    let counters = first.stop().await;
    assert_eq!(counters.kept, 10, "{counters:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_clock_that_goes_back_does_not_keep_a_dead_filler_in_its_place() {
    let (database, broker) = (postgres().await, broker());
    let client = database.connect().await;
    // As a filler left it that died before the clock went back an hour.
    let dead =
        "insert into postroom.inbox_fillers values ('billing', 'dead', 7, 1000, clock_timestamp() + interval '1 hour')";
    client.execute(dead, &[]).await.unwrap();
    let filling = Filling::on(&database, &broker, "alive");
    publish(&broker, numbered(0..10)).await;
    until(&client, "select count(*) = 10 from postroom.inbox_messages").await;
    assert_eq!(filling.stop().await.kept, 10);
    let epoch: i64 = client.query_one("select epoch from postroom.inbox_fillers", &[]).await.unwrap().get(0);
    assert_eq!(epoch, 8);
}
