//! The consumer's side, through tokio-postgres.

use async_trait::async_trait;
use postroom::{BoxError, Session, StoreError, Transactions};
use tokio::runtime::Handle;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Row, SimpleQueryMessage, Transaction};
use uuid::Uuid;

use crate::Postgres;
use crate::connect::Connector;
use crate::inbox::driver::{Asked, Driver, Found, Value, receiving_end, unreadable};
use crate::link::{class_of, store_error};
use crate::outbox::columns::is_about_values;
use crate::text::Text;

/// Waits for locks end here and count as "again": behind a concurrent duplicate whose owner hangs, for one.
const SETTINGS: &str = "-c lock_timeout=5s -c jit=off";
const LOCAL_SETTINGS: &str = "set local lock_timeout = '5s'; set local jit = off";

impl Transactions for Postgres {
    type Tx<'c> = Transaction<'c>;
}

/// A worker's connection, opened when it is needed and again after it broke. A statement that runs when it is dropped is
/// cancelled at the server.
pub struct PostgresSession {
    connector: Connector,
    client: Option<Client>,
    /// A pooler keeps our settings from its sessions: each transaction has its own.
    pooled: bool,
}

impl PostgresSession {
    /// Connects with the first transaction.
    pub fn new(connector: Connector) -> Self {
        Self { connector, client: None, pooled: false }
    }
}

impl PostgresSession {
    async fn connect(&mut self) -> Result<Client, StoreError> {
        let client = match self.connector.connect_set(SETTINGS).await {
            // A pooler refused them.
            Err(StoreError::Refused { .. }) => self.connector.connect().await?,
            opened => opened?,
        };
        let failed = |error| store_error("prepare the consumer's connection", error);
        let answer = client.simple_query("show lock_timeout").await.map_err(failed)?;
        let arrived =
            |message: &SimpleQueryMessage| matches!(message, SimpleQueryMessage::Row(row) if row.get(0) == Some("5s"));
        self.pooled = !answer.iter().any(arrived);
        Ok(client)
    }
}

impl Drop for PostgresSession {
    fn drop(&mut self) {
        if let (Some(client), Ok(runtime)) = (self.client.take(), Handle::try_current())
            && !client.is_closed()
        {
            let (connector, token) = (self.connector.clone(), client.cancel_token());
            runtime.spawn(async move { connector.cancel(token).await });
        }
    }
}

#[async_trait]
impl Session<Postgres> for PostgresSession {
    async fn begin(&mut self) -> Result<Transaction<'_>, StoreError> {
        let client = match self.client.take().filter(|client| !client.is_closed()) {
            Some(client) => client,
            None => self.connect().await?,
        };
        let failed = |error| store_error("begin the consumer's transaction", error);
        let client = self.client.insert(client);
        let tx = client.transaction().await.map_err(failed)?;
        if self.pooled {
            tx.batch_execute(LOCAL_SETTINGS).await.map_err(failed)?;
        }
        Ok(tx)
    }
}

/// A statement that was cancelled for its time, such as a deferred trigger at the commit, comes again with the same message.
fn told(what: &'static str, error: tokio_postgres::Error) -> StoreError {
    if error.code() == Some(&SqlState::QUERY_CANCELED) {
        return StoreError::Refused { what, source: error.into() };
    }
    store_error(what, error)
}

impl Value<'_> {
    fn typed(&self) -> (&(dyn ToSql + Sync), Type) {
        match self {
            Self::Text(value) => (value, Type::TEXT),
            Self::MaybeText(value) => (value, Type::TEXT),
            Self::Bytes(value) => (value, Type::BYTEA),
            Self::Int4(value) => (value, Type::INT4),
            Self::Int8(value) => (value, Type::INT8),
            Self::MaybeInt8(value) => (value, Type::INT8),
            Self::Float8(value) => (value, Type::FLOAT8),
            Self::Uuid(value) => (value, Type::UUID),
            Self::Texts(value) => (value, Type::TEXT_ARRAY),
            Self::MaybeTexts(value) => (value, Type::TEXT_ARRAY),
            Self::MaybeStrings(value) => (value, Type::TEXT_ARRAY),
            Self::Blobs(value) => (value, Type::BYTEA_ARRAY),
            Self::Int8s(value) => (value, Type::INT8_ARRAY),
            Self::MaybeInt8s(value) => (value, Type::INT8_ARRAY),
            Self::Uuids(value) => (value, Type::UUID_ARRAY),
        }
    }
}

impl Found for Row {
    fn uuid(&self, column: &str) -> Result<Uuid, StoreError> {
        self.try_get(column).map_err(unreadable)
    }

    fn text(&self, column: &str) -> Result<String, StoreError> {
        Ok(self.maybe_text(column)?.unwrap_or_default())
    }

