//! Text columns as they come: SQLite takes any bytes for text, and one row that is not UTF-8 must not hide all others.

use rusqlite::Row;
use rusqlite::types::{FromSql, FromSqlError, FromSqlResult, ValueRef};

/// A text, with `U+FFFD` for what could not be read.
pub(crate) struct Text {
    pub text: String,
    /// Every byte was UTF-8.
    pub whole: bool,
}

impl FromSql for Text {
    fn column_result(value: ValueRef<'_>) -> FromSqlResult<Self> {
        let (ValueRef::Text(bytes) | ValueRef::Blob(bytes)) = value else { return Err(FromSqlError::InvalidType) };
        Ok(match std::str::from_utf8(bytes) {
            Ok(text) => Self { text: text.to_owned(), whole: true },
            Err(_) => Self { text: String::from_utf8_lossy(bytes).into_owned(), whole: false },
        })
    }
}

/// The text of a column.
pub(crate) fn text(row: &Row<'_>, column: usize) -> Result<String, rusqlite::Error> {
    row.get::<_, Text>(column).map(|text| text.text)
}

/// The text of a column that may be null.
pub(crate) fn text_or_null(row: &Row<'_>, column: usize) -> Result<Option<String>, rusqlite::Error> {
    Ok(row.get::<_, Option<Text>>(column)?.map(|text| text.text))
}
