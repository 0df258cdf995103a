//! What to receive, and which consumers of the server were sessions of it.

use std::path::PathBuf;

use serde::Deserialize;

use super::jetstream::{ConsumerInfo, JetStream, Unanswered};
use super::{Opened, subject};

/// What to receive, and from where; `[inboxes.from]` with `kind = "nats"`.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NatsSubscriptionOptions {
    /// `nats://` or `tls://` URL, several with commas between them.
    pub url: String,
    /// A file of credentials, with the token of a user and its key.
    #[serde(default)]
    pub credentials_file: Option<PathBuf>,
    /// The stream.
    pub stream: String,
    /// What the consumer is called at the server, where a number follows the name.
    pub consumer: String,
    /// Subjects that are received, such as `orders.>`; all of the stream by default.
    #[serde(default)]
    pub subjects: Vec<String>,
    /// Where a consumer begins that is not there yet: at the `first` message of the stream, which is the default, or with what is `new`.
    #[serde(default)]
    pub begin: Begin,
    /// JetStream domain; none by default.
    #[serde(default)]
    pub domain: Option<String>,
    /// What the subjects of answers begin with; `_INBOX` by default.
    #[serde(default = "super::default_inbox_prefix")]
    pub inbox_prefix: String,
    /// Most deliveries handed out and not settled; 1000.
    #[serde(default = "default_prefetch")]
    pub prefetch: u16,
    /// Most bytes of deliveries handed out and not settled, in which one message may be larger; 64 MiB.
    #[serde(default = "default_unsettled_bytes")]
    pub unsettled_bytes_max: u64,
}

/// Where a consumer begins that is not there yet.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Begin {
    /// At the first message that the stream still has.
    #[default]
    First,
    /// With what is published from then on.
    New,
}

fn default_prefetch() -> u16 {
    1000
}

fn default_unsettled_bytes() -> u64 {
    64 << 20
}

impl std::fmt::Debug for NatsSubscriptionOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NatsSubscriptionOptions")
            .field("url", &super::address::shown(&self.url))
            .field("stream", &self.stream)
            .field("consumer", &self.consumer)
            .finish_non_exhaustive()
    }
}

impl NatsSubscriptionOptions {
    /// The defaults.
    pub fn new(url: impl Into<String>, stream: impl Into<String>, consumer: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            credentials_file: None,
            stream: stream.into(),
            consumer: consumer.into(),
            subjects: Vec::new(),
            begin: Begin::First,
            domain: None,
            inbox_prefix: super::default_inbox_prefix(),
            prefetch: default_prefetch(),
            unsettled_bytes_max: default_unsettled_bytes(),
        }
    }

    pub(super) fn opened(&self) -> Result<Opened, String> {
        subject::check_name("stream", &self.stream)?;
        subject::check_name("consumer", &self.consumer)?;
        if self.subjects.iter().any(|subject| subject.is_empty() || subject.chars().any(char::is_whitespace)) {
            return Err("subjects: a subject is not empty and has no space in it".to_owned());
        }
        if self.prefetch == 0 {
            return Err("prefetch must be at least 1".to_owned());
        }
        if self.unsettled_bytes_max == 0 {
            return Err("unsettled_bytes_max must be at least 1".to_owned());
        }
        let domain_and_inbox = (self.domain.as_deref(), self.inbox_prefix.as_str());
        Opened::of(&self.url, self.credentials_file.as_ref(), domain_and_inbox, "{routing_key}")
    }

    /// The sessions of this consumer that the server still has, the newest last.
    pub(super) async fn sessions(&self, jetstream: &JetStream<'_>) -> Result<Vec<(u64, ConsumerInfo)>, NotOurs> {
        let mut sessions = Vec::new();
        for (number, name) in self.numbered(jetstream.consumers(&self.stream).await?) {
            let Some(consumer) = jetstream.consumer(&self.stream, &name).await? else { continue };
            if consumer.config.description.as_deref().and_then(Past::read).is_none() {
                let problem = format!(
                    "consumer {name:?} of stream {:?} is not postroom's, and is named like one of consumer {:?}",
                    self.stream, self.consumer
                );
                return Err(NotOurs::Foreign(problem));
            }
            sessions.push((number, consumer));
        }
        Ok(sessions)
    }

    /// Names that a session of this consumer may have, by their numbers.
    fn numbered(&self, names: Vec<String>) -> Vec<(u64, String)> {
        let number = |name: &str| name.strip_prefix(&self.consumer)?.strip_prefix('_')?.parse().ok();
        let mut numbered: Vec<(u64, String)> =
            names.into_iter().filter_map(|name| Some((number(&name)?, name))).collect();
        numbered.sort_unstable();
        numbered
    }
}

/// Why it is not known which consumers are postroom's.
#[derive(Debug, thiserror::Error)]
pub(super) enum NotOurs {
    #[error(transparent)]
    Unanswered(#[from] Unanswered),
    /// Somebody else's has such a name.
    #[error("{0}; name another consumer in the configuration")]
    Foreign(String),
}

/// What a session knows of those before it, in the description of its consumer.
///
/// A stream can go back: a power failure took its end, or it was restored or made anew. Then new messages get places that were acked
/// before, and a consumer that begins behind them would never see them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Past {
    /// Where the first session began.
    pub first: u64,
    /// The last place before this session, and the id of the message there; empty if that has none, or is not there.
    pub anchor: (u64, String),
}

impl Past {
    pub fn read(description: &str) -> Option<Self> {
        let words: Vec<&str> = description.split(' ').collect();
        match words.as_slice() {
            ["postroom", _, "from", first, "behind", seq, id @ ..] => Some(Self {
                first: first.parse().ok()?,
                anchor: (seq.parse().ok()?, id.first().copied().unwrap_or_default().to_owned()),
            }),
            _ => None,
        }
    }

    /// No two are alike, so that the server refuses to take one consumer for another.
    pub fn written(&self) -> String {
        let (seq, id) = &self.anchor;
        format!("postroom {} from {} behind {seq} {id}", postroom::MessageId::new(), self.first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_are_those_of_this_consumer() {
        let options = NatsSubscriptionOptions::new("nats://x", "S", "billing");
        let names = ["billing_9", "billing_10", "billing", "billing_x", "other_3", "billing_2_3"].map(str::to_owned);
        let found = options.numbered(names.to_vec());
        assert_eq!(found, [(9, "billing_9".to_owned()), (10, "billing_10".to_owned())]);
        let past = Past { first: 3, anchor: (20, "0199-a".to_owned()) };
        assert_eq!(Past::read(&past.written()), Some(past));
        let unknown = Past { first: 3, anchor: (20, String::new()) };
        assert_eq!(Past::read(&unknown.written()), Some(unknown));
        assert_eq!(Past::read("somebody's own"), None);
    }
}
