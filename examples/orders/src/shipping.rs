//! The shipping service: applies each order once, however often it is delivered.

use std::sync::Arc;

use async_trait::async_trait;
use postroom::{BoxError, Consumer, Received};
use postroom_brokers::rabbitmq::{RabbitmqSubscription, RabbitmqSubscriptionOptions};
use postroom_consumer::{Handled, Handler, HandlerError, Receiver};
use postroom_postgres::{Connector, Postgres};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_postgres::Client;

use crate::writers::OrderPlaced;

const HANDLERS: usize = 8;

struct Shipping {
    client: Client,
    consumer: Consumer,
}

#[async_trait]
impl Handler for Shipping {
    async fn handle(&mut self, received: &Received) -> Result<Handled, HandlerError> {
        let order: OrderPlaced =
            serde_json::from_slice(&received.message.payload).map_err(|error| HandlerError::Reject(error.into()))?;
        let id = *received.message.id.as_uuid();
        let admission = Postgres
            .once(&mut self.client, &self.consumer, received.message.id, async |tx| {
                tx.execute(
                    "insert into orders_example.shipped as s values ($1, 1, $2)
                         on conflict (customer) do update set orders = s.orders + 1, cents = s.cents + excluded.cents",
                    &[&order.customer, &order.cents],
                )
                .await?;
                tx.execute(
                    "insert into orders_example.effects as e values ($1, 1)
                         on conflict (message_id) do update set times = e.times + 1",
                    &[&id],
                )
                .await?;
                Ok(())
            })
            .await?;
        Ok(admission.into())
    }
}

/// Starts the service on its own queue, which is there when this returns.
pub async fn begin(
    connector: &Connector,
    rabbitmq: &str,
    run: &str,
    mut stopped: watch::Receiver<bool>,
) -> Result<JoinHandle<()>, BoxError> {
    let mut handlers: Vec<Box<dyn Handler>> = Vec::new();
    for _ in 0..HANDLERS {
        handlers.push(Box::new(Shipping { client: connector.connect().await?, consumer: Consumer::new(run)? }));
    }
    let subscription = RabbitmqSubscription::new(RabbitmqSubscriptionOptions {
        url: rabbitmq.to_owned(),
        queue: format!("{run}-shipping"),
        bind: vec![(run.to_owned(), "#".to_owned())],
        prefetch: 1000,
    });
    subscription.connect().await?;
    let receiver = Receiver::new(Arc::new(subscription), handlers);
    Ok(tokio::spawn(async move {
        receiver
            .run(async move {
                // An error means that the sender is gone, which is a stop too.
                let _ = stopped.wait_for(|stopped| *stopped).await;
            })
            .await;
    }))
}
