//! The writer's end: messages enter the outbox in the caller's transaction.

mod columns;
mod guard;
mod write;

pub(crate) use columns::values_of;
