//! How strictly a route keeps messages of one key in order, and where it begins.

use crate::words::words;

/// Order within a key, per route.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Order {
    /// Strict: at most one unconfirmed message for each key; the first failure stops the key.
    #[default]
    Key,
    /// Several messages of a key are sent together, in order. If one fails, later ones in the same batch may overtake it;
    /// without a failure the order is kept.
    Pipelined,
    /// None: keys are ignored; a failed message makes no other message wait.
    None,
}

/// What happens to a key after a dead letter. Without order ([`Order::None`]) it is always `Skip`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnDead {
    /// Later messages of the key are sent without it.
    #[default]
    Skip,
    /// Later messages of the key wait until an operator retries, discards or skips the dead one.
    Block,
}

/// Where a route begins on its first run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StartAt {
    /// With the oldest message that the outbox still holds.
    #[default]
    Oldest,
    /// With the first message that commits after now.
    Now,
}

words!(Order { Key => "key", Pipelined => "pipelined", None => "none" });
words!(OnDead { Skip => "skip", Block => "block" });
words!(StartAt { Oldest => "oldest", Now => "now" });
