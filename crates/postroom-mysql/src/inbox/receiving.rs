//! The consumer's side: what is admitted, what waits, and what becomes of it.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use async_trait::async_trait;
use mysql_async::prelude::Queryable;
use mysql_async::{Error, Params, Row, Transaction, Value, params};
use postroom::{
    Admitted, Aggregate, BoxError, Consumer, ConsumerStore, KEY_BYTES_MAX, Keep, Message, MessageId, Settle,
    StoreError, Waiting,
};
use sha2::{Digest, Sha256};

use crate::Mysql;
use crate::connect::{DUPLICATE_ENTRY, store_error};
use crate::inbox::once::ADMIT_SQL;
use crate::inbox::queue;
use crate::inbox::session::commit;
use crate::log::{MESSAGE, get, json, message as message_of, noted};
use crate::outbox::encoded;

/// Errors that speak of the values: too long, out of range, null, not of the type, refused by a check.
pub(crate) const ABOUT_VALUES: [u16; 10] = [1048, 1071, 1264, 1292, 1366, 1406, 1690, 3819, 4025, 4078];
const LAPSED_AT_ONCE: u64 = 100;
/// The columns of a message, as they are written here.
const KEPT: &str =
    "topic, type, payload, `key`, routing_key, content_type, headers, tenant_id, aggregate_type, aggregate_id,
                    aggregate_version, occurred_at";

/// Ids that are new to the consumer, noted as received. A concurrent claim of the same id is waited for.
async fn admit(tx: &mut Transaction<'_>, consumer: &str, ids: &[String]) -> Result<HashSet<String>, Error> {
    let mut sorted: Vec<&String> = ids.iter().collect();
    // In one order for all, so that none waits for another in a circle.
    sorted.sort_unstable();
    let sql = "select straight_join i.message_id
                 from (select id from json_table(:ids, '$[*]' columns (id char(36) character set ascii path '$')) j) n
                 join postroom_inbox i force index (primary) on i.consumer = :consumer and i.message_id = n.id order by n.id lock in share mode";
    let known: Vec<String> = tx.exec(sql, params! { "ids" => json(&sorted), "consumer" => consumer }).await?;
    let known: HashSet<String> = known.into_iter().collect();
    let mut new = HashSet::new();
    for id in sorted.into_iter().filter(|id| !known.contains(*id)) {
        match tx.exec_drop(ADMIT_SQL, (consumer, id)).await {
            Ok(()) => {
                new.insert(id.clone());
            }
            Err(Error::Server(server)) if server.code == DUPLICATE_ENTRY => {}
            Err(error) => return Err(error),
        }
    }
    Ok(new)
}

async fn keep(
    tx: &mut Transaction<'_>,
    consumer: &str,
    message: &Message,
    (state, owner, due): (&str, Option<&str>, Duration),
) -> Result<(), BoxError> {
    let sql = format!(
        "insert into postroom_inbox_messages (consumer, id, state, due_at, waits_since, claimed_by, claims, ordering_key, {KEPT})
         values (?, ?, ?, timestampadd(microsecond, ?, utc_timestamp(6)), utc_timestamp(6), ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?,
                 timestampadd(microsecond, ?, '1970-01-01 00:00:00.000000'))
         on duplicate key update seq = seq"
    );
    let mut values: Vec<Value> = vec![
        consumer.into(),
        message.id.to_string().into(),
        state.into(),
        microseconds(due).into(),
        owner.into(),
        i64::from(owner.is_some()).into(),
        message.ordering_key().into(),
    ];
    values.extend(encoded(message)?);
    tx.exec_drop(sql, Params::Positional(values)).await.map_err(Into::into)
}

