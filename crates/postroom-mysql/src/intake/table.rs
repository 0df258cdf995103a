//! The application's table: what it is made of, and the statements about it. Names from the configuration are quoted, and values travel as
//! parameters.

use std::collections::{BTreeSet, HashSet};

use mysql_async::prelude::Queryable;
use mysql_async::{Error, Row, Value};
use postroom::{Cell, Holds, Intake, IntakeColumn, IntakeRow, Literal, Setting, Shape, number_of};

use crate::log::get;

/// The table as it is in the database.
#[derive(Debug, Clone)]
pub(super) struct Table {
    /// Quoted.
    pub name: String,
    pub kind: String,
    pub shape: Shape,
    /// How long texts may be, by column.
    lengths: Vec<(String, Option<i64>)>,
    /// Postroom's own tables are there.
    pub tracked: bool,
    has_transactions: bool,
}

/// Types whose values are written as numbers: a text beside one of them is compared as a float, or not at all.
const NUMBERS: [&str; 12] = [
    "tinyint",
    "smallint",
    "mediumint",
    "int",
    "integer",
    "bigint",
    "decimal",
    "numeric",
    "float",
    "double",
    "bit",
    "year",
];

pub(super) fn quoted(name: &str) -> String {
    format!("`{}`", name.replace('`', "``"))
}

impl Table {
    /// None: there is no such table, or this role may not know of it.
    pub async fn read(conn: &mut impl Queryable, intake: &Intake) -> Result<Option<Self>, Error> {
        let (schema, table) = (&intake.table.schema, &intake.table.name);
        let sql = "select c.column_name as name, c.column_type as type, c.data_type as kind, c.is_nullable = 'NO' as not_null,
                          lower(c.extra) like '%generated%' as is_generated, cast(c.character_maximum_length as signed) as length,
                          t.table_schema as in_schema, t.table_type as of_kind,
                          coalesce((select e.transactions = 'YES' from information_schema.engines e where e.engine = t.engine), false) as has_transactions,
                          (select count(*) from information_schema.tables p
                            where p.table_schema = database() and p.table_name = 'postroom_intake_rows') as tracked
                     from information_schema.columns c
                     join information_schema.tables t on t.table_schema = c.table_schema and t.table_name = c.table_name
                    where c.table_schema = coalesce(?, database()) and c.table_name = ? order by c.ordinal_position";
        let mut rows: Vec<Row> = conn.exec(sql, (schema, table)).await?;
        if rows.is_empty() {
            return Ok(None);
        }
        let sql = "select index_name, non_unique, cast(seq_in_index as signed), column_name from information_schema.statistics
                    where table_schema = coalesce(?, database()) and table_name = ?";
        let parts: Vec<(String, i64, i64, Option<String>)> = conn.exec(sql, (schema, table)).await?;
        let several: HashSet<&str> =
            parts.iter().filter(|(_, _, place, _)| *place > 1).map(|(index, ..)| index.as_str()).collect();
        let leads = |name: &str, which: &dyn Fn(&str, bool) -> bool| {
            parts.iter().any(|(index, non_unique, place, column)| {
                *place == 1
                    && column.as_deref() == Some(name)
                    && which(index, *non_unique == 0 && !several.contains(index.as_str()))
            })
        };
        let (mut columns, mut lengths, mut shown) =
            (Vec::new(), Vec::new(), (String::new(), String::new(), false, false));
        for row in &mut rows {
            let (name, kind): (String, String) = (get(row, "name")?, get(row, "kind")?);
            let holds = match kind.to_lowercase().as_str() {
                "blob" | "tinyblob" | "mediumblob" | "longblob" | "binary" | "varbinary" => Holds::Bytes,
                "json" => Holds::Json,
                "datetime" | "timestamp" | "date" => Holds::LocalTime,
                _ => Holds::Text,
            };
            columns.push(IntakeColumn {
                type_name: get(row, "type")?,
                holds,
                is_number: NUMBERS.contains(&kind.to_lowercase().as_str()),
                not_null: get::<i64>(row, "not_null")? != 0,
                is_key: leads(&name, &|index, alone| index == "PRIMARY" && alone),
                is_unique: leads(&name, &|_, alone| alone),
                is_generated: get::<i64>(row, "is_generated")? != 0,
                leads_index: leads(&name, &|_, _| true),
                name: name.clone(),
            });
            lengths.push((name, get(row, "length")?));
            shown = (
                get(row, "in_schema")?,
                get(row, "of_kind")?,
                get::<i64>(row, "tracked")? != 0,
                get::<i64>(row, "has_transactions")? != 0,
            );
        }
        let (schema, kind, tracked, has_transactions) = shown;
        let name = format!("{}.{}", quoted(&schema), quoted(table));
        Ok(Some(Self { name, kind, shape: Shape { columns }, lengths, tracked, has_transactions }))
    }

    /// Fewer characters than its type can have are a limit of the column.
    fn cut_to(&self, name: &str) -> Option<i64> {
        self.lengths.iter().find(|(column, _)| column == name).and_then(|(_, length)| *length)
    }
}

