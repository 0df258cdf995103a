//! The client library, librdkafka, set up so that it neither loses, reorders nor repeats within one call, and so that every call ends.
//! <https://github.com/confluentinc/librdkafka/blob/v2.12.1/CONFIGURATION.md>

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use rdkafka::ClientContext;
use rdkafka::config::{ClientConfig, RDKafkaLogLevel};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::producer::{FutureProducer, Producer as _, PurgeConfig};

use super::address::Address;
use super::{Compression, KafkaOptions};
use crate::tls::TlsParts;

pub(super) type Producer = FutureProducer<Watcher>;

/// A batch on the wire; the default of a topic's `max.message.bytes`, which is about batches, is a little more.
const BATCH_BYTES_MAX: usize = 1_000_000;
/// The broker's own limit decides, which is about a megabyte unless somebody raised it.
const MESSAGE_BYTES_MAX: usize = 64 << 20;
/// A request without an answer ends its connection.
const ANSWERS_WITHIN: Duration = Duration::from_secs(10);

/// What both a producer and an administrator need. Reads the certificates, each time anew.
pub(super) fn config(address: &Address) -> Result<ClientConfig, String> {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", &address.brokers).set("client.id", "postroom");
    // The default of ten seconds would outlive the deadline of a message.
    config.set("reconnect.backoff.ms", "50").set("reconnect.backoff.max.ms", "500");
    config.set("socket.keepalive.enable", "true").set("socket.connection.setup.timeout.ms", "10000");
    let protocol = match (address.is_encrypted, &address.user) {
        (false, None) => "plaintext",
        (false, Some(_)) => "sasl_plaintext",
        (true, None) => "ssl",
        (true, Some(_)) => "sasl_ssl",
    };
    config.set("security.protocol", protocol);
    if let Some(user) = &address.user {
        config
            .set("sasl.mechanism", user.mechanism)
            .set("sasl.username", &user.name)
            .set("sasl.password", &user.password);
    }
    let TlsParts { root, identity } = address.files.read()?;
    if let Some(root) = root {
        config.set("ssl.ca.pem", root);
    }
    if let Some((certificate, key)) = identity {
        config.set("ssl.certificate.pem", certificate).set("ssl.key.pem", key);
    }
    Ok(config)
}

/// Sends what it is given in order, each message once, or says within the deadline that it does not know.
pub(super) fn producer(address: &Address, options: &KafkaOptions, watcher: Watcher) -> Result<Producer, String> {
    publishing(address, options)?.create_with_context(watcher).map_err(|error| error.to_string())
}

/// The same in transactions of this id, of which there is one producer at a time: the brokers refuse an older one.
pub(super) fn transactional(
    address: &Address,
    options: &KafkaOptions,
    watcher: Watcher,
    transactional_id: &str,
) -> Result<Producer, String> {
    let mut config = publishing(address, options)?;
    config.set("transactional.id", transactional_id);
    // What a producer leaves open when it dies holds up readers for so long, unless another one takes its place.
    let open_ms = options.publish_deadline_seconds.saturating_mul(1000).saturating_add(10_000);
    config.set("transaction.timeout.ms", open_ms.to_string());
    config.create_with_context(watcher).map_err(|error| error.to_string())
}

fn publishing(address: &Address, options: &KafkaOptions) -> Result<ClientConfig, String> {
    let deadline_ms = options.publish_deadline_seconds.saturating_mul(1000);
    let mut config = config(address)?;
    config.set("acks", "all").set("enable.idempotence", "true");
    config.set("message.timeout.ms", deadline_ms.to_string());
    config.set("request.timeout.ms", deadline_ms.min(millis(ANSWERS_WITHIN)).to_string());
    // The relay hands over whole batches: nothing is gained by waiting for more.
    config.set("queue.buffering.max.ms", "1");
    config.set("queue.buffering.max.messages", "1000000");
    config.set("batch.size", BATCH_BYTES_MAX.to_string());
    config.set("message.max.bytes", MESSAGE_BYTES_MAX.to_string());
    // The partitioner of Kafka's Java clients, so that other producers use the same partition for a key.
    config.set("partitioner", "murmur2_random");
    config.set("allow.auto.create.topics", "false");
    config.set("topic.metadata.propagation.max.ms", (deadline_ms / 2).clamp(1, 5_000).to_string());
    let compression = match options.compression {
        Compression::None => "none",
        Compression::Lz4 => "lz4",
        Compression::Snappy => "snappy",
    };
    config.set("compression.type", compression);
    Ok(config)
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Nothing that the producer still has is sent.
pub(super) fn purge(producer: &Producer) {
    producer.purge(PurgeConfig::default().queue().inflight());
}

/// Hears what the library says.
#[derive(Clone, Default)]
pub(super) struct Watcher(Arc<std::sync::Mutex<Heard>>);

#[derive(Default)]
struct Heard {
    /// What was wrong with the broker that was tried last.
    last: Option<String>,
    /// Why no broker can be reached.
    down: Option<String>,
}

impl Watcher {
    /// Why no broker can be reached; none: a broker was reached, or none was tried.
    pub fn down(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).down.clone()
    }

    /// What was wrong with a broker last.
    pub fn last(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).last.clone()
    }

    /// A broker has answered.
    pub fn is_up(&self) {
        // Kept: the library reports a problem with another broker only once.
        self.0.lock().unwrap_or_else(PoisonError::into_inner).down = None;
    }
}

impl ClientContext for Watcher {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        tracing::debug!(?level, facility, "the Kafka client says: {message}");
    }

    fn error(&self, error: KafkaError, reason: &str) {
        tracing::debug!(%error, "the Kafka client has trouble: {reason}");
        // "(after 4ms in state CONNECT, …)"
        let reason = reason.rsplit_once(" (after ").map_or(reason, |(said, _)| said);
        let mut heard = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match error.rdkafka_error_code() {
            // Its text says only how many there are; the reason came before.
            Some(RDKafkaErrorCode::AllBrokersDown) => {
                heard.down = Some(heard.last.clone().unwrap_or_else(|| "no broker answers".to_owned()));
            }
            Some(RDKafkaErrorCode::Authentication | RDKafkaErrorCode::SSL) => {
                heard.last = Some(reason.to_owned());
                heard.down = heard.last.clone();
            }
            _ => heard.last = Some(reason.to_owned()),
        }
    }
}
