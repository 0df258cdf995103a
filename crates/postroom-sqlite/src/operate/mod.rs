//! What operators see of the store and do to it.

pub(crate) mod archive;
pub(crate) mod dead;
mod doctor;
mod keys;
mod listing;
pub(crate) mod operations;
mod prune;
mod receptions;
pub(crate) mod reconcile;
mod retain;
pub(crate) mod routes;
pub(crate) mod status;
mod vitals;
mod why;

pub(crate) use dead::{act_on_dead, dead_letters, dead_payload};
pub(crate) use doctor::diagnose;
pub(crate) use keys::{act_on_key, waiting_keys};
pub(crate) use listing::{message, messages, note_payload_read, send};
pub(crate) use prune::prune_step;
pub(crate) use receptions::receptions;
pub(crate) use retain::retain_step;
pub(crate) use routes::{forget_route, routes, set_route};
pub(crate) use status::{status, unrouted_topics, work_waits};
pub(crate) use vitals::{note_sizes, vitals};
pub(crate) use why::whereabouts;
