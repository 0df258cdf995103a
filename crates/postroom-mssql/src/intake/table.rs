//! The application's table: what it is made of, and the statements about it. Names from the configuration are quoted, and values travel as
//! parameters.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use postroom::{Cell, Holds, Intake, IntakeColumn, IntakeRow, Literal, Setting, Shape, TableName, number_of};
use tiberius::error::Error;
use tiberius::{ColumnData, Row};

use crate::conn::Conn;
use crate::sql::{FromColumn, NOW, Named, get, json, named};

/// A statement and its parameters.
pub(super) type Statement = (String, Named);

/// The table as it is in the database.
#[derive(Debug, Clone)]
pub(super) struct Table {
    /// Quoted.
    pub name: String,
    pub is_table: bool,
    pub shape: Shape,
    /// How many characters texts may have, by column.
    lengths: BTreeMap<String, i64>,
    /// Of texts, by column.
    collations: BTreeMap<String, String>,
    /// Postroom's own tables are there.
    pub tracked: bool,
}

/// Types whose values are written as numbers.
const NUMBERS: [&str; 11] =
    ["tinyint", "smallint", "int", "bigint", "decimal", "numeric", "float", "real", "money", "smallmoney", "bit"];
/// Of postroom's own texts.
const TEXT: &str = "Latin1_General_100_BIN2";
/// Characters of what identifies a row.
const ROW_KEY_MAX: i64 = 512;
/// Types of which two values that look alike can be different ones, or that cannot be compared.
const NO_KEYS: [&str; 7] = ["float", "real", "text", "ntext", "image", "xml", "sql_variant"];

pub(super) fn quoted(name: &str) -> String {
    format!("[{}]", name.replace(']', "]]"))
}

/// The name that the server looks up; without a schema, in the role's own.
pub(super) fn name_of(table: &TableName) -> String {
    let schema = table.schema.as_ref().map(|schema| format!("{}.", quoted(schema)));
    format!("{}{}", schema.unwrap_or_default(), quoted(&table.name))
}

/// A type with its size, as it is declared. Units of UTF-16 have two bytes.
pub(super) fn type_name(kind: &str, length: i64, precision: i64, scale: i64) -> String {
    match kind {
        "nvarchar" | "varchar" | "varbinary" if length < 0 => format!("{kind}(max)"),
        "nvarchar" | "nchar" => format!("{kind}({})", length / 2),
        "varchar" | "char" | "varbinary" | "binary" => format!("{kind}({length})"),
        "decimal" | "numeric" => format!("{kind}({precision}, {scale})"),
        "datetime2" | "datetimeoffset" | "time" => format!("{kind}({scale})"),
        _ => kind.to_owned(),
    }
}

