//! The consumer's side, through rusqlite.

use std::time::Duration;

use async_trait::async_trait;
use postroom::{
    Admitted, Aggregate, BoxError, Consumer, ConsumerStore, Keep, Message, MessageId, Settle, StoreError, Waiting,
};
use rusqlite::{Connection, OptionalExtension, Row, params};

use crate::Sqlite;
use crate::connect::{NOW, store_error};
use crate::inbox::filling::{is_about_values, keep_dead};
use crate::inbox::queue;
use crate::inbox::transaction::{SqliteTransaction, refused};
use crate::log::record::noted;
use crate::log::row::message_of;
use crate::outbox::columns::{ADMIT_SQL, encoded};

pub(crate) const MESSAGE: &str = "topic, type, payload, key, routing_key, content_type, headers, tenant_id, aggregate_type, \
                       aggregate_id, aggregate_version, occurred_ms";

fn admit(tx: &Connection, consumer: &Consumer, id: MessageId, key: Option<&str>) -> Result<Admitted, rusqlite::Error> {
    let new = tx.prepare_cached(ADMIT_SQL)?.execute(params![consumer.as_str(), id.to_string()])? == 1;
    if !new {
        return Ok(Admitted::Duplicate);
    }
    let Some(key) = key else { return Ok(Admitted::New) };
    let behind = tx
        .prepare_cached(
            "select exists (select 1 from postroom_inbox_messages
                             where consumer = ?1 and ordering_key = ?2 and state <> 'early')",
        )?
        .query_row(params![consumer.as_str(), key], |row| row.get(0))?;
    Ok(if behind { Admitted::Behind } else { Admitted::New })
}

pub(super) fn keep(
    tx: &Connection,
    consumer: &Consumer,
    message: &Message,
    state: &str,
    owner: Option<&str>,
    due: Duration,
) -> Result<(), BoxError> {
    let (headers, occurred, _) = encoded(message)?;
    let sql = format!(
        "insert into postroom_inbox_messages (consumer, id, state, due_ms, waits_since_ms, received_ms, claimed_by, claims, ordering_key, {MESSAGE})
         values (?1, ?2, ?3, {NOW} + ?4, {NOW}, {NOW}, ?5, ?3 = 'claimed', ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18)
             on conflict (consumer, id) do nothing"
    );
    let kept = tx.prepare_cached(&sql)?.execute(params![
        consumer.as_str(),
        message.id.to_string(),
        state,
        due.as_millis() as i64,
        owner,
        message.ordering_key(),
        message.topic,
        message.kind,
        message.payload.as_ref(),
        message.key,
        message.routing_key,
        message.content_type,
        headers,
        message.tenant_id,
        message.aggregate_type,
        message.aggregate_id,
        message.aggregate_version,
        occurred,
    ])?;
    // One that was not inserted was there before, unless a trigger has left it out.
    let is_there = "select exists (select 1 from postroom_inbox_messages where consumer = ?1 and id = ?2)";
    let parameters = params![consumer.as_str(), message.id.to_string()];
    if kept == 0 && !tx.prepare_cached(is_there)?.query_row(parameters, |row| row.get(0))? {
        return Err(format!(
            "the database did not insert message {} and gave no error; look at the triggers of postroom_inbox_messages",
            message.id
        )
        .into());
    }
    Ok(())
}

/// What was noted with a clock that was ahead waits from now on, no longer than it was to wait then. Looked at every five
/// seconds, and at once when the clock is behind the last look.
fn shorten_waits_of_a_clock_that_was_ahead(tx: &Connection, consumer: &Consumer) -> Result<(), rusqlite::Error> {
    let sql = format!("select {NOW} - at_ms, at_ms from postroom_inbox_clocks where consumer = ?1");
    let looked: Option<(i64, i64)> =
        tx.prepare_cached(&sql)?.query_row([consumer.as_str()], |row| Ok((row.get(0)?, row.get(1)?))).optional()?;
    if looked.is_some_and(|(passed, _)| (0..=5000).contains(&passed)) {
        return Ok(());
    }
    // What has no such time was written by an older program: the last look is as good.
    let shorten = format!(
        "update postroom_inbox_messages
            set due_ms = {NOW} + (due_ms - coalesce(waits_since_ms, ?2)), waits_since_ms = {NOW}
          where consumer = ?1 and put_off = 0 and due_ms > {NOW} and coalesce(waits_since_ms, ?2) > {NOW} + 2000"
    );
    tx.execute(&shorten, params![consumer.as_str(), looked.map(|(_, at)| at)])?;
    let looked = format!(
        "insert into postroom_inbox_clocks values (?1, {NOW}) on conflict (consumer) do update set at_ms = excluded.at_ms"
    );
    tx.execute(&looked, [consumer.as_str()]).map(drop)
}

