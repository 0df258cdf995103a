//! The application's table: what it is made of, and the statements about it. Names from the configuration are quoted, and values travel as
//! parameters.

use std::collections::BTreeSet;

use postroom::{Cell, Holds, Intake, IntakeColumn, IntakeRow, Literal, Setting, Shape};
use tokio_postgres::{GenericClient, Row};

use crate::text::Text;

pub(super) fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// The table as it is in the database.
#[derive(Debug, Clone)]
pub(super) struct Table {
    /// Quoted.
    pub name: String,
    pub kind: String,
    pub shape: Shape,
    /// Postroom's own tables are there.
    pub tracked: bool,
}

impl Table {
    /// None: there is no such table, or this role may not know of it.
    pub async fn read(client: &impl GenericClient, intake: &Intake) -> Result<Option<Self>, tokio_postgres::Error> {
        let schema = intake.table.schema.as_deref().unwrap_or("public");
        let rows = client.query(include_str!("sql/columns.sql"), &[&schema, &intake.table.name]).await?;
        let Some(first) = rows.first() else { return Ok(None) };
        let columns = rows.iter().map(|row| {
            let holds = match row.try_get(2)? {
                "bytea" => Holds::Bytes,
                "json" | "jsonb" => Holds::Json,
                "timestamptz" => Holds::Time,
                "timestamp" | "date" => Holds::LocalTime,
                _ => Holds::Text,
            };
            Ok(IntakeColumn {
                name: row.try_get(0)?,
                type_name: row.try_get(1)?,
                holds,
                // Values are cast to the column's type.
                is_number: false,
                not_null: row.try_get(3)?,
                is_key: row.try_get(4)?,
                is_generated: row.try_get(5)?,
                is_unique: row.try_get(7)?,
                leads_index: row.try_get(8)?,
            })
        });
        Ok(Some(Self {
            name: format!("{}.{}", quoted(schema), quoted(&intake.table.name)),
            kind: first.try_get(6)?,
            shape: Shape { columns: columns.collect::<Result<_, tokio_postgres::Error>>()? },
            tracked: first.try_get(9)?,
        }))
    }
}

/// The statements for one intake. Parameters: `$1` the intake, `$2` how many rows, then the values of the conditions.
#[derive(Debug, Clone)]
pub(super) struct Statements {
    pub table: Table,
    /// The column that identifies a row.
    pub row: IntakeColumn,
    /// The columns that a message needs, in the order in which they are read.
    pub columns: Vec<String>,
    key_columns: Vec<String>,
    size: String,
    /// `f` is the table.
    pending: String,
    pub pending_values: Vec<String>,
    order: String,
}

impl Statements {
    /// What is wrong with the mapping, one line for each thing.
    pub fn of(intake: &Intake, table: Table) -> Result<Self, Vec<String>> {
        let row = intake.fits(&table.shape)?.clone();
        let (mut conditions, mut pending_values) = (Vec::new(), Vec::new());
        for (name, values) in &intake.pending {
            let one_of: Vec<String> = values
                .iter()
                .map(|value| match value {
                    Literal::Null => format!("f.{} is null", quoted(name)),
                    Literal::NotNull => format!("f.{} is not null", quoted(name)),
                    Literal::Text(text) => {
                        pending_values.push(text.clone());
                        let cast = table.shape.column(name).map_or("text", |column| column.type_name.as_str());
                        format!("f.{} = ${}::text::{cast}", quoted(name), pending_values.len() + 2)
                    }
                })
                .collect();
            conditions.push(format!("({})", one_of.join(" or ")));
        }
        conditions.push(match table.tracked {
            true => format!(
                "not exists (select from postroom.intake_rows r where r.intake = $1 and r.row_key = f.{}::text)",
                quoted(&row.name)
            ),
            false => "$1::text is not null".to_owned(),
        });
        let mut order = intake.order.clone();
        if !order.contains(&row.name) {
            order.push(row.name.clone());
        }
        let order: Vec<String> = order.iter().map(|name| format!("f.{}", quoted(name))).collect();
        let sizes: Vec<String> = intake
            .large_columns()
            .iter()
            .map(|name| format!(" + coalesce(octet_length(f.{}::text), 0)", quoted(name)))
            .collect();
        let known_columns = |names: BTreeSet<String>| names.into_iter().collect::<Vec<_>>();
        Ok(Self {
            columns: known_columns(intake.message.columns()),
            key_columns: known_columns(intake.message.key_columns()),
            size: format!("(0{})::bigint", sizes.concat()),
            pending: conditions.join(" and "),
            pending_values,
            order: order.join(", "),
            table,
            row,
        })
    }

    /// A column as it is read.
    fn read_as(&self, name: &str) -> String {
        let (holds, name) = (self.table.shape.holds(name), format!("f.{}", quoted(name)));
        // What no calendar has a place for is beyond every calendar.
        let us = |time: String| {
            format!(
                "case when {name} >= '9999-12-31' then 9223372036854775807 when {name} < '0001-01-02' then -9223372036854775808
                      when {name} is not null then (extract(epoch from {time}) * 1000000)::bigint end"
            )
        };
        match holds {
            Holds::Bytes => name,
            Holds::Time => us(name.clone()),
            Holds::LocalTime => us(format!("({name}::timestamp at time zone 'UTC')")),
            Holds::Json | Holds::Text => format!("{name}::text"),
        }
    }

