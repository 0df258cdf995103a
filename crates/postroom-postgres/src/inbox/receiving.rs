//! The consumer's side, through tokio-postgres.

use std::collections::HashSet;
use std::time::Duration;

use async_trait::async_trait;
use postroom::{
    Admitted, Aggregate, BoxError, Consumer, ConsumerStore, Keep, Message, MessageId, Session, Settle, StoreError,
    Transactions, Waiting,
};
use tokio::runtime::Handle;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Row, SimpleQueryMessage, Transaction};
use uuid::Uuid;

use crate::Postgres;
use crate::connect::Connector;
use crate::inbox::filling::keep_dead;
use crate::link::store_error;
use crate::log::row::{get, message_of};
use crate::outbox::columns::{Columns, is_about_values};

/// Waits for locks end here and count as "again": behind a concurrent duplicate whose owner hangs, for one.
const SETTINGS: &str = "-c lock_timeout=5s -c jit=off";
const LOCAL_SETTINGS: &str = "set local lock_timeout = '5s'; set local jit = off";

impl Transactions for Postgres {
    type Tx<'c> = Transaction<'c>;
}

/// A worker's connection, opened when it is needed and again after it broke. What is under way when it is dropped is
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

pub(crate) type Parameter<'a> = (&'a (dyn ToSql + Sync), Type);

