//! The receiving side on real stores: one effect for each message, whatever is delivered again, fails, hangs or dies.

#![allow(clippy::unwrap_used)]

mod failures;
mod filling;
mod observed;
mod once;
mod processes;
mod setup;
mod sqlite;
mod sqlx;
mod straight;
mod taken;
mod unkeepable;
mod versions;
