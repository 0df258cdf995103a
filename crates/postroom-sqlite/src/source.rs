//! Claims messages of one route from a SQLite file: the log source with one lane, whose position is a seq.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use postroom::{
    Claimed, Delivery, Order, Origin, ReadId, Report, Settled, Settlement, Source, Standing, StoreError, Token,
    TopicFilter, Want, Watermark,
};
use rusqlite::{Connection, OptionalExtension, TransactionBehavior, params};

use crate::connect::{connect, store_error};
use crate::record::Record;
use crate::row::Found;

/// The one lane of a SQLite store.
pub(crate) const LANE: u16 = 0;
/// The clock of the database.
pub(crate) const NOW: &str = "cast(unixepoch('subsec') * 1000 as integer)";

/// What a source relays, and as whom.
#[derive(Debug, Clone)]
pub struct SqliteSourceOptions {
    /// The database file.
    pub path: PathBuf,
    /// Name of the route; its position is kept under it.
    pub route: String,
    /// Which topics it takes.
    pub topics: TopicFilter,
    /// Name of this relay, unique among all relays.
    pub owner: String,
    /// How long the lane stays with a relay that has fallen silent.
    pub lease: Duration,
    /// Order within a key; the relay has to be told the same.
    pub order: Order,
}

/// Claims messages of one route. All work happens on blocking threads, on one connection.
pub struct SqliteSource {
    inner: Arc<Mutex<Inner>>,
    lease: Duration,
}

struct Inner {
    options: SqliteSourceOptions,
    connection: Connection,
    epoch: Option<i64>,
    position: i64,
    watermark: Watermark<i64>,
    unwritten: Option<i64>,
    next_token: u64,
    out: HashMap<Token, Out>,
    lost: Vec<u16>,
}

struct Out {
    seq: i64,
    key: Option<String>,
    read: Option<ReadId>,
}

impl SqliteSource {
    /// Registers the route and prepares to claim. Blocks for a moment.
    pub fn open(options: SqliteSourceOptions) -> Result<Self, StoreError> {
        let connection = connect(&options.path)?;
        let failed = |error| store_error("register the route", error);
        // Losing the newest position repeats messages and never loses any; WAL keeps the file consistent.
        connection.pragma_update(None, "synchronous", "normal").map_err(failed)?;
        let topics = serde_json::to_string(options.topics.patterns()).unwrap_or_default();
        let sql = "insert into postroom_routes (name, topics) values (?1, ?2)
                   on conflict (name) do update set topics = excluded.topics";
        connection.execute(sql, params![options.route, topics]).map_err(failed)?;
        let sql = "insert into postroom_lanes (route, lane) values (?1, ?2) on conflict (route, lane) do nothing";
        connection.execute(sql, params![options.route, LANE]).map_err(failed)?;
        let lease = options.lease;
        let inner = Inner {
            options,
            connection,
            epoch: None,
            position: 0,
            watermark: Watermark::default(),
            unwritten: None,
            next_token: 0,
            out: HashMap::new(),
            lost: Vec::new(),
        };
        Ok(Self { inner: Arc::new(Mutex::new(inner)), lease })
    }

    /// Runs on a blocking thread; it runs to its end even when the caller stops waiting.
    async fn blocking<T: Send + 'static>(
        &self,
        what: &'static str,
        work: impl FnOnce(&mut Inner) -> Result<T, rusqlite::Error> + Send + 'static,
    ) -> Result<T, StoreError> {
        let inner = self.inner.clone();
        tokio::task::spawn_blocking(move || {
            let mut inner = inner.lock().unwrap_or_else(PoisonError::into_inner);
            work(&mut inner).map_err(|error| store_error(what, error))
        })
        .await
        .map_err(|error| StoreError::Unavailable { what, source: error.into() })?
    }
}

#[async_trait]
impl Source for SqliteSource {
    async fn renew(&self, _: &Report) -> Result<Standing, StoreError> {
        self.blocking("renew the lease", |inner| {
            let sql = format!(
                "update postroom_lanes
                    set epoch = case when owner = ?2 and epoch = ?3 then epoch else epoch + 1 end,
                        owner = ?2, expires_ms = {NOW} + ?4
                  where route = ?1 and lane = 0
                    and (owner is null or expires_ms < {NOW} or (owner = ?2 and epoch = ?3))
                returning epoch, position_seq"
            );
            let lease = inner.options.lease.as_millis() as i64;
            let held: Option<(i64, i64)> = inner
                .connection
                .query_row(&sql, params![inner.options.route, inner.options.owner, inner.epoch, lease], |row| {
                    Ok((row.get(0)?, row.get(1)?))
                })
                .optional()?;
            match held {
                Some((epoch, _)) if inner.epoch == Some(epoch) => {}
                Some((epoch, position)) => {
                    inner.lose();
                    // Read by the relay before and only queued up, without its position having passed them: they are read
                    // again, in order with those before them that it had in hand.
                    let sql = "delete from postroom_parked where route = ?1 and seq > ?2 and state <> 'scheduled'
                                  and attempts = 0 and last_error is null";
                    inner.connection.execute(sql, params![inner.options.route, position])?;
                    inner.epoch = Some(epoch);
                    inner.position = position;
                }
                None => inner.lose(),
            }
            let (held, settled_ahead) = (usize::from(inner.epoch.is_some()), inner.watermark.settled_ahead());
            Ok(Standing { held, lost_lanes: std::mem::take(&mut inner.lost), settled_ahead, deaths: 0 })
        })
        .await
    }

