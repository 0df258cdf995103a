//! Text columns as they come: a database in the encoding SQL_ASCII checks nothing, so bytes may be there that are no UTF-8.

use postroom::{BoxError, StoreError};
use tokio_postgres::Row;
use tokio_postgres::types::{FromSql, Type};

use crate::log::row::get;

/// A text, with `U+FFFD` for what could not be read.
#[derive(Debug)]
pub(crate) struct Text {
    pub text: String,
    /// Every byte was UTF-8.
    pub whole: bool,
}

impl<'a> FromSql<'a> for Text {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn std::error::Error + Sync + Send>> {
        Ok(match std::str::from_utf8(raw) {
            Ok(text) => Self { text: text.to_owned(), whole: true },
            Err(_) => Self { text: String::from_utf8_lossy(raw).into_owned(), whole: false },
        })
    }

    fn accepts(ty: &Type) -> bool {
        [Type::TEXT, Type::VARCHAR].contains(ty)
    }
}

/// Reads text columns of one row, and notes which of them are not UTF-8.
#[derive(Default)]
pub(crate) struct Texts {
    unreadable: Vec<String>,
}

impl Texts {
    pub fn get(&mut self, row: &Row, column: &str) -> Result<String, StoreError> {
        Ok(self.get_opt(row, column)?.unwrap_or_default())
    }

    pub fn get_opt(&mut self, row: &Row, column: &str) -> Result<Option<String>, StoreError> {
        let text: Option<Text> = get(row, column)?;
        if text.as_ref().is_some_and(|text| !text.whole) {
            self.unreadable.push(column.to_owned());
        }
        Ok(text.map(|text| text.text))
    }

    /// Why the row cannot be sent as it is.
    pub fn unreadable(self) -> Option<String> {
        let columns = self.unreadable.join(", ");
        (!columns.is_empty()).then(|| format!("not UTF-8: {columns}; the database does not check its encoding"))
    }
}

/// A column for a person to read.
pub(crate) fn shown(row: &Row, column: usize) -> Result<String, tokio_postgres::Error> {
    Ok(shown_opt(row, column)?.unwrap_or_default())
}

/// The same of one that may be null.
pub(crate) fn shown_opt(row: &Row, column: usize) -> Result<Option<String>, tokio_postgres::Error> {
    Ok(row.try_get::<_, Option<Text>>(column)?.map(|text| text.text))
}

/// A column that holds one of our own words, as what it means.
pub(crate) fn word<T>(row: &Row, column: usize, of: impl Fn(&str) -> Option<T>) -> Result<T, BoxError> {
    let word = shown(row, column)?;
    of(&word).ok_or_else(|| format!("{word:?} is not known to this version of postroom; use a newer one").into())
}
