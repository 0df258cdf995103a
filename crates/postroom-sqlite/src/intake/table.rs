//! The application's table: what it is made of, and the statements about it. Names from the configuration are quoted, and values travel as
//! parameters.

use std::collections::BTreeSet;

use postroom::{Cell, Holds, Intake, IntakeColumn, IntakeRow, Literal, Setting, Shape, number_of};
use rusqlite::types::{Value, ValueRef};
use rusqlite::{Connection, Error, OptionalExtension, Row};

/// The table as it is in the file.
#[derive(Debug, Clone)]
pub(super) struct Table {
    /// Quoted.
    pub name: String,
    pub kind: String,
    pub shape: Shape,
    /// Postroom's own tables are there.
    pub tracked: bool,
}

pub(super) fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

impl Table {
    /// None: there is no such table.
    pub fn read(connection: &Connection, intake: &Intake) -> Result<Option<Self>, Error> {
        let name = &intake.table.name;
        if intake.table.schema.as_deref().is_some_and(|schema| schema != "main") {
            return Ok(None);
        }
        let kind = |name: &str| {
            let sql = "select type from sqlite_schema where name = ?1 and type in ('table', 'view')";
            connection.query_row(sql, [name], |row| row.get::<_, String>(0)).optional()
        };
        let Some(of_kind) = kind(name)? else { return Ok(None) };
        let columns = "select name, upper(type), \"notnull\", pk, hidden, (select count(*) from pragma_table_xinfo(?1) p where p.pk > 0),
                              exists (select 1 from pragma_index_list(?1) l
                                       where l.\"unique\" and not l.partial and (select count(*) from pragma_index_info(l.name)) = 1
                                         and (select i.name from pragma_index_info(l.name) i) = c.name),
                              exists (select 1 from pragma_index_list(?1) l
                                       where (select i.name from pragma_index_info(l.name) i where i.seqno = 0) = c.name)
                         from pragma_table_xinfo(?1) c where hidden <> 1";
        let column = |row: &Row<'_>| {
            let type_name: String = row.get(1)?;
            let alone = row.get::<_, i64>(3)? > 0 && row.get::<_, i64>(5)? == 1;
            let holds = match &type_name {
                name if name.contains("DATE") || name.contains("TIME") => Holds::LocalTime,
                name if name.contains("JSON") => Holds::Json,
                name if name.contains("BLOB") => Holds::Bytes,
                _ => Holds::Text,
            };
            Ok(IntakeColumn {
                name: row.get(0)?,
                holds,
                is_number: ["INT", "BOOL", "REAL", "FLOA", "DOUB", "NUM", "DEC"]
                    .iter()
                    .any(|part| type_name.contains(part)),
                // Rows without a key are not looked at.
                not_null: row.get(2)? || alone,
                is_key: alone,
                is_unique: alone || row.get(6)?,
                is_generated: row.get::<_, i64>(4)? > 1,
                leads_index: alone || row.get(7)?,
                type_name,
            })
        };
        let mut statement = connection.prepare(columns)?;
        let columns = statement.query_map([name], column)?.collect::<Result<_, _>>()?;
        let tracked = kind("postroom_intake_rows")?.is_some();
        Ok(Some(Self { name: format!("main.{}", quoted(name)), kind: of_kind, shape: Shape { columns }, tracked }))
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
    order: String,
}

type Asked = (String, Vec<Value>);

