//! One call: who asks, and for what.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use postroom::{Deed, MessageId, OperationId, Side, Store, is_unseen};
use serde::de::DeserializeOwned;

use super::problem::Problem;
use crate::admin::tokens::Admitted;

/// Ten years.
pub(super) const SECONDS_MAX: i64 = 315_360_000;

/// What a handler gets.
pub(super) struct Call {
    pub who: Admitted,
    pub store: Arc<dyn Store>,
    pub path: BTreeMap<String, String>,
    pub query: BTreeMap<String, String>,
    pub body: axum::body::Bytes,
}

impl Call {
    /// A part of the path.
    pub fn part(&self, name: &str) -> Result<&str, Problem> {
        let part = self.path.get(name).map(String::as_str).unwrap_or_default();
        if part.is_empty() || part.len() > 512 || part.contains('\0') {
            return Err(Problem::bad("bad-path", format!("{name} must have 1 to 512 bytes, none of them NUL")));
        }
        Ok(part)
    }

    pub fn message_id(&self) -> Result<MessageId, Problem> {
        let id = self.part("id")?;
        id.parse().map_err(|_| Problem::bad("bad-id", "the id must be a UUID"))
    }

    pub fn operation_id(&self) -> Result<OperationId, Problem> {
        let id = self.part("id")?;
        id.parse().map_err(|_| Problem::bad("bad-id", "the id must be a UUID"))
    }

    pub fn text(&self, name: &str) -> Option<String> {
        self.query.get(name).cloned()
    }

    pub fn number(&self, name: &str, usual: i64, most: i64) -> Result<i64, Problem> {
        let Some(value) = self.query.get(name) else { return Ok(usual) };
        let wrong = || Problem::bad("bad-query", format!("{name} must be a whole number from 1 to {most}"));
        value.parse().ok().filter(|number| (1..=most).contains(number)).ok_or_else(wrong)
    }

    pub fn seconds(&self, name: &str) -> Result<Option<Duration>, Problem> {
        let Some(value) = self.query.get(name) else { return Ok(None) };
        let wrong = || Problem::bad("bad-query", format!("{name} must be a number of seconds, at most {SECONDS_MAX}"));
        let seconds = value.parse().ok().filter(|seconds| (0..=SECONDS_MAX).contains(seconds)).ok_or_else(wrong)?;
        Ok(Some(Duration::from_secs(seconds.unsigned_abs())))
    }

    pub fn side(&self) -> Result<Side, Problem> {
        match self.query.get("side").map(String::as_str) {
            None | Some("out") => Ok(Side::Out),
            Some("in") => Ok(Side::In),
            Some(_) => Err(Problem::bad("bad-query", "side must be out or in")),
        }
    }

    /// The body; unknown fields are errors.
    pub fn body<T: DeserializeOwned>(&self) -> Result<T, Problem> {
        let wrong = |text: String| Problem::bad("bad-body", format!("the body: {text}"));
        // What is read field by field may also be written as an array, and no store takes NUL in a text.
        let value: serde_json::Value = serde_json::from_slice(&self.body).map_err(|error| wrong(error.to_string()))?;
        if !value.is_object() {
            return Err(wrong("it must be an object".to_owned()));
        }
        if value.to_string().contains("\\u0000") {
            return Err(wrong("a text contains NUL".to_owned()));
        }
        serde_json::from_value(value).map_err(|error| wrong(error.to_string()))
    }

    /// Who does this, and why.
    pub fn deed(&self, reason: &str) -> Result<Deed, Problem> {
        if reason.trim().is_empty() || reason.len() > 4000 {
            let text = "reason must have 1 to 4000 bytes; it is recorded in the audit row";
            return Err(Problem::bad("reason-required", text));
        }
        // Whoever reads the audit table with another program is not steered by it.
        if reason.contains(is_unseen) {
            let text = "reason has control characters or invisible ones; it is one line of text";
            return Err(Problem::bad("bad-reason", text));
        }
        Ok(Deed { actor: format!("{} (token)", self.who.name), reason: reason.to_owned() })
    }
}
