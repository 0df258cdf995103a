//! MariaDB and MySQL store of postroom: the writer's end, the relay's end and the receiving end, with the same contracts as on PostgreSQL.
//!
//! Under way: the operator's end is not there yet, so the program `postroom` does not know this store.

mod connect;
mod inbox;
mod link;
mod log;
mod migrate;
mod outbox;
mod routes;

pub use connect::options_of;
pub use inbox::MysqlSession;
pub use log::MysqlSource;
pub use migrate::{migrate, print_sql};

/// The outbox in MariaDB or MySQL. It has no connection of its own: it works in the caller's transaction.
#[derive(Debug, Clone, Copy, Default)]
pub struct Mysql;
