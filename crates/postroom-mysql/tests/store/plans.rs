//! What claims read at a million rows, by the server's own count: what they bring, and not what waits behind it or lies before it.

use std::time::Duration;

use mysql_async::Conn;
use mysql_async::prelude::Queryable;
use postroom::{Delivery, Outcome, Report, Route, Settlement, Source, Want};
use postroom_mysql::{MysqlSource, migrate, options_of};
use postroom_testkit::services::{MysqlServer, mysql_is_chosen};
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
    if mysql_is_chosen() {
        // docs/mysql.md says so.
        return println!("not on MySQL: a claim has been seen to read all of a million rows there");
    }
    let dir = surroundings::scratch("mariadb-plans").join("server");
    // Of its own, since it counts for everybody.
    let server = tokio::task::spawn_blocking(move || MysqlServer::start(&dir)).await.unwrap().unwrap();
    let mut admin = Conn::new(options_of(&server.url("mysql")).unwrap()).await.unwrap();
    admin.query_drop("create database shop").await.unwrap();
    let opts = options_of(&server.url("shop")).unwrap();
    migrate(&opts, Some(16)).await.unwrap();
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
