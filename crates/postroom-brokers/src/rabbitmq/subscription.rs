//! Receiving: a connection of its own, manual acks, a prefetch; reconnects with the next call.

use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex as StdMutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::{FutureExt, StreamExt};
use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicNackOptions, BasicQosOptions, ExchangeDeclareOptions, QueueBindOptions,
    QueueDeclareOptions,
};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{Channel, Connection, Consumer, ExchangeKind};
use postroom::{Answer, Arrival, Bound, Partition, Receipt, Received, Subscription, Unavailable, redact_url};
use serde::Deserialize;
use tokio::sync::Mutex;

use super::{connect, properties, uri, usable_name};
use crate::OpenSubscriptionError;

/// A close that is not answered is not waited for.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
pub(super) const IS_STREAM: &str = "it is a stream, which cannot be received from; name a classic or quorum queue";

/// Numbers the connections of all subscriptions of this process: a delivery tag of one means nothing on another.
static SESSIONS: AtomicU64 = AtomicU64::new(1);

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
    /// Most bytes of deliveries handed out and not settled, in which one message may be larger; 64 MiB. What is beyond that stays
    /// with the broker, or on the way.
    #[serde(default = "default_unsettled_bytes")]
    pub unsettled_bytes_max: u64,
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

fn default_unsettled_bytes() -> u64 {
    64 << 20
}

fn default_prefetch() -> u16 {
    1000
}

