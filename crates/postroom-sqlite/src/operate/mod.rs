//! What operators see of the store and do to it.

mod dead;
mod keys;
mod prune;
pub(crate) mod routes;
mod status;
mod why;

pub(crate) use dead::{act_on_dead, dead_letters, dead_payload};
pub(crate) use keys::{act_on_key, waiting_keys};
pub(crate) use prune::prune_step;
pub(crate) use routes::{routes, set_route};
pub(crate) use status::{status, unrouted_topics};
pub(crate) use why::whereabouts;
