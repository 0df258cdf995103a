//! What every `Subscription` promises to those who receive.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postroom::{Message, MessageId, Received, Subscription};

use super::Fixture;

/// Nothing that is there takes longer to arrive.
const ARRIVES_WITHIN: Duration = Duration::from_secs(30);
/// What has not come by then is taken not to come; a case that waits for it in vain is slow, and never wrong.
const NOTHING_WITHIN: Duration = Duration::from_millis(300);

/// A queue of a broker.
#[async_trait]
pub trait Queue: Fixture {
    /// A subscription to it, that holds at most so many deliveries unsettled.
    async fn subscribe(&self, prefetch: u16) -> Arc<dyn Subscription>;

    /// Publishes to it, with postroom's own sink or as postroom's sink would.
    async fn publish(&self, messages: &[Message]);
}

/// The tests of one implementation.
#[macro_export]
macro_rules! subscription_conforms {
    ($fixture:ty) => {
        $crate::conformance_cases!(
            $fixture,
            subscription: what_was_published_arrives_in_order_and_whole
            what_is_acked_does_not_come_again
            what_is_not_settled_comes_again_to_another
            what_is_requeued_comes_again_and_is_marked
            what_is_rejected_does_not_come_again
            no_more_than_the_prefetch_is_handed_out
            settling_twice_harms_no_other_delivery
        );
    };
}

async fn receive(subscription: &Arc<dyn Subscription>) -> Received {
    let received = tokio::time::timeout(ARRIVES_WITHIN, subscription.receive()).await;
    received.expect("something arrives").expect("the broker is there")
}

async fn nothing_arrives(subscription: &Arc<dyn Subscription>) {
    if let Ok(received) = tokio::time::timeout(NOTHING_WITHIN, subscription.receive()).await {
        panic!("this arrived: {:?}", received.map(|received| received.id));
    }
}

fn messages(count: usize) -> Vec<Message> {
    (0..count).map(|n| Message::new("orders", "order.placed", n.to_string()).key("k")).collect()
}

pub async fn what_was_published_arrives_in_order_and_whole<F: Queue>(queue: F) {
    let subscription = queue.subscribe(100).await;
    let messages: Vec<Message> = [vec![], b"a\0b".to_vec(), vec![0xff, 0xc3, 0x28], vec![7; 100_000]]
        .into_iter()
        .map(|payload| {
            Message::new("orders", "order.placed", payload)
                .key("k")
                .tenant("t-1")
                .aggregate("order", "o-1", 7)
                .content_type("application/x")
                .header("traceparent", "00-1-2-01")
        })
        .collect();
    queue.publish(&messages).await;
    for message in &messages {
        let received = receive(&subscription).await;
        assert_eq!((received.id, received.redelivered), (Some(message.id), false));
        let found = &received.message;
        assert!(found.payload == message.payload, "I6: {} bytes came out differently", message.payload.len());
        assert_eq!((&found.topic, &found.kind, &found.key), (&message.topic, &message.kind, &message.key));
        assert_eq!((&found.headers, &found.content_type), (&message.headers, &message.content_type));
        assert_eq!((&found.tenant_id, &found.aggregate_type), (&message.tenant_id, &message.aggregate_type));
        assert_eq!((&found.aggregate_id, found.aggregate_version), (&message.aggregate_id, message.aggregate_version));
        subscription.ack(&received).await.expect("ack");
    }
}

pub async fn what_is_acked_does_not_come_again<F: Queue>(queue: F) {
    let subscription = queue.subscribe(100).await;
    queue.publish(&messages(10)).await;
    for _ in 0..10 {
        let received = receive(&subscription).await;
        subscription.ack(&received).await.expect("ack");
    }
    // An ack is on its way when the call returns; the next round trip is behind it.
    queue.publish(&messages(1)).await;
    let last = receive(&subscription).await;
    subscription.requeue(&last).await.expect("requeue");
    drop(subscription);
    let next = queue.subscribe(100).await;
    assert_eq!(receive(&next).await.id, last.id);
    nothing_arrives(&next).await;
}

/// I1: nothing is settled by being received.
pub async fn what_is_not_settled_comes_again_to_another<F: Queue>(queue: F) {
    let subscription = queue.subscribe(100).await;
    let messages = messages(10);
    queue.publish(&messages).await;
    for _ in 0..10 {
        receive(&subscription).await;
    }
    drop(subscription);
    let next = queue.subscribe(100).await;
    for message in &messages {
        let received = receive(&next).await;
        assert_eq!((received.id, received.redelivered), (Some(message.id), true), "in the order of before");
        next.ack(&received).await.expect("ack");
    }
}

pub async fn what_is_requeued_comes_again_and_is_marked<F: Queue>(queue: F) {
    let subscription = queue.subscribe(1).await;
    let messages = messages(3);
    queue.publish(&messages).await;
    let first = receive(&subscription).await;
    subscription.requeue(&first).await.expect("requeue");
    let mut seen = HashSet::new();
    let mut again = false;
    while seen.len() < 3 {
        let received = receive(&subscription).await;
        again |= received.id == first.id && received.redelivered;
        seen.insert(received.id);
        subscription.ack(&received).await.expect("ack");
    }
    assert!(again, "the one that was given back is marked as handed out before");
}

pub async fn what_is_rejected_does_not_come_again<F: Queue>(queue: F) {
    let subscription = queue.subscribe(10).await;
    let messages = messages(3);
    queue.publish(&messages).await;
    let first = receive(&subscription).await;
    subscription.reject(&first).await.expect("reject");
    let others: Vec<Option<MessageId>> = vec![receive(&subscription).await.id, receive(&subscription).await.id];
    assert_eq!(others, [Some(messages[1].id), Some(messages[2].id)]);
    drop(subscription);
    let next = queue.subscribe(10).await;
    assert_eq!(receive(&next).await.id, others[0]);
    assert_eq!(receive(&next).await.id, others[1]);
    nothing_arrives(&next).await;
}

pub async fn no_more_than_the_prefetch_is_handed_out<F: Queue>(queue: F) {
    let subscription = queue.subscribe(3).await;
    queue.publish(&messages(5)).await;
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(receive(&subscription).await);
    }
    nothing_arrives(&subscription).await;
    subscription.ack(&held.remove(0)).await.expect("ack");
    receive(&subscription).await;
    nothing_arrives(&subscription).await;
}

/// A late answer must not settle what was never handled.
pub async fn settling_twice_harms_no_other_delivery<F: Queue>(queue: F) {
    let first = queue.subscribe(10).await;
    let messages = messages(4);
    queue.publish(&messages).await;
    let stale = receive(&first).await;
    drop(first);
    let second = queue.subscribe(10).await;
    let mut held = Vec::new();
    for _ in 0..4 {
        held.push(receive(&second).await);
    }
    // A handle of a session that is over: an error or nothing, and no other delivery is settled by it.
    let _ = second.ack(&stale).await;
    drop(second);
    let third = queue.subscribe(10).await;
    let mut seen = Vec::new();
    for _ in 0..4 {
        seen.push(receive(&third).await.id);
    }
    assert_eq!(seen, messages.iter().map(|message| Some(message.id)).collect::<Vec<_>>());
}