    async fn claim(&self, want: Want) -> Result<Claimed, StoreError> {
        self.blocking("claim messages", move |inner| {
            let mut claimed = inner.claim(want)?;
            // Rows of other routes are passed without any settling.
            claimed.unwritten = inner.unwritten.is_some();
            Ok(claimed)
        })
        .await
    }

    async fn settle(&self, settlements: &[Settlement]) -> Result<Settled, StoreError> {
        let settlements = settlements.to_vec();
        self.blocking("settle messages", move |inner| inner.settle(&settlements)).await
    }

    async fn release(&self) -> Result<(), StoreError> {
        self.blocking("give the lane back", |inner| {
            inner.settle(&[])?;
            let sql = "update postroom_lanes set owner = null, expires_ms = null
                        where route = ?1 and lane = 0 and epoch = ?2";
            inner.connection.execute(sql, params![inner.options.route, inner.epoch])?;
            inner.lose();
            inner.lost.clear();
            Ok(())
        })
        .await
    }

    fn lease(&self) -> Duration {
        self.lease
    }
}

impl Inner {
    fn lose(&mut self) {
        if self.epoch.take().is_some() {
            self.lost.push(LANE);
        }
        self.out.clear();
        self.watermark = Watermark::default();
        self.unwritten = None;
    }

    fn hand_out(&mut self, found: Found, origin: Origin, read: Option<ReadId>) -> Delivery {
        let Found { seq, attempts, scheduled, behind, message, .. } = found;
        let token = Token(self.next_token);
        self.next_token += 1;
        let key = message.ordering_key().map(str::to_owned);
        self.out.insert(token, Out { seq, key, read });
        Delivery { token, lane: LANE, origin, attempts, scheduled, behind, deaths: 0, doubts: 0, message }
    }

    fn claim(&mut self, want: Want) -> Result<Claimed, rusqlite::Error> {
        let mut claimed = Claimed { lost_lanes: std::mem::take(&mut self.lost), ..Claimed::default() };
        if self.epoch.is_none() {
            return Ok(claimed);
        }
        // Everything is read before anything is taken in: an error half-way must not leave a read in nobody's hand.
        let (parked, parked_cut) =
            if want.parked { self.read_parked(want.messages, want.bytes)? } else { (Vec::new(), false) };
        let room = want.lane_messages_max.saturating_sub(self.watermark.open()).min(want.messages);
        let (fresh, fresh_cut) = self.read_fresh(room, want.bytes)?;
        claimed.more = parked_cut || fresh_cut || parked.len() >= want.messages || fresh.len() >= want.messages;

        for found in parked {
            claimed.deliveries.push(self.hand_out(found, Origin::Parked, None));
        }
        let Some(last) = fresh.last() else { return Ok(claimed) };
        self.position = last.seq;
        let topics = &self.options.topics;
        let wanted: Vec<Found> =
            fresh.into_iter().filter(|row| !row.dealt_with && topics.takes(&row.message.topic)).collect();
        let read = self.watermark.opened(self.position, wanted.len());
        if let Some(position) = self.watermark.advance() {
            self.unwritten = Some(position);
        }
        for found in wanted {
            claimed.deliveries.push(self.hand_out(found, Origin::Outbox, Some(read)));
        }
        Ok(claimed)
    }

    /// In order, at most about `bytes`; whether there was more.
    fn read_fresh(&self, limit: usize, bytes: usize) -> Result<(Vec<Found>, bool), rusqlite::Error> {
        // Dealt with: parked or buried before a crash kept the position from passing it.
        let sql = format!(
            "select o.*, 0 as attempts, coalesce(o.visible_ms > {NOW}, false) as scheduled,
                    (exists (select 1 from postroom_parked p where p.route = ?1 and p.seq = o.seq)
                     or exists (select 1 from postroom_dead_letters d where d.route = ?1 and d.seq = o.seq)) as dealt_with,
                    (exists (select 1 from postroom_parked p
                              where p.route = ?1 and p.ordering_key = coalesce(o.key, o.aggregate_id)
                                and p.state <> 'scheduled')
                     or exists (select 1 from postroom_blocked_keys b
                                 where b.route = ?1 and b.ordering_key = coalesce(o.key, o.aggregate_id))) as behind
               from postroom_outbox o where o.seq > ?2 order by o.seq limit ?3"
        );
        let mut statement = self.connection.prepare_cached(&sql)?;
        up_to(bytes, statement.query_map(params![self.options.route, self.position, limit as i64], Found::of)?)
    }