/// What was noted with a clock that was ahead waits from now on, no longer than it was to wait then. Looked at every five seconds, and at once
/// when the clock is behind the last look.
async fn shorten_waits(tx: &mut Transaction<'_>, consumer: &str) -> Result<(), Error> {
    // The row keeps everybody else who takes messages of this consumer away until the transaction ends.
    let sql = "insert into postroom_inbox_clocks (consumer, looked_at) values (?, null) on duplicate key update consumer = values(consumer)";
    tx.exec_drop(sql, (consumer,)).await?;
    let sql = "select coalesce(looked_at between utc_timestamp(6) - interval 5 second and utc_timestamp(6), 0)
                 from postroom_inbox_clocks where consumer = ? for update";
    if tx.exec_first(sql, (consumer,)).await? == Some(1_i64) {
        return Ok(());
    }
    let sql = "update postroom_inbox_messages force index (postroom_inbox_messages_due)
                  set due_at = timestampadd(microsecond, timestampdiff(microsecond, waits_since, due_at), utc_timestamp(6)),
                      waits_since = utc_timestamp(6)
                where consumer = ? and put_off = 0 and due_at > utc_timestamp(6) and waits_since > utc_timestamp(6) + interval 2 second";
    tx.exec_drop(sql, (consumer,)).await?;
    let sql = "update postroom_inbox_clocks set looked_at = utc_timestamp(6) where consumer = ?";
    tx.exec_drop(sql, (consumer,)).await
}

async fn take(
    tx: &mut Transaction<'_>,
    consumer: &str,
    owner: &str,
    max: usize,
    (lease, claims_max): (Duration, u32),
) -> Result<Vec<Waiting>, Error> {
    shorten_waits(tx, consumer).await?;
    let sql = "select id, claims, ordering_key from postroom_inbox_messages force index (postroom_inbox_messages_state)
                where consumer = ? and state = 'claimed' and due_at <= utc_timestamp(6) and claims >= ? limit ? for update skip locked";
    let lapsed: Vec<(String, u32, Option<String>)> = tx.exec(sql, (consumer, claims_max, LAPSED_AT_ONCE)).await?;
    for (id, claims, key) in lapsed {
        let error = format!("{claims} claims in a row ended without a word: whoever had it died or hung");
        bury(tx, consumer, &id, None, "poison", &error).await?;
        queue::next(tx, consumer, key.as_deref()).await?;
    }
    let chosen = queue::due(tx, consumer, max, claims_max).await?;
    if chosen.is_empty() {
        return Ok(Vec::new());
    }
    let sql = "update json_table(:seqs, '$[*]' columns (seq bigint path '$')) n
                 straight_join postroom_inbox_messages m force index (primary) on m.seq = n.seq
                  set m.window_over = m.window_over or m.state = 'early', m.state = 'claimed', m.claim = m.claim + 1,
                      m.claims = m.claims + 1, m.put_off = 0, m.claimed_by = :owner, m.waits_since = utc_timestamp(6),
                      m.due_at = timestampadd(microsecond, :lease, utc_timestamp(6))";
    let parameters = params! { "seqs" => json(&chosen), "owner" => owner, "lease" => microseconds(lease) };
    tx.exec_drop(sql, parameters).await?;
    let sql = format!(
        "select straight_join {MESSAGE}, o.seq, o.claim, o.claims, o.attempts, o.window_over
           from json_table(?, '$[*]' columns (seq bigint path '$')) n
           join postroom_inbox_messages o force index (primary) on o.seq = n.seq"
    );
    let rows: Vec<Row> = tx.exec(sql, (json(&chosen),)).await?;
    let mut taken = HashMap::with_capacity(rows.len());
    for mut row in rows {
        let row = &mut row;
        let seq: i64 = get(row, "seq")?;
        let waiting = Waiting {
            claim: get(row, "claim")?,
            claims: get(row, "claims")?,
            attempts: get(row, "attempts")?,
            window_over: get(row, "window_over")?,
            message: message_of(row)?,
        };
        taken.insert(seq, waiting);
    }
    // In the order in which they were chosen.
    Ok(chosen.iter().filter_map(|seq| taken.remove(seq)).collect())
}

async fn bury(
    tx: &mut Transaction<'_>,
    consumer: &str,
    id: &str,
    attempts: Option<u32>,
    cause: &str,
    error: &str,
) -> Result<(), Error> {
    let sql = format!(
        "insert into postroom_dead_consume (consumer, id, seq, attempts, cause, error, history, ordering_key, {KEPT})
         select m.consumer, m.id, m.seq, coalesce(:attempts, m.attempts), :cause, :error, {}, m.ordering_key, {KEPT}
           from postroom_inbox_messages m where m.consumer = :consumer and m.id = :id
         on duplicate key update id = values(id)",
        noted("m.history")
    );
    let parameters =
        params! { "attempts" => attempts, "cause" => cause, "error" => error, "consumer" => consumer, "id" => id };
    tx.exec_drop(sql, parameters).await?;
    tx.exec_drop("delete from postroom_inbox_messages where consumer = ? and id = ?", (consumer, id)).await
}

