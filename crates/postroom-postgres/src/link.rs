//! Connections that are opened when they are needed and again after they broke.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use postroom::{BoxError, StoreError};
use tokio::sync::Semaphore;
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, SimpleQueryMessage, Statement};

use crate::connect::{Connector, behind_a_pooler};

/// No statement of ours takes this long; one that does waits for something that is gone.
const CALL_TIMEOUT: Duration = Duration::from_secs(60);
/// Connecting, TLS, authentication and settings together: a proxy that accepts and says nothing must not hang us.
const OPEN_TIMEOUT: Duration = Duration::from_secs(10);

/// Names are looked for in pg_catalog alone: whoever may create functions elsewhere must not run code as a relay.
/// The relay's statements are all index scans; a plan made while a table was small and cached must not become a
/// sequential scan when it has grown. Each statement sees what was committed before it, whatever level the server gives to a transaction: whoever waited
/// for a lock must see what the other one did.
const SETTINGS: &str = "-c default_transaction_isolation=read\\ committed -c search_path=pg_catalog,pg_temp -c enable_seqscan=off -c jit=off -c statement_timeout=50s \
                        -c idle_in_transaction_session_timeout=5s -c lock_timeout=20s";

/// Which server and database answer, by what no two incarnations share: after a failover, a restore or a crash it may have
/// forgotten what it told us, and hand out the same transaction ids and seqs again. Then the backend, whether our settings
/// arrived, and in which encoding the database holds text. If a pooler answers, the settings did not arrive, so names are made safe first.
const IDENTITY_SQL: &str = "select pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
     select s.system_identifier || '/' || c.timeline_id || '/' || pg_postmaster_start_time()::text || '/' || d.oid,
            pg_backend_pid(),
            current_setting('enable_seqscan') = 'off' and current_setting('idle_in_transaction_session_timeout') = '5s',
            current_setting('server_encoding')
       from pg_control_system() s, pg_control_checkpoint() c, pg_database d
      where d.datname = current_database()";

/// The server that the links of one database talk to. Each new incarnation is a new generation; what was learnt under an
/// older one must not be used any more.
#[derive(Debug, Default)]
pub(crate) struct Server(Mutex<Incarnation>);

#[derive(Debug, Default)]
struct Incarnation {
    identity: Option<String>,
    generation: u64,
    /// Which rows the positions belong to, as they were seen last.
    positions: Option<i64>,
}

impl Server {
    pub fn generation(&self) -> u64 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).generation
    }

    /// Notes who answered; returns the generation that it belongs to.
    fn met(&self, identity: String) -> u64 {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let another = known.identity.as_ref().is_some_and(|known| *known != identity);
        if another {
            known.generation += 1;
            tracing::warn!("the database server was restarted or replaced; reading again from the stored positions");
        }
        known.identity = Some(identity);
        known.generation
    }

    /// Notes whose positions a look found, which was asked under this generation. Where they are others than before, somebody has
    /// put them right: what was learnt so far is not to be used any more.
    pub fn positions_are_of(&self, generation: u64, positions: i64) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.generation != generation {
            return;
        }
        if known.positions.is_some_and(|before| before != positions) {
            known.generation += 1;
        }
        known.positions = Some(positions);
    }

    /// What was learnt so far is not to be used any more, although the server is the same.
    pub fn forget(&self) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.generation += 1;
        known.positions = None;
    }
}

/// What was asked for belongs to an earlier incarnation of the server.
#[derive(Debug, thiserror::Error)]
#[error("the server was restarted or replaced meanwhile")]
struct Outdated;

pub(crate) struct Session {
    pub client: Client,
    /// The backend that answered first. A pooler lends out several.
    pub backend: i32,
    /// Whether the database can hold every text; where it cannot, texts of our own are kept to ASCII.
    pub holds_unicode: bool,
    generation: u64,
    statements: HashMap<&'static str, Statement>,
}

impl Session {
    pub async fn prepared(&mut self, sql: &'static str) -> Result<Statement, tokio_postgres::Error> {
        if let Some(statement) = self.statements.get(sql) {
            return Ok(statement.clone());
        }
        let statement = self.client.prepare(sql).await?;
        self.statements.insert(sql, statement.clone());
        Ok(statement)
    }
}

/// Connections for one purpose, shared by all routes of a database; opened when they are needed, and again after they broke. Calls
/// queue up when all are in use. A call that fails, is cancelled, or takes too long, closes its connection.
pub(crate) struct Link {
    connector: Arc<Connector>,
    server: Arc<Server>,
    settings: &'static str,
    places: Semaphore,
    /// The one used last is used next, so that those that are not needed stay closed.
    idle: Mutex<Vec<Session>>,
}

impl Link {
    pub fn new(connector: Arc<Connector>, server: Arc<Server>, settings: &'static str, connections_max: usize) -> Self {
        Self { connector, server, settings, places: Semaphore::new(connections_max), idle: Mutex::default() }
    }

