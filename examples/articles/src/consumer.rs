//! The service at the other end: applies each message once, however often it is delivered, and notes in which order.

use std::sync::Arc;

use async_trait::async_trait;
use postroom::{BoxError, Consumer};
use postroom_brokers::rabbitmq::{Binding, RabbitmqSubscription, RabbitmqSubscriptionOptions};
use postroom_consumer::{Handle, HandlerError, Handlers, Incoming, ReceiveCounters, Receiver};
use postroom_postgres::{Connector, Postgres, PostgresSession};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_postgres::Transaction;

/// What every writer of this example puts into its messages.
#[derive(Debug, serde::Deserialize)]
pub struct Numbered {
    pub key: String,
    pub n: i64,
}

/// Its own tables, in its own database.
pub const TABLES: &str =
    "create table effects (at bigserial primary key, message_id uuid not null, key text not null, n bigint not null)";

struct Notes;

#[async_trait]
impl Handle<Postgres, Numbered> for Notes {
    async fn handle(&self, tx: &mut Transaction<'_>, message: &Incoming<Numbered>) -> Result<(), HandlerError> {
        let sql = "insert into public.effects (message_id, key, n) values ($1, $2, $3)";
        tx.execute(sql, &[message.message.id.as_uuid(), &message.body.key, &message.body.n]).await?;
        Ok(())
    }
}

/// The running service.
pub struct Running {
    stop: watch::Sender<bool>,
    task: JoinHandle<Result<ReceiveCounters, String>>,
}

impl Running {
    /// On its own queue, which is there when this returns.
    pub async fn begin(
        connector: &Connector,
        rabbitmq: &str,
        run: &str,
        bind: &[&str],
        kinds: &[&str],
    ) -> Result<Self, BoxError> {
        let subscription = RabbitmqSubscription::new(RabbitmqSubscriptionOptions {
            url: rabbitmq.to_owned(),
            queue: format!("{run}-service"),
            bind: bind.iter().map(|key| Binding::new(run, *key)).collect(),
            prefetch: 500,
            unsettled_bytes_max: 64 << 20,
        })?;
        subscription.connect().await?;
        let handlers = kinds.iter().fold(Handlers::new(), |handlers, kind| handlers.on(kind, Notes));
        let connector = connector.clone();
        let open = move || PostgresSession::new(connector.clone());
        let receiver = Receiver::new(Arc::new(subscription), Consumer::new("service")?, handlers, open)?;
        let (stop, mut stopped) = watch::channel(false);
        let task = tokio::spawn(async move {
            let stopped = async move {
                // An error means that the sender is gone, which is a stop too.
                let _ = stopped.wait_for(|stopped| *stopped).await;
            };
            receiver.run(stopped).await.map_err(|error| error.to_string())
        });
        Ok(Self { stop, task })
    }

    /// What it counted.
    pub async fn end(self) -> Result<ReceiveCounters, BoxError> {
        let _ = self.stop.send(true);
        Ok(self.task.await??)
    }
}
