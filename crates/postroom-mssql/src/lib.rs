//! SQL Server store of postroom: the writer's end, the relay's end, the receiving end and the operator's end, with the same contracts as on
//! PostgreSQL.
//!
//! **It was never run on a SQL Server**: none can be had where postroom is built. Its statements are read by a T-SQL grammar that is not
//! ours, and the suites of stores pass with them on an emulation, which has neither SQL Server's locks nor its planner. Run the suites on a server of your
//! own before you use it: docs/mssql.md says how.

mod conn;
mod connect;
mod database;
mod desk;
mod inbox;
mod intake;
mod link;
mod log;
mod migrate;
mod operate;
mod outbox;
mod routes;
mod sql;

pub use conn::{Conn, Driver};
pub use connect::{Settings, connect, settings_of};
pub use database::Database;
pub use inbox::{MssqlSession, Transaction};
pub use log::MssqlSource;
pub use migrate::{migrate, print_sql};

/// The outbox in SQL Server. It has no connection of its own: it works in the caller's transaction.
#[derive(Debug, Clone, Copy, Default)]
pub struct Mssql;
