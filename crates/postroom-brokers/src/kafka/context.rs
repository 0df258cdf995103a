//! What the client library calls back while it is polled, noted for the member that polls it.

use std::sync::{Mutex as StdMutex, PoisonError};

use rdkafka::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext, RebalanceProtocol};
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use rdkafka::topic_partition_list::TopicPartitionList;
use rdkafka::types::RDKafkaRespErr as Native;

use super::client::Watcher;

/// What the group asks of this member.
#[derive(Clone)]
pub(super) enum Change {
    Assigned(TopicPartitionList),
    Revoked(TopicPartitionList),
}

/// Hears what the library says.
pub(super) struct Context {
    pub watcher: Watcher,
    pub changes: StdMutex<Vec<Change>>,
    /// The library closes: what it gives back is nobody's any more.
    pub closing: StdMutex<bool>,
    pub commit_failed: StdMutex<bool>,
}

impl ClientContext for Context {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        self.watcher.log(level, facility, message);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        self.watcher.error(error, reason);
    }
}

pub(super) fn lock<T>(of: &StdMutex<T>) -> std::sync::MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ConsumerContext for Context {
    /// Only noted: where a partition begins has to be asked first, and that not while the library is being polled.
    fn rebalance(&self, consumer: &BaseConsumer<Self>, wanted: Native, partitions: &mut TopicPartitionList) {
        if *lock(&self.closing) {
            let _ = match consumer.rebalance_protocol() {
                RebalanceProtocol::Cooperative => consumer.incremental_unassign(partitions),
                _ => consumer.unassign(),
            };
            return;
        }
        let partitions = partitions.clone();
        let change = match wanted {
            Native::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS => Change::Assigned(partitions),
            _ => Change::Revoked(partitions),
        };
        lock(&self.changes).push(change);
    }

    fn commit_callback(&self, result: Result<(), KafkaError>, partitions: &TopicPartitionList) {
        // The whole of it has failed only if each of them has.
        let result = partitions.elements().iter().fold(result, |result, element| result.and(element.error()));
        if let Err(error) = result
            && !matches!(error, KafkaError::ConsumerCommit(Code::NoOffset))
        {
            tracing::debug!("the group did not take what was settled: {error}");
            *lock(&self.commit_failed) = true;
        }
    }
}
