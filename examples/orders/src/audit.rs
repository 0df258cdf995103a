//! A second queue on the same exchange, read to the end: the broker's own account of what it stored, in its order.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use postroom::{Answer, Arrival, Bound, BoxError, MessageId, Receipt, Subscription};
use postroom_brokers::rabbitmq::{Binding, RabbitmqSubscription, RabbitmqSubscriptionOptions};
use tokio::task::JoinHandle;

#[derive(Default)]
struct Log {
    ids: Vec<MessageId>,
    distinct: HashSet<MessageId>,
}

pub struct Audit {
    log: Arc<Mutex<Log>>,
    reading: JoinHandle<()>,
}

impl Audit {
    pub async fn begin(rabbitmq: &str, run: &str) -> Result<Self, BoxError> {
        let subscription = RabbitmqSubscription::new(RabbitmqSubscriptionOptions {
            url: rabbitmq.to_owned(),
            queue: format!("{run}-audit"),
            bind: vec![Binding::new(run, "#")],
            prefetch: 2000,
            unsettled_bytes_max: 64 << 20,
        })?;
        subscription.connect().await?;
        let log = Arc::new(Mutex::new(Log::default()));
        let reading = tokio::spawn(read(subscription, log.clone()));
        Ok(Self { log, reading })
    }

    /// Messages that the broker stored so far, repeated ones as often as they were.
    pub fn seen(&self) -> usize {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).ids.len()
    }

    /// Different messages among them.
    pub fn distinct(&self) -> usize {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).distinct.len()
    }

    /// Everything that the broker stored, in its order. Call it when nothing is published any more.
    pub async fn end(self) -> Vec<MessageId> {
        // Whatever is still on its way from the broker arrives within moments, one after the other.
        let mut before = usize::MAX;
        while before != self.seen() {
            before = self.seen();
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        self.reading.abort();
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut log.ids)
    }
}

async fn read(subscription: RabbitmqSubscription, log: Arc<Mutex<Log>>) {
    loop {
        match subscription.receive(Bound { messages: 100, bytes: 1 << 20 }).await {
            Ok(Arrival::Messages(received)) => {
                let acks: Vec<(Receipt, Answer)> =
                    received.iter().map(|received| (received.receipt, Answer::Ack)).collect();
                {
                    let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
                    for received in received {
                        log.ids.push(received.message.id);
                        log.distinct.insert(received.message.id);
                    }
                }
                if let Err(error) = subscription.settle(&acks).await {
                    eprintln!("orders: the audit queue: {error}");
                }
            }
            // Queues are handed out whole.
            Ok(Arrival::Revoked(_)) => {}
            Err(error) => {
                eprintln!("orders: the audit queue: {error}");
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        }
    }
}
