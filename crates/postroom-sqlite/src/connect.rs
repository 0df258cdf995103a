//! Opens a database file with the settings that this store needs.

use std::path::{Path, PathBuf};
use std::time::Duration;

use postroom::StoreError;
use rusqlite::types::Type;
use rusqlite::{Connection, Row};

/// How long a writer waits for another one before it is told that the database is busy.
const BUSY_TIMEOUT: Duration = Duration::from_secs(10);

/// The clock of the database.
pub(crate) const NOW: &str = "cast(unixepoch('subsec') * 1000 as integer)";

/// Opens or creates `path` in WAL mode with full durability and a busy timeout.
pub fn connect(path: &Path) -> Result<Connection, StoreError> {
    let failed = |error| store_error("open the database file", error);
    let connection = Connection::open(path).map_err(failed)?;
    connection.busy_timeout(BUSY_TIMEOUT).map_err(failed)?;
    connection.pragma_update(None, "journal_mode", "wal").map_err(failed)?;
    connection.pragma_update(None, "synchronous", "full").map_err(failed)?;
    Ok(connection)
}

/// Device and inode of a file.
pub(crate) type FileId = (u64, u64);

/// Which file a path names now. One that was replaced is another.
pub(crate) fn file_at(path: &Path) -> Option<FileId> {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(path).ok().map(|about| (about.dev(), about.ino()))
}

/// Creates the file for its owner alone, if it is not there: SQLite would let everybody read it. Its journals get the same rights.
pub(crate) fn create_private(path: &Path) -> Result<(), StoreError> {
    use std::os::unix::fs::OpenOptionsExt;
    match std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path) {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(StoreError::Unavailable {
            what: "create the database file",
            source: format!("{}: {error}", path.display()).into(),
        }),
    }
}

/// The path in a `sqlite:` URL (`sqlite:orders.db`, `sqlite:///var/lib/orders.db`).
pub fn path_of(url: &str) -> Option<PathBuf> {
    let path = url.strip_prefix("sqlite:")?;
    let path = path.strip_prefix("//").unwrap_or(path);
    (!path.is_empty()).then(|| PathBuf::from(path))
}

/// A column that holds one of our own words, as what it means.
pub(crate) fn word<T>(row: &Row<'_>, column: usize, of: impl Fn(&str) -> Option<T>) -> Result<T, rusqlite::Error> {
    let word: String = row.get(column)?;
    let unknown = || format!("{word:?} is not known to this version of postroom; use a newer one").into();
    of(&word).ok_or_else(|| rusqlite::Error::FromSqlConversionFailure(column, Type::Text, unknown()))
}

/// Sorts a driver error by what can be done about it.
pub(crate) fn store_error(what: &'static str, error: rusqlite::Error) -> StoreError {
    use rusqlite::ErrorCode;
    if let rusqlite::Error::SqliteFailure(code, Some(message)) = &error
        && code.code == ErrorCode::Unknown
        && message.starts_with("no such table: postroom_")
    {
        return StoreError::Schema { problem: message.clone(), hint: "run `postroom migrate` on this database" };
    }
    match error.sqlite_error_code() {
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked | ErrorCode::DiskFull) => {
            StoreError::Busy { what, source: error.into() }
        }
        Some(ErrorCode::CannotOpen) => StoreError::Unavailable { what, source: error.into() },
        _ => StoreError::Refused { what, source: error.into() },
    }
}
