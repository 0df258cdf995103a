//! What a SQLite file has that can lose messages, or let it grow.

use std::path::Path;

use postroom::{Diagnosis, Severity, StoreError};
use rusqlite::Connection;

use crate::connect::store_error;
use crate::migrate::{schema_version, version};

/// Part of the file that is free, from which on it is worth a word.
const MUCH_FREE: f64 = 0.5;
const WORTH_IT: i64 = 100 << 20;

/// Looks at the file; changes nothing.
pub(crate) fn diagnose(connection: &Connection, path: &Path) -> Result<Vec<Diagnosis>, StoreError> {
    let failed = |error| store_error("examine the store", error);
    let mut found = Vec::new();
    let library: String = connection.query_row("select sqlite_version()", [], |row| row.get(0)).map_err(failed)?;
    found.push(Diagnosis::fine("server-version", format!("SQLite {library}, in this program")));
    let (present, known) = (version(connection)?, schema_version());
    found.push(if present < known {
        let told = format!("the schema is at version {present}, and this program knows {known}");
        Diagnosis::of("schema-version", Severity::Warning, told, "postroom migrate")
    } else {
        Diagnosis::fine("schema-version", format!("the schema is at version {present}"))
    });
    let sql = "select f.freelist_count, c.page_count, s.page_size from pragma_freelist_count() f, pragma_page_count() c, pragma_page_size() s";
    let (free, pages, size): (i64, i64, i64) =
        connection.query_row(sql, [], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?))).map_err(failed)?;
    found.push(Diagnosis::unless(
        free * size > WORTH_IT && free as f64 > MUCH_FREE * pages as f64,
        ("dead-rows", "little of the file is unused"),
        Severity::Note,
        &format!(
            "{} MiB of the file are unused; new rows use them, but the file does not become smaller",
            (free * size) >> 20
        ),
        "vacuum; while no relay and no writer runs",
    ));
    found.push(readers(path));
    Ok(found)
}

#[cfg(unix)]
fn readers(path: &Path) -> Diagnosis {
    use std::os::unix::fs::PermissionsExt;
    let mode = std::fs::metadata(path).map_or(0, |about| about.permissions().mode());
    Diagnosis::unless(
        mode & 0o007 != 0,
        ("file-permissions", "other users of this machine cannot open the file"),
        Severity::Warning,
        "other users of this machine can open the file, with all payloads in it",
        &format!("chmod o-rwx {}", path.display()),
    )
}

#[cfg(not(unix))]
fn readers(_: &Path) -> Diagnosis {
    Diagnosis::unknown("file-permissions", "permissions are not looked at on this system", "look at them yourself")
}
