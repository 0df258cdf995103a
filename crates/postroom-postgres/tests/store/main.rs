//! The PostgreSQL store against a real server.

#![allow(clippy::unwrap_used, missing_docs)]

mod adapters;
mod bytes;
mod contract;
mod deaths;
mod leases;
mod log_source;
mod migrations;
mod parked;
mod plans;
mod restore;
mod setup;
mod transactions;
mod trouble;
