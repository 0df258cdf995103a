//! The list of everything that the API has.

use axum::routing::MethodFilter;
use futures_util::future::BoxFuture;
use postroom::ListedPlace;
use serde_json::{Value, json};

use super::answer::Answer;
use super::call::{Call, SECONDS_MAX};
use super::problem::Problem;
use super::{deeds, reads};
use crate::admin::tokens::Role;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Method {
    Get,
    Post,
    Patch,
    Delete,
}

impl Method {
    pub fn filter(self) -> MethodFilter {
        match self {
            Self::Get => MethodFilter::GET,
            Self::Post => MethodFilter::POST,
            Self::Patch => MethodFilter::PATCH,
            Self::Delete => MethodFilter::DELETE,
        }
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Get => "get",
            Self::Post => "post",
            Self::Patch => "patch",
            Self::Delete => "delete",
        }
    }
}

type Handler = Box<dyn Fn(Call) -> BoxFuture<'static, Result<Answer, Problem>> + Send + Sync>;

/// One thing that can be asked for.
pub(super) struct Endpoint {
    pub method: Method,
    pub path: &'static str,
    pub role: Role,
    /// The token must have the right to see payloads.
    pub payloads: bool,
    pub summary: &'static str,
    pub query: Vec<Parameter>,
    /// Name of the body's schema in `openapi.rs`.
    pub body: Option<&'static str>,
    /// Name of the answer's schema there.
    pub answer: &'static str,
    pub handler: Handler,
}

/// One parameter of the query.
pub(super) struct Parameter {
    pub name: &'static str,
    pub meaning: &'static str,
    pub takes: Takes,
}

