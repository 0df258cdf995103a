//! The one list of stores: a URL's scheme chooses. Every command knows a store by `postroom::Store` and `postroom::Operator` alone.

use std::path::Path;
use std::sync::Arc;

use postroom::{Store, redact_url};

use crate::exit::{self, Failure};

/// A kind of store.
struct Kind {
    /// How its URLs look, for people.
    example: &'static str,
    /// None: it is not a URL of this kind.
    open: fn(&str) -> Option<Opened>,
}

/// Nothing is connected to.
type Opened = Result<Arc<dyn Store>, Failure>;

const STORES: &[Kind] = &[
    Kind { example: "postgres://USER@HOST/DATABASE", open: postgres },
    Kind { example: "mysql://USER@HOST/DATABASE", open: mysql },
    Kind { example: "sqlserver://USER@HOST/DATABASE", open: mssql },
    Kind { example: "sqlite:FILE", open: sqlite },
];

/// Reads the URL; connects to nothing.
pub fn open(url: &str) -> Opened {
    STORES.iter().find_map(|kind| (kind.open)(url)).unwrap_or_else(|| {
        let examples: Vec<&str> = STORES.iter().map(|kind| kind.example).collect();
        let text = format!("store URL {:?} has an unknown scheme; use one of {}", redact_url(url), examples.join(", "));
        Err(Failure::new(exit::USAGE, text))
    })
}

/// The same with few connections, for programs that work with many stores: so many routes and intakes of each. How many connections that are.
pub fn open_frugal(url: &str, routes: usize, intakes: usize) -> Result<(Arc<dyn Store>, usize), Failure> {
    if let Some(connector) = postgres_connector(url) {
        let connector = connector.map_err(|error| Failure::of(exit::USAGE, &error))?;
        let (database, connections) = postroom_postgres::Database::frugal(connector, intakes);
        return Ok((Arc::new(database), connections));
    }
    if is_mysql(url) {
        let frugal = postroom_mysql::Database::frugal(url, routes);
        let (database, connections) = frugal.map_err(|error| Failure::of(exit::USAGE, &error))?;
        return Ok((Arc::new(database), connections));
    }
    if is_mssql(url) {
        return mssql_frugal(url, routes);
    }
    // A file has no connections that anybody counts.
    open(url).map(|store| (store, 1))
}

fn postgres(url: &str) -> Option<Opened> {
    let store = postgres_connector(url)?;
    let store = store.map(|connector| Arc::new(postroom_postgres::Database::of(connector)) as Arc<dyn Store>);
    Some(store.map_err(|error| Failure::of(exit::USAGE, &error)))
}

fn postgres_connector(url: &str) -> Option<Result<postroom_postgres::Connector, postroom_postgres::InvalidUrl>> {
    if !["postgres://", "postgresql://"].iter().any(|scheme| url.starts_with(scheme)) {
        return None;
    }
    let connector = postroom_postgres::Connector::new(url).and_then(|connector| match std::env::var_os("PGPASSFILE") {
        Some(file) => connector.password_from(Path::new(&file)),
        None => Ok(connector),
    });
    Some(connector)
}

fn is_mysql(url: &str) -> bool {
    ["mysql://", "mariadb://"].iter().any(|scheme| url.starts_with(scheme))
}

fn mysql(url: &str) -> Option<Opened> {
    if !is_mysql(url) {
        return None;
    }
    let store = postroom_mysql::Database::new(url).map(|database| Arc::new(database) as Arc<dyn Store>);
    Some(store.map_err(|error| Failure::of(exit::USAGE, &error)))
}

fn is_mssql(url: &str) -> bool {
    ["sqlserver://", "mssql://"].iter().any(|scheme| url.starts_with(scheme))
}

fn mssql(url: &str) -> Option<Opened> {
    is_mssql(url).then(|| mssql_opened(url))
}

#[cfg(feature = "mssql")]
fn mssql_opened(url: &str) -> Opened {
    let store = postroom_mssql::Database::new(url).map(|database| Arc::new(database) as Arc<dyn Store>);
    store.map_err(|error| Failure::of(exit::USAGE, &error))
}

#[cfg(feature = "mssql")]
fn mssql_frugal(url: &str, routes: usize) -> Result<(Arc<dyn Store>, usize), Failure> {
    let frugal = postroom_mssql::Database::frugal(url, routes);
    let (database, connections) = frugal.map_err(|error| Failure::of(exit::USAGE, &error))?;
    Ok((Arc::new(database), connections))
}

#[cfg(not(feature = "mssql"))]
fn mssql_opened(_: &str) -> Opened {
    Err(Failure::new(exit::USAGE, "this program was built without SQL Server; build it with `--features mssql`"))
}

#[cfg(not(feature = "mssql"))]
fn mssql_frugal(url: &str, _: usize) -> Result<(Arc<dyn Store>, usize), Failure> {
    mssql_opened(url).map(|store| (store, 0))
}

fn sqlite(url: &str) -> Option<Opened> {
    let Some(path) = postroom_sqlite::path_of(url) else {
        let is_nameless = url.starts_with("sqlite:");
        return is_nameless
            .then(|| Err(Failure::new(exit::USAGE, format!("store URL {url:?} names no file; write sqlite:FILE"))));
    };
    Some(Ok(Arc::new(postroom_sqlite::Database::new(path))))
}
