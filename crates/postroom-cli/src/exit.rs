//! Exit codes, the same for every command; numbers from `sysexits.h` where it has one.

use postroom::{StoreError, redact_text};

/// Done.
pub const OK: u8 = 0;
/// It failed for a reason that has no code of its own.
pub const FAILURE: u8 = 1;
/// Wrong arguments.
pub const USAGE: u8 = 2;
/// The store or the broker could not be reached.
pub const UNREACHABLE: u8 = 69;
/// Try again: something else was in the way (a lock, a deadlock, a server that is starting).
pub const TRY_AGAIN: u8 = 75;
/// The configuration file is wrong.
pub const CONFIG: u8 = 78;

/// Why a command ended, and with which code.
#[derive(Debug)]
pub struct Failure {
    /// The code.
    pub code: u8,
    /// For a person: what failed, on what, and what to do next. No secrets.
    pub text: String,
    /// Standard output has its JSON object already, which tells of this too.
    pub answered: bool,
}

impl Failure {
    pub fn new(code: u8, text: impl Into<String>) -> Self {
        // Errors of libraries may quote a URL.
        Self { code, text: redact_text(&text.into()), answered: false }
    }

    /// An error with all its causes, after "failed to".
    pub fn of(code: u8, error: &(dyn std::error::Error + 'static)) -> Self {
        Self::new(code, format!("failed to {}", chain(error)))
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        let code = match &error {
            StoreError::Busy { .. } => TRY_AGAIN,
            StoreError::Unavailable { .. } => UNREACHABLE,
            StoreError::Refused { .. } | StoreError::Schema { .. } => FAILURE,
        };
        let mut failure = Self::of(code, &error);
        if matches!(error, StoreError::Unavailable { .. }) {
            // The connection broke: a commit may have arrived although its answer did not.
            for promised in ["nothing was changed", "nothing was written"] {
                failure.text =
                    failure.text.replace(promised, "whether it was done is not known: look before you repeat it");
            }
        }
        failure
    }
}

fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        // Transparent errors repeat their cause's words.
        if !text.ends_with(&next) {
            text.push_str(": ");
            text.push_str(&next);
        }
        cause = error.source();
    }
    in_a_line(&text)
}

/// PostgreSQL's details and hints follow on lines of their own.
pub fn in_a_line(text: &str) -> String {
    text.replace("\nDETAIL: ", "; detail: ").replace("\nHINT: ", "; hint: ")
}
