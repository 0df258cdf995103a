//! What is written about deliveries that met trouble: parked messages and dead letters; and positions.

use std::collections::HashSet;
use std::time::Duration;

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Error, TxOpts, params};
use postroom::lane_book::Move;
use postroom::{Change, Entry};

use crate::log::places::json;
use crate::log::row::COPIED;

/// A row that is there stays as it is. Not `insert ignore`, which would also pass over a row that the table refuses.
const KEEP: &str = "on duplicate key update seq = values(seq)";

/// Who writes: the route, its relay, and the lanes with the epochs and positions under which they are held.
pub(crate) struct Holder<'a> {
    pub route: &'a str,
    pub owner: &'a str,
    pub lanes: Vec<(u16, i64, i64)>,
}

/// Tables are read through lists of keys (`straight_join`): a statement that reads more rows than it is about waits for locks of others on
/// them, and two such wait for each other.
///
/// Which of these lanes are still as this relay left them. The lock keeps a takeover away until the transaction ends.
async fn held(tx: &mut impl Queryable, holder: &Holder<'_>, lock: &str) -> Result<HashSet<u16>, Error> {
    let sql = format!(
        "select straight_join l.lane
           from (select lane, epoch, position
                   from json_table(?, '$[*]' columns (lane smallint path '$[0]', epoch bigint path '$[1]', position bigint path '$[2]')) j) n
           join postroom_lanes l on l.route = ? and l.lane = n.lane and l.epoch = n.epoch and l.position = n.position
          where l.owner = ? order by l.lane {lock}"
    );
    let lanes: Vec<u16> = tx.exec(sql, (json(&holder.lanes), holder.route, holder.owner)).await?;
    Ok(lanes.into_iter().collect())
}

/// Written in one transaction before the positions pass them, for lanes that are still held; returns those. `ordered`: whether a message
/// waits for others of its key.
pub(crate) async fn entries(
    conn: &mut Conn,
    holder: &Holder<'_>,
    entries: &[Entry],
    ordered: bool,
) -> Result<HashSet<u16>, Error> {
    let mut tx = conn.start_transaction(TxOpts::default()).await?;
    let held = held(&mut tx, holder, "lock in share mode").await?;
    let route = holder.route;
    let entries: Vec<&Entry> = entries.iter().filter(|entry| held.contains(&entry.lane)).collect();
    for Entry { seq, id, key, parked, change, .. } in &entries {
        match change {
            Change::ParkAgain { after, attempts, error } => {
                let sql = format!(
                    "update postroom_parked set state = 'retry', attempts = :attempts,
                            due_at = timestampadd(microsecond, :after, utc_timestamp(6)), waits_since = utc_timestamp(6),
                            history = {}, last_error = :error
                      where route = :route and seq = :seq and id = :id",
                    noted("history")
                );
                let parameters = params! {
                    "attempts" => attempts, "after" => microseconds(*after), "error" => error, "route" => route, "seq" => seq,
                    "id" => id.to_string()
                };
                tx.exec_drop(sql, parameters).await?;
            }
            Change::Park { state, after, attempts, error } => {
                // One that queues has no time of its own.
                let sql = format!(
                    "insert into postroom_parked (route, seq, lane, ordering_key, state, attempts, due_at, waits_since, last_error, history, {COPIED})
                     select :route, o.seq, o.lane, if(:ordered, coalesce(o.`key`, o.aggregate_id), null), :state, :attempts,
                            case :state when 'scheduled' then coalesce(o.visible_at, utc_timestamp(6))
                                        when 'retry' then timestampadd(microsecond, :after, utc_timestamp(6)) end,
                            utc_timestamp(6), :error, if(:error is null, '[]', {}), {COPIED}
                       from postroom_outbox o where o.seq = :seq and o.id = :id {KEEP}",
                    noted("'[]'")
                );
                let parameters = params! {
                    "route" => route, "ordered" => ordered, "state" => state.as_str(), "attempts" => attempts,
                    "after" => microseconds(*after), "error" => error, "seq" => seq, "id" => id.to_string()
                };
                tx.exec_drop(sql, parameters).await?;
            }
            Change::Bury { attempts, cause, error, blocks_key } => {
                let (from, history) =
                    if *parked { ("postroom_parked", "o.history") } else { ("postroom_outbox", "'[]'") };
                let of_route = if *parked { "and o.route = :route" } else { "" };
                let sql = format!(
                    "insert into postroom_dead_letters (route, seq, lane, attempts, cause, error, history, {COPIED})
                     select :route, o.seq, o.lane, :attempts, :cause, :error, {}, {COPIED}
                       from {from} o where o.seq = :seq and o.id = :id {of_route} {KEEP}",
                    noted(history)
                );
                let parameters = params! {
                    "route" => route, "attempts" => attempts, "cause" => cause.as_str(), "error" => error, "seq" => seq,
                    "id" => id.to_string()
                };
                tx.exec_drop(sql, parameters).await?;
                unpark(&mut tx, route, &[(*seq, id.to_string())]).await?;
                if let Some(key) = key.as_ref().filter(|_| *blocks_key) {
                    let sql = "insert into postroom_blocked_keys (route, ordering_key, seq, reason) values (?, ?, ?, ?)
                               on duplicate key update seq = values(seq)";
                    tx.exec_drop(sql, (route, key, seq, format!("dead: {error}"))).await?;
                }
            }
            Change::Unpark => {}
        }
    }
    let done = entries.iter().filter(|entry| matches!(entry.change, Change::Unpark));
    let done: Vec<(i64, String)> = done.map(|entry| (entry.seq, entry.id.to_string())).collect();
    if !done.is_empty() {
        unpark(&mut tx, route, &done).await?;
    }
    let keys: HashSet<&String> = entries.iter().filter_map(|entry| entry.key.as_ref()).collect();
    promote(&mut tx, route, &keys.into_iter().collect::<Vec<_>>()).await?;
    tx.commit().await?;
    Ok(held)
}

