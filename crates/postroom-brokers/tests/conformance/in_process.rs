//! The broker in memory.

use std::sync::Arc;

use async_trait::async_trait;
use postroom::{Batch, Message, Sink, Subscription, TopicFilter};
use postroom_brokers::in_process::InProcessBroker;
use postroom_testkit::conformance::Fixture;
use postroom_testkit::conformance::sink::{FarEnd, Fault, Stored};
use postroom_testkit::conformance::subscription::Queue;

const QUEUE: &str = "q";

pub struct Broker(InProcessBroker);

mod sink {
    postroom_testkit::sink_conforms!(super::Broker);
}

mod subscription {
    postroom_testkit::subscription_conforms!(super::Broker);
}

#[async_trait]
impl Fixture for Broker {
    async fn create() -> Self {
        let broker = InProcessBroker::new();
        broker.declare_queue(QUEUE, TopicFilter::new(["orders"]).unwrap());
        Self(broker)
    }
}

#[async_trait]
impl FarEnd for Broker {
    async fn sink(&self) -> Arc<dyn Sink> {
        Arc::new(self.0.sink())
    }

    /// A topic that no queue takes is refused; the rest happens on networks only.
    async fn begin(&self, fault: Fault) -> bool {
        fault == Fault::Reject
    }

    fn refused(&self) -> Message {
        Message::new("nowhere", "order.placed", "x")
    }

    async fn heal(&self) {}

    async fn stored(&self) -> Vec<Stored> {
        let stored = |message: Message| Stored { id: message.id.to_string(), payload: message.payload.to_vec() };
        self.0.log().into_iter().map(stored).collect()
    }
}

#[async_trait]
impl Queue for Broker {
    async fn subscribe(&self, prefetch: u16) -> Arc<dyn Subscription> {
        Arc::new(self.0.subscribe(QUEUE, prefetch.into()))
    }

    async fn publish(&self, messages: &[Message]) {
        self.0.sink().publish(&Batch::new(messages.iter().cloned())).await.unwrap();
    }
}
