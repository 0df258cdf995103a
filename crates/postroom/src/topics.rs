//! Pure: which topics a route takes.

use std::fmt;

/// Selects topics: exact names, or a prefix followed by `*`; `*` alone takes all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopicFilter(Vec<String>);

/// A pattern that is not a topic, a prefix ending in `*`, or `*`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("read topic pattern {0:?}: it must be a topic, a prefix ending in `*`, or `*`")]
pub struct InvalidTopicPattern(String);

impl TopicFilter {
    /// Takes every topic.
    pub fn all() -> Self {
        Self(vec!["*".to_owned()])
    }

    /// A filter of these patterns; at least one.
    pub fn new<S: Into<String>>(patterns: impl IntoIterator<Item = S>) -> Result<Self, InvalidTopicPattern> {
        let patterns: Vec<String> = patterns.into_iter().map(Into::into).collect();
        if patterns.is_empty() {
            return Err(InvalidTopicPattern(String::new()));
        }
        for pattern in &patterns {
            let stars = pattern.matches('*').count();
            if pattern.is_empty() || stars > 1 || (stars == 1 && !pattern.ends_with('*')) {
                return Err(InvalidTopicPattern(pattern.clone()));
            }
        }
        Ok(Self(patterns))
    }

    /// Whether the route takes this topic.
    pub fn takes(&self, topic: &str) -> bool {
        self.0.iter().any(|pattern| match pattern.strip_suffix('*') {
            Some(prefix) => topic.starts_with(prefix),
            None => topic == pattern,
        })
    }

    /// The patterns as SQL `like` patterns with `\` as the escape.
    pub fn like_patterns(&self) -> Vec<String> {
        let escaped = |text: &str| text.replace('\\', r"\\").replace('%', r"\%").replace('_', r"\_");
        self.0
            .iter()
            .map(|pattern| match pattern.strip_suffix('*') {
                Some(prefix) => format!("{}%", escaped(prefix)),
                None => escaped(pattern),
            })
            .collect()
    }

    /// The patterns as they were given.
    pub fn patterns(&self) -> &[String] {
        &self.0
    }
}

impl fmt::Display for TopicFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_takes_names_and_prefixes() {
        let filter = TopicFilter::new(["orders", "billing.*"]).unwrap();
        assert!(filter.takes("orders") && filter.takes("billing.invoice"));
        assert!(!filter.takes("orders2") && !filter.takes("billing"));
        assert!(TopicFilter::all().takes("anything"));
    }

    #[test]
    fn wildcards_of_sql_are_escaped() {
        assert_eq!(TopicFilter::new(["a_b%*"]).unwrap().like_patterns(), [r"a\_b\%%"]);
    }

    #[test]
    fn a_star_in_the_middle_is_refused() {
        assert!(TopicFilter::new(["a*b"]).is_err() && TopicFilter::new([""]).is_err());
        assert!(TopicFilter::new(Vec::<String>::new()).is_err());
    }
}
