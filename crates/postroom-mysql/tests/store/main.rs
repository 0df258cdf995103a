//! The MariaDB store against a real server.

#![allow(clippy::unwrap_used, missing_docs)]

mod conformance;
mod contract;
mod crash;
mod deeds;
mod fixture;
mod intake;
mod order;
mod plans;
mod relays;
