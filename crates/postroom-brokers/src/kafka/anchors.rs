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

/// A look takes no longer: the member's thread waits for it. What was not seen by then is looked at the next time.
const WITHIN: Duration = Duration::from_secs(2);
/// Of so many that were not seen, their ends are asked for.
const FURTHER: usize = 4;
const ENDS_WITHIN: Duration = Duration::from_millis(500);

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

    /// Looks at these records.
    pub fn look(&mut self, wanted: &[(&str, i32, Anchor)]) -> Looked {
        if wanted.is_empty() {
            return Looked::default();
        }
        match self.read(wanted) {
            Ok(looked) => looked,
            Err(problem) => {
                tracing::debug!("it could not be seen whether partitions still have what was received: {problem}");
                self.reader = None;
                Looked::default()
            }
        }
    }

    fn read(&mut self, wanted: &[(&str, i32, Anchor)]) -> Result<Looked, String> {
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
        let (since, mut looked) = (Instant::now(), Looked::default());
        while !open.is_empty() && since.elapsed() < WITHIN {
            // An error is about one partition, and does not say which.
            let Some(Ok(message)) = reader.poll(Duration::from_millis(50)) else { continue };
            let of = (message.topic().to_owned(), message.partition());
            if let Some(anchor) = open.remove(&of) {
                let which = match (message.offset() == anchor.offset, record::print(&message) == anchor.print) {
                    (true, true) => &mut looked.same,
                    (true, false) => &mut looked.others,
                    // The record itself was deleted.
                    (false, _) => &mut looked.gone,
                };
                which.push(of);
            }
        }
        reader.unassign().map_err(|error| error.to_string())?;
        // Of those that did not come, the ones whose place is gone can never be seen again.
        for ((topic, partition), anchor) in open.into_iter().take(FURTHER) {
            match reader.fetch_watermarks(&topic, partition, ENDS_WITHIN) {
                Ok((low, _)) if anchor.offset < low => looked.gone.push((topic, partition)),
                Ok((_, high)) if anchor.offset >= high => looked.others.push((topic, partition)),
                _ => {}
            }
        }
        self.reader = Some(reader);
        Ok(looked)
    }
}

/// What was seen. A partition that is in none could not be looked at.
#[derive(Default)]
pub(super) struct Looked {
    /// Partitions that have another record in that place, or end before it.
    pub others: Vec<(String, i32)>,
    /// Partitions that have it.
    pub same: Vec<(String, i32)>,
    /// Partitions that have deleted it.
    pub gone: Vec<(String, i32)>,
}
