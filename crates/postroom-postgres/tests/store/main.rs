//! The PostgreSQL store against a real server.

#![allow(clippy::unwrap_used, missing_docs)]

mod adapters;
mod bytes;
mod changed;
mod commits;
mod conformance;
mod connections;
mod contract;
mod deaths;
mod fixture;
mod intake;
mod leases;
mod log_source;
mod migrations;
mod operations;
mod parked;
mod plans;
mod pooler;
mod restore;
mod retention;
mod roles;
mod safe_names;
mod setup;
mod surroundings;
mod taking;
mod tls;
mod transactions;
mod trouble;
mod truth;
