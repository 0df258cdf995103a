//! Between a subscription and those who work with what it brings.

use std::sync::Arc;
use std::time::Duration;

use postroom::{Answer, Arrival, Bound, Consumer, Live, Receipt, Subscription};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use crate::again::stopped_within;
use crate::handler::chain;
use crate::in_hand::InHand;

/// In an outage: how often to look whether it is over, and how often its failures are told.
const LOOK_EVERY: Duration = Duration::from_millis(500);
const TELL_EVERY: Duration = Duration::from_secs(30);
const RETRY_FIRST: Duration = Duration::from_millis(100);
/// An ack that takes longer is given up: its connection hangs, and the message comes again as a duplicate.
pub(crate) const ACK_TIMEOUT: Duration = Duration::from_secs(10);
/// What the store refuses even as a dead message goes back to the broker after this long.
const REQUEUE_AFTER: Duration = Duration::from_secs(10);

/// Carries arrivals from the subscription; an error is waited out, for `retry_cap` at most, and kept in `trouble` until messages come. The waits
/// grow until messages have come for longer than the last one: a message that ends its connection would otherwise be asked for all the time.
pub(crate) async fn receive(
    subscription: Arc<dyn Subscription>,
    to: mpsc::Sender<Arrival>,
    at_once: Bound,
    retry_cap: Duration,
    trouble: Live<Option<String>>,
    consumer: Consumer,
) {
    let mut wait = RETRY_FIRST;
    let mut waited = Duration::ZERO;
    let mut well_since: Option<Instant> = None;
    let mut outage: Option<Outage> = None;
    loop {
        let received = {
            let mut receiving = std::pin::pin!(subscription.receive(at_once));
            loop {
                // A queue that is empty brings nothing, so whether the broker is back is asked for.
                tokio::select! {
                    biased;
                    received = &mut receiving => break received,
                    () = tokio::time::sleep(LOOK_EVERY), if outage.is_some() => {
                        if subscription.is_connected() {
                            ended(&consumer, &mut outage);
                            trouble.set(None);
                        }
                    }
                }
            }
        };
        match received {
            Ok(arrival) => {
                well_since.get_or_insert_with(Instant::now);
                ended(&consumer, &mut outage);
                trouble.set(None);
                if to.send(arrival).await.is_err() {
                    return;
                }
            }
            Err(error) => {
                let why = chain(&error);
                outage.get_or_insert_with(Outage::begin).tell(&consumer, &why);
                trouble.set(Some(why));
                if well_since.take().is_some_and(|since| since.elapsed() > waited) {
                    wait = RETRY_FIRST;
                }
                tokio::time::sleep(wait).await;
                (waited, wait) = (wait, (wait * 2).min(retry_cap));
            }
        }
    }
}

/// Nothing has been received, or nothing of it could be stored, since it began.
pub(crate) struct Outage {
    began: Instant,
    told: Option<Instant>,
    withheld: u64,
}

impl Outage {
    pub(crate) fn begin() -> Self {
        Self { began: Instant::now(), told: None, withheld: 0 }
    }

    /// Tells the log at the beginning, and what has repeated since every so often.
    pub(crate) fn tell(&mut self, consumer: &Consumer, why: &str) {
        if self.told.is_some_and(|told| told.elapsed() < TELL_EVERY) {
            self.withheld += 1;
            return;
        }
        self.told = Some(Instant::now());
        match std::mem::take(&mut self.withheld) {
            0 => tracing::warn!(%consumer, "failed to {why}; trying again"),
            more => {
                tracing::warn!(%consumer, "failed to {why}; trying again ({more} more failures since this was last said)")
            }
        }
    }
}

fn ended(consumer: &Consumer, outage: &mut Option<Outage>) {
    if let Some(Outage { began, .. }) = outage.take() {
        tracing::info!(%consumer, "messages can be received again after {:.1} s", began.elapsed().as_secs_f64());
    }
}

/// Received messages can be stored again.
pub(crate) fn stored_again(consumer: &Consumer, outage: &mut Option<Outage>) {
    if let Some(Outage { began, .. }) = outage.take() {
        tracing::info!(%consumer, "received messages can be stored again after {:.1} s", began.elapsed().as_secs_f64());
    }
}

/// Answers the broker, within 10 s from `began`. A connection that is gone gives back by itself.
pub(crate) async fn answer(began: Instant, subscription: &dyn Subscription, answers: &[(Receipt, Answer)]) {
    if answers.is_empty() {
        return;
    }
    match tokio::time::timeout_at(began + ACK_TIMEOUT, subscription.settle(answers)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!("failed to {}", chain(&error)),
        Err(_) => tracing::debug!("an ack was given up after {ACK_TIMEOUT:?}"),
    }
}

/// Gives a delivery back after a while, or when the receiver stops: one that the broker delivers again at once would go round
/// without a pause. It is not acked meanwhile, so a crash gives it back too.
pub(crate) fn requeue_later(
    subscription: Arc<dyn Subscription>,
    receipt: Receipt,
    in_hand: InHand,
    stopping: watch::Receiver<bool>,
) {
    tokio::spawn(async move {
        stopped_within(&stopping, REQUEUE_AFTER).await;
        answer(Instant::now(), subscription.as_ref(), &[(receipt, Answer::Requeue)]).await;
        in_hand.remove(receipt);
    });
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use async_trait::async_trait;
    use postroom::{Message, Partition, Received, Unavailable};

    use super::*;

    /// Brings a message, and then an error, after so long each.
    struct Breaking {
        lasts: Duration,
        asked: AtomicUsize,
    }

    #[async_trait]
    impl Subscription for Breaking {
        async fn receive(&self, _: Bound) -> Result<Arrival, Unavailable> {
            if self.asked.fetch_add(1, Ordering::Relaxed).is_multiple_of(2) {
                let message = Message::new("orders", "k", "x");
                let (receipt, partition, id) = (Receipt::new(1, 1), Partition::default(), Some(message.id));
                return Ok(Arrival::Messages(vec![Received { receipt, partition, redelivered: false, id, message }]));
            }
            tokio::time::sleep(self.lasts).await;
            Err(Unavailable::new("a queue", "the connection has ended"))
        }

        async fn settle(&self, _: &[(Receipt, Answer)]) -> Result<(), Unavailable> {
            Ok(())
        }

        async fn close(&self) {}
    }

    /// How often a session is begun in ten minutes.
    async fn sessions(lasts: Duration) -> usize {
        let breaking = Arc::new(Breaking { lasts, asked: AtomicUsize::new(0) });
        let (to, mut arrivals) = mpsc::channel(1);
        let bound = Bound { messages: 1, bytes: 1 };
        let consumer = Consumer::new("billing").unwrap();
        let receiving = receive(breaking.clone(), to, bound, Duration::from_secs(30), Live::default(), consumer);
        let taking = async { while arrivals.recv().await.is_some() {} };
        let _ = tokio::time::timeout(Duration::from_secs(600), async { tokio::join!(receiving, taking) }).await;
        breaking.asked.load(Ordering::Relaxed) / 2
    }

    #[tokio::test(start_paused = true)]
    async fn a_message_that_ends_its_connection_is_not_asked_for_all_the_time() {
        assert!(sessions(Duration::from_millis(20)).await < 50);
        // A broker whose connections last for a while is asked again soon.
        assert!(sessions(Duration::from_secs(5)).await > 100);
    }
}