fn microseconds(wait: Duration) -> i64 {
    i64::try_from(wait.as_micros()).unwrap_or(i64::MAX)
}

/// The history with one failure more, at most the last 32; in SQL, with the parameters `attempts` and `error`.
pub(crate) fn noted(history: &str) -> String {
    format!(
        "json_remove(json_array_append({history}, '$', json_object('at', date_format(utc_timestamp(6), '%Y-%m-%dT%H:%i:%s.%fZ'),
                                       'attempt', :attempts, 'error', :error)), if(json_length({history}) >= 32, '$[0]', '$[32]'))"
    )
}

pub(crate) async fn unpark(tx: &mut impl Queryable, route: &str, seqs: &[(i64, String)]) -> Result<(), Error> {
    let sql = "delete p
                 from json_table(?, '$[*]' columns (seq bigint path '$[0]', id char(36) character set ascii path '$[1]')) n
                 straight_join postroom_parked p force index (primary) on p.route = ? and p.seq = n.seq and p.id = n.id";
    tx.exec_drop(sql, (json(seqs), route)).await
}

/// The first message left of each of these keys becomes its head, so that it can be claimed.
pub(crate) async fn promote<K: AsRef<str>>(tx: &mut impl Queryable, route: &str, keys: &[K]) -> Result<(), Error> {
    if keys.is_empty() {
        return Ok(());
    }
    let keys: Vec<&str> = keys.iter().map(AsRef::as_ref).collect();
    // Grouped by the column of the table, which tells letters apart.
    let sql =
        "select straight_join p.ordering_key, min(p.seq) from json_table(?, '$[*]' columns (k varchar(512) path '$')) n
                 join postroom_parked p on p.route = ? and p.ordering_key = n.k and p.state <> 'scheduled'
                group by p.ordering_key";
    let firsts: Vec<(String, i64)> = tx.exec(sql, (json(&keys), route)).await?;
    let sql = "update json_table(?, '$[*]' columns (k varchar(512) path '$[0]', at_seq bigint path '$[1]')) n
                 straight_join postroom_parked p force index (primary) on p.route = ? and p.ordering_key = n.k and p.seq = n.at_seq
                  set p.state = 'retry', p.due_at = utc_timestamp(6), p.waits_since = utc_timestamp(6)
                where p.state = 'queued'";
    if firsts.is_empty() { Ok(()) } else { tx.exec_drop(sql, (json(&firsts), route)).await }
}

/// Moves positions forward in lanes that are still held; returns those.
pub(crate) async fn positions(
    conn: &mut Conn,
    holder: &Holder<'_>,
    moves: &[Move<i64>],
) -> Result<HashSet<u16>, Error> {
    let mut tx = conn.start_transaction(TxOpts::default()).await?;
    let held = held(&mut tx, holder, "for update").await?;
    let to: Vec<(u16, i64)> =
        moves.iter().filter(|to| held.contains(&to.lane)).map(|to| (to.lane, to.position)).collect();
    let sql = "update json_table(?, '$[*]' columns (lane smallint path '$[0]', position bigint path '$[1]')) n
                 straight_join postroom_lanes l force index (primary) on l.route = ? and l.lane = n.lane
                  set l.position = n.position, l.settled_at = utc_timestamp(6)";
    tx.exec_drop(sql, (json(&to), holder.route)).await?;
    tx.commit().await?;
    Ok(held)
}
