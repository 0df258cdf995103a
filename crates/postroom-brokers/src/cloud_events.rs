//! Pure: a message as an event of CloudEvents 1.0. <https://github.com/cloudevents/spec/blob/v1.0.2/cloudevents/spec.md>

use std::time::SystemTime;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use postroom::Message;
use serde::Deserialize;
use serde_json::{Map, Value};

/// How a message becomes an event of CloudEvents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CloudEvents {
    /// Attributes beside the payload, where the broker has headers.
    Binary,
    /// Attributes and the payload in one JSON object.
    Structured,
}

/// The content type of an event in the structured mode.
pub(crate) const STRUCTURED: &str = "application/cloudevents+json; charset=UTF-8";

/// The version of CloudEvents.
pub(crate) const VERSION: &str = "1.0";

/// How the messages of a route become events.
#[derive(Debug, Clone)]
pub(crate) struct Events {
    pub mode: CloudEvents,
    /// Where they come from.
    pub source: String,
}

impl Events {
    /// Of two options; none: messages are no events.
    pub fn read(mode: Option<CloudEvents>, source: Option<&str>) -> Result<Option<Self>, String> {
        match (mode, source) {
            (None, None) => Ok(None),
            (Some(_), Some(source)) if source.is_empty() || source.chars().any(is_not_of_a_uri) => {
                Err("source must be a URI reference, such as https://shop.example/orders".to_owned())
            }
            (Some(mode), Some(source)) => Ok(Some(Self { mode, source: source.to_owned() })),
            (Some(_), None) => {
                Err("cloudevents needs a source, such as source = \"https://shop.example/orders\"".to_owned())
            }
            (None, Some(_)) => Err("source is a part of cloudevents, which is not set".to_owned()),
        }
    }

    /// The attributes of a message's event, without the type of its data. Names have lower-case letters and digits alone.
    pub fn attributes(&self, message: &Message) -> Vec<(&'static str, String)> {
        let mut all = vec![
            ("specversion", VERSION.to_owned()),
            ("id", message.id.to_string()),
            ("source", self.source.clone()),
            ("type", message.kind.clone()),
        ];
        let some = [
            ("subject", message.aggregate_id.as_deref()),
            ("partitionkey", message.ordering_key()),
            ("tenantid", message.tenant_id.as_deref()),
            ("topic", Some(message.topic.as_str())),
            ("aggregatetype", message.aggregate_type.as_deref()),
            ("traceparent", message.headers.get("traceparent").map(String::as_str)),
            ("tracestate", message.headers.get("tracestate").map(String::as_str)),
        ];
        let some = some.into_iter().filter_map(|(name, value)| Some((name, value?.to_owned())));
        all.extend(some.filter(|(_, value)| !value.is_empty()));
        all.extend(message.aggregate_version.map(|version| ("aggregateversion", version.to_string())));
        all.extend(message.occurred_at.and_then(rfc3339).map(|time| ("time", time)));
        all
    }

    /// The event as one JSON object. <https://github.com/cloudevents/spec/blob/v1.0.2/cloudevents/formats/json-format.md>
    pub fn structured(&self, message: &Message) -> Bytes {
        let attributes = self.attributes(message).into_iter();
        let mut event: Map<String, Value> = attributes.map(|(name, value)| (name.to_owned(), value.into())).collect();
        event.insert("datacontenttype".to_owned(), message.content_type.as_str().into());
        let is_json = message.content_type.split(';').next().is_some_and(|kind| {
            let kind = kind.trim().to_ascii_lowercase();
            kind == "application/json" || kind == "text/json" || kind.ends_with("+json")
        });
        // Numbers of any size stay as they are written.
        let json =
            is_json.then(|| serde_json::from_slice::<&serde_json::value::RawValue>(&message.payload).ok()).flatten();
        let body = match json {
            Some(data) => {
                let mut text = Value::Object(event).to_string();
                text.pop();
                format!("{text},\"data\":{}}}", data.get())
            }
            None => {
                event.insert("data_base64".to_owned(), STANDARD.encode(&message.payload).into());
                Value::Object(event).to_string()
            }
        };
        body.into()
    }
}

fn is_not_of_a_uri(c: char) -> bool {
    c.is_control() || c.is_whitespace() || "<>\"{}|\\^`".contains(c)
}

/// RFC 3339, in UTC, by the proleptic Gregorian calendar (<https://howardhinnant.github.io/date_algorithms.html>, `civil_from_days`).
fn rfc3339(at: SystemTime) -> Option<String> {
    let since = at.duration_since(SystemTime::UNIX_EPOCH).ok()?;
    let (days, seconds) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    let shifted = i64::try_from(days).ok()?.checked_add(719_468)?;
    let era = shifted / 146_097;
    let of_era = shifted % 146_097;
    let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let (hour, minute, second, micros) = (seconds / 3_600, seconds / 60 % 60, seconds % 60, since.subsec_micros());
    (year <= 9_999).then(|| format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{micros:06}Z"))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn an_event_has_its_attributes_and_its_data() {
        let events = Events { mode: CloudEvents::Structured, source: "https://shop.example/orders".to_owned() };
        let mut message = Message::new("orders", "order.placed", r#"{"n":12345678901234567890123}"#)
            .key("k 1")
            .tenant("t")
            .aggregate("order", "o-1", 7)
            .header("traceparent", "00-1-2-01")
            .content_type("application/json");
        message.occurred_at = Some(SystemTime::UNIX_EPOCH + Duration::from_micros(1_709_251_199_123_456));
        let attributes = events.attributes(&message);
        let value = |name: &str| attributes.iter().find(|(found, _)| *found == name).map(|(_, value)| value.as_str());
        assert_eq!((value("id"), value("specversion")), (Some(message.id.to_string().as_str()), Some("1.0")));
        assert_eq!((value("partitionkey"), value("source")), (Some("k 1"), Some("https://shop.example/orders")));
        assert_eq!((value("time"), value("tracestate")), (Some("2024-02-29T23:59:59.123456Z"), None));
        let event = events.structured(&message);
        let text = std::str::from_utf8(&event).unwrap();
        assert!(text.ends_with(r#","data":{"n":12345678901234567890123}}"#), "numbers stay as they are: {text}");
        let event: Value = serde_json::from_str(text).unwrap();
        assert_eq!(
            (&event["type"], &event["subject"], &event["aggregateversion"]),
            (&"order.placed".into(), &"o-1".into(), &"7".into())
        );
        message.payload = vec![0xff, 0].into();
        let event: Value = serde_json::from_slice(&events.structured(&message)).unwrap();
        assert_eq!((event["data_base64"].as_str(), event.get("data")), (Some("/wA="), None));
    }

    #[test]
    fn times_are_those_of_the_calendar() {
        for (seconds, text) in
            [(0, "1970-01-01T00:00:00"), (951_782_400, "2000-02-29T00:00:00"), (4_102_444_799, "2099-12-31T23:59:59")]
        {
            let found = rfc3339(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)).unwrap();
            assert!(found.starts_with(text), "{found}");
        }
    }

    #[test]
    fn a_source_belongs_to_events_and_is_a_uri_reference() {
        let read = |source: Option<&str>| Events::read(Some(CloudEvents::Binary), source);
        assert!(read(Some("/orders")).unwrap().is_some() && Events::read(None, None).unwrap().is_none());
        assert!(read(None).is_err() && read(Some("")).is_err() && read(Some("a b")).is_err());
        assert!(Events::read(None, Some("/orders")).is_err());
    }
}
