//! The receiving end: what makes a repeated delivery harmless, and keeps messages that wait.

mod filling;
mod receiving;
mod session;

pub use session::MysqlSession;
