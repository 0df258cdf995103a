//! The writer's end: messages enter the outbox in the caller's transaction.

pub(crate) mod columns;
#[cfg(feature = "tokio-postgres")]
mod guard;
#[cfg(feature = "sqlx-08")]
mod sqlx_08;
#[cfg(feature = "sqlx")]
mod sqlx_09;
#[cfg(feature = "tokio-postgres")]
mod tokio_postgres;