    /// Heads that are due, each with what queues behind it, up to the next head of the key.
    fn read_parked(&self, limit: usize, bytes: usize) -> Result<(Vec<Found>, bool), rusqlite::Error> {
        let in_hand: Vec<i64> = self.out.values().filter(|out| out.read.is_none()).map(|out| out.seq).collect();
        let in_hand = serde_json::to_string(&in_hand).unwrap_or_default();
        let sql = format!(
            "with heads as (
                 select p.seq, p.state, p.ordering_key from postroom_parked p
                  where p.route = ?1 and p.state <> 'queued' and p.due_ms <= {NOW}
                    and p.seq not in (select value from json_each(?2))
                    and (p.ordering_key is null or not exists (
                            select 1 from postroom_parked e
                             where e.route = p.route and e.ordering_key = p.ordering_key and e.state <> 'scheduled'
                               and e.seq < p.seq))
                    and not exists (select 1 from postroom_blocked_keys b
                                     where b.route = p.route and b.ordering_key = p.ordering_key)
                  order by p.due_ms, p.seq limit ?3)
             select p.*, false as scheduled, false as behind, false as dealt_with from postroom_parked p
              where p.route = ?1 and p.seq not in (select value from json_each(?2))
                and (p.seq in (select seq from heads)
                     or (p.state = 'queued' and exists (
                             select 1 from heads h
                              where h.state = 'retry' and h.ordering_key = p.ordering_key and h.seq < p.seq
                                and not exists (select 1 from postroom_parked n
                                                 where n.route = ?1 and n.ordering_key = p.ordering_key
                                                   and n.state = 'retry' and n.seq > h.seq and n.seq < p.seq))))
              order by p.seq limit ?3"
        );
        let mut statement = self.connection.prepare_cached(&sql)?;
        up_to(bytes, statement.query_map(params![self.options.route, in_hand, limit as i64], Found::of)?)
    }

    fn settle(&mut self, settlements: &[Settlement]) -> Result<Settled, rusqlite::Error> {
        let mut settled = Settled::default();
        let Some(epoch) = self.epoch else {
            settled.fenced = settlements.len();
            settled.lost_lanes = std::mem::take(&mut self.lost);
            return Ok(settled);
        };
        let mut record = Record::default();
        for settlement in settlements {
            if let Some(out) = self.out.get(&settlement.token) {
                // Without order a message waits for no other, but those that an operator gave back do.
                let waits = self.options.order != Order::None || out.read.is_none();
                let key = out.key.as_deref().filter(|_| waits);
                record.add(out.seq, key, out.read.is_none(), &settlement.outcome);
            }
        }
        // The watermark moves in memory only after the transaction committed, so that a repeated call repeats it whole.
        let mut reads: Vec<ReadId> = Vec::new();
        for settlement in settlements {
            if let Some(Out { read: Some(read), .. }) = self.out.get(&settlement.token) {
                reads.push(*read);
            }
        }
        if !record.is_empty() {
            let route = self.options.route.clone();
            let tx = self.connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            let held: bool = tx.query_row(
                "select exists (select 1 from postroom_lanes where route = ?1 and lane = 0 and epoch = ?2)",
                params![route, epoch],
                |row| row.get(0),
            )?;
            if held {
                record.write(&tx, &route, self.options.order != Order::None)?;
                tx.commit()?;
                settled.more_parked = true;
            } else {
                tx.rollback()?;
                settled.fenced = settlements.len();
                self.lose();
                settled.lost_lanes = std::mem::take(&mut self.lost);
                return Ok(settled);
            }
        }
        for read in reads {
            self.watermark.settled(read);
        }
        for settlement in settlements {
            // Not in our books: the lane was lost meanwhile.
            settled.fenced += usize::from(self.out.remove(&settlement.token).is_none());
        }
        if let Some(position) = self.watermark.advance() {
            self.unwritten = Some(position);
        }
        settled.settled_ahead = self.watermark.settled_ahead();
        if let Some(position) = self.unwritten {
            let sql = "update postroom_lanes set position_seq = ?3 where route = ?1 and lane = 0 and epoch = ?2";
            // An error leaves the position unwritten for the next settling; everything else is recorded.
            match self.connection.execute(sql, params![self.options.route, epoch, position]) {
                Ok(1) => self.unwritten = None,
                Ok(_) => {
                    self.lose();
                    settled.lost_lanes = std::mem::take(&mut self.lost);
                }
                Err(_) => settled.unwritten = true,
            }
        }
        Ok(settled)
    }
}

/// Takes rows as long as they fit in `bytes`, the first whatever its size; whether one did not.
fn up_to(
    bytes: usize,
    rows: impl Iterator<Item = Result<Found, rusqlite::Error>>,
) -> Result<(Vec<Found>, bool), rusqlite::Error> {
    let (mut taken, mut weight) = (Vec::new(), 0);
    for row in rows {
        let row = row?;
        if weight >= bytes && !taken.is_empty() {
            return Ok((taken, true));
        }
        weight += row.message.weight();
        taken.push(row);
    }
    Ok((taken, false))
}
