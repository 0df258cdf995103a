//! The one list of stores: a URL's scheme chooses. Every command knows a store by `postroom::Store` and `postroom::Operator` alone.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use postroom::{BoxError, Consumer, Store, Subscription, redact_url};
use postroom_consumer::{Filler, ReceiveCounters, ReceiverFailed};

use crate::exit::{self, Failure};

/// A kind of store.
struct Kind {
    /// How its URLs look, for people.
    example: &'static str,
    /// Opens the store that a URL names, and connects to nothing; none: it is not a URL of this kind.
    open: fn(&str) -> Option<Result<Opened, Failure>>,
}

const STORES: &[Kind] =
    &[Kind { example: "postgres://USER@HOST/DATABASE", open: postgres }, Kind { example: "sqlite:FILE", open: sqlite }];

/// A store that the configuration or a command names.
pub struct Opened {
    pub store: Arc<dyn Store>,
    fill: Box<dyn Fn(Fill) -> Receiving + Send + Sync>,
}

/// What fills an inbox of a store, and until when.
pub struct Fill {
    pub subscribe: Box<dyn Fn() -> Result<Arc<dyn Subscription>, BoxError> + Send + Sync>,
    pub consumer: Consumer,
    pub owner: String,
    pub lease: Duration,
    pub stop: Pin<Box<dyn Future<Output = ()> + Send>>,
}

/// A receiver at work.
pub type Receiving = Pin<Box<dyn Future<Output = Result<ReceiveCounters, ReceiverFailed>> + Send>>;

impl Opened {
    /// Reads the URL; connects to nothing.
    pub fn of(url: &str) -> Result<Self, Failure> {
        STORES.iter().find_map(|kind| (kind.open)(url)).unwrap_or_else(|| {
            let examples: Vec<&str> = STORES.iter().map(|kind| kind.example).collect();
            let text = format!("store URL {:?} names no store; use {}", redact_url(url), examples.join(" or "));
            Err(Failure::new(exit::USAGE, text))
        })
    }

    /// Keeps what a queue brings, for an application that takes it from the store: one process at a time, the others stand by.
    pub fn fill_inbox(&self, fill: Fill) -> Receiving {
        (self.fill)(fill)
    }
}

fn postgres(url: &str) -> Option<Result<Opened, Failure>> {
    use postroom_postgres::{Database, PostgresSession};
    if !["postgres://", "postgresql://"].iter().any(|scheme| url.starts_with(scheme)) {
        return None;
    }
    let opened = |database: Database| {
        let connector = database.connector().clone();
        let fill = move |Fill { subscribe, consumer, owner, lease, stop }| -> Receiving {
            let connector = connector.clone();
            let open = move || PostgresSession::new(connector.clone());
            Box::pin(Filler::new(subscribe, consumer, owner, open).lease(lease).run(stop))
        };
        Opened { store: Arc::new(database), fill: Box::new(fill) }
    };
    Some(Database::new(url).map(opened).map_err(|error| Failure::of(exit::USAGE, &error)))
}

fn sqlite(url: &str) -> Option<Result<Opened, Failure>> {
    use postroom_sqlite::{Database, SqliteSession, path_of};
    let path = path_of(url)?;
    let database = Database::new(path.clone());
    let fill = move |Fill { subscribe, consumer, owner, lease, stop }| -> Receiving {
        let path = path.clone();
        let open = move || SqliteSession::new(&path);
        Box::pin(Filler::new(subscribe, consumer, owner, open).lease(lease).run(stop))
    };
    Some(Ok(Opened { store: Arc::new(database), fill: Box::new(fill) }))
}
