//! The shipping service: applies each order once, however often it is delivered.

use std::sync::Arc;

use async_trait::async_trait;
use postroom::{BoxError, Consumer};
use postroom_brokers::rabbitmq::{Binding, RabbitmqSubscription, RabbitmqSubscriptionOptions};
use postroom_consumer::{Handle, HandlerError, Handlers, Incoming, Receiver};
use postroom_postgres::{Connector, Postgres, PostgresSession};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_postgres::Transaction;

use crate::writers::OrderPlaced;

struct Shipping;

#[async_trait]
impl Handle<Postgres, OrderPlaced> for Shipping {
    async fn handle(&self, tx: &mut Transaction<'_>, order: &Incoming<OrderPlaced>) -> Result<(), HandlerError> {
        tx.execute(
            "insert into orders_example.shipped as s values ($1, 1, $2)
                 on conflict (customer) do update set orders = s.orders + 1, cents = s.cents + excluded.cents",
            &[&order.body.customer, &order.body.cents],
        )
        .await?;
        tx.execute(
            "insert into orders_example.effects as e values ($1, 1)
                 on conflict (message_id) do update set times = e.times + 1",
            &[order.message.id.as_uuid()],
        )
        .await?;
        Ok(())
    }
}

/// Starts the service on its own queue, which is there when this returns.
pub async fn begin(
    connector: &Connector,
    rabbitmq: &str,
    run: &str,
    mut stopped: watch::Receiver<bool>,
) -> Result<JoinHandle<()>, BoxError> {
    let subscription = RabbitmqSubscription::new(RabbitmqSubscriptionOptions {
        url: rabbitmq.to_owned(),
        queue: format!("{run}-shipping"),
        bind: vec![Binding::new(run, "#")],
        prefetch: 1000,
        unsettled_bytes_max: 64 << 20,
    })?;
    subscription.connect().await?;
    let handlers = Handlers::new().on("order.placed", Shipping);
    let connector = connector.clone();
    let open = move || PostgresSession::new(connector.clone());
    let receiver = Receiver::new(Arc::new(subscription), Consumer::new(run)?, handlers, open)?;
    Ok(tokio::spawn(async move {
        let received = receiver
            .run(async move {
                // An error means that the sender is gone, which is a stop too.
                let _ = stopped.wait_for(|stopped| *stopped).await;
            })
            .await;
        if let Err(error) = received {
            eprintln!("the shipping service stopped: {error}");
        }
    }))
}
