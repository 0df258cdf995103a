//! Pure: whether a mapping fits a table, and which of the rows found are taken.

use super::{Done, Intake, Literal, Setting};

/// What a column holds, as far as it matters how it is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holds {
    /// Bytes.
    Bytes,
    /// JSON.
    Json,
    /// A time with its zone.
    Time,
    /// A time without one, which is taken for UTC.
    LocalTime,
    /// What is read as text.
    Text,
}

/// A column of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Column {
    /// Its name.
    pub name: String,
    /// Its type, as the database writes it.
    pub type_name: String,
    /// What it holds.
    pub holds: Holds,
    /// Its values are compared and set as numbers; truths are 1 and 0.
    pub is_number: bool,
    /// It is never null.
    pub not_null: bool,
    /// It is the primary key, alone.
    pub is_key: bool,
    /// A unique index has it alone.
    pub is_unique: bool,
    /// Nobody can write it.
    pub is_generated: bool,
    /// An index begins with it.
    pub leads_index: bool,
}

impl Column {
    fn is_time(&self) -> bool {
        matches!(self.holds, Holds::Time | Holds::LocalTime)
    }
}

/// A table as it is in the database.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape {
    /// Its columns.
    pub columns: Vec<Column>,
}

impl Shape {
    /// A column by its name.
    pub fn column(&self, name: &str) -> Option<&Column> {
        self.columns.iter().find(|column| column.name == name)
    }

    /// What a column holds; text, if there is none of this name.
    pub fn holds(&self, name: &str) -> Holds {
        self.column(name).map_or(Holds::Text, |column| column.holds)
    }
}

impl Intake {
    /// The column that identifies a row, or what is wrong with the mapping, one line for each thing.
    pub fn fits<'a>(&self, shape: &'a Shape) -> Result<&'a Column, Vec<String>> {
        let mut wrong = Vec::new();
        let row = match &self.row {
            Some(name) => shape.column(name),
            None => shape.columns.iter().find(|column| column.is_key),
        };
        match (&self.row, row) {
            (Some(name), None) => wrong.push(format!("row: there is no column {name:?}")),
            (None, None) => wrong.push(
                "the table has no primary key of one column; name a column that identifies a row: row = \"COLUMN\""
                    .to_owned(),
            ),
            (_, Some(row)) if !row.is_unique => wrong.push(format!(
                "row: column {:?} has no unique index, so it may name several rows; use one that has, or create the index",
                row.name
            )),
            (_, Some(row)) if !row.not_null => {
                wrong.push(format!("row: column {:?} may be null; use one that is not null", row.name));
            }
            _ => {}
        }
        let known = |name: &str| shape.column(name).is_some();
        for name in self.order.iter().filter(|name| !known(name)) {
            wrong.push(format!("order: there is no column {name:?}"));
        }
        for (name, _) in self.pending.iter().filter(|(name, _)| !known(name)) {
            wrong.push(format!("pending: there is no column {name:?}"));
        }
        for (field, template) in self.message.fields() {
            for name in template.columns().filter(|name| !known(name)) {
                wrong.push(format!("message.{field}: there is no column {name:?}"));
            }
        }
        for (field, template) in [("occurred_at", &self.message.occurred_at), ("visible_at", &self.message.visible_at)]
        {
            let column =
                template.as_ref().and_then(|template| template.sole_column()).and_then(|name| shape.column(name));
            if let Some(column) = column.filter(|column| !column.is_time()) {
                wrong.push(format!(
                    "message.{field}: column {:?} has the type {}, and no time",
                    column.name, column.type_name
                ));
            }
        }
        let none = Vec::new();
        let sent = if let Done::Set(settings) = &self.sent { settings } else { &none };
        for (place, settings) in [("taken", &self.taken), ("sent", sent), ("dead", &self.dead)] {
            for (name, setting) in settings {
                match shape.column(name) {
                    None => wrong.push(format!("{place}: there is no column {name:?}")),
                    Some(column) if row.is_some_and(|row| row.name == column.name) => {
                        wrong.push(format!("{place}: column {name:?} identifies the row, and stays as it is"));
                    }
                    Some(column) if column.is_generated => {
                        wrong.push(format!("{place}: column {name:?} is generated, and nobody can set it"));
                    }
                    Some(column) if column.not_null && *setting == Setting::Null => {
                        wrong.push(format!("{place}: column {name:?} is not null, and cannot be set to $null"));
                    }
                    Some(column) if *setting == Setting::Now && !column.is_time() => {
                        let of = &column.type_name;
                        wrong.push(format!("{place}: column {name:?} has the type {of}, and cannot be set to $now"));
                    }
                    Some(_) => {}
                }
            }
        }
        if !sent.is_empty() && self.dead == *sent {
            wrong.push(
                "dead: it is the same as `sent`, so a row whose message is dead would pass for one that was sent"
                    .to_owned(),
            );
        }
        let literals = self.pending.iter().flat_map(|(name, values)| values.iter().map(move |value| (name, value)));
        let literals = literals.filter_map(|(name, value)| match value {
            Literal::Text(text) => Some(("pending", name, text)),
            Literal::Null | Literal::NotNull => None,
        });
        let all = [("taken", &self.taken), ("sent", sent), ("dead", &self.dead)];
        let given = all
            .into_iter()
            .flat_map(|(place, settings)| settings.iter().map(move |(name, setting)| (place, name, setting)));
        let given = given.filter_map(|(place, name, setting)| match setting {
            Setting::Text(text) => Some((place, name, text)),
            _ => None,
        });
        for (place, name, text) in literals.chain(given) {
            if let Some(column) = shape.column(name).filter(|column| column.is_number && number_of(text).is_none()) {
                wrong.push(format!(
                    "{place}: column {name:?} has the type {}, and {text:?} is no number",
                    column.type_name
                ));
            }
        }
        row.filter(|_| wrong.is_empty()).ok_or(wrong)
    }

    /// Why each look at the table reads the whole of it; none: an index helps.
    pub fn without_index(&self, shape: &Shape, row: &Column) -> Option<String> {
        let first = self.order.first().unwrap_or(&row.name);
        let indexed = |name: &String| shape.column(name).is_some_and(|column| column.leads_index);
        let helps = indexed(first) || self.pending.iter().any(|(name, _)| indexed(name));
        (!helps).then(|| {
            format!("no index begins with {first:?} or a column of `pending`, so each look reads the whole table")
        })
    }

    /// The columns whose size decides how many rows are taken at once.
    pub fn large_columns(&self) -> Vec<String> {
        let fields = [Some(&self.message.payload), self.message.headers.as_ref()];
        let mut columns: Vec<String> =
            fields.into_iter().flatten().flat_map(|template| template.columns()).map(str::to_owned).collect();
        columns.sort_unstable();
        columns.dedup();
        columns
    }
}

/// A number as it is written in SQL; none: it is not one. Truths are 1 and 0.
pub fn number_of(text: &str) -> Option<String> {
    match text {
        "true" => return Some("1".to_owned()),
        "false" => return Some("0".to_owned()),
        _ => {}
    }
    let digits = text.strip_prefix('-').unwrap_or(text);
    let (whole, part) = digits.split_once('.').unwrap_or((digits, "0"));
    let all_digits =
        |text: &str| !text.is_empty() && text.len() <= 40 && text.bytes().all(|byte| byte.is_ascii_digit());
    (all_digits(whole) && all_digits(part)).then(|| text.to_owned())
}
