//! What operators see of keys that wait, and what they do about them.

use postroom::{Deed, KeyDeed, Side, StoreError, WaitingKey, WaitsFor};
use tiberius::Row;
use tiberius::error::Error;

use crate::conn::Conn;
use crate::desk::{Failed, begin};
use crate::log::record::promote;
use crate::operate::audit::audit;
use crate::operate::dead::lock_lanes;
use crate::operate::hash;
use crate::sql::{get, named, seconds_since, seconds_until};

/// Keys that wait, longest first, at most `limit`.
pub(crate) async fn waiting_keys(
    conn: &mut Conn,
    side: Side,
    route: Option<&str>,
    limit: i64,
) -> Result<Vec<WaitingKey>, Failed> {
    // A parked row does not note when it was parked; the message's own time is taken for it.
    let out = format!(
        "with waiting as (
             select route, ordering_key, count_big(*) as messages, min(seq) as first_seq from postroom_parked
              where state <> 'scheduled' and ordering_key is not null and (@route is null or route = @route)
              group by route, ordering_key),
         blocked as (
             select route, ordering_key, min(blocked_at) as since, max(seq) as seq, max(reason) as reason
               from postroom_blocked_keys where @route is null or route = @route group by route, ordering_key),
         waits as (select route, ordering_key from waiting union select route, ordering_key from blocked)
         select top (@limit) k.route, k.ordering_key,
                case when b.route is null then 'retry' when b.seq > 0 then 'dead' else 'parked' end as waits_for,
                coalesce((select top (1) d.id from postroom_dead_letters d where d.route = b.route and d.seq = b.seq), h.id) as head,
                coalesce(w.messages, 0) as messages,
                coalesce((select top (1) d.attempts from postroom_dead_letters d where d.route = b.route and d.seq = b.seq), h.attempts, 0) as attempts,
                {} as since, case when b.route is null then {} end as retry_in, coalesce(b.reason, h.last_error) as reason
           from waits k
           left join waiting w on w.route = k.route and w.ordering_key = k.ordering_key
           left join blocked b on b.route = k.route and b.ordering_key = k.ordering_key
           left join postroom_parked h on h.route = w.route and h.seq = w.first_seq and h.ordering_key = w.ordering_key
          order by since desc",
        seconds_since("coalesce(b.since, h.occurred_at)"),
        seconds_until("h.due_at")
    );
    let inside = format!(
        "select top (@limit) h.consumer as route, h.ordering_key, 'retry' as waits_for, h.id as head, count_big(*) as messages, h.attempts,
                {} as since, {} as retry_in, h.last_error as reason
           from postroom_inbox_messages h
           join postroom_inbox_messages m
             on m.consumer = h.consumer and m.key_hash = h.key_hash and m.state in ('ready', 'claimed')
          where h.state = 'ready' and h.attempts > 0 and h.ordering_key is not null and (@route is null or h.consumer = @route)
          group by h.seq, h.consumer, h.ordering_key, h.id, h.attempts, h.due_at, h.last_error order by since desc",
        seconds_since("min(coalesce(m.received_at, m.occurred_at))"),
        seconds_until("h.due_at")
    );
    let sql = match side {
        Side::Out => out,
        Side::In => inside,
    };
    let rows = conn.rows(&sql, named! { "route" => route, "limit" => limit.max(0) }).await?;
    Ok(rows.iter().map(waiting).collect::<Result<_, _>>()?)
}

fn waiting(row: &Row) -> Result<WaitingKey, Error> {
    Ok(WaitingKey {
        route: get(row, "route")?,
        key: get(row, "ordering_key")?,
        waits_for: super::word(row, "waits_for", WaitsFor::of)?,
        head: get(row, "head")?,
        messages: get(row, "messages")?,
        attempts: get(row, "attempts")?,
        since_seconds: get(row, "since")?,
        retry_in_seconds: get(row, "retry_in")?,
        reason: get(row, "reason")?,
    })
}

/// Parks, unparks or skips a key of a route, with an audit row in the same transaction. False: there was nothing to do.
pub(crate) async fn act_on_key(
    conn: &mut Conn,
    route: &str,
    key: &str,
    what: KeyDeed,
    deed: &Deed,
) -> Result<bool, Failed> {
    let tx = begin(conn).await?;
    let known: Option<i64> =
        tx.first("select 1 from postroom_routes where name = @route", named! { "route" => route }).await?;
    if known.is_none() {
        let source = format!("there is no route {route:?}; `postroom status` lists them").into();
        return Err(StoreError::Refused { what: "act on a key", source }.into());
    }
    // As the outbox computes it.
    let sql = "select convert(int, substring(hashbytes('SHA2_256', convert(nvarchar(512), @key)), 1, 2)) % lanes from postroom_settings";
    let lane: Option<i64> = tx.first(sql, named! { "key" => key }).await?;
    lock_lanes(tx, route, &lane.into_iter().collect()).await?;
    let of = || named! { "route" => route, "key" => key };
    let key_hash = hash("convert(nvarchar(512), @key)");
    let mut ids: Vec<String> = Vec::new();
    let changed = match what {
        KeyDeed::Park => {
            let sql = format!(
                "insert into postroom_blocked_keys (route, ordering_key, seq, reason)
                 select @route, @key, 0, @reason
                  where not exists (select 1 from postroom_blocked_keys b with (updlock, holdlock)
                                     where b.route = @route and b.key_hash = {key_hash} and b.seq = 0)"
            );
            let mut parameters = of();
            parameters.extend(named! { "reason" => &deed.reason });
            tx.exec(&sql, parameters).await?
        }
        KeyDeed::Unpark => {
            let sql =
                format!("delete from postroom_blocked_keys where route = @route and key_hash = {key_hash} and seq = 0");
            tx.exec(&sql, of()).await?
        }
        KeyDeed::Skip => {
            let sql = format!(
                "select d.id from postroom_blocked_keys b join postroom_dead_letters d on d.route = b.route and d.seq = b.seq
                  where b.route = @route and b.key_hash = {key_hash} and b.seq > 0"
            );
            ids = tx.query(&sql, of()).await?;
            let sql =
                format!("delete from postroom_blocked_keys where route = @route and key_hash = {key_hash} and seq > 0");
            tx.exec(&sql, of()).await?
        }
    };
    if changed == 0 {
        return Ok(false);
    }
    promote(tx, route, &[key]).await?;
    let conditions = serde_json::json!({ "route": route, "key": key }).to_string();
    audit(tx, deed, what.action(), &conditions, &ids).await?;
    tx.commit().await?;
    Ok(true)
}
