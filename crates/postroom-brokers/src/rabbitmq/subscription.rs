//! Receiving: a connection of its own, manual acks, a prefetch; reconnects with the next call.

use async_trait::async_trait;
use futures_util::StreamExt;
use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicNackOptions, BasicQosOptions, ExchangeDeclareOptions, QueueBindOptions,
    QueueDeclareOptions,
};
use lapin::types::{FieldTable, ShortString};
use lapin::{Channel, Connection, Consumer, ExchangeKind};
use postroom::{Received, Subscription, Unavailable, redact_url};
use serde::Deserialize;
use tokio::sync::Mutex;

use super::{connect, properties, short_enough, uri};
use crate::OpenSubscriptionError;

/// What to receive, and from where; `[inboxes.from]` with `kind = "rabbitmq"`.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RabbitmqSubscriptionOptions {
    /// `amqp://` or `amqps://` URL.
    pub url: String,
    /// The queue; durable.
    pub queue: String,
    /// Declare the queue and bind it so; none: it must be there already.
    #[serde(default)]
    pub bind: Vec<Binding>,
    /// Most deliveries handed out and not settled; 1000.
    #[serde(default = "default_prefetch")]
    pub prefetch: u16,
}

/// What a queue gets: messages of a topic exchange whose routing keys fit.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Binding {
    /// The exchange; declared if it is not there.
    pub exchange: String,
    /// The pattern of routing keys, such as `orders.#`.
    pub routing_key: String,
}

impl Binding {
    /// A binding to a topic exchange.
    pub fn new(exchange: impl Into<String>, routing_key: impl Into<String>) -> Self {
        Self { exchange: exchange.into(), routing_key: routing_key.into() }
    }
}

fn default_prefetch() -> u16 {
    1000
}

impl RabbitmqSubscriptionOptions {
    pub(crate) const KEYS: &'static [&'static str] = &["kind", "url", "queue", "bind", "prefetch"];

    fn check(&self) -> Result<(), String> {
        uri(&self.url)?;
        if self.queue.is_empty() {
            return Err("queue: the name is empty; name the queue to receive from".to_owned());
        }
        short_enough("queue", &self.queue)?;
        for binding in &self.bind {
            short_enough("exchange in bind", &binding.exchange)?;
            short_enough("routing_key in bind", &binding.routing_key)?;
        }
        if self.prefetch == 0 {
            // To the broker 0 means no limit.
            return Err("prefetch must be at least 1".to_owned());
        }
        Ok(())
    }
}

impl std::fmt::Debug for RabbitmqSubscriptionOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RabbitmqSubscriptionOptions")
            .field("url", &redact_url(&self.url))
            .field("queue", &self.queue)
            .finish_non_exhaustive()
    }
}

/// Receives from one queue.
pub struct RabbitmqSubscription {
    options: RabbitmqSubscriptionOptions,
    /// Only `receive` waits on this one.
    consumer: Mutex<Option<Consumer>>,
    session: Mutex<Session>,
}

#[derive(Default)]
struct Session {
    number: u64,
    channel: Option<Channel>,
    connection: Option<Connection>,
}

impl RabbitmqSubscription {
    /// Checks the options; connects with the first `receive`.
    pub fn new(options: RabbitmqSubscriptionOptions) -> Result<Self, OpenSubscriptionError> {
        options.check().map_err(|problem| OpenSubscriptionError { kind: "rabbitmq", problem })?;
        Ok(Self { options, consumer: Mutex::new(None), session: Mutex::default() })
    }

    /// Connects and declares now, so that nothing published after this is missed; `receive` does it otherwise.
    pub async fn connect(&self) -> Result<(), Unavailable> {
        let mut slot = self.consumer.lock().await;
        if slot.is_none() {
            *slot = Some(self.subscribe().await?);
        }
        Ok(())
    }

    fn unavailable(&self, error: impl Into<postroom::BoxError>) -> Unavailable {
        let url = redact_url(&self.options.url);
        Unavailable::new(format!("queue {:?} of RabbitMQ at {url}", self.options.queue), error)
    }

