//! How often a caller may ask.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Requests a second of one token, and how many at once.
const PER_SECOND: f64 = 20.0;
const BURST: f64 = 60.0;

/// What each token has left; there are as many as the configuration has.
#[derive(Debug, Default)]
pub(in crate::admin) struct Rate(Mutex<HashMap<String, (f64, Instant)>>);

impl Rate {
    /// Whether this one may ask now.
    pub fn allows(&self, name: &str) -> bool {
        self.allows_at(name, Instant::now())
    }

    fn allows_at(&self, name: &str, now: Instant) -> bool {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (left, since) = all.entry(name.to_owned()).or_insert((BURST, now));
        *left = (*left + now.saturating_duration_since(*since).as_secs_f64() * PER_SECOND).min(BURST);
        *since = now;
        let allowed = *left >= 1.0;
        if allowed {
            *left -= 1.0;
        }
        allowed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn each_token_has_its_own_rate() {
        let (rate, began) = (Rate::default(), Instant::now());
        let allowed = |name: &str, at: Instant| (0..100).filter(|_| rate.allows_at(name, at)).count();
        assert_eq!((allowed("a", began), allowed("b", began)), (60, 60));
        assert_eq!(allowed("a", began + Duration::from_secs(1)), 20);
        assert_eq!(allowed("a", began + Duration::from_secs(3600)), 60);
    }
}
