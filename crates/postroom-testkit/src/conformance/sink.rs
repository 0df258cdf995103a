//! What every `Sink` promises to the engine: `Stored` is said of what the far end has, and of nothing else.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postroom::{Batch, Message, Sink, Verdict};

use super::Fixture;

/// No call of a sink may take longer, whatever the far end does: the fixture gives its sink a deadline of a few seconds.
const ENDS_WITHIN: Duration = Duration::from_secs(30);

/// A message as the far end has it, by its own account and not by the sink's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    /// Its message id.
    pub id: String,
    /// Its payload.
    pub payload: Vec<u8>,
}

/// What goes wrong at the far end, or on the way to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// It refuses what is addressed to `refused`, and says so.
    Reject,
    /// It stores, and what it says of it is lost: the connection ends.
    StoreAndFail,
    /// It takes everything and answers nothing.
    Hold,
    /// It answers, slowly.
    Slow,
}

/// A broker, or whatever a sink publishes to.
#[async_trait]
pub trait FarEnd: Fixture {
    /// A sink to it, with a deadline of a few seconds.
    async fn sink(&self) -> Arc<dyn Sink>;

    /// A message that goes where [`FarEnd::stored`] looks.
    fn message(&self) -> Message {
        Message::new("orders", "order.placed", "x").key("k").routing_key("accepted")
    }

    /// Begins a fault. False: it cannot be had here.
    async fn begin(&self, fault: Fault) -> bool;

    /// A message that the far end refuses while [`Fault::Reject`] lasts.
    fn refused(&self) -> Message {
        self.message().routing_key("refused")
    }

    /// Ends it.
    async fn heal(&self);

    /// Everything that the far end has, in its order, repeated ones as often as it has them. Takes it out.
    async fn stored(&self) -> Vec<Stored>;
}

/// The tests of one implementation.
#[macro_export]
macro_rules! sink_conforms {
    ($fixture:ty) => {
        $crate::conformance_cases!(
            $fixture,
            sink: what_is_judged_as_stored_is_there_in_order_with_its_bytes
            a_full_batch_and_one_message_are_judged_alike
            a_refused_message_is_judged_so_and_its_neighbours_are_not
            what_was_stored_before_the_answer_was_lost_is_not_judged_as_failed
            a_held_answer_is_given_up_and_nothing_is_taken_for_stored
            a_slow_answer_belongs_to_its_own_message
            a_dropped_publish_leaves_nothing_that_a_later_one_trips_over
            a_closed_sink_takes_nothing_for_stored
        );
    };
}

async fn publish(sink: &Arc<dyn Sink>, messages: &[Message]) -> Vec<Verdict> {
    let batch = Batch::new(messages.iter().cloned());
    match tokio::time::timeout(ENDS_WITHIN, sink.publish(&batch)).await.expect("a publish ends by itself") {
        Ok(mut verdicts) => (0..messages.len()).map(|place| verdicts.take(place)).collect(),
        Err(error) => messages.iter().map(|_| Verdict::Unknown(error.to_string())).collect(),
    }
}

