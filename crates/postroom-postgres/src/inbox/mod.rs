//! The receiving end: what makes a repeated delivery harmless, and keeps messages that wait. One file a driver; `statements.rs` is what
//! they share.

mod driver;
#[cfg(feature = "tokio-postgres")]
mod once;
#[cfg(feature = "sqlx")]
mod sqlx;
mod statements;
#[cfg(feature = "tokio-postgres")]
mod tokio_postgres;

#[cfg(feature = "sqlx")]
pub use self::sqlx::{SqlxPostgres, SqlxSession};
#[cfg(feature = "tokio-postgres")]
pub use self::tokio_postgres::PostgresSession;
