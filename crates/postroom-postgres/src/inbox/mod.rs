//! The receiving end: what makes a repeated delivery harmless, and keeps messages that wait.

#[cfg(feature = "tokio-postgres")]
mod filling;
#[cfg(feature = "tokio-postgres")]
mod once;
#[cfg(feature = "tokio-postgres")]
mod receiving;
#[cfg(feature = "sqlx")]
mod sqlx_filling;
#[cfg(feature = "sqlx")]
mod sqlx_receiving;

#[cfg(feature = "tokio-postgres")]
pub use receiving::PostgresSession;
#[cfg(feature = "sqlx")]
pub use sqlx_receiving::{SqlxPostgres, SqlxSession};
