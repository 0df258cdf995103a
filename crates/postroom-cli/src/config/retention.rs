//! `[retention]`.

use std::time::Duration;

use postroom::{Retention, TopicRetention};
use toml::{Table, Value};

use super::values::{age, known, patterns};

const RETENTION_KEYS: &[&str] = &["outbox", "dead", "inbox", "audit", "topics"];
const TOPIC_RETENTION_KEYS: &[&str] = &["topics", "outbox"];

pub(super) fn read(table: &Table) -> Result<Retention, String> {
    const AT: &str = "retention.";
    const DAY: Duration = Duration::from_secs(24 * 3600);
    known(table, RETENTION_KEYS, AT)?;
    let topics = match table.get("topics") {
        None => Vec::new(),
        Some(Value::Array(topics)) => {
            let read = |(index, topics): (usize, &Value)| {
                let at = format!("retention.topics[{index}].");
                let table = topics.as_table().ok_or_else(|| format!("{at} must be a table"))?;
                known(table, TOPIC_RETENTION_KEYS, &at)?;
                let topics = patterns(table, "topics", &at)?.ok_or_else(|| format!("{at}topics is missing"))?;
                if !table.contains_key("outbox") {
                    return Err(format!(
                        "{at}outbox is missing; it says how long these are kept, \"never\" to keep them"
                    ));
                }
                Ok(TopicRetention { topics, outbox: age(table, "outbox", &at, Duration::from_secs(60))? })
            };
            topics.iter().enumerate().map(read).collect::<Result<_, _>>()?
        }
        Some(_) => return Err("retention.topics must be written as [[retention.topics]]".to_owned()),
    };
    Ok(Retention {
        outbox: age(table, "outbox", AT, Duration::from_secs(60))?,
        topics,
        dead: age(table, "dead", AT, DAY)?,
        inbox: age(table, "inbox", AT, DAY)?,
        audit: age(table, "audit", AT, 30 * DAY)?,
    })
}
