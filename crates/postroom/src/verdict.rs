//! What a sink reports about each message. A sink judges; the policy decides; the store records.

/// A sink's verdict on one message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The broker confirmed that it has *this* message.
    Stored,
    /// The broker, or the sink on its behalf, rejected this message.
    Failed(Failure),
    /// The sink is configured not to send such messages.
    Skipped,
    /// The sink has not sent it, because a message of its key before it in the batch was not stored, or the broker takes nothing more. It is
    /// published again, like one that was never handed to the sink.
    NotSent,
    /// Not known: it may be stored or not. It is published again with the same id, and never marked.
    Unknown(String),
}

/// Why a message was rejected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// What the policy decides by.
    pub kind: FailureKind,
    /// For the operator: what was rejected and why. It contains no payload.
    pub reason: String,
}

/// The kind of a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureKind {
    /// It may succeed later. Uses up an attempt.
    Transient,
    /// It will never succeed.
    Permanent,
    /// The message harms the connection or the process that handles it.
    Poison,
    /// The broker did not accept it for a reason unrelated to the message (a negative confirm: queue full, disk alarm). It
    /// waits like a transient failure and uses up no attempt: a queue that stays full for an hour causes no dead letters.
    Busy,
}

impl Verdict {
    /// A failed verdict.
    pub fn failed(kind: FailureKind, reason: impl Into<String>) -> Self {
        Self::Failed(Failure { kind, reason: reason.into() })
    }
}

/// The verdicts on one batch, by the index of each message in it: ids may repeat in a table that is not ours.
///
/// Every message starts as *unknown: no verdict*: silence is never success.
#[derive(Debug)]
pub struct Verdicts(Vec<Verdict>);

fn silence() -> Verdict {
    Verdict::Unknown("no verdict".to_owned())
}

impl Verdicts {
    /// The verdicts on this many messages before anything is known.
    pub fn silent(messages: usize) -> Self {
        Self(std::iter::repeat_with(silence).take(messages).collect())
    }

    /// Overwrites the verdict on one message. An index that is not in the batch changes nothing and returns false.
    pub fn judge(&mut self, place: usize, verdict: Verdict) -> bool {
        self.0.get_mut(place).map(|slot| *slot = verdict).is_some()
    }

    /// The verdict on one message.
    pub fn of(&self, place: usize) -> Option<&Verdict> {
        self.0.get(place)
    }

    /// Takes out the verdict on one message; an index that is not in the batch is unknown.
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