async fn settle(
    tx: &mut Transaction<'_>,
    consumer: &str,
    id: &str,
    claim: i64,
    settle: &Settle,
) -> Result<bool, Error> {
    const MINE: &str = "where consumer = :consumer and id = :id and claim = :claim and state = 'claimed'";
    const NOW: &str = "waits_since = utc_timestamp(6)";
    // The lock keeps it from being taken while this transaction is open.
    let held = format!("select ordering_key, window_over from postroom_inbox_messages {MINE} for update");
    let mine = || vec![("consumer", Value::from(consumer)), ("id", id.into()), ("claim", claim.into())];
    let Some((key, was_early)) = tx.exec_first::<(Option<String>, bool), _, _>(held, Params::from(mine())).await?
    else {
        return Ok(false);
    };
    let mut parameters = mine();
    let sql = match settle {
        Settle::Done => format!("delete from postroom_inbox_messages {MINE}"),
        Settle::GivenBack => format!(
            "update postroom_inbox_messages
                set state = if(window_over, 'early', 'ready'), claims = claims - 1, due_at = utc_timestamp(6), {NOW} {MINE}"
        ),
        Settle::Retry { after, attempts, error } => {
            parameters.extend([
                ("attempts", Value::from(*attempts)),
                ("error", error.into()),
                ("after", microseconds(*after).into()),
            ]);
            format!(
                "update postroom_inbox_messages
                    set history = {}, state = 'ready', claims = 0, attempts = :attempts, last_error = :error,
                        due_at = timestampadd(microsecond, :after, utc_timestamp(6)), {NOW} {MINE}",
                noted("history")
            )
        }
        Settle::Early { window } => {
            parameters.push(("after", microseconds(*window).into()));
            format!(
                "update postroom_inbox_messages
                    set state = 'early', window_over = 0, claims = 0,
                        due_at = timestampadd(microsecond, :after, utc_timestamp(6)), {NOW} {MINE}"
            )
        }
        Settle::Dead { attempts, cause, error } => {
            bury(tx, consumer, id, Some(*attempts), cause.as_str(), error).await?;
            queue::next(tx, consumer, key.as_deref()).await?;
            return Ok(true);
        }
    };
    tx.exec_drop(sql, Params::from(parameters)).await?;
    let leaves_the_queue = match settle {
        Settle::Done | Settle::Dead { .. } | Settle::Early { .. } => true,
        Settle::GivenBack => was_early,
        Settle::Retry { .. } => false,
    };
    if leaves_the_queue {
        queue::next(tx, consumer, key.as_deref()).await?;
    }
    Ok(true)
}

/// The letter has no seq of the messages that wait, so it gets one that they never reach; a key that is too long for the indexes there is not
/// repeated as ordering_key.
async fn keep_dead(tx: &mut Transaction<'_>, consumer: &str, message: &Message, error: &str) -> Result<(), BoxError> {
    let sql =
        "select greatest(4503599627370496, coalesce(max(seq), 0) + 1) from postroom_dead_consume where consumer = ?";
    let seq: i64 = tx.exec_first(sql, (consumer,)).await?.unwrap_or(1 << 52);
    let sql = format!(
        "insert into postroom_dead_consume (consumer, id, seq, attempts, cause, error, ordering_key, {KEPT})
         values (?, ?, ?, 0, 'permanent', ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, timestampadd(microsecond, ?, '1970-01-01 00:00:00.000000'))
         on duplicate key update id = values(id)"
    );
    let key = message.ordering_key().filter(|key| key.len() <= KEY_BYTES_MAX);
    let mut values: Vec<Value> =
        vec![consumer.into(), message.id.to_string().into(), seq.into(), error.into(), key.into()];
    values.extend(encoded(message)?);
    tx.exec_drop(sql, Params::Positional(values)).await.map_err(Into::into)
}

