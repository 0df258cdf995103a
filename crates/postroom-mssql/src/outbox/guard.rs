//! Business statements with a guard: the right number of rows, or an error that says which key was taken.

use futures_io::{AsyncRead, AsyncWrite};
use postroom::{GuardError, expect_rows};
use tiberius::error::Error;
use tiberius::{Client, ToSql};

use crate::Mssql;
use crate::connect::is_duplicate;

impl Mssql {
    /// Executes a business statement that must change exactly `rows` rows. After any error, roll the transaction back, with everything in it,
    /// the messages too.
    pub async fn execute_guarded<S: AsyncRead + AsyncWrite + Unpin + Send>(
        &self,
        tx: &mut Client<S>,
        what: &'static str,
        rows: u64,
        sql: &str,
        parameters: &[&dyn ToSql],
    ) -> Result<(), GuardError> {
        match tx.execute(sql, parameters).await {
            Ok(done) => expect_rows(what, rows, done.total()),
            Err(error) if is_duplicate(&error) => {
                let constraint = match &error {
                    Error::Server(server) => constraint_of(server.message()).to_owned(),
                    _ => String::new(),
                };
                Err(GuardError::Conflict { what, constraint, source: error.into() })
            }
            Err(error) => Err(GuardError::Store { what, source: error.into() }),
        }
    }
}

/// `Violation of UNIQUE KEY constraint 'orders_number'. Cannot insert duplicate key in object …`, and for an index `Cannot insert duplicate key row
/// in object 'dbo.orders' with unique index 'orders_number'. …`. What was inserted comes last, and may contain anything.
fn constraint_of(message: &str) -> &str {
    let after =
        |words: &str| message.split_once(words).and_then(|(_, rest)| rest.split_once('\'')).map(|(name, _)| name);
    let (constraint, index) = (after("constraint '"), after("unique index '"));
    if message.starts_with("Violation") { constraint.unwrap_or(message) } else { index.unwrap_or(message) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_constraint_is_the_name_whatever_was_inserted() {
        for (message, name) in [
            (
                "Violation of UNIQUE KEY constraint 'number'. Cannot insert duplicate key in object 'dbo.o'. The duplicate key value is (constraint 'x').",
                "number",
            ),
            (
                "Cannot insert duplicate key row in object 'dbo.o' with unique index 'number'. The duplicate key value is (x).",
                "number",
            ),
            ("something else", "something else"),
        ] {
            assert_eq!(constraint_of(message), name);
        }
    }
}