/// One round trip: the types are said, so that nothing has to be prepared.
pub(crate) async fn query(
    tx: &Transaction<'_>,
    what: &'static str,
    sql: &str,
    parameters: &[Parameter<'_>],
) -> Result<Vec<Row>, StoreError> {
    tx.query_typed(sql, parameters).await.map_err(|error| told(what, error))
}

pub(crate) async fn execute(
    tx: &Transaction<'_>,
    what: &'static str,
    sql: &str,
    parameters: &[Parameter<'_>],
) -> Result<u64, StoreError> {
    tx.execute_typed(sql, parameters).await.map_err(|error| told(what, error))
}

#[async_trait]
impl ConsumerStore for Postgres {
    async fn commit(tx: Transaction<'_>) -> Result<(), StoreError> {
        // A handler that swallowed a database error left the transaction aborted, and the server answers COMMIT with a
        // silent rollback. This statement fails there instead.
        tx.batch_execute("select 1")
            .await
            .map_err(|error| told("have the effect: its transaction is aborted", error))?;
        tx.commit().await.map_err(|error| told("commit the effect", error))
    }

    async fn admit(
        tx: &mut Transaction<'_>,
        consumer: &Consumer,
        arrivals: &[(MessageId, Option<String>)],
    ) -> Result<Vec<Admitted>, StoreError> {
        const WHAT: &str = "claim messages in the inbox";
        let ids: Vec<Uuid> = arrivals.iter().map(|(id, _)| Uuid::from(*id)).collect();
        let mut keys: Vec<&str> = arrivals.iter().filter_map(|(_, key)| key.as_deref()).collect();
        keys.sort_unstable();
        keys.dedup();
        let consumer = consumer.as_str();
        let claim: [Parameter<'_>; 2] = [(&consumer, Type::TEXT), (&ids, Type::UUID_ARRAY)];
        let look: [Parameter<'_>; 2] = [(&consumer, Type::TEXT), (&keys, Type::TEXT_ARRAY)];
        // One round trip for both; the server runs them one after the other.
        let (new, behind) = tokio::try_join!(
            biased;
            query(tx, WHAT, include_str!("sql/inbox_admit.sql"), &claim),
            query(tx, WHAT, include_str!("sql/inbox_behind.sql"), &look),
        )?;
        let new: HashSet<Uuid> = new.iter().map(|row| get(row, 0)).collect::<Result<_, _>>()?;
        let behind: HashSet<String> = behind.iter().map(|row| get(row, 0)).collect::<Result<_, _>>()?;
        let admitted = |(id, key): &(MessageId, Option<String>)| {
            if !new.contains(id.as_uuid()) {
                Admitted::Duplicate
            } else if key.as_ref().is_some_and(|key| behind.contains(key)) {
                Admitted::Behind
            } else {
                Admitted::New
            }
        };
        Ok(arrivals.iter().map(admitted).collect())
    }

    async fn keep(
        tx: &mut Transaction<'_>,
        consumer: &Consumer,
        messages: &[Message],
        keep: Keep<'_>,
    ) -> Result<i64, StoreError> {
        const WHAT: &str = "keep received messages";
        let (state, owner, due) = match keep {
            Keep::Ready => ("new", None, Duration::ZERO),
            Keep::Claimed { owner, lease } => ("claimed", Some(owner), lease),
            Keep::Early { window } => ("early", None, window),
        };
        let c =
            Columns::as_they_are(messages).map_err(|error| StoreError::Refused { what: WHAT, source: error.into() })?;
        let (consumer, due) = (consumer.as_str(), due.as_secs_f64());
        let parameters: [Parameter<'_>; 17] = [
            (&consumer, Type::TEXT),
            (&state, Type::TEXT),
            (&due, Type::FLOAT8),
            (&owner, Type::TEXT),
            (&c.ids, Type::UUID_ARRAY),
            (&c.topics, Type::TEXT_ARRAY),
            (&c.kinds, Type::TEXT_ARRAY),
            (&c.payloads, Type::BYTEA_ARRAY),
            (&c.keys, Type::TEXT_ARRAY),
            (&c.routing_keys, Type::TEXT_ARRAY),
            (&c.content_types, Type::TEXT_ARRAY),
            (&c.headers, Type::TEXT_ARRAY),
            (&c.tenant_ids, Type::TEXT_ARRAY),
            (&c.aggregate_types, Type::TEXT_ARRAY),
            (&c.aggregate_ids, Type::TEXT_ARRAY),
            (&c.aggregate_versions, Type::INT8_ARRAY),
            (&c.occurred_ats, Type::INT8_ARRAY),
        ];
        let rows = query(tx, WHAT, include_str!("sql/inbox_keep.sql"), &parameters).await?;
        rows.last().map_or(Ok(0), |row| get(row, 0))
    }

    async fn keep_dead(
        tx: &mut Transaction<'_>,
        consumer: &Consumer,
        message: &Message,
        error: &str,
    ) -> Result<(), StoreError> {
        keep_dead(tx, consumer, message, error).await
    }

    async fn take(
        tx: &mut Transaction<'_>,
        consumer: &Consumer,
        owner: &str,
        max: usize,
        lease: Duration,
        claims_max: u32,
    ) -> Result<Vec<Waiting>, StoreError> {
        let (consumer, max, claims_max) = (consumer.as_str(), max.clamp(1, 10_000) as i32, claims_max as i32);
        let lease = lease.as_secs_f64();
        let parameters: [Parameter<'_>; 5] = [
            (&consumer, Type::TEXT),
            (&max, Type::INT4),
            (&owner, Type::TEXT),
            (&lease, Type::FLOAT8),
            (&claims_max, Type::INT4),
        ];
        let rows = query(tx, "take waiting messages", include_str!("sql/inbox_take.sql"), &parameters).await?;
        rows.iter()
            .map(|row| {
                Ok(Waiting {
                    claim: get(row, "claim")?,
                    claims: get::<i32>(row, "claims")?.max(0) as u32,
                    attempts: get::<i32>(row, "attempts")?.max(0) as u32,
                    window_over: get(row, "window_over")?,
                    message: message_of(row)?.0,
                })
            })
            .collect()
    }

    async fn renew(
        tx: &mut Transaction<'_>,
        consumer: &Consumer,
        claims: &[(MessageId, i64)],
        lease: Duration,
    ) -> Result<(), StoreError> {
        let (consumer, lease) = (consumer.as_str(), lease.as_secs_f64());
        let (ids, claims): (Vec<Uuid>, Vec<i64>) = claims.iter().map(|(id, claim)| (Uuid::from(*id), *claim)).unzip();
        let parameters: [Parameter<'_>; 4] =
            [(&consumer, Type::TEXT), (&ids, Type::UUID_ARRAY), (&claims, Type::INT8_ARRAY), (&lease, Type::FLOAT8)];
        execute(tx, "renew the claims of waiting messages", include_str!("sql/inbox_renew.sql"), &parameters)
            .await
            .map(drop)
    }

    async fn settle(
        tx: &mut Transaction<'_>,
        consumer: &Consumer,
        id: MessageId,
        claim: i64,
        settle: &Settle,
    ) -> Result<bool, StoreError> {
        let (consumer, id) = (consumer.as_str(), Uuid::from(id));
        let mut parameters: Vec<Parameter<'_>> = vec![(&consumer, Type::TEXT), (&id, Type::UUID), (&claim, Type::INT8)];
        let (seconds, burned, word);
        let sql = match settle {
            Settle::Done => include_str!("sql/inbox_settle_done.sql"),
            Settle::GivenBack => include_str!("sql/inbox_settle_back.sql"),
            Settle::Retry { after, attempts, error } => {
                (seconds, burned) = (after.as_secs_f64(), *attempts as i32);
                parameters.extend::<[Parameter<'_>; 3]>([
                    (&seconds, Type::FLOAT8),
                    (&burned, Type::INT4),
                    (error, Type::TEXT),
                ]);
                include_str!("sql/inbox_settle_retry.sql")
            }
            Settle::Early { window } => {
                seconds = window.as_secs_f64();
                parameters.push((&seconds, Type::FLOAT8));
                include_str!("sql/inbox_settle_early.sql")
            }
            Settle::Dead { attempts, cause, error } => {
                (burned, word) = (*attempts as i32, cause.as_str());
                parameters.extend::<[Parameter<'_>; 3]>([
                    (&burned, Type::INT4),
                    (&word, Type::TEXT),
                    (error, Type::TEXT),
                ]);
                include_str!("sql/inbox_settle_dead.sql")
            }
        };
        Ok(execute(tx, "settle a waiting message", sql, &parameters).await? == 1)
    }

    async fn version(
        tx: &mut Transaction<'_>,
        consumer: &Consumer,
        aggregate: &Aggregate,
    ) -> Result<Option<i64>, StoreError> {
        const WHAT: &str = "read the version of an aggregate";
        let consumer = consumer.as_str();
        let parameters: [Parameter<'_>; 3] =
            [(&consumer, Type::TEXT), (&aggregate.kind, Type::TEXT), (&aggregate.id, Type::TEXT)];
        let rows = query(tx, WHAT, include_str!("sql/inbox_version.sql"), &parameters).await?;
        if let Some(row) = rows.first() {
            return get(row, 0);
        }
        execute(tx, WHAT, include_str!("sql/inbox_version_first.sql"), &parameters).await?;
        let rows = query(tx, WHAT, include_str!("sql/inbox_version.sql"), &parameters).await?;
        rows.first().map_or(Ok(None), |row| get(row, 0))
    }

    async fn set_version(
        tx: &mut Transaction<'_>,
        consumer: &Consumer,
        aggregate: &Aggregate,
        version: i64,
    ) -> Result<(), StoreError> {
        let consumer = consumer.as_str();
        let parameters: [Parameter<'_>; 4] = [
            (&consumer, Type::TEXT),
            (&aggregate.kind, Type::TEXT),
            (&aggregate.id, Type::TEXT),
            (&version, Type::INT8),
        ];
        execute(tx, "note the version of an aggregate", include_str!("sql/inbox_set_version.sql"), &parameters)
            .await
            .map(drop)
    }

    async fn waiting_versions(
        tx: &mut Transaction<'_>,
        consumer: &Consumer,
        aggregate: &Aggregate,
        above: i64,
        below: i64,
    ) -> Result<Vec<(i64, bool)>, StoreError> {
        let consumer = consumer.as_str();
        let parameters: [Parameter<'_>; 5] = [
            (&consumer, Type::TEXT),
            (&aggregate.kind, Type::TEXT),
            (&aggregate.id, Type::TEXT),
            (&above, Type::INT8),
            (&below, Type::INT8),
        ];
        let sql = include_str!("sql/inbox_waiting_versions.sql");
        let rows = query(tx, "read the versions that wait", sql, &parameters).await?;
        rows.iter().map(|row| Ok((get(row, 0)?, get(row, 1)?))).collect()
    }

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
    let class = &code.code()[..2];
    *code == SqlState::LOCK_NOT_AVAILABLE || ["40", "53", "08", "58"].contains(&class) || code.code().starts_with("57P")
}
