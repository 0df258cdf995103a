//! Pure: what the store recorded, and what it has not yet.

use std::time::Duration;

use postroom::{Outcome, Settled, Settlement, Token};

use super::{Engine, FLUSH_AFTER};
use crate::protocol::Death;

impl Engine {
    pub(super) fn is_settling(&self, token: &Token) -> bool {
        let mut settlements = self.pending.iter().chain(self.settling.iter().flatten());
        settlements.any(|settlement| settlement.token == *token)
    }

    pub(super) fn settled(&mut self, now: Duration, settled: Option<Settled>) {
        let Some(settlements) = self.settling.take() else { return };
        let Some(settled) = settled else {
            // The same again, before what came after it: order among settlements of a key is kept.
            let later = std::mem::replace(&mut self.pending, settlements);
            self.pending.extend(later);
            self.settle_at = now + self.settle_backoff.failed();
            // There may have been nothing in it but positions to write, which fill the window until they are written.
            self.flush_at = Some(self.settle_at);
            return;
        };
        self.settle_backoff.succeeded();
        for Settlement { token, outcome } in &settlements {
            let through = matches!(outcome, Outcome::Done | Outcome::Dead { .. });
            if through {
                self.window.through();
            }
            if through && let Some(held) = self.held.get(token) {
                self.suspects.clear(held.delivery.message.id, held.delivery.lane);
                if let Outcome::Dead { attempts, cause, error, .. } = outcome
                    && !settled.lost_lanes.iter().any(|lost| lost.lane == held.delivery.lane)
                {
                    let (message, error) = (held.delivery.message.clone(), error.clone());
                    self.deaths.push(Death { message, attempts: *attempts, cause: *cause, error });
                }
                if let (Outcome::Dead { blocks_key: false, .. }, Some(key)) = (outcome, &held.key) {
                    self.keys.free(key);
                }
            }
            self.let_go(token);
            self.note_stands.take_if(|noted| noted == token);
        }
        self.counters.fenced += settled.fenced as u64;
        self.flush_at = settled.unwritten.then_some(now + FLUSH_AFTER);
        self.settled_ahead = settled.settled_ahead;
        self.parking.settled(self.settle_number, self.claiming);
        self.lose(&settled.lost_lanes);
        self.lanes_held = self.lanes_held.saturating_sub(settled.lost_lanes.len());
        if settled.more_parked {
            self.parked_at = now;
            self.claim_at = self.claim_at.min(now);
        }
    }

    /// Deliveries that wait for the sink or are with it.
    pub fn unfinished(&self) -> usize {
        let noting = usize::from(self.noting.is_some() || self.noted.is_some());
        self.keys.waiting() + noting + self.batches.values().map(Vec::len).sum::<usize>()
    }

    /// Deliveries whose outcome is known and has not reached the store.
    pub fn unrecorded(&self) -> usize {
        self.pending.len() + self.settling.as_ref().map_or(0, Vec::len)
    }

    /// Deliveries whose outcome the store knows while their lane's position has not passed them.
    pub fn settled_ahead(&self) -> usize {
        self.settled_ahead
    }
}