/// The statements for one intake.
#[derive(Debug, Clone)]
pub(super) struct Statements {
    pub table: Table,
    /// The column that identifies a row.
    pub row: IntakeColumn,
    columns: Vec<String>,
    key_columns: Vec<String>,
    size: String,
    /// `f` is the table.
    pending: String,
    values: Vec<String>,
    not_taken: String,
    order: String,
}

impl Statements {
    /// What is wrong with the mapping, one line for each thing.
    pub fn of(intake: &Intake, table: Table) -> Result<Self, Vec<String>> {
        let row = intake.fits(&table.shape)?.clone();
        if ["float", "double"].iter().any(|kind| row.type_name.to_lowercase().starts_with(kind)) {
            return Err(vec![format!(
                "row: column {:?} has the type {}, which does not identify a row",
                row.name, row.type_name
            )]);
        }
        if !table.has_transactions {
            return Err(vec![
                "its storage engine has no transactions, so a row could be marked and its message lost; `alter table … engine = InnoDB`"
                    .to_owned(),
            ]);
        }
        let (mut conditions, mut values) = (vec!["true".to_owned()], Vec::new());
        for (name, one_of) in &intake.pending {
            let one_of: Vec<String> = one_of
                .iter()
                .map(|value| match value {
                    Literal::Null => format!("f.{} is null", quoted(name)),
                    Literal::NotNull => format!("f.{} is not null", quoted(name)),
                    Literal::Text(text) => match number(&table, name, text) {
                        Some(number) => format!("f.{} = {number}", quoted(name)),
                        None => {
                            values.push(text.clone());
                            format!("f.{} = ?", quoted(name))
                        }
                    },
                })
                .collect();
            conditions.push(format!("({})", one_of.join(" or ")));
        }
        let mut order = intake.order.clone();
        if !order.contains(&row.name) {
            order.push(row.name.clone());
        }
        let order: Vec<String> = order.iter().map(|name| format!("f.{}", quoted(name))).collect();
        let sizes: Vec<String> = intake
            .large_columns()
            .iter()
            .map(|name| format!(" + coalesce(octet_length(f.{}), 0)", quoted(name)))
            .collect();
        let known = |names: BTreeSet<String>| names.into_iter().collect::<Vec<_>>();
        let mut made = Self {
            columns: known(intake.message.columns()),
            key_columns: known(intake.message.key_columns()),
            size: format!("(0{})", sizes.concat()),
            pending: conditions.join(" and "),
            values,
            not_taken: "? is not null".to_owned(),
            order: order.join(", "),
            table,
            row,
        };
        if made.table.tracked {
            made.not_taken = format!(
                "not exists (select 1 from postroom_intake_rows r where r.intake = ? and r.row_key = {})",
                made.row_key()
            );
        }
        Ok(made)
    }

    fn is_integer(&self) -> bool {
        let kind = self.row.type_name.to_lowercase();
        ["tinyint", "smallint", "mediumint", "int", "bigint"].iter().any(|name| kind.starts_with(name))
    }

    /// What identifies a row, as text.
    fn row_key(&self) -> String {
        let name = quoted(&self.row.name);
        match self.row.holds {
            Holds::Bytes => format!("hex(f.{name})"),
            _ => format!("cast(f.{name} as char)"),
        }
    }

    /// The row of a key. A text beside a number would be compared as a float, and no index would help.
    fn is_row(&self, many: usize) -> String {
        let one = match self.row.holds {
            Holds::Bytes => "unhex(?)",
            _ if self.is_integer() && self.row.type_name.to_lowercase().contains("unsigned") => "cast(? as unsigned)",
            _ if self.is_integer() => "cast(? as signed)",
            _ => "?",
        };
        format!("f.{} in ({})", quoted(&self.row.name), vec![one; many.max(1)].join(", "))
    }

    /// A column as it is read.
    fn read_as(&self, name: &str) -> String {
        let quoted = quoted(name);
        match self.table.shape.holds(name) {
            Holds::Bytes => format!("f.{quoted}"),
            Holds::Time | Holds::LocalTime => format!("timestampdiff(microsecond, '1970-01-01', f.{quoted})"),
            Holds::Json | Holds::Text => format!("cast(f.{quoted} as char)"),
        }
    }

    fn list(&self, names: &[String]) -> String {
        names.iter().map(|name| format!(", {}", self.read_as(name))).collect()
    }

    fn pending_values(&self) -> impl Iterator<Item = Value> {
        self.values.iter().map(|value| Value::from(value.as_str()))
    }

    fn next_of(&self, extra: &str, names: &[String], intake: &str, max: i64) -> (String, Vec<Value>) {
        let sql = format!(
            "select {}{extra}{} from {} f where {} and {} order by {} limit ?",
            self.row_key(),
            self.list(names),
            self.table.name,
            self.pending,
            self.not_taken,
            self.order
        );
        (sql, self.pending_values().chain([intake.into(), max.into()]).collect())
    }

    /// The next rows with their sizes and keys, without a lock.
    pub fn next_keys(&self, intake: &str, max: i64) -> (String, Vec<Value>) {
        self.next_of(&format!(", {}", self.size), &self.key_columns, intake, max)
    }

