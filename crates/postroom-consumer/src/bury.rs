//! Messages that cannot be kept among those that wait are kept as dead ones: nothing vanishes at the broker.

use std::time::Duration;

use postroom::{Admitted, ConsumerStore, Message, StoreError, crash_point, fingerprint, tidy_reason};

use crate::apply::Fate;
use crate::desk::{Desk, again_after, patient};
use crate::handler::chain;
use crate::unkeepable::in_ascii;

impl<F: ConsumerStore> Desk<F> {
    /// Keeps a message from the broker as a dead one, with the queue and the reason, until that is committed, the store
    /// refuses even this, or the receiver stops.
    pub async fn bury(&mut self, message: &Message, reason: &str) -> Fate {
        let error = tidy_reason(format!("{}: {reason}", self.shared.origin));
        let plain_error = error.chars().map(|c| if c.is_ascii() { c } else { '?' }).collect::<String>();
        let mut plain: Option<Message> = None;
        let mut tries = 0;
        loop {
            let (message, error) = match &plain {
                Some(plain) => (plain, &plain_error),
                None => (message, &error),
            };
            let kept = patient(Duration::ZERO, self.keep_dead(message, error)).await;
            match self.whole(kept) {
                Ok(fate) => {
                    if fate == Fate::Dead {
                        tracing::error!(
                            consumer = %self.shared.consumer, id = %message.id, r#type = message.kind,
                            payload = %fingerprint(message),
                            "a received message cannot be handled and is kept as a dead one; see `postroom dead show --side in {}`: {error}",
                            message.id
                        );
                    }
                    return fate;
                }
                // Text that the database's encoding cannot hold is replaced; the payload never is.
                Err(refused) if F::refuses_the_message(&refused) && plain.is_none() => plain = Some(in_ascii(message)),
                Err(refused) if !refused.is_transient() => {
                    tracing::error!(
                        consumer = %self.shared.consumer, id = %message.id,
                        "the store refuses a received message even as a dead one; it goes back to the broker and comes again: {}: {error}",
                        chain(&refused)
                    );
                    return Fate::Unkept;
                }
                Err(again) => {
                    tries += 1;
                    tracing::debug!(id = %message.id, "the store says again: {}", chain(&again));
                    if self.stopped_within(again_after(tries)).await {
                        return Fate::Requeue;
                    }
                }
            }
        }
    }

    async fn keep_dead(&mut self, message: &Message, error: &str) -> Result<Fate, StoreError> {
        let shared = self.shared.clone();
        let mut tx = self.session.begin().await?;
        // It takes no place in its key: it never has an effect by itself.
        match F::admit(&mut tx, &shared.consumer, &[(message.id, None)]).await?.first() {
            Some(Admitted::New | Admitted::Behind) => {}
            Some(Admitted::Duplicate) | None => return Ok(Fate::Duplicate),
        }
        F::keep_dead(&mut tx, &shared.consumer, message, error).await?;
        F::commit(tx).await?;
        crash_point("consume.buried");
        Ok(Fate::Dead)
    }
}
