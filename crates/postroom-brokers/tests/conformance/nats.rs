//! NATS JetStream, through a link that loses, holds and slows down what it carries.

use std::sync::Arc;

use async_trait::async_trait;
use postroom::{Batch, Message, Sink, Subscription};
use postroom_brokers::nats::{NatsOptions, NatsSink, NatsSubscription, NatsSubscriptionOptions};
use postroom_testkit::conformance::Fixture;
use postroom_testkit::conformance::sink::{FarEnd, Fault, Stored};
use postroom_testkit::conformance::subscription::Queue;
use postroom_testkit::nats::AuditStream;
use postroom_testkit::proxy::{Link, Proxy};
use postroom_testkit::services::NatsServer;
use postroom_testkit::surroundings;
use serde_json::json;

const STREAM: &str = "ORDERS";

pub struct Stream {
    server: NatsServer,
    link: Proxy,
    audit: AuditStream,
}

mod sink {
    postroom_testkit::sink_conforms!(super::Stream);
}

mod subscription {
    postroom_testkit::subscription_conforms!(super::Consumer);
}

mod work_queue {
    postroom_testkit::subscription_conforms!(super::WorkQueue);
}

impl Stream {
    async fn with(further: serde_json::Value) -> Self {
        let server = NatsServer::start(&surroundings::scratch("nats"), "").unwrap();
        let audit = AuditStream::create(&server.address(), STREAM, &["accepted"], further).await;
        let link = Proxy::to(&server.address()).await;
        Self { server, link, audit }
    }

    fn options(&self, url: String) -> NatsOptions {
        let mut options = NatsOptions::new(url, STREAM);
        (options.publish_deadline_seconds, options.batches_in_flight_max) = (2, 2);
        options
    }
}

#[async_trait]
impl Fixture for Stream {
    async fn create() -> Self {
        Self::with(json!({})).await
    }
}

#[async_trait]
impl FarEnd for Stream {
    async fn sink(&self) -> Arc<dyn Sink> {
        Arc::new(NatsSink::new(self.options(format!("nats://{}", self.link.address()))).unwrap())
    }

    async fn begin(&self, fault: Fault) -> bool {
        match fault {
            // No stream takes the subject of what is refused.
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
        self.audit.drain().await.into_iter().map(|stored| Stored { id: stored.id, payload: stored.payload }).collect()
    }
}

/// A consumer of a stream.
pub struct Consumer(Stream);

#[async_trait]
impl Fixture for Consumer {
    async fn create() -> Self {
        Self(Stream::create().await)
    }
}

/// The same of a stream that forgets what was acked.
pub struct WorkQueue(Stream);

#[async_trait]
impl Fixture for WorkQueue {
    async fn create() -> Self {
        Self(Stream::with(json!({ "retention": "workqueue" })).await)
    }
}

async fn subscribe(stream: &Stream, prefetch: u16) -> Arc<dyn Subscription> {
    let mut options = NatsSubscriptionOptions::new(stream.server.url(), STREAM, "billing");
    options.prefetch = prefetch;
    let subscription = NatsSubscription::new(options).unwrap();
    // The server may not have noticed yet that the one before is gone.
    for _ in 0..500 {
        match subscription.connect().await {
            Ok(()) => return Arc::new(subscription),
            Err(error) => {
                let text = format!("{error}: {:?}", std::error::Error::source(&error).map(ToString::to_string));
                assert!(text.contains("somebody else"), "{text}");
                tokio::task::yield_now().await;
            }
        }
    }
    panic!("somebody else goes on receiving");
}

async fn publish(stream: &Stream, messages: &[Message]) {
    let sink = NatsSink::new(stream.options(stream.server.url())).unwrap();
    let messages = messages.iter().cloned().map(|message| message.routing_key("accepted"));
    sink.publish(&Batch::new(messages)).await.unwrap();
    sink.close().await;
}

#[async_trait]
impl Queue for Consumer {
    async fn subscribe(&self, prefetch: u16) -> Arc<dyn Subscription> {
        subscribe(&self.0, prefetch).await
    }

    async fn publish(&self, messages: &[Message]) {
        publish(&self.0, messages).await;
    }
}

#[async_trait]
impl Queue for WorkQueue {
    async fn subscribe(&self, prefetch: u16) -> Arc<dyn Subscription> {
        subscribe(&self.0, prefetch).await
    }

    async fn publish(&self, messages: &[Message]) {
        publish(&self.0, messages).await;
    }
}