    async fn subscribe(&self) -> Result<Consumer, Unavailable> {
        let connection = connect(&self.options.url, "postroom consumer").await?;
        let (channel, consumer) = self.consume(&connection).await.map_err(|error| self.unavailable(error))?;
        let mut session = self.session.lock().await;
        session.number += 1;
        session.channel = Some(channel);
        session.connection = Some(connection);
        Ok(consumer)
    }

    async fn consume(&self, connection: &Connection) -> Result<(Channel, Consumer), lapin::Error> {
        let channel = connection.create_channel().await?;
        let queue = ShortString::from(self.options.queue.as_str());
        let passive = self.options.bind.is_empty();
        let declare = QueueDeclareOptions { durable: true, passive, ..Default::default() };
        channel.queue_declare(queue.clone(), declare, FieldTable::default()).await?;
        for Binding { exchange, routing_key } in &self.options.bind {
            let exchange = ShortString::from(exchange.as_str());
            let durable = ExchangeDeclareOptions { durable: true, ..Default::default() };
            channel.exchange_declare(exchange.clone(), ExchangeKind::Topic, durable, FieldTable::default()).await?;
            let routing_key = ShortString::from(routing_key.as_str());
            let options = QueueBindOptions::default();
            channel.queue_bind(queue.clone(), exchange, routing_key, options, FieldTable::default()).await?;
        }
        channel.basic_qos(self.options.prefetch, BasicQosOptions::default()).await?;
        let consumer = channel
            .basic_consume(queue, ShortString::from(""), BasicConsumeOptions::default(), FieldTable::default())
            .await?;
        Ok((channel, consumer))
    }

    /// The channel that a delivery came on, if it is still the current one: a tag means nothing on another.
    async fn channel_of(&self, received: &Received) -> Result<Channel, Unavailable> {
        let session = self.session.lock().await;
        match &session.channel {
            Some(channel) if session.number == received.session => Ok(channel.clone()),
            _ => Err(self.unavailable("the connection that the message came on is gone; it comes again")),
        }
    }
}

#[async_trait]
impl Subscription for RabbitmqSubscription {
    fn system(&self) -> &'static str {
        "rabbitmq"
    }

    async fn receive(&self) -> Result<Received, Unavailable> {
        let mut slot = self.consumer.lock().await;
        let consumer = match slot.as_mut() {
            Some(consumer) => consumer,
            None => slot.insert(self.subscribe().await?),
        };
        let next: Option<Result<Delivery, lapin::Error>> = consumer.next().await;
        match next {
            Some(Ok(delivery)) => {
                let session = self.session.lock().await.number;
                let (tag, redelivered) = (delivery.delivery_tag, delivery.redelivered);
                let (id, message) = properties::from_delivery(delivery);
                Ok(Received { tag, session, redelivered, id, message })
            }
            Some(Err(error)) => {
                *slot = None;
                Err(self.unavailable(error))
            }
            None => {
                *slot = None;
                Err(self.unavailable("the consumer was cancelled"))
            }
        }
    }

    async fn ack(&self, received: &Received) -> Result<(), Unavailable> {
        let channel = self.channel_of(received).await?;
        let acked = channel.basic_ack(received.tag, BasicAckOptions::default()).await;
        acked.map_err(|error| self.unavailable(error))
    }

    async fn requeue(&self, received: &Received) -> Result<(), Unavailable> {
        let channel = self.channel_of(received).await?;
        let options = BasicNackOptions { requeue: true, ..Default::default() };
        channel.basic_nack(received.tag, options).await.map_err(|error| self.unavailable(error))
    }

    async fn reject(&self, received: &Received) -> Result<(), Unavailable> {
        let channel = self.channel_of(received).await?;
        let options = BasicNackOptions { requeue: false, ..Default::default() };
        channel.basic_nack(received.tag, options).await.map_err(|error| self.unavailable(error))
    }
}
