//! One message at the receiving end: where it is, and that in words, the same for every store.

use serde::Serialize;

use crate::dead_letter::FailedAttempt;
use crate::lasting::lasting;
use crate::words::words;

/// Where a message is at a consumer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReceivedPlace {
    /// In the inbox table, to be handled.
    Waiting,
    /// It failed and is tried again.
    Retry,
    /// Behind another message of its key.
    Behind,
    /// A worker is handling it.
    InWork,
    /// It waits for an earlier version of its aggregate.
    Early,
    /// Among the consumer's dead letters.
    Dead,
    /// Its id is in the inbox, and it does not wait: its effect is applied, or it was dead and an operator discarded it.
    Claimed,
}

words!(ReceivedPlace {
    Waiting => "waiting",
    Retry => "retry",
    Behind => "behind",
    InWork => "in_work",
    Early => "early",
    Dead => "dead",
    Claimed => "claimed",
});

/// One message at one consumer whose inbox is in the same database.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Reception {
    /// The consumer.
    pub consumer: String,
    /// Where it is.
    pub state: ReceivedPlace,
    /// The key within which it is ordered.
    pub key: Option<String>,
    /// Attempts used up.
    pub attempts: i64,
    /// What it waits for and what happens next, in words.
    pub because: Vec<String>,
    /// Its last failures.
    pub history: Vec<FailedAttempt>,
}

/// What a store's tables say of one message at one consumer.
#[derive(Debug, Clone, Default)]
pub struct ReceptionFound {
    /// The consumer.
    pub consumer: String,
    /// The key within which it is ordered.
    pub key: Option<String>,
    /// Its row in the inbox table, if it waits there.
    pub waiting: Option<WaitingFound>,
    /// Its row among the consumer's dead letters.
    pub dead: Option<DeadFound>,
    /// Who discarded it, when and why.
    pub discarded: Option<String>,
    /// Seconds since its id was first stored in the inbox.
    pub received_ago: f64,
}

/// A message that waits in the inbox table.
#[derive(Debug, Clone, Default)]
pub struct WaitingFound {
    /// `new`, `ready`, `behind`, `claimed`, `early` or `aside`.
    pub state: String,
    /// Attempts used up.
    pub attempts: i64,
    /// The last error.
    pub last_error: Option<String>,
    /// Its last failures, as JSON.
    pub history: Option<String>,
    /// Seconds until it is due, or until its claim expires; negative when that is past.
    pub due_in: f64,
    /// The worker that claimed it.
    pub worker: Option<String>,
    /// The first message of its key, if that is another one.
    pub behind: Option<String>,
}

/// A message that is among a consumer's dead letters.
#[derive(Debug, Clone, Default)]
pub struct DeadFound {
    /// Attempts used up.
    pub attempts: i64,
    /// Why it is dead.
    pub cause: String,
    /// The last error.
    pub error: String,
    /// Seconds since it died.
    pub ago: f64,
    /// Its last failures, as JSON.
    pub history: Option<String>,
}

impl ReceptionFound {
    /// What that means, in words.
    pub fn told(self) -> Reception {
        let Self { consumer, key, waiting, dead, discarded, received_ago } = self;
        let history = |text: Option<String>| serde_json::from_str(&text.unwrap_or_default()).unwrap_or_default();
        let mut because = Vec::new();
        let (state, attempts, history) = if let Some(dead) = dead {
            let tries = attempts_of(dead.attempts);
            because.push(format!("it died {} ago, {} after {tries}: {}", lasting(dead.ago), dead.cause, dead.error));
            because.push(
                "`postroom dead retry --side in` gives it back to its consumer, `postroom dead discard --side in` deletes it"
                    .to_owned(),
            );
            (ReceivedPlace::Dead, dead.attempts, history(dead.history))
        } else if let Some(waiting) = waiting {
            let state = waiting.told(&mut because);
            because.extend(waiting.last_error.map(|error| format!("its last error: {error}")));
            (state, waiting.attempts, history(waiting.history))
        } else {
            because.push(match discarded {
                Some(discarded) => format!("it was dead, and an operator discarded it ({discarded})"),
                None => format!(
                    "it was received {} ago, and the consumer has finished with it: its effect is committed",
                    lasting(received_ago)
                ),
            });
            (ReceivedPlace::Claimed, 0, Vec::new())
        };
        Reception { consumer, state, key, attempts, because, history }
    }
}

impl WaitingFound {
    fn told(&self, because: &mut Vec<String>) -> ReceivedPlace {
        let due_in = lasting(self.due_in.max(0.0));
        match (self.state.as_str(), &self.behind) {
            ("claimed", _) => {
                let worker = self.worker.as_deref().unwrap_or("a worker");
                because.push(if self.due_in > 0.0 {
                    format!("{worker} is handling it; the claim expires in {due_in} unless it is renewed")
                } else {
                    format!(
                        "{worker} claimed it, and that claim expired {} ago: the next worker that takes messages gets it",
                        lasting(-self.due_in)
                    )
                });
                ReceivedPlace::InWork
            }
            ("early" | "aside", _) => {
                because.push(format!(
                    "an earlier version of its aggregate is missing; it waits for that version for at most {due_in}"
                ));
                ReceivedPlace::Early
            }
            (_, Some(head)) => {
                because.push(format!("it waits behind message {head} of its key"));
                ReceivedPlace::Behind
            }
            _ if self.attempts > 0 => {
                because.push(if self.due_in > 0.0 {
                    format!("it is tried again in {due_in} (attempts so far: {})", self.attempts)
                } else {
                    format!("a worker that takes messages now gets it (attempts so far: {})", self.attempts)
                });
                ReceivedPlace::Retry
            }
            _ => {
                because.push("no worker has taken it yet".to_owned());
                ReceivedPlace::Waiting
            }
        }
    }
}

/// `1 attempt`, `3 attempts`.
pub fn attempts_of(attempts: i64) -> String {
    if attempts == 1 { "1 attempt".to_owned() } else { format!("{attempts} attempts") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claimed(due_in: f64) -> Reception {
        let waiting = WaitingFound { state: "claimed".to_owned(), due_in, ..Default::default() };
        ReceptionFound { consumer: "billing".to_owned(), waiting: Some(waiting), ..Default::default() }.told()
    }

    #[test]
    fn a_claim_that_has_expired_is_not_said_to_expire() {
        assert_eq!(claimed(3.0).because, ["a worker is handling it; the claim expires in 3.0s unless it is renewed"]);
        let expired = claimed(-75.0);
        assert!(expired.because[0].contains("that claim expired 1m 15s ago"), "{expired:?}");
        assert_eq!(expired.state, ReceivedPlace::InWork);
    }
}
