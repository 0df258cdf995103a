//! A projection with versions, on one SQLite file and without any server: events of orders arrive shuffled, some of them twice,
//! one never; the projection applies each order's in order, and is told what is missing.
//! `cargo run -p postroom-consumer --example projection`

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postroom::{Batch, BoxError, Consumer, Message, MessageId, NewerUpsert, Sink, TopicFilter};
use postroom_brokers::in_process::InProcessBroker;
use postroom_consumer::{
    Compensate, Handle, HandlerError, Handlers, Incoming, OutOfOrder, ReceiveCounters, Receiver, Versions,
};
use postroom_sqlite::{Sqlite, SqliteSession, SqliteTransaction};
use rusqlite::params;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

#[derive(Serialize, Deserialize)]
struct OrderChanged {
    state: String,
}

struct OrderView;

#[async_trait]
impl Handle<Sqlite, OrderChanged> for OrderView {
    async fn handle(
        &self,
        tx: &mut SqliteTransaction<'_>,
        changed: &Incoming<OrderChanged>,
    ) -> Result<(), HandlerError> {
        let (message, state) = (changed.message.clone(), changed.body.state.clone());
        tx.run(move |tx| {
            let upsert = NewerUpsert::new("order_view", &["id"], &["state"], "version").sqlite();
            tx.execute(&upsert, params![message.aggregate_id, state, message.aggregate_version])?;
            tx.execute(
                "insert into applied (id, version) values (?1, ?2)",
                params![message.aggregate_id, message.aggregate_version],
            )
        })
        .await?;
        Ok(())
    }
}

/// Notes on the order that its history has a hole: a replay of the missing versions would be asked for here.
#[async_trait]
impl Compensate<Sqlite> for OrderView {
    async fn compensate(&self, tx: &mut SqliteTransaction<'_>, what: &OutOfOrder<'_>) -> Result<(), HandlerError> {
        if let OutOfOrder::Missing { aggregate, versions, .. } = what {
            let (id, missing) = (aggregate.id.clone(), versions.end() - versions.start() + 1);
            let note = "update order_view set gaps = gaps + ?2 where id = ?1";
            tx.run(move |tx| tx.execute(note, params![id, missing])).await?;
        }
        Ok(())
    }
}

/// Returns what was counted, and how many orders were not applied in order.
pub async fn run(path: &Path) -> Result<(ReceiveCounters, i64), BoxError> {
    const ORDERS: i64 = 20;
    let mut file = postroom_sqlite::connect(path)?;
    postroom_sqlite::migrate(&mut file)?;
    file.execute_batch(
        "create table order_view (id text primary key, state text, version integer, gaps integer default 0);
         create table applied (n integer primary key autoincrement, id text, version integer);",
    )?;
    let broker = InProcessBroker::new();
    broker.declare_queue("view", TopicFilter::all());
    for version in [2, 1, 5, 3] {
        // Version 4 of each order never comes.
        let events: Result<Vec<Message>, _> = (0..ORDERS)
            .map(|order| {
                let changed = OrderChanged { state: format!("state {version}") };
                let event = Message::json("orders", "order.changed", &changed);
                event.map(|event| event.aggregate("order", format!("order-{order}"), version))
            })
            .collect();
        let events = events?;
        broker.sink().publish(&Batch::new(events.clone())).await?;
        broker.sink().publish(&Batch::new(events)).await?;
    }
    let handlers = Handlers::new()
        .on("order.changed", OrderView)
        .versions("order", Versions::in_order(Duration::from_millis(500)))
        .compensation(OrderView);
    let sessions = path.to_owned();
    let queue = Arc::new(broker.subscribe("view", 50));
    let receiver = Receiver::new(queue, Consumer::new("order-view")?, handlers, move || SqliteSession::new(&sessions))?;
    let (stop, stopped) = oneshot::channel::<()>();
    let receiving = tokio::spawn(receiver.concurrency(1).run(async move {
        let _ = stopped.await;
    }));
    let current = "select count(*) from order_view where version = 5 and gaps = 1";
    while file.query_row(current, [], |row| row.get::<_, i64>(0))? < ORDERS {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let _ = stop.send(());
    let counters = receiving.await??;
    let wrong = "select count(*) from (select id, group_concat(version) as versions from (select * from applied order by n) group by id)
                  where versions <> '1,2,3,5'";
    Ok((counters, file.query_row(wrong, [], |row| row.get(0))?))
}

#[tokio::main]
#[allow(dead_code, reason = "the tests call `run`")]
async fn main() -> Result<(), BoxError> {
    let path = std::env::temp_dir().join(format!("postroom-projection-{}.db", MessageId::new()));
    let (counters, wrong) = run(&path).await?;
    println!("{counters:?}\norders that were not applied in order: {wrong}");
    Ok(std::fs::remove_file(path)?)
}