    fn maybe_text(&self, column: &str) -> Result<Option<String>, StoreError> {
        Ok(self.try_get::<_, Option<Text>>(column).map_err(unreadable)?.map(|text| text.text))
    }

    fn bytes(&self, column: &str) -> Result<Vec<u8>, StoreError> {
        self.try_get(column).map_err(unreadable)
    }

    fn int4(&self, column: &str) -> Result<i32, StoreError> {
        self.try_get(column).map_err(unreadable)
    }

    fn int8(&self, column: &str) -> Result<i64, StoreError> {
        self.try_get(column).map_err(unreadable)
    }

    fn maybe_int8(&self, column: &str) -> Result<Option<i64>, StoreError> {
        self.try_get(column).map_err(unreadable)
    }

    fn flag(&self, column: &str) -> Result<bool, StoreError> {
        self.try_get(column).map_err(unreadable)
    }
}

/// One round trip: the types are said, so that nothing has to be prepared.
async fn rows(tx: &Transaction<'_>, Asked { what, sql, values }: Asked<'_>) -> Result<Vec<Row>, StoreError> {
    let values: Vec<_> = values.iter().map(Value::typed).collect();
    tx.query_typed(sql, &values).await.map_err(|error| told(what, error))
}

#[async_trait]
impl Driver for Postgres {
    type Row = Row;

    async fn rows(tx: &mut Transaction<'_>, asked: Asked<'_>) -> Result<Vec<Row>, StoreError> {
        rows(tx, asked).await
    }

    async fn changed(tx: &mut Transaction<'_>, Asked { what, sql, values }: Asked<'_>) -> Result<u64, StoreError> {
        let values: Vec<_> = values.iter().map(Value::typed).collect();
        tx.execute_typed(sql, &values).await.map_err(|error| told(what, error))
    }

    async fn both(
        tx: &mut Transaction<'_>,
        first: Asked<'_>,
        second: Asked<'_>,
    ) -> Result<(Vec<Row>, Vec<Row>), StoreError> {
        // Sent together; the server runs them one after the other.
        tokio::try_join!(biased; rows(tx, first), rows(tx, second))
    }
}

async fn commit(tx: Transaction<'_>) -> Result<(), StoreError> {
    // A handler that swallowed a database error left the transaction aborted, and the server answers COMMIT with a silent
    // rollback. This statement fails there instead.
    tx.batch_execute(include_str!("sql/commit_surely.sql"))
        .await
        .map_err(|error| told("apply the effect: its transaction is aborted", error))?;
    tx.commit().await.map_err(|error| told("commit the effect", error))
}

receiving_end!(Postgres, |tx| commit(tx).await, refuses: refuses_the_message, sort: sort);

fn refuses_the_message(error: &StoreError) -> bool {
    let StoreError::Refused { source, .. } = error else { return false };
    let code = source.downcast_ref::<tokio_postgres::Error>().and_then(tokio_postgres::Error::code);
    code.is_some_and(|code| is_about_values(code.code()))
}

fn sort(error: BoxError) -> Result<StoreError, BoxError> {
    let error = match error.downcast::<tokio_postgres::Error>() {
        Ok(error) => *error,
        Err(error) => {
            // Wrapped by the handler's own error: it is looked for among the causes.
            let mut cause = error.source();
            while let Some(inner) = cause {
                if let Some(inner) = inner.downcast_ref::<tokio_postgres::Error>() {
                    return match (says_nothing_about_the_message(inner), is_gone(inner)) {
                        (false, _) => Err(error),
                        (true, true) => Ok(StoreError::Unavailable { what: HANDLING, source: error }),
                        (true, false) => Ok(StoreError::Busy { what: HANDLING, source: error }),
                    };
                }
                cause = inner.source();
            }
            return Err(error);
        }
    };
    if says_nothing_about_the_message(&error) { Ok(store_error(HANDLING, error)) } else { Err(error.into()) }
}

const HANDLING: &str = "handle a message";

/// The connection or the server went away.
fn is_gone(error: &tokio_postgres::Error) -> bool {
    error.code().is_none_or(|code| code.code().starts_with("08") || code.code().starts_with("57P"))
}

/// Locks, serialization, deadlocks, resources, a server that goes or comes, a broken connection. Not a query that was
/// cancelled for its time, nor a value that does not fit: those come again with the same message.
fn says_nothing_about_the_message(error: &tokio_postgres::Error) -> bool {
    let Some(code) = error.code() else {
        let cause = std::error::Error::source(error);
        return error.is_closed() || cause.is_some_and(|cause| cause.is::<std::io::Error>());
    };
    let class = class_of(code);
    *code == SqlState::LOCK_NOT_AVAILABLE || ["40", "53", "08", "58"].contains(&class) || code.code().starts_with("57P")
}
