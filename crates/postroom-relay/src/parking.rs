//! Pure: keys whose parking is being recorded. A read that began before the record was there cannot have seen it, so what
//! it brings of such a key has to queue up all the same.

use std::collections::HashMap;
use std::sync::Arc;

#[derive(Debug, Default)]
pub(crate) struct Parking {
    keys: HashMap<Arc<str>, Until>,
}

#[derive(Debug, Clone, Copy)]
enum Until {
    /// The settling of this number is recorded.
    Settled(u64),
    /// The claim of this number, which began before, is back.
    Claimed(u64),
}

impl Parking {
    /// The key is parked by the settling of this number.
    pub fn park(&mut self, key: Arc<str>, settling: u64) {
        self.keys.insert(key, Until::Settled(settling));
    }

    pub fn holds(&self, key: &str) -> bool {
        self.keys.contains_key(key)
    }

    /// A settling is recorded; `claim` is the number of the claim under way, if there is one.
    pub fn settled(&mut self, settling: u64, claim: Option<u64>) {
        self.keys.retain(|_, until| match (*until, claim) {
            (Until::Settled(number), Some(claim)) if number <= settling => {
                *until = Until::Claimed(claim);
                true
            }
            (Until::Settled(number), None) => number > settling,
            _ => true,
        });
    }

    /// A claim is back and was dealt with.
    pub fn claimed(&mut self, claim: u64) {
        self.keys.retain(|_, until| !matches!(until, Until::Claimed(number) if *number <= claim));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_stays_until_no_older_read_can_bring_it() {
        let mut parking = Parking::default();
        parking.park("a".into(), 1);
        parking.park("b".into(), 2);
        parking.settled(1, Some(7));
        assert!(parking.holds("a") && parking.holds("b"));
        parking.claimed(7);
        assert!(!parking.holds("a") && parking.holds("b"));
        parking.settled(2, None);
        assert!(!parking.holds("b"));
    }
}
