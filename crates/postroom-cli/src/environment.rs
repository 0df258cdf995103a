//! Variables that override the configuration file: `POSTROOM_…`, and `POSTROOM_…_FILE` for a value in a file, such as a secret of
//! a container.

use std::ffi::OsString;

use toml::{Table, Value};

const PREFIX: &str = "POSTROOM_";
const FILE: &str = "_FILE";
/// These are read elsewhere.
const OTHERS: &[&str] = &["LOG", "LOG_KEY", "CRASH_AT", "CRASH_MARK", "PANIC_AT", "TOKEN"];
/// An orchestrator sets these for a service named `postroom`.
const ORCHESTRATORS: &[&str] = &["SERVICE_", "PORT"];

/// A variable that overrides a value: its name without the prefix, and the value.
pub type Variable = (String, String);

/// The variables of this process.
pub fn variables() -> Result<Vec<Variable>, String> {
    read(std::env::vars_os(), |path| std::fs::read_to_string(path).map_err(|error| error.to_string()))
}

/// The store's URL, if a variable contains it.
pub fn store_url() -> Result<Option<String>, String> {
    one("STORE_URL")
}

/// The archive's URL, if a variable contains it.
pub fn archive_url() -> Result<Option<String>, String> {
    one("ARCHIVE_URL")
}

fn one(wanted: &str) -> Result<Option<String>, String> {
    Ok(variables()?.into_iter().find_map(|(name, value)| (name == wanted).then_some(value)))
}

fn read(
    all: impl Iterator<Item = (OsString, OsString)>,
    file: impl Fn(&str) -> Result<String, String>,
) -> Result<Vec<Variable>, String> {
    let mut found: Vec<Variable> = Vec::new();
    for (name, value) in all {
        let Ok(name) = name.into_string() else { continue };
        let Some(rest) = name.strip_prefix(PREFIX) else { continue };
        if OTHERS.contains(&rest) || ORCHESTRATORS.iter().any(|made| rest.starts_with(made)) {
            continue;
        }
        let value = value.into_string().map_err(|_| format!("the variable {name} is not UTF-8"))?;
        let (rest, value) = match rest.strip_suffix(FILE) {
            None => (rest, value),
            Some(rest) => {
                let text =
                    file(&value).map_err(|error| format!("the variable {name}: failed to read {value}: {error}"))?;
                (rest, text.trim_end_matches(['\n', '\r']).to_owned())
            }
        };
        if found.iter().any(|(known, _)| known == rest) {
            return Err(format!("{PREFIX}{rest} and {PREFIX}{rest}{FILE} are both set; unset one of them"));
        }
        found.push((rest.to_owned(), value));
    }
    Ok(found)
}

/// Overrides the values of the file with the variables.
pub fn overlay(table: &mut Table, variables: &[Variable]) -> Result<(), String> {
    for (name, value) in variables {
        if let Some(key) = name.strip_prefix("STORE_") {
            section(table, "store", key, value)?;
        } else if let Some(key) = name.strip_prefix("RELAY_") {
            section(table, "relay", key, value)?;
        } else if let Some(key) = name.strip_prefix("RETENTION_") {
            section(table, "retention", key, value)?;
        } else if let Some(key) = name.strip_prefix("ARCHIVE_") {
            section(table, "archive", key, value)?;
        } else if let Some(key) = name.strip_prefix("ADMIN_") {
            section(table, "admin", key, value)?;
        } else if let Some(rest) = name.strip_prefix("ROUTES_") {
            part(table, ("routes", "name", "sink"), "_SINK_", rest, value)?;
        } else if let Some(rest) = name.strip_prefix("STORES_") {
            store_of_many(table, rest, value)?;
        } else if let Some(rest) = name.strip_prefix("INBOXES_") {
            part(table, ("inboxes", "consumer", "from"), "_FROM_", rest, value)?;
        } else {
            return Err(format!(
                "the variable {PREFIX}{name} is not known; use {PREFIX}STORE_URL, {PREFIX}RELAY_<KEY>, {PREFIX}RETENTION_<KEY>, {PREFIX}ARCHIVE_URL, {PREFIX}ADMIN_<KEY>, \
                 {PREFIX}STORES_<NAME>_URL, {PREFIX}STORES_<NAME>_DISCOVER_STORE, {PREFIX}ROUTES_<NAME>_SINK_<KEY> and {PREFIX}INBOXES_<CONSUMER>_FROM_<KEY>, each also with {FILE}, and {PREFIX}LOG"
            ));
        }
    }
    Ok(())
}

/// Sets the URL of one of many stores, or of the database that is asked for them.
fn store_of_many(table: &mut Table, rest: &str, value: &str) -> Result<(), String> {
    if rest.ends_with("_DISCOVER_STORE") {
        return part(table, ("stores", "name", "discover"), "_DISCOVER_", rest, value);
    }
    let unknown = || format!("the variable {PREFIX}STORES_{rest} matches nothing in [[stores]] of the file");
    let wanted = rest.strip_suffix("_URL").ok_or_else(unknown)?;
    let entries = table.get_mut("stores").and_then(Value::as_array_mut).ok_or_else(unknown)?;
    let mut matching = entries.iter_mut().filter(|entry| is_named(entry, "name", wanted));
    let entry = matching.next().and_then(Value::as_table_mut).ok_or_else(unknown)?;
    if matching.next().is_some() {
        return Err(format!(
            "the variable {PREFIX}STORES_{rest} matches two entries of [[stores]]; rename one of them"
        ));
    }
    entry.insert("url".to_owned(), Value::String(value.to_owned()));
    Ok(())
}

