//! The adapter for sqlx 0.9.

use ::sqlx;

// One text for two versions of the driver: their types differ, what is said to them does not.
#[allow(clippy::duplicate_mod)]
#[path = "sqlx_adapter.rs"]
mod adapter;
