//! One connection that is opened when it is needed and again after it broke.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use postroom::StoreError;
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, SimpleQueryMessage, Statement};

use crate::connect::{Connector, behind_a_pooler};

/// No statement of ours takes this long; one that does waits for something that is gone.
const CALL_TIMEOUT: Duration = Duration::from_secs(60);
/// Connecting, TLS, authentication and settings together: a proxy that accepts and says nothing must not hang us.
const OPEN_TIMEOUT: Duration = Duration::from_secs(10);

/// The relay's statements are all index scans; a plan made while a table was small and cached must not become a
/// sequential scan when it has grown.
const SETTINGS: &str = "-c enable_seqscan=off -c jit=off -c statement_timeout=50s \
                        -c idle_in_transaction_session_timeout=5s -c lock_timeout=20s";

/// Which server and database answer, by what no two incarnations share: after a failover, a restore or a crash it may have
/// forgotten what it told us, and hand out the same transaction ids and seqs again. Then the backend, whether our settings
/// arrived, and in which encoding the database holds text.
const IDENTITY_SQL: &str =
    "select s.system_identifier || '/' || c.timeline_id || '/' || pg_postmaster_start_time()::text || '/' || d.oid,
            pg_backend_pid(),
            current_setting('enable_seqscan') = 'off' and current_setting('idle_in_transaction_session_timeout') = '5s',
            current_setting('server_encoding')
       from pg_control_system() s, pg_control_checkpoint() c, pg_database d
      where d.datname = current_database()";

/// The server that the links of one source talk to. Each new incarnation is a new generation; what was learnt under an
/// older one must not be used any more.
#[derive(Debug, Default)]
pub(crate) struct Server(Mutex<Incarnation>);

#[derive(Debug, Default)]
struct Incarnation {
    identity: Option<String>,
    generation: u64,
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

    /// What was learnt so far is not to be used any more, although the server is the same.
    pub fn forget(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).generation += 1;
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

/// A connection for one purpose. Calls queue up; a call that fails, is cancelled, or takes too long, closes it, and the next
/// call opens another.
pub(crate) struct Link {
    connector: Arc<Connector>,
    server: Arc<Server>,
    settings: &'static str,
    call_timeout: Duration,
    session: tokio::sync::Mutex<Option<Session>>,
}

impl Link {
    pub fn new(connector: Arc<Connector>, server: Arc<Server>, settings: &'static str) -> Self {
        let session = tokio::sync::Mutex::new(None);
        Self { connector, server, settings, call_timeout: CALL_TIMEOUT, session }
    }

    /// Waits at most this long for an answer.
    pub fn call_timeout(mut self, timeout: Duration) -> Self {
        self.call_timeout = timeout;
        self
    }

    /// Runs `work` on the session, if the server is still the one of `generation`. The session is taken out while it runs:
    /// a cancelled call drops it, so that no half-done transaction can meet the next one.
    pub async fn call<T>(
        &self,
        generation: u64,
        what: &'static str,
        work: impl AsyncFnOnce(&mut Session) -> Result<T, tokio_postgres::Error>,
    ) -> Result<T, StoreError> {
        let mut slot = self.session.lock().await;
        let current = self.server.generation();
        let usable = |session: &Session| !session.client.is_closed() && session.generation == current;
        let mut session = match slot.take().filter(usable) {
            Some(session) => session,
            None => match tokio::time::timeout(OPEN_TIMEOUT, self.open(what)).await {
                Ok(opened) => opened?,
                Err(elapsed) => return Err(StoreError::Unavailable { what, source: elapsed.into() }),
            },
        };
        if session.generation != generation {
            *slot = Some(session);
            return Err(StoreError::Unavailable { what, source: Outdated.into() });
        }
        match tokio::time::timeout(self.call_timeout, work(&mut session)).await {
            Ok(Ok(value)) => {
                *slot = Some(session);
                Ok(value)
            }
            Ok(Err(error)) => Err(store_error(what, error)),
            Err(elapsed) => Err(StoreError::Unavailable { what, source: elapsed.into() }),
        }
    }

    async fn open(&self, what: &'static str) -> Result<Session, StoreError> {
        let client = self.connector.connect_set(&format!("{SETTINGS} {}", self.settings)).await?;
        // As a simple query: behind a pooler a prepared one could meet a backend that does not know it.
        let answer = client.simple_query(IDENTITY_SQL).await.map_err(|error| store_error(what, error))?;
        let row = answer.iter().find_map(|message| match message {
            SimpleQueryMessage::Row(row) => Some(row),
            _ => None,
        });
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
    "run `postroom migrate` on this database, unless a restore is under way: then wait until it is complete";

/// Sorts a driver error by what can be done about it.
pub(crate) fn store_error(what: &'static str, error: tokio_postgres::Error) -> StoreError {
    let Some(code) = error.code() else {
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
    let class = &code.code()[..2];
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
