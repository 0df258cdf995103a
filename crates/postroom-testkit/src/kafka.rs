//! A topic of a test's own, made and read with a client of its own.

use std::time::{Duration, Instant};

use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::KafkaError;
use rdkafka::message::{Header, Headers, Message, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord};
use rdkafka::{Offset, TopicPartitionList};
use tokio::task::spawn_blocking;

const WITHIN: Duration = Duration::from_secs(60);

/// A record as the topic has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    /// The message id; empty where it has none.
    pub id: String,
    /// Its key.
    pub key: Option<Vec<u8>>,
    /// Its partition.
    pub partition: i32,
    /// Its headers.
    pub headers: Vec<(String, Vec<u8>)>,
    /// Its payload; none: it is a tombstone.
    pub payload: Option<Vec<u8>>,
}

impl Stored {
    /// The text of a header.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<String> {
        let (_, value) = self.headers.iter().find(|(found, _)| found == name)?;
        Some(String::from_utf8_lossy(value).into_owned())
    }
}

/// A topic.
#[derive(Debug, Clone)]
pub struct AuditTopic {
    brokers: String,
    name: String,
}

impl AuditTopic {
    /// Creates it, with these settings.
    ///
    /// # Panics
    /// If the broker refuses.
    pub async fn create(brokers: &str, name: &str, partitions: usize, settings: &[(&str, &str)]) -> Self {
        Self::replicated(brokers, name, (partitions, 1), settings).await
    }

    /// The same, with so many partitions and replicas.
    ///
    /// # Panics
    /// If the broker refuses.
    pub async fn replicated(
        brokers: &str,
        name: &str,
        (partitions, replicas): (usize, i32),
        settings: &[(&str, &str)],
    ) -> Self {
        let partitions = i32::try_from(partitions).expect("few");
        let mut topic = NewTopic::new(name, partitions, TopicReplication::Fixed(replicas));
        for (setting, value) in settings {
            topic = topic.set(setting, value);
        }
        let made = admin(brokers).create_topics([&topic], &AdminOptions::new().operation_timeout(Some(WITHIN))).await;
        made.expect("an answer").remove(0).expect("a topic");
        let topic = Self { brokers: brokers.to_owned(), name: name.to_owned() };
        let known = topic.clone();
        spawn_blocking(move || known.until_known()).await.expect("a topic that the broker knows");
        topic
    }

    /// The controller has it before the broker knows.
    fn until_known(&self) {
        let admin = admin(&self.brokers);
        let since = Instant::now();
        loop {
            let metadata = admin.inner().fetch_metadata(Some(&self.name), WITHIN).expect("an answer");
            let partitions = metadata.topics()[0].partitions();
            if !partitions.is_empty() && partitions.iter().all(|partition| partition.leader() >= 0) {
                return;
            }
            assert!(since.elapsed() < WITHIN, "topic {} does not appear", self.name);
        }
    }

    /// Gives it more partitions.
    ///
    /// # Panics
    /// If the broker refuses.
    pub async fn partitions(&self, partitions: usize) {
        let wanted = rdkafka::admin::NewPartitions::new(&self.name, partitions);
        let made = admin(&self.brokers)
            .create_partitions([&wanted], &AdminOptions::new().operation_timeout(Some(WITHIN)))
            .await;
        made.expect("an answer").remove(0).expect("more partitions");
    }

    /// Removes it.
    ///
    /// # Panics
    /// If the broker refuses.
    pub async fn delete(&self) {
        let gone = admin(&self.brokers)
            .delete_topics(&[&self.name], &AdminOptions::new().operation_timeout(Some(WITHIN)))
            .await;
        gone.expect("an answer").remove(0).expect("a topic");
    }

    /// All that it has, partition by partition, in order; of transactions what they have committed.
    ///
    /// # Panics
    /// If it cannot be read.
    pub async fn read(&self) -> Vec<Stored> {
        let topic = self.clone();
        spawn_blocking(move || topic.read_now()).await.expect("a reading")
    }