impl Statements {
    /// What is wrong with the mapping, one line for each thing.
    pub fn of(intake: &Intake, table: Table) -> Result<Self, Vec<String>> {
        let row = intake.fits(&table.shape)?.clone();
        let (mut conditions, mut values) = (vec![format!("f.{} is not null", quoted(&row.name))], Vec::new());
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
            pending: String::new(),
            values,
            order: order.join(", "),
            table,
            row,
        };
        conditions.push(match made.table.tracked {
            true => format!(
                "not exists (select 1 from postroom_intake_rows r where r.intake = ? and r.row_key = {})",
                made.row_key()
            ),
            false => "? is not null".to_owned(),
        });
        made.pending = conditions.join(" and ");
        Ok(made)
    }

    /// What identifies a row, as text.
    fn row_key(&self) -> String {
        let name = quoted(&self.row.name);
        format!("case typeof(f.{name}) when 'blob' then hex(f.{name}) else cast(f.{name} as text) end")
    }

    /// The row of a key.
    fn is_row(&self) -> String {
        let name = quoted(&self.row.name);
        match self.row.holds {
            Holds::Bytes => format!("f.{name} = unhex(?)"),
            // Without an affinity, a number is not equal to its text.
            _ if self.row.type_name.is_empty() => format!("cast(f.{name} as text) = ?"),
            _ => format!("f.{name} = ?"),
        }
    }

    /// A column as it is read.
    fn read_as(&self, name: &str) -> String {
        let column = format!("f.{}", quoted(name));
        match self.table.shape.holds(name) {
            Holds::Time | Holds::LocalTime => format!(
                "case typeof({column}) when 'text' then cast(round(unixepoch({column}, 'subsec') * 1000) as integer) * 1000
                      when 'integer' then {column} * case when abs({column}) > 100000000000 then 1000 else 1000000 end
                      when 'real' then cast({column} * 1000000 as integer) end"
            ),
            _ => column,
        }
    }

    fn next_of(&self, extra: &str, names: &[String], intake: &str, max: i64) -> Asked {
        let read: String = names.iter().map(|name| format!(", {}", self.read_as(name))).collect();
        let sql = format!(
            "select {}{extra}{read} from {} f where {} order by {} limit ?",
            self.row_key(),
            self.table.name,
            self.pending,
            self.order
        );
        let pending = self.values.iter().map(|value| Value::Text(value.clone()));
        (sql, pending.chain([Value::Text(intake.to_owned()), Value::Integer(max)]).collect())
    }

    /// The next rows with their sizes.
    pub fn next_sizes(&self, intake: &str, max: i64) -> Asked {
        self.next_of(&format!(", {}", self.size), &self.key_columns, intake, max)
    }

    /// The next rows whole.
    pub fn next(&self, intake: &str, max: i64) -> Asked {
        self.next_of("", &self.columns, intake, max)
    }

    /// How many there are, up to `most`, and the time of the oldest.
    pub fn count(&self, intake: &str, occurred_at: Option<&str>, most: i64) -> Asked {
        let time = occurred_at.map_or_else(|| "null".to_owned(), |name| self.read_as(name));
        let sql = format!(
            "select count(*), min(p.us) from (select {time} as us from {} f where {} order by {} limit ?) p",
            self.table.name, self.pending, self.order
        );
        let pending = self.values.iter().map(|value| Value::Text(value.clone()));
        (sql, pending.chain([Value::Text(intake.to_owned()), Value::Integer(most)]).collect())
    }

    /// A row of [`next`](Self::next).
    pub fn whole(&self, row: &Row<'_>) -> Result<IntakeRow, Error> {
        let cell = |(index, name): (usize, &String)| {
            let holds = self.table.shape.holds(name);
            let cell = match row.get_ref(index + 1)? {
                ValueRef::Null => Cell::Null,
                ValueRef::Integer(us) if matches!(holds, Holds::Time | Holds::LocalTime) => Cell::Time(us),
                ValueRef::Integer(number) => Cell::Text(number.to_string()),
                ValueRef::Real(number) => Cell::Text(number.to_string()),
                ValueRef::Blob(bytes) => Cell::Bytes(bytes.to_vec()),
                ValueRef::Text(bytes) => match std::str::from_utf8(bytes) {
                    Ok(text) if holds == Holds::Json => Cell::Json(text.to_owned()),
                    Ok(text) => Cell::Text(text.to_owned()),
                    Err(_) => Cell::Unreadable(String::from_utf8_lossy(bytes).into_owned()),
                },
            };
            Ok((name.clone(), cell))
        };
        let cells = self.columns.iter().enumerate().map(cell).collect::<Result<_, Error>>()?;
        Ok(IntakeRow { row: crate::text::text(row, 0)?, cells })
    }

    /// Sets columns of one row.
    pub fn set(&self, settings: &[(String, Setting)], row: &str, error: Option<&str>) -> Asked {
        let mut values = Vec::new();
        let set: Vec<String> = settings
            .iter()
            .map(|(name, setting)| {
                let value = match setting {
                    Setting::Null => "null".to_owned(),
                    Setting::Now => "strftime('%Y-%m-%d %H:%M:%f', 'now')".to_owned(),
                    Setting::Error => {
                        values.push(error.map_or(Value::Null, |error| Value::Text(cut(error, self.length_of(name)))));
                        "?".to_owned()
                    }
                    Setting::Text(text) => number(&self.table, name, text).unwrap_or_else(|| {
                        values.push(Value::Text(text.clone()));
                        "?".to_owned()
                    }),
                };
                format!("{} = {value}", quoted(name))
            })
            .collect();
        values.push(Value::Text(row.to_owned()));
        (format!("update {} as f set {} where {}", self.table.name, set.join(", "), self.is_row()), values)
    }

    /// The number in a type such as VARCHAR(20), which SQLite does not enforce.
    fn length_of(&self, name: &str) -> Option<usize> {
        let type_name = &self.table.shape.column(name)?.type_name;
        type_name.split_once('(')?.1.trim_end_matches(')').parse().ok()
    }

    /// Deletes one row.
    pub fn delete(&self, row: &str) -> Asked {
        (format!("delete from {} as f where {}", self.table.name, self.is_row()), vec![Value::Text(row.to_owned())])
    }
}

/// A value of a column of numbers.
fn number(table: &Table, column: &str, text: &str) -> Option<String> {
    table.shape.column(column).filter(|column| column.is_number).and_then(|_| number_of(text))
}

fn cut(text: &str, most: Option<usize>) -> String {
    most.map_or_else(|| text.to_owned(), |most| text.chars().take(most).collect())
}
