//! Pure: deliveries waiting in the order of their keys; at most one of a key is with the sink at any time.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use postroom::Token;

/// Waiting deliveries by key. A delivery without a key waits for nobody.
#[derive(Debug, Default)]
pub(crate) struct Keys {
    queues: HashMap<Arc<str>, Queue>,
    ready: VecDeque<Ready>,
    waiting: usize,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<Token>,
    with_sink: bool,
}

#[derive(Debug)]
enum Ready {
    Key(Arc<str>),
    Single(Token),
}

impl Keys {
    /// Adds a delivery to the end of its key.
    pub fn push(&mut self, key: Option<&Arc<str>>, token: Token) {
        self.waiting += 1;
        let Some(key) = key else {
            self.ready.push_back(Ready::Single(token));
            return;
        };
        let queue = self.queues.entry(key.clone()).or_default();
        queue.waiting.push_back(token);
        if queue.waiting.len() == 1 && !queue.with_sink {
            self.ready.push_back(Ready::Key(key.clone()));
        }
    }

    /// Puts a delivery back to where it was; its key is free again.
    pub fn put_back(&mut self, key: Option<&Arc<str>>, token: Token) {
        self.waiting += 1;
        let Some(key) = key else {
            self.ready.push_front(Ready::Single(token));
            return;
        };
        let queue = self.queues.entry(key.clone()).or_default();
        queue.with_sink = false;
        queue.waiting.push_front(token);
        self.ready.push_front(Ready::Key(key.clone()));
    }

    /// Takes the next delivery whose key has none with the sink.
    pub fn pop(&mut self) -> Option<Token> {
        while let Some(ready) = self.ready.pop_front() {
            match ready {
                Ready::Single(token) => {
                    self.waiting -= 1;
                    return Some(token);
                }
                Ready::Key(key) => {
                    // A key that was emptied meanwhile left its mark behind.
                    let Some(queue) = self.queues.get_mut(&key) else { continue };
                    if queue.with_sink {
                        continue;
                    }
                    let Some(token) = queue.waiting.pop_front() else { continue };
                    queue.with_sink = true;
                    self.waiting -= 1;
                    return Some(token);
                }
            }
        }
        None
    }

    /// The delivery of this key that was with the sink is through; the next one may go.
    pub fn free(&mut self, key: &Arc<str>) {
        let Some(queue) = self.queues.get_mut(key) else { return };
        queue.with_sink = false;
        if queue.waiting.is_empty() {
            self.queues.remove(key);
        } else {
            self.ready.push_back(Ready::Key(key.clone()));
        }
    }

    /// Stops a key: returns what waited in it, in order.
    pub fn stop(&mut self, key: &Arc<str>) -> VecDeque<Token> {
        let waiting = self.queues.remove(key).map(|queue| queue.waiting).unwrap_or_default();
        self.waiting -= waiting.len();
        waiting
    }

    /// Forgets waiting deliveries for which `gone` holds.
    pub fn forget(&mut self, gone: impl Fn(&Token) -> bool) {
        let mut forgotten = 0;
        self.queues.retain(|_, queue| {
            let before = queue.waiting.len();
            queue.waiting.retain(|token| !gone(token));
            forgotten += before - queue.waiting.len();
            queue.with_sink || !queue.waiting.is_empty()
        });
        self.ready.retain(|ready| match ready {
            Ready::Single(token) if gone(token) => {
                forgotten += 1;
                false
            }
            _ => true,
        });
        self.waiting -= forgotten;
    }

    /// Deliveries that wait, ready or not.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// Whether there may be something to pop.
    pub fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }
}
