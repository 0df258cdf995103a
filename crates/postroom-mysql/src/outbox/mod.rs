//! The writer's end: messages enter the outbox in the caller's transaction.

mod columns;
mod guard;
mod mysql_async;
#[cfg(feature = "sqlx")]
mod sqlx;

pub(crate) use mysql_async::encoded;
