//! The consumer's side: what is admitted, what waits, and what becomes of it.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use async_trait::async_trait;
use postroom::{
    Admitted, Aggregate, BoxError, Consumer, ConsumerStore, KEY_BYTES_MAX, Keep, Message, MessageId, Settle,
    StoreError, Waiting,
};
use sha2::{Digest, Sha256};
use tiberius::error::Error;

use crate::Mssql;
use crate::connect::{is_duplicate, store_error};
use crate::inbox::session::commit;
use crate::inbox::{Transaction, once, queue};
use crate::log::{History, MESSAGE, message as message_of};
use crate::operate::operations::note_death;
use crate::outbox::values_of;
use crate::sql::{from_now, get, json, later, microseconds, named};

/// Errors that speak of the values: cannot be null, refused by a check, too long, out of range, not of the type, too long for an index.
pub(crate) const ABOUT_VALUES: [u32; 12] = [220, 241, 242, 245, 515, 517, 547, 1946, 2628, 8114, 8115, 8152];
const LAPSED_AT_ONCE: usize = 100;
/// The columns of a message, as they are written here.
const KEPT: &str =
    "topic, type, payload, [key], routing_key, content_type, headers, tenant_id, aggregate_type, aggregate_id,
                    aggregate_version, occurred_at";

/// The values of [`KEPT`].
fn kept_values() -> String {
    let occurred = later("@occurred", "convert(datetime2(6), '1970-01-01')");
    format!(
        "@topic, @type, @payload, @key, @routing_key, @content_type, @headers, @tenant_id, @aggregate_type, @aggregate_id,
         @aggregate_version, {occurred}"
    )
}

