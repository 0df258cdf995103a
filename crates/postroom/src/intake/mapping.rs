//! Pure: how a row becomes a message.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use sha2::{Digest, Sha256};
use uuid::Uuid;

use super::{Cell, Row, TableName, Template};
use crate::message::{Headers, Message, MessageId};

/// Where each field of a message comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping {
    /// Its id. Text that is no UUID becomes one, always the same. None: what identifies the row.
    pub id: Option<Template>,
    /// Its topic.
    pub topic: Template,
    /// Its type.
    pub kind: Template,
    /// Its payload: a column of bytes as it is, everything else as text.
    pub payload: Template,
    /// Its key.
    pub key: Option<Template>,
    /// Its address at the broker.
    pub routing_key: Option<Template>,
    /// Media type of the payload; none: that of JSON where the column is JSON.
    pub content_type: Option<Template>,
    /// A column with an object of headers.
    pub headers: Option<Template>,
    /// Headers by name, besides.
    pub header: BTreeMap<String, Template>,
    /// Tenant.
    pub tenant_id: Option<Template>,
    /// Type of the aggregate.
    pub aggregate_type: Option<Template>,
    /// Id of the aggregate.
    pub aggregate_id: Option<Template>,
    /// Version of the aggregate: an integer.
    pub aggregate_version: Option<Template>,
    /// When it happened: a column with a time.
    pub occurred_at: Option<Template>,
    /// When it may be sent at the earliest: a column with a time.
    pub visible_at: Option<Template>,
}

impl Mapping {
    /// Every field that has a template, by its name in the configuration.
    pub fn fields(&self) -> Vec<(String, &Template)> {
        let some = [
            ("id", self.id.as_ref()),
            ("topic", Some(&self.topic)),
            ("type", Some(&self.kind)),
            ("payload", Some(&self.payload)),
            ("key", self.key.as_ref()),
            ("routing_key", self.routing_key.as_ref()),
            ("content_type", self.content_type.as_ref()),
            ("headers", self.headers.as_ref()),
            ("tenant_id", self.tenant_id.as_ref()),
            ("aggregate_type", self.aggregate_type.as_ref()),
            ("aggregate_id", self.aggregate_id.as_ref()),
            ("aggregate_version", self.aggregate_version.as_ref()),
            ("occurred_at", self.occurred_at.as_ref()),
            ("visible_at", self.visible_at.as_ref()),
        ];
        let named = some.into_iter().filter_map(|(name, template)| Some((name.to_owned(), template?)));
        named.chain(self.header.iter().map(|(name, template)| (format!("header.{name}"), template))).collect()
    }

    /// The columns that a message needs.
    pub fn columns(&self) -> BTreeSet<String> {
        self.fields().iter().flat_map(|(_, template)| template.columns()).map(str::to_owned).collect()
    }

    /// The columns that its key needs.
    pub fn key_columns(&self) -> BTreeSet<String> {
        [&self.key, &self.aggregate_id].into_iter().flatten().flat_map(Template::columns).map(str::to_owned).collect()
    }

    /// The key within which the row's message is ordered; none: it is not.
    pub fn key_of(&self, row: &Row) -> Result<Option<String>, String> {
        let text = |template: &Option<Template>| template.as_ref().map_or(Ok(None), |template| template.text(row));
        Ok(match text(&self.key)? {
            Some(key) if !key.is_empty() => Some(key),
            _ => text(&self.aggregate_id)?.filter(|id| !id.is_empty()),
        })
    }

