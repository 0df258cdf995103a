//! Messages that cannot be kept among those that wait are kept as dead ones: nothing vanishes at the broker.

use async_trait::async_trait;
use postroom::{Consumer, Kept, Message, StoreError, fingerprint, tidy_reason};
use tokio::sync::watch;

use crate::again::stopped_before_try;
use crate::handler::chain;
use crate::unkeepable::in_ascii;

/// What became of a message that was to be kept as a dead one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Buried {
    /// It is kept, now or since an earlier delivery.
    Kept(Kept),
    /// The store refuses it even as a dead one.
    Unkept,
    /// Another process has the inbox.
    Fenced,
    /// There was no time left; nothing became of it.
    Stopped,
}

/// Who keeps dead messages in the store.
#[async_trait]
pub(crate) trait Buries: Send {
    /// Keeps it, in one transaction. None: another process has the inbox.
    async fn keep_dead(&mut self, message: &Message, error: &str) -> Result<Option<Kept>, StoreError>;

    /// Whether the store refused because of what it was asked to keep.
    fn refuses_the_message(&self, error: &StoreError) -> bool;
}

/// Whose message is kept as a dead one, and why.
pub(crate) struct Burial<'a> {
    pub consumer: &'a Consumer,
    /// Where it came from, for people.
    pub origin: &'a str,
    /// Why it cannot be handled.
    pub reason: &'a str,
    pub stopping: &'a watch::Receiver<bool>,
}

impl Burial<'_> {
    /// Keeps the message as a dead one, with its origin and the reason, until that is committed, the store refuses even this, or
    /// it is to stop.
    pub async fn of(self, message: &Message, store: &mut dyn Buries) -> Buried {
        let Self { consumer, origin, reason, stopping } = self;
        let error = tidy_reason(format!("{origin}: {reason}"));
        let plain_error = error.chars().map(|c| if c.is_ascii() { c } else { '?' }).collect::<String>();
        let mut plain: Option<Message> = None;
        let mut tries = 0;
        loop {
            let (message, error) = match &plain {
                Some(plain) => (plain, &plain_error),
                None => (message, &error),
            };
            match store.keep_dead(message, error).await {
                Ok(Some(kept)) => {
                    if kept == Kept::New {
                        tracing::error!(
                            %consumer, id = %message.id, r#type = message.kind, payload = %fingerprint(message),
                            "a received message cannot be handled and is kept as a dead one; see `postroom dead show --side in {}`: {error}",
                            message.id
                        );
                    }
                    return Buried::Kept(kept);
                }
                Ok(None) => return Buried::Fenced,
                // Text that the database's encoding cannot hold is replaced; the payload never is.
                Err(refused) if store.refuses_the_message(&refused) && plain.is_none() => {
                    plain = Some(in_ascii(message))
                }
                Err(refused) if !refused.is_transient() => {
                    tracing::error!(
                        %consumer, id = %message.id,
                        "the store refuses a received message even as a dead one; it goes back to the broker and comes again: {}: {error}",
                        chain(&refused)
                    );
                    return Buried::Unkept;
                }
                Err(again) => {
                    tries += 1;
                    tracing::debug!(id = %message.id, "the store failed temporarily, trying again: {}", chain(&again));
                    if stopped_before_try(stopping, tries).await {
                        return Buried::Stopped;
                    }
                }
            }
        }
    }
}
