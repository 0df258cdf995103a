//! `[[intake]]`: rows of tables that already exist, and how they become messages.

use std::collections::BTreeMap;
use std::time::Duration;

use postroom::{Done, DoneWhen, Intake, Literal, Mapping, Setting, Stuck, TableName, Template, TopicFilter};
use toml::{Table, Value};

use super::stores::which;
use super::values::{did_you_mean, duration, known, nearest, one_of, plain, section, text};
use crate::presets::{PRESETS, Preset, preset};

const KEYS: &[&str] = &[
    "name", "stores", "preset", "table", "row", "order", "pending", "taken", "sent", "dead", "stuck", "done", "mode",
    "every", "message",
];
const FIELDS: &[&str] = &[
    "id",
    "topic",
    "type",
    "payload",
    "key",
    "routing_key",
    "content_type",
    "headers",
    "header",
    "tenant_id",
    "aggregate_type",
    "aggregate_id",
    "aggregate_version",
    "occurred_at",
    "visible_at",
];

/// What is done with the rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// They are taken.
    Active,
    /// They are only looked at, and compared with what another relay does with them.
    Shadow,
}

impl Mode {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Shadow => "shadow",
        }
    }
}

/// One table.
#[derive(Debug, Clone)]
pub struct Taken {
    pub intake: Intake,
    /// Of many stores, those with this table.
    pub stores: TopicFilter,
    /// The preset that it began with.
    pub preset: Option<&'static Preset>,
    /// Rows that a former relay may have left behind.
    pub stuck: Option<Stuck>,
    pub mode: Mode,
    /// How often it is looked at while there is nothing.
    pub every: Duration,
}

pub(super) fn read(value: &Value, many: bool) -> Result<Vec<Taken>, String> {
    let entries = value.as_array().ok_or("intake must be written as [[intake]]")?;
    let mut all: Vec<Taken> = Vec::new();
    for (index, entry) in entries.iter().enumerate() {
        let at = format!("intake[{index}].");
        let one = one(entry.as_table().ok_or_else(|| format!("{at} must be a table"))?, &at, many)?;
        if all.iter().any(|other| other.intake.name == one.intake.name) {
            return Err(format!(
                "two intakes are named {:?}; what is known of rows is kept by name, so rename one of them",
                one.intake.name
            ));
        }
        all.push(one);
    }
    Ok(all)
}

