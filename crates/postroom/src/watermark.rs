//! Pure: how far a log has been settled without a gap.

use std::collections::VecDeque;

/// Names a delivery within its watermark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StepId(u64);

/// The deliveries of one lane in their order, each with the position reached behind it.
///
/// The durable position may move to the newest one before which nothing is open.
#[derive(Debug)]
pub struct Watermark<P> {
    steps: VecDeque<Step<P>>,
    first: u64,
    settled_ahead: usize,
    open: usize,
}

#[derive(Debug)]
struct Step<P> {
    position: P,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    Settled,
    /// Nothing was handed out.
    Empty,
}

impl<P> Default for Watermark<P> {
    fn default() -> Self {
        Self { steps: VecDeque::new(), first: 0, settled_ahead: 0, open: 0 }
    }
}

impl<P> Watermark<P> {
    /// Notes a delivery; when it is settled, with all before it, `position` is reached.
    pub fn handed_out(&mut self, position: P) -> StepId {
        self.steps.push_back(Step { position, state: State::Open });
        self.open += 1;
        StepId(self.first + self.steps.len() as u64 - 1)
    }

    /// Notes that what lies before `position` was passed without handing anything out.
    pub fn passed(&mut self, position: P) {
        match self.steps.back_mut() {
            Some(last) => last.position = position,
            None => self.steps.push_back(Step { position, state: State::Empty }),
        }
    }

    /// Notes that a delivery is settled. Settling it again is a bug and changes nothing.
    pub fn settled(&mut self, id: StepId) {
        let step = id.0.checked_sub(self.first).and_then(|index| self.steps.get_mut(index as usize));
        let step = step.filter(|step| step.state == State::Open);
        debug_assert!(step.is_some(), "a delivery was settled twice");
        if let Some(step) = step {
            step.state = State::Settled;
            self.settled_ahead += 1;
        }
    }

    /// Takes the newest position up to which everything is settled, if there is one that was not taken before.
    pub fn advance(&mut self) -> Option<P> {
        let mut reached = None;
        while self.steps.front().is_some_and(|step| step.state != State::Open)
            && let Some(step) = self.steps.pop_front()
        {
            self.first += 1;
            if step.state == State::Settled {
                self.settled_ahead -= 1;
                self.open -= 1;
            }
            reached = Some(step.position);
        }
        reached
    }

    /// Deliveries that the position has not passed, settled or not.
    pub fn open(&self) -> usize {
        self.open
    }

    /// Deliveries that are settled while the position waits for an older one.
    pub fn settled_ahead(&self) -> usize {
        self.settled_ahead
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_position_waits_for_the_oldest_unsettled_delivery() {
        let mut watermark = Watermark::default();
        watermark.passed("nothing");
        let first = watermark.handed_out("first");
        let second = watermark.handed_out("second");
        let third = watermark.handed_out("third");
        watermark.passed("behind the third");
        assert_eq!(watermark.advance(), Some("nothing"));
        watermark.settled(second);
        assert_eq!(watermark.advance(), None);
        assert_eq!((watermark.settled_ahead(), watermark.open()), (1, 3));
        watermark.settled(first);
        assert_eq!(watermark.advance(), Some("second"));
        assert_eq!((watermark.settled_ahead(), watermark.open()), (0, 1));
        watermark.settled(third);
        assert_eq!(watermark.advance(), Some("behind the third"));
        watermark.passed("later");
        assert_eq!((watermark.advance(), watermark.advance()), (Some("later"), None));
    }

    proptest! {
        // A failing case is printed; none is kept in a file beside the sources.
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn it_never_passes_an_unsettled_delivery(rows in prop::collection::vec(any::<bool>(), 1..60), seed in any::<u64>()) {
            let mut watermark = Watermark::default();
            let mut open: Vec<(usize, StepId)> = Vec::new();
            for (place, goes_out) in rows.iter().enumerate() {
                if *goes_out {
                    open.push((place, watermark.handed_out(place)));
                } else {
                    watermark.passed(place);
                }
            }
            let mut state = seed | 1;
            let mut reached: Option<usize> = None;
            loop {
                if let Some(position) = watermark.advance() {
                    prop_assert!(reached.is_none_or(|before| position > before));
                    reached = Some(position);
                }
                let oldest = open.iter().map(|(place, _)| *place).min().unwrap_or(rows.len());
                prop_assert_eq!(reached.map_or(0, |position| position + 1), oldest);
                if open.is_empty() { break; }
                state ^= state << 13; state ^= state >> 7; state ^= state << 17;
                let (_, step) = open.swap_remove((state % open.len() as u64) as usize);
                watermark.settled(step);
            }
        }
    }
}
