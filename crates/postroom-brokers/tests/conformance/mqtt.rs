//! MQTT 5 with Mosquitto, through a link that loses, holds and slows down what it carries.

use std::sync::Arc;

use async_trait::async_trait;
use postroom::{Batch, Message, Sink, Subscription};
use postroom_brokers::mqtt::{MqttOptions, MqttSink, MqttSubscription, MqttSubscriptionOptions};
use postroom_testkit::conformance::Fixture;
use postroom_testkit::conformance::sink::{FarEnd, Fault, Stored};
use postroom_testkit::conformance::subscription::Queue;
use postroom_testkit::mqtt::AuditSession;
use postroom_testkit::proxy::{Link, Proxy};
use postroom_testkit::services::MosquittoServer;
use postroom_testkit::surroundings;

const TOPIC: &str = "accepted";

pub struct Topics {
    server: MosquittoServer,
    link: Proxy,
    audit: AuditSession,
}

/// A session at a broker.
pub struct Receiving(MosquittoServer);

mod sink {
    postroom_testkit::sink_conforms!(super::Topics);
}

mod subscription {
    postroom_testkit::subscription_conforms!(super::Receiving);
}

fn options(url: String) -> MqttOptions {
    let mut options = MqttOptions::new(url, "{routing_key}");
    (options.publish_deadline_seconds, options.batches_in_flight_max) = (2, 2);
    options
}

#[async_trait]
impl Fixture for Topics {
    async fn create() -> Self {
        let dir = surroundings::scratch("mqtt");
        // Nobody may write to one topic.
        std::fs::write(dir.join("rights"), "topic readwrite #\ntopic deny refused\n").unwrap();
        let rights = format!("acl_file {}", dir.join("rights").display());
        let server = MosquittoServer::start(&dir, &rights).unwrap();
        let link = Proxy::to(&server.address()).await;
        let audit = AuditSession::begin(&server.address(), "audit", "#").await;
        Self { server, link, audit }
    }
}

#[async_trait]
impl FarEnd for Topics {
    async fn sink(&self) -> Arc<dyn Sink> {
        let _ = &self.server;
        Arc::new(MqttSink::new(options(format!("mqtt://{}", self.link.address()))).unwrap())
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
        self.audit.heard().await.into_iter().map(|heard| Stored { id: heard.id, payload: heard.payload }).collect()
    }
}

#[async_trait]
impl Fixture for Receiving {
    async fn create() -> Self {
        let server = MosquittoServer::start(&surroundings::scratch("mqtt"), "").unwrap();
        let receiving = Self(server);
        // The session is there before anything is published.
        receiving.subscribe(1).await.close().await;
        receiving
    }
}

#[async_trait]
impl Queue for Receiving {
    async fn subscribe(&self, prefetch: u16) -> Arc<dyn Subscription> {
        let mut options = MqttSubscriptionOptions::new(self.0.url(), &[TOPIC], "billing");
        options.prefetch = prefetch;
        let subscription = MqttSubscription::new(options).unwrap();
        subscription.connect().await.unwrap();
        Arc::new(subscription)
    }

    async fn publish(&self, messages: &[Message]) {
        let sink = MqttSink::new(options(self.0.url())).unwrap();
        let messages = messages.iter().cloned().map(|message| message.routing_key(TOPIC));
        sink.publish(&Batch::new(messages)).await.unwrap();
        sink.close().await;
    }
}
