//! What operators do about dead letters. Every deed and the audit row about it are one transaction.

use std::collections::{BTreeSet, HashSet};

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Error, Row, params};
use postroom::{Cause, DeadCursor, DeadDeed, DeadFilter, DeadLetter, Deed, Side, headers_from_json};

use crate::desk::{Failed, begin};
use crate::inbox::ABOUT_VALUES;
use crate::log::record::promote;
use crate::log::{COPIED, get, json};
use crate::operate::audit::audit;

/// The columns of a dead letter of a consumer that wait again with it.
const INBOX_KEPT: &str = "history, topic, type, payload, `key`, routing_key, content_type, headers, tenant_id,
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
        Side::Out => "select payload from postroom_dead_letters where route = ? and seq = ?",
        Side::In => "select payload from postroom_dead_consume where consumer = ? and seq = ?",
    };
    Ok(conn.exec_first(sql, (route, seq)).await?)
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
    let mut tx = begin(conn).await?;
    let letters = chosen(&mut tx, after, side, filter, limit).await?;
    let last = letters.last().filter(|_| letters.len() as i64 >= limit);
    let next = last.map(DeadLetter::cursor);
    let mut gone: HashSet<(String, String)> = HashSet::new();
    for of_route in letters.chunk_by(|one, other| one.route == other.route) {
        let Some(route) = of_route.first().map(|letter| letter.route.as_str()) else { continue };
        let places: Vec<(i64, String)> = of_route.iter().map(|letter| (letter.seq, letter.id.clone())).collect();
        let ids = match side {
            Side::Out => {
                let lanes: BTreeSet<i64> = of_route.iter().map(|letter| i64::from(letter.lane)).collect();
                lock_lanes(&mut tx, route, &lanes).await?;
                match what {
                    DeadDeed::Retry => retry(&mut tx, route, &places).await?,
                    DeadDeed::Discard => discard(&mut tx, route, &places).await?,
                }
            }
            Side::In => {
                let mut ids = Vec::with_capacity(places.len());
                for (_, id) in places {
                    let is_done = match what {
                        DeadDeed::Retry => retry_in(&mut tx, route, &id).await?,
                        DeadDeed::Discard => discard_in(&mut tx, route, &id).await?,
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
        audit(&mut tx, deed, what.action(side), &serde_json::to_string(filter)?, &ids).await?;
        tx.commit().await?;
    }
    Ok(DeadStep { done, next })
}

/// What relays record about these lanes comes wholly before this transaction, or wholly after it.
pub(super) async fn lock_lanes(tx: &mut impl Queryable, route: &str, lanes: &BTreeSet<i64>) -> Result<(), Error> {
    let sql = "select straight_join l.lane
                 from (select at_lane from json_table(?, '$[*]' columns (at_lane smallint path '$')) j) n
                 join postroom_lanes l force index (primary) on l.route = ? and l.lane = n.at_lane order by l.lane for update";
    tx.exec::<i64, _, _>(sql, (json(lanes), route)).await.map(drop)
}

/// The list of (seq, id) that a statement is about. MySQL locks no rows of a statement that has `json_table` itself in its `from`.
const PLACES: &str = "(select at_seq, at_id from json_table(:places, '$[*]' columns (at_seq bigint path '$[0]', \
                      at_id char(36) character set ascii path '$[1]')) j) n";

/// Locks letters that a condition holds for; those that somebody else deletes or gives out meanwhile are not there.
async fn locked(
    tx: &mut impl Queryable,
    route: &str,
    places: &[(i64, String)],
    condition: &str,
) -> Result<Vec<(i64, String, Option<String>)>, Error> {
    let sql = format!(
        "select straight_join d.seq, d.id, coalesce(d.`key`, d.aggregate_id)
           from {PLACES} join postroom_dead_letters d force index (primary) on d.route = :route and d.seq = n.at_seq and d.id = n.at_id
          where {condition} order by d.seq, d.id for update"
    );
    tx.exec(sql, params! { "places" => json(places), "route" => route }).await
}

/// Deletes letters that are locked; returns their ids, and their keys.
async fn removed(
    tx: &mut impl Queryable,
    route: &str,
    letters: Vec<(i64, String, Option<String>)>,
) -> Result<(Vec<String>, Vec<String>), Error> {
    let places: Vec<(i64, &String)> = letters.iter().map(|(seq, id, _)| (*seq, id)).collect();
    let sql = format!(
        "delete d from {PLACES} straight_join postroom_dead_letters d force index (primary) on d.route = :route and d.seq = n.at_seq and d.id = n.at_id"
    );
    tx.exec_drop(sql, params! { "places" => json(&places), "route" => route }).await?;
    let blocked: Vec<(i64, &String)> = letters.iter().filter_map(|(seq, _, key)| Some((*seq, key.as_ref()?))).collect();
    let sql = "delete b from json_table(?, '$[*]' columns (at_seq bigint path '$[0]', k varchar(512) path '$[1]')) n
                 straight_join postroom_blocked_keys b force index (primary) on b.route = ? and b.ordering_key = n.k and b.seq = n.at_seq";
    if !blocked.is_empty() {
        tx.exec_drop(sql, (json(&blocked), route)).await?;
    }
    let keys: BTreeSet<String> = letters.iter().filter_map(|(_, _, key)| key.clone()).collect();
    Ok((letters.into_iter().map(|(_, id, _)| id).collect(), keys.into_iter().collect()))
}

/// Dead letters go in front of their keys; returns the ids of those that did. Their lanes are locked.
pub(super) async fn retry(
    tx: &mut impl Queryable,
    route: &str,
    places: &[(i64, String)],
) -> Result<Vec<String>, Error> {
    // One row of a seq at a time: of a message and its replay with another id, the second one stays dead for now.
    let alone = "not exists (select 1 from postroom_parked p where p.route = d.route and p.seq = d.seq)
                 and not exists (select 1 from postroom_dead_letters e where e.route = d.route and e.seq = d.seq and e.id < d.id)";
    let letters = locked(tx, route, places, alone).await?;
    if letters.is_empty() {
        return Ok(Vec::new());
    }
    let places: Vec<(i64, &String)> = letters.iter().map(|(seq, id, _)| (*seq, id)).collect();
    let sql = format!(
        "insert into postroom_parked (route, seq, lane, ordering_key, state, attempts, due_at, waits_since, last_error, history, {COPIED})
         select straight_join d.route, d.seq, d.lane, coalesce(d.`key`, d.aggregate_id),
                if(coalesce(d.`key`, d.aggregate_id) is null, 'retry', 'queued'), 0,
                if(coalesce(d.`key`, d.aggregate_id) is null, utc_timestamp(6), null), utc_timestamp(6), d.error, d.history, {COPIED}
           from {PLACES} join postroom_dead_letters d on d.route = :route and d.seq = n.at_seq and d.id = n.at_id"
    );
    tx.exec_drop(sql, params! { "places" => json(&places), "route" => route }).await?;
    let (ids, keys) = removed(tx, route, letters).await?;
    promote(tx, route, &keys).await?;
    Ok(ids)
}

/// Deletes dead letters that will not come back; returns the ids of those. Their lanes are locked.
pub(super) async fn discard(
    tx: &mut impl Queryable,
    route: &str,
    places: &[(i64, String)],
) -> Result<Vec<String>, Error> {
    let letters = locked(tx, route, places, &format!("not {COMES_BACK}")).await?;
    if letters.is_empty() {
        return Ok(Vec::new());
    }
    Ok(removed(tx, route, letters).await?.0)
}

/// A dead letter of a consumer waits to be handled again. False: it is not there, or does not fit among what waits.
pub(super) async fn retry_in(tx: &mut impl Queryable, consumer: &str, id: &str) -> Result<bool, Error> {
    let sql = "select 1 from postroom_dead_consume where consumer = ? and id = ? for update";
    let there: Option<i64> = tx.exec_first(sql, (consumer, id)).await?;
    if there.is_none() {
        return Ok(false);
    }
    let sql = format!(
        "insert into postroom_inbox_messages (consumer, id, state, due_at, waits_since, received_at, ordering_key, last_error, {INBOX_KEPT})
         select consumer, id, 'ready', utc_timestamp(6), utc_timestamp(6), utc_timestamp(6), ordering_key, error, {INBOX_KEPT}
           from postroom_dead_consume where consumer = ? and id = ?
             on duplicate key update postroom_inbox_messages.seq = postroom_inbox_messages.seq"
    );
    match tx.exec_drop(sql, (consumer, id)).await {
        Ok(()) => discard_in(tx, consumer, id).await,
        // What is dead there has no limits; what waits has.
        Err(Error::Server(server)) if ABOUT_VALUES.contains(&server.code) => Ok(false),
        Err(error) => Err(error),
    }
}

/// False: it is not there.
pub(super) async fn discard_in(tx: &mut impl Queryable, consumer: &str, id: &str) -> Result<bool, Error> {
    tx.exec_drop("delete from postroom_dead_consume where consumer = ? and id = ?", (consumer, id)).await?;
    Ok(tx.query_first::<i64, _>("select row_count()").await?.unwrap_or_default() > 0)
}

async fn chosen(
    conn: &mut impl Queryable,
    after: Option<&DeadCursor>,
    side: Side,
    filter: &DeadFilter,
    limit: i64,
) -> Result<Vec<DeadLetter>, Error> {
    let (table, route, lane) = match side {
        Side::Out => ("postroom_dead_letters", "route", "d.lane"),
        Side::In => ("postroom_dead_consume", "consumer", "0"),
    };
    let sql = format!(
        "select d.{route} as route, d.seq, d.id, d.topic, d.type, coalesce(d.`key`, d.aggregate_id) as ordering_key, d.tenant_id, d.aggregate_id,
                d.attempts, d.cause, d.error, timestampdiff(microsecond, d.died_at, utc_timestamp(6)) / 1e6 as died_ago,
                octet_length(d.payload) as payload_bytes, d.headers, d.history, {lane} as lane
           from {table} d
          where (:route is null or d.{route} = :route) and (:id is null or d.id = :id) and (:topic is null or d.topic = :topic)
            and (:type is null or d.type = :type) and (:tenant is null or d.tenant_id = :tenant)
            and (:aggregate is null or d.aggregate_id = :aggregate) and (:error is null or instr(d.error, :error) > 0)
            and (:newer is null or d.died_at >= timestampadd(microsecond, - :newer, utc_timestamp(6)))
            and (:older is null or d.died_at <= timestampadd(microsecond, - :older, utc_timestamp(6)))
            and (:after is null or d.{route} > :after
                 or (d.{route} = :after and (d.seq > :after_seq or (d.seq = :after_seq and d.id > :after_id))))
          order by d.{route}, d.seq, d.id limit :limit"
    );
    let parameters = params! {
        "route" => &filter.route, "id" => filter.id.map(|id| id.to_string()), "topic" => &filter.topic, "type" => &filter.kind,
        "tenant" => &filter.tenant_id, "aggregate" => &filter.aggregate_id, "error" => &filter.error,
        "newer" => filter.newer_than.map(super::keys::ago), "older" => filter.older_than.map(super::keys::ago),
        "after" => after.map(|after| &after.route), "after_seq" => after.map(|after| after.seq), "after_id" => after.map(|after| &after.id),
        "limit" => limit.max(0)
    };
    let rows: Vec<Row> = conn.exec(sql, parameters).await?;
    rows.into_iter().map(letter).collect()
}

fn letter(mut row: Row) -> Result<DeadLetter, Error> {
    let row = &mut row;
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
