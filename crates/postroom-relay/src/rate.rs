//! Pure: a token bucket. At most so many messages a second, with bursts of at most a tenth of a second's worth.

use std::time::Duration;

#[derive(Debug)]
pub(crate) struct Rate {
    per_second: Option<f64>,
    tokens: f64,
    at: Duration,
}

impl Rate {
    /// None: no limit.
    pub fn new(per_second: Option<u32>) -> Self {
        Self { per_second: per_second.map(f64::from), tokens: 0.0, at: Duration::ZERO }
    }

    /// How many messages may go at `now`.
    pub fn permits(&mut self, now: Duration) -> usize {
        let Some(per_second) = self.per_second else { return usize::MAX };
        let burst = (per_second / 10.0).max(1.0);
        self.tokens = (self.tokens + now.saturating_sub(self.at).as_secs_f64() * per_second).min(burst);
        self.at = self.at.max(now);
        self.tokens as usize
    }

    pub fn took(&mut self, messages: usize) {
        if self.per_second.is_some() {
            self.tokens -= messages as f64;
        }
    }

    /// When the next message may go; none: at once.
    pub fn free_at(&self) -> Option<Duration> {
        let per_second = self.per_second.filter(|_| self.tokens < 1.0)?;
        // A little more, so that rounding does not bring us a moment too early.
        Some(self.at + Duration::from_secs_f64((1.0 - self.tokens) / per_second) + Duration::from_micros(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn over_ten_seconds_it_lets_through_what_it_should() {
        let mut rate = Rate::new(Some(500));
        let (mut now, mut sent) = (Duration::ZERO, 0);
        while now < Duration::from_secs(10) {
            let may = rate.permits(now).min(37);
            rate.took(may);
            sent += may;
            now = rate.free_at().unwrap_or(now).max(now) + Duration::from_micros(300);
        }
        assert!((4900..=5000).contains(&sent), "{sent}");
        assert_eq!(Rate::new(None).permits(now), usize::MAX);
    }
}
