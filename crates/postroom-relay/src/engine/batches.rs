//! Pure: what goes to the sink next, together or by itself.

use std::sync::Arc;
use std::time::Duration;

use postroom::{Batch, Delivery, Order, Token, Way};

use super::Engine;
use crate::keys::Keys;
use crate::protocol::{Action, BatchId};

impl Engine {
    /// The next batch, or a message that has to be noted before it travels alone.
    pub(super) fn next_batch(&mut self, now: Duration) -> Option<Action> {
        if let Some(token) = self.noted.take() {
            if self.held.get(&token).is_some_and(|held| !held.lost) {
                return Some(self.publish(vec![token]));
            }
            self.lone_under_way = false;
            self.put_back(token);
        }
        let (messages_max, batches_max) = self.breaker.permits(self.options.sink.batches_in_flight_max)?;
        if self.lone_under_way || self.batches.len() >= batches_max || !self.keys.has_ready() {
            return None;
        }
        if let Some(token) = self.note_stands {
            return self.clear_note(token);
        }
        let messages_max = messages_max.min(self.rate.permits(now));
        let (mut tokens, mut bytes): (Vec<Token>, usize) = (Vec::new(), 0);
        // Runs that begin with a message that travels alone, and let others go first.
        let mut aside: Vec<Vec<Token>> = Vec::new();
        while tokens.len() < messages_max {
            let run_max = if self.options.order == Order::Pipelined { messages_max - tokens.len() } else { 1 };
            let mut run = self.keys.pop(run_max);
            if run.is_empty() {
                break;
            }
            if !run.iter().any(|token| self.held.get(token).is_some_and(|held| held.suspected)) {
                let fits = |token: &&Token| {
                    bytes += self.held.get(token).map_or(0, |held| held.bytes);
                    bytes <= self.options.sink.batch_bytes_max
                };
                let fitting = run.iter().take_while(fits).count();
                // One that is too large for any batch is one of its own.
                let rest = run.split_off(fitting.max(usize::from(tokens.is_empty())));
                tokens.extend(run);
                if !rest.is_empty() {
                    self.unpop(rest.into_iter(), Keys::put_back);
                    break;
                }
            } else if self.breaker.on_trial() {
                aside.push(run);
            } else {
                // It goes when nothing else is under way, and nothing new begins before.
                aside.insert(0, run);
                break;
            }
        }
        if tokens.is_empty() && self.batches.is_empty() && !aside.is_empty() {
            let mut run = aside.remove(0).into_iter();
            tokens.extend(run.next());
            self.unpop(run, Keys::put_back);
            self.lone_under_way = true;
        }
        let put_back = if self.breaker.on_trial() { Keys::put_back_last } else { Keys::put_back };
        aside.into_iter().for_each(|run| self.unpop(run.into_iter(), put_back));
        if tokens.is_empty() {
            return None;
        }
        if let [token] = tokens[..]
            && self.lone_under_way
            && let Some(note) = self.begin_note(token)
        {
            return Some(note);
        }
        Some(self.publish(tokens))
    }

    pub(super) fn publish(&mut self, tokens: Vec<Token>) -> Action {
        let mut messages = Vec::with_capacity(tokens.len());
        for token in &tokens {
            if let Some(held) = self.held.get_mut(token) {
                held.with_sink = true;
                let Delivery { message, lane, replay, .. } = &held.delivery;
                messages.push((message.clone(), Way { lane: *lane, replay: *replay }));
            }
        }
        self.rate.took(tokens.len());
        let id = BatchId(self.next_batch);
        self.next_batch += 1;
        self.batches.insert(id, tokens);
        Action::Publish(id, Batch::of(messages))
    }

    /// Puts what was popped, and not published, back in its order; the key is the next or the last to go.
    pub(super) fn unpop(
        &mut self,
        run: impl DoubleEndedIterator<Item = Token>,
        put_back: fn(&mut Keys, Option<&Arc<str>>, Token),
    ) {
        for token in run.rev() {
            let key = self.held.get(&token).and_then(|held| held.key.clone());
            put_back(&mut self.keys, key.as_ref(), token);
        }
    }
}
