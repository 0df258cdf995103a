//! Pure: messages that relays may have died over.
//!
//! A death counts against a message only if publishing it was possible: the sink had stored something since the process began,
//! and was not blocked. Otherwise it is a doubt. In an outage nothing is stored, so an outage kills nobody, however often the
//! relay is killed meanwhile. A message that kills its relay is found as long as there is other traffic, which shows that the sink
//! works; without any it cannot be told from an outage, and goes round with growing waits, delaying only its key.

use std::sync::Arc;
use std::time::Duration;

use postroom::{Cause, Noted, Outcome, Token};

use super::Engine;
use crate::protocol::Action;

/// How many relays have to die with this message alone with the sink until it is poison.
const DEATHS_MAX: u32 = 3;
/// A note that could not be taken off is tried again after this.
const CLEAR_AGAIN: Duration = Duration::from_millis(200);

impl Engine {
    /// Asks for the note about a message that travels alone next; none if it needs none.
    pub(super) fn begin_note(&mut self, token: Token) -> Option<Action> {
        let held = self.held.get_mut(&token).filter(|held| held.to_note)?;
        held.with_sink = true;
        self.noting = Some(token);
        Some(Action::Note { token, proven: self.proven })
    }

    /// The store has noted it, or could not: then it goes out all the same, and what it does is found out later.
    pub(super) fn noted(&mut self, noted: Noted) {
        let Some(token) = self.noting.take() else { return };
        let Some(held) = self.held.get_mut(&token) else { return self.lone_under_way = false };
        if held.lost {
            self.lone_under_way = false;
            self.put_back(token);
            return;
        }
        self.note_stands = Some(token);
        if self.condemned(token, noted, None) {
            self.lone_under_way = false;
        } else {
            self.noted = Some(token);
        }
    }

    /// Before anything else begins: takes off the note about a message that came back, unless its settlement does.
    pub(super) fn clear_note(&mut self, token: Token) -> Option<Action> {
        if self.clearing || self.clear_at.is_some() || self.is_settling(&token) {
            return None;
        }
        self.clearing = true;
        Some(Action::ClearNote)
    }

    pub(super) fn note_cleared(&mut self, now: Duration, done: bool) {
        self.clearing = false;
        if done {
            self.note_stands = None;
        } else {
            self.clear_at = Some(now + CLEAR_AGAIN);
        }
    }

    /// Buries a message over which too many relays died. Sets one aside that relays may have died over, once a process, while
    /// nothing shows that the sink works: others go first, with its key waiting, and show it. Whether it did either. `waits_in`
    /// is its key if it has not been taken out of it yet.
    pub(super) fn condemned(&mut self, token: Token, noted: Noted, waits_in: Option<&Arc<str>>) -> bool {
        let Noted { deaths, doubts, proven } = noted;
        let Some(held) = self.held.get_mut(&token).filter(|_| deaths > 0 || doubts > 0) else { return false };
        let with_sink = std::mem::take(&mut held.with_sink);
        let (id, lane, attempts) = (held.delivery.message.id, held.delivery.lane, held.delivery.attempts);
        if deaths >= DEATHS_MAX {
            let error = format!("{deaths} relays in a row died while this was the only message in flight");
            waits_in.iter().for_each(|key| self.keys.hold(key));
            self.bury(token, attempts.saturating_add(1), Cause::Poison, error);
            return true;
        }
        if proven || !self.suspects.sets_aside(id, lane) {
            held.with_sink = with_sink;
            return false;
        }
        let died = deaths.saturating_add(doubts);
        let error = format!(
            "{died} relays ended while this was the only message in flight, and nothing has been stored since this relay started: \
             other messages are sent first, to see whether the sink accepts them"
        );
        let after = self.options.retry.wait(doubts.max(1), self.chance.next());
        self.counters.retried += 1;
        self.park(token, Outcome::Retry { after, attempts, error });
        true
    }
}