pub(super) fn take(
    tx: &Connection,
    consumer: &Consumer,
    owner: &str,
    max: usize,
    lease: Duration,
    claims_max: u32,
) -> Result<Vec<Waiting>, rusqlite::Error> {
    shorten_waits_of_a_clock_that_was_ahead(tx, consumer)?;
    let lapsed: Vec<(String, u32)> = tx
        .prepare_cached(&format!(
            "select id, claims from postroom_inbox_messages
              where consumer = ?1 and put_off = 0 and state = 'claimed' and due_ms <= {NOW} and claims >= ?2 limit 100"
        ))?
        .query_map(params![consumer.as_str(), claims_max], |row| Ok((row.get(0)?, row.get(1)?)))?
        .collect::<Result<_, _>>()?;
    for (id, claims) in lapsed {
        let error = format!("{claims} claims in a row ended without a word: whoever had it died or hung");
        bury(tx, consumer, &id, None, "poison", &error)?;
    }
    let chosen = queue::due(tx, consumer, max, claims_max)?;
    let mut statement = tx.prepare_cached(
        "select m.*, (m.window_over or m.state = 'early') as was_early from postroom_inbox_messages m where m.seq = ?1",
    )?;
    let waiting = |row: &Row<'_>| {
        Ok(Waiting {
            claim: row.get::<_, i64>("claim")? + 1,
            claims: row.get::<_, u32>("claims")? + 1,
            attempts: row.get("attempts")?,
            window_over: row.get("was_early")?,
            message: message_of(row)?.0,
        })
    };
    let mut taken = Vec::with_capacity(chosen.len());
    for seq in chosen {
        taken.push(statement.query_row([seq], waiting)?);
    }
    for waiting in &taken {
        tx.prepare_cached(&format!(
            "update postroom_inbox_messages
                set state = 'claimed', claim = ?3, claims = ?4, claimed_by = ?5, due_ms = {NOW} + ?6, waits_since_ms = {NOW}, window_over = ?7,
                    put_off = 0
              where consumer = ?1 and id = ?2"
        ))?
        .execute(params![
            consumer.as_str(),
            waiting.message.id.to_string(),
            waiting.claim,
            waiting.claims,
            owner,
            lease.as_millis() as i64,
            waiting.window_over,
        ])?;
    }
    Ok(taken)
}

fn bury(
    tx: &Connection,
    consumer: &Consumer,
    id: &str,
    attempts: Option<u32>,
    cause: &str,
    error: &str,
) -> Result<(), rusqlite::Error> {
    let sql = format!(
        "insert into postroom_dead_consume (consumer, id, seq, attempts, cause, error, history, ordering_key, {MESSAGE})
         select consumer, id, seq, coalesce(?3, attempts), ?4, ?5, {}, ordering_key, {MESSAGE}
           from postroom_inbox_messages where consumer = ?1 and id = ?2
             on conflict do nothing",
        noted("coalesce(?3, attempts)", "?5")
    );
    tx.execute(&sql, params![consumer.as_str(), id, attempts, cause, error])?;
    tx.execute("delete from postroom_inbox_messages where consumer = ?1 and id = ?2", params![consumer.as_str(), id])?;
    Ok(())
}

