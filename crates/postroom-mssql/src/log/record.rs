//! What is written about deliveries that met trouble: parked messages and dead letters; and positions.

use std::collections::HashSet;

use postroom::lane_book::Move;
use postroom::{Change, Entry};
use tiberius::error::Error;

use crate::conn::Conn;
use crate::log::row::COPIED;
use crate::operate::operations::note_death;
use crate::sql::{from_now, json, microseconds, named};

/// Who writes: the route, its relay, and the lanes with the epochs and positions under which they are held.
pub(crate) struct Holder<'a> {
    pub route: &'a str,
    pub owner: &'a str,
    pub lanes: Vec<(u16, i64, i64)>,
}

/// Which of these lanes are still as this relay left them. The lock keeps a takeover away until the transaction ends.
async fn held(tx: &mut Conn, holder: &Holder<'_>, lock: &str) -> Result<HashSet<u16>, Error> {
    let sql = format!(
        "select l.lane
           from openjson(@lanes) with (lane smallint '$[0]', epoch bigint '$[1]', position bigint '$[2]') n
           join postroom_lanes l with ({lock}, rowlock) on l.route = @route and l.lane = n.lane
          where l.owner = @owner and l.epoch = n.epoch and l.position = n.position
          order by l.lane
         option (loop join, force order)"
    );
    let parameters = named! { "lanes" => json(&holder.lanes), "route" => holder.route, "owner" => holder.owner };
    let lanes: Vec<u16> = tx.query(&sql, parameters).await?;
    Ok(lanes.into_iter().collect())
}

/// What failed before, as JSON: the newest 32.
pub(crate) struct History(Vec<serde_json::Value>);

impl History {
    const KEPT: usize = 32;

    pub fn of(stored: Option<&str>) -> Self {
        Self(stored.and_then(|stored| serde_json::from_str(stored).ok()).unwrap_or_default())
    }

    /// With one failure more.
    pub fn with(mut self, at: &str, attempt: u32, error: &str) -> String {
        self.0.push(serde_json::json!({ "at": at, "attempt": attempt, "error": error }));
        self.0.drain(..self.0.len().saturating_sub(Self::KEPT));
        json(&self.0)
    }

    /// The database's clock as it is written in a history.
    pub async fn now(tx: &mut Conn) -> Result<String, Error> {
        let sql = "select convert(nvarchar(33), sysutcdatetime(), 126)";
        Ok(tx.first::<String>(sql, named! {}).await?.unwrap_or_default() + "Z")
    }
}

/// Written in one transaction before the positions pass them, for lanes that are still held; returns those. `ordered`: whether a message
/// waits for others of its key.
pub(crate) async fn entries(
    conn: &mut Conn,
    holder: &Holder<'_>,
    entries: &[Entry],
    ordered: bool,
) -> Result<HashSet<u16>, Error> {
    conn.begin().await?;
    // Until the end of the transaction. Operators take the same lock: a shared one would not keep them waiting.
    let held = held(conn, holder, "updlock").await?;
    let route = holder.route;
    let now = History::now(conn).await?;
    let entries: Vec<&Entry> = entries.iter().filter(|entry| held.contains(&entry.lane)).collect();
    for Entry { seq, id, key, parked, change, .. } in &entries {
        let of = || named! { "route" => route, "seq" => *seq, "id" => id.to_string() };
        match change {
            Change::ParkAgain { after, attempts, error } => {
                let history = history(conn, of()).await?.with(&now, *attempts, error);
                let sql = format!(
                    "update postroom_parked
                        set state = 'retry', attempts = @attempts, due_at = {}, waits_since = sysutcdatetime(), history = @history,
                            last_error = @error
                      where route = @route and seq = @seq and id = @id",
                    from_now("@after")
                );
                let mut parameters = of();
                parameters.extend(named! {
                    "attempts" => *attempts, "after" => microseconds(*after), "error" => error, "history" => history
                });
                conn.exec(&sql, parameters).await?;
            }
            Change::Park { state, after, attempts, error } => {
                let history = match error {
                    Some(error) => History::of(None).with(&now, *attempts, error),
                    None => "[]".to_owned(),
                };
                // One that queues has no time of its own. A row that is there stays as it is.
                let sql = format!(
                    "insert into postroom_parked (route, seq, lane, ordering_key, state, attempts, due_at, waits_since, last_error, history, {COPIED})
                     select @route, o.seq, o.lane, case when @ordered = 1 then coalesce(o.[key], o.aggregate_id) end, @state, @attempts,
                            case @state when 'scheduled' then coalesce(o.visible_at, sysutcdatetime()) when 'retry' then {} end,
                            sysutcdatetime(), @error, @history, {COPIED}
                       from postroom_outbox o
                      where o.seq = @seq and o.id = @id
                        and not exists (select 1 from postroom_parked p where p.route = @route and p.seq = @seq and p.id = @id)",
                    from_now("@after")
                );
                let mut parameters = of();
                parameters.extend(named! {
                    "ordered" => ordered, "state" => state.as_str(), "attempts" => *attempts, "after" => microseconds(*after),
                    "error" => error.as_deref(), "history" => history
                });
                conn.exec(&sql, parameters).await?;
            }
            Change::Bury { attempts, cause, error, blocks_key } => {
                let history = match parked {
                    true => history(conn, of()).await?,
                    false => History::of(None),
                };
                let (from, of_route) =
                    if *parked { ("postroom_parked", "and o.route = @route") } else { ("postroom_outbox", "") };
                let sql = format!(
                    "insert into postroom_dead_letters (route, seq, lane, attempts, cause, error, history, {COPIED})
                     select @route, o.seq, o.lane, @attempts, @cause, @error, @history, {COPIED}
                       from {from} o
                      where o.seq = @seq and o.id = @id {of_route}
                        and not exists (select 1 from postroom_dead_letters d where d.route = @route and d.seq = @seq and d.id = @id)"
                );
                let mut parameters = of();
                parameters.extend(named! {
                    "attempts" => *attempts, "cause" => cause.as_str(), "error" => error,
                    "history" => history.with(&now, *attempts, error)
                });
                conn.exec(&sql, parameters).await?;
                note_death(conn, "out", route, &id.to_string(), cause.as_str()).await?;
                unpark(conn, route, &[(*seq, id.to_string())]).await?;
                if let Some(key) = key.as_ref().filter(|_| *blocks_key) {
                    let sql = "insert into postroom_blocked_keys (route, ordering_key, seq, reason)
                               select @route, @key, @seq, @reason
                                where not exists (select 1 from postroom_blocked_keys b
                                                   where b.route = @route and b.key_hash = convert(binary(32), hashbytes('SHA2_256', @key)) and b.seq = @seq)";
                    let reason = format!("dead: {error}");
                    let parameters = named! { "route" => route, "key" => key, "seq" => *seq, "reason" => reason };
                    conn.exec(sql, parameters).await?;
                }
            }
            Change::Unpark => {}
        }
    }
    let done = entries.iter().filter(|entry| matches!(entry.change, Change::Unpark));
    let done: Vec<(i64, String)> = done.map(|entry| (entry.seq, entry.id.to_string())).collect();
    if !done.is_empty() {
        unpark(conn, route, &done).await?;
    }
    let keys: HashSet<&String> = entries.iter().filter_map(|entry| entry.key.as_ref()).collect();
    promote(conn, route, &keys.into_iter().collect::<Vec<_>>()).await?;
    conn.commit().await?;
    Ok(held)
}

