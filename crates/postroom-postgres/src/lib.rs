//! PostgreSQL store of postroom: the outbox that applications write into, the inbox that makes repeated deliveries
//! harmless, and the log source that relays read from.
//!
//! The tables and `postroom.enqueue(…)` are the contract for every language; see `migrations/0001_foundation.sql`.
//! A transaction that writes messages should lock its aggregate's row before it enqueues: order within a key is the order
//! in which transactions took that lock.

#[cfg(any(feature = "tokio-postgres", feature = "sqlx", feature = "sqlx-08"))]
mod inbox;
#[cfg(feature = "tokio-postgres")]
mod intake;
#[cfg(any(feature = "tokio-postgres", feature = "sqlx", feature = "sqlx-08"))]
mod outbox;

#[cfg(feature = "tokio-postgres")]
mod connect;
#[cfg(feature = "tokio-postgres")]
mod database;
#[cfg(feature = "tokio-postgres")]
mod link;
#[cfg(feature = "tokio-postgres")]
mod log;
#[cfg(feature = "tokio-postgres")]
mod migrate;
#[cfg(feature = "tokio-postgres")]
mod operate;
#[cfg(feature = "tokio-postgres")]
mod text;
#[cfg(feature = "tokio-postgres")]
mod tls;

#[cfg(feature = "tokio-postgres")]
pub use connect::{Connector, InvalidUrl};
#[cfg(feature = "tokio-postgres")]
pub use database::Database;
#[cfg(feature = "tokio-postgres")]
pub use inbox::PostgresSession;
#[cfg(feature = "sqlx-08")]
pub use inbox::{Sqlx08Postgres, Sqlx08Session};
#[cfg(feature = "sqlx")]
pub use inbox::{SqlxPostgres, SqlxSession};
#[cfg(feature = "tokio-postgres")]
pub use log::{Listener, LogSource, Notifier, ReadCounters};
#[cfg(feature = "tokio-postgres")]
pub use migrate::{migrate, print_sql, schema_version};
/// The outbox and the inbox in PostgreSQL. It has no connection of its own: it works in the caller's transaction.
///
/// Implements `Outbox` and `Inbox` for `tokio_postgres::Transaction` (feature `tokio-postgres`) and for
/// `sqlx::Transaction<'_, sqlx::Postgres>` (feature `sqlx` for sqlx 0.9, `sqlx-08` for sqlx 0.8), and only for
/// transactions.
#[derive(Debug, Clone, Copy, Default)]
pub struct Postgres;
