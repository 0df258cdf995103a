//! An HTTP endpoint, through a link that loses, holds and slows down what it carries.

use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, Uri};
use postroom::Sink;
use postroom_brokers::http::{HttpOptions, HttpSink};
use postroom_testkit::conformance::Fixture;
use postroom_testkit::conformance::sink::{FarEnd, Fault, Stored};
use postroom_testkit::proxy::{Link, Proxy};

type Kept = Arc<Mutex<Vec<Stored>>>;

pub struct Endpoint {
    link: Proxy,
    kept: Kept,
}

mod sink {
    postroom_testkit::sink_conforms!(super::Endpoint);
}

async fn take(State(kept): State<Kept>, uri: Uri, headers: HeaderMap, body: Bytes) -> StatusCode {
    if uri.path() == "/refused" {
        return StatusCode::UNPROCESSABLE_ENTITY;
    }
    if let Some(id) = headers.get("webhook-id") {
        let id = id.to_str().unwrap().to_owned();
        kept.lock().unwrap().push(Stored { id, payload: body.to_vec() });
    }
    StatusCode::NO_CONTENT
}

#[async_trait]
impl Fixture for Endpoint {
    async fn create() -> Self {
        let kept = Kept::default();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let link = Proxy::to(&listener.local_addr().unwrap().to_string()).await;
        let app = Router::new().fallback(take).with_state(kept.clone());
        tokio::spawn(async move { axum::serve(listener, app).await });
        Self { link, kept }
    }
}

#[async_trait]
impl FarEnd for Endpoint {
    async fn sink(&self) -> Arc<dyn Sink> {
        let mut options = HttpOptions::new(format!("http://{}/{{routing_key}}", self.link.address()));
        (options.private_addresses, options.deadline_seconds) = (true, 2);
        Arc::new(HttpSink::new(options).unwrap())
    }

    async fn begin(&self, fault: Fault) -> bool {
        match fault {
            // It never takes what is sent to /refused.
            Fault::Reject => {}
            Fault::StoreAndFail => self.link.set(Link::RepliesLost),
            Fault::Hold => self.link.set(Link::BlackHole),
            Fault::Slow => self.link.set(Link::Throttled(2_000)),
        }
        true
    }

    async fn heal(&self) {
        self.link.set(Link::Open);
        // A connection that lost an answer stays without answers.
        self.link.reset();
    }

    async fn stored(&self) -> Vec<Stored> {
        std::mem::take(&mut *self.kept.lock().unwrap())
    }
}
