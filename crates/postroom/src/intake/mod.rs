//! Tables that already exist: rows of an application's own outbox table are taken into the outbox, in one transaction with the mark that they
//! were taken, so that everything behind it (routes, order, retries, dead letters, replay, retention) is the same for them.

mod fate;
mod mapping;
mod search;
mod shape;
mod template;
mod trial;

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use async_trait::async_trait;
use serde::Serialize;

use crate::dead_letter::Deed;
use crate::error::StoreError;
use crate::store::Finding;

pub use fate::{Marking, OnRoute, RowFate};
pub use mapping::Mapping;
pub use search::{Search, Searched, rows_within};
pub use shape::{Column, Holds, Shape, number_of};
pub use template::{InvalidTemplate, Template};
pub use trial::Trial;

/// One table whose rows are taken.
#[derive(Debug, Clone, PartialEq)]
pub struct Intake {
    /// What is known of its rows is kept under this name.
    pub name: String,
    /// The table.
    pub table: TableName,
    /// The column that identifies a row; none: the primary key.
    pub row: Option<String>,
    /// In the order of these columns, the lowest first; a row before another of its key is taken before it. Empty: by [`Intake::row`].
    pub order: Vec<String>,
    /// Rows that are to be taken: each of these columns has one of its values. Empty: all.
    pub pending: Vec<(String, Vec<Literal>)>,
    /// What a row gets when it is taken.
    pub taken: Vec<(String, Setting)>,
    /// What becomes of a row that was sent.
    pub sent: Done,
    /// What a row gets whose message is dead, or that cannot be taken.
    pub dead: Vec<(String, Setting)>,
    /// When a row is done.
    pub done: DoneWhen,
    /// How a row becomes a message.
    pub message: Mapping,
}

/// A table, with its schema if it was given.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TableName {
    /// The schema (in MySQL: the database).
    pub schema: Option<String>,
    /// The table.
    pub name: String,
}

impl FromStr for TableName {
    type Err = String;

    /// A part in double quotes may have dots in it; a quote in it is written twice.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || "it is written as table or schema.table; a name with a dot in it is put in double quotes".to_owned();
        let (mut parts, mut rest) = (Vec::new(), text);
        loop {
            let (part, behind) = part_of(rest).ok_or_else(wrong)?;
            if part.is_empty() || part.contains('\0') {
                return Err(wrong());
            }
            parts.push(part);
            match behind.strip_prefix('.') {
                Some(more) => rest = more,
                None if behind.is_empty() => break,
                None => return Err(wrong()),
            }
        }
        match <[String; 2]>::try_from(parts) {
            Ok([schema, name]) => Ok(Self { schema: Some(schema), name }),
            Err(mut parts) if parts.len() == 1 => Ok(Self { schema: None, name: parts.remove(0) }),
            Err(_) => Err(wrong()),
        }
    }
}

/// The first part of a name, and what is behind it.
fn part_of(text: &str) -> Option<(String, &str)> {
    let Some(quoted) = text.strip_prefix('"') else {
        let end = text.find('.').unwrap_or(text.len());
        return Some((text[..end].to_owned(), &text[end..]));
    };
    let mut name = String::new();
    let mut rest = quoted;
    loop {
        let end = rest.find('"')?;
        name.push_str(&rest[..end]);
        match rest[end + 1..].strip_prefix('"') {
            Some(more) => {
                name.push('"');
                rest = more;
            }
            None => return Some((name, &rest[end + 1..])),
        }
    }
}

impl fmt::Display for TableName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let part = |name: &str| match name.contains(['.', '"']) {
            true => format!("\"{}\"", name.replace('"', "\"\"")),
            false => name.to_owned(),
        };
        match &self.schema {
            Some(schema) => write!(f, "{}.{}", part(schema), part(&self.name)),
            None => f.write_str(&part(&self.name)),
        }
    }
}

/// A value that a column has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Literal {
    /// Nothing.
    Null,
    /// Anything.
    NotNull,
    /// This, in the column's type.
    Text(String),
}

impl Literal {
    /// A setting after which the column has it; none: there is no one value.
    pub fn setting(&self) -> Option<Setting> {
        match self {
            Self::Null => Some(Setting::Null),
            Self::NotNull => None,
            Self::Text(text) => Some(Setting::Text(text.clone())),
        }
    }
}

/// A value that a column gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Setting {
    /// Nothing.
    Null,
    /// The time, by the database's clock; in UTC where the column has no time zone.
    Now,
    /// What went wrong.
    Error,
    /// This, in the column's type.
    Text(String),
}

