//! The list of everything that the API has.

use axum::routing::MethodFilter;
use futures_util::future::BoxFuture;

use super::answer::Answer;
use super::call::Call;
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
    /// Names and meanings.
    pub query: &'static [(&'static str, &'static str)],
    /// Name of the body's schema in `openapi.rs`.
    pub body: Option<&'static str>,
    /// Name of the answer's schema there.
    pub answer: &'static str,
    pub handler: Handler,
}

const LIMIT: (&str, &str) = ("limit", "maximum number, 1 to 1000; 100 unless given");
const SIDE: (&str, &str) = ("side", "out (default): of relays; in: of consumers");
const ROUTE: (&str, &str) = ("route", "only of this route; with side=in, of this consumer");

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
        query: &[],
        body: Some(body),
        answer,
        handler,
    };
    use Method::{Delete, Patch, Post};
    use Role::{Admin, Operator};
    vec![
        read("/status", "What waits, which relays run, which sinks are up", &[], "status", handler(reads::status)),
        read("/sizes", "How large the tables are, and how fast they grow", &[], "sizes", handler(reads::sizes)),
        read("/routes", "Routes that have run", &[], "routes-list", handler(reads::routes)),
        read(
            "/messages",
            "Messages by topic, key, state and age, newest first",
            &[
                ("route", "only of this route"),
                ("topic", "only of this topic"),
                ("key", "only with this key"),
                ("state", "only in this state, such as waiting, retry, dead or unrouted"),
                ("newer_than_seconds", "only written at most so long ago"),
                ("older_than_seconds", "only written at least so long ago"),
                ("after", "only behind this place: the `next` of the page before"),
                LIMIT,
            ],
            "messages-list",
            handler(reads::messages),
        ),
        read(
            "/messages/{id}",
            "One message with its headers, without its payload",
            &[],
            "message",
            handler(reads::message),
        ),
        read(
            "/messages/{id}/whereabouts",
            "Where a message is, and what it waits for",
            &[],
            "why",
            handler(reads::whereabouts),
        ),
        Endpoint {
            role: Operator,
            payloads: true,
            ..read(
                "/messages/{id}/payload",
                "The payload of one message, as bytes; leaves an audit row",
                &[("reason", "why you look; recorded in the audit row")],
                "payload",
                handler(reads::payload),
            )
        },
        read("/keys", "Keys that wait, longest first", &[SIDE, ROUTE, LIMIT], "keys-list", handler(reads::keys)),
        read(
            "/dead",
            "Dead letters, oldest first",
            &[
                SIDE,
                ROUTE,
                ("id", "only this message"),
                ("topic", "only of this topic"),
                ("type", "only of this type"),
                ("tenant", "only of this tenant"),
                ("aggregate", "only of the aggregate with this id"),
                ("error", "only whose error contains this"),
                ("newer_than_seconds", "only that died at most so long ago"),
                ("older_than_seconds", "only that died at least so long ago"),
                LIMIT,
            ],
            "dead-letters",
            handler(reads::dead),
        ),
        read(
            "/dead/headlines",
            "What dead letters died of, page by page, by route and seq",
            &[
                SIDE,
                ("after_route", "the route (or consumer) of the last one of the page before"),
                ("after_seq", "its seq"),
                LIMIT,
            ],
            "headlines",
            handler(reads::headlines),
        ),
        read(
            "/operations",
            "Operations on many messages, newest first",
            &[LIMIT],
            "operations-list",
            handler(reads::operations),
        ),
        read(
            "/operations/{id}",
            "One operation: its progress, and at its end its report",
            &[],
            "operation",
            handler(reads::operation),
        ),
        read(
            "/operations/{id}/events",
            "The same each second as server-sent events, until it is over or waits for somebody",
            &[],
            "events",
            handler(reads::events),
        ),
        read(
            "/reconciliations",
            "The newest result of each comparison of messages with effects",
            &[("name", "only of this comparison")],
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
