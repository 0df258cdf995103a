//! The receiving end: what makes a repeated delivery harmless, and keeps messages that wait.

mod filling;
mod once;
mod queue;
mod receiving;
mod session;

#[cfg(feature = "sqlx")]
pub(crate) use once::ADMIT_SQL;
pub(crate) use receiving::ABOUT_VALUES;
pub use session::MysqlSession;