/// What was kept, or why not, as the store says it.
fn sorted<T>(what: &'static str, kept: Result<T, BoxError>) -> Result<T, StoreError> {
    kept.map_err(|error| match error.downcast::<Error>() {
        Ok(error) => store_error(what, *error),
        Err(source) => StoreError::Refused { what, source },
    })
}

fn microseconds(wait: Duration) -> i64 {
    i64::try_from(wait.as_micros()).unwrap_or(i64::MAX)
}

/// What an aggregate is found by: its type and id are too long for a key of the table.
fn hash(aggregate: &Aggregate) -> String {
    let mut sha = Sha256::new();
    sha.update((aggregate.kind.len() as u64).to_be_bytes());
    sha.update(&aggregate.kind);
    sha.update(&aggregate.id);
    sha.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[async_trait]
impl ConsumerStore for Mysql {
    async fn commit(tx: Transaction<'_>) -> Result<(), StoreError> {
        commit(tx).await
    }

    async fn admit(
        tx: &mut Transaction<'_>,
        consumer: &Consumer,
        arrivals: &[(MessageId, Option<String>)],
    ) -> Result<Vec<Admitted>, StoreError> {
        let failed = |error| store_error("claim messages in the inbox", error);
        if arrivals.is_empty() {
            return Ok(Vec::new());
        }
        let ids: Vec<String> = arrivals.iter().map(|(id, _)| id.to_string()).collect();
        let new = admit(tx, consumer.as_str(), &ids).await.map_err(failed)?;
        let keys = arrivals.iter().zip(&ids).filter(|(_, id)| new.contains(*id));
        let keys: HashSet<&String> = keys.filter_map(|((_, key), _)| key.as_ref()).collect();
        let mut waiting = HashSet::new();
        for key in keys {
            let sql = "select 1 from postroom_inbox_messages force index (postroom_inbox_messages_queue)
                        where consumer = ? and key_hash = unhex(sha2(?, 256)) and ordering_key = ? and state <> 'early' limit 1";
            let waits: Option<i64> = tx.exec_first(sql, (consumer.as_str(), key, key)).await.map_err(failed)?;
            if waits.is_some() {
                waiting.insert(key);
            }
        }
        let admitted = |((_, key), id): (&(MessageId, Option<String>), &String)| match key {
            _ if !new.contains(id) => Admitted::Duplicate,
            Some(key) if waiting.contains(key) => Admitted::Behind,
            _ => Admitted::New,
        };
        Ok(arrivals.iter().zip(&ids).map(admitted).collect())
    }

    async fn keep(
        tx: &mut Transaction<'_>,
        consumer: &Consumer,
        messages: &[Message],
        how: Keep<'_>,
    ) -> Result<i64, StoreError> {
        let how = match how {
            Keep::Ready => ("ready", None, Duration::ZERO),
            Keep::Claimed { owner, lease } => ("claimed", Some(owner), lease),
            Keep::Early { window } => ("early", None, window),
        };
        for message in messages {
            sorted("keep received messages", keep(tx, consumer.as_str(), message, how).await)?;
        }
        Ok(0)
    }

    async fn keep_dead(
        tx: &mut Transaction<'_>,
        consumer: &Consumer,
        message: &Message,
        error: &str,
    ) -> Result<(), StoreError> {
        sorted("keep a received message as a dead one", keep_dead(tx, consumer.as_str(), message, error).await)
    }

    async fn take(
        tx: &mut Transaction<'_>,
        consumer: &Consumer,
        owner: &str,
        max: usize,
        lease: Duration,
        claims_max: u32,
    ) -> Result<Vec<Waiting>, StoreError> {
        let taken = take(tx, consumer.as_str(), owner, max, (lease, claims_max)).await;
        taken.map_err(|error| store_error("take waiting messages", error))
    }

    async fn renew(
        tx: &mut Transaction<'_>,
        consumer: &Consumer,
        claims: &[(MessageId, i64)],
        lease: Duration,
    ) -> Result<(), StoreError> {
        let claims: Vec<(String, i64)> = claims.iter().map(|(id, claim)| (id.to_string(), *claim)).collect();
        let sql = "update json_table(:claims, '$[*]' columns (id char(36) character set ascii path '$[0]', claim bigint path '$[1]')) n
                     straight_join postroom_inbox_messages m force index (postroom_inbox_messages_id)
                         on m.consumer = :consumer and m.id = n.id and m.claim = n.claim
                      set m.due_at = timestampadd(microsecond, :lease, utc_timestamp(6)), m.waits_since = utc_timestamp(6)
                    where m.state = 'claimed'";
        let parameters =
            params! { "claims" => json(&claims), "lease" => microseconds(lease), "consumer" => consumer.as_str() };
        let renewed = tx.exec_drop(sql, parameters).await;
        renewed.map_err(|error| store_error("renew the claims of waiting messages", error))
    }

    async fn settle(
        tx: &mut Transaction<'_>,
        consumer: &Consumer,
        id: MessageId,
        claim: i64,
        how: &Settle,
    ) -> Result<bool, StoreError> {
        let settled = settle(tx, consumer.as_str(), &id.to_string(), claim, how).await;
        settled.map_err(|error| store_error("settle a waiting message", error))
    }

    async fn version(
        tx: &mut Transaction<'_>,
        consumer: &Consumer,
        aggregate: &Aggregate,
    ) -> Result<Option<i64>, StoreError> {
        let failed = |error| store_error("read the version of an aggregate", error);
        let hash = hash(aggregate);
        // A row that is not there cannot be locked.
        let sql = "insert into postroom_inbox_versions (consumer, aggregate, aggregate_type, aggregate_id) values (?, ?, ?, ?)
                   on duplicate key update aggregate = values(aggregate)";
        let parameters = (consumer.as_str(), &hash, &aggregate.kind, &aggregate.id);
        tx.exec_drop(sql, parameters).await.map_err(failed)?;
        let sql = "select version from postroom_inbox_versions where consumer = ? and aggregate = ? for update";
        let version: Option<Option<i64>> = tx.exec_first(sql, (consumer.as_str(), &hash)).await.map_err(failed)?;
        Ok(version.flatten())
    }

    async fn set_version(
        tx: &mut Transaction<'_>,
        consumer: &Consumer,
        aggregate: &Aggregate,
        version: i64,
    ) -> Result<(), StoreError> {
        let failed = |error| store_error("note the version of an aggregate", error);
        let sql = "update postroom_inbox_versions set version = ? where consumer = ? and aggregate = ?";
        tx.exec_drop(sql, (version, consumer.as_str(), hash(aggregate))).await.map_err(failed)?;
        let Some(next) = version.checked_add(1) else { return Ok(()) };
        let sql = "update postroom_inbox_messages force index (postroom_inbox_messages_aggregate)
                      set state = 'ready', due_at = utc_timestamp(6), waits_since = utc_timestamp(6)
                    where consumer = ? and aggregate_type = ? and aggregate_id = ? and aggregate_version = ? and state = 'early'";
        let parameters = (consumer.as_str(), &aggregate.kind, &aggregate.id, next);
        tx.exec_drop(sql, parameters).await.map_err(failed)
    }

    async fn waiting_versions(
        tx: &mut Transaction<'_>,
        consumer: &Consumer,
        aggregate: &Aggregate,
        above: i64,
        below: i64,
    ) -> Result<Vec<(i64, bool)>, StoreError> {
        let sql = "select aggregate_version, state = 'early' from postroom_inbox_messages force index (postroom_inbox_messages_aggregate)
                    where consumer = ? and aggregate_type = ? and aggregate_id = ? and aggregate_version > ? and aggregate_version < ?
                    order by aggregate_version";
        let parameters = (consumer.as_str(), &aggregate.kind, &aggregate.id, above, below);
        tx.exec(sql, parameters).await.map_err(|error| store_error("read the versions that wait", error))
    }

    fn refuses_the_message(error: &StoreError) -> bool {
        let StoreError::Refused { source, .. } = error else { return false };
        matches!(source.downcast_ref::<Error>(), Some(Error::Server(server)) if ABOUT_VALUES.contains(&server.code))
    }

    fn sort(error: BoxError) -> Result<StoreError, BoxError> {
        match error.downcast::<Error>() {
            Ok(error) => match store_error("handle a message", *error) {
                again @ (StoreError::Busy { .. } | StoreError::Unavailable { .. }) => Ok(again),
                StoreError::Refused { source, .. } => Err(source),
                schema => Err(schema.into()),
            },
            Err(error) => Err(error),
        }
    }
}
