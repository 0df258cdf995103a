//! Four relays on one MariaDB: places and leases on lanes beside the algorithm of the articles, which marks rows.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Opts, TxOpts};
use postroom::{BoxError, Outcome, Report as Said, Route, Settlement, Source, Want};
use postroom_mysql::{MysqlSource, migrate, options_of};
use postroom_testkit::services::MysqlServer;
use postroom_testkit::surroundings;
use tokio::task::JoinSet;

use crate::measure::Report;
use crate::setup::{KEYS, PAYLOAD};

const RELAYS: usize = 4;
const BATCH: usize = 500;
/// What the server counted.
const COUNTERS: [&str; 6] = [
    "Innodb_row_lock_waits",
    "Innodb_deadlocks",
    "Handler_write",
    "Handler_update",
    "Handler_delete",
    "Innodb_os_log_written",
];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Rival {
    Places,
    Rows,
    RowsInOrder,
}

impl Rival {
    const ALL: [(Self, &'static str); 3] = [
        (Self::Places, "places, lanes by lease"),
        (Self::Rows, "rows marked and deleted, no order"),
        (Self::RowsInOrder, "rows marked and deleted, in the order of keys"),
    ];
}

/// The gate: each message once, and where order is promised, each key in order.
#[derive(Default)]
struct Gate {
    count: AtomicUsize,
    last: Mutex<HashMap<i64, i64>>,
    inversions: AtomicUsize,
}

impl Gate {
    fn publish(&self, numbers: impl Iterator<Item = i64>) {
        let mut last = self.last.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        for number in numbers {
            let last = last.entry(number % KEYS as i64).or_default();
            if number < *last {
                self.inversions.fetch_add(1, Ordering::Relaxed);
            }
            *last = number.max(*last);
            self.count.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Drains a backlog with four relays, each rival in turn.
pub async fn four_relays(report: &mut Report, messages: usize, rounds: usize) -> Result<(), BoxError> {
    let dir = surroundings::scratch("bench-mariadb").join("server");
    let server = tokio::task::spawn_blocking(move || MysqlServer::start(&dir)).await??;
    let mut figures: HashMap<&str, Vec<(String, Vec<f64>)>> = HashMap::new();
    for round in 0..rounds {
        for (place, (rival, name)) in Rival::ALL.into_iter().enumerate() {
            let opts = database(&server, &format!("bench_{round}_{place}"), rival, messages).await?;
            let mut admin = Conn::new(opts.clone()).await?;
            let before = counters(&mut admin).await?;
            let gate = Arc::new(Gate::default());
            let began = Instant::now();
            drain(&opts, rival, messages, &gate).await?;
            let took = began.elapsed().as_secs_f64();
            let after = counters(&mut admin).await?;
            let inversions = gate.inversions.load(Ordering::Relaxed);
            if gate.count.load(Ordering::Relaxed) != messages || (inversions > 0 && rival != Rival::Rows) {
                return Err(format!("{name}: {:?} of {messages} messages, {inversions} inversions", gate.count).into());
            }
            let rise =
                |counter: &str| after.get(counter).zip(before.get(counter)).map_or(0.0, |(now, then)| now - then);
            let changes = ["Handler_write", "Handler_update", "Handler_delete"].map(rise).iter().sum::<f64>();
            for (table, value) in [
                ("messages/s", messages as f64 / took),
                ("lock waits", rise("Innodb_row_lock_waits")),
                ("deadlocks", rise("Innodb_deadlocks")),
                ("row changes a message", changes / messages as f64),
                ("bytes of log a message", rise("Innodb_os_log_written") / messages as f64),
                ("inversions within keys", inversions as f64),
            ] {
                let rows = figures.entry(table).or_default();
                match rows.iter_mut().find(|(known, _)| known == name) {
                    Some((_, samples)) => samples.push(value),
                    None => rows.push((name.to_owned(), vec![value])),
                }
            }
        }
    }
    for unit in [
        "messages/s",
        "lock waits",
        "deadlocks",
        "row changes a message",
        "bytes of log a message",
        "inversions within keys",
    ] {
        let rows = figures.remove(unit).unwrap_or_default();
        report.table(format!("{RELAYS} relays drain {messages} messages of {PAYLOAD} B from one MariaDB"), unit, rows);
    }
    Ok(())
}

async fn database(server: &MysqlServer, name: &str, rival: Rival, messages: usize) -> Result<Opts, BoxError> {
    let mut admin = Conn::new(options_of(&server.url("mysql"))?).await?;
    admin.query_drop(format!("create database {name}")).await?;
    let opts = options_of(&server.url(name))?;
    let mut conn = Conn::new(opts.clone()).await?;
    if rival == Rival::Places {
        migrate(&opts, Some(16)).await?;
        let fill = format!(
            "insert into postroom_outbox (topic, type, payload, `key`, aggregate_version)
             select 'orders', 'order.placed', repeat('x', {PAYLOAD}), concat('key-', seq % {KEYS}), seq from seq_1_to_{messages}"
        );
        conn.query_drop(fill).await?;
        return Ok(opts);
    }
    conn.query_drop(
        "create table outbox_messages (
             id bigint not null auto_increment primary key, status tinyint not null default 0, token bigint, leased_until datetime(6),
             topic varchar(255) not null, type varchar(255) not null, payload longblob not null, order_key varchar(512) not null,
             number bigint not null, key claim (status, id), key in_order (order_key, id)) engine = InnoDB",
    )
    .await?;
    let fill = format!(
        "insert into outbox_messages (topic, type, payload, order_key, number)
         select 'orders', 'order.placed', repeat('x', {PAYLOAD}), concat('key-', seq % {KEYS}), seq from seq_1_to_{messages}"
    );
    conn.query_drop(fill).await?;
    Ok(opts)
}

async fn counters(conn: &mut Conn) -> Result<HashMap<String, f64>, BoxError> {
    let rows: Vec<(String, String)> = conn.query("show global status").await?;
    let wanted = rows.into_iter().filter(|(name, _)| COUNTERS.contains(&name.as_str()));
    Ok(wanted.map(|(name, value)| (name, value.parse().unwrap_or_default())).collect())
}

async fn drain(opts: &Opts, rival: Rival, messages: usize, gate: &Arc<Gate>) -> Result<(), BoxError> {
    let mut relays: JoinSet<Result<(), BoxError>> = JoinSet::new();
    let over = Arc::new(AtomicBool::new(false));
    for relay in 0..RELAYS {
        let (opts, gate, over) = (opts.clone(), gate.clone(), over.clone());
        relays.spawn(async move {
            match rival {
                Rival::Places => by_places(&opts, relay, messages, &gate, &over).await,
                Rival::Rows => by_rows(&opts, relay, false, messages, &gate, &over).await,
                Rival::RowsInOrder => by_rows(&opts, relay, true, messages, &gate, &over).await,
            }
        });
    }
    while let Some(ended) = relays.join_next().await {
        ended??;
    }
    Ok(())
}

fn is_over(gate: &Gate, messages: usize, over: &AtomicBool) -> bool {
    if gate.count.load(Ordering::Relaxed) >= messages {
        over.store(true, Ordering::Relaxed);
    }
    over.load(Ordering::Relaxed)
}

async fn by_places(opts: &Opts, relay: usize, messages: usize, gate: &Gate, over: &AtomicBool) -> Result<(), BoxError> {
    let source = MysqlSource::open(opts, &Route::new("bench"), format!("relay-{relay}")).await?;
    let mut renewed: Option<Instant> = None;
    loop {
        // Often at first, until each relay has its share.
        if renewed.is_none_or(|at| at.elapsed() > Duration::from_millis(500)) {
            source.renew(&Said::default()).await?;
            renewed = Some(Instant::now());
        }
        let claimed = source.claim(Want::up_to(BATCH)).await?;
        gate.publish(claimed.deliveries.iter().filter_map(|delivery| delivery.message.aggregate_version));
        let done =
            claimed.deliveries.iter().map(|delivery| Settlement { token: delivery.token, outcome: Outcome::Done });
        source.settle(&done.collect::<Vec<_>>()).await?;
        if claimed.deliveries.is_empty() {
            if is_over(gate, messages, over) {
                source.release().await?;
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// The claim of the articles: rows are locked, marked with a lease in a short transaction, and deleted when they are out.
async fn by_rows(
    opts: &Opts,
    relay: usize,
    ordered: bool,
    messages: usize,
    gate: &Gate,
    over: &AtomicBool,
) -> Result<(), BoxError> {
    let mut conn = Conn::new(opts.clone()).await?;
    conn.query_drop("set session transaction isolation level read committed").await?;
    let first = "and not exists (select 1 from outbox_messages e where e.order_key = m.order_key and e.id < m.id)";
    let claim = format!(
        "select m.id, m.number, m.payload from outbox_messages m where m.status = 0 {} order by m.id limit {BATCH} for update skip locked",
        if ordered { first } else { "" }
    );
    for token in 0.. {
        let token = token * RELAYS as i64 + relay as i64;
        let mut tx = conn.start_transaction(TxOpts::default()).await?;
        let rows: Vec<(i64, i64, Vec<u8>)> = tx.query(&claim).await?;
        if rows.is_empty() {
            tx.rollback().await?;
            if is_over(gate, messages, over) {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
            continue;
        }
        let ids: Vec<String> = rows.iter().map(|(id, _, _)| id.to_string()).collect();
        let ids = ids.join(",");
        let mark = format!(
            "update outbox_messages set status = 9, token = {token}, leased_until = utc_timestamp(6) + interval 30 second where id in ({ids})"
        );
        tx.query_drop(mark).await?;
        tx.commit().await?;
        gate.publish(rows.iter().map(|(_, number, _)| *number));
        conn.query_drop(format!("delete from outbox_messages where id in ({ids}) and token = {token}")).await?;
    }
    Ok(())
}
