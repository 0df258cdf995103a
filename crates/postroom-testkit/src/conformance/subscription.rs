//! What every `Subscription` promises to those who receive.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postroom::{Answer, Arrival, Bound, Message, MessageId, Received, Subscription, Unavailable};

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
            a_stale_receipt_settles_no_other_delivery
            a_closed_subscription_gives_back_what_it_has_in_order
            a_receive_that_is_dropped_loses_nothing
        );
    };
}

/// The next message by itself.
pub async fn one(subscription: &(impl Subscription + ?Sized)) -> Result<Received, Unavailable> {
    loop {
        let arrival = subscription.receive(Bound { messages: 1, bytes: usize::MAX }).await?;
        if let Arrival::Messages(received) = arrival {
            return Ok(received.into_iter().next().expect("at least one message"));
        }
    }
}

/// A subscription, and what it brought and nobody has looked at.
struct Open {
    subscription: Arc<dyn Subscription>,
    received: VecDeque<Received>,
}

impl Open {
    async fn of<F: Queue>(queue: &F, prefetch: u16) -> Self {
        Self { subscription: queue.subscribe(prefetch).await, received: VecDeque::new() }
    }

    async fn more(&mut self, within: Duration) -> bool {
        let some = Bound { messages: 3, bytes: usize::MAX };
        match tokio::time::timeout(within, self.subscription.receive(some)).await {
            Ok(Ok(Arrival::Messages(received))) => {
                assert!((1..=3).contains(&received.len()), "{} for at most 3", received.len());
                self.received.extend(received);
                true
            }
            Ok(Ok(Arrival::Revoked(partition))) => panic!("{partition:?} was revoked"),
            Ok(Err(error)) => panic!("{error}"),
            Err(_) => false,
        }
    }

    async fn next(&mut self) -> Received {
        if self.received.is_empty() {
            assert!(self.more(ARRIVES_WITHIN).await, "nothing arrives");
        }
        self.received.pop_front().expect("a message")
    }

    async fn nothing(&mut self) {
        assert!(self.received.is_empty() && !self.more(NOTHING_WITHIN).await, "{:?} arrived", self.received);
    }

    async fn settle(&self, received: &Received, answer: Answer) {
        self.subscription.settle(&[(received.receipt, answer)]).await.expect("settle");
    }
}

fn messages(count: usize) -> Vec<Message> {
    (0..count).map(|n| Message::new("orders", "order.placed", n.to_string()).key("k")).collect()
}

pub async fn what_was_published_arrives_in_order_and_whole<F: Queue>(queue: F) {
    let mut subscription = Open::of(&queue, 100).await;
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
        let received = subscription.next().await;
        assert_eq!((received.id, received.redelivered), (Some(message.id), false));
        let found = &received.message;
        assert!(found.payload == message.payload, "I15: {} bytes came out differently", message.payload.len());
        assert_eq!((&found.topic, &found.kind, &found.key), (&message.topic, &message.kind, &message.key));
        assert_eq!((&found.headers, &found.content_type), (&message.headers, &message.content_type));
        assert_eq!((&found.tenant_id, &found.aggregate_type), (&message.tenant_id, &message.aggregate_type));
        assert_eq!((&found.aggregate_id, found.aggregate_version), (&message.aggregate_id, message.aggregate_version));
        subscription.settle(&received, Answer::Ack).await;
    }
}

pub async fn what_is_acked_does_not_come_again<F: Queue>(queue: F) {
    let mut subscription = Open::of(&queue, 100).await;
    queue.publish(&messages(10)).await;
    for _ in 0..10 {
        let received = subscription.next().await;
        subscription.settle(&received, Answer::Ack).await;
    }
    // An ack is on its way when the call returns; the next round trip is behind it.
    queue.publish(&messages(1)).await;
    let last = subscription.next().await;
    subscription.settle(&last, Answer::Requeue).await;
    drop(subscription);
    let mut next = Open::of(&queue, 100).await;
    assert_eq!(next.next().await.id, last.id);
    next.nothing().await;
}

/// I1: nothing is settled by being received.
pub async fn what_is_not_settled_comes_again_to_another<F: Queue>(queue: F) {
    let mut subscription = Open::of(&queue, 100).await;
    let messages = messages(10);
    queue.publish(&messages).await;
    for _ in 0..10 {
        subscription.next().await;
    }
    drop(subscription);
    let mut next = Open::of(&queue, 100).await;
    for message in &messages {
        let received = next.next().await;
        assert_eq!((received.id, received.redelivered), (Some(message.id), true), "in the order of before");
        next.settle(&received, Answer::Ack).await;
    }
}