/// What becomes of a row that is done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Done {
    /// It is deleted.
    Delete,
    /// It gets these values.
    Set(Vec<(String, Setting)>),
}

/// When a row is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DoneWhen {
    /// When every route that takes its message has sent it: the broker confirmed it.
    Sent,
    /// When it was taken. The outbox has it then; whether it was sent, only postroom knows.
    Taken,
}

/// What a column of a row holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cell {
    /// Nothing.
    Null,
    /// Text, or a number or another value as text.
    Text(String),
    /// Text that the database knows to be JSON.
    Json(String),
    /// Bytes.
    Bytes(Vec<u8>),
    /// Microseconds since 1970.
    Time(i64),
    /// Text that is not UTF-8, as far as it could be read.
    Unreadable(String),
}

impl Cell {
    fn text(&self, name: &str) -> Result<Option<String>, String> {
        match self {
            Self::Null => Ok(None),
            Self::Text(text) | Self::Json(text) => Ok(Some(text.clone())),
            Self::Bytes(bytes) => match std::str::from_utf8(bytes) {
                Ok(text) => Ok(Some(text.to_owned())),
                Err(_) => Err(format!("column {name} has bytes that are no text")),
            },
            Self::Time(us) => Ok(Some(us.to_string())),
            Self::Unreadable(_) => Err(format!("column {name} is not UTF-8; the database does not check its encoding")),
        }
    }
}

/// One row, with the columns that its message needs.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// What identifies it, as text.
    pub row: String,
    /// Its columns.
    pub cells: BTreeMap<String, Cell>,
}

impl Row {
    fn cell(&self, name: &str) -> &Cell {
        self.cells.get(name).unwrap_or(&Cell::Null)
    }
}

/// What a step of taking did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct TookIn {
    /// Messages that are in the outbox now.
    pub taken: u64,
    /// Rows that no message can be made of; they are set aside.
    pub refused: u64,
    /// Rows that somebody else has locked, or that are behind one of those with their key.
    pub held: u64,
    /// There may be more.
    pub more: bool,
    /// Another process takes from this table now.
    pub others: bool,
}

/// What a step of marking did.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct MarkedRows {
    /// Rows whose message was sent.
    pub sent: u64,
    /// Rows whose message has died.
    pub dead: u64,
    /// Rows of which is not known whether their message was sent.
    pub unclear: u64,
    /// Rows whose message was sent, and that refuse to be marked.
    pub unmarked: u64,
    /// Where the next step goes on; none: that were all.
    pub next: Option<i64>,
    /// Another process is at it.
    pub others: bool,
}

/// How an intake stands.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct IntakeStatus {
    /// Rows that are to be taken.
    pub pending: i64,
    /// There are more than were counted.
    pub pending_is_bound: bool,
    /// Age of the oldest of them in seconds, if the mapping has the time of a message.
    pub oldest_seconds: Option<f64>,
    /// Rows that were taken and are not done.
    pub taken: i64,
    /// Of those, such whose message is dead.
    pub dead: i64,
    /// Rows that no message can be made of.
    pub refused: i64,
    /// Rows of which is not known whether their message was sent.
    pub unclear: i64,
    /// Rows whose message was sent, and that refuse to be marked.
    pub unmarked: i64,
    /// Some that are refused, unclear or unmarked, the newest first.
    pub set_aside: Vec<SetAside>,
}

/// A row that nobody goes on with until a person decides.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SetAside {
    /// What identifies the row.
    pub row: String,
    /// `refused`, `unclear` or `unmarked`.
    pub state: String,
    /// Id of its message, if it has one.
    pub id: Option<String>,
    /// Why.
    pub error: String,
    /// How long ago, in seconds.
    pub age_seconds: f64,
}

/// What would be made of a row.
#[derive(Debug, Clone, PartialEq)]
pub struct Previewed {
    /// What identifies it.
    pub row: String,
    /// The message, or why there is none.
    pub message: Result<crate::Message, String>,
}

/// Rows that a relay which claims by a value leaves behind when it dies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stuck {
    /// They have these values.
    pub rows: Vec<(String, Vec<Literal>)>,
    /// With these they are pending again.
    pub set: Vec<(String, Setting)>,
}