fn one(given: &Table, at: &str, many: bool) -> Result<Taken, String> {
    known(given, KEYS, at)?;
    let stores = which(given, at, many)?;
    let mut table = given.clone();
    let mut began_with = None;
    if let Some(name) = text(given, "preset", at)? {
        let names: Vec<&str> = PRESETS.iter().map(|preset| preset.name).collect();
        let preset = preset(&name).ok_or_else(|| {
            let hint = nearest(&name, &names).map_or_else(|| one_of(&names), did_you_mean);
            format!("{at}preset {name:?} is not known; {hint}")
        })?;
        began_with = Some(preset);
        table = preset.intake().map_err(|error| format!("{at}preset: {error}"))?;
        for (key, value) in given {
            match (table.get_mut(key), value) {
                (Some(Value::Table(fields)), Value::Table(own)) if key == "message" => {
                    fields.extend(own.iter().map(|(name, value)| (name.clone(), value.clone())));
                }
                _ => drop(table.insert(key.clone(), value.clone())),
            }
        }
    }
    let name = text(&table, "name", at)?.ok_or_else(|| format!("{at}name is missing"))?;
    plain(&name, &format!("{at}name"))?;
    if name.is_empty() || name.len() > 255 {
        return Err(format!("{at}name must have 1 to 255 bytes"));
    }
    let of = text(&table, "table", at)?
        .ok_or_else(|| format!("{at}table is missing; it names the table, such as \"public.outbox_messages\""))?;
    let of: TableName = of.parse().map_err(|error| format!("{at}table: {error}"))?;
    let order = match table.get("order") {
        None => Vec::new(),
        Some(Value::Array(columns)) => columns
            .iter()
            .map(|column| {
                column.as_str().map(str::to_owned).ok_or_else(|| format!("{at}order must be a list of columns"))
            })
            .collect::<Result<_, _>>()?,
        Some(_) => return Err(format!("{at}order must be a list of columns, such as [\"created_at\", \"id\"]")),
    };
    let sent = match table.get("sent") {
        Some(Value::String(word)) if word == "delete" => Done::Delete,
        Some(Value::Table(_)) => Done::Set(settings(&table, "sent", at)?),
        None => {
            return Err(format!(
                "{at}sent is missing; it is \"delete\", or the columns that a row gets when it is done"
            ));
        }
        Some(_) => {
            return Err(format!(
                "{at}sent must be \"delete\", or columns and values, such as {{ processed_at = \"$now\" }}"
            ));
        }
    };
    let pending = match section(&table, "pending")? {
        None => Vec::new(),
        Some(columns) => conditions(columns, &format!("{at}pending."))?,
    };
    if pending.iter().any(|(_, values)| values.contains(&Literal::NotNull)) {
        return Err(format!("{at}pending: $any is not known here; name the values that a row has which is to be sent"));
    }
    if pending.is_empty() && sent != Done::Delete {
        return Err(format!(
            "{at}pending is missing: a row that is not deleted would be taken for ever; name the columns and values that a row has which is to be sent"
        ));
    }
    let done = match text(&table, "done", at)?.as_deref() {
        None | Some("sent") => DoneWhen::Sent,
        Some("taken") => DoneWhen::Taken,
        Some(other) => return Err(format!("{at}done is {other:?}; it must be \"sent\" or \"taken\"")),
    };
    let taken = settings(&table, "taken", at)?;
    if done == DoneWhen::Taken && !taken.is_empty() {
        return Err(format!("{at}taken has no use with done = \"taken\": the row gets what `sent` says"));
    }
    let leaves = |settings: &[(String, Setting)]| {
        pending.iter().any(|(column, values)| {
            settings.iter().any(|(name, setting)| {
                name == column
                    && match setting {
                        Setting::Null => !values.contains(&Literal::Null),
                        Setting::Text(text) => !values.contains(&Literal::Text(text.clone())),
                        Setting::Now | Setting::Error => true,
                    }
            })
        })
    };
    if let Done::Set(settings) = &sent
        && !leaves(settings)
    {
        return Err(format!("{at}sent leaves a row as it is in `pending`, so it would be taken again for ever"));
    }
    let mode = match text(&table, "mode", at)?.as_deref() {
        None | Some("active") => Mode::Active,
        Some("shadow") => Mode::Shadow,
        Some(other) => return Err(format!("{at}mode is {other:?}; it must be \"active\" or \"shadow\"")),
    };
    let every = duration(&table, "every", at)?.unwrap_or(Duration::from_millis(200));
    if every.is_zero() {
        return Err(format!("{at}every is zero: the table would be read without a pause"));
    }
    let fields = section(&table, "message")?
        .ok_or_else(|| format!("{at}message is missing; it says how a row becomes a message"))?;
    let message = mapping(fields, &format!("{at}message."))?;
    let dead = settings(&table, "dead", at)?;
    let intake =
        Intake { name, table: of, row: text(&table, "row", at)?, order, pending, taken, sent, dead, done, message };
    let stuck = match section(&table, "stuck")? {
        None => None,
        Some(table) => {
            let at = format!("{at}stuck.");
            known(table, &["rows", "set"], &at)?;
            let rows = section(table, "rows")?.map(|columns| conditions(columns, &format!("{at}rows."))).transpose()?;
            let (rows, set) = (rows.unwrap_or_default(), settings(table, "set", &at)?);
            if rows.is_empty() || set.is_empty() {
                return Err(format!(
                    "{at}rows and {at}set are given together: which rows are stuck, and what frees them"
                ));
            }
            Some(Stuck { rows, set })
        }
    };
    Ok(Taken { intake, stores, preset: began_with, stuck, mode, every })
}

/// Columns and their values, or lists of them.
pub fn conditions(columns: &Table, at: &str) -> Result<Vec<(String, Vec<Literal>)>, String> {
    columns.iter().map(|(column, value)| Ok((column.clone(), literals(value, &format!("{at}{column}"))?))).collect()
}

