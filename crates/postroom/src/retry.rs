//! Pure: what happens to a message after a verdict. No clock and no random numbers except those that are passed in.

use std::time::Duration;

use crate::delivery::Cause;
use crate::message::Message;
use crate::topics::TopicFilter;
use crate::verdict::{FailureKind, Verdict};

const WAIT_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

/// When to try again and when to stop.
///
/// The wait after the n-th attempt is `min(cap, base^n)` seconds plus `jitter` times a number in 0..1.
#[derive(Debug, Clone, PartialEq)]
pub struct RetryPolicy {
    /// Base of the exponential, in seconds; 3.
    pub base: f64,
    /// Longest wait before jitter; 300 s.
    pub cap: Duration,
    /// Largest jitter; 2.5 s.
    pub jitter: Duration,
    /// Attempts after which a message becomes a dead letter, unless a more specific limit applies; 8.
    pub attempts_max: u32,
    /// Limits for certain topics or types; the first one that matches applies.
    pub limits: Vec<AttemptLimit>,
}

/// Attempts for certain messages: payments may deserve more than reminders.
#[derive(Debug, Clone, PartialEq)]
pub struct AttemptLimit {
    /// For these topics; none: for all topics.
    pub topics: Option<TopicFilter>,
    /// For these types; none: for all types.
    pub types: Option<TopicFilter>,
    /// Attempts after which such a message becomes a dead letter.
    pub attempts_max: u32,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            base: 3.0,
            cap: Duration::from_secs(300),
            jitter: Duration::from_millis(2500),
            attempts_max: 8,
            limits: Vec::new(),
        }
    }
}

impl RetryPolicy {
    /// The wait after `attempts` attempts; `chance` in 0..1 scales the jitter. At most a year: a store may not be able to add
    /// more to its clock.
    pub fn wait(&self, attempts: u32, chance: f64) -> Duration {
        let cap = self.cap.min(WAIT_MAX);
        let exponential = self.base.powi(attempts.min(64) as i32).min(cap.as_secs_f64());
        let jitter = self.jitter.min(WAIT_MAX).mul_f64(chance.clamp(0.0, 1.0));
        (Duration::from_secs_f64(exponential.max(0.0)) + jitter).min(WAIT_MAX)
    }
}

impl RetryPolicy {
    /// Attempts after which a message of this topic and type becomes a dead letter.
    pub fn attempts_max_of(&self, topic: &str, kind: &str) -> u32 {
        let fits = |filter: &Option<TopicFilter>, name: &str| filter.as_ref().is_none_or(|filter| filter.takes(name));
        let limit = self.limits.iter().find(|limit| fits(&limit.topics, topic) && fits(&limit.types, kind));
        limit.map_or(self.attempts_max, |limit| limit.attempts_max)
    }
}

/// What the policy decides after a verdict.
#[derive(Debug, Clone, PartialEq)]
pub enum Disposition {
    /// Settled: the broker has it, or the sink is configured not to send it.
    Done,
    /// Park it and try again after a wait; `attempts` is what is recorded.
    Retry {
        /// Wait by the database's clock.
        after: Duration,
        /// Attempts used up so far, including this one if it used one up.
        attempts: u32,
        /// For the operator.
        error: String,
    },
    /// It becomes a dead letter.
    Dead {
        /// Attempts used up, including this one.
        attempts: u32,
        /// Why it is dead.
        cause: Cause,
        /// For the operator.
        error: String,
    },
    /// The outcome is unknown: publish it again with the same id, at once and in its place; no attempt is used up.
    Again,
}

/// Decides about `message` by the verdict, the attempts used up before it, and `chance` in 0..1. Only a verdict on the
/// message itself uses up an attempt; an outage is not passed to this function.
pub fn decide(verdict: Verdict, message: &Message, attempts: u32, policy: &RetryPolicy, chance: f64) -> Disposition {
    let failure = match verdict {
        Verdict::Stored | Verdict::Skipped => return Disposition::Done,
        Verdict::Unknown(_) | Verdict::NotSent => return Disposition::Again,
        Verdict::Failed(failure) => failure,
    };
    let error = tidy_reason(failure.reason);
    let burned = attempts.saturating_add(1);
    match failure.kind {
        FailureKind::Busy => Disposition::Retry { after: policy.wait(burned, chance), attempts, error },
        FailureKind::Transient if burned < policy.attempts_max_of(&message.topic, &message.kind) => {
            Disposition::Retry { after: policy.wait(burned, chance), attempts: burned, error }
        }
        FailureKind::Transient => Disposition::Dead { attempts: burned, cause: Cause::Exhausted, error },
        FailureKind::Permanent => Disposition::Dead { attempts: burned, cause: Cause::Permanent, error },
        FailureKind::Poison => Disposition::Dead { attempts: burned, cause: Cause::Poison, error },
    }
}