pub(super) fn settle(
    tx: &Connection,
    consumer: &Consumer,
    id: MessageId,
    claim: i64,
    settle: &Settle,
) -> Result<bool, rusqlite::Error> {
    const MINE: &str = "where consumer = ?1 and id = ?2 and claim = ?3 and state = 'claimed'";
    let (name, id) = (consumer.as_str(), id.to_string());
    let changed = match settle {
        Settle::Done => {
            tx.execute(&format!("delete from postroom_inbox_messages {MINE}"), params![name, id, claim])?
        }
        Settle::GivenBack => tx.execute(
            &format!(
                "update postroom_inbox_messages
                    set state = case window_over when 1 then 'early' else 'ready' end, claims = claims - 1, due_ms = {NOW},
                        waits_since_ms = {NOW} {MINE}"
            ),
            params![name, id, claim],
        )?,
        Settle::Retry { after, attempts, error } => tx.execute(
            &format!(
                "update postroom_inbox_messages
                    set state = 'ready', claims = 0, attempts = ?4, last_error = ?5, due_ms = {NOW} + ?6,
                        waits_since_ms = {NOW}, history = {} {MINE}",
                noted("?4", "?5")
            ),
            params![name, id, claim, attempts, error, after.as_millis() as i64],
        )?,
        Settle::Early { window } => tx.execute(
            &format!(
                "update postroom_inbox_messages
                    set state = 'early', window_over = 0, claims = 0, due_ms = {NOW} + ?4, waits_since_ms = {NOW} {MINE}"
            ),
            params![name, id, claim, window.as_millis() as i64],
        )?,
        Settle::Dead { attempts, cause, error } => {
            let held: bool = tx.query_row(
                &format!("select exists (select 1 from postroom_inbox_messages {MINE})"),
                params![name, id, claim],
                |row| row.get(0),
            )?;
            if held {
                bury(tx, consumer, &id, Some(*attempts), cause.as_str(), error)?;
            }
            usize::from(held)
        }
    };
    Ok(changed == 1)
}

/// What was kept, or why not, as the store says it.
pub(crate) fn sorted<T>(what: &'static str, kept: Result<T, BoxError>) -> Result<T, StoreError> {
    kept.map_err(|error| match error.downcast::<rusqlite::Error>() {
        Ok(error) => store_error(what, *error),
        Err(source) => StoreError::Refused { what, source },
    })
}

#[async_trait]
impl ConsumerStore for Sqlite {
    fn is_open(tx: &SqliteTransaction<'_>) -> bool {
        tx.is_open()
    }

    async fn commit(tx: SqliteTransaction<'_>) -> Result<(), StoreError> {
        tx.commit().await
    }

    async fn admit(
        tx: &mut SqliteTransaction<'_>,
        consumer: &Consumer,
        arrivals: &[(MessageId, Option<String>)],
    ) -> Result<Vec<Admitted>, StoreError> {
        let (consumer, arrivals) = (consumer.clone(), arrivals.to_vec());
        tx.stored("claim messages in the inbox", move |tx| {
            arrivals.iter().map(|(id, key)| admit(tx, &consumer, *id, key.as_deref())).collect()
        })
        .await
    }

    async fn keep(
        tx: &mut SqliteTransaction<'_>,
        consumer: &Consumer,
        messages: &[Message],
        how: Keep<'_>,
    ) -> Result<i64, StoreError> {
        const WHAT: &str = "keep received messages";
        let (consumer, messages) = (consumer.clone(), messages.to_vec());
        let (state, owner, due) = match how {
            Keep::Ready => ("ready", None, Duration::ZERO),
            Keep::Claimed { owner, lease } => ("claimed", Some(owner.to_owned()), lease),
            Keep::Early { window } => ("early", None, window),
        };
        let kept = tx.aside(move |tx| {
            let keep = |message| sorted(WHAT, keep(tx, &consumer, message, state, owner.as_deref(), due));
            messages.iter().try_for_each(keep)
        });
        kept.await.map_err(|ended| refused(WHAT, ended))?.map(|()| 0)
    }

    async fn keep_dead(
        tx: &mut SqliteTransaction<'_>,
        consumer: &Consumer,
        message: &Message,
        error: &str,
    ) -> Result<(), StoreError> {
        const WHAT: &str = "keep a received message as a dead one";
        let (consumer, message, error) = (consumer.clone(), message.clone(), error.to_owned());
        let kept = tx.aside(move |tx| sorted(WHAT, keep_dead(tx, &consumer, &message, &error)));
        kept.await.map_err(|ended| refused(WHAT, ended))?
    }

    async fn take(
        tx: &mut SqliteTransaction<'_>,
        consumer: &Consumer,
        owner: &str,
        max: usize,
        lease: Duration,
        claims_max: u32,
    ) -> Result<Vec<Waiting>, StoreError> {
        let (consumer, owner) = (consumer.clone(), owner.to_owned());
        let taken = move |tx: &Connection| take(tx, &consumer, &owner, max, lease, claims_max);
        tx.stored("take waiting messages", taken).await
    }

