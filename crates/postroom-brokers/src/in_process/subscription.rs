//! Receiving from a queue of the in-process broker.

use async_trait::async_trait;
use postroom::{Answer, Arrival, Bound, Partition, Receipt, Received, Subscription, Unavailable};

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

    fn try_receive(&self, max: Bound) -> Result<Vec<Received>, Unavailable> {
        let mut guard = self.broker.state();
        let state = &mut *guard;
        let mut received: Vec<Received> = Vec::new();
        if state.stopped {
            return Ok(received);
        }
        let unknown = || Unavailable::new(format!("queue {:?} of the in-process broker", self.queue), Stopped);
        let queue = state.queues.get_mut(&self.queue).ok_or_else(unknown)?;
        let held = queue.unacked.values().filter(|(session, _)| *session == self.session).count();
        let room = self.prefetch.saturating_sub(held).min(max.messages);
        let mut bytes = 0usize;
        while received.len() < room && bytes < max.bytes {
            let Some(Waiting { message, redelivered }) = queue.ready.pop_front() else { break };
            bytes = bytes.saturating_add(message.payload.len());
            queue.unacked.insert(state.next_tag, (self.session, message.clone()));
            remember(&mut state.handed_out, message.id);
            let receipt = Receipt::new(self.session, state.next_tag);
            state.next_tag += 1;
            received.push(Received {
                receipt,
                partition: Partition::default(),
                redelivered,
                id: Some(message.id),
                message,
            });
        }
        Ok(received)
    }

    /// Puts back to the front of the queue, in its order, what is not settled.
    fn give_back(&self) {
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

#[async_trait]
impl Subscription for InProcessSubscription {
    fn system(&self) -> &'static str {
        "in_process"
    }

    fn origin(&self) -> String {
        format!("queue {:?}", self.queue)
    }

    async fn receive(&self, max: Bound) -> Result<Arrival, Unavailable> {
        loop {
            let arrived = self.broker.0.arrived.notified();
            tokio::pin!(arrived);
            // Registered before the look, so that no arrival falls between the two.
            arrived.as_mut().enable();
            let received = self.try_receive(max)?;
            if !received.is_empty() {
                return Ok(Arrival::Messages(received));
            }
            arrived.await;
        }
    }

    async fn settle(&self, answers: &[(Receipt, Answer)]) -> Result<(), Unavailable> {
        let mut state = self.broker.state();
        if let Some(queue) = state.queues.get_mut(&self.queue) {
            for (receipt, answer) in answers.iter().filter(|(receipt, _)| receipt.session() == self.session) {
                if let Some((_, message)) = queue.unacked.remove(&receipt.number())
                    && *answer == Answer::Requeue
                {
                    queue.ready.push_front(Waiting { message, redelivered: true });
                }
            }
        }
        drop(state);
        self.broker.0.arrived.notify_waiters();
        Ok(())
    }

    async fn close(&self) {
        self.give_back();
    }
}

impl Drop for InProcessSubscription {
    fn drop(&mut self) {
        self.give_back();
    }
}
