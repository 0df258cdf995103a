//! `[[reconcile]]`: which messages are compared with which effects.

use std::time::Duration;

use postroom::{Consumer, TopicFilter};
use toml::{Table, Value};

use super::values::{duration, known, patterns, plain, text};

const KEYS: &[&str] = &["name", "topics", "route", "every", "window", "settles", "business", "changes", "consumers"];
const CONSUMER_KEYS: &[&str] = &["consumer", "store", "topics", "since"];

/// One comparison.
#[derive(Debug, Clone)]
pub struct Reconcile {
    pub name: String,
    /// Of these topics.
    pub topics: TopicFilter,
    /// The route that sends them; none: the only one there is.
    pub route: Option<String>,
    /// How often `postroom run` compares.
    pub every: Duration,
    /// How far back.
    pub window: Duration,
    /// What is younger may be on its way.
    pub settles: Duration,
    /// Asks the application's tables for changes.
    pub business: Option<String>,
    /// Asks them for aggregates and versions.
    pub changes: Option<String>,
    pub consumers: Vec<ReconciledConsumer>,
}

/// One inbox.
#[derive(Clone)]
pub struct ReconciledConsumer {
    pub consumer: Consumer,
    /// URL of its database; none: that of the store.
    pub store: Option<String>,
    /// The topics that it receives; none: all of the comparison.
    pub topics: Option<TopicFilter>,
    /// When it began, in milliseconds since 1970; none: before everything.
    pub since_ms: Option<i64>,
}

impl std::fmt::Debug for ReconciledConsumer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let store = self.store.as_deref().map(postroom::redact_url);
        f.debug_struct("ReconciledConsumer")
            .field("consumer", &self.consumer)
            .field("store", &store)
            .finish_non_exhaustive()
    }
}

pub(super) fn read(value: &Value) -> Result<Vec<Reconcile>, String> {
    let entries = value.as_array().ok_or("reconcile must be written as [[reconcile]]")?;
    let mut all: Vec<Reconcile> = Vec::new();
    for (index, entry) in entries.iter().enumerate() {
        let at = format!("reconcile[{index}].");
        let table = entry.as_table().ok_or_else(|| format!("{at} must be a table"))?;
        let one = comparison(table, &at)?;
        if all.iter().any(|other| other.name == one.name) {
            return Err(format!(
                "two comparisons are named {:?}; results are kept by name, so rename one of them",
                one.name
            ));
        }
        all.push(one);
    }
    Ok(all)
}

fn comparison(table: &Table, at: &str) -> Result<Reconcile, String> {
    known(table, KEYS, at)?;
    let name = text(table, "name", at)?.ok_or_else(|| format!("{at}name is missing"))?;
    plain(&name, &format!("{at}name"))?;
    if name.is_empty() || name.len() > 255 || name.contains('/') {
        return Err(format!("{at}name must have 1 to 255 bytes and no slash"));
    }
    let consumers = match table.get("consumers") {
        None => Vec::new(),
        Some(Value::Array(consumers)) => consumers
            .iter()
            .enumerate()
            .map(|(index, consumer)| read_consumer(consumer, &format!("{at}consumers[{index}].")))
            .collect::<Result<Vec<_>, _>>()?,
        Some(_) => return Err(format!("{at}consumers must be written as [[reconcile.consumers]]")),
    };
    for (index, one) in consumers.iter().enumerate() {
        let same = |other: &ReconciledConsumer| other.consumer == one.consumer && other.store == one.store;
        if consumers.iter().skip(index + 1).any(same) {
            return Err(format!("{at}consumers names {:?} of the same store twice", one.consumer.as_str()));
        }
    }
    let business = text(table, "business", at)?;
    let changes = text(table, "changes", at)?;
    if consumers.is_empty() && business.is_none() && changes.is_none() {
        return Err(format!(
            "{at}consumers, {at}business and {at}changes are missing: there is nothing to compare with"
        ));
    }
    let time = |key: &str, usual: u64, least: u64| -> Result<Duration, String> {
        let given = duration(table, key, at)?.unwrap_or(Duration::from_secs(usual));
        if given < Duration::from_secs(least) {
            return Err(format!("{at}{key} must be at least {least} s"));
        }
        Ok(given)
    };
    Ok(Reconcile {
        name,
        topics: patterns(table, "topics", at)?.unwrap_or_else(TopicFilter::all),
        route: text(table, "route", at)?,
        every: time("every", 3600, 60)?,
        window: time("window", 25 * 3600, 60)?,
        settles: time("settles", 900, 0)?,
        business,
        changes,
        consumers,
    })
}

fn read_consumer(value: &Value, at: &str) -> Result<ReconciledConsumer, String> {
    let table = value.as_table().ok_or_else(|| format!("{at} must be a table"))?;
    known(table, CONSUMER_KEYS, at)?;
    let consumer = text(table, "consumer", at)?.ok_or_else(|| format!("{at}consumer is missing"))?;
    let since = text(table, "since", at)?.map(|text| text.parse::<jiff::Timestamp>());
    let since = since.transpose().map_err(|_| format!("{at}since must be a time such as \"2026-11-22T10:00:00Z\""))?;
    Ok(ReconciledConsumer {
        since_ms: since.map(jiff::Timestamp::as_millisecond),
        consumer: Consumer::new(consumer).map_err(|error| format!("{at}consumer: {error}"))?,
        store: text(table, "store", at)?,
        topics: patterns(table, "topics", at)?,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use crate::config::tests::parse;

    fn reconcile(text: &str) -> Result<Vec<super::Reconcile>, String> {
        let file = format!(
            "[store]\nurl = \"sqlite:x.db\"\n[[routes]]\nname = \"r\"\n[routes.sink]\nkind = \"stdout\"\n[[reconcile]]\n{text}"
        );
        parse(&file, &[]).map(|config| config.reconcile)
    }

    #[test]
    fn a_comparison_has_a_name_and_something_to_compare_with() {
        let one = reconcile(
            "name = \"a\"\n[[reconcile.consumers]]\nconsumer = \"billing\"\nstore = \"postgres://u:s3cret@db/x\"",
        )
        .unwrap();
        assert_eq!((one[0].every.as_secs(), one[0].window.as_secs(), one[0].settles.as_secs()), (3600, 90_000, 900));
        assert!(!format!("{one:?}").contains("s3cret"));
        for (wrong, why) in [
            ("", "name is missing"),
            ("name = \"a\"", "nothing to compare with"),
            ("name = \"a/b\"\nbusiness = \"x\"", "no slash"),
            ("name = \"a\"\nbusiness = \"x\"\nevery = \"1s\"", "at least 60 s"),
            (
                "name = \"a\"\n[[reconcile.consumers]]\nconsumer = \"b\"\n[[reconcile.consumers]]\nconsumer = \"b\"",
                "of the same store twice",
            ),
            ("name = \"a\"\nbusines = \"x\"", "did you mean \"business\"?"),
            ("name = \"a\"\n[[reconcile.consumers]]\nstore = \"x\"", "consumer is missing"),
            ("name = \"a\"\nbusiness = \"x\"\n[[reconcile]]\nname = \"a\"\nbusiness = \"x\"", "two comparisons"),
        ] {
            let refused = reconcile(wrong).unwrap_err();
            assert!(refused.contains(why), "{wrong}: {refused}");
        }
    }
}
