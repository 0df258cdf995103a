//! Pure: keys whose parking is being recorded. A read that began before the record was there cannot have seen it, so what
//! it brings of such a key has to queue up all the same.

use std::collections::HashMap;
use std::sync::Arc;

#[derive(Debug, Default)]
pub(crate) struct Parking {
    keys: HashMap<Arc<str>, Entry>,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    until: Until,
    /// One of its messages failed; otherwise they only queued up behind a parked one.
    stopped: bool,
}

#[derive(Debug, Clone, Copy)]
enum Until {
    /// The settling of this number is recorded.
    Settled(u64),
    /// The claim of this number, which began before, is back.
    Claimed(u64),
}

impl Parking {
    /// Messages of the key queue up by the settling of this number.
    pub fn queue(&mut self, key: Arc<str>, settling: u64) {
        let stopped = self.keys.get(&key).is_some_and(|entry| entry.stopped);
        self.keys.insert(key, Entry { until: Until::Settled(settling), stopped });
    }

    /// The key is stopped by the settling of this number: one of its messages failed.
    pub fn stop(&mut self, key: Arc<str>, settling: u64) {
        self.keys.insert(key, Entry { until: Until::Settled(settling), stopped: true });
    }

    /// Whether what a read of the outbox brings of this key has to queue up.
    pub fn holds(&self, key: &str) -> bool {
        self.keys.contains_key(key)
    }

    /// Whether what a read of the parked ones brings of this key has to go back: it may follow one that failed meanwhile.
    pub fn stops(&self, key: &str) -> bool {
        self.keys.get(key).is_some_and(|entry| entry.stopped)
    }

    /// A settling is recorded; `claim` is the number of the claim under way, if there is one.
    pub fn settled(&mut self, settling: u64, claim: Option<u64>) {
        self.keys.retain(|_, entry| match (entry.until, claim) {
            (Until::Settled(number), Some(claim)) if number <= settling => {
                entry.until = Until::Claimed(claim);
                true
            }
            (Until::Settled(number), None) => number > settling,
            _ => true,
        });
    }

    /// A claim is back and was dealt with.
    pub fn claimed(&mut self, claim: u64) {
        self.keys.retain(|_, entry| !matches!(entry.until, Until::Claimed(number) if number <= claim));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_stays_until_no_older_read_can_bring_it() {
        let mut parking = Parking::default();
        parking.stop("a".into(), 1);
        parking.queue("b".into(), 2);
        parking.queue("a".into(), 1);
        assert!(parking.stops("a") && !parking.stops("b"));
        parking.settled(1, Some(7));
        assert!(parking.holds("a") && parking.holds("b"));
        parking.claimed(7);
        assert!(!parking.holds("a") && parking.holds("b"));
        parking.settled(2, None);
        assert!(!parking.holds("b"));
    }
}
