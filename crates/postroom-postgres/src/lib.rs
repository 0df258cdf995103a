//! PostgreSQL store of postroom: the outbox that applications write into, the inbox that makes repeated deliveries
//! harmless, and the log source that relays read from.
//!
//! The tables and `postroom.enqueue(…)` are the contract for every language; see `migrations/0001_foundation.sql`.
//! A transaction that writes messages should lock its aggregate's row before it enqueues: order within a key is the order
//! in which transactions took that lock.

mod columns;
#[cfg(feature = "sqlx")]
mod sqlx_filling;
#[cfg(feature = "sqlx")]
mod sqlx_outbox;
#[cfg(feature = "sqlx")]
mod sqlx_receiving;

#[cfg(feature = "tokio-postgres")]
mod connect;
#[cfg(feature = "tokio-postgres")]
mod dead;
#[cfg(feature = "tokio-postgres")]
mod filling;
#[cfg(feature = "tokio-postgres")]
mod guard;
#[cfg(feature = "tokio-postgres")]
mod inbox;
#[cfg(feature = "tokio-postgres")]
mod keys;
#[cfg(feature = "tokio-postgres")]
mod lanes;
#[cfg(feature = "tokio-postgres")]
mod link;
#[cfg(feature = "tokio-postgres")]
mod log_source;
#[cfg(feature = "tokio-postgres")]
mod migrate;
#[cfg(feature = "tokio-postgres")]
mod notify;
#[cfg(feature = "tokio-postgres")]
mod outbox;
#[cfg(feature = "tokio-postgres")]
mod position;
#[cfg(feature = "tokio-postgres")]
mod receiving;
#[cfg(feature = "tokio-postgres")]
mod record;
#[cfg(feature = "tokio-postgres")]
mod routes;
#[cfg(feature = "tokio-postgres")]
mod row;
#[cfg(feature = "tokio-postgres")]
mod seeded;
#[cfg(feature = "tokio-postgres")]
mod status;
#[cfg(feature = "tokio-postgres")]
mod text;
#[cfg(feature = "tokio-postgres")]
mod watch;
#[cfg(feature = "tokio-postgres")]
mod why;

#[cfg(feature = "tokio-postgres")]
pub use connect::{Connector, InvalidUrl};
#[cfg(feature = "tokio-postgres")]
pub use dead::{dead_letters, dead_payload, discard_dead, retry_dead};
#[cfg(feature = "tokio-postgres")]
pub use inbox::prune_inbox;
#[cfg(feature = "tokio-postgres")]
pub use keys::{act_on_key, waiting_keys};
#[cfg(feature = "tokio-postgres")]
pub use log_source::{LogSource, LogSourceOptions, POSITIONS_EVERY, ReadCounters, StartAt};
#[cfg(feature = "tokio-postgres")]
pub use migrate::{LANES_DEFAULT, MigrateError, Migrated, migrate, print_sql, schema_version};
#[cfg(feature = "tokio-postgres")]
pub use notify::{Listener, Notifier};
#[cfg(feature = "tokio-postgres")]
pub use receiving::PostgresSession;
#[cfg(feature = "tokio-postgres")]
pub use routes::{routes, set_route};
#[cfg(feature = "tokio-postgres")]
pub use status::status;
#[cfg(feature = "tokio-postgres")]
pub use why::whereabouts;

#[cfg(feature = "sqlx")]
pub use sqlx_receiving::{SqlxPostgres, SqlxSession};

/// The outbox and the inbox in PostgreSQL. It has no connection of its own: it works in the caller's transaction.
///
/// Implements `Outbox` and `Inbox` for `tokio_postgres::Transaction` (feature `tokio-postgres`) and `Outbox` and `Inbox`
/// for `sqlx::Transaction<'_, sqlx::Postgres>` (feature `sqlx`), and for nothing that is not a transaction.
#[derive(Debug, Clone, Copy, Default)]
pub struct Postgres;
