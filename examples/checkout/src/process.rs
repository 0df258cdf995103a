//! One service as a process: a relay for its outbox and a receiver with its inbox, until its standard input ends.

use std::sync::Arc;
use std::time::Duration;

use postroom::{BoxError, Consumer, MessageId, Route, Store};
use postroom_brokers::rabbitmq::{
    Binding, RabbitmqOptions, RabbitmqSink, RabbitmqSubscription, RabbitmqSubscriptionOptions,
};
use postroom_consumer::Receiver;
use postroom_postgres::{Connector, Database, PostgresSession};
use postroom_relay::Relay;
use tokio::io::AsyncReadExt;
use tokio::sync::watch;

use crate::services::Service;

/// The queue of a service; bound to what it wants.
pub fn subscription(service: Service, rabbitmq: &str, exchange: &str) -> Result<RabbitmqSubscription, BoxError> {
    let options = RabbitmqSubscriptionOptions {
        url: rabbitmq.to_owned(),
        queue: format!("{exchange}-{}", service.name()),
        bind: service.wants().iter().map(|kind| Binding::new(exchange, *kind)).collect(),
        prefetch: 200,
        unsettled_bytes_max: 64 << 20,
    };
    Ok(RabbitmqSubscription::new(options)?)
}

pub async fn run(service: Service, store: &str, rabbitmq: &str, exchange: &str) -> Result<(), BoxError> {
    let connector = Connector::new(store)?;
    let (stop, stopped) = watch::channel(false);
    let until = |mut stopped: watch::Receiver<bool>| async move {
        // An error means that the sender is gone, which is a stop too.
        let _ = stopped.wait_for(|stopped| *stopped).await;
    };
    let route = Route { lease: Duration::from_secs(2), ..Route::new(service.name()) };
    // No two relays share a name: this one may be a successor of one that died.
    let owner = format!("{}/{}", service.name(), MessageId::new());
    let source = Database::of(connector.clone()).source(&route, &owner).await?;
    let mut options = RabbitmqOptions::new(rabbitmq);
    options.exchange = exchange.to_owned();
    let relay = Relay::new(route, source, Arc::new(RabbitmqSink::new(options)?)).poll_idle(Duration::from_millis(50));
    let relay = tokio::spawn(relay.run(until(stopped.clone())));

    let open = move || PostgresSession::new(connector.clone());
    let consumer = Consumer::new(service.name())?;
    let queue = Arc::new(subscription(service, rabbitmq, exchange)?);
    let receiver = Receiver::new(queue, consumer, service.handlers(), open)?.lease(Duration::from_secs(2));
    let receiver = tokio::spawn(receiver.run(until(stopped)));

    let mut nothing = Vec::new();
    tokio::io::stdin().read_to_end(&mut nothing).await?;
    let _ = stop.send(true);
    let received = receiver.await??;
    let relayed = relay.await?;
    eprintln!(
        "{}: {} effects, {} duplicates, {} sent",
        service.name(),
        received.applied,
        received.duplicates,
        relayed.counters.stored
    );
    Ok(())
}
