//! Guards of a business transaction: if a statement changed the wrong number of rows, or violated a unique key, the transaction
//! ends with a specific error, so that neither business rows nor messages are committed.

use crate::error::BoxError;

/// Why a transaction must not continue. Return it with `?`: the transaction is dropped, which rolls everything back.
#[derive(Debug, thiserror::Error)]
pub enum GuardError {
    /// Somebody else changed the rows in between, or they were never there.
    #[error("{what}: changed {actual} rows where {expected} were expected; everything is rolled back")]
    RowCount {
        /// What was being done.
        what: &'static str,
        /// Rows that should have changed.
        expected: u64,
        /// Rows that did change.
        actual: u64,
    },
    /// A unique key was already taken: it was done before, or by somebody else.
    #[error("{what}: {constraint} is already taken; everything is rolled back")]
    Conflict {
        /// What was being done.
        what: &'static str,
        /// The constraint, as far as the database names it.
        constraint: String,
        /// The driver's error.
        #[source]
        source: BoxError,
    },
    /// The database refused for another reason.
    #[error("{what}; everything is rolled back")]
    Store {
        /// What was being done.
        what: &'static str,
        /// The driver's error.
        #[source]
        source: BoxError,
    },
}

/// Requires that a statement changed exactly `expected` rows.
///
/// ```
/// use postroom::{GuardError, expect_rows};
/// # fn update() -> u64 { 0 }
/// let changed = update(); // rows that `update orders set … where id = … and version = …` changed
/// assert!(matches!(expect_rows("place the order", 1, changed), Err(GuardError::RowCount { actual: 0, .. })));
/// ```
pub fn expect_rows(what: &'static str, expected: u64, actual: u64) -> Result<(), GuardError> {
    if actual == expected { Ok(()) } else { Err(GuardError::RowCount { what, expected, actual }) }
}
