//! SQLite store of postroom: the same contracts as on PostgreSQL, on one file.
//!
//! Use WAL mode and immediate transactions for writing ([`connect`] sets up a connection that way): a deferred
//! transaction that reads before it enqueues may be refused with `SQLITE_BUSY` when another writer came in between.

mod columns;
#[cfg(feature = "rusqlite")]
mod connect;
#[cfg(feature = "rusqlite")]
mod dead;
#[cfg(feature = "rusqlite")]
mod filling;
#[cfg(feature = "rusqlite")]
mod guard;
#[cfg(feature = "rusqlite")]
mod inbox;
#[cfg(feature = "rusqlite")]
mod keys;
#[cfg(feature = "rusqlite")]
mod migrate;
#[cfg(feature = "rusqlite")]
mod outbox;
#[cfg(feature = "rusqlite")]
mod receiving;
#[cfg(feature = "rusqlite")]
mod record;
#[cfg(feature = "rusqlite")]
mod routes;
#[cfg(feature = "rusqlite")]
mod row;
#[cfg(feature = "rusqlite")]
mod source;
#[cfg(feature = "sqlx")]
mod sqlx_outbox;
#[cfg(feature = "rusqlite")]
mod status;
#[cfg(feature = "rusqlite")]
mod watch;

#[cfg(feature = "rusqlite")]
pub use connect::{connect, path_of};
#[cfg(feature = "rusqlite")]
pub use dead::{dead_letters, dead_payload, discard_dead, retry_dead};
#[cfg(feature = "rusqlite")]
pub use inbox::prune_inbox;
#[cfg(feature = "rusqlite")]
pub use keys::{act_on_key, waiting_keys, whereabouts};
#[cfg(feature = "rusqlite")]
pub use migrate::{MigrateError, migrate, print_sql};
#[cfg(feature = "rusqlite")]
pub use receiving::{SqliteSession, SqliteTransaction};
#[cfg(feature = "rusqlite")]
pub use routes::{routes, set_route};
#[cfg(feature = "rusqlite")]
pub use source::{SqliteSource, SqliteSourceOptions};
#[cfg(feature = "rusqlite")]
pub use status::status;

/// The outbox and the inbox in SQLite. It has no connection of its own: it works in the caller's transaction.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sqlite;
