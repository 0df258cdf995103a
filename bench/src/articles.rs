//! What the articles' ways cost beside ours on the same database: the writer's transaction on MariaDB, and the first article's own table on PostgreSQL, whose rows are taken
//! by an intake.

use std::collections::{BTreeMap, HashSet};
use std::time::{Duration, Instant};

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, TxOpts};
use postroom::{
    BoxError, Done, DoneWhen, Intake, Intakes, Literal, Mapping, Message, Outbox, Outcome, Report as Said, Route,
    Setting, Settlement, Source, Template, Want,
};
use postroom_mysql::{Mysql, migrate, options_of};
use postroom_postgres::{Database as Store, LogSource};
use postroom_testkit::postgres::Database;
use postroom_testkit::services::MysqlServer;
use postroom_testkit::surroundings;
use tokio_postgres::Client;
use uuid::Uuid;

use crate::measure::Report;
use crate::setup::PAYLOAD;

const TRANSACTIONS: usize = 2_000;
/// Rows that the article's relay fetches at once.
const BATCH: usize = 1_000;

#[derive(Clone, Copy)]
enum Way {
    NoMessage,
    Article,
    PlainInsert,
    Enqueue,
    Procedure,
}

const WAYS: [(Way, &str); 5] = [
    (Way::NoMessage, "business row alone"),
    (Way::Article, "and a row of the article's table"),
    (Way::PlainInsert, "and a row of postroom_outbox"),
    (Way::Enqueue, "and Mysql.enqueue"),
    (Way::Procedure, "and call postroom_enqueue"),
];

/// One writer, one business row and one message in each transaction, each way in turn. The gate: as many rows as transactions.
pub async fn writers_cost_on_mariadb(report: &mut Report, rounds: usize) -> Result<(), BoxError> {
    let dir = surroundings::scratch("bench-writers").join("server");
    let server = tokio::task::spawn_blocking(move || MysqlServer::start(&dir)).await??;
    let mut admin = Conn::new(options_of(&server.url("mysql"))?).await?;
    // As a server that loses nothing is set; the test servers are not.
    admin.query_drop("set global innodb_flush_log_at_trx_commit = 1").await?;
    admin.query_drop("create database writers").await?;
    let opts = options_of(&server.url("writers"))?;
    migrate(&opts, Some(16)).await?;
    let mut conn = Conn::new(opts).await?;
    conn.query_drop("create table orders (id bigint not null auto_increment primary key, total int not null)").await?;
    conn.query_drop(
        "create table outbox_messages (
             id char(36) character set ascii not null primary key, type varchar(255) not null, content longtext not null,
             occurred_on_utc datetime(6) not null, processed_on_utc datetime(6), error longtext, key unprocessed (processed_on_utc, occurred_on_utc))",
    )
    .await?;
    let mut rows: Vec<(String, Vec<f64>)> = WAYS.iter().map(|(_, name)| ((*name).to_owned(), Vec::new())).collect();
    for _ in 0..rounds {
        for ((way, name), (_, samples)) in WAYS.iter().zip(&mut rows) {
            for table in ["orders", "outbox_messages", "postroom_outbox"] {
                conn.query_drop(format!("delete from {table}")).await?;
            }
            let began = Instant::now();
            for number in 0..TRANSACTIONS {
                write(&mut conn, *way, number).await?;
            }
            samples.push(began.elapsed().as_secs_f64() * 1e6 / TRANSACTIONS as f64);
            let sql = "select (select count(*) from orders), (select count(*) from outbox_messages) + (select count(*) from postroom_outbox)";
            let found: Option<(usize, usize)> = conn.query_first(sql).await?;
            let messages = if matches!(way, Way::NoMessage) { 0 } else { TRANSACTIONS };
            if found != Some((TRANSACTIONS, messages)) {
                return Err(format!("{name}: {found:?} rows of {TRANSACTIONS}").into());
            }
        }
    }
    report.table(
        format!(
            "One writer on MariaDB, {TRANSACTIONS} transactions with a message of {PAYLOAD} B each, durable commits"
        ),
        "µs a transaction",
        rows,
    );
    Ok(())
}

