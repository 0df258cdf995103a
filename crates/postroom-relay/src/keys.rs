//! Pure: deliveries waiting in the order of their keys. Of a key, one run of deliveries is with the sink at any time: a run
//! of one with strict order, of as many as a batch takes with pipelined order.

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
    with_sink: usize,
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
        if queue.waiting.len() == 1 && queue.with_sink == 0 {
            self.ready.push_back(Ready::Key(key.clone()));
        }
    }

    /// Puts a delivery back to where it was in its key; the key is the next to go.
    pub fn put_back(&mut self, key: Option<&Arc<str>>, token: Token) {
        if let Some(ready) = self.returned(key, token) {
            self.ready.push_front(ready);
        }
    }

    /// Puts a delivery back to where it was in its key; the key is the last to go.
    pub fn put_back_last(&mut self, key: Option<&Arc<str>>, token: Token) {
        if let Some(ready) = self.returned(key, token) {
            self.ready.push_back(ready);
        }
    }

    fn returned(&mut self, key: Option<&Arc<str>>, token: Token) -> Option<Ready> {
        self.waiting += 1;
        let Some(key) = key else { return Some(Ready::Single(token)) };
        let queue = self.queues.entry(key.clone()).or_default();
        queue.with_sink = queue.with_sink.saturating_sub(1);
        queue.waiting.push_front(token);
        (queue.with_sink == 0).then(|| Ready::Key(key.clone()))
    }

    /// Takes the next run of at most `run_max` deliveries of one key that has none with the sink.
    pub fn pop(&mut self, run_max: usize) -> Vec<Token> {
        while let Some(ready) = self.ready.pop_front() {
            match ready {
                Ready::Single(token) => {
                    self.waiting -= 1;
                    return vec![token];
                }
                Ready::Key(key) => {
                    // A key that was emptied meanwhile left its mark behind.
                    let Some(queue) = self.queues.get_mut(&key) else { continue };
                    if queue.with_sink > 0 || queue.waiting.is_empty() {
                        continue;
                    }
                    let run: Vec<Token> = queue.waiting.drain(..run_max.min(queue.waiting.len())).collect();
                    queue.with_sink += run.len();
                    self.waiting -= run.len();
                    return run;
                }
            }
        }
        Vec::new()
    }

    /// Keeps a key as if one more of it were with the sink, until [`Keys::free`].
    pub fn hold(&mut self, key: &Arc<str>) {
        self.queues.entry(key.clone()).or_default().with_sink += 1;
    }

    /// One delivery of this key that was with the sink is through; after the last of its run the next may go.
    pub fn free(&mut self, key: &Arc<str>) {
        let Some(queue) = self.queues.get_mut(key) else { return };
        queue.with_sink = queue.with_sink.saturating_sub(1);
        if queue.with_sink > 0 {
            return;
        }
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
            queue.with_sink > 0 || !queue.waiting.is_empty()
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

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(numbers: &[u64]) -> Vec<Token> {
        numbers.iter().map(|number| Token(*number)).collect()
    }

    #[test]
    fn a_run_that_comes_back_is_in_its_old_order() {
        let (mut keys, key) = (Keys::default(), Arc::<str>::from("a"));
        for number in 1..=5 {
            keys.push(Some(&key), Token(number));
        }
        assert_eq!(keys.pop(3), tokens(&[1, 2, 3]));
        assert_eq!(keys.pop(3), [], "the key is busy");
        keys.free(&key);
        for token in [Token(3), Token(2)] {
            keys.put_back(Some(&key), token);
        }
        assert_eq!(keys.pop(9), tokens(&[2, 3, 4, 5]));
        assert_eq!(keys.waiting(), 0);
    }
}