/// Ids that are new to the consumer, noted as received. A concurrent claim of the same id is waited for.
async fn admit(tx: &mut Transaction<'_>, consumer: &str, ids: &[String]) -> Result<HashSet<String>, Error> {
    let mut sorted: Vec<&String> = ids.iter().collect();
    // In one order for all, so that none waits for another in a circle.
    sorted.sort_unstable();
    let sql = "select i.message_id
                 from openjson(@ids) with (id uniqueidentifier '$') n
                 join postroom_inbox i on i.consumer = @consumer and i.message_id = n.id
               option (loop join, force order)";
    let known: Vec<String> = tx.query(sql, named! { "ids" => json(&sorted), "consumer" => consumer }).await?;
    let known: HashSet<String> = known.into_iter().collect();
    let mut new = HashSet::new();
    for id in sorted.into_iter().filter(|id| !known.contains(*id)) {
        if once::admit(&mut tx.conn().driver, consumer, id).await? {
            new.insert(id.clone());
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
         select @consumer, @id, @state, {}, sysutcdatetime(), @owner, @claims, @ordering_key, {}
          where not exists (select 1 from postroom_inbox_messages m with (updlock, rowlock, forceseek) where m.consumer = @consumer and m.id = @id)",
        from_now("@due"),
        kept_values()
    );
    let mut values = values_of(message)?;
    values.extend(named! {
        "consumer" => consumer, "state" => state, "due" => microseconds(due), "owner" => owner, "claims" => owner.is_some(),
        "ordering_key" => message.ordering_key()
    });
    tx.exec(&sql, values).await?;
    Ok(())
}

/// What was noted with a clock that was ahead waits from now on, no longer than it was to wait then. Looked at every five seconds, and at once
/// when the clock is behind the last look.
async fn shorten_waits(tx: &mut Transaction<'_>, consumer: &str) -> Result<(), Error> {
    let of = || named! { "consumer" => consumer };
    // The row keeps everybody else who takes messages of this consumer away until the transaction ends.
    let sql = "insert into postroom_inbox_clocks (consumer, looked_at)
               select @consumer, null where not exists (select 1 from postroom_inbox_clocks c with (updlock, holdlock) where c.consumer = @consumer)";
    tx.exec(sql, of()).await?;
    let sql = "select case when looked_at between dateadd(second, -5, sysutcdatetime()) and sysutcdatetime() then 1 else 0 end
                 from postroom_inbox_clocks with (updlock, rowlock) where consumer = @consumer";
    if tx.first(sql, of()).await? == Some(1_i64) {
        return Ok(());
    }
    let sql = format!(
        "update postroom_inbox_messages with (rowlock, readcommittedlock, readpast) set due_at = {}, waits_since = sysutcdatetime()
          where consumer = @consumer and put_off = 0 and due_at > sysutcdatetime() and waits_since > dateadd(second, 2, sysutcdatetime())",
        from_now("datediff_big(microsecond, waits_since, due_at)")
    );
    tx.exec(&sql, of()).await?;
    let sql = "update postroom_inbox_clocks set looked_at = sysutcdatetime() where consumer = @consumer";
    tx.exec(sql, of()).await.map(drop)
}

async fn take(
    tx: &mut Transaction<'_>,
    consumer: &str,
    owner: &str,
    max: usize,
    (lease, claims_max): (Duration, u32),
) -> Result<Vec<Waiting>, Error> {
    shorten_waits(tx, consumer).await?;
    let sql = "select top (@count) id, claims, ordering_key
                 from postroom_inbox_messages with (updlock, rowlock, readcommittedlock, readpast, forceseek, index(postroom_inbox_messages_state))
                where consumer = @consumer and state = 'claimed' and due_at <= sysutcdatetime() and claims >= @claims_max";
    let parameters = named! { "consumer" => consumer, "claims_max" => claims_max, "count" => LAPSED_AT_ONCE };
    let lapsed: Vec<(String, u32, Option<String>)> = tx.query(sql, parameters).await?;
    for (id, claims, key) in lapsed {
        let error = format!("{claims} claims in a row ended without a word: whoever had it died or hung");
        bury(tx, consumer, &id, None, "poison", &error).await?;
        queue::next(tx, consumer, key.as_deref()).await?;
    }
    let chosen = queue::due(tx, consumer, max, claims_max).await?;
    if chosen.is_empty() {
        return Ok(Vec::new());
    }
    let sql = format!(
        "update m set window_over = case when m.window_over = 1 or m.state = 'early' then 1 else 0 end, state = 'claimed', claim = m.claim + 1,
                      claims = m.claims + 1, put_off = 0, claimed_by = @owner, waits_since = sysutcdatetime(), due_at = {}
           from openjson(@seqs) with (seq bigint '$') n
           join postroom_inbox_messages m with (rowlock) on m.seq = n.seq
         option (loop join, force order)",
        from_now("@lease")
    );
    let parameters = named! { "seqs" => json(&chosen), "owner" => owner, "lease" => microseconds(lease) };
    tx.exec(&sql, parameters).await?;
    let sql = format!(
        "select {MESSAGE}, o.seq, o.claim, o.claims, o.attempts, o.window_over
           from openjson(@seqs) with (seq bigint '$') n
           join postroom_inbox_messages o on o.seq = n.seq
         option (loop join, force order)"
    );
    let rows = tx.rows(&sql, named! { "seqs" => json(&chosen) }).await?;
    let mut taken = HashMap::with_capacity(rows.len());
    for row in &rows {
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

/// What failed before of a message that waits, and how often it was tried.
async fn history(tx: &mut Transaction<'_>, consumer: &str, id: &str) -> Result<(History, u32), Error> {
    let sql = "select history, attempts from postroom_inbox_messages with (updlock, rowlock, forceseek, index(postroom_inbox_messages_id)) where consumer = @consumer and id = @id";
    let found: Option<(String, u32)> = tx.first(sql, named! { "consumer" => consumer, "id" => id }).await?;
    let (history, attempts) = found.unwrap_or_default();
    Ok((History::of(Some(&history)), attempts))
}

async fn bury(
    tx: &mut Transaction<'_>,
    consumer: &str,
    id: &str,
    attempts: Option<u32>,
    cause: &str,
    error: &str,
) -> Result<(), Error> {
    let (history, tried) = history(tx, consumer, id).await?;
    let attempts = attempts.unwrap_or(tried);
    let now = History::now(tx.conn()).await?;
    let sql = format!(
        "insert into postroom_dead_consume (consumer, id, seq, attempts, cause, error, history, ordering_key, {KEPT})
         select m.consumer, m.id, m.seq, @attempts, @cause, @error, @history, m.ordering_key, {KEPT}
           from postroom_inbox_messages m
          where m.consumer = @consumer and m.id = @id
            and not exists (select 1 from postroom_dead_consume d where d.consumer = @consumer and d.id = @id)"
    );
    let parameters = named! {
        "attempts" => attempts, "cause" => cause, "error" => error, "history" => history.with(&now, attempts, error),
        "consumer" => consumer, "id" => id
    };
    tx.exec(&sql, parameters.clone()).await?;
    note_death(tx.conn(), "in", consumer, id, cause).await?;
    tx.exec("delete from postroom_inbox_messages where consumer = @consumer and id = @id", parameters).await.map(drop)
}

async fn settle(
    tx: &mut Transaction<'_>,
    consumer: &str,
    id: &str,
    claim: i64,
    settle: &Settle,
) -> Result<bool, Error> {
    const MINE: &str = "where consumer = @consumer and id = @id and claim = @claim and state = 'claimed'";
    // The lock keeps it from being taken while this transaction is open.
    let held = format!(
        "select ordering_key, window_over from postroom_inbox_messages with (updlock, rowlock, forceseek, index(postroom_inbox_messages_id)) {MINE}"
    );
    let mut parameters = named! { "consumer" => consumer, "id" => id, "claim" => claim };
    let Some((key, was_early)) = tx.first::<(Option<String>, bool)>(&held, parameters.clone()).await? else {
        return Ok(false);
    };
    let changed =
        |what: &str| format!("update postroom_inbox_messages set {what}, waits_since = sysutcdatetime() {MINE}");
    let (sql, leaves_the_queue) = match settle {
        Settle::Done => (format!("delete from postroom_inbox_messages {MINE}"), true),
        Settle::GivenBack => (
            changed(
                "state = case when window_over = 1 then 'early' else 'ready' end, claims = claims - 1, due_at = sysutcdatetime()",
            ),
            was_early,
        ),
        Settle::Retry { after, attempts, error } => {
            let (history, _) = history(tx, consumer, id).await?;
            let now = History::now(tx.conn()).await?;
            parameters.extend(named! {
                "attempts" => *attempts, "error" => error, "after" => microseconds(*after),
                "history" => history.with(&now, *attempts, error)
            });
            let due = from_now("@after");
            let what = format!(
                "history = @history, state = 'ready', claims = 0, attempts = @attempts, last_error = @error, due_at = {due}"
            );
            (changed(&what), false)
        }
        Settle::Early { window } => {
            parameters.extend(named! { "after" => microseconds(*window) });
            let what = format!("state = 'early', window_over = 0, claims = 0, due_at = {}", from_now("@after"));
            (changed(&what), true)
        }
        Settle::Dead { attempts, cause, error } => {
            bury(tx, consumer, id, Some(*attempts), cause.as_str(), error).await?;
            queue::next(tx, consumer, key.as_deref()).await?;
            return Ok(true);
        }
    };
    tx.exec(&sql, parameters).await?;
    if leaves_the_queue {
        queue::next(tx, consumer, key.as_deref()).await?;
    }
    Ok(true)
}

/// The letter has no seq of the messages that wait, so it gets one that they never reach; a key that is too long for the indexes there is not
/// repeated as ordering_key.
async fn keep_dead(tx: &mut Transaction<'_>, consumer: &str, message: &Message, error: &str) -> Result<(), BoxError> {
    const BEYOND: i64 = 1 << 52;
    let sql = "select coalesce(max(seq), 0) + 1 from postroom_dead_consume where consumer = @consumer";
    let seq: i64 = tx.first(sql, named! { "consumer" => consumer }).await?.unwrap_or_default();
    let sql = format!(
        "insert into postroom_dead_consume (consumer, id, seq, attempts, cause, error, ordering_key, {KEPT})
         select @consumer, @id, @seq, 0, 'permanent', @error, @ordering_key, {}
          where not exists (select 1 from postroom_dead_consume d with (updlock, rowlock, forceseek) where d.consumer = @consumer and d.id = @id)",
        kept_values()
    );
    let key = message.ordering_key().filter(|key| key.len() <= KEY_BYTES_MAX);
    let mut values = values_of(message)?;
    values.extend(named! { "consumer" => consumer, "seq" => seq.max(BEYOND), "error" => error, "ordering_key" => key });
    tx.exec(&sql, values).await?;
    note_death(tx.conn(), "in", consumer, &message.id.to_string(), "permanent").await?;
    Ok(())
}

/// What was kept, or why not, as the store says it.
fn sorted<T>(what: &'static str, kept: Result<T, BoxError>) -> Result<T, StoreError> {
    kept.map_err(|error| match error.downcast::<Error>() {
        Ok(error) => store_error(what, *error),
        Err(source) => StoreError::Refused { what, source },
    })
}

/// What an aggregate is found by: its type and id are too long for a key of the table.
fn hash(aggregate: &Aggregate) -> String {
    let mut sha = Sha256::new();
    sha.update((aggregate.kind.len() as u64).to_be_bytes());
    sha.update(&aggregate.kind);
    sha.update(&aggregate.id);
    sha.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn of_aggregate(consumer: &Consumer, aggregate: &Aggregate) -> crate::sql::Named {
    named! {
        "consumer" => consumer.as_str(), "aggregate_id" => &aggregate.id, "aggregate_type" => &aggregate.kind
    }
}

#[async_trait]
impl ConsumerStore for Mssql {
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
            let sql = "select top (1) 1 from postroom_inbox_messages
                        where consumer = @consumer and key_hash = convert(binary(32), hashbytes('SHA2_256', @key)) and state <> 'early'";
            let parameters = named! { "consumer" => consumer.as_str(), "key" => key };
            let waits: Option<i64> = tx.first(sql, parameters).await.map_err(failed)?;
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
        let sql = format!(
            "update m set due_at = {}, waits_since = sysutcdatetime()
               from openjson(@claims) with (id uniqueidentifier '$[0]', claim bigint '$[1]') n
               join postroom_inbox_messages m with (rowlock) on m.consumer = @consumer and m.id = n.id
              where m.state = 'claimed' and m.claim = n.claim
             option (loop join, force order)",
            from_now("@lease")
        );
        let parameters =
            named! { "claims" => json(&claims), "lease" => microseconds(lease), "consumer" => consumer.as_str() };
        let renewed = tx.exec(&sql, parameters).await.map(drop);
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
        let parameters = named! {
            "consumer" => consumer.as_str(), "hash" => &hash, "type" => &aggregate.kind, "id" => &aggregate.id
        };
        // A row that is not there cannot be locked.
        let sql = "insert into postroom_inbox_versions (consumer, aggregate, aggregate_type, aggregate_id)
                   select @consumer, @hash, @type, @id
                    where not exists (select 1 from postroom_inbox_versions v with (updlock, rowlock, forceseek)
                                       where v.consumer = @consumer and v.aggregate = @hash)";
        match tx.exec(sql, parameters.clone()).await {
            // Another transaction was first, and has ended.
            Err(error) if !is_duplicate(&error) => return Err(failed(error)),
            _ => {}
        }
        let sql = "select version from postroom_inbox_versions with (updlock, rowlock) where consumer = @consumer and aggregate = @hash";
        let version: Option<Option<i64>> = tx.first(sql, parameters).await.map_err(failed)?;
        Ok(version.flatten())
    }

    async fn set_version(
        tx: &mut Transaction<'_>,
        consumer: &Consumer,
        aggregate: &Aggregate,
        version: i64,
    ) -> Result<(), StoreError> {
        let failed = |error| store_error("note the version of an aggregate", error);
        let hash = hash(aggregate);
        let sql =
            "update postroom_inbox_versions set version = @version where consumer = @consumer and aggregate = @hash";
        let parameters = named! { "consumer" => consumer.as_str(), "hash" => &hash, "version" => version };
        tx.exec(sql, parameters).await.map_err(failed)?;
        let Some(next) = version.checked_add(1) else { return Ok(()) };
        let sql = "update postroom_inbox_messages with (rowlock)
                      set state = 'ready', due_at = sysutcdatetime(), waits_since = sysutcdatetime()
                    where consumer = @consumer and aggregate_hash = convert(binary(32), hashbytes('SHA2_256', @aggregate_id)) and aggregate_type = @aggregate_type
                      and aggregate_version = @next and state = 'early'";
        let mut parameters = of_aggregate(consumer, aggregate);
        parameters.extend(named! { "next" => next });
        tx.exec(sql, parameters).await.map(drop).map_err(failed)
    }

    async fn waiting_versions(
        tx: &mut Transaction<'_>,
        consumer: &Consumer,
        aggregate: &Aggregate,
        above: i64,
        below: i64,
    ) -> Result<Vec<(i64, bool)>, StoreError> {
        let sql = "select aggregate_version, case when state = 'early' then 1 else 0 end from postroom_inbox_messages
                    where consumer = @consumer and aggregate_hash = convert(binary(32), hashbytes('SHA2_256', @aggregate_id)) and aggregate_type = @aggregate_type
                      and aggregate_version > @above and aggregate_version < @below
                    order by aggregate_version";
        let mut parameters = of_aggregate(consumer, aggregate);
        parameters.extend(named! { "above" => above, "below" => below });
        tx.query(sql, parameters).await.map_err(|error| store_error("read the versions that wait", error))
    }

    fn refuses_the_message(error: &StoreError) -> bool {
        let StoreError::Refused { source, .. } = error else { return false };
        matches!(source.downcast_ref::<Error>(), Some(Error::Server(server)) if ABOUT_VALUES.contains(&server.code()))
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
