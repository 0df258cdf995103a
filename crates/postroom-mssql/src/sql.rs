//! Parameters and columns: statements name their parameters, and a column is read as the type that the caller wants.

use std::borrow::Cow;

use tiberius::error::Error;
use tiberius::{ColumnData, Row, ToSql};

/// A value of a parameter. A missing one has a type too: not every type can be made of every other.
#[derive(Debug, Clone)]
pub(crate) enum Value {
    Int(Option<i64>),
    Text(Option<String>),
    Bytes(Vec<u8>),
}

impl ToSql for Value {
    fn to_sql(&self) -> ColumnData<'_> {
        match self {
            Self::Int(value) => ColumnData::I64(*value),
            Self::Text(value) => ColumnData::String(value.as_deref().map(Cow::Borrowed)),
            Self::Bytes(value) => ColumnData::Binary(Some(Cow::Borrowed(value))),
        }
    }
}

macro_rules! whole_numbers {
    ($($of:ty),*) => {$(
        impl From<$of> for Value {
            fn from(value: $of) -> Self {
                Self::Int(Some(value.into()))
            }
        }
    )*};
}

whole_numbers!(i64, i32, u32, u16, u8, bool);

impl From<usize> for Value {
    fn from(value: usize) -> Self {
        Self::Int(Some(i64::try_from(value).unwrap_or(i64::MAX)))
    }
}

impl From<Option<i64>> for Value {
    fn from(value: Option<i64>) -> Self {
        Self::Int(value)
    }
}

impl From<Option<u32>> for Value {
    fn from(value: Option<u32>) -> Self {
        Self::Int(value.map(i64::from))
    }
}

impl From<&str> for Value {
    fn from(value: &str) -> Self {
        Self::Text(Some(value.to_owned()))
    }
}

impl From<String> for Value {
    fn from(value: String) -> Self {
        Self::Text(Some(value))
    }
}

impl From<&String> for Value {
    fn from(value: &String) -> Self {
        Self::Text(Some(value.clone()))
    }
}

impl From<Option<&str>> for Value {
    fn from(value: Option<&str>) -> Self {
        Self::Text(value.map(str::to_owned))
    }
}

impl From<Option<String>> for Value {
    fn from(value: Option<String>) -> Self {
        Self::Text(value)
    }
}

impl From<Option<&String>> for Value {
    fn from(value: Option<&String>) -> Self {
        Self::Text(value.cloned())
    }
}

impl From<&[u8]> for Value {
    fn from(value: &[u8]) -> Self {
        Self::Bytes(value.to_vec())
    }
}

