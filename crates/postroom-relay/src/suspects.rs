//! Pure: messages that ended their connection while they were alone. What proves one guilty is that the sink stored others
//! between its failures; in an outage it stores nothing, so an outage makes no poison, however long and however often.

use std::collections::{HashMap, HashSet};

use postroom::MessageId;

#[derive(Debug, Default)]
pub(crate) struct Suspects {
    failed: HashMap<MessageId, Suspicion>,
    /// Relays may have died over these, and this process has let others go first already.
    set_aside: HashSet<(u16, MessageId)>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Suspicion {
    lane: u16,
    /// Lone failures in a row.
    pub failures: u32,
    /// Something was stored since the failure before this one.
    pub others_passed: bool,
    /// What will have been stored in all when everything that was with the sink at the last failure is.
    stored_then: u64,
}

impl Suspects {
    /// A message was published alone, and nobody knows what became of it; `stored` messages were stored so far, and so many
    /// are under way in other batches: those prove nothing about what comes after.
    pub fn failed(&mut self, id: MessageId, lane: u16, stored: u64, under_way: u64) -> Suspicion {
        let new = Suspicion { lane, failures: 0, others_passed: false, stored_then: stored };
        let suspicion = self.failed.entry(id).or_insert(new);
        suspicion.others_passed = suspicion.failures > 0 && stored > suspicion.stored_then;
        suspicion.failures += 1;
        suspicion.stored_then = stored + under_way;
        *suspicion
    }

    pub fn contains(&self, id: MessageId) -> bool {
        self.failed.contains_key(&id)
    }

    /// Whether this message is set aside now: the first time it is asked.
    pub fn sets_aside(&mut self, id: MessageId, lane: u16) -> bool {
        self.set_aside.insert((lane, id))
    }

    /// It is through.
    pub fn clear(&mut self, id: MessageId, lane: u16) {
        if !self.failed.is_empty() {
            self.failed.remove(&id);
        }
        if !self.set_aside.is_empty() {
            self.set_aside.remove(&(lane, id));
        }
    }

    /// These lanes are somebody else's business now.
    pub fn lose(&mut self, lanes: &[u16]) {
        self.failed.retain(|_, suspicion| !lanes.contains(&suspicion.lane));
        self.set_aside.retain(|(lane, _)| !lanes.contains(lane));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_failures_with_others_stored_between_count() {
        let (mut suspects, id) = (Suspects::default(), MessageId::new());
        assert!((0..100).all(|_| !suspects.failed(id, 0, 7, 0).others_passed), "an outage");
        assert!(suspects.failed(id, 0, 8, 3).others_passed);
        assert!(!suspects.failed(id, 0, 11, 0).others_passed, "those were under way already");
        assert!(suspects.failed(id, 0, 12, 0).others_passed);
        suspects.lose(&[0]);
        assert!(!suspects.contains(id));
    }
}
