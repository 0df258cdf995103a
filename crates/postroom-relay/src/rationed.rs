//! Pure: how often the log is told what repeats. The first few are told at once, the others are counted.

use std::time::Duration;

/// Tells so many at once in each window of time, and counts the rest of it.
#[derive(Debug, Clone)]
pub(crate) struct Rationed {
    at_once: u32,
    window: Duration,
    began: Option<Duration>,
    told: u32,
    withheld: u64,
}

impl Rationed {
    pub const fn new(at_once: u32, window: Duration) -> Self {
        Self { at_once, window, began: None, told: 0, withheld: 0 }
    }

    /// Whether one more is told at `now`. Ask [`withheld`](Self::withheld) first.
    pub fn admits(&mut self, now: Duration) -> bool {
        if self.began.is_none_or(|began| now >= began + self.window) {
            (self.began, self.told) = (Some(now), 0);
        }
        let admitted = self.told < self.at_once;
        if admitted {
            self.told += 1;
        } else {
            self.withheld += 1;
        }
        admitted
    }

    /// How many were not told in a window that has ended, once.
    pub fn withheld(&mut self, now: Duration) -> Option<u64> {
        let over = self.began.is_some_and(|began| now >= began + self.window);
        (over && self.withheld > 0).then(|| std::mem::take(&mut self.withheld))
    }

    /// The same at the end, window or not.
    pub fn rest(&mut self) -> Option<u64> {
        (self.withheld > 0).then(|| std::mem::take(&mut self.withheld))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_are_told_at_once_and_the_rest_is_counted_once() {
        let mut deaths = Rationed::new(2, Duration::from_secs(10));
        let at = Duration::from_secs;
        let told = (0..50_000).filter(|_| deaths.admits(at(1))).count();
        assert_eq!((told, deaths.withheld(at(5))), (2, None), "the window is not over");
        assert_eq!((deaths.withheld(at(11)), deaths.withheld(at(11))), (Some(49_998), None));
        assert!(deaths.admits(at(12)) && deaths.admits(at(13)) && !deaths.admits(at(14)));
        assert_eq!((deaths.rest(), deaths.rest()), (Some(1), None));
    }
}
