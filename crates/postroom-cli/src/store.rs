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

fn postgres(url: &str) -> Option<Opened> {
    if !["postgres://", "postgresql://"].iter().any(|scheme| url.starts_with(scheme)) {
        return None;
    }
    let connector = postroom_postgres::Connector::new(url).and_then(|connector| match std::env::var_os("PGPASSFILE") {
        Some(file) => connector.password_from(Path::new(&file)),
        None => Ok(connector),
    });
    let store = connector.map(|connector| Arc::new(postroom_postgres::Database::of(connector)) as Arc<dyn Store>);
    Some(store.map_err(|error| Failure::of(exit::USAGE, &error)))
}

fn mysql(url: &str) -> Option<Opened> {
    if !["mysql://", "mariadb://"].iter().any(|scheme| url.starts_with(scheme)) {
        return None;
    }
    let store = postroom_mysql::Database::new(url).map(|database| Arc::new(database) as Arc<dyn Store>);
    Some(store.map_err(|error| Failure::of(exit::USAGE, &error)))
}

fn sqlite(url: &str) -> Option<Opened> {
    let path = postroom_sqlite::path_of(url)?;
    Some(Ok(Arc::new(postroom_sqlite::Database::new(path))))
}
