//! What claims read at a million rows, by the server's own count: what they bring, and not what waits behind it or lies before it.

use std::time::Duration;

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Opts};
use postroom::{Consumer, ConsumerStore, Delivery, Outcome, Report, Route, Session, Settle, Settlement, Source, Want};
use postroom_mysql::{Mysql, MysqlSession, MysqlSource, migrate, options_of};
use postroom_testkit::services::MysqlServer;
use postroom_testkit::surroundings;

/// Of one claim.
const MESSAGES: usize = 1000;
/// Rows that a statement may read for each message that it brings: of the outbox by two indexes, of what is parked, dead or blocked, of
/// lists of numbers that are handed to it.
const READ_EACH: u64 = 20;

/// Rows that the server has read for anybody.
async fn read(conn: &mut Conn) -> u64 {
    let counts: Vec<(String, u64)> = conn.query("show global status like 'Handler_read%'").await.unwrap();
    let counts = counts.into_iter().filter(|(name, _)| !name.ends_with("retry"));
    counts.map(|(_, count)| count).sum()
}

/// Ten digits by themselves six times make a million; every server knows how to join.
const NUMBERS: &str = "(select a.d + 10 * b.d + 100 * c.d + 1000 * e.d + 10000 * f.d + 100000 * g.d as n
                          from digits a, digits b, digits c, digits e, digits f, digits g) numbers";
const ID: &str = "concat(lpad(hex(n), 8, '0'), '-0000-7000-8000-000000000000')";

async fn filled(conn: &mut Conn) {
    conn.query_drop("create table digits (d int primary key)").await.unwrap();
    conn.query_drop("insert into digits values (0), (1), (2), (3), (4), (5), (6), (7), (8), (9)").await.unwrap();
    let sql = format!(
        "insert into postroom_outbox (id, topic, type, payload, `key`)
         select {ID}, 'orders', 'order.placed', 'x', concat('key-', n % 1000) from {NUMBERS}"
    );
    conn.query_drop(sql).await.unwrap();
}

/// A server of the test's own, since it counts for everybody; and a connection to count with.
async fn server(name: &str) -> (MysqlServer, Conn, Opts) {
    let dir = surroundings::scratch(name).join("server");
    let server = tokio::task::spawn_blocking(move || MysqlServer::start(&dir)).await.unwrap().unwrap();
    let mut admin = Conn::new(options_of(&server.url("mysql")).unwrap()).await.unwrap();
    admin.query_drop("create database shop").await.unwrap();
    let opts = options_of(&server.url("shop")).unwrap();
    migrate(&opts, Some(16)).await.unwrap();
    (server, admin, opts)
}