/// Whether this entry has this name, as it is written in a variable.
fn is_named(entry: &Value, name: &str, wanted: &str) -> bool {
    let known = entry.get(name).and_then(Value::as_str).unwrap_or_default();
    known.to_uppercase().replace(|c: char| !c.is_ascii_alphanumeric(), "_") == wanted
}

/// Sets a key in a part of the entry with this name in a list.
fn part(
    table: &mut Table,
    (list, name, part): (&str, &str, &str),
    between: &str,
    rest: &str,
    value: &str,
) -> Result<(), String> {
    let unknown =
        || format!("the variable {PREFIX}{}_{rest} matches nothing in [[{list}]] of the file", list.to_uppercase());
    let (wanted, key) = rest.rsplit_once(between).ok_or_else(unknown)?;
    let named = |entry: &&mut Value| is_named(entry, name, wanted);
    let entries = table.get_mut(list).and_then(Value::as_array_mut).ok_or_else(unknown)?;
    let mut matching = entries.iter_mut().filter(named);
    let entry = matching.next().ok_or_else(unknown)?;
    if matching.next().is_some() {
        return Err(format!(
            "the variable {PREFIX}{}_{rest} matches two entries of [[{list}]]; rename one of them",
            list.to_uppercase()
        ));
    }
    let options = entry.get_mut(part).and_then(Value::as_table_mut).ok_or_else(unknown)?;
    options.insert(key.to_lowercase(), typed(value));
    Ok(())
}

fn section(table: &mut Table, name: &str, key: &str, value: &str) -> Result<(), String> {
    let section = table.entry(name).or_insert_with(|| Value::Table(Table::new()));
    let section = section.as_table_mut().ok_or("[store], [relay] and [retention] must be tables")?;
    section.insert(key.to_lowercase(), typed(value));
    Ok(())
}

/// A variable that looks like a whole number or like true or false is one.
fn typed(value: &str) -> Value {
    match (value.parse::<i64>(), value.parse::<bool>()) {
        (Ok(number), _) => Value::Integer(number),
        (_, Ok(truth)) => Value::Boolean(truth),
        _ => Value::String(value.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use super::*;

    fn of(variables: &[(&str, &str)]) -> Result<Vec<Variable>, String> {
        let variables = variables.iter().map(|(name, value)| (OsString::from(name), OsString::from(value)));
        read(
            variables,
            |path| if path == "/run/url" { Ok("from the file\n".to_owned()) } else { Err("not there".into()) },
        )
    }

    #[test]
    fn values_may_be_in_files_and_only_once() {
        let found = of(&[("POSTROOM_STORE_URL_FILE", "/run/url"), ("PATH", "x"), ("POSTROOM_LOG", "debug")]).unwrap();
        assert_eq!(found, [("STORE_URL".to_owned(), "from the file".to_owned())]);
        assert!(of(&[("POSTROOM_STORE_URL_FILE", "/nowhere")]).unwrap_err().contains("/nowhere: not there"));
        let twice = of(&[("POSTROOM_STORE_URL_FILE", "/run/url"), ("POSTROOM_STORE_URL", "x")]).unwrap_err();
        assert!(twice.contains("both set"), "{twice}");
    }

    #[test]
    fn a_variable_that_is_not_utf_8_or_means_nothing_is_an_error() {
        let bytes = OsString::from_vec(vec![0xff]);
        let error = read([("POSTROOM_STORE_URL".into(), bytes)].into_iter(), |_| Ok(String::new())).unwrap_err();
        assert!(error.contains("POSTROOM_STORE_URL is not UTF-8"), "{error}");
        let mut table = Table::new();
        let variables = of(&[("POSTROOM_STOER_URL", "x")]).unwrap();
        assert!(overlay(&mut table, &variables).unwrap_err().contains("POSTROOM_STOER_URL is not known"));
        assert!(of(&[("POSTROOM_SERVICE_HOST", "10.0.0.1"), ("POSTROOM_PORT_80_TCP", "tcp://x")]).unwrap().is_empty());
    }

    #[test]
    fn routes_and_inboxes_are_found_by_their_names() {
        let text = "[[routes]]\nname = \"my-orders\"\n[routes.sink]\nkind = \"x\"\n[[inboxes]]\nconsumer = \"b.c\"\nfrom = { kind = \"x\" }";
        let mut table: Table = text.parse().unwrap();
        let variables =
            of(&[("POSTROOM_ROUTES_MY_ORDERS_SINK_URL", "u"), ("POSTROOM_INBOXES_B_C_FROM_PREFETCH", "9")]).unwrap();
        overlay(&mut table, &variables).unwrap();
        assert_eq!(table["routes"][0]["sink"]["url"].as_str(), Some("u"));
        assert_eq!(table["inboxes"][0]["from"]["prefetch"].as_integer(), Some(9));
        for unknown in
            ["POSTROOM_ROUTES_OTHER_SINK_URL", "POSTROOM_ROUTES_MY_ORDERS_URL", "POSTROOM_INBOXES_X_FROM_URL"]
        {
            let error = overlay(&mut table, &of(&[(unknown, "u")]).unwrap()).unwrap_err();
            assert!(error.contains(unknown), "{error}");
        }
    }
}