/// Until the sink says that it can be published to.
async fn ready(sink: &Arc<dyn Sink>) {
    for _ in 0..200 {
        match tokio::time::timeout(ENDS_WITHIN, sink.probe()).await.expect("a probe ends by itself") {
            Ok(()) => return,
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
    panic!("the sink does not recover");
}

/// As the engine does: again and again with the same ids, until each is stored.
async fn publish_until_stored(sink: &Arc<dyn Sink>, messages: &[Message]) {
    for _ in 0..50 {
        ready(sink).await;
        if publish(sink, messages).await.iter().all(|verdict| *verdict == Verdict::Stored) {
            return;
        }
    }
    panic!("the messages are never stored");
}

fn ids(stored: &[Stored]) -> Vec<String> {
    stored.iter().map(|stored| stored.id.clone()).collect()
}

fn ids_of(messages: &[Message]) -> Vec<String> {
    messages.iter().map(|message| message.id.to_string()).collect()
}

fn messages<F: FarEnd>(far_end: &F, count: usize) -> Vec<Message> {
    (0..count).map(|_| far_end.message()).collect()
}

pub async fn what_is_judged_as_stored_is_there_in_order_with_its_bytes<F: FarEnd>(far_end: F) {
    let sink = far_end.sink().await;
    ready(&sink).await;
    let payloads: [Vec<u8>; 4] = [vec![], b"a\0b".to_vec(), vec![0xff, 0xfe, 0xc3, 0x28], vec![7; 100_000]];
    let messages: Vec<Message> = payloads
        .iter()
        .map(|payload| {
            let mut message = far_end.message();
            message.payload = payload.clone().into();
            message
        })
        .collect();
    assert!(publish(&sink, &messages).await.iter().all(|verdict| *verdict == Verdict::Stored));
    let stored = far_end.stored().await;
    assert_eq!(ids(&stored), ids_of(&messages), "I4: in the order of the batch");
    for (stored, payload) in stored.iter().zip(&payloads) {
        assert!(stored.payload == *payload, "I15: {} bytes came out differently", payload.len());
    }
    sink.close().await;
}

pub async fn a_full_batch_and_one_message_are_judged_alike<F: FarEnd>(far_end: F) {
    let sink = far_end.sink().await;
    ready(&sink).await;
    let mut expected = Vec::new();
    for count in [1, sink.limits().batch_messages_max.min(1000), 1] {
        let messages = messages(&far_end, count);
        assert!(publish(&sink, &messages).await.iter().all(|verdict| *verdict == Verdict::Stored), "{count} messages");
        expected.extend(ids_of(&messages));
    }
    assert_eq!(ids(&far_end.stored().await), expected);
}

pub async fn a_refused_message_is_judged_so_and_its_neighbours_are_not<F: FarEnd>(far_end: F) {
    let sink = far_end.sink().await;
    ready(&sink).await;
    if !far_end.begin(Fault::Reject).await {
        return println!("not to be had here: a far end that rejects");
    }
    let batch: Vec<Message> = (0..60).map(|n| if n % 3 == 1 { far_end.refused() } else { far_end.message() }).collect();
    // A far end may say no to all of a batch over one: then each is tried alone, as the engine does after `Unknown`.
    let mut expected = Vec::new();
    for (n, (message, mut verdict)) in batch.iter().zip(publish(&sink, &batch).await).enumerate() {
        let mut tries = 0;
        while matches!(verdict, Verdict::Unknown(_) | Verdict::NotSent) && tries < 20 {
            println!("message {n}: {verdict:?}");
            ready(&sink).await;
            verdict = publish(&sink, std::slice::from_ref(message)).await.remove(0);
            tries += 1;
        }
        if n % 3 == 1 {
            assert!(matches!(verdict, Verdict::Failed(_)), "message {n}: {verdict:?}");
        } else {
            assert_eq!(verdict, Verdict::Stored, "message {n}");
            expected.push(message.id.to_string());
        }
    }
    far_end.heal().await;
    assert_eq!(ids(&far_end.stored().await), expected, "what was refused is not there");
}

/// The far end has them, and the sink cannot know: anything but `Unknown` would lose or kill.
pub async fn what_was_stored_before_the_answer_was_lost_is_not_judged_as_failed<F: FarEnd>(far_end: F) {
    let sink = far_end.sink().await;
    ready(&sink).await;
    if !far_end.begin(Fault::StoreAndFail).await {
        return println!("not to be had here: a far end that stores and fails");
    }
    let messages = messages(&far_end, 20);
    for verdict in publish(&sink, &messages).await {
        assert!(matches!(verdict, Verdict::Unknown(_) | Verdict::NotSent), "{verdict:?}");
    }
    far_end.heal().await;
    publish_until_stored(&sink, &messages).await;
    let stored = ids(&far_end.stored().await);
    let expected = ids_of(&messages);
    assert!(expected.iter().all(|id| stored.contains(id)), "I1");
    assert!(stored.ends_with(&expected), "the last time all of them, in order");
}

pub async fn a_held_answer_is_given_up_and_nothing_is_taken_for_stored<F: FarEnd>(far_end: F) {
    let sink = far_end.sink().await;
    ready(&sink).await;
    if !far_end.begin(Fault::Hold).await {
        return println!("not to be had here: a far end that holds its answer");
    }
    let messages = messages(&far_end, 5);
    for verdict in publish(&sink, &messages).await {
        assert!(matches!(verdict, Verdict::Unknown(_) | Verdict::NotSent), "{verdict:?}");
    }
    far_end.heal().await;
    publish_until_stored(&sink, &messages).await;
    assert!(ids(&far_end.stored().await).ends_with(&ids_of(&messages)));
}

/// Late answers of one batch are not taken for answers of the next.
pub async fn a_slow_answer_belongs_to_its_own_message<F: FarEnd>(far_end: F) {
    let sink = far_end.sink().await;
    ready(&sink).await;
    if !far_end.begin(Fault::Slow).await {
        return println!("not to be had here: a far end that answers slowly");
    }
    let mut said_to_be_stored = Vec::new();
    for _ in 0..6 {
        let messages = messages(&far_end, 4);
        for (message, verdict) in messages.iter().zip(publish(&sink, &messages).await) {
            match verdict {
                Verdict::Stored => said_to_be_stored.push(message.id.to_string()),
                Verdict::Unknown(_) | Verdict::NotSent => {}
                other => panic!("{other:?}: slowness is no refusal"),
            }
        }
        let _ = tokio::time::timeout(ENDS_WITHIN, sink.probe()).await.expect("a probe ends by itself");
    }
    far_end.heal().await;
    let last = messages(&far_end, 4);
    publish_until_stored(&sink, &last).await;
    let stored = ids(&far_end.stored().await);
    assert!(said_to_be_stored.iter().all(|id| stored.contains(id)), "I1: said to be stored, and it is not there");
}

pub async fn a_dropped_publish_leaves_nothing_that_a_later_one_trips_over<F: FarEnd>(far_end: F) {
    let sink = far_end.sink().await;
    ready(&sink).await;
    for pause in [0u64, 1, 5, 20] {
        let batch = Batch::new(messages(&far_end, 50));
        let publish = sink.publish(&batch);
        let _ = tokio::time::timeout(Duration::from_millis(pause), publish).await;
    }
    let messages = messages(&far_end, 50);
    publish_until_stored(&sink, &messages).await;
    let stored = ids(&far_end.stored().await);
    assert!(
        stored.ends_with(&ids_of(&messages)),
        "they are there, in order, behind whatever became of the others: {:?} is not the end of {stored:?}",
        ids_of(&messages)
    );
}

pub async fn a_closed_sink_takes_nothing_for_stored<F: FarEnd>(far_end: F) {
    let sink = far_end.sink().await;
    ready(&sink).await;
    let before = messages(&far_end, 3);
    publish_until_stored(&sink, &before).await;
    tokio::time::timeout(ENDS_WITHIN, sink.close()).await.expect("a close ends by itself");
    let after = messages(&far_end, 3);
    let verdicts = publish(&sink, &after).await;
    let stored = ids(&far_end.stored().await);
    assert!(stored.starts_with(&ids_of(&before)));
    for (message, verdict) in after.iter().zip(verdicts) {
        assert!(verdict != Verdict::Stored || stored.contains(&message.id.to_string()), "{verdict:?}");
    }
}
