//! Whether topics are there, asked now and then.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rdkafka::error::RDKafkaErrorCode as Code;
use rdkafka::producer::Producer as _;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, timeout};

use super::client::Producer;
use super::sink::GRACE;

/// A broker that has not said so much about a topic by then is not there.
pub(super) const WITHIN: Duration = Duration::from_secs(10);
/// How long the number of a topic's partitions is taken for what it was.
const KNOWN_FOR: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Topic {
    Missing,
    /// With so many partitions.
    There(usize),
    /// The user may not see it.
    Hidden,
}

/// What was found of a topic.
#[derive(Clone, Copy)]
struct Known {
    topic: Topic,
    /// None: to be asked again before the next message.
    at: Option<Instant>,
}

/// What is known of topics.
#[derive(Default)]
pub(super) struct Topics(Mutex<HashMap<String, Known>>);

impl Topics {
    fn known(&self) -> MutexGuard<'_, HashMap<String, Known>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was known may not be so any more.
    pub fn ask_again(&self) {
        self.known().values_mut().for_each(|known| known.at = None);
    }

    /// Whether a topic is there; asked again after a minute, and each time while it is missing.
    pub async fn find(&self, producer: &Arc<Producer>, name: &str, deadline: Duration) -> Result<Topic, String> {
        let known = self.known().get(name).copied();
        let is_fresh = |known: &Known| known.at.is_some_and(|at| at.elapsed() < KNOWN_FOR);
        if let Some(known) = known.filter(is_fresh) {
            return Ok(known.topic);
        }
        let (asked, wanted) = (producer.clone(), name.to_owned());
        let within = WITHIN.min(deadline);
        let asking = spawn_blocking(move || find(&asked, &wanted, within));
        // The call has a limit of its own; this one is for a client that forgets it.
        let topic = match timeout(within + GRACE, asking).await {
            Ok(Ok(found)) => found?,
            Ok(Err(error)) => return Err(error.to_string()),
            Err(_) => return Err("its client does not answer".to_owned()),
        };
        if let (Some(Topic::There(before)), Topic::There(now)) = (known.map(|known| known.topic), topic)
            && before != now
        {
            tracing::warn!(
                topic = name,
                before,
                now,
                "the topic has another number of partitions: a key may be in another one now, where nothing keeps its messages behind those \
                 in the old one"
            );
        }
        // What is missing is asked for again each time, and not remembered: messages may name any number of topics.
        match topic {
            Topic::Missing => self.known().remove(name),
            _ => self.known().insert(name.to_owned(), Known { topic, at: Some(Instant::now()) }),
        };
        Ok(topic)
    }
}

/// Blocks.
fn find(producer: &Producer, name: &str, within: Duration) -> Result<Topic, String> {
    let metadata = producer.client().fetch_metadata(Some(name), within).map_err(|error| error.to_string())?;
    let found = metadata.topics().iter().find(|found| found.name() == name);
    let found = found.ok_or_else(|| format!("the brokers say nothing about topic {name:?}"))?;
    match found.error().map(Code::from) {
        None => Ok(Topic::There(found.partitions().len())),
        Some(Code::UnknownTopicOrPartition | Code::UnknownTopic) => Ok(Topic::Missing),
        // The message is published all the same, so that the broker's refusal is a verdict on it.
        Some(Code::TopicAuthorizationFailed) => Ok(Topic::Hidden),
        Some(code) => Err(format!("topic {name:?}: {code}")),
    }
}