impl Table {
    /// None: there is no such table, or this role may not know of it.
    pub async fn read(conn: &mut Conn, intake: &Intake) -> Result<Option<Self>, Error> {
        let name = name_of(&intake.table);
        let of = || named! { "name" => &name };
        let sql = "select c.name, coalesce(t.name, N'another') as kind, convert(int, c.max_length) as max_length, convert(int, c.precision) as precision,
                          convert(int, c.scale) as scale, c.is_nullable, c.collation_name,
                          case when c.is_computed = 1 or c.is_identity = 1 or c.generated_always_type <> 0 or t.name = 'timestamp'
                               then 1 else 0 end as is_generated,
                          s.name as in_schema, case when o.type = 'U' then 1 else 0 end as is_table,
                          (select count_big(*) from sys.tables p where p.name = 'postroom_intake_rows') as tracked
                     from sys.columns c
                     join sys.objects o on o.object_id = c.object_id
                     join sys.schemas s on s.schema_id = o.schema_id
                     left join sys.types t on t.user_type_id = c.system_type_id
                    where c.object_id = object_id(@name) order by c.column_id";
        let rows = conn.rows(sql, of()).await?;
        let Some(first) = rows.first() else { return Ok(None) };
        let shown: (String, bool, bool) =
            (get(first, "in_schema")?, get(first, "is_table")?, get::<i64>(first, "tracked")? > 0);
        let (schema, is_table, tracked) = shown;
        let sql = "select i.name, case when i.is_unique = 1 and i.has_filter = 0 and i.is_disabled = 0 then 1 else 0 end, i.is_primary_key, convert(int, x.key_ordinal), c.name
                     from sys.indexes i
                     join sys.index_columns x on x.object_id = i.object_id and x.index_id = i.index_id and x.key_ordinal > 0
                     join sys.columns c on c.object_id = x.object_id and c.column_id = x.column_id
                    where i.object_id = object_id(@name)";
        let parts: Vec<(String, bool, bool, i64, String)> = conn.query(sql, of()).await?;
        let several: HashSet<&str> =
            parts.iter().filter(|(_, _, _, place, _)| *place > 1).map(|(index, ..)| index.as_str()).collect();
        let leads = |name: &str, which: &dyn Fn(bool, bool) -> bool| {
            parts.iter().any(|(index, unique, primary, place, column)| {
                *place == 1 && column == name && which(*unique && !several.contains(index.as_str()), *primary)
            })
        };
        let (mut columns, mut lengths, mut collations) = (Vec::new(), BTreeMap::new(), BTreeMap::new());
        for row in &rows {
            let (name, kind): (String, String) = (get(row, "name")?, get(row, "kind")?);
            let holds = match kind.as_str() {
                "varbinary" | "binary" | "image" | "timestamp" => Holds::Bytes,
                "json" => Holds::Json,
                "datetimeoffset" => Holds::Time,
                "datetime" | "datetime2" | "smalldatetime" | "date" => Holds::LocalTime,
                _ => Holds::Text,
            };
            let is_word = |name: &String| name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
            collations
                .extend(get::<Option<String>>(row, "collation_name")?.filter(is_word).map(|of| (name.clone(), of)));
            let length: i64 = get(row, "max_length")?;
            match kind.as_str() {
                "nvarchar" | "nchar" if length > 0 => lengths.insert(name.clone(), length / 2),
                "varchar" | "char" | "varbinary" | "binary" if length > 0 => lengths.insert(name.clone(), length),
                _ => None,
            };
            columns.push(IntakeColumn {
                type_name: type_name(&kind, length, get(row, "precision")?, get(row, "scale")?),
                holds,
                is_number: NUMBERS.contains(&kind.as_str()),
                not_null: !get::<bool>(row, "is_nullable")?,
                is_key: leads(&name, &|alone, primary| alone && primary),
                is_unique: leads(&name, &|alone, _| alone),
                is_generated: get(row, "is_generated")?,
                leads_index: leads(&name, &|_, _| true),
                name,
            });
        }
        let name = format!("{}.{}", quoted(&schema), quoted(&intake.table.name));
        Ok(Some(Self { name, is_table, shape: Shape { columns }, lengths, collations, tracked }))
    }

    fn type_of(&self, name: &str) -> &str {
        self.shape.column(name).map_or("nvarchar(max)", |column| &column.type_name)
    }