/// A thousand heads of keys, none of them due, and a million behind them.
async fn parked(conn: &mut Conn) {
    let sql = format!(
        "insert into postroom_parked (route, seq, lane, ordering_key, state, attempts, due_at, history, bytes, id, topic, type, payload,
                                      content_type, occurred_at)
         select 'orders', 10000000 + n, n % 16, concat('waits-', n % 1000), if(n < 1000, 'retry', 'queued'), 1,
                if(n < 1000, '2100-01-01', null), '[]', 1, {ID}, 'orders', 'x', 'x', 'x', utc_timestamp(6)
           from {NUMBERS}"
    );
    conn.query_drop(sql).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_claim_reads_does_not_grow_with_the_table() {
    let (_server, mut admin, opts) = server("mariadb-plans").await;
    let mut shop = Conn::new(opts.clone()).await.unwrap();
    filled(&mut shop).await;
    let route = Route { lease: Duration::from_secs(60), ..Route::new("orders") };
    let relay = MysqlSource::open(&opts, &route, "relay").await.unwrap().positions_every(Duration::ZERO);
    assert_eq!(relay.renew(&Report::default()).await.unwrap().held, 16);
    let (mut brought, mut most) = (0, (0, 0));
    // At the beginning of the backlog, and on the way.
    for _ in 0..20 {
        let before = read(&mut admin).await;
        let claimed = relay.claim(Want::up_to(MESSAGES)).await.unwrap();
        let claim = read(&mut admin).await - before;
        let done = |delivery: &Delivery| Settlement { token: delivery.token, outcome: Outcome::Done };
        let settlements: Vec<_> = claimed.deliveries.iter().map(done).collect();
        let before = read(&mut admin).await;
        relay.settle(&settlements).await.unwrap();
        let settle = read(&mut admin).await - before;
        brought += claimed.deliveries.len();
        most = (most.0.max(claim), most.1.max(settle));
    }
    println!("{brought} messages; most rows read by a claim {}, by what records it {}", most.0, most.1);
    assert!(brought >= 10 * MESSAGES, "{brought}");
    let bound = READ_EACH * MESSAGES as u64;
    assert!(most.0 < bound && most.1 < bound, "{most:?}");
    // What is parked is not read before it is due, and then not all of it.
    parked(&mut shop).await;
    let before = read(&mut admin).await;
    relay.claim(Want::up_to(MESSAGES)).await.unwrap();
    let nothing_due = read(&mut admin).await - before;
    shop.query_drop("update postroom_parked set due_at = '2000-01-01' where state = 'retry' and seq < 10000100")
        .await
        .unwrap();
    let before = read(&mut admin).await;
    let claimed = relay.claim(Want::up_to(MESSAGES)).await.unwrap();
    let some_due = read(&mut admin).await - before;
    let of_parked = claimed.deliveries.iter().filter(|delivery| delivery.message.kind == "x").count();
    println!(
        "a claim beside a million that are parked reads {nothing_due} rows, and {some_due} for {of_parked} that are due"
    );
    assert!(of_parked >= 100, "{of_parked}");
    assert!(nothing_due < bound && some_due < 2 * bound, "{nothing_due}, {some_due}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_take_reads_does_not_grow_with_the_queue() {
    let (_server, mut admin, opts) = server("mariadb-queues").await;
    let mut shop = Conn::new(opts.clone()).await.unwrap();
    shop.query_drop("create table digits (d int primary key)").await.unwrap();
    shop.query_drop("insert into digits values (0), (1), (2), (3), (4), (5), (6), (7), (8), (9)").await.unwrap();
    // Of one key 20,000; of each of 100 others 100.
    let sql = format!(
        "insert into postroom_inbox_messages (consumer, id, state, due_at, waits_since, ordering_key, `key`, topic, type, payload,
                                              content_type)
         select 'totals', lower({ID}), 'ready', utc_timestamp(6), utc_timestamp(6), k, k, 'orders', 'order.placed', 'x', 'x'
           from (select n, if(n < 20000, 'hot', concat('key-', n % 100)) as k from {NUMBERS}) all_of_them where n < 30000"
    );
    shop.query_drop(sql).await.unwrap();
    let consumer = Consumer::new("totals").unwrap();
    let mut session = MysqlSession::new(&opts);
    let mut take = async |admin: &mut Conn| {
        let before = read(admin).await;
        let mut tx = session.begin().await.unwrap();
        let taken = Mysql::take(&mut tx, &consumer, "worker", 1000, Duration::from_secs(600), 3).await.unwrap();
        Mysql::commit(tx).await.unwrap();
        (taken, read(admin).await - before)
    };
    // The first of each key, until all others are known to be behind it.
    let mut taken = Vec::new();
    for _ in 0..20 {
        taken.extend(take(&mut admin).await.0);
    }
    assert_eq!(taken.len(), 101);
    let (nothing, reads) = take(&mut admin).await;
    assert!(nothing.is_empty() && reads < 2_000, "{reads} rows read for nothing");
    let mut settling = MysqlSession::new(&opts);
    for (of, bound) in [("hot", 1), ("key-", 100)] {
        let before = read(&mut admin).await;
        let of_them =
            taken.iter().filter(|waiting| waiting.message.key.as_deref().is_some_and(|key| key.starts_with(of)));
        for waiting in of_them {
            let mut tx = settling.begin().await.unwrap();
            let settled = Mysql::settle(&mut tx, &consumer, waiting.message.id, waiting.claim, &Settle::Done).await;
            assert!(settled.unwrap());
            Mysql::commit(tx).await.unwrap();
        }
        let settled = read(&mut admin).await - before;
        let (next, reads) = take(&mut admin).await;
        println!("{of}: {settled} rows read to settle {bound}, {reads} to take {}", next.len());
        assert_eq!(next.len(), bound);
        // Claims that have expired too often are searched among all claims.
        let bound = READ_EACH * bound as u64 + 200;
        assert!(settled < bound && reads < bound, "{of}: {settled}, {reads}");
    }
}
