//! The broker that is none: a route whose messages go straight into the inbox of a consumer, in any store.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postroom::{Consumer, Needs, Sink, Store, redact_url};
use postroom_brokers::{Broker, CheckFailed, OpenSinkError, Section, SinkOptions};
use postroom_consumer::InboxSink;
use serde::Deserialize;

use crate::store;

/// `[routes.sink]` with `kind = "inbox"`.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct InboxOptions {
    /// The store that has the inbox, as in `[store]`.
    url: String,
    /// Whose inbox it is.
    consumer: String,
    /// Most batches in progress, each a transaction; 2 by default.
    #[serde(default = "default_batches")]
    batches_in_flight_max: usize,
    /// Seconds that a batch may take; 30 by default.
    #[serde(default = "default_deadline")]
    deadline_seconds: u64,
}

fn default_batches() -> usize {
    2
}

fn default_deadline() -> u64 {
    30
}

impl std::fmt::Debug for InboxOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InboxOptions")
            .field("url", &redact_url(&self.url))
            .field("consumer", &self.consumer)
            .finish_non_exhaustive()
    }
}

/// The inbox of a consumer.
pub const BROKER: Broker = Broker {
    kind: "inbox",
    about: "the inbox of a consumer in this or another database, without a broker between: each message exactly once",
    sink: Some(Section::sink::<InboxOptions>(
        "kind = \"inbox\"\nurl = \"postgres://postroom@localhost/billing\"\nconsumer = \"billing\"\n",
    )),
    subscription: None,
};

impl InboxOptions {
    fn opened(&self) -> Result<(Arc<dyn Store>, Consumer), String> {
        if !(1..=100).contains(&self.batches_in_flight_max) {
            return Err("batches_in_flight_max must be between 1 and 100".to_owned());
        }
        if !(1..=86_400).contains(&self.deadline_seconds) {
            return Err("deadline_seconds must be between 1 and 86400".to_owned());
        }
        let consumer = Consumer::new(self.consumer.as_str()).map_err(|error| format!("consumer: failed to {error}"))?;
        let store = store::open(&self.url).map_err(|failure| failure.text)?;
        Ok((store, consumer))
    }
}

#[async_trait]
impl SinkOptions for InboxOptions {
    fn open(&self) -> Result<Arc<dyn Sink>, OpenSinkError> {
        let (store, consumer) = self.opened().map_err(|problem| OpenSinkError { kind: "inbox", problem })?;
        let keepers = (0..self.batches_in_flight_max).map(|_| store.keeper(&consumer)).collect();
        let shown = format!("{} (consumer {:?})", store.shown(), self.consumer);
        Ok(Arc::new(InboxSink::new(keepers, shown).deadline(Duration::from_secs(self.deadline_seconds))))
    }

    fn shown(&self) -> String {
        format!("inbox of {:?} in {}", self.consumer, redact_url(&self.url))
    }

    async fn check(&self) -> Result<String, CheckFailed> {
        let failed = |problem: String, advice: &str| CheckFailed { problem, advice: advice.to_owned() };
        let (store, _) =
            self.opened().map_err(|problem| failed(problem, "correct the section in the configuration"))?;
        let needs = Needs { filler: true, ..Needs::default() };
        let found = store.check(needs).await.map_err(|error| {
            let problem =
                format!("look at the inbox in {}: {}", store.shown(), crate::exit::Failure::of(1, &error).text);
            failed(problem, "correct url, or start that database")
        })?;
        if let Some(bad) = found.iter().find(|finding| !finding.ok) {
            let advice = bad.advice.as_deref().unwrap_or("look at that database");
            return Err(failed(format!("the inbox in {}: {}", store.shown(), bad.found), advice));
        }
        let found: Vec<&str> = found.iter().map(|finding| finding.found.as_str()).collect();
        Ok(format!("the inbox in {}: {}", store.shown(), found.join("; ")))
    }
}
