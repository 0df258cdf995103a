//! The writer's end: messages enter the outbox in the caller's transaction.

mod mysql_async;

pub(crate) use mysql_async::encoded;
