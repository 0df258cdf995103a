//! The writer's end: messages enter the outbox in the caller's transaction.

#[cfg(any(feature = "rusqlite", feature = "sqlx"))]
pub(crate) mod columns;
#[cfg(feature = "rusqlite")]
mod guard;
#[cfg(feature = "rusqlite")]
mod rusqlite;
#[cfg(feature = "sqlx")]
mod sqlx;

#[cfg(feature = "rusqlite")]
pub(crate) use rusqlite::enqueue;
