//! Pure: how much is asked for, and where what was claimed goes.

use std::sync::Arc;
use std::time::Duration;

use postroom::{Cause, Claimed, Delivery, Noted, Order, Origin, Outcome, Settlement, Token, Want};

use super::{Engine, FLUSH_AFTER, Held, PARKED_POLL, POLL_FIRST};

impl Engine {
    pub(super) fn can_claim(&self) -> bool {
        // Reading for a handful of free places costs as much as for many.
        !self.stopping
            && self.claiming.is_none()
            && self.lanes_held > 0
            && self.credit() >= self.window.size().div_ceil(4)
            && self.bytes_left() >= self.options.in_flight_bytes_max.div_ceil(4)
    }

    pub(super) fn want(&mut self, now: Duration) -> Option<Want> {
        if !self.can_claim() || (now < self.claim_at && !self.woken) {
            return None;
        }
        let single = self.window.is_single();
        // One at a time the parked ones take turns with the others.
        let parked = now >= self.parked_at && !(single && self.claiming_parked);
        if parked {
            self.parked_at = now + PARKED_POLL;
        }
        let window = self.window.size();
        Some(Want {
            messages: self.credit(),
            bytes: self.bytes_left(),
            // Fair shares with some slack; a lane has to have one place.
            lane_messages_max: (window / 16).max(2 * window / self.lanes_held.max(1)).max(1),
            parked,
            single,
        })
    }

    /// How many more deliveries a crash may repeat.
    pub(super) fn credit(&self) -> usize {
        self.window.size().saturating_sub(self.held.len() + self.settled_ahead)
    }

    pub(super) fn bytes_left(&self) -> usize {
        self.options.in_flight_bytes_max.saturating_sub(self.held_bytes)
    }

    pub(super) fn claimed(&mut self, now: Duration, claimed: Option<Claimed>) {
        let number = self.claiming.take().unwrap_or(self.claim_number);
        let Some(claimed) = claimed else {
            self.claim_at = now + self.claim_backoff.failed();
            return;
        };
        self.claim_backoff.succeeded();
        // A claim that did not look for parked messages says nothing about those.
        self.found_nothing =
            claimed.deliveries.is_empty() && !claimed.more && (self.claiming_parked || self.found_nothing);
        self.lose(&claimed.lost_lanes);
        self.lanes_held = self.lanes_held.saturating_sub(claimed.lost_lanes.len());
        if claimed.unwritten {
            self.flush_at.get_or_insert(now + FLUSH_AFTER);
        }
        self.counters.claimed += claimed.deliveries.len() as u64;
        if claimed.more {
            self.claim_at = now;
            self.claim_wait = POLL_FIRST;
        } else {
            if !claimed.deliveries.is_empty() {
                self.claim_wait = POLL_FIRST;
            }
            self.claim_at = now + self.claim_wait;
            self.claim_wait = (self.claim_wait * 2).min(self.options.poll_idle);
        }
        for delivery in claimed.deliveries {
            self.take_in(delivery);
        }
        self.parking.claimed(number);
    }

    pub(super) fn take_in(&mut self, delivery: Delivery) {
        let token = delivery.token;
        let key: Option<Arc<str>> = match self.options.order {
            Order::None => None,
            Order::Key | Order::Pipelined => delivery.message.ordering_key().map(Arc::from),
        };
        let scheduled = delivery.scheduled;
        let behind = key.as_ref().is_some_and(|key| match delivery.origin {
            Origin::Outbox => delivery.behind || self.parking.holds(key),
            Origin::Parked => self.parking.stops(key),
        });
        let bytes = delivery.message.weight();
        let (deaths, doubts, attempts) = (delivery.deaths, delivery.doubts, delivery.attempts);
        let unreadable = delivery.unreadable.clone();
        let to_note = deaths > 0 || doubts > 0 || self.window.is_single();
        let suspected = to_note || self.suspects.contains(delivery.message.id);
        let held = Held { delivery, key: key.clone(), with_sink: false, bytes, suspected, to_note, lost: false };
        self.held.insert(token, held);
        self.held_bytes += bytes;
        if let Some(error) = unreadable {
            // It alone is set aside: its key, which may be what cannot be read, goes on.
            self.counters.dead += 1;
            let outcome = Outcome::Dead { attempts, cause: Cause::Permanent, error, blocks_key: false };
            self.pending.push(Settlement { token, outcome });
        } else if scheduled {
            self.counters.scheduled += 1;
            self.pending.push(Settlement { token, outcome: Outcome::Schedule });
        } else if behind {
            self.queue_up(token, key);
        } else if !self.condemned(token, Noted { deaths, doubts, proven: self.proven }, key.as_ref()) {
            self.keys.push(key.as_ref(), token);
        }
    }

    pub(super) fn queue_up(&mut self, token: Token, key: Option<Arc<str>>) {
        let parked = self.held.get(&token).is_some_and(|held| held.delivery.origin == Origin::Parked);
        if parked {
            self.pending.push(Settlement { token, outcome: Outcome::Release });
            return;
        }
        self.counters.queued += 1;
        self.pending.push(Settlement { token, outcome: Outcome::Queue });
        if let Some(key) = key {
            self.parking.queue(key, self.settle_number + 1);
        }
    }
}