    /// A text of a parameter as the column's own type, so that an index on the column is used.
    fn as_its_type(&self, name: &str, text: &str) -> String {
        let kind = self.type_of(name);
        match self.shape.holds(name) {
            Holds::Bytes => format!("convert({kind}, {text}, 2)"),
            Holds::Time | Holds::LocalTime => format!("convert({kind}, {text}, 126)"),
            Holds::Json | Holds::Text => format!("convert({kind}, {text})"),
        }
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
    values: Named,
    not_taken: String,
    order: String,
}

impl Statements {
    /// What is wrong with the mapping, one line for each thing.
    pub fn of(intake: &Intake, table: Table) -> Result<Self, Vec<String>> {
        let row = intake.fits(&table.shape)?.clone();
        if NO_KEYS.iter().any(|kind| row.type_name.starts_with(kind)) {
            return Err(vec![format!(
                "row: column {:?} has the type {}, which does not identify a row",
                row.name, row.type_name
            )]);
        }
        let longest = if row.holds == Holds::Bytes { ROW_KEY_MAX / 2 } else { ROW_KEY_MAX };
        if table.lengths.get(&row.name).is_some_and(|length| *length > longest) {
            return Err(vec![format!(
                "row: column {:?} has the type {}; what identifies a row may have {longest} characters",
                row.name, row.type_name
            )]);
        }
        let (mut conditions, mut values) = (vec!["1 = 1".to_owned()], named! {});
        for (name, one_of) in &intake.pending {
            let one_of: Vec<String> = one_of
                .iter()
                .map(|value| match value {
                    Literal::Null => format!("f.{} is null", quoted(name)),
                    Literal::NotNull => format!("f.{} is not null", quoted(name)),
                    Literal::Text(text) => match number(&table, name, text) {
                        Some(number) => format!("f.{} = {number}", quoted(name)),
                        None => {
                            let parameter = format!("pending_{}", values.len());
                            let value = table.as_its_type(name, &format!("@{parameter}"));
                            values.push((parameter.into(), text.into()));
                            format!("f.{} = {value}", quoted(name))
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
            .map(|name| format!(" + coalesce(convert(bigint, datalength(f.{})), 0)", quoted(name)))
            .collect();
        let known = |names: BTreeSet<String>| names.into_iter().collect::<Vec<_>>();
        let mut made = Self {
            columns: known(intake.message.columns()),
            key_columns: known(intake.message.key_columns()),
            size: format!("(convert(bigint, 0){})", sizes.concat()),
            pending: conditions.join(" and "),
            values,
            not_taken: "1 = 1".to_owned(),
            order: order.join(", "),
            table,
            row,
        };
        if made.table.tracked {
            made.not_taken = format!(
                "not exists (select 1 from postroom_intake_rows r where r.intake = @intake and r.row_key = {})",
                made.row_key()
            );
        }
        Ok(made)
    }

    /// What identifies a row, as text.
    fn row_key(&self) -> String {
        let name = format!("f.{}", quoted(&self.row.name));
        match self.row.holds {
            Holds::Bytes => format!("convert(nvarchar(512), {name}, 2) collate {TEXT}"),
            Holds::Time | Holds::LocalTime => format!("convert(nvarchar(512), {name}, 126) collate {TEXT}"),
            _ if self.row.type_name.ends_with("money") => format!("convert(nvarchar(512), {name}, 2) collate {TEXT}"),
            _ => format!("convert(nvarchar(512), {name}) collate {TEXT}"),
        }
    }

    /// These rows, each found by its key.
    fn of_rows(&self, hints: &str) -> String {
        format!(
            "from openjson(@rows) with (row_key nvarchar(512) '$') n join {} f with ({hints}) on f.{} = {}{}",
            self.table.name,
            quoted(&self.row.name),
            self.table.as_its_type(&self.row.name, "n.row_key"),
            // Two texts of different collations are not compared.
            self.table.collations.get(&self.row.name).map(|name| format!(" collate {name}")).unwrap_or_default()
        )
    }

    /// A column as it is read.
    fn read_as(&self, name: &str) -> String {
        let column = format!("f.{}", quoted(name));
        let kind = self.table.type_of(name);
        match self.table.shape.holds(name) {
            Holds::Bytes => column,
            Holds::Time => format!("datediff_big(microsecond, '1970-01-01', switchoffset({column}, 0))"),
            Holds::LocalTime => format!("datediff_big(microsecond, '1970-01-01', {column})"),
            _ if kind == "uniqueidentifier" => format!("lower(convert(nvarchar(36), {column}))"),
            // Every digit.
            _ if kind.ends_with("money") => format!("convert(nvarchar(64), {column}, 2)"),
            _ if kind == "float" || kind == "real" => format!("convert(nvarchar(64), {column}, 3)"),
            Holds::Json | Holds::Text => format!("convert(nvarchar(max), {column})"),
        }
    }

    fn list(&self, names: &[String]) -> String {
        names.iter().enumerate().map(|(index, name)| format!(", {} as c{index}", self.read_as(name))).collect()
    }

    fn next_of(&self, extra: &str, names: &[String], intake: &str, max: i64) -> Statement {
        let sql = format!(
            "select top (@max) {} as row_key{extra}{} from {} f where {} and {} order by {}",
            self.row_key(),
            self.list(names),
            self.table.name,
            self.pending,
            self.not_taken,
            self.order
        );
        let mut parameters = self.values.clone();
        parameters.extend(named! { "intake" => intake, "max" => max });
        (sql, parameters)
    }

    /// The next rows with their sizes and keys, without a lock.
    pub fn next_keys(&self, intake: &str, max: i64) -> Statement {
        self.next_of(&format!(", {} as size", self.size), &self.key_columns, intake, max)
    }

    /// The next rows whole, without a lock.
    pub fn next(&self, intake: &str, max: i64) -> Statement {
        self.next_of("", &self.columns, intake, max)
    }

    /// Those of these rows that nobody else has locked, locked. By their keys: a statement that sorts would lock every candidate.
    pub fn free(&self, rows: &[IntakeRow]) -> Statement {
        let sql = format!(
            "select {} as row_key{} {} where {} option (loop join, force order)",
            self.row_key(),
            self.list(&self.columns),
            self.of_rows("updlock, rowlock, readcommittedlock, readpast"),
            self.pending
        );
        let keys: Vec<&str> = rows.iter().map(|row| row.row.as_str()).collect();
        let mut parameters = self.values.clone();
        parameters.extend(named! { "rows" => json(&keys) });
        (sql, parameters)
    }

    /// How many there are, up to `most`, and the time of the oldest.
    pub fn count(&self, intake: &str, occurred_at: Option<&str>, most: i64) -> Statement {
        let time = occurred_at.map_or_else(|| "convert(bigint, null)".to_owned(), |name| self.read_as(name));
        let sql = format!(
            "select count_big(*), min(p.us) from (select top (@max) {time} as us from {} f where {} and {} order by {}) p",
            self.table.name, self.pending, self.not_taken, self.order
        );
        let mut parameters = self.values.clone();
        parameters.extend(named! { "intake" => intake, "max" => most });
        (sql, parameters)
    }

    /// A row of [`next_keys`](Self::next_keys), and its size in bytes.
    pub fn keys_of(&self, row: &Row) -> Result<(IntakeRow, i64), Error> {
        Ok((self.row_of(row, 2, &self.key_columns)?, get(row, "size")?))
    }

    /// A row of the others.
    pub fn whole(&self, row: &Row) -> Result<IntakeRow, Error> {
        self.row_of(row, 1, &self.columns)
    }

    fn row_of(&self, row: &Row, first: usize, names: &[String]) -> Result<IntakeRow, Error> {
        let cells: Vec<&ColumnData<'static>> = row.cells().map(|(_, value)| value).collect();
        let read = |(index, name): (usize, &String)| {
            let value = cells.get(first + index).copied();
            let cell = match self.table.shape.holds(name) {
                Holds::Bytes => read_of(value).map(Cell::Bytes),
                Holds::Time | Holds::LocalTime => read_of(value).map(Cell::Time),
                Holds::Json => read_of(value).map(Cell::Json),
                Holds::Text => read_of(value).map(Cell::Text),
            };
            (name.clone(), cell.unwrap_or(Cell::Null))
        };
        Ok(IntakeRow { row: get(row, "row_key")?, cells: names.iter().enumerate().map(read).collect() })
    }

    /// Sets columns of rows; where a setting is the error, of one row.
    pub fn set(&self, settings: &[(String, Setting)], rows: &[String], error: Option<&str>) -> Statement {
        let mut parameters = named! { "rows" => json(rows) };
        let set: Vec<String> = settings
            .iter()
            .map(|(name, setting)| {
                let value = match setting {
                    Setting::Null => "null".to_owned(),
                    Setting::Now => NOW.to_owned(),
                    Setting::Error => {
                        let parameter = format!("set_{}", parameters.len());
                        let cut = self.table.lengths.get(name);
                        let value = match cut {
                            // By its type too: it may count bytes.
                            Some(most) => self.table.as_its_type(name, &format!("left(@{parameter}, {most})")),
                            None => format!("@{parameter}"),
                        };
                        parameters.push((parameter.into(), error.into()));
                        value
                    }
                    Setting::Text(text) => number(&self.table, name, text).unwrap_or_else(|| {
                        let parameter = format!("set_{}", parameters.len());
                        let value = self.table.as_its_type(name, &format!("@{parameter}"));
                        parameters.push((parameter.into(), text.into()));
                        value
                    }),
                };
                format!("{} = {value}", quoted(name))
            })
            .collect();
        let sql =
            format!("update f set {} {} option (loop join, force order)", set.join(", "), self.of_rows("rowlock"));
        (sql, parameters)
    }

    /// Deletes rows.
    pub fn delete(&self, rows: &[String]) -> Statement {
        let sql = format!("delete f\n {} option (loop join, force order)", self.of_rows("rowlock"));
        (sql, named! { "rows" => json(rows) })
    }
}

fn read_of<T>(value: Option<&ColumnData<'static>>) -> Option<T>
where
    Option<T>: FromColumn,
{
    value.and_then(Option::<T>::from_column).flatten()
}

/// A value of a column of numbers.
fn number(table: &Table, column: &str, text: &str) -> Option<String> {
    table.shape.column(column).filter(|column| column.is_number).and_then(|_| number_of(text))
}
