//! Errors as `application/problem+json` (RFC 9457), with codes that do not change.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use postroom::{StoreError, redact_text};

use super::answer::escaped;

/// Why something was not done.
#[derive(Debug)]
pub(in crate::admin) struct Problem {
    pub status: StatusCode,
    /// Stable.
    pub code: &'static str,
    /// For a person.
    pub detail: String,
    pub retry_after_seconds: Option<u64>,
}

impl Problem {
    pub fn new(status: StatusCode, code: &'static str, detail: impl Into<String>) -> Self {
        Self { status, code, detail: redact_text(&detail.into()), retry_after_seconds: None }
    }

    pub fn bad(code: &'static str, detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, code, detail)
    }

    pub fn missing(code: &'static str, detail: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, code, detail)
    }
}

impl From<StoreError> for Problem {
    fn from(error: StoreError) -> Self {
        let (status, code) = match &error {
            StoreError::Unavailable { .. } => (StatusCode::SERVICE_UNAVAILABLE, "store-unreachable"),
            StoreError::Busy { .. } => (StatusCode::SERVICE_UNAVAILABLE, "store-busy"),
            StoreError::Refused { .. } => (StatusCode::CONFLICT, "store-refused"),
            StoreError::Schema { .. } => (StatusCode::INTERNAL_SERVER_ERROR, "schema"),
        };
        let mut text = error.to_string();
        let mut cause = std::error::Error::source(&error);
        while let Some(error) = cause {
            text.push_str(&format!(": {error}"));
            cause = error.source();
        }
        let mut problem = Self::new(status, code, format!("failed to {text}"));
        problem.retry_after_seconds = error.is_transient().then_some(5);
        problem
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let body = serde_json::json!({
            "type": format!("urn:postroom:problem:{}", self.code),
            "title": self.status.canonical_reason().unwrap_or("error"),
            "status": self.status.as_u16(),
            "code": self.code,
            "detail": self.detail,
        });
        let mut response = (self.status, escaped(&body)).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if let Some(seconds) = self.retry_after_seconds {
            headers.insert(header::RETRY_AFTER, seconds.into());
        }
        response
    }
}
