//! Values of the configuration: what is wrong is an error that names the key and what to write.

use std::time::Duration;

use postroom::TopicFilter;
use toml::{Table, Value};

pub(super) fn known(table: &Table, keys: &[&str], at: &str) -> Result<(), String> {
    match table.keys().find(|key| !keys.contains(&key.as_str())) {
        None => Ok(()),
        Some(key) => {
            let hint = nearest(key, keys).map_or_else(|| one_of(keys), did_you_mean);
            Err(format!("{at}{key} is not a known key; {hint}"))
        }
    }
}

pub(super) fn nearest<'a>(word: &str, words: &[&'a str]) -> Option<&'a str> {
    let scored = words.iter().map(|known| (strsim::jaro_winkler(word, known), *known));
    scored.filter(|(score, _)| *score > 0.75).max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, known)| known)
}

pub(super) fn did_you_mean(word: &str) -> String {
    format!("did you mean {word:?}?")
}

pub(super) fn one_of(words: &[&str]) -> String {
    format!("use one of {}", words.join(", "))
}

/// A name is shown in logs and on terminals, which would obey a control character.
pub(super) fn plain(name: &str, at: &str) -> Result<(), String> {
    if crate::say::printable(name) == name && !name.contains('\t') {
        return Ok(());
    }
    Err(format!("{at} contains a control character; use letters, digits and punctuation"))
}

pub(super) fn section<'a>(table: &'a Table, name: &str) -> Result<Option<&'a Table>, String> {
    match table.get(name) {
        None => Ok(None),
        Some(Value::Table(section)) => Ok(Some(section)),
        Some(_) => Err(format!("{name} must be written as [{name}]")),
    }
}

pub(super) fn text(table: &Table, key: &str, at: &str) -> Result<Option<String>, String> {
    match table.get(key) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(_) => Err(format!("{at}{key} must be a string in quotes")),
    }
}

pub(super) fn number(table: &Table, key: &str, at: &str, min: i64, max: i64) -> Result<Option<i64>, String> {
    match table.get(key) {
        None => Ok(None),
        Some(Value::Integer(number)) if (min..=max).contains(number) => Ok(Some(*number)),
        Some(_) => Err(format!("{at}{key} must be a whole number from {min} to {max}")),
    }
}

pub(super) fn truth(table: &Table, key: &str, at: &str) -> Result<Option<bool>, String> {
    match table.get(key) {
        None => Ok(None),
        Some(Value::Boolean(truth)) => Ok(Some(*truth)),
        Some(_) => Err(format!("{at}{key} must be true or false, without quotes")),
    }
}

pub(super) fn duration(table: &Table, key: &str, at: &str) -> Result<Option<Duration>, String> {
    match table.get(key) {
        None => Ok(None),
        Some(Value::String(text)) => match parse_duration(text) {
            Some(duration) => Ok(Some(duration)),
            None => Err(format!(
                "{at}{key} is {text:?}; it must be a duration such as \"200ms\", \"30s\", \"5m\" or \"1h\""
            )),
        },
        Some(_) => Err(format!("{at}{key} must be a duration in quotes, such as \"30s\"")),
    }
}

/// `200ms`, `30s`, `5m`, `1h`, `30d`; ten years at most, so that sums of it stay within every clock.
pub fn parse_duration(text: &str) -> Option<Duration> {
    const LONGEST: Duration = Duration::from_secs(3650 * 86_400);
    let digits = text.find(|c: char| !c.is_ascii_digit())?;
    let amount: u64 = text[..digits].parse().ok()?;
    let duration = match &text[digits..] {
        "ms" => Some(Duration::from_millis(amount)),
        "s" => Some(Duration::from_secs(amount)),
        "m" => amount.checked_mul(60).map(Duration::from_secs),
        "h" => amount.checked_mul(3600).map(Duration::from_secs),
        "d" => amount.checked_mul(86400).map(Duration::from_secs),
        _ => None,
    };
    duration.filter(|duration| *duration <= LONGEST)
}

/// An age after which something is removed; none: "never", or not given.
pub(super) fn age(table: &Table, key: &str, at: &str, least: Duration) -> Result<Option<Duration>, String> {
    if table.get(key).and_then(Value::as_str) == Some("never") {
        return Ok(None);
    }
    match duration(table, key, at)? {
        Some(age) if age < least => {
            Err(format!("{at}{key} is shorter than {}, which is the least", postroom::lasting(least.as_secs_f64())))
        }
        age => Ok(age),
    }
}

pub(super) fn patterns(table: &Table, key: &str, at: &str) -> Result<Option<TopicFilter>, String> {
    match table.get(key) {
        None => Ok(None),
        Some(Value::Array(patterns)) => {
            let patterns: Option<Vec<&str>> = patterns.iter().map(Value::as_str).collect();
            let patterns = patterns.ok_or_else(|| format!("{at}{key} must be a list of strings"))?;
            TopicFilter::new(patterns).map(Some).map_err(|error| format!("{at}{key}: failed to {error}"))
        }
        Some(_) => Err(format!("{at}{key} must be a list, such as [\"orders\", \"billing.*\"]")),
    }
}