async fn write(conn: &mut Conn, way: Way, number: usize) -> Result<(), BoxError> {
    let body = "x".repeat(PAYLOAD);
    let mut tx = conn.start_transaction(TxOpts::default()).await?;
    tx.exec_drop("insert into orders (total) values (?)", (number as i64,)).await?;
    let key = format!("key-{}", number % 5000);
    match way {
        Way::NoMessage => {}
        Way::Article => {
            let sql = "insert into outbox_messages (id, type, content, occurred_on_utc) values (uuid(), 'order.placed', ?, utc_timestamp(6))";
            tx.exec_drop(sql, (body,)).await?;
        }
        Way::PlainInsert => {
            let sql =
                "insert into postroom_outbox (topic, type, payload, `key`) values ('orders', 'order.placed', ?, ?)";
            tx.exec_drop(sql, (body, key)).await?;
        }
        Way::Enqueue => {
            let message = Message::new("orders", "order.placed", body.into_bytes()).key(key);
            Mysql.enqueue(&mut tx, std::slice::from_ref(&message)).await?;
        }
        Way::Procedure => {
            let sql = "call postroom_enqueue('orders', 'order.placed', ?, json_object('key', ?))";
            tx.exec_drop(sql, (body, key)).await?;
        }
    }
    Ok(tx.commit().await?)
}

const TABLE: &str = "create table outbox_messages (
    id uuid primary key, type varchar(255) not null, content jsonb not null, occurred_on_utc timestamptz not null,
    processed_on_utc timestamptz, error text);
    create index on outbox_messages (occurred_on_utc) where processed_on_utc is null";

async fn table(messages: usize) -> Result<(Database, Client), BoxError> {
    let database = Database::create().await;
    let client = database.connect().await;
    client.batch_execute(TABLE).await?;
    let fill = "insert into outbox_messages (id, type, content, occurred_on_utc)
                select gen_random_uuid(), 'order.placed', jsonb_build_object('n', n, 'text', repeat('x', $2::int)), clock_timestamp()
                  from generate_series(1, $1::bigint) n";
    client.execute(fill, &[&(messages as i64), &((PAYLOAD - 24) as i32)]).await?;
    client.batch_execute("vacuum (analyze)").await?;
    client.batch_execute("checkpoint").await?;
    Ok((database, client))
}

/// Nothing is published: what is compared is the work at the database. The gate: each row once, and each marked.
pub async fn a_table(report: &mut Report, messages: usize, rounds: usize) -> Result<(), BoxError> {
    let mut rows = vec![
        ("the article: rows locked, published and marked one by one".to_owned(), Vec::new()),
        ("the article, marking each batch by one statement".to_owned(), Vec::new()),
        ("postroom: rows taken in, sent, marked".to_owned(), Vec::new()),
    ];
    for _ in 0..rounds {
        for (way, (name, samples)) in rows.iter_mut().enumerate() {
            let (database, mut client) = table(messages).await?;
            let began = Instant::now();
            let seen = match way {
                0 => by_the_article(&mut client, true).await?,
                1 => by_the_article(&mut client, false).await?,
                _ => by_an_intake(&database, messages).await?,
            };
            samples.push(messages as f64 / began.elapsed().as_secs_f64());
            let sql = "select count(*) from outbox_messages where processed_on_utc is null";
            let unmarked: i64 = client.query_one(sql, &[]).await?.get(0);
            let distinct = seen.iter().collect::<HashSet<_>>().len();
            if seen.len() != messages || distinct != messages || unmarked != 0 {
                return Err(format!(
                    "{name}: {} sent, {distinct} of them different, {unmarked} not marked",
                    seen.len()
                )
                .into());
            }
        }
    }
    report.table(
        format!(
            "The first article's table on PostgreSQL: {messages} rows of {PAYLOAD} B, one relay, nothing is published"
        ),
        "messages/s",
        rows,
    );
    report.note("postroom copies each row into its outbox, keeps it until retention, and notes what became of it; the article's relay only sets a time");
    Ok(())
}

