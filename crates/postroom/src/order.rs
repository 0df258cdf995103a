//! How strictly a route keeps messages of one key in order, and where it begins.

use crate::words::words;

/// Order within a key, per route.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Order {
    /// Strict: at most one unconfirmed message of a key; the first failure stops the key.
    #[default]
    Key,
    /// Several messages of a key go out together, in order. A failure may let those behind it in the same batch overtake it;
    /// without a failure the order is kept.
    Pipelined,
    /// None: keys are not looked at, a failed message waits alone.
    None,
}

/// What becomes of a key whose message is dead. Without order ([`Order::None`]) it is always `Skip`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnDead {
    /// Later messages of the key go on without it.
    #[default]
    Skip,
    /// Later messages of the key wait until an operator retries, discards or skips the dead one.
    Block,
}

/// Where a route begins that has never run.
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
