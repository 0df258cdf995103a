//! Business statements with a guard: the right number of rows, or an error that says which key was taken.

use mysql_async::prelude::Queryable;
use mysql_async::{Error, Params, Transaction};
use postroom::{GuardError, expect_rows};

use crate::Mysql;
use crate::connect::DUPLICATE_ENTRY;

impl Mysql {
    /// Executes a business statement that must change exactly `rows` rows. A row that already had the new values is not a changed one, unless the
    /// connection was opened with `client_found_rows`. After any error, drop the transaction, which rolls back everything in it, the messages
    /// too.
    pub async fn execute_guarded(
        &self,
        tx: &mut Transaction<'_>,
        what: &'static str,
        rows: u64,
        sql: &str,
        parameters: impl Into<Params>,
    ) -> Result<(), GuardError> {
        match tx.exec_drop(sql, parameters.into()).await {
            Ok(()) => expect_rows(what, rows, tx.affected_rows()),
            Err(Error::Server(server)) if server.code == DUPLICATE_ENTRY => {
                let constraint = constraint_of(&server.message).to_owned();
                Err(GuardError::Conflict { what, constraint, source: Error::Server(server).into() })
            }
            Err(error) => Err(GuardError::Store { what, source: error.into() }),
        }
    }
}

/// `Duplicate entry 'o-17' for key 'orders_number'`: the entry may contain anything, the name does not.
fn constraint_of(message: &str) -> &str {
    let name = message.rsplit_once("for key '").map_or(message, |(_, name)| name);
    name.strip_suffix('\'').unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_constraint_is_the_name_behind_whatever_was_entered() {
        for (message, name) in [
            ("Duplicate entry 'o-17' for key 'number'", "number"),
            ("Duplicate entry 'x' for key 'y'' for key 'orders.PRIMARY'", "orders.PRIMARY"),
            ("something else", "something else"),
        ] {
            assert_eq!(constraint_of(message), name);
        }
    }
}
