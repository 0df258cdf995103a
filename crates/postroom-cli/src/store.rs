//! The one list of stores: a URL's scheme chooses.

use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use postroom::{BoxError, Consumer, OnDead, Order, Source, Subscription, TopicFilter, Wake, redact_url};
use postroom_consumer::{Filler, ReceiveCounters, ReceiverFailed};
use postroom_postgres::{Connector, Listener, LogSource, LogSourceOptions, POSITIONS_EVERY, PostgresSession, StartAt};
use postroom_sqlite::{SqliteSession, SqliteSource, SqliteSourceOptions};

use crate::exit::{self, Failure};

/// A store, named by its URL.
pub enum Store {
    Postgres(Box<Connector>),
    Sqlite(PathBuf),
}

/// What a route wants of a store.
pub struct RouteOptions {
    pub name: String,
    pub topics: TopicFilter,
    pub owner: String,
    pub lease: Duration,
    pub start_at: StartAt,
    pub order: Order,
    pub on_dead: OnDead,
}

/// A receiver at work.
pub type Receiving = Pin<Box<dyn Future<Output = Result<ReceiveCounters, ReceiverFailed>> + Send>>;

impl Store {
    /// Reads the URL; connects to nothing.
    pub fn of(url: &str) -> Result<Self, Failure> {
        if url.starts_with("postgres://") || url.starts_with("postgresql://") {
            return Connector::new(url)
                .map(|connector| Self::Postgres(Box::new(connector)))
                .map_err(|error| Failure::of(exit::USAGE, &error));
        }
        if let Some(path) = postroom_sqlite::path_of(url) {
            return Ok(Self::Sqlite(path));
        }
        let shown = redact_url(url);
        Err(Failure::new(
            exit::USAGE,
            format!("store URL {shown:?} names no store: it wants postgres://USER@HOST/DATABASE or sqlite:FILE"),
        ))
    }

    /// The URL without secrets.
    pub fn shown(&self) -> String {
        match self {
            Self::Postgres(connector) => connector.shown().to_owned(),
            Self::Sqlite(path) => format!("sqlite:{}", path.display()),
        }
    }

    /// Wakes these relays when writers of other processes notify, as long as what it returns is kept.
    pub fn listen(&self, listen: bool, wakes: Vec<Wake>) -> Result<Option<Listener>, Failure> {
        match self {
            Self::Postgres(connector) if listen => Ok(Some(Listener::new(connector.as_ref().clone(), wakes))),
            Self::Sqlite(_) if listen => {
                Err(Failure::new(exit::CONFIG, "relay.listen is not there on SQLite; leave it out, polling is cheap"))
            }
            _ => Ok(None),
        }
    }

    /// The relay's source for one route.
    pub async fn source(&self, route: RouteOptions) -> Result<Arc<dyn Source>, Failure> {
        let RouteOptions { name, topics, owner, lease, start_at, order, on_dead } = route;
        match self {
            Self::Postgres(connector) => {
                let options = LogSourceOptions {
                    route: name,
                    topics,
                    owner,
                    lease,
                    start_at,
                    order,
                    on_dead,
                    positions_every: POSITIONS_EVERY,
                };
                Ok(Arc::new(LogSource::open(connector.as_ref().clone(), options).await?))
            }
            Self::Sqlite(path) => {
                if start_at == StartAt::Now {
                    let text = format!("route {name:?}: start_at = \"now\" is not there on SQLite; leave it out");
                    return Err(Failure::new(exit::CONFIG, text));
                }
                let options =
                    SqliteSourceOptions { path: path.clone(), route: name, topics, owner, lease, order, on_dead };
                Ok(Arc::new(SqliteSource::open(options)?))
            }
        }
    }

    /// Keeps what a queue brings, for an application that takes it from the store: one process at a time, the others stand by.
    pub fn fill_inbox(
        &self,
        subscribe: impl Fn() -> Result<Arc<dyn Subscription>, BoxError> + Send + Sync + 'static,
        consumer: Consumer,
        owner: String,
        lease: Duration,
        stop: impl Future<Output = ()> + Send + 'static,
    ) -> Receiving {
        match self {
            Self::Postgres(connector) => {
                let connector = connector.as_ref().clone();
                let open = move || PostgresSession::new(connector.clone());
                Box::pin(Filler::new(subscribe, consumer, owner, open).lease(lease).run(stop))
            }
            Self::Sqlite(path) => {
                let path = path.clone();
                let open = move || SqliteSession::new(&path);
                Box::pin(Filler::new(subscribe, consumer, owner, open).lease(lease).run(stop))
            }
        }
    }
}