    fn read_now(&self) -> Vec<Stored> {
        let of = |isolation: &str| -> BaseConsumer {
            let mut config = ClientConfig::new();
            config.set("bootstrap.servers", &self.brokers).set("group.id", "audit").set("enable.auto.commit", "false");
            // The end of a partition may be a record that ends a transaction, which nobody is shown.
            config.set("isolation.level", isolation).set("enable.partition.eof", "true");
            config.create().expect("a consumer")
        };
        let (consumer, any) = (of("read_committed"), of("read_uncommitted"));
        let metadata = consumer.fetch_metadata(Some(&self.name), WITHIN).expect("the topic");
        let partitions: Vec<i32> = metadata.topics()[0].partitions().iter().map(|partition| partition.id()).collect();
        let mut all = Vec::new();
        for partition in partitions {
            let since = Instant::now();
            let (low, high) = any.fetch_watermarks(&self.name, partition, WITHIN).expect("its ends");
            if low >= high {
                continue;
            }
            // A commit is answered before each partition has the record that shows it.
            while consumer.fetch_watermarks(&self.name, partition, WITHIN).expect("its ends").1 < high {
                assert!(since.elapsed() < WITHIN, "partition {partition} of {} has an open transaction", self.name);
            }
            let mut at = TopicPartitionList::new();
            at.add_partition_offset(&self.name, partition, Offset::Offset(low)).expect("an offset");
            consumer.assign(&at).expect("a partition");
            let since = Instant::now();
            loop {
                assert!(since.elapsed() < WITHIN, "partition {partition} of {} cannot be read", self.name);
                let Some(found) = consumer.poll(Duration::from_millis(200)) else { continue };
                let found = match found {
                    Err(KafkaError::PartitionEOF(ended)) if ended == partition => break,
                    Err(KafkaError::PartitionEOF(_)) => continue,
                    found => found.expect("a record"),
                };
                if found.partition() != partition {
                    continue;
                }
                let headers: Vec<(String, Vec<u8>)> = found.headers().map_or_else(Vec::new, |headers| {
                    headers
                        .iter()
                        .map(|header| (header.key.to_owned(), header.value.unwrap_or_default().to_vec()))
                        .collect()
                });
                let mut stored = Stored {
                    id: String::new(),
                    key: found.key().map(<[u8]>::to_vec),
                    partition,
                    headers,
                    payload: found.payload().map(<[u8]>::to_vec),
                };
                stored.id = stored.header("postroom-id").unwrap_or_default();
                all.push(stored);
                if found.offset() + 1 >= high {
                    break;
                }
            }
        }
        all
    }
}

impl AuditTopic {
    /// Removes what is before this offset of its first partition, as retention does.
    ///
    /// # Panics
    /// If the broker refuses.
    pub async fn remove_before(&self, offset: i64) {
        let mut before = TopicPartitionList::new();
        before.add_partition_offset(&self.name, 0, Offset::Offset(offset)).expect("an offset");
        admin(&self.brokers)
            .delete_records(&before, &AdminOptions::new().operation_timeout(Some(WITHIN)))
            .await
            .expect("an answer");
    }

    /// Writes a record to it as another program would.
    ///
    /// # Panics
    /// If the broker refuses.
    pub async fn write(&self, payload: &[u8], key: Option<&[u8]>, headers: &[(&str, &[u8])]) {
        let producer: FutureProducer =
            ClientConfig::new().set("bootstrap.servers", &self.brokers).create().expect("a producer");
        let written = headers.iter().fold(OwnedHeaders::new(), |written, (name, value)| {
            written.insert(Header { key: name, value: Some(*value) })
        });
        let record = FutureRecord::to(&self.name).payload(payload).headers(written);
        let record = match key {
            Some(key) => record.key(key),
            None => record,
        };
        producer.send(record, WITHIN).await.expect("a record");
    }
}

fn admin(brokers: &str) -> AdminClient<DefaultClientContext> {
    ClientConfig::new().set("bootstrap.servers", brokers).create().expect("an administrator")
}