/// Named parameters of a statement.
pub(crate) type Named = Vec<(Cow<'static, str>, Value)>;

/// `named! { "route" => route }`: parameters that the statement calls `@route` and so on.
macro_rules! named {
    ($($name:literal => $value:expr),* $(,)?) => {
        vec![$((std::borrow::Cow::Borrowed($name), $crate::sql::Value::from($value))),*]
    };
}
pub(crate) use named;

/// The statement with the driver's names of its parameters, which are numbered.
pub(crate) fn numbered(sql: &str, parameters: &Named) -> String {
    let mut numbered = String::with_capacity(sql.len());
    let mut rest = sql;
    while let Some(at) = rest.find('@') {
        let (before, after) = rest.split_at(at);
        numbered.push_str(before);
        let length = after[1..].find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(after.len() - 1);
        let name = &after[1..=length];
        match parameters.iter().position(|(known, _)| known == name) {
            Some(index) => numbered.push_str(&format!("@P{}", index + 1)),
            // A variable of the server's, `@@trancount`.
            None => numbered.push_str(&after[..=length]),
        }
        rest = &after[length + 1..];
    }
    numbered.push_str(rest);
    numbered
}

/// What a column can be read as.
pub(crate) trait FromColumn: Sized {
    /// None: it is something else.
    fn from_column(column: &ColumnData<'static>) -> Option<Self>;
}

impl FromColumn for Option<i64> {
    fn from_column(column: &ColumnData<'static>) -> Option<Self> {
        Some(match column {
            ColumnData::I64(value) => *value,
            ColumnData::I32(value) => value.map(i64::from),
            ColumnData::I16(value) => value.map(i64::from),
            ColumnData::U8(value) => value.map(i64::from),
            ColumnData::Bit(value) => value.map(i64::from),
            _ => return None,
        })
    }
}

impl FromColumn for Option<String> {
    fn from_column(column: &ColumnData<'static>) -> Option<Self> {
        Some(match column {
            ColumnData::String(value) => value.as_ref().map(|text| text.clone().into_owned()),
            ColumnData::Guid(value) => value.map(|id| id.hyphenated().to_string()),
            _ => return None,
        })
    }
}

impl FromColumn for Option<Vec<u8>> {
    fn from_column(column: &ColumnData<'static>) -> Option<Self> {
        let ColumnData::Binary(value) = column else { return None };
        Some(value.as_ref().map(|bytes| bytes.clone().into_owned()))
    }
}

impl FromColumn for Option<f64> {
    fn from_column(column: &ColumnData<'static>) -> Option<Self> {
        Some(match column {
            ColumnData::F64(value) => *value,
            ColumnData::F32(value) => value.map(f64::from),
            _ => return None,
        })
    }
}

macro_rules! not_null {
    ($($of:ty),*) => {$(
        impl FromColumn for $of {
            fn from_column(column: &ColumnData<'static>) -> Option<Self> {
                Option::<Self>::from_column(column).flatten()
            }
        }
    )*};
}

not_null!(i64, f64, String, Vec<u8>);

macro_rules! narrower {
    ($($of:ty),*) => {$(
        impl FromColumn for $of {
            fn from_column(column: &ColumnData<'static>) -> Option<Self> {
                i64::from_column(column).and_then(|value| value.try_into().ok())
            }
        }
    )*};
}

narrower!(i16, u16, u32, i32, u64, usize);

impl FromColumn for Option<bool> {
    fn from_column(column: &ColumnData<'static>) -> Option<Self> {
        Option::<i64>::from_column(column).map(|value| value.map(|value| value != 0))
    }
}

impl FromColumn for bool {
    fn from_column(column: &ColumnData<'static>) -> Option<Self> {
        i64::from_column(column).map(|value| value != 0)
    }
}

/// A column by its name, or by its number from 0.
pub(crate) fn get<T: FromColumn>(row: &Row, column: impl Column) -> Result<T, Error> {
    let index = column.index(row)?;
    let value = row.cells().nth(index).and_then(|(_, value)| T::from_column(value));
    value.ok_or_else(|| {
        let name = row.columns().get(index).map_or("?", |column| column.name());
        Error::Conversion(format!("the column {name} is null or of another type").into())
    })
}

pub(crate) trait Column {
    fn index(&self, row: &Row) -> Result<usize, Error>;
}

impl Column for usize {
    fn index(&self, _: &Row) -> Result<usize, Error> {
        Ok(*self)
    }
}

impl Column for &str {
    fn index(&self, row: &Row) -> Result<usize, Error> {
        let found = row.columns().iter().position(|column| column.name() == *self);
        found.ok_or_else(|| Error::Conversion(format!("there is no column {self}").into()))
    }
}

/// Rows that are read as a whole, by the order of their columns.
pub(crate) trait FromRow: Sized {
    fn from_row(row: &Row) -> Result<Self, Error>;
}

impl<A: FromColumn> FromRow for A {
    fn from_row(row: &Row) -> Result<Self, Error> {
        get(row, 0)
    }
}

macro_rules! rows_of {
    ($($name:ident $index:literal),*) => {
        impl<$($name: FromColumn),*> FromRow for ($($name,)*) {
            fn from_row(row: &Row) -> Result<Self, Error> {
                Ok(($(get::<$name>(row, $index as usize)?,)*))
            }
        }
    };
}

rows_of!(A 0, B 1);
rows_of!(A 0, B 1, C 2);
rows_of!(A 0, B 1, C 2, D 3);
rows_of!(A 0, B 1, C 2, D 3, E 4);
rows_of!(A 0, B 1, C 2, D 3, E 4, F 5);
rows_of!(A 0, B 1, C 2, D 3, E 4, F 5, G 6);

/// A list for `openjson`.
pub(crate) fn json(value: &(impl serde::Serialize + ?Sized)) -> String {
    serde_json::to_string(value).unwrap_or_else(|_| "[]".to_owned())
}

/// The database's clock, in UTC.
pub(crate) const NOW: &str = "sysutcdatetime()";

/// So many microseconds after a time. The server adds at most 2^31 of a unit at once.
pub(crate) fn later(microseconds: &str, than: &str) -> String {
    format!(
        "dateadd(microsecond, {microseconds} % 1000000, \
         dateadd(second, {microseconds} / 1000000 % 60, dateadd(minute, {microseconds} / 60000000, {than})))"
    )
}

/// Refuses a name that the server would take for another one: it compares texts without their trailing spaces.
pub(crate) fn distinct(what: &str, name: &str) -> Result<(), Error> {
    if name.ends_with(' ') {
        return Err(Error::Conversion(
            format!("the name of the {what} ends with a space, which SQL Server does not see").into(),
        ));
    }
    Ok(())
}

/// Equal to the last space, where an index is not needed.
pub(crate) fn same(one: &str, other: &str) -> String {
    format!("concat({one}, N'|') = concat({other}, N'|')")
}

/// So long from now.
pub(crate) fn from_now(microseconds: &str) -> String {
    later(microseconds, NOW)
}

/// So long ago. More than a thousand years is no date any more.
pub(crate) fn ago(microseconds: &str) -> String {
    later(&format!("(-{microseconds})"), NOW)
}

/// An age in microseconds, for [`ago`].
pub(crate) fn age(age: std::time::Duration) -> i64 {
    i64::try_from(age.as_micros()).unwrap_or(i64::MAX).min(31_557_600_000_000_000)
}

/// The seconds since a time, with their fraction.
pub(crate) fn seconds_since(time: &str) -> String {
    format!("convert(float, datediff_big(microsecond, {time}, {NOW})) / 1000000")
}

/// The seconds until a time, with their fraction; 0 if it is over.
pub(crate) fn seconds_until(time: &str) -> String {
    format!(
        "case when {time} is null then null when {time} > {NOW} then convert(float, datediff_big(microsecond, {NOW}, {time})) / 1000000 \
         else convert(float, 0) end"
    )
}

/// Microseconds since 1970.
pub(crate) fn since_1970(time: &str) -> String {
    format!("datediff_big(microsecond, '1970-01-01', {time})")
}

/// A wait in microseconds, at most what the server can add to now.
pub(crate) fn microseconds(wait: std::time::Duration) -> i64 {
    const TEN_YEARS: i64 = 10 * 366 * 24 * 3_600_000_000;
    i64::try_from(wait.as_micros()).unwrap_or(i64::MAX).min(TEN_YEARS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_get_the_numbers_of_their_names() {
        let parameters = named! { "route" => "a", "key" => "b", "key_2" => 1_i64 };
        let sql = "select @key_2, @@trancount where r = @route and k = @key";
        assert_eq!(numbered(sql, &parameters), "select @P3, @@trancount where r = @P1 and k = @P2");
        assert_eq!(numbered("@route", &parameters), "@P1");
    }
}
