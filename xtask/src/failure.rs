//! Why a command could not do its work, and the exit code that says so.

use std::fmt;
use std::io;

#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) code: u8,
    text: String,
}

impl Failure {
    /// The work failed.
    pub(crate) fn work(text: impl Into<String>) -> Self {
        Self { code: 1, text: text.into() }
    }

    /// The caller has to change something first: the arguments, or what is installed.
    pub(crate) fn usage(text: impl Into<String>) -> Self {
        Self { code: 2, text: text.into() }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.text)
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::work(format!("failed to {error}"))
    }
}
