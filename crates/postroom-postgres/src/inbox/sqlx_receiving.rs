//! The consumer's side, through sqlx: handlers get `sqlx::Transaction<'_, sqlx::Postgres>`.

use std::collections::HashSet;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use postroom::{
    Admitted, Aggregate, BoxError, Consumer, ConsumerStore, Keep, Message, MessageId, Session, Settle, StoreError,
    Transactions, Waiting, headers_from_json,
};
use sqlx::postgres::{PgArguments, PgRow};
use sqlx::query::Query;
use sqlx::{PgPool, Row, Transaction};
use uuid::Uuid;

use crate::inbox::sqlx_filling::keep_dead;
use crate::outbox::columns::{Columns, is_about_values};

/// The inbox for applications that use sqlx.
#[derive(Debug, Clone, Copy, Default)]
pub struct SqlxPostgres;

impl Transactions for SqlxPostgres {
    type Tx<'c> = Transaction<'c, sqlx::Postgres>;
}

/// Takes a worker's transactions from the application's pool, which needs a connection for each worker and two more.
///
/// A handler that hangs in a query is given up, and its connection is the pool's again when the server is done with the
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

pub(crate) type Asked<'a> = Query<'a, sqlx::Postgres, PgArguments>;

pub(crate) async fn rows(
    tx: &mut Transaction<'_, sqlx::Postgres>,
    what: &'static str,
    query: Asked<'_>,
) -> Result<Vec<PgRow>, StoreError> {
    query.fetch_all(&mut **tx).await.map_err(|error| store_error(what, error))
}

pub(crate) async fn changed(
    tx: &mut Transaction<'_, sqlx::Postgres>,
    what: &'static str,
    query: Asked<'_>,
) -> Result<u64, StoreError> {
    Ok(query.execute(&mut **tx).await.map_err(|error| store_error(what, error))?.rows_affected())
}

pub(crate) fn get<'r, T>(row: &'r PgRow, column: &str) -> Result<T, StoreError>
where
    T: sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres>,
{
    row.try_get(column).map_err(|error| store_error("read a row of the inbox", error))
}

fn first<'r, T>(row: &'r PgRow) -> Result<T, StoreError>
where
    T: sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres>,
{
    row.try_get(0).map_err(|error| store_error("read a row of the inbox", error))
}

#[async_trait]
impl ConsumerStore for SqlxPostgres {
    async fn commit(mut tx: Transaction<'_, sqlx::Postgres>) -> Result<(), StoreError> {
        // An aborted transaction answers COMMIT with a silent rollback; this statement fails there instead.
        changed(&mut tx, "have the effect: its transaction is aborted", sqlx::query("select 1")).await?;
        tx.commit().await.map_err(|error| store_error("commit the effect", error))
    }

    async fn admit(
        tx: &mut Transaction<'_, sqlx::Postgres>,
        consumer: &Consumer,
        arrivals: &[(MessageId, Option<String>)],
    ) -> Result<Vec<Admitted>, StoreError> {
        const WHAT: &str = "claim messages in the inbox";
        let ids: Vec<Uuid> = arrivals.iter().map(|(id, _)| Uuid::from(*id)).collect();
        let mut keys: Vec<&str> = arrivals.iter().filter_map(|(_, key)| key.as_deref()).collect();
        keys.sort_unstable();
        keys.dedup();
        let claim = sqlx::query(include_str!("sql/inbox_admit.sql")).bind(consumer.as_str()).bind(&ids);
        let new: HashSet<Uuid> = rows(tx, WHAT, claim).await?.iter().map(first).collect::<Result<_, _>>()?;
        let look = sqlx::query(include_str!("sql/inbox_behind.sql")).bind(consumer.as_str()).bind(&keys);
        let behind: HashSet<String> = rows(tx, WHAT, look).await?.iter().map(first).collect::<Result<_, _>>()?;
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
        tx: &mut Transaction<'_, sqlx::Postgres>,
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
        let query = sqlx::query(include_str!("sql/inbox_keep.sql"))
            .bind(consumer.as_str())
            .bind(state)
            .bind(due.as_secs_f64())
            .bind(owner)
            .bind(&c.ids)
            .bind(&c.topics)
            .bind(&c.kinds)
            .bind(&c.payloads)
            .bind(&c.keys)
            .bind(&c.routing_keys)
            .bind(&c.content_types)
            .bind(&c.headers)
            .bind(&c.tenant_ids)
            .bind(&c.aggregate_types)
            .bind(&c.aggregate_ids)
            .bind(&c.aggregate_versions)
            .bind(&c.occurred_ats);
        rows(tx, WHAT, query).await?.last().map_or(Ok(0), first)
    }

    async fn keep_dead(
        tx: &mut Transaction<'_, sqlx::Postgres>,
        consumer: &Consumer,
        message: &Message,
        error: &str,
    ) -> Result<(), StoreError> {
        keep_dead(tx, consumer, message, error).await
    }

    async fn take(
        tx: &mut Transaction<'_, sqlx::Postgres>,
        consumer: &Consumer,
        owner: &str,
        max: usize,
        lease: Duration,
        claims_max: u32,
    ) -> Result<Vec<Waiting>, StoreError> {
        let query = sqlx::query(include_str!("sql/inbox_take.sql"))
            .bind(consumer.as_str())
            .bind(max.clamp(1, 10_000) as i32)
            .bind(owner)
            .bind(lease.as_secs_f64())
            .bind(claims_max as i32);
        let taken = rows(tx, "take waiting messages", query).await?;
        taken
            .iter()
            .map(|row| {
                Ok(Waiting {
                    claim: get(row, "claim")?,
                    claims: get::<i32>(row, "claims")?.max(0) as u32,
                    attempts: get::<i32>(row, "attempts")?.max(0) as u32,
                    window_over: get(row, "window_over")?,
                    message: message_of(row)?,
                })
            })
            .collect()
    }