pub async fn what_is_requeued_comes_again_and_is_marked<F: Queue>(queue: F) {
    let mut subscription = Open::of(&queue, 1).await;
    let messages = messages(3);
    queue.publish(&messages).await;
    let first = subscription.next().await;
    subscription.settle(&first, Answer::Requeue).await;
    let mut seen = HashSet::new();
    let mut again = false;
    while seen.len() < 3 {
        let received = subscription.next().await;
        again |= received.id == first.id && received.redelivered;
        seen.insert(received.id);
        subscription.settle(&received, Answer::Ack).await;
    }
    assert!(again, "the one that was given back is marked as handed out before");
}

pub async fn what_is_rejected_does_not_come_again<F: Queue>(queue: F) {
    let mut subscription = Open::of(&queue, 10).await;
    let messages = messages(3);
    queue.publish(&messages).await;
    let first = subscription.next().await;
    subscription.settle(&first, Answer::Reject).await;
    let others: Vec<Option<MessageId>> = vec![subscription.next().await.id, subscription.next().await.id];
    assert_eq!(others, [Some(messages[1].id), Some(messages[2].id)]);
    // What was settled is sent before the connection ends.
    subscription.subscription.close().await;
    let mut next = Open::of(&queue, 10).await;
    assert_eq!(next.next().await.id, others[0]);
    assert_eq!(next.next().await.id, others[1]);
    next.nothing().await;
}

pub async fn no_more_than_the_prefetch_is_handed_out<F: Queue>(queue: F) {
    let mut subscription = Open::of(&queue, 3).await;
    queue.publish(&messages(5)).await;
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(subscription.next().await);
    }
    subscription.nothing().await;
    let one = held.remove(0);
    subscription.settle(&one, Answer::Ack).await;
    subscription.next().await;
    subscription.nothing().await;
}

/// A late answer must not settle what was never handled.
pub async fn a_stale_receipt_settles_no_other_delivery<F: Queue>(queue: F) {
    let mut first = Open::of(&queue, 10).await;
    let messages = messages(4);
    queue.publish(&messages).await;
    let stale = first.next().await;
    drop(first);
    let mut second = Open::of(&queue, 10).await;
    let mut held = Vec::new();
    for _ in 0..4 {
        held.push(second.next().await);
    }
    // A receipt of a session that is over: an error or nothing, and no other delivery is settled by it.
    let _ = second.subscription.settle(&[(stale.receipt, Answer::Ack)]).await;
    drop(second);
    let mut third = Open::of(&queue, 10).await;
    let mut seen = Vec::new();
    for _ in 0..4 {
        seen.push(third.next().await.id);
    }
    assert_eq!(seen, messages.iter().map(|message| Some(message.id)).collect::<Vec<_>>());
}

/// Without waiting for the end of its connection: whoever is next has them at once.
pub async fn a_closed_subscription_gives_back_what_it_has_in_order<F: Queue>(queue: F) {
    let mut first = Open::of(&queue, 10).await;
    let messages = messages(6);
    queue.publish(&messages).await;
    for _ in 0..4 {
        first.next().await;
    }
    tokio::time::timeout(ARRIVES_WITHIN, first.subscription.close()).await.expect("a close ends by itself");
    let mut second = Open::of(&queue, 10).await;
    for message in &messages {
        assert_eq!(second.next().await.id, Some(message.id), "I4");
    }
}

pub async fn a_receive_that_is_dropped_loses_nothing<F: Queue>(queue: F) {
    let mut subscription = Open::of(&queue, 100).await;
    let messages = messages(60);
    let publishing = queue.publish(&messages);
    let receiving = async {
        let mut seen = Vec::new();
        for turn in 0u64.. {
            if seen.len() == 60 {
                break;
            }
            assert!(turn < 60_000, "{} of 60 came", seen.len());
            subscription.more(Duration::from_micros(turn % 700)).await;
            seen.extend(subscription.received.drain(..).map(|received| received.id));
        }
        seen
    };
    let ((), seen) = tokio::join!(publishing, receiving);
    assert_eq!(seen, messages.iter().map(|message| Some(message.id)).collect::<Vec<_>>(), "I1, I4");
}
