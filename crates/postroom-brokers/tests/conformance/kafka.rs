//! Apache Kafka, through a link that loses, holds and slows down what it carries.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use async_trait::async_trait;
use postroom::{Batch, Message, Sink, Subscription};
use postroom_brokers::kafka::{
    KafkaOptions, KafkaSink, KafkaSubscription, KafkaSubscriptionOptions, KafkaTransactionsSink,
};
use postroom_testkit::conformance::Fixture;
use postroom_testkit::conformance::sink::{FarEnd, Fault, Stored};
use postroom_testkit::conformance::subscription::Queue;
use postroom_testkit::kafka::AuditTopic;
use postroom_testkit::proxy::{Link, Proxy};
use postroom_testkit::services::KafkaServer;
use postroom_testkit::surroundings;

/// One for each case of both sinks.
const LINKS: usize = 24;

/// One broker for all cases: a Java program starts in seconds. It ends with this process.
static SERVER: OnceLock<KafkaServer> = OnceLock::new();
static TAKEN: AtomicUsize = AtomicUsize::new(0);

/// A topic that is published to in transactions, or not.
pub struct Topic<const IN_TRANSACTIONS: bool> {
    link: Proxy,
    audit: AuditTopic,
    options: KafkaOptions,
    /// Records that were taken out.
    read: Mutex<usize>,
}

mod sink {
    postroom_testkit::sink_conforms!(super::Topic<false>);
}

mod transactions {
    postroom_testkit::sink_conforms!(super::Topic<true>);
}

mod subscription {
    postroom_testkit::subscription_conforms!(super::Group);
}

async fn server() -> &'static KafkaServer {
    let server = tokio::task::spawn_blocking(|| {
        SERVER.get_or_init(|| KafkaServer::start(&surroundings::scratch("kafka"), LINKS).unwrap())
    });
    server.await.unwrap()
}

#[async_trait]
impl<const IN_TRANSACTIONS: bool> Fixture for Topic<IN_TRANSACTIONS> {
    async fn create() -> Self {
        let server = server().await;
        let number = TAKEN.fetch_add(1, Ordering::Relaxed);
        let (advertised, listens) = server.link(number);
        let link = Proxy::at(&advertised, &listens).await;
        let audit = AuditTopic::create(&server.address(), &format!("t{number}-accepted"), 1, &[]).await;
        let mut options = KafkaOptions::new(format!("kafka://{advertised}"));
        options.topic = format!("t{number}-{{routing_key}}");
        (options.publish_deadline_seconds, options.batches_in_flight_max) = (2, 2);
        if IN_TRANSACTIONS {
            let ledger = format!("t{number}-ledger");
            AuditTopic::create(&server.address(), &ledger, 1, &[]).await;
            (options.transactional_id, options.ledger) = (Some(format!("t{number}")), Some(ledger));
            // The first transaction asks for the coordinator and for partitions, beside other cases.
            options.publish_deadline_seconds = 5;
        }
        Self { link, audit, options, read: Mutex::new(0) }
    }
}

#[async_trait]
impl<const IN_TRANSACTIONS: bool> FarEnd for Topic<IN_TRANSACTIONS> {
    async fn sink(&self) -> Arc<dyn Sink> {
        if IN_TRANSACTIONS {
            return Arc::new(KafkaTransactionsSink::new(self.options.clone()).unwrap());
        }
        Arc::new(KafkaSink::new(self.options.clone()).unwrap())
    }

    async fn begin(&self, fault: Fault) -> bool {
        match fault {
            // The topic of what is refused does not exist.
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
        let all = self.audit.read().await;
        let before = std::mem::replace(&mut *self.read.lock().unwrap(), all.len());
        let new = all.into_iter().skip(before);
        new.map(|stored| Stored { id: stored.id, payload: stored.payload.expect("no tombstone") }).collect()
    }
}

/// A group that receives from one topic.
pub struct Group {
    url: String,
    topic: String,
}

#[async_trait]
impl Fixture for Group {
    async fn create() -> Self {
        let server = server().await;
        let topic = format!("group-{}", surroundings::unique());
        AuditTopic::create(&server.address(), &topic, 1, &[]).await;
        Self { url: format!("kafka://{}", server.address()), topic }
    }
}

#[async_trait]
impl Queue for Group {
    async fn subscribe(&self, prefetch: u16) -> Arc<dyn Subscription> {
        let mut options = KafkaSubscriptionOptions::new(&self.url, &[&self.topic], &self.topic);
        options.prefetch = prefetch;
        let subscription = KafkaSubscription::new(options).unwrap();
        subscription.connect().await.unwrap();
        Arc::new(subscription)
    }

    async fn publish(&self, messages: &[Message]) {
        let mut options = KafkaOptions::new(&self.url);
        options.topic = self.topic.clone();
        let sink = KafkaSink::new(options).unwrap();
        sink.publish(&Batch::new(messages.iter().cloned())).await.unwrap();
        sink.close().await;
    }
}