/// What a parameter can be.
pub(super) enum Takes {
    Text,
    Id,
    /// From the first to the second.
    Number(i64, i64),
    Words(fn() -> Vec<&'static str>),
}

impl Takes {
    /// In JSON schema.
    pub fn schema(&self) -> Value {
        match self {
            Self::Text => json!({ "type": "string", "minLength": 1 }),
            Self::Id => json!({ "type": "string", "format": "uuid" }),
            Self::Number(least, most) => json!({ "type": "integer", "minimum": least, "maximum": most }),
            Self::Words(words) => json!({ "enum": words() }),
        }
    }
}

const fn text(name: &'static str, meaning: &'static str) -> Parameter {
    Parameter { name, meaning, takes: Takes::Text }
}

const fn seconds(name: &'static str, meaning: &'static str) -> Parameter {
    Parameter { name, meaning, takes: Takes::Number(0, SECONDS_MAX) }
}

const LIMIT: Parameter =
    Parameter { name: "limit", meaning: "maximum number; 100 unless given", takes: Takes::Number(1, reads::LIMIT.1) };
const SIDE: Parameter = Parameter {
    name: "side",
    meaning: "out (default): of relays; in: of consumers",
    takes: Takes::Words(|| vec!["out", "in"]),
};
const ROUTE: Parameter = text("route", "only of this route; with side=in, of this consumer");
const ID: Parameter = Parameter { name: "id", meaning: "only this message", takes: Takes::Id };
const STATE: Parameter = Parameter {
    name: "state",
    meaning: "only in this state",
    takes: Takes::Words(|| ListedPlace::ALL.iter().map(|place| place.as_str()).collect()),
};
const AFTER_ROUTE: Parameter = text("after_route", "the route (or consumer) of the last one of the page before");
const AFTER_SEQ: Parameter =
    Parameter { name: "after_seq", meaning: "its seq", takes: Takes::Number(i64::MIN, i64::MAX) };
const AFTER_ID: Parameter = text("after_id", "its id");

/// All of them.
pub(super) fn endpoints() -> Vec<Endpoint> {
    fn handler<F>(handle: fn(Call) -> F) -> Handler
    where
        F: Future<Output = Result<Answer, Problem>> + Send + 'static,
    {
        Box::new(move |call| Box::pin(handle(call)))
    }
    let read = |path, summary, query, answer, handler| Endpoint {
        method: Method::Get,
        path,
        role: Role::Viewer,
        payloads: false,
        summary,
        query,
        body: None,
        answer,
        handler,
    };
    let deed = |method, path, role, summary, body, answer, handler| Endpoint {
        method,
        path,
        role,
        payloads: false,
        summary,
        query: Vec::new(),
        body: Some(body),
        answer,
        handler,
    };
    use Method::{Delete, Patch, Post};
    use Role::{Admin, Operator};
    vec![
        read(
            "/status",
            "What waits, which relays run, which sinks are up",
            Vec::new(),
            "status",
            handler(reads::status),
        ),
        read("/sizes", "How large the tables are, and how fast they grow", Vec::new(), "sizes", handler(reads::sizes)),
        read("/routes", "Routes that have run", Vec::new(), "routes-list", handler(reads::routes)),
        read(
            "/messages",
            "Messages by topic, key, state and age, newest first; a page with few messages, or none, is the last one only if it has no `next`",
            vec![
                text("route", "only of this route"),
                text("topic", "only of this topic"),
                text("key", "only with this key"),
                STATE,
                seconds("newer_than_seconds", "only written at most so long ago"),
                seconds("older_than_seconds", "only written at least so long ago"),
                text("after", "only behind this place: the `next` of the page before"),
                LIMIT,
            ],
            "messages-list",
            handler(reads::messages),
        ),
        read(
            "/messages/{id}",
            "One message with its headers, without its payload",
            Vec::new(),
            "message",
            handler(reads::message),
        ),
        read(
            "/messages/{id}/whereabouts",
            "Where a message is, and what it waits for",
            Vec::new(),
            "why",
            handler(reads::whereabouts),
        ),
        Endpoint {
            role: Operator,
            payloads: true,
            ..read(
                "/messages/{id}/payload",
                "The payload of one message, as bytes; leaves an audit row",
                vec![text("reason", "why you look; recorded in the audit row")],
                "payload",
                handler(reads::payload),
            )
        },
        read("/keys", "Keys that wait, longest first", vec![SIDE, ROUTE, LIMIT], "keys-list", handler(reads::keys)),
        read(
            "/dead",
            "Dead letters, page by page, by route (or consumer) and seq",
            vec![
                SIDE,
                ROUTE,
                ID,
                text("topic", "only of this topic"),
                text("type", "only of this type"),
                text("tenant", "only of this tenant"),
                text("aggregate", "only of the aggregate with this id"),
                text("error", "only whose error contains this"),
                seconds("newer_than_seconds", "only that died at most so long ago"),
                seconds("older_than_seconds", "only that died at least so long ago"),
                AFTER_ROUTE,
                AFTER_SEQ,
                AFTER_ID,
                LIMIT,
            ],
            "dead-letters",
            handler(reads::dead),
        ),
        read(
            "/dead/headlines",
            "What dead letters died of, page by page, by route and seq",
            vec![SIDE, AFTER_ROUTE, AFTER_SEQ, AFTER_ID, LIMIT],
            "headlines",
            handler(reads::headlines),
        ),
        read(
            "/operations",
            "Operations on many messages, newest first",
            vec![LIMIT],
            "operations-list",
            handler(reads::operations),
        ),
        read(
            "/operations/{id}",
            "One operation: its progress, and at its end its report",
            Vec::new(),
            "operation",
            handler(reads::operation),
        ),
        read(
            "/operations/{id}/events",
            "The same each second as server-sent events, until it is over or waits for somebody",
            Vec::new(),
            "events",
            handler(reads::events),
        ),
        read(
            "/reconciliations",
            "The newest result of each comparison of messages with effects",
            vec![text("name", "only of this comparison")],
            "reconcile",
            handler(reads::reconciliations),
        ),
        deed(
            Post,
            "/operations",
            Operator,
            "Begin a replay, or a retry or discard of dead letters; with dry_run only its preview",
            "new-operation",
            "operation-begun",
            handler(deeds::begin),
        ),
        deed(
            Post,
            "/operations/{id}/pause",
            Operator,
            "Give out nothing more for now",
            "reason",
            "operation",
            handler(deeds::pause),
        ),
        deed(
            Post,
            "/operations/{id}/resume",
            Operator,
            "Go on, also after a canary",
            "reason",
            "operation",
            handler(deeds::resume),
        ),
        deed(
            Post,
            "/operations/{id}/cancel",
            Operator,
            "Give out nothing more, ever",
            "reason",
            "operation",
            handler(deeds::cancel),
        ),
        deed(
            Post,
            "/dead/notes",
            Operator,
            "Write a note about a group of dead letters",
            "new-note",
            "dead-note",
            handler(deeds::note),
        ),
        deed(
            Post,
            "/routes/{route}/keys/{key}/park",
            Operator,
            "Send nothing more of a key",
            "reason",
            "keys-act",
            handler(deeds::park),
        ),
        deed(
            Post,
            "/routes/{route}/keys/{key}/unpark",
            Operator,
            "Go on with a parked key",
            "reason",
            "keys-act",
            handler(deeds::unpark),
        ),
        deed(
            Post,
            "/routes/{route}/keys/{key}/skip",
            Operator,
            "Leave out the dead message that blocks a key",
            "reason",
            "keys-act",
            handler(deeds::skip),
        ),
        deed(
            Patch,
            "/routes/{route}",
            Admin,
            "Change a route's settings",
            "route-change",
            "routes-set",
            handler(deeds::set_route),
        ),
        deed(
            Delete,
            "/routes/{route}",
            Admin,
            "Forget a route that is no longer used",
            "forget",
            "routes-forget",
            handler(deeds::forget),
        ),
    ]
}
