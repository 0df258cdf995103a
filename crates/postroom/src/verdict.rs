//! What a sink says of each message. A sink judges; the policy decides; the store records.

/// A sink's judgement of one message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The broker confirmed that it has *this* message.
    Stored,
    /// The broker, or the sink on its behalf, refused this message.
    Failed(Failure),
    /// The sink is configured not to send such messages.
    Skipped,
    /// Nobody knows: it may be stored or not. It is published again with the same id, and never marked.
    Unknown(String),
}

/// Why a message was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// What the policy goes by.
    pub kind: FailureKind,
    /// For the operator: what was refused and why. No payload in it.
    pub reason: String,
}

/// How a refusal is to be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureKind {
    /// It may pass later. Burns an attempt.
    Transient,
    /// It will never pass.
    Permanent,
    /// The message harms the connection or the process that handles it.
    Poison,
    /// The broker pushed back for a reason that is not the message's (a negative confirm: queue full, disk alarm). It
    /// waits like a transient failure and burns no attempt: a queue that stays full for an hour kills nothing.
    Busy,
}

impl Verdict {
    /// A failed verdict.
    pub fn failed(kind: FailureKind, reason: impl Into<String>) -> Self {
        Self::Failed(Failure { kind, reason: reason.into() })
    }
}

/// The judgements of one batch, by the place of each message in it: ids may repeat in a table that is not ours.
///
/// Every message starts as *unknown: no verdict*: silence is never success.
#[derive(Debug)]
pub struct Verdicts(Vec<Verdict>);

fn silence() -> Verdict {
    Verdict::Unknown("no verdict".to_owned())
}

impl Verdicts {
    /// The unjudged batch of so many messages.
    pub fn silent(messages: usize) -> Self {
        Self(std::iter::repeat_with(silence).take(messages).collect())
    }

    /// Overwrites the judgement of one message. A place that is not in the batch changes nothing and returns false.
    pub fn judge(&mut self, place: usize, verdict: Verdict) -> bool {
        self.0.get_mut(place).map(|slot| *slot = verdict).is_some()
    }

    /// The judgement of one message.
    pub fn of(&self, place: usize) -> Option<&Verdict> {
        self.0.get(place)
    }

    /// Takes the judgement of one message out; a place that is not in the batch is unknown.
    pub fn take(&mut self, place: usize) -> Verdict {
        self.0.get_mut(place).map_or_else(silence, |slot| std::mem::replace(slot, silence()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_is_never_success() {
        let mut verdicts = Verdicts::silent(2);
        assert!(verdicts.judge(0, Verdict::Stored));
        assert!(!verdicts.judge(2, Verdict::Stored));
        assert_eq!(verdicts.take(0), Verdict::Stored);
        assert!((0..4).all(|place| matches!(verdicts.take(place), Verdict::Unknown(_))));
    }
}