async fn by_the_article(client: &mut Client, one_by_one: bool) -> Result<Vec<Uuid>, BoxError> {
    let mut seen = Vec::new();
    loop {
        let tx = client.transaction().await?;
        let sql = format!(
            "select id, type, content::text from outbox_messages where processed_on_utc is null
              order by occurred_on_utc limit {BATCH} for update skip locked"
        );
        let rows = tx.query(&sql, &[]).await?;
        if rows.is_empty() {
            return Ok(seen);
        }
        let ids: Vec<Uuid> = rows.iter().map(|row| row.get(0)).collect();
        if one_by_one {
            let mark =
                tx.prepare("update outbox_messages set processed_on_utc = now(), error = null where id = $1").await?;
            for id in &ids {
                tx.execute(&mark, &[id]).await?;
            }
        } else {
            let mark = "update outbox_messages set processed_on_utc = now(), error = null where id = any ($1)";
            tx.execute(mark, &[&ids]).await?;
        }
        tx.commit().await?;
        seen.extend(ids);
    }
}

fn intake() -> Result<Intake, BoxError> {
    let template = |text: &str| text.parse::<Template>();
    Ok(Intake {
        name: "outbox".to_owned(),
        table: "outbox_messages".parse()?,
        row: None,
        order: vec!["occurred_on_utc".to_owned()],
        pending: vec![("processed_on_utc".to_owned(), vec![Literal::Null])],
        taken: Vec::new(),
        sent: Done::Set(vec![("processed_on_utc".to_owned(), Setting::Now), ("error".to_owned(), Setting::Null)]),
        dead: vec![("error".to_owned(), Setting::Error)],
        done: DoneWhen::Sent,
        message: Mapping {
            id: Some(template("${id}")?),
            topic: template("${type}")?,
            kind: template("${type}")?,
            payload: template("${content}")?,
            key: None,
            routing_key: None,
            content_type: None,
            headers: None,
            header: BTreeMap::new(),
            tenant_id: None,
            aggregate_type: None,
            aggregate_id: None,
            aggregate_version: None,
            occurred_at: Some(template("${occurred_on_utc}")?),
            visible_at: None,
        },
    })
}

/// As one process of `postroom run` does it: taking, relaying and marking at once.
async fn by_an_intake(database: &Database, messages: usize) -> Result<Vec<Uuid>, BoxError> {
    let (store, intake) = (Store::new(database.url())?, intake()?);
    postroom_postgres::migrate(store.connector(), 16).await?;
    let source = LogSource::open(&store, &Route::new("bench"), "relay").await?;
    let taking = async {
        let mut taken = 0;
        while taken < messages as u64 {
            let step = store.take_in(&intake, BATCH).await?;
            taken += step.taken;
            pause(step.taken == 0).await;
        }
        Ok::<_, BoxError>(())
    };
    let relaying = async {
        let mut seen = Vec::with_capacity(messages);
        let mut renewed: Option<Instant> = None;
        while seen.len() < messages {
            if renewed.is_none_or(|at| at.elapsed() > Duration::from_secs(1)) {
                source.renew(&Said::default()).await?;
                renewed = Some(Instant::now());
            }
            let claimed = source.claim(Want::up_to(BATCH)).await?;
            let done =
                claimed.deliveries.iter().map(|delivery| Settlement { token: delivery.token, outcome: Outcome::Done });
            source.settle(&done.collect::<Vec<_>>()).await?;
            pause(claimed.deliveries.is_empty()).await;
            seen.extend(claimed.deliveries.iter().map(|delivery| Uuid::from(delivery.message.id)));
        }
        while source.settle(&[]).await?.unwritten {
            pause(true).await;
        }
        Ok::<_, BoxError>(seen)
    };
    let marking = async {
        let (mut sent, mut after) = (0, 0);
        while sent < messages as u64 {
            let step = store.mark_rows(&intake, after, BATCH).await?;
            sent += step.sent;
            pause(step.sent == 0).await;
            after = step.next.unwrap_or_default();
        }
        Ok::<_, BoxError>(())
    };
    let ((), seen, ()) = tokio::try_join!(taking, relaying, marking)?;
    source.release().await?;
    Ok(seen)
}

async fn pause(is_needed: bool) {
    if is_needed {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