    async fn renew(
        tx: &mut Transaction<'_, sqlx::Postgres>,
        consumer: &Consumer,
        claims: &[(MessageId, i64)],
        lease: Duration,
    ) -> Result<(), StoreError> {
        let (ids, claims): (Vec<Uuid>, Vec<i64>) = claims.iter().map(|(id, claim)| (Uuid::from(*id), *claim)).unzip();
        let query = sqlx::query(include_str!("sql/inbox_renew.sql"))
            .bind(consumer.as_str())
            .bind(&ids)
            .bind(&claims)
            .bind(lease.as_secs_f64());
        changed(tx, "renew the claims of waiting messages", query).await.map(drop)
    }

    async fn settle(
        tx: &mut Transaction<'_, sqlx::Postgres>,
        consumer: &Consumer,
        id: MessageId,
        claim: i64,
        settle: &Settle,
    ) -> Result<bool, StoreError> {
        let sql = match settle {
            Settle::Done => include_str!("sql/inbox_settle_done.sql"),
            Settle::GivenBack => include_str!("sql/inbox_settle_back.sql"),
            Settle::Retry { .. } => include_str!("sql/inbox_settle_retry.sql"),
            Settle::Early { .. } => include_str!("sql/inbox_settle_early.sql"),
            Settle::Dead { .. } => include_str!("sql/inbox_settle_dead.sql"),
        };
        let query = sqlx::query(sql).bind(consumer.as_str()).bind(Uuid::from(id)).bind(claim);
        let query = match settle {
            Settle::Done | Settle::GivenBack => query,
            Settle::Retry { after, attempts, error } => {
                query.bind(after.as_secs_f64()).bind(*attempts as i32).bind(error)
            }
            Settle::Early { window } => query.bind(window.as_secs_f64()),
            Settle::Dead { attempts, cause, error } => query.bind(*attempts as i32).bind(cause.as_str()).bind(error),
        };
        Ok(changed(tx, "settle a waiting message", query).await? == 1)
    }

    async fn version(
        tx: &mut Transaction<'_, sqlx::Postgres>,
        consumer: &Consumer,
        aggregate: &Aggregate,
    ) -> Result<Option<i64>, StoreError> {
        const WHAT: &str = "read the version of an aggregate";
        let of = |sql| sqlx::query(sql).bind(consumer.as_str()).bind(&aggregate.kind).bind(&aggregate.id);
        let found = rows(tx, WHAT, of(include_str!("sql/inbox_version.sql"))).await?;
        if let Some(row) = found.first() {
            return first(row);
        }
        changed(tx, WHAT, of(include_str!("sql/inbox_version_first.sql"))).await?;
        rows(tx, WHAT, of(include_str!("sql/inbox_version.sql"))).await?.first().map_or(Ok(None), first)
    }

    async fn set_version(
        tx: &mut Transaction<'_, sqlx::Postgres>,
        consumer: &Consumer,
        aggregate: &Aggregate,
        version: i64,
    ) -> Result<(), StoreError> {
        let query = sqlx::query(include_str!("sql/inbox_set_version.sql"))
            .bind(consumer.as_str())
            .bind(&aggregate.kind)
            .bind(&aggregate.id)
            .bind(version);
        changed(tx, "note the version of an aggregate", query).await.map(drop)
    }

    async fn waiting_versions(
        tx: &mut Transaction<'_, sqlx::Postgres>,
        consumer: &Consumer,
        aggregate: &Aggregate,
        above: i64,
        below: i64,
    ) -> Result<Vec<(i64, bool)>, StoreError> {
        let query = sqlx::query(include_str!("sql/inbox_waiting_versions.sql"))
            .bind(consumer.as_str())
            .bind(&aggregate.kind)
            .bind(&aggregate.id)
            .bind(above)
            .bind(below);
        let found = rows(tx, "read the versions that wait", query).await?;
        let pair = |row: &PgRow| -> Result<(i64, bool), sqlx::Error> { Ok((row.try_get(0)?, row.try_get(1)?)) };
        found.iter().map(|row| pair(row).map_err(|error| store_error("read the versions that wait", error))).collect()
    }

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

fn message_of(row: &PgRow) -> Result<Message, StoreError> {
    let occurred_us: Option<i64> = get(row, "occurred_us")?;
    let occurred = |us: i64| SystemTime::UNIX_EPOCH.checked_add(Duration::from_micros(us.max(0) as u64));
    Ok(Message {
        id: MessageId::from(get::<Uuid>(row, "id")?),
        topic: get(row, "topic")?,
        kind: get(row, "type")?,
        key: get(row, "key")?,
        routing_key: get(row, "routing_key")?,
        payload: get::<Vec<u8>>(row, "payload")?.into(),
        content_type: get(row, "content_type")?,
        headers: headers_from_json(get::<Option<String>>(row, "headers")?.as_deref()),
        tenant_id: get(row, "tenant_id")?,
        aggregate_type: get(row, "aggregate_type")?,
        aggregate_id: get(row, "aggregate_id")?,
        aggregate_version: get(row, "aggregate_version")?,
        occurred_at: occurred_us.and_then(occurred),
        delay: Duration::ZERO,
    })
}
