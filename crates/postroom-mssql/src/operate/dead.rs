//! What operators do about dead letters. Every deed and the audit row about it are one transaction.

use std::collections::{BTreeSet, HashSet};

use postroom::{Cause, DeadCursor, DeadDeed, DeadFilter, DeadLetter, Deed, Side, headers_from_json};
use tiberius::Row;
use tiberius::error::Error;

use crate::conn::Conn;
use crate::desk::{Failed, begin};
use crate::inbox::ABOUT_VALUES;
use crate::log::COPIED;
use crate::log::record::promote;
use crate::operate::audit::audit;
use crate::operate::hash;
use crate::sql::{NOW, age, ago, get, json, named, same, seconds_since};

/// The columns of a dead letter of a consumer that wait again with it.
const INBOX_KEPT: &str = "history, topic, type, payload, [key], routing_key, content_type, headers, tenant_id,
    aggregate_type, aggregate_id, aggregate_version, occurred_at";
/// A dead letter `d` whose message its route would read again after a crash: the position is not behind it.
pub(super) const COMES_BACK: &str = "exists (
    select 1 from postroom_outbox o where o.seq = d.seq and o.id = d.id
       and (o.place is null or o.place > coalesce((
            select l.position from postroom_lanes l where l.route = d.route and l.lane = o.lane), 0)))";

/// Dead letters by filter, oldest first, at most `limit`.
pub(crate) async fn dead_letters(
    conn: &mut Conn,
    after: Option<&DeadCursor>,
    side: Side,
    filter: &DeadFilter,
    limit: i64,
) -> Result<Vec<DeadLetter>, Failed> {
    Ok(chosen(conn, after, side, filter, limit).await?)
}

/// The payload of one dead letter.
pub(crate) async fn dead_payload(
    conn: &mut Conn,
    side: Side,
    route: &str,
    seq: i64,
) -> Result<Option<Vec<u8>>, Failed> {
    let sql = match side {
        Side::Out => "select payload from postroom_dead_letters where route = @route and seq = @seq",
        Side::In => "select payload from postroom_dead_consume where consumer = @route and seq = @seq",
    };
    Ok(conn.first(sql, named! { "route" => route, "seq" => seq }).await?)
}

/// What one step did.
pub(crate) struct DeadStep {
    /// The letters that it was done to: a letter that died a moment ago, and that the position has not passed, is not discarded, because a crash
    /// would bring it back and send it; one that does not fit among what waits stays dead.
    pub done: Vec<DeadLetter>,
    /// Behind the last one that was looked at; none: there are no more.
    pub next: Option<DeadCursor>,
}

/// Gives dead letters back to their relay or consumer, or deletes them: one step, in a transaction of its own.
pub(crate) async fn act_on_dead(
    conn: &mut Conn,
    what: DeadDeed,
    side: Side,
    filter: &DeadFilter,
    (after, limit): (Option<&DeadCursor>, i64),
    deed: &Deed,
) -> Result<DeadStep, Failed> {
    let tx = begin(conn).await?;
    let letters = chosen(tx, after, side, filter, limit).await?;
    let last = letters.last().filter(|_| letters.len() as i64 >= limit);
    let next = last.map(DeadLetter::cursor);
    let mut gone: HashSet<(String, String)> = HashSet::new();
    for of_route in letters.chunk_by(|one, other| one.route == other.route) {
        let Some(route) = of_route.first().map(|letter| letter.route.as_str()) else { continue };
        let places: Vec<(i64, String)> = of_route.iter().map(|letter| (letter.seq, letter.id.clone())).collect();
        let ids = match side {
            Side::Out => {
                let lanes: BTreeSet<i64> = of_route.iter().map(|letter| i64::from(letter.lane)).collect();
                lock_lanes(tx, route, &lanes).await?;
                match what {
                    DeadDeed::Retry => retry(tx, route, &places).await?,
                    DeadDeed::Discard => discard(tx, route, &places).await?,
                }
            }
            Side::In => {
                let mut ids = Vec::with_capacity(places.len());
                for (_, id) in places {
                    let is_done = match what {
                        DeadDeed::Retry => retry_in(tx, route, &id).await?,
                        DeadDeed::Discard => discard_in(tx, route, &id).await?,
                    };
                    ids.extend(is_done.then_some(id));
                }
                ids
            }
        };
        gone.extend(ids.into_iter().map(|id| (route.to_owned(), id)));
    }
    let is_done = |letter: &DeadLetter| gone.contains(&(letter.route.clone(), letter.id.clone()));
    let done: Vec<DeadLetter> = letters.into_iter().filter(is_done).collect();
    if !done.is_empty() {
        let ids: Vec<&str> = done.iter().map(|letter| letter.id.as_str()).collect();
        audit(tx, deed, what.action(side), &serde_json::to_string(filter)?, &ids).await?;
        tx.commit().await?;
    }
    Ok(DeadStep { done, next })
}

