//! One connection that is opened when it is needed and again after it broke.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use postroom::StoreError;
use tokio::sync::Mutex;
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, Statement};

use crate::connect::Connector;

/// No statement of ours takes this long; one that does waits for something that is gone.
const CALL_TIMEOUT: Duration = Duration::from_secs(60);

/// The relay's statements are all index scans; a plan made while a table was small and cached must not become a
/// sequential scan when it has grown.
const SESSION_SQL: &str = "set enable_seqscan = off; set jit = off; set statement_timeout = '50s'; \
                           set idle_in_transaction_session_timeout = '60s'; set lock_timeout = '20s'";

pub(crate) struct Session {
    pub client: Client,
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

/// A connection for one purpose. Calls queue up; a call that fails in a way that leaves the session in doubt, is
/// cancelled, or takes too long, closes it, and the next call opens another.
pub(crate) struct Link {
    connector: Arc<Connector>,
    settings: &'static str,
    session: Mutex<Option<Session>>,
}

impl Link {
    pub fn new(connector: Arc<Connector>, settings: &'static str) -> Self {
        Self { connector, settings, session: Mutex::new(None) }
    }

    /// Runs `work` on the session. The session is taken out while it runs: a cancelled call drops it, so that no half-done
    /// transaction can meet the next one.
    pub async fn call<T>(
        &self,
        what: &'static str,
        work: impl AsyncFnOnce(&mut Session) -> Result<T, tokio_postgres::Error>,
    ) -> Result<T, StoreError> {
        let mut slot = self.session.lock().await;
        let mut session = match slot.take().filter(|session| !session.client.is_closed()) {
            Some(session) => session,
            None => {
                let client = self.connector.connect().await?;
                client.batch_execute(SESSION_SQL).await.map_err(|error| store_error(what, error))?;
                client.batch_execute(self.settings).await.map_err(|error| store_error(what, error))?;
                Session { client, statements: HashMap::new() }
            }
        };
        match tokio::time::timeout(CALL_TIMEOUT, work(&mut session)).await {
            Ok(Ok(value)) => {
                *slot = Some(session);
                Ok(value)
            }
            Ok(Err(error)) => Err(store_error(what, error)),
            Err(elapsed) => Err(StoreError::Unavailable { what, source: elapsed.into() }),
        }
    }
}

/// Sorts a driver error by what can be done about it.
pub(crate) fn store_error(what: &'static str, error: tokio_postgres::Error) -> StoreError {
    let Some(code) = error.code() else {
        // No SQLSTATE: the connection, not the server, is at fault.
        return StoreError::Unavailable { what, source: error.into() };
    };
    if *code == SqlState::UNDEFINED_TABLE
        || *code == SqlState::INVALID_SCHEMA_NAME
        || *code == SqlState::UNDEFINED_COLUMN
        || *code == SqlState::UNDEFINED_FUNCTION
    {
        let problem = error.as_db_error().map_or_else(|| error.to_string(), |db| db.message().to_owned());
        return StoreError::Schema { problem, hint: "run `postroom migrate` on this database" };
    }
    let class = &code.code()[..2];
    // Connection exceptions, and a server that shuts down or starts.
    if class == "08" || code.code().starts_with("57P") {
        return StoreError::Unavailable { what, source: error.into() };
    }
    // Transaction rollback, resources, object not in the right state (locks), operator intervention, system error.
    if ["40", "53", "55", "57", "58"].contains(&class) {
        StoreError::Busy { what, source: error.into() }
    } else {
        StoreError::Refused { what, source: error.into() }
    }
}
