//! Looks whether partitions still have records that were seen there.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::Message as _;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

use super::address::Address;
use super::client;
use super::progress::Anchor;
use super::record;

/// A look takes no longer; what was not seen by then is looked at the next time.
const WITHIN: Duration = Duration::from_secs(5);

/// Reads single records, as no member of a group.
pub(super) struct Anchors {
    config: Result<ClientConfig, String>,
    reader: Option<BaseConsumer>,
}

impl Anchors {
    pub fn new(address: &Address, group: &str) -> Self {
        let config = client::config(address).map(|mut config| {
            // Whoever is assigned partitions by itself joins nothing, and needs a group's name all the same.
            config.set("group.id", group).set("enable.auto.commit", "false").set("auto.offset.reset", "error");
            config
                .set("allow.auto.create.topics", "false")
                .set("fetch.message.max.bytes", "1")
                .set("queued.min.messages", "1");
            config.set("isolation.level", "read_uncommitted");
            config
        });
        Self { config, reader: None }
    }

    /// The partitions among these that have another record at this offset. Those whose record was deleted since, or cannot be read now, are not
    /// among them.
    pub fn others(&mut self, wanted: &[(&str, i32, Anchor)]) -> Vec<(String, i32)> {
        if wanted.is_empty() {
            return Vec::new();
        }
        match self.look(wanted) {
            Ok(others) => others,
            Err(problem) => {
                tracing::debug!("it could not be seen whether partitions still have what was received: {problem}");
                self.reader = None;
                Vec::new()
            }
        }
    }

    fn look(&mut self, wanted: &[(&str, i32, Anchor)]) -> Result<Vec<(String, i32)>, String> {
        let reader = match self.reader.take() {
            Some(reader) => reader,
            None => self.config.clone()?.create::<BaseConsumer>().map_err(|error| error.to_string())?,
        };
        let mut list = TopicPartitionList::new();
        let mut open: HashMap<(String, i32), Anchor> = HashMap::new();
        for (topic, partition, anchor) in wanted {
            let added = list.add_partition_offset(topic, *partition, Offset::Offset(anchor.offset));
            added.map_err(|error| error.to_string())?;
            open.insert(((*topic).to_owned(), *partition), *anchor);
        }
        reader.assign(&list).map_err(|error| error.to_string())?;
        let (since, mut others) = (Instant::now(), Vec::new());
        while !open.is_empty() && since.elapsed() < WITHIN {
            // An error is about one partition, of which nothing is known then.
            let Some(Ok(message)) = reader.poll(Duration::from_millis(50)) else { continue };
            let of = (message.topic().to_owned(), message.partition());
            if let Some(anchor) = open.remove(&of)
                && message.offset() == anchor.offset
                && record::print(&message) != anchor.print
            {
                others.push(of);
            }
        }
        reader.unassign().map_err(|error| error.to_string())?;
        self.reader = Some(reader);
        Ok(others)
    }
}
