//! The receiving end: what makes a repeated delivery harmless, and keeps messages that wait.

mod filling;
mod once;
mod receiving;

pub use receiving::{SqliteSession, SqliteTransaction};
