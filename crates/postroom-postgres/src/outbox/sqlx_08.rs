//! The adapter for sqlx 0.8.

/// What `sqlx` 0.8 is made of, under its names.
mod sqlx {
    pub use sqlx_core_08::error::Error;
    pub use sqlx_core_08::query::query;
    pub use sqlx_core_08::transaction::Transaction;
    pub use sqlx_postgres_08::Postgres;
}

// One text for two versions of the driver: their types differ, what is said to them does not.
#[allow(clippy::duplicate_mod)]
#[path = "sqlx_adapter.rs"]
mod adapter;