/// What failed before of a parked message.
async fn history(tx: &mut Conn, of: crate::sql::Named) -> Result<History, Error> {
    let sql =
        "select history from postroom_parked with (updlock, rowlock) where route = @route and seq = @seq and id = @id";
    Ok(History::of(tx.first::<String>(sql, of).await?.as_deref()))
}

pub(crate) async fn unpark(tx: &mut Conn, route: &str, seqs: &[(i64, String)]) -> Result<(), Error> {
    let sql = "delete p
                 from openjson(@seqs) with (seq bigint '$[0]', id uniqueidentifier '$[1]') n
                 join postroom_parked p with (rowlock) on p.route = @route and p.seq = n.seq and p.id = n.id
               option (loop join, force order)";
    tx.exec(sql, named! { "seqs" => json(seqs), "route" => route }).await.map(drop)
}

/// The first message left of each of these keys becomes its head, so that it can be claimed.
pub(crate) async fn promote<K: AsRef<str>>(tx: &mut Conn, route: &str, keys: &[K]) -> Result<(), Error> {
    let first = "select top (1) p.seq, p.state from postroom_parked p
                  where p.route = @route and p.key_hash = convert(binary(32), hashbytes('SHA2_256', @key)) and p.state <> 'scheduled'
                  order by p.seq";
    let head = "update postroom_parked with (rowlock)
                   set state = 'retry', due_at = sysutcdatetime(), waits_since = sysutcdatetime()
                 where route = @route and seq = @seq and key_hash = convert(binary(32), hashbytes('SHA2_256', @key)) and state = 'queued'";
    for key in keys {
        let key = key.as_ref();
        let found: Option<(i64, String)> = tx.first(first, named! { "route" => route, "key" => key }).await?;
        if let Some((seq, state)) = found
            && state == "queued"
        {
            tx.exec(head, named! { "route" => route, "key" => key, "seq" => seq }).await?;
        }
    }
    Ok(())
}

/// Moves positions forward in lanes that are still held; returns those.
pub(crate) async fn positions(
    conn: &mut Conn,
    holder: &Holder<'_>,
    moves: &[Move<i64>],
) -> Result<HashSet<u16>, Error> {
    conn.begin().await?;
    let held = held(conn, holder, "updlock").await?;
    let to: Vec<(u16, i64)> =
        moves.iter().filter(|to| held.contains(&to.lane)).map(|to| (to.lane, to.position)).collect();
    let sql = "update l set position = n.position, settled_at = sysutcdatetime()
                 from openjson(@to) with (lane smallint '$[0]', position bigint '$[1]') n
                 join postroom_lanes l with (rowlock) on l.route = @route and l.lane = n.lane
               option (loop join, force order)";
    conn.exec(sql, named! { "to" => json(&to), "route" => holder.route }).await?;
    conn.commit().await?;
    Ok(held)
}
