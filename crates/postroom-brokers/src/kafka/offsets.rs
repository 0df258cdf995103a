//! Offsets in the library's lists, with the notes beside them.

use std::panic::{AssertUnwindSafe, catch_unwind};

use rdkafka::error::KafkaError;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList, TopicPartitionListElem};

use super::progress::Note;

/// Adds what the group is to be told of a partition.
pub(super) fn add(
    list: &mut TopicPartitionList,
    topic: &str,
    partition: i32,
    offset: i64,
    note: &Note,
) -> Result<(), KafkaError> {
    let mut element = list.add_partition(topic, partition);
    element.set_offset(Offset::Offset(offset))?;
    element.set_metadata(note.written());
    Ok(())
}

/// The note beside a committed offset. The library panics on one that is not UTF-8, which only another program can have written.
pub(super) fn note(element: &TopicPartitionListElem<'_>) -> Option<Note> {
    let metadata = catch_unwind(AssertUnwindSafe(|| element.metadata().to_owned())).ok()?;
    Note::read(&metadata)
}