/// A value or a list of them.
fn literals(value: &Value, at: &str) -> Result<Vec<Literal>, String> {
    let literal = |value: &Value| match word_of(value) {
        Some(word) if word == "$null" => Ok(Literal::Null),
        Some(word) if word == "$any" => Ok(Literal::NotNull),
        Some(word) if word.starts_with('$') && !word.starts_with("$$") => {
            Err(format!("{at}: {word} is not known here; use \"$null\", or a value"))
        }
        Some(word) => Ok(Literal::Text(unescaped(&word))),
        None => Err(format!("{at} must be a value, or a list of values")),
    };
    match value {
        Value::Array(values) if !values.is_empty() => values.iter().map(literal).collect(),
        Value::Array(_) => Err(format!("{at} is empty, so no row would be taken")),
        value => Ok(vec![literal(value)?]),
    }
}

fn settings(table: &Table, key: &str, at: &str) -> Result<Vec<(String, Setting)>, String> {
    let Some(columns) = table.get(key) else { return Ok(Vec::new()) };
    let columns =
        columns.as_table().ok_or_else(|| format!("{at}{key} must be columns and values, such as {{ status = 1 }}"))?;
    let setting = |(column, value): (&String, &Value)| {
        let word = word_of(value).ok_or_else(|| format!("{at}{key}.{column} must be a value"))?;
        let setting = match word.as_str() {
            "$null" => Setting::Null,
            "$now" => Setting::Now,
            "$error" if key == "dead" => Setting::Error,
            word if word.starts_with('$') && !word.starts_with("$$") => {
                let words = if key == "dead" { "\"$null\", \"$now\", \"$error\"" } else { "\"$null\", \"$now\"" };
                return Err(format!("{at}{key}.{column}: {word} is not known here; use {words}, or a value"));
            }
            word => Setting::Text(unescaped(word)),
        };
        Ok((column.clone(), setting))
    };
    columns.iter().map(setting).collect()
}

/// `$$` is a dollar sign at the beginning of a value.
fn unescaped(word: &str) -> String {
    word.strip_prefix('$').unwrap_or(word).to_owned()
}

fn word_of(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Integer(number) => Some(number.to_string()),
        Value::Boolean(truth) => Some(truth.to_string()),
        _ => None,
    }
}