    /// The message of a row, or why there is none. `now_us` is the time in microseconds since 1970, by the database's clock.
    pub fn message(&self, table: &TableName, row: &Row, now_us: i64) -> Result<Message, String> {
        let text = |name: &str, template: Option<&Template>| match template {
            None => Ok(None),
            Some(template) => template.text(row).map_err(|error| format!("{name}: {error}")),
        };
        let must = |name: &str, template: &Template| {
            text(name, Some(template))?.ok_or_else(|| format!("{name}: {template} is null"))
        };
        let not_empty = |name: &str, template: Option<&Template>| {
            Ok::<_, String>(text(name, template)?.filter(|text| !text.is_empty()))
        };
        let id = match &self.id {
            None => row.row.clone(),
            Some(template) => must("id", template)?,
        };
        let (payload, of_json) = match self.payload.cell(row) {
            Some(Cell::Null) => return Err(format!("payload: {} is null", self.payload)),
            Some(Cell::Bytes(bytes)) => (Bytes::from(bytes.clone()), false),
            Some(cell) => {
                let text = cell.text("payload").map_err(|error| format!("payload: {error}"))?.unwrap_or_default();
                (Bytes::from(text), matches!(cell, Cell::Json(_)))
            }
            None => (Bytes::from(must("payload", &self.payload)?), false),
        };
        let content_type = match not_empty("content_type", self.content_type.as_ref())? {
            Some(content_type) => content_type,
            None if of_json => "application/json".to_owned(),
            None => "application/octet-stream".to_owned(),
        };
        let mut headers = match not_empty("headers", self.headers.as_ref())? {
            None => Headers::new(),
            Some(json) => object(&json).map_err(|error| format!("headers: not a JSON object: {error}"))?,
        };
        for (name, template) in &self.header {
            if let Some(value) = text(name, Some(template))? {
                headers.insert(name.clone(), value);
            }
        }
        let aggregate_version = match not_empty("aggregate_version", self.aggregate_version.as_ref())? {
            None => None,
            Some(version) => Some(version.parse().map_err(|_| "aggregate_version: not an integer".to_owned())?),
        };
        let time = |name: &str, template: Option<&Template>| match template.and_then(|template| template.cell(row)) {
            None | Some(Cell::Null) => Ok(None),
            Some(Cell::Time(us)) => Ok(Some(*us)),
            Some(_) => Err(format!("{name}: the column has no time")),
        };
        let visible_us = time("visible_at", self.visible_at.as_ref())?;
        if visible_us.is_some_and(|us| us >= YEAR_10000_US) {
            return Err("visible_at: a time that never comes".to_owned());
        }
        let occurred_us =
            time("occurred_at", self.occurred_at.as_ref())?.filter(|us| (YEAR_1_US..YEAR_10000_US).contains(us));
        let delay = u64::try_from(visible_us.unwrap_or(now_us).saturating_sub(now_us)).unwrap_or_default();
        let message = Message {
            id: id_of(table, &id, occurred_us),
            topic: must("topic", &self.topic)?,
            kind: must("type", &self.kind)?,
            key: not_empty("key", self.key.as_ref())?,
            routing_key: not_empty("routing_key", self.routing_key.as_ref())?,
            payload,
            content_type,
            headers,
            tenant_id: text("tenant_id", self.tenant_id.as_ref())?,
            aggregate_type: not_empty("aggregate_type", self.aggregate_type.as_ref())?,
            aggregate_id: not_empty("aggregate_id", self.aggregate_id.as_ref())?,
            aggregate_version,
            occurred_at: occurred_us.and_then(moment),
            delay: Duration::from_micros(delay),
        };
        crate::limits::check(&message).map_err(|error| error.to_string())?;
        Ok(message)
    }
}

/// No calendar of a store has a place for times before and from these.
const YEAR_1_US: i64 = -62_135_596_800_000_000;
const YEAR_10000_US: i64 = 253_402_300_800_000_000;

/// A UUID as it is; everything else becomes one of its own kind (RFC 9562, version 8): the first bytes of SHA-256 over the table, the text, and the
/// time, since a number may be used again for another row.
fn id_of(table: &TableName, text: &str, occurred_us: Option<i64>) -> MessageId {
    if let Ok(id) = Uuid::parse_str(text.trim()) {
        return id.into();
    }
    let digest = Sha256::new().chain_update(table.name.as_bytes()).chain_update([0]).chain_update(text.as_bytes());
    let digest = match occurred_us {
        Some(us) => digest.chain_update([0]).chain_update(us.to_be_bytes()).finalize(),
        None => digest.finalize(),
    };
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&digest[..16]);
    uuid::Builder::from_custom_bytes(bytes).into_uuid().into()
}

fn object(json: &str) -> Result<Headers, serde_json::Error> {
    let fields: BTreeMap<String, &serde_json::value::RawValue> = serde_json::from_str(json)?;
    let text = |value: &str| if value.starts_with('"') { serde_json::from_str(value) } else { Ok(value.to_owned()) };
    fields
        .into_iter()
        .filter(|(_, value)| value.get() != "null")
        .map(|(name, value)| Ok((name, text(value.get())?)))
        .collect()
}

