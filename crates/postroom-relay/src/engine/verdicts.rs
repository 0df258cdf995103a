//! Pure: what follows a verdict, and what follows none.

use std::time::Duration;

use postroom::{
    Cause, Delivery, Disposition, FailureKind, OnDead, Outcome, Settlement, Token, Verdict, Verdicts, decide,
    tidy_reason,
};

use super::Engine;
use crate::protocol::BatchId;

impl Engine {
    pub(super) fn published(&mut self, now: Duration, batch: BatchId, verdicts: Result<Verdicts, String>) {
        let tokens = self.batches.remove(&batch).unwrap_or_default();
        self.lone_under_way = false;
        let mut verdicts = match verdicts {
            Ok(verdicts) => verdicts,
            Err(why) => {
                let why = tidy_reason(why);
                self.again(tokens, &why);
                self.sink_is_lost(now, why);
                return;
            }
        };
        let lone = tokens.len() == 1;
        let mut again = Vec::new();
        let mut unknown = None;
        // Something of the batch was judged, over which the sink kept others back.
        let mut judged = false;
        for (place, token) in tokens.into_iter().enumerate() {
            let Some(held) = self.held.get_mut(&token) else { continue };
            held.with_sink = false;
            let verdict = verdicts.take(place);
            match &verdict {
                Verdict::Stored => {
                    self.proven = true;
                    self.breaker.stored();
                }
                Verdict::Failed(failure) if matches!(failure.kind, FailureKind::Transient | FailureKind::Busy) => {
                    if self.breaker.refused(now, &failure.reason) {
                        self.counters.sink_outages += 1;
                    }
                }
                Verdict::Unknown(why) => unknown = Some(tidy_reason(why.clone())),
                Verdict::Failed(_) | Verdict::Skipped | Verdict::NotSent => {}
            }
            let was_sent = verdict != Verdict::NotSent;
            judged |= was_sent;
            let Delivery { message, attempts, .. } = &held.delivery;
            let disposition = decide(verdict, message, *attempts, &self.options.retry, self.chance.next());
            match disposition {
                Disposition::Done => {
                    self.counters.stored += 1;
                    self.through(token, Outcome::Done);
                }
                Disposition::Dead { attempts, cause, error } => self.bury(token, attempts, cause, error),
                Disposition::Retry { after, attempts, error } => {
                    self.counters.retried += 1;
                    self.park(token, Outcome::Retry { after, attempts, error });
                }
                Disposition::Again => {
                    self.counters.unknown += u64::from(was_sent);
                    again.push(token);
                }
            }
        }
        if again.is_empty() {
            return self.breaker.batch_came_back();
        }
        let unknown = unknown.or_else(|| (!judged).then(|| "the sink sent nothing of a batch".to_owned()));
        if lone {
            self.again(again, unknown.as_deref().unwrap_or_default());
        } else {
            // Nobody can tell which of those that are unknown it was: from now on one by one.
            for token in again.into_iter().rev() {
                self.put_back(token);
            }
        }
        match unknown {
            Some(unknown) => self.sink_is_lost(now, unknown),
            None => self.breaker.batch_came_back(),
        }
    }

    /// A batch ended without verdicts. In company nobody knows whose fault it was; what was alone comes under suspicion: the
    /// second time it is set aside, with its key, so that others show whether the sink takes them. When others were stored
    /// between two of its failures, that is a verdict on the message, and costs an attempt.
    pub(super) fn again(&mut self, tokens: Vec<Token>, why: &str) {
        let [token] = tokens[..] else {
            for token in tokens.into_iter().rev() {
                self.put_back(token);
            }
            return;
        };
        let Some(held) = self.held.get_mut(&token) else { return };
        if held.lost {
            return self.put_back(token);
        }
        held.suspected = true;
        let Delivery { message, lane, attempts, .. } = &held.delivery;
        let under_way: usize = self.batches.values().map(Vec::len).sum();
        let suspicion = self.suspects.failed(message.id, *lane, self.counters.stored, under_way as u64);
        let attempts = attempts.saturating_add(u32::from(suspicion.others_passed));
        let error = format!("published alone, it made the sink fail {} times: {why}", suspicion.failures);
        let attempts_max = self.options.retry.attempts_max_of(&message.topic, &message.kind);
        if attempts >= attempts_max && suspicion.others_passed {
            self.bury(token, attempts, Cause::Poison, error);
        } else if suspicion.failures > 1 {
            held.with_sink = false;
            let after = self.options.retry.wait(suspicion.failures - 1, self.chance.next());
            self.counters.retried += 1;
            self.park(token, Outcome::Retry { after, attempts, error });
        } else {
            self.put_back(token);
        }
    }

    pub(super) fn put_back(&mut self, token: Token) {
        let Some(held) = self.held.get_mut(&token) else { return };
        held.with_sink = false;
        if held.lost {
            let key = held.key.clone();
            self.let_go(&token);
            key.iter().for_each(|key| self.keys.free(key));
            return;
        }
        match held.key.clone() {
            // One before it in its batch failed; it has to stay behind that one.
            Some(key) if self.parking.stops(&key) => self.queue_up(token, Some(key)),
            key if held.suspected => self.keys.put_back_last(key.as_ref(), token),
            key => self.keys.put_back(key.as_ref(), token),
        }
    }

    /// Makes a dead letter of a delivery; its key goes on or waits, as configured.
    pub(super) fn bury(&mut self, token: Token, attempts: u32, cause: Cause, error: String) {
        self.counters.dead += 1;
        let keyed = self.held.get(&token).is_some_and(|held| held.key.is_some());
        let blocks_key = keyed && self.options.on_dead == OnDead::Block;
        let outcome = Outcome::Dead { attempts, cause, error, blocks_key };
        if blocks_key {
            self.park(token, outcome);
        } else {
            // Its key goes on when the dead letter is written. Sooner, a crash would bring the message back, and it could
            // be stored after those behind it.
            self.pending.push(Settlement { token, outcome });
        }
    }

    /// Settles a delivery and lets the next of its key go.
    pub(super) fn through(&mut self, token: Token, outcome: Outcome) {
        self.pending.push(Settlement { token, outcome });
        if let Some(key) = self.held.get(&token).and_then(|held| held.key.clone()) {
            self.keys.free(&key);
        }
    }

    /// Parks a delivery; what waits in its key queues up behind it.
    pub(super) fn park(&mut self, token: Token, outcome: Outcome) {
        self.pending.push(Settlement { token, outcome });
        let Some(key) = self.held.get(&token).and_then(|held| held.key.clone()) else { return };
        self.parking.stop(key.clone(), self.settle_number + 1);
        for waiting in self.keys.stop(&key) {
            self.queue_up(waiting, Some(key.clone()));
        }
    }

    pub(super) fn sink_is_lost(&mut self, now: Duration, why: String) {
        self.proven = false;
        if self.breaker.lost(now, why) {
            self.counters.sink_outages += 1;
        }
    }
}
