//! Redis Streams, through a link that loses, holds and slows down what it carries.

use std::sync::Arc;

use async_trait::async_trait;
use postroom::{Batch, Message, Sink, Subscription};
use postroom_brokers::redis::{RedisOptions, RedisSink, RedisSubscription, RedisSubscriptionOptions};
use postroom_testkit::conformance::Fixture;
use postroom_testkit::conformance::sink::{FarEnd, Fault, Stored};
use postroom_testkit::conformance::subscription::Queue;
use postroom_testkit::proxy::{Link, Proxy};
use postroom_testkit::redis::{ask, entries};
use postroom_testkit::services::RedisServer;
use postroom_testkit::surroundings;

const STREAM: &str = "accepted";

pub struct Streams {
    server: RedisServer,
    link: Proxy,
}

mod sink {
    postroom_testkit::sink_conforms!(super::Streams);
}

mod subscription {
    postroom_testkit::subscription_conforms!(super::Group);
}

/// The same of a group that removes what it is behind.
mod work_queue {
    postroom_testkit::subscription_conforms!(super::WorkQueue);
}

impl Streams {
    fn options(&self, url: String) -> RedisOptions {
        let mut options = RedisOptions::new(url, "{routing_key}");
        (options.publish_deadline_seconds, options.batches_in_flight_max) = (2, 2);
        options
    }

    async fn subscribe(&self, prefetch: u16, removes: bool) -> Arc<dyn Subscription> {
        let mut options = RedisSubscriptionOptions::new(self.server.url(), &[STREAM], "billing");
        (options.prefetch, options.removes) = (prefetch, removes);
        let subscription = RedisSubscription::new(options).unwrap();
        // The one before may not have told the server yet that it is gone.
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

    async fn publish(&self, messages: &[Message]) {
        let sink = RedisSink::new(self.options(self.server.url())).unwrap();
        let messages = messages.iter().cloned().map(|message| message.routing_key(STREAM));
        sink.publish(&Batch::new(messages)).await.unwrap();
        sink.close().await;
    }
}

#[async_trait]
impl Fixture for Streams {
    async fn create() -> Self {
        let server = RedisServer::start(&surroundings::scratch("redis"), "").unwrap();
        let link = Proxy::to(&server.address()).await;
        // A key that is no stream.
        ask(&server.address(), &["SET", "refused", "x"]).await;
        Self { server, link }
    }
}

#[async_trait]
impl FarEnd for Streams {
    async fn sink(&self) -> Arc<dyn Sink> {
        Arc::new(RedisSink::new(self.options(format!("redis://{}", self.link.address()))).unwrap())
    }

    async fn begin(&self, fault: Fault) -> bool {
        match fault {
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
        let address = self.server.address();
        let all = entries(&address, STREAM).await;
        ask(&address, &["DEL", STREAM]).await;
        all.into_iter().map(|entry| Stored { id: entry.id, payload: entry.payload }).collect()
    }
}

/// A consumer group.
pub struct Group(Streams);

pub struct WorkQueue(Streams);

#[async_trait]
impl Fixture for Group {
    async fn create() -> Self {
        Self(Streams::create().await)
    }
}

#[async_trait]
impl Fixture for WorkQueue {
    async fn create() -> Self {
        Self(Streams::create().await)
    }
}

#[async_trait]
impl Queue for Group {
    async fn subscribe(&self, prefetch: u16) -> Arc<dyn Subscription> {
        self.0.subscribe(prefetch, false).await
    }

    async fn publish(&self, messages: &[Message]) {
        self.0.publish(messages).await;
    }
}

#[async_trait]
impl Queue for WorkQueue {
    async fn subscribe(&self, prefetch: u16) -> Arc<dyn Subscription> {
        self.0.subscribe(prefetch, true).await
    }

    async fn publish(&self, messages: &[Message]) {
        self.0.publish(messages).await;
    }
}
