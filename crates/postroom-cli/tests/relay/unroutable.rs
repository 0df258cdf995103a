//! The known trap of the AMQP client: a returned message must never be taken for a stored one.

use std::collections::HashSet;
use std::sync::Arc;

use postroom::{Message, Operator, Outbox, Route, Store};
use postroom_brokers::rabbitmq::{RabbitmqOptions, RabbitmqSink};
use postroom_postgres::{Database, Postgres};
use postroom_relay::Relay;
use tokio::sync::watch;

use crate::rig::Rig;

const MESSAGES: usize = 20_000;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unroutable_messages_are_never_marked_stored() {
    let rig = Rig::shared().await;
    let mut client = rig.database.connect().await;
    let (mut routable, mut unroutable) = (HashSet::new(), HashSet::new());
    for chunk in 0..MESSAGES / 1000 {
        let messages: Vec<Message> = (0..1000)
            .map(|n| {
                let nowhere = (chunk * 7 + n) % 10 == 3;
                let message = Message::new("orders", "order.placed", format!("{n}"));
                let message = message.routing_key(if nowhere { "nowhere.bound" } else { "orders.placed" });
                if nowhere { &mut unroutable } else { &mut routable }.insert(message.id.to_string());
                message
            })
            .collect();
        let mut tx = client.transaction().await.unwrap();
        Postgres.enqueue(&mut tx, &messages).await.unwrap();
        tx.commit().await.unwrap();
    }
    let database = Database::new(rig.database.url()).unwrap();
    let route = Route::new("orders");
    let source = database.source(&route, "test").await.unwrap();
    let mut options = RabbitmqOptions::new(rig.rabbitmq.clone());
    options.exchange = rig.exchange.clone();
    let (stop, mut stopped) = watch::channel(false);
    let relay = Relay::new(route, source, Arc::new(RabbitmqSink::new(options).unwrap())).in_flight_max(500);
    let relay = tokio::spawn(relay.run(async move {
        let _ = stopped.wait_for(|stopped| *stopped).await;
    }));
    rig.until("nothing is left in the outbox", async || {
        let status = database.status().await.unwrap();
        // Those that were returned wait for their retries.
        status.routes.iter().all(|route| route.oldest_unread_seconds.is_none())
    })
    .await;
    stop.send(true).unwrap();
    let summary = relay.await.unwrap();

    let stored: Vec<String> = rig.audit.drain().await.into_iter().map(|stored| stored.id).collect();
    let distinct: HashSet<String> = stored.iter().cloned().collect();
    assert_eq!(stored.len(), distinct.len(), "I3: no fault, no duplicate");
    assert_eq!(distinct, routable, "every routable message is stored, and nothing else");
    let rows = client.query("select id, last_error, attempts from postroom.parked", &[]).await.unwrap();
    let parked: HashSet<String> = rows.iter().map(|row| row.get::<_, uuid::Uuid>(0).to_string()).collect();
    assert_eq!(parked, unroutable, "I1a: every unroutable message is kept");
    assert!(rows.iter().all(|row| row.get::<_, String>(1).contains("unroutable")));
    assert_eq!(summary.counters.stored as usize, routable.len(), "I1a");
}
