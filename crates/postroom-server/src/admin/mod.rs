//! The admin listener: health, metrics and the admin API over HTTP.
//!
//! Without tokens it serves this machine only. With tokens, everything but the bare answers of `/livez` and `/readyz` requires one.
//! Connections, headers and time are limited, so that nobody who reaches the listener can harm the relay behind it.

mod api;
mod health;
mod tokens;

use std::convert::Infallible;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use postroom::{MessageId, Store};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

pub use health::{Expected, Health};
pub use tokens::{InvalidToken, NewToken, Role, Token};

use crate::metrics::{CONTENT_TYPE, Metrics};
use tokens::Guard;

/// More connections wait until one of these ends.
const CONNECTIONS_MAX: usize = 256;
const HEADERS_WITHIN: Duration = Duration::from_secs(5);
const HEADER_BYTES_MAX: usize = 16 << 10;
/// A connection that is open for longer is closed after its answer; clients open another one.
const CONNECTION_LASTS: Duration = Duration::from_secs(600);

/// What the listener is told.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where to listen.
    pub listen: SocketAddr,
    /// Who may ask; none: everybody on this machine.
    pub tokens: Vec<Token>,
    /// Serve `/metrics` without a token too.
    pub metrics_public: bool,
}

/// Why there is no listener.
#[derive(Debug, thiserror::Error)]
pub enum AdminFailed {
    /// Others could reach it.
    #[error(
        "listen on {0} for the admin API: other machines can reach this address, so it requires tokens; make one with `postroom token`, \
         or listen on 127.0.0.1"
    )]
    Open(SocketAddr),
    /// The address cannot be used.
    #[error("listen on {0} for the admin API; choose another address with admin.listen")]
    Bind(SocketAddr, #[source] io::Error),
}

/// A listener that is not served yet.
#[derive(Debug)]
pub struct Admin {
    listener: TcpListener,
    served: Served,
}

#[derive(Clone)]
struct Served {
    metrics: Arc<Metrics>,
    health: Arc<Health>,
    guard: Arc<Guard>,
    store: Option<Arc<dyn Store>>,
    rate: Arc<api::Rate>,
}

impl fmt::Debug for Served {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Served").field("health", &self.health).finish_non_exhaustive()
    }
}

impl Admin {
    /// Binds the address. One that other machines can reach is refused without tokens. Without a store there is no admin API.
    pub async fn bind(
        options: Options,
        metrics: Arc<Metrics>,
        health: Health,
        store: Option<Arc<dyn Store>>,
    ) -> Result<Self, AdminFailed> {
        let Options { listen, tokens, metrics_public } = options;
        if tokens.is_empty() && !listen.ip().is_loopback() {
            return Err(AdminFailed::Open(listen));
        }
        let listener = TcpListener::bind(listen).await.map_err(|error| AdminFailed::Bind(listen, error))?;
        let guard = Arc::new(Guard::new(tokens, metrics_public));
        let served = Served { metrics, health: Arc::new(health), guard, store, rate: Arc::default() };
        Ok(Self { listener, served })
    }

    /// The address that it got.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves for ever.
    pub async fn serve(self) {
        let Self { listener, served } = self;
        let router = router(served);
        let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        loop {
            // Before accepting: what waits is the kernel's.
            let Ok(place) = places.clone().acquire_owned().await else { return };
            let socket = match listener.accept().await {
                Ok((socket, _)) => socket,
                Err(error) => {
                    // Such as no file descriptors left: they are needed elsewhere.
                    tracing::warn!("the admin listener could not accept a connection: {error}");
                    tokio::time::sleep(Duration::from_secs(1)).await;
                    continue;
                }
            };
            let service = TowerToHyperService::new(router.clone());
            tokio::spawn(async move {
                let mut http = http1::Builder::new();
                http.timer(TokioTimer::new()).header_read_timeout(HEADERS_WITHIN).max_buf_size(HEADER_BYTES_MAX);
                // A client that breaks off is its own business.
                let served = http.serve_connection(TokioIo::new(socket), service);
                let _ = tokio::time::timeout(CONNECTION_LASTS, served).await;
                drop(place);
            });
        }
    }
}

fn router(served: Served) -> Router {
    Router::new()
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .nest("/api/v1", api::router())
        .fallback(async || {
            (StatusCode::NOT_FOUND, "there is nothing here; see /livez, /readyz, /metrics and /api/v1/openapi.json\n")
        })
        .layer(middleware::from_fn_with_state(served.clone(), before_all))
        .with_state(served)
}

/// Longest request id that is taken over from a caller, in bytes.
const REQUEST_ID_MAX: usize = 64;
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Nothing is answered to a page of the web that had a name point to this machine. Every call of the API is logged, without its query,
/// which may have personal data.
async fn before_all(State(served): State<Served>, request: Request, next: Next) -> Result<Response, Infallible> {
    let began = Instant::now();
    let refused = served.guard.refuses_host(request.headers()) || served.guard.refuses_authority(request.uri());
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let plain =
        |id: &&str| !id.is_empty() && id.len() <= REQUEST_ID_MAX && id.bytes().all(|byte| byte.is_ascii_graphic());
    let given = request.headers().get(REQUEST_ID).and_then(|id| id.to_str().ok()).filter(plain);
    let id = given.map_or_else(|| MessageId::new().to_string(), str::to_owned);
    let mut response = match refused {
        true => (StatusCode::MISDIRECTED_REQUEST, "ask by the address that this listener listens on\n").into_response(),
        false => next.run(request).await,
    };
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    if let Ok(id) = HeaderValue::from_str(&id) {
        headers.insert(REQUEST_ID, id);
    }
    let (status, ms) = (response.status().as_u16(), began.elapsed().as_millis() as u64);
    match response.extensions().get::<api::Called>().cloned() {
        Some(api::Called { endpoint, who }) => {
            tracing::info!(target: "postroom::admin", %method, endpoint, status, ms, who, request_id = id, "answered");
        }
        None => tracing::debug!(target: "postroom::admin", %method, path, status, ms, request_id = id, "answered"),
    }
    Ok(response)
}

/// The process answers.
async fn livez() -> &'static str {
    "ok\n"
}

/// Whether this process does its part, and for whom it does not. Without a token, where tokens are required, only whether.
async fn readyz(State(served): State<Served>, headers: HeaderMap) -> Response {
    let state = served.health.now();
    let code = if state.ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    if served.guard.admit(&headers, Role::Viewer).is_ok() {
        (code, axum::Json(state)).into_response()
    } else {
        (code, axum::Json(serde_json::json!({ "ready": state.ready }))).into_response()
    }
}

async fn metrics(State(served): State<Served>, headers: HeaderMap) -> Response {
    if !served.guard.metrics_public
        && let Err(refused) = served.guard.admit(&headers, Role::Viewer)
    {
        return refused.into_response();
    }
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], served.metrics.text()).into_response()
}
