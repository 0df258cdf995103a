//! What operators see of the store and do to it.

pub(crate) mod dead;
mod keys;
mod prune;
mod routes;
mod status;
mod why;

pub use dead::{dead_letters, dead_payload, discard_dead, retry_dead};
pub use keys::{act_on_key, waiting_keys};
pub use prune::prune_inbox;
pub use routes::{routes, set_route};
pub use status::status;
pub use why::whereabouts;
