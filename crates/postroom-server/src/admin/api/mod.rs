//! The admin API, `/api/v1`: what the port `Operator` has, over HTTP. Its objects are those of the commands' `--json`.
//!
//! `endpoints.rs` is the one list: the router and the description in OpenAPI are both made of it.

mod answer;
mod call;
mod deeds;
mod endpoints;
mod openapi;
mod problem;
mod rate;
mod reads;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::rejection::RawPathParamsRejection;
use axum::extract::{RawPathParams, Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, on};

use self::call::Call;
use self::endpoints::{Endpoint, endpoints};
pub(super) use self::problem::Problem;
pub(super) use self::rate::Rate;
use super::Served;
use super::tokens::{Admitted, Refused, Role};

/// Most bytes of a request's body, and how long it may take.
const BODY_BYTES_MAX: usize = 1 << 20;
const BODY_WITHIN: Duration = Duration::from_secs(10);

/// Everything below `/api/v1`.
pub(super) fn router() -> Router<Served> {
    let mut router = Router::new().route("/openapi.json", get(description));
    for endpoint in endpoints() {
        let endpoint = Arc::new(endpoint);
        let path = endpoint.path;
        let method = endpoint.method.filter();
        router = router.route(
            path,
            on(
                method,
                move |State(served): State<Served>,
                      parts: Result<RawPathParams, RawPathParamsRejection>,
                      request: Request| { answered(endpoint.clone(), served, parts, request) },
            ),
        );
    }
    let nothing =
        async || Problem::missing("no-such-path", "there is nothing here; /api/v1/openapi.json says what there is");
    let wrong_method = async || {
        Problem::new(
            StatusCode::METHOD_NOT_ALLOWED,
            "wrong-method",
            "this path has other methods; see /api/v1/openapi.json",
        )
    };
    router.fallback(nothing).method_not_allowed_fallback(wrong_method)
}

/// Describes all of this; says nothing of the store.
async fn description(State(served): State<Served>, headers: HeaderMap) -> Response {
    match served.guard.admit(&headers, Role::Viewer) {
        Ok(_) => axum::Json(openapi::document(&endpoints())).into_response(),
        Err(refused) => refuse(refused).into_response(),
    }
}

fn refuse(refused: Refused) -> Problem {
    match refused {
        Refused::Unknown => Problem::new(
            StatusCode::UNAUTHORIZED,
            "token-required",
            "a token is required: Authorization: Bearer TOKEN; `postroom token` makes one",
        ),
        Refused::Role(role) => Problem::new(
            StatusCode::FORBIDDEN,
            "role-required",
            format!("this requires a token with the role {}", role.as_str()),
        ),
        Refused::TooMany => {
            let mut problem =
                Problem::new(StatusCode::TOO_MANY_REQUESTS, "too-many-wrong-tokens", "too many wrong tokens came");
            problem.retry_after_seconds = Some(10);
            problem
        }
    }
}

/// What was called, and by whom, for the log: not the path, which may have a key in it.
#[derive(Debug, Clone)]
pub(super) struct Called {
    pub endpoint: &'static str,
    pub who: String,
}

async fn answered(
    endpoint: Arc<Endpoint>,
    served: Served,
    parts: Result<RawPathParams, RawPathParamsRejection>,
    request: Request,
) -> Response {
    let admitted = served.guard.admit(request.headers(), Role::Viewer).map_err(refuse);
    let who = admitted.as_ref().map_or_else(|_| "-".to_owned(), |who| who.name.clone());
    let answered = match admitted {
        Ok(admitted) => answer(&endpoint, &served, admitted, parts, request).await,
        Err(problem) => Err(problem),
    };
    let mut response = answered.unwrap_or_else(IntoResponse::into_response);
    response.extensions_mut().insert(Called { endpoint: endpoint.path, who });
    response
}

async fn answer(
    endpoint: &Endpoint,
    served: &Served,
    who: Admitted,
    parts: Result<RawPathParams, RawPathParamsRejection>,
    request: Request,
) -> Result<Response, Problem> {
    if who.role < endpoint.role {
        return Err(refuse(Refused::Role(endpoint.role)));
    }
    if endpoint.payloads && !who.payloads {
        let text = "this requires a token with payloads = true";
        return Err(Problem::new(StatusCode::FORBIDDEN, "payloads-required", text));
    }
    if !served.rate.allows(&who.name) {
        let mut problem = Problem::new(StatusCode::TOO_MANY_REQUESTS, "too-many-requests", "this token asks too often");
        problem.retry_after_seconds = Some(1);
        return Err(problem);
    }
    let Some(store) = served.store.clone() else {
        return Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, "no-store", "this listener has no store"));
    };
    let parts = parts.map_err(|_| Problem::bad("bad-path", "the path is not UTF-8"))?;
    let path = parts.iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    let query = known(endpoint, request.uri().query().unwrap_or_default())?;
    let body = tokio::time::timeout(BODY_WITHIN, axum::body::to_bytes(request.into_body(), BODY_BYTES_MAX)).await;
    let body = body
        .map_err(|_| Problem::new(StatusCode::REQUEST_TIMEOUT, "body-too-slow", "the body did not arrive in time"))?
        .map_err(|_| {
            let text = "the body cannot be read, or has more than 1 MiB";
            Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "body-too-large", text)
        })?;
    let call = Call { who, store, path, query, body };
    Ok((endpoint.handler)(call).await?.into_response())
}

/// The parameters, each of which must be one that the endpoint has.
fn known(endpoint: &Endpoint, query: &str) -> Result<BTreeMap<String, String>, Problem> {
    let pairs: Vec<(String, String)> =
        axum::extract::Query::try_from_uri(&format!("/?{query}").parse().unwrap_or_default())
            .map_err(|error| Problem::bad("bad-query", error.to_string()))?
            .0;
    let mut known = BTreeMap::new();
    for (name, value) in pairs {
        if !endpoint.query.iter().any(|parameter| parameter.name == name) {
            let names: Vec<&str> = endpoint.query.iter().map(|parameter| parameter.name).collect();
            let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
            return Err(Problem::bad("bad-query", format!("parameter {name:?} is not known; there are: {names}")));
        }
        // What is not UTF-8 was replaced by this, and would be looked for as such.
        if value.contains(char::REPLACEMENT_CHARACTER) {
            return Err(Problem::bad("bad-query", format!("parameter {name:?} is not UTF-8")));
        }
        if value.is_empty() || value.contains('\0') {
            return Err(Problem::bad("bad-query", format!("parameter {name:?} is empty, or contains NUL")));
        }
        if known.insert(name.clone(), value).is_some() {
            return Err(Problem::bad("bad-query", format!("parameter {name:?} is given twice")));
        }
    }
    Ok(known)
}
