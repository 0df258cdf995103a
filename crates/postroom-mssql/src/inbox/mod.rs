//! The receiving end: what makes a repeated delivery harmless, and keeps messages that wait.

mod filling;
mod once;
mod queue;
mod receiving;
mod session;

pub(crate) use receiving::ABOUT_VALUES;
pub use session::{MssqlSession, Transaction};
