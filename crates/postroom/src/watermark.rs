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
    reads: VecDeque<(P, usize)>,
    first: u64,
}

impl<P> Default for Watermark<P> {
    fn default() -> Self {
        Self { reads: VecDeque::new(), first: 0 }
    }
}

impl<P> Watermark<P> {
    /// Notes a read that handed out `outstanding` deliveries and reached `position`.
    pub fn opened(&mut self, position: P, outstanding: usize) -> ReadId {
        self.reads.push_back((position, outstanding));
        ReadId(self.first + self.reads.len() as u64 - 1)
    }

    /// Notes that one delivery of a read is settled. Settling more than was handed out is a bug and changes nothing.
    pub fn settled(&mut self, read: ReadId) {
        let slot = read.0.checked_sub(self.first).and_then(|index| self.reads.get_mut(index as usize));
        debug_assert!(slot.as_ref().is_some_and(|(_, outstanding)| *outstanding > 0), "a delivery was settled twice");
        if let Some((_, outstanding)) = slot {
            *outstanding = outstanding.saturating_sub(1);
        }
    }

    /// Takes the newest position up to which everything is settled, if there is one that was not taken before.
    pub fn advance(&mut self) -> Option<P> {
        let mut reached = None;
        while let Some((_, 0)) = self.reads.front() {
            reached = self.reads.pop_front().map(|(position, _)| position);
            self.first += 1;
        }
        reached
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
        watermark.settled(first);
        assert_eq!(watermark.advance(), Some("second"));
        assert_eq!(watermark.advance(), None);
    }

    proptest! {
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
