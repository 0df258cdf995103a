//! SQLite store of postroom: the same contracts as on PostgreSQL, on one file.
//!
//! Use WAL mode and immediate transactions for writing ([`connect`] sets up a connection that way): a deferred
//! transaction that reads before it enqueues may be refused with `SQLITE_BUSY` when another writer came in between.

#[cfg(feature = "rusqlite")]
mod connect;
#[cfg(feature = "rusqlite")]
mod inbox;
#[cfg(feature = "rusqlite")]
mod log;
#[cfg(feature = "rusqlite")]
mod migrate;
#[cfg(feature = "rusqlite")]
mod operate;
mod outbox;

#[cfg(feature = "rusqlite")]
pub use connect::{connect, path_of};
#[cfg(feature = "rusqlite")]
pub use inbox::{SqliteSession, SqliteTransaction};
#[cfg(feature = "rusqlite")]
pub use log::{SqliteSource, SqliteSourceOptions};
#[cfg(feature = "rusqlite")]
pub use migrate::{MigrateError, migrate, print_sql};
#[cfg(feature = "rusqlite")]
pub use operate::{
    act_on_key, dead_letters, dead_payload, discard_dead, prune_inbox, retry_dead, routes, set_route, status,
    waiting_keys, whereabouts,
};

/// The outbox and the inbox in SQLite. It has no connection of its own: it works in the caller's transaction.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sqlite;
