//! Receiving from a queue of the in-process broker.

use async_trait::async_trait;
use postroom::{Received, Subscription, Unavailable};

use super::{InProcessBroker, Stopped, Waiting, remember};

/// Receives from one queue. Dropping it gives back what it has not settled, as a broker does when a connection ends.
pub struct InProcessSubscription {
    broker: InProcessBroker,
    queue: String,
    session: u64,
    prefetch: usize,
}

impl InProcessSubscription {
    pub(super) fn new(broker: InProcessBroker, queue: String, session: u64, prefetch: usize) -> Self {
        Self { broker, queue, session, prefetch: prefetch.max(1) }
    }

    fn try_receive(&self) -> Result<Option<Received>, Unavailable> {
        let mut state = self.broker.state();
        if state.stopped {
            return Ok(None);
        }
        let tag = state.next_tag;
        let unknown = || Unavailable::new(format!("queue {:?} of the in-process broker", self.queue), Stopped);
        let queue = state.queues.get_mut(&self.queue).ok_or_else(unknown)?;
        if queue.unacked.values().filter(|(session, _)| *session == self.session).count() >= self.prefetch {
            return Ok(None);
        }
        let Some(Waiting { message, redelivered }) = queue.ready.pop_front() else { return Ok(None) };
        queue.unacked.insert(tag, (self.session, message.clone()));
        state.next_tag += 1;
        remember(&mut state.handed_out, message.id);
        Ok(Some(Received { tag, session: self.session, redelivered, id: Some(message.id), message }))
    }

    /// Takes a delivery out of the unsettled ones, and puts it back to the front of the queue where `again` says so.
    fn settle(&self, received: &Received, again: bool) {
        let mut state = self.broker.state();
        if let Some(queue) = state.queues.get_mut(&self.queue)
            && let Some((_, message)) = queue.unacked.remove(&received.tag)
            && again
        {
            queue.ready.push_front(Waiting { message, redelivered: true });
        }
        drop(state);
        self.broker.0.arrived.notify_waiters();
    }
}

#[async_trait]
impl Subscription for InProcessSubscription {
    fn system(&self) -> &'static str {
        "in_process"
    }

    fn origin(&self) -> String {
        format!("queue {:?}", self.queue)
    }

    async fn receive(&self) -> Result<Received, Unavailable> {
        loop {
            let arrived = self.broker.0.arrived.notified();
            tokio::pin!(arrived);
            // Registered before the look, so that no arrival falls between the two.
            arrived.as_mut().enable();
            if let Some(received) = self.try_receive()? {
                return Ok(received);
            }
            arrived.await;
        }
    }

    async fn ack(&self, received: &Received) -> Result<(), Unavailable> {
        self.settle(received, false);
        Ok(())
    }

    async fn requeue(&self, received: &Received) -> Result<(), Unavailable> {
        self.settle(received, true);
        Ok(())
    }

    async fn reject(&self, received: &Received) -> Result<(), Unavailable> {
        self.settle(received, false);
        Ok(())
    }
}

impl Drop for InProcessSubscription {
    fn drop(&mut self) {
        let mut state = self.broker.state();
        if let Some(queue) = state.queues.get_mut(&self.queue) {
            let (mine, others): (Vec<_>, Vec<_>) =
                std::mem::take(&mut queue.unacked).into_iter().partition(|(_, (session, _))| *session == self.session);
            queue.unacked = others.into_iter().collect();
            for (_, (_, message)) in mine.into_iter().rev() {
                queue.ready.push_front(Waiting { message, redelivered: true });
            }
        }
        drop(state);
        self.broker.0.arrived.notify_waiters();
    }
}