impl RabbitmqSubscriptionOptions {
    pub(super) fn check(&self) -> Result<(), String> {
        uri(&self.url)?.1.read()?;
        if self.queue.is_empty() {
            return Err("queue: the name is empty; name the queue to receive from".to_owned());
        }
        usable_name("queue", &self.queue)?;
        for binding in &self.bind {
            usable_name("exchange in bind", &binding.exchange)?;
            if binding.exchange.is_empty() {
                return Err(
                    "bind: every queue is bound to the default exchange already; name another exchange".to_owned()
                );
            }
            usable_name("routing_key in bind", &binding.routing_key)?;
        }
        if self.prefetch == 0 {
            // To the broker 0 means no limit.
            return Err("prefetch must be at least 1".to_owned());
        }
        if self.unsettled_bytes_max == 0 {
            return Err("unsettled_bytes_max must be at least 1".to_owned());
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
    exclusive: bool,
    /// Only `receive` waits on this one.
    consumer: Mutex<Option<Consuming>>,
    session: StdMutex<Session>,
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
        Ok(Self { options, exclusive: false, consumer: Mutex::new(None), session: StdMutex::default() })
    }

    /// Receives only while nobody else consumes from the queue: `receive` fails until then. What the last consumer had not
    /// acked comes first, in the order of the queue. A queue that refuses this, since it has a single active consumer by its
    /// own arguments, is consumed from as it is.
    pub fn exclusive(mut self) -> Self {
        self.exclusive = true;
        self
    }

    /// Connects and declares now, so that nothing published after this is missed; `receive` does it otherwise.
    pub async fn connect(&self) -> Result<(), Unavailable> {
        let mut slot = self.consumer.lock().await;
        if slot.is_none() {
            *slot = Some(Consuming { consumer: self.subscribe().await?, failed: None });
        }
        Ok(())
    }

    fn unavailable(&self, error: impl Into<postroom::BoxError>) -> Unavailable {
        let url = redact_url(&self.options.url);
        Unavailable::new(format!("queue {:?} of RabbitMQ at {url}", self.options.queue), error)
    }

    async fn subscribe(&self) -> Result<Consumer, Unavailable> {
        let connection =
            connect(&self.options.url, "postroom consumer", Some(self.options.unsettled_bytes_max)).await?;
        if self.options.bind.is_empty()
            && self.exists_as_stream(&connection).await.map_err(|error| self.unavailable(error))?
        {
            let _ = connection.close(200, "bye".into()).await;
            return Err(self.unavailable(IS_STREAM));
        }
        let (channel, consumer) = self.consume(&connection).await.map_err(|error| self.unavailable(error))?;
        // Nothing is awaited between here and the end: whoever gives up waiting has no consumer yet, or leaves it to `drop`.
        let mut session = self.session();
        session.number = SESSIONS.fetch_add(1, Ordering::Relaxed);
        session.channel = Some(channel);
        session.connection = Some(connection);
        Ok(consumer)
    }

    /// The passive look comes first: the other one would make a queue that is not there.
    async fn exists_as_stream(&self, connection: &Connection) -> Result<bool, lapin::Error> {
        let channel = connection.create_channel().await?;
        let passive = QueueDeclareOptions { passive: true, ..Default::default() };
        let queue = ShortString::from(self.options.queue.as_str());
        channel.queue_declare(queue, passive, FieldTable::default()).await?;
        channel.close(200, "looked".into()).await?;
        is_stream(connection, &self.options.queue).await
    }

    async fn consume(&self, connection: &Connection) -> Result<(Channel, Consumer), lapin::Error> {
        // Twice: the one that was in the way may be gone by the time that the consumers are counted.
        for _ in 0..if self.exclusive { 2 } else { 0 } {
            match self.consume_as(connection, true).await {
                Err(error) if is_refused(&error) && self.consumers(connection).await? == 0 => {}
                other => return other,
            }
        }
        self.consume_as(connection, false).await
    }

    async fn consumers(&self, connection: &Connection) -> Result<u32, lapin::Error> {
        let channel = connection.create_channel().await?;
        let queue = ShortString::from(self.options.queue.as_str());
        let passive = QueueDeclareOptions { passive: true, ..Default::default() };
        let consumers = channel.queue_declare(queue, passive, FieldTable::default()).await?.consumer_count();
        channel.close(200, "counted".into()).await?;
        Ok(consumers)
    }

    async fn consume_as(&self, connection: &Connection, exclusive: bool) -> Result<(Channel, Consumer), lapin::Error> {
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
        let options = BasicConsumeOptions { exclusive, ..Default::default() };
        let consumer = {
            let consuming = pin!(channel.basic_consume(queue, ShortString::from(""), options, FieldTable::default()));
            // Dropped before what is awaited, if somebody gives up waiting.
            let mut given_up = CloseUnlessDone(Some(connection));
            let consumer = consuming.await;
            given_up.0 = None;
            consumer?
        };
        Ok((channel, consumer))
    }

    /// Ends the connection that failed. A link that only lost the broker's answers leaves it open at the broker, which would go on
    /// holding the queue, and what was delivered to nobody, for it.
    async fn leave(&self) {
        let connection = {
            let mut session = self.session();
            session.channel = None;
            session.connection.take()
        };
        if let Some(connection) = connection {
            let _ = tokio::time::timeout(CLOSE_TIMEOUT, connection.close(200, "bye".into())).await;
        }
    }

    fn session(&self) -> MutexGuard<'_, Session> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The channel of this session, if it is still the current one: a tag means nothing on another.
    fn channel_of(&self, number: u64) -> Result<Channel, Unavailable> {
        let session = self.session();
        match &session.channel {
            Some(channel) if session.number == number => Ok(channel.clone()),
            _ => Err(self.unavailable("the connection that the message came on is gone; it comes again")),
        }
    }

    fn received(&self, delivery: Delivery) -> Received {
        let receipt = Receipt::new(self.session().number, delivery.delivery_tag);
        let redelivered = delivery.redelivered;
        let (id, message) = properties::from_delivery(delivery);
        Received { receipt, partition: Partition::default(), redelivered, id, message }
    }

    async fn answer(&self, receipt: Receipt, answer: Answer) -> Result<(), Unavailable> {
        let channel = self.channel_of(receipt.session())?;
        let tag = receipt.number();
        let answered = match answer {
            Answer::Ack => channel.basic_ack(tag, BasicAckOptions::default()).await,
            Answer::Requeue => channel.basic_nack(tag, BasicNackOptions { requeue: true, ..Default::default() }).await,
            Answer::Reject => channel.basic_nack(tag, BasicNackOptions { requeue: false, ..Default::default() }).await,
        };
        answered.map_err(|error| self.unavailable(error))
    }
}

/// Whether a queue that exists is a stream. A stream hands out only what is published while somebody is subscribed, unless it is told
/// where to begin, and acks mean nothing to it. Declaring what exists changes nothing; whoever may not declare is not told.
pub(super) async fn is_stream(connection: &Connection, queue: &str) -> Result<bool, lapin::Error> {
    let channel = connection.create_channel().await?;
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), AMQPValue::LongString("stream".into()));
    let durable = QueueDeclareOptions { durable: true, ..Default::default() };
    match channel.queue_declare(ShortString::from(queue), durable, arguments).await {
        Ok(_) => channel.close(200, "looked".into()).await.map(|()| true),
        Err(error) => Ok(error.to_string().contains("current is the value 'stream'")),
    }
}

