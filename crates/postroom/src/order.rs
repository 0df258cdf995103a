//! How strictly a route keeps messages of one key in order.

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

impl Order {
    /// The word in the configuration and in the database.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Key => "key",
            Self::Pipelined => "pipelined",
            Self::None => "none",
        }
    }

    /// The order of that word.
    pub fn of(word: &str) -> Option<Self> {
        [Self::Key, Self::Pipelined, Self::None].into_iter().find(|order| order.as_str() == word)
    }
}

impl OnDead {
    /// The word in the configuration and in the database.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Skip => "skip",
            Self::Block => "block",
        }
    }

    /// What that word says.
    pub fn of(word: &str) -> Option<Self> {
        [Self::Skip, Self::Block].into_iter().find(|on_dead| on_dead.as_str() == word)
    }
}
