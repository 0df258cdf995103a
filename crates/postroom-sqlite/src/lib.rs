//! SQLite store of postroom: the same contracts as on PostgreSQL, on one file.
//!
//! Use WAL mode and immediate transactions for writing ([`connect`] sets up a connection that way): a deferred
//! transaction that reads before it enqueues may fail with `SQLITE_BUSY` if another writer has written in between.

#[cfg(feature = "rusqlite")]
mod connect;
#[cfg(feature = "rusqlite")]
mod database;
#[cfg(feature = "rusqlite")]
mod inbox;
#[cfg(feature = "rusqlite")]
mod intake;
#[cfg(feature = "rusqlite")]
mod log;
#[cfg(feature = "rusqlite")]
mod migrate;
#[cfg(feature = "rusqlite")]
mod operate;
mod outbox;
#[cfg(feature = "rusqlite")]
mod text;

#[cfg(feature = "rusqlite")]
pub use connect::{connect, path_of};
#[cfg(feature = "rusqlite")]
pub use database::Database;
#[cfg(feature = "rusqlite")]
pub use inbox::{SqliteSession, SqliteTransaction};
#[cfg(feature = "rusqlite")]
pub use log::SqliteSource;
#[cfg(feature = "rusqlite")]
pub use migrate::{migrate, print_sql};
/// The outbox and the inbox in SQLite. It has no connection of its own: it works in the caller's transaction.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sqlite;
