//! Pure: how far a log has been settled without a gap.

use std::collections::VecDeque;

/// Names a read within its watermark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ReadId(u64);

/// Reads of one lane in their order, each with the position reached after it and the deliveries not yet settled.
///
/// The durable position may move to the newest read before which nothing is outstanding.
#[derive(Debug)]
pub struct Watermark<P> {
    reads: VecDeque<Read<P>>,
    first: u64,
    settled_ahead: usize,
    open: usize,
}

#[derive(Debug)]
struct Read<P> {
    position: P,
    outstanding: usize,
    settled: usize,
}

impl<P> Default for Watermark<P> {
    fn default() -> Self {
        Self { reads: VecDeque::new(), first: 0, settled_ahead: 0, open: 0 }
    }
}

impl<P> Watermark<P> {
    /// Notes a read that handed out `outstanding` deliveries and reached `position`.
    pub fn opened(&mut self, position: P, outstanding: usize) -> ReadId {
        self.reads.push_back(Read { position, outstanding, settled: 0 });
        self.open += outstanding;
        ReadId(self.first + self.reads.len() as u64 - 1)
    }

    /// Notes that one delivery of a read is settled. Settling more than was handed out is a bug and changes nothing.
    pub fn settled(&mut self, id: ReadId) {
        let read = id.0.checked_sub(self.first).and_then(|index| self.reads.get_mut(index as usize));
        let read = read.filter(|read| read.outstanding > 0);
        debug_assert!(read.is_some(), "a delivery was settled twice");
        if let Some(read) = read {
            read.outstanding -= 1;
            read.settled += 1;
            self.settled_ahead += 1;
        }
    }

    /// Takes the newest position up to which everything is settled, if there is one that was not taken before.
    pub fn advance(&mut self) -> Option<P> {
        let mut reached = None;
        while self.reads.front().is_some_and(|read| read.outstanding == 0) {
            if let Some(read) = self.reads.pop_front() {
                self.first += 1;
                self.settled_ahead -= read.settled;
                self.open -= read.settled;
                reached = Some(read.position);
            }
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
        let first = watermark.opened("first", 2);
        let second = watermark.opened("second", 1);
        watermark.settled(second);
        watermark.settled(first);
        assert_eq!(watermark.advance(), None);
        assert_eq!((watermark.settled_ahead(), watermark.open()), (2, 3));
        watermark.settled(first);
        assert_eq!(watermark.advance(), Some("second"));
        assert_eq!((watermark.settled_ahead(), watermark.open()), (0, 0));
        assert_eq!(watermark.advance(), None);
    }

    proptest! {
        // A failing case is printed; none is kept in a file beside the sources.
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn it_never_passes_an_unsettled_delivery(sizes in prop::collection::vec(0usize..5, 1..20), seed in any::<u64>()) {
            let mut watermark = Watermark::default();
            let mut open: Vec<(usize, ReadId)> = Vec::new();
            for (index, size) in sizes.iter().enumerate() {
                let read = watermark.opened(index, *size);
                open.extend(std::iter::repeat_n((index, read), *size));
            }
            let mut state = seed | 1;
            let mut reached: Option<usize> = None;
            loop {
                if let Some(position) = watermark.advance() {
                    prop_assert!(reached.is_none_or(|before| position > before));
                    reached = Some(position);
                }
                let oldest = open.iter().map(|(index, _)| *index).min().unwrap_or(sizes.len());
                prop_assert_eq!(reached.map_or(0, |position| position + 1), oldest);
                if open.is_empty() { break; }
                state ^= state << 13; state ^= state >> 7; state ^= state << 17;
                let (_, read) = open.swap_remove((state % open.len() as u64) as usize);
                watermark.settled(read);
            }
        }
    }
}
