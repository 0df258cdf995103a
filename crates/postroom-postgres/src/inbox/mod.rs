//! The receiving end: what makes a repeated delivery harmless, and keeps messages that wait. One file a driver; `statements.rs` is what
//! they share.

mod driver;
#[cfg(feature = "tokio-postgres")]
mod once;
#[cfg(feature = "sqlx-08")]
mod sqlx_08;
#[cfg(feature = "sqlx")]
mod sqlx_09;
mod statements;
#[cfg(feature = "tokio-postgres")]
mod tokio_postgres;

#[cfg(feature = "sqlx-08")]
pub use self::sqlx_08::{SqlxPostgres as Sqlx08Postgres, SqlxSession as Sqlx08Session};
#[cfg(feature = "sqlx")]
pub use self::sqlx_09::{SqlxPostgres, SqlxSession};
#[cfg(feature = "tokio-postgres")]
pub use self::tokio_postgres::PostgresSession;