fn mapping(fields: &Table, at: &str) -> Result<Mapping, String> {
    known(fields, FIELDS, at)?;
    let template = |key: &str| match fields.get(key) {
        None => Ok(None),
        Some(Value::String(text)) if text.is_empty() => Ok(None),
        Some(Value::String(text)) => text.parse::<Template>().map(Some).map_err(|error| format!("{at}{key}: {error}")),
        Some(_) => Err(format!("{at}{key} must be a string in quotes, such as \"${{column}}\"")),
    };
    let must =
        |key: &str| template(key)?.ok_or_else(|| format!("{at}{key} is missing; write a text, or \"${{column}}\""));
    let column = |key: &str| match template(key)? {
        Some(template) if template.sole_column().is_none() => {
            Err(format!("{at}{key} must be one column, such as \"${{created_at}}\""))
        }
        template => Ok(template),
    };
    let header = match fields.get("header") {
        None => BTreeMap::new(),
        Some(Value::Table(headers)) => headers
            .iter()
            .map(|(name, value)| {
                let text = value.as_str().ok_or_else(|| format!("{at}header.{name} must be a string in quotes"))?;
                let template = text.parse().map_err(|error| format!("{at}header.{name}: {error}"))?;
                Ok((name.clone(), template))
            })
            .collect::<Result<_, String>>()?,
        Some(_) => return Err(format!("{at}header must be names and values")),
    };
    Ok(Mapping {
        id: template("id")?,
        topic: must("topic")?,
        kind: must("type")?,
        payload: must("payload")?,
        key: template("key")?,
        routing_key: template("routing_key")?,
        content_type: template("content_type")?,
        headers: template("headers")?,
        header,
        tenant_id: template("tenant_id")?,
        aggregate_type: template("aggregate_type")?,
        aggregate_id: template("aggregate_id")?,
        aggregate_version: template("aggregate_version")?,
        occurred_at: column("occurred_at")?,
        visible_at: column("visible_at")?,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Taken, String> {
        let table: Table = text.parse().unwrap();
        one(&table, "intake[0].", false)
    }

    const GOOD: &str = r#"
        name = "shop"
        table = "shop.outbox"
        order = ["created_at"]
        pending = { status = [0, 9], locked_by = "$null" }
        taken = { status = 9 }
        sent = { status = 1, sent_at = "$now" }
        dead = { status = 3, last_error = "$error" }
        [message]
        topic = "orders"
        type = "${type}"
        payload = "${payload}"
    "#;

    #[test]
    fn an_intake_is_read() {
        let Taken { intake, mode, every, stuck, .. } = parse(GOOD).unwrap();
        assert_eq!(stuck, None);
        assert_eq!((intake.table.to_string().as_str(), mode), ("shop.outbox", Mode::Active));
        assert_eq!(every, Duration::from_millis(200));
        let text = |text: &str| Literal::Text(text.to_owned());
        assert!(intake.pending.contains(&("status".to_owned(), vec![text("0"), text("9")])));
        assert!(intake.pending.contains(&("locked_by".to_owned(), vec![Literal::Null])));
        assert!(intake.dead.contains(&("last_error".to_owned(), Setting::Error)));
        assert_eq!(intake.done, DoneWhen::Sent);
    }

    #[test]
    fn mistakes_are_told_before_anything_is_taken() {
        for (from, to, told) in [
            ("table = \"shop.outbox\"", "", "intake[0].table is missing"),
            ("sent = { status = 1, sent_at = \"$now\" }", "sent = { status = 9 }", "would be taken again for ever"),
            ("sent = { status = 1, sent_at = \"$now\" }", "", "intake[0].sent is missing"),
            ("sent = { status = 1, sent_at = \"$now\" }", "sent = { status = \"$error\" }", "$error is not known here"),
            ("pending = { status = [0, 9], locked_by = \"$null\" }", "", "intake[0].pending is missing"),
            ("pending = { status = [0, 9], locked_by = \"$null\" }", "pending = { status = [] }", "is empty"),
            ("name = \"shop\"", "name = \"shop\"\nmod = \"shadow\"", "did you mean \"mode\"?"),
            ("name = \"shop\"", "name = \"shop\"\npreset = \"debesium\"", "did you mean \"debezium\"?"),
            ("name = \"shop\"", "name = \"shop\"\ndone = \"taken\"", "taken has no use"),
            ("type = \"${type}\"", "type = \"${type\"", "`${` is not closed"),
            ("topic = \"orders\"", "", "message.topic is missing"),
            ("topic = \"orders\"", "topic = \"orders\"\noccurred_at = \"at ${x}\"", "must be one column"),
            ("topic = \"orders\"", "topics = \"orders\"", "did you mean \"topic\"?"),
            ("locked_by = \"$null\"", "locked_by = \"$any\"", "$any is not known here"),
            ("name = \"shop\"", "name = \"shop\"\nstuck = { rows = { status = 9 } }", "given together"),
        ] {
            let text = GOOD.replace(from, to);
            assert_ne!(text, GOOD, "{from}");
            let refused = parse(&text).unwrap_err();
            assert!(refused.contains(told), "{to}: {refused}");
        }
    }

    #[test]
    fn every_preset_is_an_intake_and_is_overridden_key_by_key() {
        for preset in PRESETS {
            let text = format!("name = \"x\"\npreset = \"{}\"\n[message]\ntenant_id = \"acme\"\n", preset.name);
            let Taken { intake, .. } = parse(&text).unwrap_or_else(|error| panic!("{}: {error}", preset.name));
            assert_eq!(intake.message.tenant_id.as_ref().unwrap().to_string(), "acme");
            let about = preset.about().unwrap();
            assert!(!about.limits.is_empty(), "{}", preset.name);
            let known = |name: &String| about.columns.contains(name);
            assert!(intake.message.columns().iter().all(|name| known(name) || name == "tenant_id"), "{}", preset.name);
            for defect in about.defects {
                assert!(defect.rows.keys().all(known), "{}", preset.name);
                conditions(&defect.rows, "").unwrap();
                assert!(defect.mend.contains("{table}"), "{}", preset.name);
            }
        }
    }
}
