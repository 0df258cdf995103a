//! Errors that are part of the contracts.

/// The cause of an error, of any type.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Why a store did not do what it was asked to do.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The store could not be reached, or the connection broke; the same call may succeed later.
    #[error("reach the store ({what})")]
    Unavailable {
        /// What was being done.
        what: &'static str,
        /// The driver's error.
        #[source]
        source: BoxError,
    },
    /// The store was reached and could not do it now: a lock timeout, a deadlock, a serialization failure, a server that
    /// starts or stops, resources used up. The same call may succeed later.
    #[error("{what}; the store is busy")]
    Busy {
        /// What was being done.
        what: &'static str,
        /// The driver's error.
        #[source]
        source: BoxError,
    },
    /// The store answered, and rejected the request.
    #[error("{what}")]
    Refused {
        /// What was being done.
        what: &'static str,
        /// The store's answer.
        #[source]
        source: BoxError,
    },
    /// The schema is missing, older or newer than this program.
    #[error("use the schema: {problem}; {hint}")]
    Schema {
        /// What is wrong.
        problem: String,
        /// What to do next.
        hint: &'static str,
    },
}

impl StoreError {
    /// Whether the same call may succeed later without anyone changing anything.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Unavailable { .. } | Self::Busy { .. })
    }
}

/// The broker was not asked, or cannot be reached at the moment: this is no verdict on any message.
#[derive(Debug, thiserror::Error)]
#[error("reach {what}")]
pub struct Unavailable {
    what: String,
    #[source]
    source: BoxError,
}

impl Unavailable {
    /// `what` names the broker; it must not contain a secret.
    pub fn new(what: impl Into<String>, source: impl Into<BoxError>) -> Self {
        Self { what: what.into(), source: source.into() }
    }
}