/// Makes a reason fit for a database column and a screen: without NUL, which text columns cannot hold, and not longer than it
/// is useful.
pub fn tidy_reason(mut reason: String) -> String {
    const REASON_BYTES_MAX: usize = 4000;
    if reason.contains('\0') {
        reason = reason.replace('\0', "\u{fffd}");
    }
    if reason.len() > REASON_BYTES_MAX {
        let end = (0..=REASON_BYTES_MAX).rev().find(|at| reason.is_char_boundary(*at)).unwrap_or_default();
        reason.truncate(end);
        reason.push('…');
    }
    reason
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message() -> Message {
        Message::new("billing", "payment.taken", "")
    }

    fn failed(kind: FailureKind) -> Verdict {
        Verdict::failed(kind, "refused")
    }

    #[test]
    fn waits_follow_the_formula_and_its_cap() {
        let policy = RetryPolicy::default();
        let waits: Vec<u64> = (1..=8).map(|attempts| policy.wait(attempts, 0.0).as_secs()).collect();
        assert_eq!(waits, [3, 9, 27, 81, 243, 300, 300, 300]);
        assert_eq!(policy.wait(1, 1.0), Duration::from_millis(5500));
        assert_eq!(policy.wait(u32::MAX, 0.0), Duration::from_secs(300));
        let endless = RetryPolicy { cap: Duration::MAX, jitter: Duration::MAX, ..policy };
        assert_eq!(endless.wait(64, 1.0), WAIT_MAX);
    }

    #[test]
    fn a_message_is_dead_after_exactly_the_permitted_attempts() {
        let policy = RetryPolicy::default();
        let mut attempts = 0;
        for _ in 0..7 {
            match decide(failed(FailureKind::Transient), &message(), attempts, &policy, 0.5) {
                Disposition::Retry { attempts: burned, .. } => attempts = burned,
                other => panic!("{other:?}"),
            }
        }
        let last = decide(failed(FailureKind::Transient), &message(), attempts, &policy, 0.5);
        assert!(matches!(last, Disposition::Dead { attempts: 8, cause: Cause::Exhausted, .. }));
    }

    #[test]
    fn a_reason_is_made_fit_for_a_text_column() {
        let verdict = Verdict::failed(FailureKind::Permanent, format!("a\0b{}", "ä".repeat(5000)));
        let Disposition::Dead { error, .. } = decide(verdict, &message(), 0, &RetryPolicy::default(), 0.0) else {
            panic!("permanent is dead")
        };
        assert!(error.starts_with("a\u{fffd}bä") && error.len() < 4010);
    }

    #[test]
    fn pushing_back_and_not_knowing_burn_no_attempt() {
        let policy = RetryPolicy::default();
        for attempts in [0, 7, 100] {
            let busy = decide(failed(FailureKind::Busy), &message(), attempts, &policy, 0.0);
            assert!(matches!(busy, Disposition::Retry { attempts: after, .. } if after == attempts));
            assert_eq!(decide(Verdict::Unknown("cut".into()), &message(), attempts, &policy, 0.0), Disposition::Again);
        }
    }

    #[test]
    fn a_limit_of_a_topic_or_type_stands_over_the_general_one() {
        let only = |pattern| Some(TopicFilter::new([pattern]).unwrap());
        let limits = vec![
            AttemptLimit { topics: None, types: only("payment.*"), attempts_max: 20 },
            AttemptLimit { topics: only("billing"), types: None, attempts_max: 2 },
        ];
        let policy = RetryPolicy { limits, ..RetryPolicy::default() };
        assert_eq!(policy.attempts_max_of("billing", "payment.taken"), 20);
        assert_eq!(policy.attempts_max_of("billing", "invoice.sent"), 2);
        assert_eq!(policy.attempts_max_of("orders", "order.placed"), 8);
        let tenth = decide(failed(FailureKind::Transient), &message(), 9, &policy, 0.0);
        assert!(matches!(tenth, Disposition::Retry { attempts: 10, .. }));
    }
}