    async fn renew(
        tx: &mut SqliteTransaction<'_>,
        consumer: &Consumer,
        claims: &[(MessageId, i64)],
        lease: Duration,
    ) -> Result<(), StoreError> {
        let (consumer, claims) = (consumer.clone(), claims.to_vec());
        let sql = format!(
            "update postroom_inbox_messages set due_ms = {NOW} + ?4, waits_since_ms = {NOW}
              where consumer = ?1 and id = ?2 and claim = ?3 and state = 'claimed'"
        );
        tx.stored("renew the claims of waiting messages", move |tx| {
            let mut statement = tx.prepare_cached(&sql)?;
            for (id, claim) in claims {
                statement.execute(params![consumer.as_str(), id.to_string(), claim, lease.as_millis() as i64])?;
            }
            Ok(())
        })
        .await
    }

    async fn settle(
        tx: &mut SqliteTransaction<'_>,
        consumer: &Consumer,
        id: MessageId,
        claim: i64,
        how: &Settle,
    ) -> Result<bool, StoreError> {
        let (consumer, how) = (consumer.clone(), how.clone());
        tx.stored("settle a waiting message", move |tx| settle(tx, &consumer, id, claim, &how)).await
    }

    async fn version(
        tx: &mut SqliteTransaction<'_>,
        consumer: &Consumer,
        aggregate: &Aggregate,
    ) -> Result<Option<i64>, StoreError> {
        let (consumer, aggregate) = (consumer.clone(), aggregate.clone());
        tx.stored("read the version of an aggregate", move |tx| {
            tx.prepare_cached(
                "select version from postroom_inbox_versions
                  where consumer = ?1 and aggregate_type = ?2 and aggregate_id = ?3",
            )?
            .query_row(params![consumer.as_str(), aggregate.kind, aggregate.id], |row| row.get(0))
            .optional()
        })
        .await
    }

    async fn set_version(
        tx: &mut SqliteTransaction<'_>,
        consumer: &Consumer,
        aggregate: &Aggregate,
        version: i64,
    ) -> Result<(), StoreError> {
        let (consumer, aggregate) = (consumer.clone(), aggregate.clone());
        tx.stored("note the version of an aggregate", move |tx| {
            let parameters = params![consumer.as_str(), aggregate.kind, aggregate.id, version];
            tx.execute(
                "insert into postroom_inbox_versions values (?1, ?2, ?3, ?4)
                     on conflict do update set version = excluded.version",
                parameters,
            )?;
            let next = format!(
                "update postroom_inbox_messages set state = 'ready', due_ms = {NOW}, waits_since_ms = {NOW}
                  where consumer = ?1 and aggregate_type = ?2 and aggregate_id = ?3 and aggregate_version - 1 = ?4
                    and state = 'early'"
            );
            tx.execute(&next, parameters).map(drop)
        })
        .await
    }

    async fn waiting_versions(
        tx: &mut SqliteTransaction<'_>,
        consumer: &Consumer,
        aggregate: &Aggregate,
        above: i64,
        below: i64,
    ) -> Result<Vec<(i64, bool)>, StoreError> {
        let (consumer, aggregate) = (consumer.clone(), aggregate.clone());
        tx.stored("read the versions that wait", move |tx| {
            tx.prepare_cached(
                "select aggregate_version, state = 'early' from postroom_inbox_messages
                  where consumer = ?1 and aggregate_type = ?2 and aggregate_id = ?3
                    and aggregate_version > ?4 and aggregate_version < ?5
                  order by aggregate_version",
            )?
            .query_map(params![consumer.as_str(), aggregate.kind, aggregate.id, above, below], |row| {
                Ok((row.get(0)?, row.get(1)?))
            })?
            .collect()
        })
        .await
    }

    fn refuses_the_message(error: &StoreError) -> bool {
        is_about_values(error)
    }

    fn sort(error: BoxError) -> Result<StoreError, BoxError> {
        match error.downcast::<rusqlite::Error>() {
            Ok(error) => match store_error("handle a message", *error) {
                again @ (StoreError::Busy { .. } | StoreError::Unavailable { .. }) => Ok(again),
                StoreError::Refused { source, .. } => Err(source),
                schema => Err(schema.into()),
            },
            Err(error) => Err(error),
        }
    }
}