/// What relays record about these lanes comes wholly before this transaction, or wholly after it.
pub(super) async fn lock_lanes(tx: &mut Conn, route: &str, lanes: &BTreeSet<i64>) -> Result<(), Error> {
    let sql = "select l.lane
                 from (select top (2000000000) j.lane from openjson(@lanes) with (lane smallint '$') j order by j.lane) n
                 join postroom_lanes l with (updlock, rowlock, forceseek) on l.route = @route and l.lane = n.lane
                order by l.lane
               option (loop join, force order)";
    tx.query::<i64>(sql, named! { "lanes" => json(lanes), "route" => route }).await.map(drop)
}

/// The list of (seq, id) that a statement is about.
const PLACES: &str = "openjson(@places) with (seq bigint '$[0]', id uniqueidentifier '$[1]') n";

/// Locks letters that a condition holds for; those that somebody else deletes or gives out meanwhile are not there.
async fn locked(
    tx: &mut Conn,
    route: &str,
    places: &[(i64, String)],
    condition: &str,
) -> Result<Vec<(i64, String, Option<String>)>, Error> {
    let sql = format!(
        "select d.seq, d.id, coalesce(d.[key], d.aggregate_id)
           from {PLACES}
           join postroom_dead_letters d with (updlock, rowlock) on d.route = @route and d.seq = n.seq and d.id = n.id
          where {condition} order by d.seq, d.id
         option (loop join, force order)"
    );
    tx.query(&sql, named! { "places" => json(places), "route" => route }).await
}

/// Deletes letters that are locked; returns their ids, and their keys.
async fn removed(
    tx: &mut Conn,
    route: &str,
    letters: Vec<(i64, String, Option<String>)>,
) -> Result<(Vec<String>, Vec<String>), Error> {
    let places: Vec<(i64, &String)> = letters.iter().map(|(seq, id, _)| (*seq, id)).collect();
    let sql = format!(
        "delete d
           from {PLACES}
           join postroom_dead_letters d with (rowlock) on d.route = @route and d.seq = n.seq and d.id = n.id
         option (loop join, force order)"
    );
    tx.exec(&sql, named! { "places" => json(&places), "route" => route }).await?;
    let blocked: Vec<(i64, &String)> = letters.iter().filter_map(|(seq, _, key)| Some((*seq, key.as_ref()?))).collect();
    let sql = format!(
        "delete b
           from openjson(@blocked) with (seq bigint '$[0]', ordering_key nvarchar(512) '$[1]') n
           join postroom_blocked_keys b with (rowlock) on b.route = @route and b.key_hash = {} and b.seq = n.seq
         option (loop join, force order)",
        hash("n.ordering_key")
    );
    if !blocked.is_empty() {
        tx.exec(&sql, named! { "blocked" => json(&blocked), "route" => route }).await?;
    }
    let keys: BTreeSet<String> = letters.iter().filter_map(|(_, _, key)| key.clone()).collect();
    Ok((letters.into_iter().map(|(_, id, _)| id).collect(), keys.into_iter().collect()))
}

