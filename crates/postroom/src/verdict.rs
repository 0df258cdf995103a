//! What a sink says of each message. A sink judges; the policy decides; the store records.

use std::collections::HashMap;

use crate::message::MessageId;

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

/// The judgements of one batch, by message id and never by position.
///
/// Every message starts as *unknown: no verdict*: silence is never success.
#[derive(Debug)]
pub struct Verdicts(HashMap<MessageId, Verdict>);

impl Verdicts {
    /// The unjudged batch.
    pub fn silent(ids: impl IntoIterator<Item = MessageId>) -> Self {
        Self(ids.into_iter().map(|id| (id, Verdict::Unknown("no verdict".to_owned()))).collect())
    }

    /// Overwrites the judgement of one message. An id that was not in the batch changes nothing and returns false.
    pub fn judge(&mut self, id: MessageId, verdict: Verdict) -> bool {
        self.0.get_mut(&id).map(|slot| *slot = verdict).is_some()
    }

    /// The judgement of one message.
    pub fn of(&self, id: MessageId) -> Option<&Verdict> {
        self.0.get(&id)
    }

    /// Takes the judgement of one message out; a message that was never in the batch is unknown.
    pub fn take(&mut self, id: MessageId) -> Verdict {
        self.0.remove(&id).unwrap_or_else(|| Verdict::Unknown("no verdict".to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_is_never_success() {
        let (a, b) = (MessageId::new(), MessageId::new());
        let mut verdicts = Verdicts::silent([a, b]);
        assert!(verdicts.judge(a, Verdict::Stored));
        assert!(!verdicts.judge(MessageId::new(), Verdict::Stored));
        assert_eq!(verdicts.take(a), Verdict::Stored);
        assert!(matches!(verdicts.take(b), Verdict::Unknown(_)));
    }
}
