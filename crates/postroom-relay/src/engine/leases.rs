//! Pure: what a renewal says, and what a lost lane takes away.

use std::collections::HashSet;
use std::time::Duration;

use postroom::{LostLane, Report, Standing, Token};

use super::{Engine, Held};

impl Engine {
    /// What a renewal says about this relay; whether the sink is blocked only the one who carries it out knows.
    pub(super) fn report(&self) -> Report {
        Report {
            sink: None,
            sink_down: self.breaker.open_because().map(str::to_owned),
            sink_blocked: None,
            survived: self.window.survived(),
        }
    }

    pub(super) fn renewed(&mut self, now: Duration, standing: Option<Standing>) {
        self.renewing = false;
        self.store_away = standing.is_none();
        let Some(standing) = standing else {
            self.renew_at = now + self.renew_backoff.failed().min(self.options.renew_every);
            return;
        };
        self.renew_backoff.succeeded();
        self.renew_at = now + self.options.renew_every;
        if standing.held > self.lanes_held {
            self.claim_at = now;
        }
        self.lanes_held = standing.held;
        self.settled_ahead = standing.settled_ahead;
        self.options.order = standing.order.unwrap_or(self.options.order);
        self.options.on_dead = standing.on_dead.unwrap_or(self.options.on_dead);
        self.window.deaths_are(standing.deaths);
        self.lose(&standing.lost_lanes);
    }

    /// Deliveries of a lost lane that nobody has seen are dropped; those with the sink end as fenced.
    pub(super) fn lose(&mut self, lanes: &[LostLane]) {
        if lanes.is_empty() {
            return;
        }
        self.counters.lanes_lost += lanes.len() as u64;
        // What was claimed after the lane came back is of the new tenure, and here to stay.
        let is_lost = |token: &Token, held: &Held| {
            lanes.iter().any(|lost| lost.lane == held.delivery.lane && *token < lost.before)
        };
        let settlements = self.pending.iter().chain(self.settling.iter().flatten());
        let settling: HashSet<Token> = settlements.map(|settlement| settlement.token).collect();
        let gone: Vec<Token> = self
            .held
            .iter()
            .filter(|(token, held)| is_lost(token, held) && !held.with_sink && !settling.contains(token))
            .map(|(token, _)| *token)
            .collect();
        for token in &gone {
            self.let_go(token);
        }
        for (token, held) in &mut self.held {
            held.lost |= is_lost(token, held);
        }
        // Whoever has the lane now has the note as well.
        self.note_stands.take_if(|token| self.held.get(token).is_none_or(|held| held.lost));
        let numbers: Vec<u16> = lanes.iter().map(|lost| lost.lane).collect();
        self.suspects.lose(&numbers);
        let held = &self.held;
        self.keys.forget(|token| !held.contains_key(token));
    }
}