/// 403: somebody else consumes from the queue, or it takes no exclusive consumer.
fn is_refused(error: &lapin::Error) -> bool {
    matches!(error.kind(), lapin::ErrorKind::ProtocolError(error) if error.get_id() == 403)
}

/// The client library cancels a consumer that is dropped. Then the broker takes the next consumer while the channel still has
/// what it did not ack, and hands out later messages first. The end of a connection gives back all at once, and to nobody
/// before that, so it has to be on its way before the consumer is dropped.
struct CloseUnlessDone<'a>(Option<&'a Connection>);

impl Drop for CloseUnlessDone<'_> {
    fn drop(&mut self) {
        if let Some(connection) = self.0 {
            // The first poll hands the close to the library's own thread.
            let _ = connection.close(200, "bye".into()).now_or_never();
        }
    }
}

impl Drop for RabbitmqSubscription {
    /// The broker is told, so that what was not acked goes to whoever is next at once.
    fn drop(&mut self) {
        let session = std::mem::take(self.session.get_mut().unwrap_or_else(PoisonError::into_inner));
        let Some(connection) = session.connection else { return };
        let mut closing = Box::pin(async move { connection.close(200, "bye".into()).await });
        // See `CloseUnlessDone`.
        if closing.as_mut().now_or_never().is_some() {
            return;
        }
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                let _ = tokio::time::timeout(CLOSE_TIMEOUT, closing).await;
            });
        }
    }
}

#[async_trait]
impl Subscription for RabbitmqSubscription {
    fn system(&self) -> &'static str {
        "rabbitmq"
    }

    fn origin(&self) -> String {
        format!("queue {:?}", self.options.queue)
    }

    fn is_connected(&self) -> bool {
        self.session().connection.as_ref().is_some_and(|connection| connection.status().connected())
    }

    async fn receive(&self, max: Bound) -> Result<Arrival, Unavailable> {
        let mut slot = self.consumer.lock().await;
        if slot.as_ref().is_some_and(|consuming| consuming.failed.is_some()) {
            // Left in its place until it is over, so that a call that is dropped here leaves it to the next one.
            self.leave().await;
            let failed = slot.take().and_then(|consuming| consuming.failed);
            return Err(failed.unwrap_or_else(|| self.unavailable("the consumer failed")));
        }
        if slot.is_none() {
            *slot = Some(Consuming { consumer: self.subscribe().await?, failed: None });
        }
        let Some(consuming) = slot.as_mut() else { return Err(self.unavailable("there is no consumer")) };
        let mut next = consuming.consumer.next().await;
        // Nothing is awaited while messages are in hand: a call that is dropped has taken none.
        let (mut received, mut bytes) = (Vec::new(), 0usize);
        loop {
            match next {
                Some(Ok(delivery)) => {
                    bytes = bytes.saturating_add(delivery.data.len());
                    received.push(self.received(delivery));
                }
                Some(Err(error)) => consuming.failed = Some(self.unavailable(error)),
                None => consuming.failed = Some(self.unavailable("the consumer was cancelled")),
            }
            if consuming.failed.is_some() || received.len() >= max.messages || bytes >= max.bytes {
                break;
            }
            match consuming.consumer.next().now_or_never() {
                Some(more) => next = more,
                None => break,
            }
        }
        if !received.is_empty() {
            return Ok(Arrival::Messages(received));
        }
        self.leave().await;
        let failed = slot.take().and_then(|consuming| consuming.failed);
        Err(failed.unwrap_or_else(|| self.unavailable("the consumer failed")))
    }

    async fn settle(&self, answers: &[(Receipt, Answer)]) -> Result<(), Unavailable> {
        // Each is put into the connection's buffer at once; together they leave in few packets.
        let answers = answers.iter().map(|(receipt, answer)| self.answer(*receipt, *answer));
        futures_util::future::join_all(answers).await.into_iter().collect()
    }

    async fn close(&self) {
        self.leave().await;
        *self.consumer.lock().await = None;
    }
}

struct Consuming {
    consumer: Consumer,
    /// Why it ended; told with the next call, since messages came before.
    failed: Option<Unavailable>,
}