    /// As [`Link::call_within`], with as long as any statement of ours may take.
    pub async fn call<T>(
        &self,
        generation: u64,
        what: &'static str,
        work: impl AsyncFnOnce(&mut Session) -> Result<T, tokio_postgres::Error>,
    ) -> Result<T, StoreError> {
        self.call_within(CALL_TIMEOUT, generation, what, work).await
    }

    /// Runs `work` on a session, if the server is still the one of `generation`, and waits for it at most so long; as long again
    /// for a session that is free. The session is taken out while it runs: a cancelled call drops it, so that no half-done
    /// transaction can meet the next one.
    pub async fn call_within<T>(
        &self,
        patience: Duration,
        generation: u64,
        what: &'static str,
        work: impl AsyncFnOnce(&mut Session) -> Result<T, tokio_postgres::Error>,
    ) -> Result<T, StoreError> {
        let unavailable = |source: BoxError| StoreError::Unavailable { what, source };
        let _place = match tokio::time::timeout(patience, self.places.acquire()).await {
            Ok(place) => place.map_err(|closed| unavailable(closed.into()))?,
            Err(elapsed) => return Err(unavailable(elapsed.into())),
        };
        let mut session = match self.idle_session() {
            Some(session) => session,
            None => match tokio::time::timeout(OPEN_TIMEOUT, self.open(what)).await {
                Ok(opened) => opened?,
                Err(elapsed) => return Err(unavailable(elapsed.into())),
            },
        };
        if session.generation != generation {
            self.idle().push(session);
            return Err(unavailable(Outdated.into()));
        }
        match tokio::time::timeout(patience, work(&mut session)).await {
            Ok(Ok(value)) => {
                self.idle().push(session);
                Ok(value)
            }
            Ok(Err(error)) => Err(store_error(what, error)),
            Err(elapsed) => Err(unavailable(elapsed.into())),
        }
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Session>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn idle_session(&self) -> Option<Session> {
        let current = self.server.generation();
        let mut idle = self.idle();
        idle.retain(|session| !session.client.is_closed() && session.generation == current);
        idle.pop()
    }

    async fn open(&self, what: &'static str) -> Result<Session, StoreError> {
        let client = self.connector.connect_set(&format!("{SETTINGS} {}", self.settings)).await?;
        // As a simple query: behind a pooler a prepared one could meet a backend that does not know it.
        let answer = client.simple_query(IDENTITY_SQL).await.map_err(|error| store_error(what, error))?;
        let rows = answer.iter().filter_map(|message| match message {
            SimpleQueryMessage::Row(row) => Some(row),
            _ => None,
        });
        let row = rows.last();
        let get = |column| row.and_then(|row| row.get(column)).unwrap_or_default();
        if get(2) != "t" {
            return Err(behind_a_pooler());
        }
        let backend = get(1).parse().unwrap_or_default();
        let holds_unicode = matches!(get(3), "UTF8" | "SQL_ASCII");
        let generation = self.server.met(get(0).to_owned());
        Ok(Session { client, backend, holds_unicode, generation, statements: HashMap::new() })
    }
}

const UNDEFINED_HINT: &str =
    "run `postroom migrate` on this database, unless a restore is running: then wait until it is complete";

/// The class of a SQLSTATE, its first two characters; a server that is none of ours may send anything.
pub(crate) fn class_of(code: &SqlState) -> &str {
    code.code().get(..2).unwrap_or_default()
}

/// Sorts a driver error by what can be done about it.
pub(crate) fn store_error(what: &'static str, error: tokio_postgres::Error) -> StoreError {
    let Some(code) = error.code() else {
        // A column or parameter of another type than this program knows.
        if std::error::Error::source(&error).is_some_and(|source| source.is::<tokio_postgres::types::WrongType>()) {
            return StoreError::Refused { what, source: error.into() };
        }
        // No SQLSTATE: the connection, not the server, is at fault.
        return StoreError::Unavailable { what, source: error.into() };
    };
    // The last one: a constraint that a restore has not made yet.
    if *code == SqlState::UNDEFINED_TABLE
        || *code == SqlState::INVALID_COLUMN_REFERENCE
        || *code == SqlState::INVALID_SCHEMA_NAME
        || *code == SqlState::UNDEFINED_COLUMN
        || *code == SqlState::UNDEFINED_FUNCTION
    {
        let problem = error.as_db_error().map_or_else(|| error.to_string(), |db| db.message().to_owned());
        return StoreError::Schema { problem, hint: UNDEFINED_HINT };
    }
    let class = class_of(code);
    // Connection exceptions, a server that shuts down or starts, and a database that is being dropped or created anew.
    if class == "08" || code.code().starts_with("57P") || *code == SqlState::UNDEFINED_DATABASE {
        return StoreError::Unavailable { what, source: error.into() };
    }
    // Transaction rollback, resources, object not in the right state (locks), operator intervention, system error.
    if ["40", "53", "55", "57", "58"].contains(&class) {
        StoreError::Busy { what, source: error.into() }
    } else {
        StoreError::Refused { what, source: error.into() }
    }
}
