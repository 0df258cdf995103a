//! The broker's own account: a queue that is bound to everything an exchange carries, and read to the end.

use futures_util::StreamExt;
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicQosOptions, ExchangeDeclareOptions, QueueBindOptions,
    QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Channel, Connection, ConnectionProperties, ExchangeKind};

/// A message as the broker holds it.
#[derive(Debug, Clone)]
pub struct Stored {
    /// The `message_id` property.
    pub id: String,
    /// The routing key it was published with.
    pub routing_key: String,
    /// Its bytes.
    pub body: Vec<u8>,
    /// Its properties.
    pub properties: lapin::BasicProperties,
}

/// Deletes a queue with all that is in it.
///
/// # Panics
/// If the broker cannot be reached.
pub async fn delete_queue(url: &str, name: &str) {
    let (_connection, channel) = open(url).await;
    channel.queue_delete(name.into(), QueueDeleteOptions::default()).await.expect("delete the queue");
}

/// How many messages a queue has that nobody has taken; none: there is no such queue.
///
/// # Panics
/// If the broker cannot be reached.
pub async fn exists(url: &str, name: &str) -> Option<usize> {
    let (_connection, channel) = open(url).await;
    let passive = QueueDeclareOptions { passive: true, ..Default::default() };
    let queue = channel.queue_declare(name.into(), passive, FieldTable::default()).await.ok()?;
    Some(queue.message_count() as usize)
}

/// An exchange and a queue of this name that are not as postroom declares them: fanout, and quorum.
///
/// # Panics
/// If the broker cannot be reached.
pub async fn declare_otherwise(url: &str, name: &str) {
    let (_connection, channel) = open(url).await;
    let durable = ExchangeDeclareOptions { durable: true, ..Default::default() };
    let exchange = channel.exchange_declare(name.into(), ExchangeKind::Fanout, durable, FieldTable::default());
    exchange.await.expect("declare the exchange");
    let durable = QueueDeclareOptions { durable: true, ..Default::default() };
    let queue = channel.queue_declare(name.into(), durable, QueueKind::QuorumWithOneActive.arguments());
    queue.await.expect("declare the queue");
}

/// A stream of this name.
///
/// # Panics
/// If the broker cannot be reached.
pub async fn declare_stream(url: &str, name: &str) {
    let (_connection, channel) = open(url).await;
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), AMQPValue::LongString("stream".into()));
    let durable = QueueDeclareOptions { durable: true, ..Default::default() };
    channel.queue_declare(name.into(), durable, arguments).await.expect("declare the stream");
}

/// How a queue keeps its messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueueKind {
    /// On one node.
    Classic,
    /// Replicated, and with a single active consumer.
    QuorumWithOneActive,
}

impl QueueKind {
    fn arguments(self) -> FieldTable {
        let mut arguments = FieldTable::default();
        if self == Self::QuorumWithOneActive {
            arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
            arguments.insert("x-single-active-consumer".into(), AMQPValue::Boolean(true));
        }
        arguments
    }
}

/// A durable queue of the test's own.
pub struct AuditQueue {
    url: String,
    name: String,
}

impl AuditQueue {
    /// Declares the exchange (topic, durable) and a queue bound to it.
    ///
    /// # Panics
    /// If the broker cannot be reached.
    pub async fn bound(url: &str, exchange: &str, routing_key: &str) -> Self {
        Self::named(url, exchange, routing_key, &format!("audit-{exchange}"), QueueKind::Classic).await
    }

    /// The same with a name of one's own, for a queue that a consumer will read.
    ///
    /// # Panics
    /// If the broker cannot be reached.
    pub async fn named(url: &str, exchange: &str, routing_key: &str, name: &str, kind: QueueKind) -> Self {
        let name = name.to_owned();
        let (_connection, channel) = open(url).await;
        let durable = ExchangeDeclareOptions { durable: true, ..Default::default() };
        channel
            .exchange_declare(exchange.into(), ExchangeKind::Topic, durable, FieldTable::default())
            .await
            .expect("declare the exchange");
        let durable = QueueDeclareOptions { durable: true, ..Default::default() };
        channel.queue_declare(name.as_str().into(), durable, kind.arguments()).await.expect("declare the queue");
        channel
            .queue_bind(
                name.as_str().into(),
                exchange.into(),
                routing_key.into(),
                QueueBindOptions::default(),
                FieldTable::default(),
            )
            .await
            .expect("bind the queue");
        Self { url: url.to_owned(), name }
    }

    /// Takes away one of its bindings, or brings it back: meanwhile what it would get is unroutable.
    ///
    /// # Panics
    /// If the broker cannot be reached.
    pub async fn is_bound(&self, exchange: &str, routing_key: &str, bound: bool) {
        let (_connection, channel) = open(&self.url).await;
        let (queue, exchange, key) = (self.name.as_str().into(), exchange.into(), routing_key.into());
        if bound {
            let options = QueueBindOptions::default();
            channel.queue_bind(queue, exchange, key, options, FieldTable::default()).await.expect("bind the queue");
        } else {
            channel.queue_unbind(queue, exchange, key, FieldTable::default()).await.expect("unbind the queue");
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Messages in it that nobody has taken, by the broker's count.
    ///
    /// # Panics
    /// If the broker cannot be reached.
    pub async fn ready(&self) -> usize {
        let (_connection, channel) = open(&self.url).await;
        count(&channel, &self.name).await
    }

    /// Takes everything out, in the order in which the broker stored it.
    ///
    /// # Panics
    /// If the broker cannot be reached.
    pub async fn drain(&self) -> Vec<Stored> {
        let (_connection, channel) = open(&self.url).await;
        let total = count(&channel, &self.name).await;
        let mut stored = Vec::with_capacity(total);
        if total == 0 {
            return stored;
        }
        channel.basic_qos(2000, BasicQosOptions::default()).await.expect("set the prefetch");
        let mut consumer = channel
            .basic_consume(self.name.as_str().into(), "".into(), BasicConsumeOptions::default(), FieldTable::default())
            .await
            .expect("consume");
        while stored.len() < total {
            let delivery = consumer.next().await.expect("the queue goes on").expect("a delivery");
            let id = delivery.properties.message_id().as_ref().map(|id| id.as_str().to_owned());
            stored.push(Stored {
                id: id.unwrap_or_default(),
                routing_key: delivery.routing_key.as_str().to_owned(),
                body: delivery.data,
                properties: delivery.properties,
            });
            if stored.len() % 500 == 0 || stored.len() == total {
                channel.basic_ack(delivery.delivery_tag, BasicAckOptions { multiple: true }).await.expect("ack");
            }
        }
        channel.close(200, "read".into()).await.expect("close the channel");
        stored
    }
}

async fn open(url: &str) -> (Connection, Channel) {
    let connection = Connection::connect(url, ConnectionProperties::default()).await.expect("connect to RabbitMQ");
    let channel = connection.create_channel().await.expect("open a channel");
    (connection, channel)
}

async fn count(channel: &Channel, queue: &str) -> usize {
    let passive = QueueDeclareOptions { passive: true, ..Default::default() };
    let queue = channel.queue_declare(queue.into(), passive, FieldTable::default()).await.expect("ask for the queue");
    queue.message_count() as usize
}
