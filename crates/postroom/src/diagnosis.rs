//! What `postroom doctor` finds in a store.

use serde::Serialize;

use crate::words::words;

/// How bad something is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// As it should be.
    Fine,
    /// It could not be looked at.
    Unknown,
    /// Worth knowing.
    Note,
    /// It will become a problem, or makes another one worse.
    Warning,
    /// Messages can be lost, or are not sent.
    Danger,
}

words!(Severity { Fine => "fine", Unknown => "unknown", Note => "note", Warning => "warning", Danger => "danger" });

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Diagnosis {
    /// Names the question; does not change between versions. `postroom explain CODE` tells more.
    pub code: &'static str,
    /// How bad it is.
    pub severity: Severity,
    /// What was found, in words.
    pub found: String,
    /// What to do about it: a statement or a command, where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
}

impl Diagnosis {
    /// It is as it should be.
    pub fn fine(code: &'static str, found: impl Into<String>) -> Self {
        Self { code, severity: Severity::Fine, found: found.into(), advice: None }
    }

    /// It could not be looked at.
    pub fn unknown(code: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { code, severity: Severity::Unknown, found: found.into(), advice: Some(advice.into()) }
    }

    /// It is not as it should be.
    pub fn of(code: &'static str, severity: Severity, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { code, severity, found: found.into(), advice: Some(advice.into()) }
    }

    /// Fine, unless `problem` holds.
    pub fn unless(problem: bool, fine: (&'static str, &str), severity: Severity, found: &str, advice: &str) -> Self {
        let (code, good) = fine;
        if problem { Self::of(code, severity, found, advice) } else { Self::fine(code, good) }
    }
}
