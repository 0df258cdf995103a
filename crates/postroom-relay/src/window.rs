//! Pure: how much may be in flight after relays died. The window is for what was in flight then: it shrinks with each death in a
//! row after the first, down to one message, and grows back as messages get through, so that a relay that got past the trouble is
//! soon at full speed.

/// So many messages through double the window.
const THROUGH_PER_DOUBLING: usize = 16;

#[derive(Debug)]
pub(crate) struct Window {
    full: usize,
    /// Relays in a row that died before this one.
    deaths: u32,
    /// Messages through since that is known.
    through: usize,
    survived: bool,
}

impl Window {
    /// At most so many messages may be in flight while nobody has died.
    pub fn new(full: usize) -> Self {
        Self { full: full.max(1), deaths: 0, through: 0, survived: false }
    }

    /// What a renewal told.
    pub fn deaths_are(&mut self, deaths: u32) {
        if deaths > self.deaths {
            self.through = 0;
        }
        if deaths != self.deaths {
            self.survived = false;
        }
        self.deaths = deaths;
    }

    /// One more message is through.
    pub fn through(&mut self) {
        self.through += 1;
        // More than the relay before this one can have had in flight.
        self.survived |= self.deaths > 0 && self.through > self.full;
    }

    /// Whether what killed the relays before this one, if it was a message, is behind it.
    pub fn survived(&self) -> bool {
        self.survived
    }

    /// Deliveries that may be in flight now.
    pub fn size(&self) -> usize {
        let shift = 3 * self.deaths.saturating_sub(1).min(10);
        let smallest = (self.full >> shift).max(1);
        // Each death beyond the one that made it one message makes the next relay grow half as fast. A message that kills
        // from deep within the window is so reached in small steps after a few deaths more, and not never.
        let beyond = (shift.saturating_sub(self.full.ilog2()) / 3).min(10);
        let doublings = self.through / (THROUGH_PER_DOUBLING << beyond);
        smallest.saturating_mul(1 << doublings.min(30)).min(self.full)
    }

    /// One message at a time, because relays died before.
    pub fn is_single(&self) -> bool {
        self.deaths > 0 && self.size() == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(deaths: u32, through: usize) -> Window {
        let mut window = Window::new(2000);
        window.deaths_are(deaths);
        (0..through).for_each(|_| window.through());
        window
    }

    #[test]
    fn it_shrinks_with_each_death_and_grows_as_messages_get_through() {
        assert_eq!((0..=6).map(|deaths| after(deaths, 0).size()).collect::<Vec<_>>(), [2000, 2000, 250, 31, 3, 1, 1]);
        assert_eq!([0, 15, 16, 32, 160, 176, 2000].map(|n| after(5, n).size()), [1, 1, 2, 4, 1024, 2000, 2000]);
        assert_eq!([31, 32, 64].map(|n| after(6, n).size()), [1, 2, 4], "half as fast with one death more");
        assert_eq!(after(100, 1000).size(), 1, "a limit, and no overflow");
    }

    #[test]
    fn deaths_are_survived_when_more_is_through_than_can_have_been_in_flight() {
        assert!(!after(5, 2000).survived() && after(5, 2001).survived());
        let mut window = after(5, 2001);
        window.deaths_are(6);
        assert!(!window.survived() && window.is_single());
        assert!(!after(0, 5000).survived() && !after(0, 0).is_single());
    }
}