/// Dead letters go in front of their keys; returns the ids of those that did. Their lanes are locked.
pub(super) async fn retry(tx: &mut Conn, route: &str, places: &[(i64, String)]) -> Result<Vec<String>, Error> {
    // One row of a seq at a time: of a message and its replay with another id, the second one stays dead for now.
    let alone = "not exists (select 1 from postroom_parked p where p.route = d.route and p.seq = d.seq)
                 and not exists (select 1 from postroom_dead_letters e where e.route = d.route and e.seq = d.seq and e.id < d.id)";
    let letters = locked(tx, route, places, alone).await?;
    if letters.is_empty() {
        return Ok(Vec::new());
    }
    let places: Vec<(i64, &String)> = letters.iter().map(|(seq, id, _)| (*seq, id)).collect();
    let copied = copied_of("d");
    let sql = format!(
        "insert into postroom_parked (route, seq, lane, ordering_key, state, attempts, due_at, waits_since, last_error, history, {COPIED})
         select d.route, d.seq, d.lane, coalesce(d.[key], d.aggregate_id),
                case when coalesce(d.[key], d.aggregate_id) is null then 'retry' else 'queued' end, 0,
                case when coalesce(d.[key], d.aggregate_id) is null then {NOW} end, {NOW}, d.error, d.history, {copied}
           from {PLACES} join postroom_dead_letters d on d.route = @route and d.seq = n.seq and d.id = n.id
         option (loop join, force order)"
    );
    tx.exec(&sql, named! { "places" => json(&places), "route" => route }).await?;
    let (ids, keys) = removed(tx, route, letters).await?;
    promote(tx, route, &keys).await?;
    Ok(ids)
}

/// The columns that are copied, each with the name of its table.
pub(super) fn copied_of(table: &str) -> String {
    let columns: Vec<String> = COPIED.split(',').map(|column| format!("{table}.{}", column.trim())).collect();
    columns.join(", ")
}

/// Deletes dead letters that will not come back; returns the ids of those. Their lanes are locked.
pub(super) async fn discard(tx: &mut Conn, route: &str, places: &[(i64, String)]) -> Result<Vec<String>, Error> {
    let letters = locked(tx, route, places, &format!("not {COMES_BACK}")).await?;
    if letters.is_empty() {
        return Ok(Vec::new());
    }
    Ok(removed(tx, route, letters).await?.0)
}

/// A dead letter of a consumer waits to be handled again. False: it is not there, or does not fit among what waits.
pub(super) async fn retry_in(tx: &mut Conn, consumer: &str, id: &str) -> Result<bool, Error> {
    let sql = "select 1 from postroom_dead_consume with (updlock, rowlock) where consumer = @consumer and id = @id";
    let of = || named! { "consumer" => consumer, "id" => id };
    if tx.first::<i64>(sql, of()).await?.is_none() {
        return Ok(false);
    }
    // What is dead there has no limits; what waits has.
    let sql = format!(
        "set xact_abort off;
         insert into postroom_inbox_messages (consumer, id, state, due_at, waits_since, received_at, ordering_key, last_error, {INBOX_KEPT})
         select consumer, id, 'ready', {NOW}, {NOW}, {NOW}, ordering_key, error, {INBOX_KEPT}
           from postroom_dead_consume d where d.consumer = @consumer and d.id = @id
            and not exists (select 1 from postroom_inbox_messages m with (updlock, holdlock) where m.consumer = @consumer and m.id = @id)"
    );
    match tx.exec(&sql, of()).await {
        Ok(_) => discard_in(tx, consumer, id).await,
        Err(Error::Server(server)) if ABOUT_VALUES.contains(&server.code()) => {
            // The statement alone has failed, unless the server says otherwise.
            tx.doubtful = false;
            match tx.first::<i64>("select xact_state()", named! {}).await? {
                Some(1) => Ok(false),
                _ => Err(Error::Server(server)),
            }
        }
        Err(error) => Err(error),
    }
}

