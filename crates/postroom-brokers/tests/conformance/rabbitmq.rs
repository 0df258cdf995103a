//! RabbitMQ, through a link that loses, holds and slows down what it carries.

use std::sync::Arc;

use async_trait::async_trait;
use postroom::{Batch, Message, Sink, Subscription};
use postroom_brokers::rabbitmq::{
    Binding, RabbitmqOptions, RabbitmqSink, RabbitmqSubscription, RabbitmqSubscriptionOptions,
};
use postroom_testkit::conformance::Fixture;
use postroom_testkit::conformance::sink::{FarEnd, Fault, Stored};
use postroom_testkit::conformance::subscription::Queue;
use postroom_testkit::proxy::{Link, Proxy};
use postroom_testkit::rabbitmq::AuditQueue;
use postroom_testkit::surroundings;

pub struct Exchange {
    /// Straight to the broker.
    url: String,
    exchange: String,
    link: Proxy,
    audit: AuditQueue,
}

mod sink {
    postroom_testkit::sink_conforms!(super::Exchange);
}

mod subscription {
    postroom_testkit::subscription_conforms!(super::Bound);
}

impl Exchange {
    fn options(&self, address: &str) -> RabbitmqOptions {
        let (_, target) = address_of(&self.url);
        let mut options = RabbitmqOptions::new(self.url.replacen(&target, address, 1));
        options.exchange = self.exchange.clone();
        (options.publish_deadline_seconds, options.channels) = (2, 2);
        options
    }
}

/// What stands before the address in a URL, and the address.
fn address_of(url: &str) -> (String, String) {
    let (before, rest) = url.split_once('@').unwrap();
    (before.to_owned(), rest.split('/').next().unwrap().to_owned())
}

#[async_trait]
impl Fixture for Exchange {
    async fn create() -> Self {
        let url = surroundings::rabbitmq_url();
        let exchange = format!("e-{}", surroundings::unique());
        let audit = AuditQueue::bound(&url, &exchange, "accepted").await;
        let link = Proxy::to(&address_of(&url).1).await;
        Self { url, exchange, link, audit }
    }
}

#[async_trait]
impl FarEnd for Exchange {
    async fn sink(&self) -> Arc<dyn Sink> {
        Arc::new(RabbitmqSink::new(self.options(&self.link.address())).unwrap())
    }

    async fn begin(&self, fault: Fault) -> bool {
        match fault {
            // No queue is bound to what is refused, so the broker returns it.
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
pub struct Bound(Exchange);

#[async_trait]
impl Fixture for Bound {
    async fn create() -> Self {
        let bound = Self(Exchange::create().await);
        // Declared and bound before anything is published.
        drop(bound.subscribe(1).await);
        bound
    }
}

#[async_trait]
impl Queue for Bound {
    async fn subscribe(&self, prefetch: u16) -> Arc<dyn Subscription> {
        let subscription = RabbitmqSubscription::new(RabbitmqSubscriptionOptions {
            url: self.0.url.clone(),
            queue: format!("q-{}", self.0.exchange),
            bind: vec![Binding::new(&self.0.exchange, "#")],
            prefetch,
            unsettled_bytes_max: 64 << 20,
        })
        .unwrap();
        subscription.connect().await.unwrap();
        Arc::new(subscription)
    }

    async fn publish(&self, messages: &[Message]) {
        let sink = RabbitmqSink::new(self.0.options(&address_of(&self.0.url).1)).unwrap();
        sink.publish(&Batch::new(messages.iter().cloned())).await.unwrap();
        sink.close().await;
    }
}
