//! The consumer's side, through sqlx, whichever version `super` names: handlers get `sqlx::Transaction<'_, sqlx::Postgres>`.

use async_trait::async_trait;
use postroom::{BoxError, Session, StoreError, Transactions};
use uuid::Uuid;

use super::sqlx::postgres::{PgArguments, PgRow};
use super::sqlx::query::Query;
use super::sqlx::{self, PgPool, Row, Transaction};
use crate::inbox::driver::{Asked, Driver, Found, Value, receiving_end, unreadable};
use crate::outbox::columns::is_about_values;

/// The inbox for applications that use sqlx.
#[derive(Debug, Clone, Copy, Default)]
pub struct SqlxPostgres;

impl Transactions for SqlxPostgres {
    type Tx<'c> = Transaction<'c, sqlx::Postgres>;
}

/// Takes a worker's transactions from the application's pool, which needs a connection for each worker and two more.
///
/// A handler that hangs in a query is abandoned, and its connection returns to the pool when the server has finished the
/// query: set `statement_timeout` on the pool.
#[derive(Debug, Clone)]
pub struct SqlxSession {
    pool: PgPool,
}

impl SqlxSession {
    /// Transactions of this pool.
    pub fn new(pool: PgPool) -> Self {
        Self { pool }
    }
}

#[async_trait]
impl Session<SqlxPostgres> for SqlxSession {
    async fn begin(&mut self) -> Result<Transaction<'_, sqlx::Postgres>, StoreError> {
        const WHAT: &str = "begin the consumer's transaction";
        let mut tx = self.pool.begin().await.map_err(|error| store_error(WHAT, error))?;
        sqlx::query("set local lock_timeout = '5s'")
            .execute(&mut *tx)
            .await
            .map_err(|error| store_error(WHAT, error))?;
        Ok(tx)
    }
}

/// The statement with its parameters.
fn asked<'a>(asked: Asked<'a>) -> Query<'a, sqlx::Postgres, PgArguments> {
    asked.values.iter().fold(sqlx::query(asked.sql), |query, value| match *value {
        Value::Text(value) => query.bind(value),
        Value::MaybeText(value) => query.bind(value),
        Value::Bytes(value) => query.bind(value),
        Value::Int4(value) => query.bind(value),
        Value::Int8(value) => query.bind(value),
        Value::MaybeInt8(value) => query.bind(value),
        Value::Float8(value) => query.bind(value),
        Value::Uuid(value) => query.bind(value),
        Value::Texts(value) => query.bind(value),
        Value::MaybeTexts(value) => query.bind(value),
        Value::MaybeStrings(value) => query.bind(value),
        Value::Blobs(value) => query.bind(value),
        Value::Int8s(value) => query.bind(value),
        Value::MaybeInt8s(value) => query.bind(value),
        Value::Uuids(value) => query.bind(value),
    })
}

impl Found for PgRow {
    fn uuid(&self, column: &str) -> Result<Uuid, StoreError> {
        self.try_get(column).map_err(unreadable)
    }

    fn text(&self, column: &str) -> Result<String, StoreError> {
        self.try_get(column).map_err(unreadable)
    }

    fn maybe_text(&self, column: &str) -> Result<Option<String>, StoreError> {
        self.try_get(column).map_err(unreadable)
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

#[async_trait]
impl Driver for SqlxPostgres {
    type Row = PgRow;

    async fn rows(tx: &mut Transaction<'_, sqlx::Postgres>, asked_for: Asked<'_>) -> Result<Vec<PgRow>, StoreError> {
        asked(asked_for).fetch_all(&mut **tx).await.map_err(|error| store_error(asked_for.what, error))
    }

    async fn changed(tx: &mut Transaction<'_, sqlx::Postgres>, asked_for: Asked<'_>) -> Result<u64, StoreError> {
        let done = asked(asked_for).execute(&mut **tx).await;
        Ok(done.map_err(|error| store_error(asked_for.what, error))?.rows_affected())
    }
}

async fn commit(mut tx: Transaction<'_, sqlx::Postgres>) -> Result<(), StoreError> {
    // An aborted transaction answers COMMIT with a silent rollback; this statement fails there instead.
    for statement in include_str!("sql/commit_surely.sql").split(";\n") {
        let done = sqlx::query(statement).execute(&mut *tx).await;
        done.map_err(|error| store_error("apply the effect: its transaction is aborted", error))?;
    }
    tx.commit().await.map_err(|error| store_error("commit the effect", error))
}

receiving_end!(SqlxPostgres, |tx| commit(tx).await, refuses: refuses_the_message, sort: sort);

fn refuses_the_message(error: &StoreError) -> bool {
    let StoreError::Refused { source, .. } = error else { return false };
    let database = source.downcast_ref::<sqlx::Error>().and_then(sqlx::Error::as_database_error);
    database.and_then(|db| db.code()).is_some_and(|code| is_about_values(&code))
}

fn sort(error: BoxError) -> Result<StoreError, BoxError> {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error.as_ref());
    while let Some(inner) = cause {
        if let Some(inner) = inner.downcast_ref::<sqlx::Error>() {
            // A query that was cancelled for its time comes again with the same message.
            let cancelled = inner.as_database_error().is_some_and(|db| db.code().as_deref() == Some("57014"));
            let what = "handle a message";
            return match sorted(inner) {
                Sorted::Busy if !cancelled => Ok(StoreError::Busy { what, source: error }),
                Sorted::Unavailable => Ok(StoreError::Unavailable { what, source: error }),
                _ => Err(error),
            };
        }
        cause = inner.source();
    }
    Err(error)
}

enum Sorted {
    Busy,
    Unavailable,
    Schema,
    Refused,
}

fn sorted(error: &sqlx::Error) -> Sorted {
    let code = match error {
        sqlx::Error::Io(_) | sqlx::Error::PoolClosed | sqlx::Error::Tls(_) => return Sorted::Unavailable,
        sqlx::Error::PoolTimedOut => return Sorted::Busy,
        other => other.as_database_error().and_then(|db| db.code()).unwrap_or_default(),
    };
    match code.as_ref() {
        "42P01" | "3F000" | "42703" | "42883" => Sorted::Schema,
        "57014" => Sorted::Refused,
        code if code.starts_with("08") || code.starts_with("57P") => Sorted::Unavailable,
        code if ["40", "53", "55", "57", "58"].iter().any(|class| code.starts_with(class)) => Sorted::Busy,
        _ => Sorted::Refused,
    }
}

fn store_error(what: &'static str, error: sqlx::Error) -> StoreError {
    match sorted(&error) {
        Sorted::Busy => StoreError::Busy { what, source: error.into() },
        Sorted::Unavailable => StoreError::Unavailable { what, source: error.into() },
        Sorted::Schema => {
            StoreError::Schema { problem: error.to_string(), hint: "run `postroom migrate` on this database" }
        }
        Sorted::Refused => StoreError::Refused { what, source: error.into() },
    }
}