/// False: it is not there.
pub(super) async fn discard_in(tx: &mut Conn, consumer: &str, id: &str) -> Result<bool, Error> {
    let sql = "delete from postroom_dead_consume where consumer = @consumer and id = @id";
    Ok(tx.exec(sql, named! { "consumer" => consumer, "id" => id }).await? > 0)
}

async fn chosen(
    conn: &mut Conn,
    after: Option<&DeadCursor>,
    side: Side,
    filter: &DeadFilter,
    limit: i64,
) -> Result<Vec<DeadLetter>, Error> {
    let (table, route, lane) = match side {
        Side::Out => ("postroom_dead_letters", "route", "d.lane"),
        Side::In => ("postroom_dead_consume", "consumer", "0"),
    };
    let (newer, older) = (ago("@newer"), ago("@older"));
    let sql = format!(
        "select top (@limit) d.{route} as route, d.seq, d.id, d.topic, d.type, coalesce(d.[key], d.aggregate_id) as ordering_key, d.tenant_id, d.aggregate_id,
                d.attempts, d.cause, d.error, {} as died_ago,
                convert(bigint, datalength(d.payload)) as payload_bytes, d.headers, d.history, {lane} as lane
           from {table} d
          where (@route is null or d.{route} = @route) and (@id is null or d.id = @id) and (@topic is null or {})
            and (@type is null or {}) and (@tenant is null or {}) and (@aggregate is null or {}) and (@error is null or charindex(@error, d.error) > 0)
            and (@newer is null or d.died_at >= {newer}) and (@older is null or d.died_at <= {older})
            and (@after is null or d.{route} > @after
                 or (d.{route} = @after and (d.seq > @after_seq or (d.seq = @after_seq and d.id > @after_id))))
          order by d.{route}, d.seq, d.id",
        seconds_since("d.died_at"),
        same("d.topic", "@topic"),
        same("d.type", "@type"),
        same("d.tenant_id", "@tenant"),
        same("d.aggregate_id", "@aggregate")
    );
    let parameters = named! {
        "route" => filter.route.as_ref(), "id" => filter.id.map(|id| id.to_string()), "topic" => filter.topic.as_ref(),
        "type" => filter.kind.as_ref(), "tenant" => filter.tenant_id.as_ref(), "aggregate" => filter.aggregate_id.as_ref(),
        "error" => filter.error.as_ref(), "newer" => filter.newer_than.map(age), "older" => filter.older_than.map(age),
        "after" => after.map(|after| &after.route), "after_seq" => after.map(|after| after.seq),
        "after_id" => after.map(|after| &after.id), "limit" => limit.max(0)
    };
    conn.rows(&sql, parameters).await?.iter().map(letter).collect()
}

fn letter(row: &Row) -> Result<DeadLetter, Error> {
    Ok(DeadLetter {
        route: get(row, "route")?,
        seq: get(row, "seq")?,
        id: get(row, "id")?,
        topic: get(row, "topic")?,
        kind: get(row, "type")?,
        key: get(row, "ordering_key")?,
        tenant_id: get(row, "tenant_id")?,
        aggregate_id: get(row, "aggregate_id")?,
        attempts: get(row, "attempts")?,
        cause: super::word(row, "cause", Cause::of)?,
        error: get(row, "error")?,
        died_seconds_ago: get(row, "died_ago")?,
        payload_bytes: get(row, "payload_bytes")?,
        headers: headers_from_json(get::<Option<String>>(row, "headers")?.as_deref()),
        history: serde_json::from_str(&get::<String>(row, "history")?).unwrap_or_default(),
        lane: get(row, "lane")?,
    })
}