    fn select(&self, extra: &str, names: &[String], lock: &str) -> String {
        let read: String = names.iter().map(|name| format!(", {}", self.read_as(name))).collect();
        format!(
            "select f.{}::text{extra}{read} from {} f where {} order by {} limit $2 {lock}",
            quoted(&self.row.name),
            self.table.name,
            self.pending,
            self.order
        )
    }

    /// The next rows with their sizes and keys, without a lock.
    pub fn next_keys(&self) -> String {
        self.select(&format!(", {}", self.size), &self.key_columns, "")
    }

    /// The next rows whole, without a lock.
    pub fn next(&self) -> String {
        self.select("", &self.columns, "")
    }

    /// Of the rows `$2`, as text, those that nobody else has locked, locked.
    pub fn free(&self) -> String {
        let read: String = self.columns.iter().map(|name| format!(", {}", self.read_as(name))).collect();
        format!(
            "select f.{row}::text{read} from {} f where f.{row} = any (array(select u::{} from unnest($2::text[]) u)) and {} for update of f skip locked",
            self.table.name,
            self.row.type_name,
            self.pending,
            row = quoted(&self.row.name)
        )
    }

    /// The next rows that nobody else has locked, locked.
    pub fn next_free(&self) -> String {
        self.select("", &self.columns, "for update of f skip locked")
    }

    /// How many there are, up to `$2`, and the time of the oldest.
    pub fn count(&self, occurred_at: Option<&str>) -> String {
        let time = occurred_at.map_or_else(|| "null::bigint".to_owned(), |name| self.read_as(name));
        format!(
            "select count(*), min(p.us) from (select {time} as us from {} f where {} order by {} limit $2) p",
            self.table.name, self.pending, self.order
        )
    }

    /// A row of [`next_keys`](Self::next_keys), and its size in bytes.
    pub fn keys_of(&self, row: &Row) -> Result<(IntakeRow, i64), tokio_postgres::Error> {
        Ok((self.row_of(row, 2, &self.key_columns)?, row.try_get(1)?))
    }

    /// A row of the others.
    pub fn whole(&self, row: &Row) -> Result<IntakeRow, tokio_postgres::Error> {
        self.row_of(row, 1, &self.columns)
    }

    fn row_of(&self, row: &Row, first: usize, names: &[String]) -> Result<IntakeRow, tokio_postgres::Error> {
        let cell = |(index, name): (usize, &String)| {
            let index = first + index;
            let text = |made: fn(String) -> Cell| -> Result<Option<Cell>, tokio_postgres::Error> {
                let text = row.try_get::<_, Option<Text>>(index)?;
                Ok(text.map(|text| if text.whole { made(text.text) } else { Cell::Unreadable(text.text) }))
            };
            let cell = match self.table.shape.holds(name) {
                Holds::Bytes => row.try_get::<_, Option<Vec<u8>>>(index)?.map(Cell::Bytes),
                Holds::Time | Holds::LocalTime => row.try_get::<_, Option<i64>>(index)?.map(Cell::Time),
                Holds::Json => text(Cell::Json)?,
                Holds::Text => text(Cell::Text)?,
            };
            Ok((name.clone(), cell.unwrap_or(Cell::Null)))
        };
        Ok(IntakeRow {
            row: row.try_get::<_, Text>(0)?.text,
            cells: names.iter().enumerate().map(cell).collect::<Result<_, tokio_postgres::Error>>()?,
        })
    }

    /// Sets columns of rows: `$1` the rows as text, `$2` an error for each, then the values.
    pub fn set(&self, settings: &[(String, Setting)]) -> (String, Vec<String>) {
        let mut values = Vec::new();
        let set: Vec<String> = settings
            .iter()
            .map(|(name, setting)| {
                let cast = self.table.shape.column(name).map_or("text", |column| column.type_name.as_str());
                let now = match self.table.shape.holds(name) {
                    Holds::Time => "clock_timestamp()",
                    _ => "clock_timestamp() at time zone 'UTC'",
                };
                let value = match setting {
                    Setting::Null => "null".to_owned(),
                    Setting::Now => now.to_owned(),
                    Setting::Error => format!("k.error::{cast}"),
                    Setting::Text(text) => {
                        values.push(text.clone());
                        format!("${}::text::{cast}", values.len() + 2)
                    }
                };
                format!("{} = {value}", quoted(name))
            })
            .collect();
        let sql = format!(
            "update {} f set {} from (select u.row_key::{} as row_key, u.error from unnest($1::text[], $2::text[]) u (row_key, error)) k
              where f.{} = k.row_key",
            self.table.name,
            set.join(", "),
            self.row.type_name,
            quoted(&self.row.name)
        );
        (sql, values)
    }

    /// Deletes rows: `$1` as text.
    pub fn delete(&self) -> String {
        format!(
            "delete from {} f using (select u.row_key::{} as row_key from unnest($1::text[]) u (row_key)) k where f.{} = k.row_key",
            self.table.name,
            self.row.type_name,
            quoted(&self.row.name)
        )
    }
}
