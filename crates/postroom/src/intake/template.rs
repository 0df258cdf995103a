//! How a field of a message is put together from the columns of a row: `${column}`, `${column:/pointer}` into JSON, and text around them.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde_json::value::RawValue;

use super::{Cell, Row};

/// Text with columns in it. It is null where a column of it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Template(Vec<Part>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Text(String),
    Column {
        name: String,
        /// RFC 6901, split at its slashes.
        pointer: Option<Vec<String>>,
    },
}

/// Why a text is no template.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidTemplate {
    /// `${` without an end.
    #[error("`${{` is not closed; write ${{column}} or ${{column:/name}}")]
    Open,
    /// `${}`.
    #[error("`${{}}` names no column; write ${{column}} or ${{column:/name}}")]
    Nameless,
    /// The part behind the colon is no JSON pointer.
    #[error("{0:?} is no JSON pointer; it begins with a slash: ${{column:/name}}, ${{column:/names/0}}")]
    Pointer(String),
}

impl FromStr for Template {
    type Err = InvalidTemplate;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (mut parts, mut rest) = (Vec::new(), text);
        while let Some(at) = rest.find("${") {
            if at > 0 {
                parts.push(Part::Text(rest[..at].to_owned()));
            }
            let end = rest[at..].find('}').ok_or(InvalidTemplate::Open)? + at;
            let inside = &rest[at + 2..end];
            let (name, pointer) = match inside.split_once(':') {
                None => (inside, None),
                Some((name, pointer)) => {
                    let names =
                        pointer.strip_prefix('/').ok_or_else(|| InvalidTemplate::Pointer(pointer.to_owned()))?;
                    (name, Some(names.split('/').map(|name| name.replace("~1", "/").replace("~0", "~")).collect()))
                }
            };
            if name.is_empty() {
                return Err(InvalidTemplate::Nameless);
            }
            parts.push(Part::Column { name: name.to_owned(), pointer });
            rest = &rest[end + 1..];
        }
        if !rest.is_empty() {
            parts.push(Part::Text(rest.to_owned()));
        }
        Ok(Self(parts))
    }
}

impl fmt::Display for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|part| match part {
            Part::Text(text) => f.write_str(text),
            Part::Column { name, pointer: None } => write!(f, "${{{name}}}"),
            Part::Column { name, pointer: Some(names) } => {
                let escaped = names.iter().map(|name| format!("/{}", name.replace('~', "~0").replace('/', "~1")));
                write!(f, "${{{name}:{}}}", escaped.collect::<String>())
            }
        })
    }
}

impl Template {
    /// A column as it is.
    pub fn column(name: impl Into<String>) -> Self {
        Self(vec![Part::Column { name: name.into(), pointer: None }])
    }

    /// The columns in it.
    pub fn columns(&self) -> impl Iterator<Item = &str> {
        self.0.iter().filter_map(|part| match part {
            Part::Text(_) => None,
            Part::Column { name, .. } => Some(name.as_str()),
        })
    }

    /// The one column that it is, and nothing else.
    pub fn sole_column(&self) -> Option<&str> {
        match self.0.as_slice() {
            [Part::Column { name, pointer: None }] => Some(name),
            _ => None,
        }
    }

    /// Its text for this row; none: a column or what the pointer leads to is null or not there.
    pub(super) fn text(&self, row: &Row) -> Result<Option<String>, String> {
        let mut whole = String::new();
        for part in &self.0 {
            match part {
                Part::Text(text) => whole.push_str(text),
                Part::Column { name, pointer } => {
                    let Some(text) = row.cell(name).text(name)? else { return Ok(None) };
                    match pointer {
                        None => whole.push_str(&text),
                        Some(names) => {
                            let found =
                                pointed(&text, names).map_err(|error| format!("column {name} is no JSON: {error}"))?;
                            let Some(found) = found else { return Ok(None) };
                            whole.push_str(&found);
                        }
                    }
                }
            }
        }
        Ok(Some(whole))
    }

    /// The cell, if the template is one column and nothing else.
    pub(super) fn cell<'r>(&self, row: &'r Row) -> Option<&'r Cell> {
        self.sole_column().map(|name| row.cell(name))
    }
}

/// What a JSON pointer leads to, as text: a string without its quotes, everything else as it is written.
fn pointed(json: &str, names: &[String]) -> Result<Option<String>, serde_json::Error> {
    // Raw, because a number that went through a float or an integer loses digits.
    let mut at: &RawValue = serde_json::from_str(json)?;
    for name in names {
        let next = match at.get().as_bytes().first() {
            Some(b'{') => serde_json::from_str::<BTreeMap<String, &RawValue>>(at.get())?.remove(name),
            Some(b'[') => name
                .parse()
                .ok()
                .and_then(|index: usize| serde_json::from_str::<Vec<&RawValue>>(at.get()).ok()?.get(index).copied()),
            _ => None,
        };
        let Some(next) = next else { return Ok(None) };
        at = next;
    }
    match at.get() {
        "null" => Ok(None),
        text if text.starts_with('"') => serde_json::from_str(text).map(Some),
        text => Ok(Some(text.to_owned())),
    }
}
