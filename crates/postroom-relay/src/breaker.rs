//! Pure: the circuit breaker of one sink. Open while the sink cannot be reached or refuses everything; a probe and then one
//! message alone close it, and what is published at once doubles from there.

use std::time::Duration;

use crate::backoff::Backoff;

#[derive(Debug)]
pub(crate) struct Breaker {
    state: State,
    /// Reached again, but nothing was stored since.
    trial: bool,
    /// Most messages in a batch for now.
    ramp: usize,
    batch_max: usize,
    /// Refusals in a row, and how many open it; 0: none do.
    refusals: u32,
    refusals_max: u32,
    unreachable: Backoff,
    refusing: Backoff,
}

#[derive(Debug)]
enum State {
    Closed,
    Open { probe_at: Duration, probing: bool, why: String },
}

impl Breaker {
    /// Open until the first probe.
    pub fn new(batch_max: usize, refusals_max: u32) -> Self {
        Self {
            state: State::Open { probe_at: Duration::ZERO, probing: false, why: "not connected yet".to_owned() },
            trial: false,
            ramp: batch_max,
            batch_max,
            refusals: 0,
            refusals_max,
            unreachable: Backoff::new(Duration::from_millis(100), Duration::from_secs(5)),
            refusing: Backoff::new(Duration::from_secs(1), Duration::from_secs(30)),
        }
    }

    /// Most messages in a batch, and most batches at once of at most `batches_max`; none while it is open.
    pub fn permits(&self, batches_max: usize) -> Option<(usize, usize)> {
        match self.state {
            State::Closed if self.ramp < self.batch_max => Some((self.ramp, 1)),
            State::Closed => Some((self.ramp, batches_max)),
            State::Open { .. } => None,
        }
    }

    /// Reached again, but nothing was stored since.
    pub fn on_trial(&self) -> bool {
        self.trial
    }

    /// Why nothing is published now.
    pub fn open_because(&self) -> Option<&str> {
        match &self.state {
            State::Closed => None,
            State::Open { why, .. } => Some(why),
        }
    }

    /// Whether a probe is due; then it is under way.
    pub fn begins_probe(&mut self, now: Duration) -> bool {
        match &mut self.state {
            State::Open { probe_at, probing, .. } if !*probing && now >= *probe_at => {
                *probing = true;
                true
            }
            _ => false,
        }
    }

    pub fn probe_at(&self) -> Option<Duration> {
        match self.state {
            State::Open { probe_at, probing: false, .. } => Some(probe_at),
            _ => None,
        }
    }

    pub fn probed(&mut self, now: Duration, result: Result<(), String>) {
        match result {
            Ok(()) => {
                self.state = State::Closed;
                self.trial = true;
            }
            Err(why) => {
                let wait = self.unreachable.failed();
                self.open(now + wait, why);
            }
        }
    }

    /// The sink could not be reached, or nobody knows what it did. Whether that is news.
    pub fn lost(&mut self, now: Duration, why: String) -> bool {
        let news = matches!(self.state, State::Closed);
        if news {
            let wait = self.unreachable.failed();
            self.open(now + wait, why);
        }
        news
    }

    /// A message was stored.
    pub fn stored(&mut self) {
        self.trial = false;
        self.refusals = 0;
        self.unreachable.succeeded();
        self.refusing.succeeded();
    }

    /// A message was refused for a reason that need not be its own. Whether that opened the breaker.
    pub fn refused(&mut self, now: Duration, why: &str) -> bool {
        if self.refusals_max == 0 || !matches!(self.state, State::Closed) {
            return false;
        }
        self.refusals += 1;
        // Still refusing after the break: one message is enough to see it.
        let opens = self.refusals == self.refusals_max || (self.refusals > self.refusals_max && self.trial);
        if opens {
            let wait = self.refusing.failed();
            self.open(
                now + wait,
                format!("it rejected {} messages in a row, the last one because: {why}", self.refusals),
            );
        }
        opens
    }

    /// A whole batch came back with verdicts.
    pub fn batch_came_back(&mut self) {
        if matches!(self.state, State::Closed) {
            self.ramp = (self.ramp * 2).min(self.batch_max);
        }
    }

    fn open(&mut self, probe_at: Duration, why: String) {
        self.ramp = 1;
        self.state = State::Open { probe_at, probing: false, why };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(1);

    fn closed() -> Breaker {
        let mut breaker = Breaker::new(100, 5);
        assert!(breaker.begins_probe(NOW));
        breaker.probed(NOW, Ok(()));
        breaker.stored();
        breaker
    }

    #[test]
    fn after_trouble_it_tries_one_message_and_doubles() {
        let mut breaker = closed();
        assert_eq!(breaker.permits(4), Some((100, 4)));
        assert!(breaker.lost(NOW, "cut".to_owned()));
        assert!(!breaker.lost(NOW, "cut".to_owned()), "no news");
        assert_eq!(breaker.permits(4), None);
        let at = breaker.probe_at().unwrap();
        assert!(!breaker.begins_probe(NOW) && breaker.begins_probe(at) && !breaker.begins_probe(at));
        breaker.probed(at, Ok(()));
        assert_eq!(breaker.permits(4), Some((1, 1)));
        breaker.batch_came_back();
        assert_eq!(breaker.permits(4), Some((2, 1)));
        for _ in 0..6 {
            breaker.batch_came_back();
        }
        assert_eq!(breaker.permits(4), Some((100, 4)));
    }

    #[test]
    fn a_sink_that_refuses_everything_is_asked_ever_more_rarely() {
        let mut breaker = closed();
        assert_eq!((0..5).filter(|_| breaker.refused(NOW, "no")).count(), 1);
        let mut waits = Vec::new();
        for _ in 0..7 {
            let at = breaker.probe_at().unwrap();
            waits.push((at - NOW).as_secs());
            assert!(breaker.begins_probe(at));
            breaker.probed(NOW, Ok(()));
            assert!(breaker.refused(NOW, "no"), "one refusal is enough now");
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 30, 30]);
        breaker.probed(NOW, Ok(()));
        breaker.stored();
        assert!(!breaker.refused(NOW, "no"), "it counts from the beginning");
    }

    #[test]
    fn a_probe_alone_does_not_forgive() {
        let mut breaker = closed();
        let mut waits = Vec::new();
        for _ in 0..4 {
            breaker.lost(NOW, "cut".to_owned());
            waits.push(breaker.probe_at().unwrap() - NOW);
            breaker.probed(NOW, Ok(()));
        }
        assert!(waits.is_sorted_by(|a, b| a < b), "{waits:?}");
    }
}
