//! Between a subscription and those who work with what it brings.

use std::sync::Arc;
use std::time::Duration;

use postroom::{Answer, Arrival, Bound, Consumer, Live, Receipt, Subscription};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use crate::again::stopped_within;
use crate::handler::chain;
use crate::in_hand::InHand;

const RETRY_FIRST: Duration = Duration::from_millis(100);
/// An ack that takes longer is given up: its connection hangs, and the message comes again as a duplicate.
pub(crate) const ACK_TIMEOUT: Duration = Duration::from_secs(10);
/// What the store refuses even as a dead message goes back to the broker after this long.
const REQUEUE_AFTER: Duration = Duration::from_secs(10);

/// Carries arrivals from the subscription; an error is waited out, for `retry_cap` at most, and kept in `trouble` until messages come.
pub(crate) async fn receive(
    subscription: Arc<dyn Subscription>,
    to: mpsc::Sender<Arrival>,
    at_once: Bound,
    retry_cap: Duration,
    trouble: Live<Option<String>>,
    consumer: Consumer,
) {
    let mut wait = RETRY_FIRST;
    loop {
        match subscription.receive(at_once).await {
            Ok(arrival) => {
                wait = RETRY_FIRST;
                trouble.set(None);
                if to.send(arrival).await.is_err() {
                    return;
                }
            }
            Err(error) => {
                let why = chain(&error);
                tracing::warn!(%consumer, "failed to {why}; trying again in {wait:?}");
                trouble.set(Some(why));
                tokio::time::sleep(wait).await;
                wait = (wait * 2).min(retry_cap);
            }
        }
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