    /// The next rows whole, without a lock.
    pub fn next(&self, intake: &str, max: i64) -> (String, Vec<Value>) {
        self.next_of("", &self.columns, intake, max)
    }

    /// Those of these rows that nobody else has locked, locked. By their keys: a statement that sorts would lock every candidate.
    pub fn free(&self, rows: &[IntakeRow]) -> (String, Vec<Value>) {
        let sql = format!(
            "select {}{} from {} f where {} and {} for update skip locked",
            self.row_key(),
            self.list(&self.columns),
            self.table.name,
            self.is_row(rows.len()),
            self.pending
        );
        (sql, rows.iter().map(|row| Value::from(row.row.as_str())).chain(self.pending_values()).collect())
    }

    /// How many there are, up to `most`, and the time of the oldest.
    pub fn count(&self, intake: &str, occurred_at: Option<&str>, most: i64) -> (String, Vec<Value>) {
        let time = occurred_at.map_or_else(|| "null".to_owned(), |name| self.read_as(name));
        let sql = format!(
            "select count(*), cast(min(p.us) as signed) from (select {time} as us from {} f where {} and {} order by {} limit ?) p",
            self.table.name, self.pending, self.not_taken, self.order
        );
        (sql, self.pending_values().chain([intake.into(), most.into()]).collect())
    }

    /// A row of [`next_keys`](Self::next_keys), and its size in bytes.
    pub fn keys_of(&self, row: Row) -> Result<(IntakeRow, i64), Error> {
        let size = cell(&row, 1).and_then(|value| mysql_async::from_value_opt(value).ok()).unwrap_or(i64::MAX);
        Ok((self.row_of(&row, 2, &self.key_columns), size))
    }

    /// A row of the others.
    pub fn whole(&self, row: &Row) -> IntakeRow {
        self.row_of(row, 1, &self.columns)
    }

    fn row_of(&self, row: &Row, first: usize, names: &[String]) -> IntakeRow {
        let read = |(index, name): (usize, &String)| {
            let holds = self.table.shape.holds(name);
            let cell = match (cell(row, first + index), holds) {
                (None | Some(Value::NULL), _) => Cell::Null,
                (Some(Value::Bytes(bytes)), Holds::Bytes) => Cell::Bytes(bytes),
                (Some(value), Holds::Time | Holds::LocalTime) => {
                    mysql_async::from_value_opt(value).map_or(Cell::Null, Cell::Time)
                }
                (Some(Value::Bytes(bytes)), _) => match String::from_utf8(bytes) {
                    Ok(text) if holds == Holds::Json => Cell::Json(text),
                    Ok(text) => Cell::Text(text),
                    Err(error) => Cell::Unreadable(String::from_utf8_lossy(error.as_bytes()).into_owned()),
                },
                (Some(value), _) => Cell::Text(value.as_sql(true).trim_matches('\'').to_owned()),
            };
            (name.clone(), cell)
        };
        let key = match cell(row, 0) {
            Some(Value::Bytes(bytes)) => String::from_utf8_lossy(&bytes).into_owned(),
            _ => String::new(),
        };
        IntakeRow { row: key, cells: names.iter().enumerate().map(read).collect() }
    }

    /// Sets columns of rows; where a setting is the error, of one row.
    pub fn set(&self, settings: &[(String, Setting)], rows: &[String], error: Option<&str>) -> (String, Vec<Value>) {
        let mut values: Vec<Value> = Vec::new();
        let set: Vec<String> = settings
            .iter()
            .map(|(name, setting)| {
                let value = match setting {
                    Setting::Null => "null".to_owned(),
                    Setting::Now => "utc_timestamp(6)".to_owned(),
                    Setting::Error => {
                        values.push(error.into());
                        self.table.cut_to(name).map_or_else(|| "?".to_owned(), |most| format!("left(?, {most})"))
                    }
                    Setting::Text(text) => number(&self.table, name, text).unwrap_or_else(|| {
                        values.push(text.as_str().into());
                        "?".to_owned()
                    }),
                };
                format!("f.{} = {value}", quoted(name))
            })
            .collect();
        let sql = format!("update {} f set {} where {}", self.table.name, set.join(", "), self.is_row(rows.len()));
        values.extend(rows_of(rows));
        (sql, values)
    }

    /// Deletes rows.
    pub fn delete(&self, rows: &[String]) -> (String, Vec<Value>) {
        let sql = format!("delete f from {} f where {}", self.table.name, self.is_row(rows.len()));
        (sql, rows_of(rows).collect())
    }
}

/// A value of a column of numbers.
fn number(table: &Table, column: &str, text: &str) -> Option<String> {
    table.shape.column(column).filter(|column| column.is_number).and_then(|_| number_of(text))
}

/// No row, where there is none.
fn rows_of(rows: &[String]) -> impl Iterator<Item = Value> {
    let none = rows.is_empty().then_some(Value::NULL);
    rows.iter().map(|row| Value::from(row.as_str())).chain(none)
}

fn cell(row: &Row, index: usize) -> Option<Value> {
    row.as_ref(index).cloned()
}
