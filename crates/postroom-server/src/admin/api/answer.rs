//! Answers.

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures_util::stream::BoxStream;
use postroom::is_unseen;
use serde_json::Value;

/// What a caller gets.
pub(super) enum Answer {
    Json(StatusCode, Value),
    /// A payload, as it is.
    Bytes(Vec<u8>),
    /// Server-sent events.
    Events(BoxStream<'static, Result<Bytes, std::convert::Infallible>>),
}

impl Answer {
    pub fn json(value: impl serde::Serialize) -> Self {
        Self::Json(StatusCode::OK, serde_json::to_value(value).unwrap_or_default())
    }
}

/// As JSON in which nothing can steer a terminal, mislead a reader or begin an element of HTML, wherever it is shown.
pub(super) fn escaped(value: &Value) -> String {
    let text = value.to_string();
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        // All of them are in strings.
        if matches!(c, '<' | '>' | '&') || is_unseen(c) {
            c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| escaped.push_str(&format!("\\u{unit:04x}")));
        } else {
            escaped.push(c);
        }
    }
    escaped
}

impl IntoResponse for Answer {
    fn into_response(self) -> Response {
        let typed = |kind: &'static str, mut response: Response| {
            response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
            response
        };
        match self {
            Self::Json(status, value) => typed("application/json", (status, escaped(&value)).into_response()),
            Self::Bytes(bytes) => {
                let mut response = typed("application/octet-stream", bytes.into_response());
                let attachment = HeaderValue::from_static("attachment; filename=\"payload\"");
                response.headers_mut().insert(header::CONTENT_DISPOSITION, attachment);
                response
            }
            Self::Events(events) => typed("text/event-stream", Body::from_stream(events).into_response()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_application_wrote_steers_nothing() {
        let hostile = "\u{1b}[2J<script>\u{202e}\u{9b}31m\u{200b}\u{2028}é\u{e0041}";
        let text = escaped(&serde_json::json!({ "topic": hostile }));
        assert!(text.chars().all(|c| !c.is_control() && !"<>&\u{202e}\u{200b}\u{2028}".contains(c)), "{text}");
        let read: Value = serde_json::from_str(&text).unwrap_or_default();
        assert_eq!(read["topic"], hostile, "and is the same for a program");
    }
}
