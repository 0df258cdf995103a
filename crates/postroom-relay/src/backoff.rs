//! Pure: how long to wait before asking again a store or a broker that could not be reached.

use std::time::Duration;

/// Doubles from `first` to `cap` with every failure; a success starts over.
#[derive(Debug, Clone)]
pub(crate) struct Backoff {
    first: Duration,
    cap: Duration,
    next: Duration,
}

impl Backoff {
    pub fn new(first: Duration, cap: Duration) -> Self {
        Self { first, cap, next: first }
    }

    pub fn failed(&mut self) -> Duration {
        let wait = self.next;
        self.next = (self.next * 2).min(self.cap);
        wait
    }

    pub fn succeeded(&mut self) {
        self.next = self.first;
    }
}
