//! AMQP 1.0 with RabbitMQ 4, through a link that loses, holds and slows down what it carries. What is stored is read over AMQP 0-9-1.

use std::sync::{Arc, OnceLock};

use async_trait::async_trait;
use postroom::{Batch, Message, Sink, Subscription};
use postroom_brokers::amqp10::{Amqp10Options, Amqp10Sink, Amqp10Subscription, Amqp10SubscriptionOptions};
use postroom_testkit::conformance::Fixture;
use postroom_testkit::conformance::sink::{FarEnd, Fault, Stored};
use postroom_testkit::conformance::subscription::Queue;
use postroom_testkit::proxy::{Link, Proxy};
use postroom_testkit::rabbitmq::{AuditQueue, QueueKind};
use postroom_testkit::services::RabbitServer;
use postroom_testkit::surroundings;

/// One broker for all cases. It ends with this process.
static SERVER: OnceLock<RabbitServer> = OnceLock::new();

pub struct Exchange {
    exchange: String,
    link: Proxy,
    audit: AuditQueue,
}

mod sink {
    postroom_testkit::sink_conforms!(super::Exchange);
}

mod subscription {
    postroom_testkit::subscription_conforms!(super::Classic);
}

mod quorum {
    postroom_testkit::subscription_conforms!(super::Quorum);
}

async fn server() -> &'static RabbitServer {
    let started =
        || SERVER.get_or_init(|| RabbitServer::start_newer(&surroundings::scratch("rabbitmq4"), None).unwrap());
    tokio::task::spawn_blocking(started).await.unwrap()
}

fn options(address: &str, exchange: &str) -> Amqp10Options {
    let mut options =
        Amqp10Options::new(format!("amqp://guest:guest@{address}"), format!("/exchanges/{exchange}/{{routing_key}}"));
    (options.publish_deadline_seconds, options.batches_in_flight_max) = (2, 2);
    options
}

fn straight(server: &RabbitServer) -> String {
    format!("127.0.0.1:{}", server.port())
}

#[async_trait]
impl Fixture for Exchange {
    async fn create() -> Self {
        let server = server().await;
        let exchange = format!("e-{}", surroundings::unique());
        let audit = AuditQueue::bound(&server.url(), &exchange, "accepted").await;
        let link = Proxy::to(&straight(server)).await;
        Self { exchange, link, audit }
    }
}

#[async_trait]
impl FarEnd for Exchange {
    async fn sink(&self) -> Arc<dyn Sink> {
        Arc::new(Amqp10Sink::new(options(&self.link.address(), &self.exchange)).unwrap())
    }

    async fn begin(&self, fault: Fault) -> bool {
        match fault {
            // No queue is bound to what is refused, so the broker releases it.
            Fault::Reject => {}
            Fault::StoreAndFail => self.link.set(Link::RepliesLost),
            Fault::Hold => self.link.set(Link::BlackHole),
            Fault::Slow => self.link.set(Link::Throttled(2_000)),
        }
        true
    }

    async fn heal(&self) {
        self.link.set(Link::Open);
        // A connection that lost an answer stays without answers.
        self.link.reset();
    }

    async fn stored(&self) -> Vec<Stored> {
        self.audit.drain().await.into_iter().map(|stored| Stored { id: stored.id, payload: stored.body }).collect()
    }
}

/// A queue of its own.
pub struct Bound(AuditQueue, String);

/// On one node.
pub struct Classic(Bound);

/// Replicated.
pub struct Quorum(Bound);

impl Bound {
    async fn of(kind: QueueKind) -> Self {
        let (url, exchange) = (server().await.url(), format!("e-{}", surroundings::unique()));
        let queue = AuditQueue::named(&url, &exchange, "#", &format!("q-{exchange}"), kind).await;
        Self(queue, exchange)
    }

    async fn subscribe(&self, prefetch: u16) -> Arc<dyn Subscription> {
        let url = format!("amqp://guest:guest@{}", straight(server().await));
        let mut options = Amqp10SubscriptionOptions::new(url, format!("/queues/{}", self.0.name()));
        options.prefetch = prefetch;
        let subscription = Amqp10Subscription::new(options).unwrap();
        subscription.connect().await.unwrap();
        Arc::new(subscription)
    }

    async fn publish(&self, messages: &[Message]) {
        let sink = Amqp10Sink::new(options(&straight(server().await), &self.1)).unwrap();
        sink.publish(&Batch::new(messages.iter().cloned())).await.unwrap();
        sink.close().await;
    }
}

macro_rules! bound {
    ($of:ident, $kind:expr) => {
        #[async_trait]
        impl Fixture for $of {
            async fn create() -> Self {
                Self(Bound::of($kind).await)
            }
        }

        #[async_trait]
        impl Queue for $of {
            async fn subscribe(&self, prefetch: u16) -> Arc<dyn Subscription> {
                self.0.subscribe(prefetch).await
            }

            async fn publish(&self, messages: &[Message]) {
                self.0.publish(messages).await;
            }
        }
    };
}

bound!(Classic, QueueKind::Classic);
bound!(Quorum, QueueKind::QuorumWithOneActive);