/// An index of a table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TableIndex {
    /// Its name.
    pub name: String,
    /// Columns by which it is ordered.
    pub columns: Vec<String>,
    /// Columns that it has a copy of.
    pub included: Vec<String>,
    /// Only rows that fulfil this are in it; in SQL.
    pub condition: Option<String>,
    /// The statement that removes it.
    pub removal: String,
}

/// A table that may be one that applications write messages to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FoundTable {
    /// The table.
    pub table: TableName,
    /// Its columns, in their order, with their types.
    pub columns: Vec<(String, String)>,
}

/// A store's side of tables that already exist.
#[async_trait]
pub trait Intakes: Send + Sync {
    /// Whether rows can be taken as it says; changes nothing.
    async fn check_intake(&self, intake: &Intake) -> Result<Vec<Finding>, StoreError>;

    /// What would be made of the next rows; changes nothing, and locks nothing.
    async fn preview_intake(&self, intake: &Intake, max: usize) -> Result<Vec<Previewed>, StoreError>;

    /// Takes up to so many rows, in one transaction.
    async fn take_in(&self, intake: &Intake, max: usize) -> Result<TookIn, StoreError>;

    /// Marks rows whose messages were sent or have died; looks at up to so many that were taken after `after`, a place of the step before.
    async fn mark_rows(&self, intake: &Intake, after: i64, max: usize) -> Result<MarkedRows, StoreError>;

    /// How it stands.
    async fn intake_status(&self, intake: &Intake) -> Result<IntakeStatus, StoreError>;

    /// Lets rows that were set aside be taken again, or be marked again: this one, or all that were refused or are unmarked. Returns how many.
    async fn take_again(&self, intake: &Intake, row: Option<&str>, deed: &Deed) -> Result<u64, StoreError>;

    /// Tables of the database that have all of these columns.
    async fn tables_with(&self, columns: &[String]) -> Result<Vec<FoundTable>, StoreError>;

    /// The table's indexes.
    async fn indexes_of(&self, table: &TableName) -> Result<Vec<TableIndex>, StoreError>;

    /// A name as a statement needs it. Default: in double quotes, where that matters.
    fn quoted(&self, name: &str) -> String {
        match is_plain(name) {
            true => name.to_owned(),
            false => format!("\"{}\"", name.replace('"', "\"\"")),
        }
    }

    /// Sessions that change rows of the table, or did so last, as far as the server shows; postroom's own are left out.
    async fn senders_to(&self, table: &TableName) -> Result<Vec<String>, StoreError>;

    /// Gives up to so many rows back that are stuck for longer than `age`, by their times and the database's clock, in one transaction with
    /// an audit row; those that `intake` itself has taken stay. Returns how many.
    async fn free_rows(
        &self,
        intake: &Intake,
        stuck: &Stuck,
        age: Duration,
        max: usize,
        deed: &Deed,
    ) -> Result<u64, StoreError>;
}

/// A name that means the same in every database whether it is quoted or not.
fn is_plain(name: &str) -> bool {
    let first = name.bytes().next().is_some_and(|byte| byte.is_ascii_lowercase() || byte == b'_');
    first && name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
}

impl Intake {
    /// The same table, looked at for other rows.
    #[must_use]
    pub fn looking_for(&self, rows: &[(String, Vec<Literal>)]) -> Self {
        Self { pending: rows.to_vec(), ..self.clone() }
    }

    /// What is wrong with a mapping whose rows have no time.
    pub fn ageless() -> String {
        "message.occurred_at and message.visible_at are missing, so nothing tells for how long a row is stuck"
            .to_owned()
    }

    /// Of these rows, those whose times are all at least `age` ago. None: the mapping has no time.
    pub fn older_than(&self, rows: Vec<Row>, age: Duration, now_us: i64) -> Option<Vec<String>> {
        let times: Vec<&str> = [&self.message.occurred_at, &self.message.visible_at]
            .into_iter()
            .filter_map(|template| template.as_ref().and_then(Template::sole_column))
            .collect();
        if times.is_empty() {
            return None;
        }
        let latest = now_us.saturating_sub(i64::try_from(age.as_micros()).unwrap_or(i64::MAX));
        let is_old = |row: &Row| {
            let time = |name: &&str| match row.cell(name) {
                Cell::Null => None,
                Cell::Time(us) => Some(*us),
                // What is no time says nothing of its age.
                _ => Some(i64::MAX),
            };
            times.iter().filter_map(time).max().is_some_and(|last| last <= latest)
        };
        Some(rows.into_iter().filter(is_old).map(|row| row.row).collect())
    }
}