/// None: beyond what the clock of the system can say.
fn moment(us: i64) -> Option<SystemTime> {
    let distance = Duration::from_micros(us.unsigned_abs());
    if us < 0 { SystemTime::UNIX_EPOCH.checked_sub(distance) } else { SystemTime::UNIX_EPOCH.checked_add(distance) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn row(cells: &[(&str, Cell)]) -> Row {
        Row {
            row: "7".to_owned(),
            cells: cells.iter().map(|(name, cell)| ((*name).to_owned(), cell.clone())).collect(),
        }
    }

    fn mapping() -> Mapping {
        let template = |text: &str| text.parse::<Template>().unwrap();
        Mapping {
            id: None,
            topic: template("shop.${kind}"),
            kind: template("${kind}"),
            payload: template("${content}"),
            key: Some(template("${content:/order/id}")),
            routing_key: None,
            content_type: None,
            headers: Some(template("${headers}")),
            header: BTreeMap::from([("tenant".to_owned(), template("${tenant}"))]),
            tenant_id: None,
            aggregate_type: None,
            aggregate_id: Some(template("${content:/aggregate}")),
            aggregate_version: Some(template("${version}")),
            occurred_at: Some(template("${at}")),
            visible_at: Some(template("${due}")),
        }
    }

    fn table() -> TableName {
        "public.outbox".parse().unwrap()
    }

    #[test]
    fn a_row_becomes_the_message_that_its_mapping_says() {
        let cells = [
            ("kind", Cell::Text("placed".to_owned())),
            ("content", Cell::Json(r#"{"order": {"id": 12345678901234567890}, "aggregate": "a"}"#.to_owned())),
            ("headers", Cell::Json(r#"{"a": "x", "n": 1.10, "none": null}"#.to_owned())),
            ("tenant", Cell::Null),
            ("version", Cell::Text("3".to_owned())),
            ("at", Cell::Time(1_500_000)),
            ("due", Cell::Time(9_000_000)),
        ];
        let message = mapping().message(&table(), &row(&cells), 4_000_000).unwrap();
        assert_eq!((message.topic.as_str(), message.kind.as_str()), ("shop.placed", "placed"));
        assert_eq!(message.key.as_deref(), Some("12345678901234567890"), "no digit is lost");
        assert_eq!(message.content_type, "application/json");
        assert_eq!(message.headers, Headers::from([("a".into(), "x".into()), ("n".into(), "1.10".into())]));
        assert_eq!((message.aggregate_version, message.delay), (Some(3), Duration::from_secs(5)));
        assert_eq!(message.occurred_at, Some(SystemTime::UNIX_EPOCH + Duration::from_micros(1_500_000)));
        let again = mapping().message(&table(), &row(&cells), 4_000_000).unwrap();
        assert_eq!(again.id, message.id, "a row has one id");
        assert_eq!(message.id.as_uuid().get_version_num(), 8);
        let other = Row { row: "8".to_owned(), ..row(&cells) };
        assert_ne!(mapping().message(&table(), &other, 0).unwrap().id, message.id);
        assert_eq!(mapping().key_of(&row(&cells)).unwrap(), message.key);
    }

    #[test]
    fn a_row_without_what_a_message_needs_is_refused_in_words() {
        let good = [
            ("kind", Cell::Text("placed".to_owned())),
            ("content", Cell::Bytes(b"{}".to_vec())),
            ("headers", Cell::Null),
        ];
        assert_eq!(mapping().message(&table(), &row(&good), 0).unwrap().payload.as_ref(), b"{}");
        for (name, cell, told) in [
            ("kind", Cell::Null, "topic: shop.${kind} is null"),
            ("kind", Cell::Text("x".repeat(300)), "topic of message"),
            ("content", Cell::Null, "payload: ${content} is null"),
            ("content", Cell::Text("{".to_owned()), "key: column content is no JSON"),
            ("content", Cell::Bytes(vec![0xff]), "key: column content has bytes that are no text"),
            ("content", Cell::Unreadable("?".to_owned()), "not UTF-8"),
            ("content", Cell::Text(format!("\"{}\"", "x".repeat(1 << 20))), "payload of message"),
            ("headers", Cell::Text("[1]".to_owned()), "headers: not a JSON object"),
            ("version", Cell::Text("one".to_owned()), "aggregate_version: not an integer"),
            ("due", Cell::Text("soon".to_owned()), "visible_at: the column has no time"),
        ] {
            let mut cells: BTreeMap<_, _> = good.iter().cloned().collect();
            cells.insert(name, cell);
            let cells: Vec<_> = cells.into_iter().collect();
            let refused = mapping().message(&table(), &row(&cells), 0).unwrap_err();
            assert!(refused.contains(told), "{name}: {refused}");
        }
    }

    #[test]
    fn names_of_tables_are_read_and_written() {
        for (text, schema, name) in [
            ("outbox", None, "outbox"),
            ("shop.outbox", Some("shop"), "outbox"),
            ("\"cap.published\"", None, "cap.published"),
            ("s.\"a\"\"b\"", Some("s"), "a\"b"),
        ] {
            let table: TableName = text.parse().unwrap();
            assert_eq!((table.schema.as_deref(), table.name.as_str()), (schema, name));
            assert_eq!(table.to_string(), text);
        }
        for text in ["", ".", "a.", ".a", "a.b.c", "\"a", "\"a\"b", "a\0"] {
            assert!(text.parse::<TableName>().is_err(), "{text}");
        }
    }

    #[test]
    fn templates_are_read_and_written_and_mistakes_are_told() {
        for text in ["${a}", "x", "x.${a}.y", "${a:/b/0}", "${a:/b~1c/~0}", "$ {a}", "${a}${b}", ""] {
            assert_eq!(text.parse::<Template>().unwrap().to_string(), text);
        }
        for text in ["${a", "${}", "${:/a}", "${a:b}"] {
            assert!(text.parse::<Template>().is_err(), "{text}");
        }
        let of = |text: &str, json: &str| {
            let row = row(&[("a", Cell::Json(json.to_owned()))]);
            text.parse::<Template>().unwrap().text(&row)
        };
        assert_eq!(of("${a:/b/1}", r#"{"b": [1, "\u0041"]}"#).unwrap().as_deref(), Some("A"));
        assert_eq!(of("${a:/b~1c}", r#"{"b/c": true}"#).unwrap().as_deref(), Some("true"));
        assert_eq!(of("${a:/b/x}", r#"{"b": [1]}"#).unwrap(), None);
        assert_eq!(of("${a:/b}", r#"{"b": null}"#).unwrap(), None);
        assert_eq!(of("${a:/b}", "[]").unwrap(), None);
        assert!(of("${a:/b}", "nonsense").is_err());
    }
}
