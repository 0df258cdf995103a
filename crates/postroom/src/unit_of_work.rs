//! Collects the events of aggregates just before the commit.

use std::time::SystemTime;

use crate::message::Message;
use crate::outbox::{EnqueueError, Outbox};
use crate::wake::Wake;

/// An aggregate that has raised events which are not written yet.
pub trait RaisesEvents {
    /// Hands over the raised events and forgets them, so that none is written twice.
    fn take_events(&mut self) -> Vec<Message>;
}

/// The events of one transaction: collected from the aggregates that it changed, written in one statement with one
/// timestamp just before the commit; the relay is woken after it.
///
/// ```no_run
/// # use postroom::{Outbox, RaisesEvents, UnitOfWork, Wake, EnqueueError};
/// # async fn example<Tx: Send, O: Outbox<Tx> + Sync>(outbox: &O, mut tx: Tx, mut order: impl RaisesEvents, wake: Wake,
/// #     commit: impl AsyncFn(Tx)) -> Result<(), EnqueueError> {
/// let mut work = UnitOfWork::new();
/// work.collect(&mut order);
/// let written = work.write(outbox, &mut tx).await?;  // in the transaction
/// commit(tx).await;
/// written.committed(&wake);                          // after it
/// # Ok(()) }
/// ```
#[derive(Debug, Default)]
#[must_use = "collected events are lost unless they are written"]
pub struct UnitOfWork {
    messages: Vec<Message>,
    occurred_at: Option<SystemTime>,
}

/// Proof that events were written; call `committed` on it after the commit.
#[derive(Debug)]
#[must_use = "call `committed` after the commit to wake the relay at once"]
pub struct Written {
    count: usize,
}

impl UnitOfWork {
    /// An empty unit of work; its events carry the moment at which they are written, by this machine's clock, unless
    /// [`UnitOfWork::at`] says otherwise.
    pub fn new() -> Self {
        Self::default()
    }

    /// The one timestamp of all its events.
    pub fn at(mut self, occurred_at: SystemTime) -> Self {
        self.occurred_at = Some(occurred_at);
        self
    }

    /// Takes the raised events out of an aggregate.
    pub fn collect(&mut self, aggregate: &mut impl RaisesEvents) {
        self.messages.extend(aggregate.take_events());
    }

    /// Adds a message that no aggregate raised.
    pub fn push(&mut self, message: Message) {
        self.messages.push(message);
    }

    /// The messages in the order in which they were collected, with one timestamp; for drivers without async.
    pub fn into_messages(self) -> Vec<Message> {
        let mut messages = self.messages;
        // The one moment all events of the transaction share; informational, so the application's clock may say it.
        let now = self.occurred_at.unwrap_or_else(SystemTime::now);
        for message in &mut messages {
            message.occurred_at = Some(now);
        }
        messages
    }

    /// Writes everything collected into the transaction, in the order in which it was collected. On an error nothing
    /// may be committed: roll back the transaction.
    pub async fn write<Tx: Send, O: Outbox<Tx> + Sync>(self, outbox: &O, tx: &mut Tx) -> Result<Written, EnqueueError> {
        let messages = self.into_messages();
        outbox.enqueue(tx, &messages).await?;
        Ok(Written { count: messages.len() })
    }
}

impl Written {
    /// Wakes the relay of this process. Call it after the commit.
    pub fn committed(self, wake: &Wake) {
        if self.count > 0 {
            wake.notify();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Order(Vec<Message>);

    impl RaisesEvents for Order {
        fn take_events(&mut self) -> Vec<Message> {
            std::mem::take(&mut self.0)
        }
    }

    #[test]
    fn events_are_collected_once_and_share_one_timestamp() {
        let event = |n: i64| Message::new("orders", "order.placed", "").aggregate("order", "o-1", n);
        let mut order = Order(vec![event(1), event(2)]);
        let mut work = UnitOfWork::new();
        work.collect(&mut order);
        work.collect(&mut order);
        let messages = work.into_messages();
        assert_eq!(messages.iter().map(|message| message.aggregate_version).collect::<Vec<_>>(), [Some(1), Some(2)]);
        assert!(messages[0].occurred_at.is_some());
        assert_eq!(messages[0].occurred_at, messages[1].occurred_at);
    }
}
