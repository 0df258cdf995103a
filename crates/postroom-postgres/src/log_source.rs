//! The log source: rows of the outbox are appended and never updated, progress is a position a lane, written once a batch.
//!
//! `sql/claim.sql` says how rows are found, `position.rs` how positions move, `record.rs` what is written.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use postroom::{
    Claimed, Delivery, Headers, Message, MessageId, Origin, Outcome, ReadId, Settled, Settlement, Source, Standing,
    StoreError, Token, TopicFilter, Want, Watermark,
};
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;

use crate::connect::Connector;
use crate::link::Link;
use crate::position::{CatchUp, Floors, Found, Position, xmax};
use crate::rebase;
use crate::record::{self, Record};

/// Followers of one parked head that are claimed with it.
const FOLLOWERS_MAX: i64 = 200;

/// Where a route begins that has never run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StartAt {
    /// With the oldest message that the outbox still holds.
    #[default]
    Oldest,
    /// With the first message that commits after now.
    Now,
}

/// What a log source relays, and as whom.
#[derive(Debug, Clone)]
pub struct LogSourceOptions {
    /// Name of the route; its positions are kept under it.
    pub route: String,
    /// Which topics it takes.
    pub topics: TopicFilter,
    /// Name of this relay, unique among all relays.
    pub owner: String,
    /// How long lanes stay with a relay that has fallen silent.
    pub lease: Duration,
    /// Where to begin when the route has never run.
    pub start_at: StartAt,
}

/// How messages were found since the source was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReadCounters {
    /// Above the position, in order.
    pub fresh: u64,
    /// Behind the position: committed after later rows had been read.
    pub late: u64,
    /// Reads that could not take all late rows of a lane at once.
    pub catch_ups: u64,
}

/// Claims messages of one route from PostgreSQL.
pub struct LogSource {
    options: LogSourceOptions,
    likes: Vec<String>,
    /// Reads; writes nothing that may not be lost.
    claims: Link,
    /// Positions: losing the newest repeats messages, and never loses any.
    positions: Link,
    /// Parked messages and dead letters: durable before a position passes them.
    durable: Link,
    /// Lease renewals never wait behind anything else.
    leases: Link,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    lanes: BTreeMap<u16, Lane>,
    floors: Floors,
    next_token: u64,
    out: HashMap<Token, Out>,
    lost: Vec<u16>,
    /// The last read found fresh rows, so the floor is worth raising.
    floor_is_stale: bool,
    reads: ReadCounters,
}

struct Lane {
    epoch: i64,
    position: Position,
    watermark: Watermark<Position>,
    /// Reached, but not written yet.
    unwritten: Option<Position>,
    /// The last read took as much as it was allowed.
    full: bool,
    /// We stop claiming here without a renewal; only ever earlier than the database's own expiry.
    deadline: Instant,
}

/// A delivery that was handed out.
struct Out {
    lane: u16,
    epoch: i64,
    seq: i64,
    key: Option<String>,
    /// The read it came from; none for a parked one.
    read: Option<ReadId>,
}

/// What a read asks of one lane.
struct Asked {
    lane: u16,
    epoch: i64,
    position: Position,
    limit: usize,
}

impl LogSource {
    /// Registers the route and prepares to claim. Refuses a database without our schema, and one whose outbox sequence
    /// caches values: cached seqs would appear behind a position that has passed them.
    pub async fn open(connector: Connector, options: LogSourceOptions) -> Result<Self, StoreError> {
        let connector = Arc::new(connector);
        let source = Self {
            likes: options.topics.like_patterns(),
            claims: Link::new(connector.clone(), "set synchronous_commit = off"),
            positions: Link::new(connector.clone(), "set synchronous_commit = off"),
            durable: Link::new(connector.clone(), ""),
            leases: Link::new(connector, ""),
            state: Mutex::new(State::default()),
            options,
        };
        source.register().await?;
        Ok(source)
    }

    /// How messages were found so far.
    pub fn reads(&self) -> ReadCounters {
        self.state().reads
    }

    async fn register(&self) -> Result<(), StoreError> {
        let cache = self
            .durable
            .call("read the outbox sequence", async |session| {
                let sql = "select s.seqcache from pg_sequence s where s.seqrelid = 'postroom.outbox_seq_seq'::regclass";
                session.client.query_one(sql, &[]).await.map(|row| row.get::<_, i64>(0))
            })
            .await?;
        if cache != 1 {
            return Err(StoreError::Schema {
                problem: format!("postroom.outbox_seq_seq caches {cache} values a session, which would lose messages"),
                hint: "run `alter sequence postroom.outbox_seq_seq cache 1` and reconnect the writers",
            });
        }
        rebase::rebase_if_restored(&self.durable).await?;
        let (route, topics) = (&self.options.route, self.options.topics.patterns());
        let from_now = self.options.start_at == StartAt::Now;
        self.durable
            .call("register the route", async |session| {
                // The checkpoint commits first, so that its id is older than the snapshot that the lanes start from.
                let floor: i64 =
                    session.client.query_one("select floor_seq from postroom.checkpoint()", &[]).await?.get(0);
                session.client.execute(include_str!("sql/register_route.sql"), &[route, &topics]).await?;
                let lanes = if from_now {
                    include_str!("sql/register_lanes_now.sql")
                } else {
                    include_str!("sql/register_lanes_oldest.sql")
                };
                if from_now {
                    session.client.execute(lanes, &[route, &floor]).await
                } else {
                    session.client.execute(lanes, &[route]).await
                }
            })
            .await?;
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn claim_fresh(&self, want: usize) -> Result<(Vec<Delivery>, bool), StoreError> {
        let (asked, checkpoint) = {
            let mut state = self.state();
            (state.ask(want), std::mem::take(&mut state.floor_is_stale))
        };
        if asked.is_empty() {
            return Ok((Vec::new(), false));
        }
        let lanes: Vec<i16> = asked.iter().map(|ask| ask.lane as i16).collect();
        let seqs: Vec<i64> = asked.iter().map(|ask| ask.position.seq).collect();
        let floors: Vec<i64> = asked.iter().map(|ask| ask.position.floor).collect();
        let snapshots: Vec<&str> = asked.iter().map(|ask| ask.position.snapshot.as_ref()).collect();
        let catch_up = |ask: &Asked| ask.position.catch_up.clone();
        let catch_ups: Vec<Option<CatchUp>> = asked.iter().map(catch_up).collect();
        let catch_up_snapshots: Vec<Option<&str>> =
            catch_ups.iter().map(|catch_up| catch_up.as_ref().map(|c| c.snapshot.as_ref())).collect();
        let catch_up_seqs: Vec<Option<i64>> =
            catch_ups.iter().map(|catch_up| catch_up.as_ref().map(|c| c.seq)).collect();
        let limits: Vec<i64> = asked.iter().map(|ask| ask.limit as i64).collect();

        let result = self
            .claims
            .call("claim messages", async |session| {
                let mark = session.prepared("select floor_seq, xid::text from postroom.checkpoint()").await?;
                let read = session.prepared(include_str!("sql/claim.sql")).await?;
                // Sent together, done in this order: the checkpoint has committed when the read takes its snapshot.
                let mark =
                    async { if checkpoint { session.client.query_one(&mark, &[]).await.map(Some) } else { Ok(None) } };
                let parameters: [&(dyn ToSql + Sync); 9] = [
                    &lanes,
                    &seqs,
                    &floors,
                    &snapshots,
                    &catch_up_snapshots,
                    &catch_up_seqs,
                    &limits,
                    &self.options.route,
                    &self.likes,
                ];
                let rows = session.client.query(&read, &parameters);
                tokio::try_join!(biased; mark, rows)
            })
            .await;
        let (mark, rows) = match result {
            Ok(result) => result,
            Err(error) => {
                self.state().floor_is_stale |= checkpoint;
                return Err(error);
            }
        };
        let mut state = self.state();
        if let Some(row) = mark {
            let xid: String = get(&row, 1)?;
            let xid = xid.parse().map_err(|error: std::num::ParseIntError| unreadable(error.into()))?;
            state.floors.checkpoint(get(&row, 0)?, xid);
        }
        state.take_in(asked, rows)
    }

    async fn claim_parked(&self, want: usize) -> Result<Vec<Delivery>, StoreError> {
        let (lanes, in_hand) = {
            let state = self.state();
            let now = Instant::now();
            let lanes: Vec<i16> =
                state.lanes.iter().filter(|(_, lane)| lane.deadline > now).map(|(lane, _)| *lane as i16).collect();
            let in_hand: Vec<i64> = state.out.values().filter(|out| out.read.is_none()).map(|out| out.seq).collect();
            (lanes, in_hand)
        };
        if lanes.is_empty() {
            return Ok(Vec::new());
        }
        let heads = want as i64;
        let rows = self
            .claims
            .call("claim parked messages", async |session| {
                let statement = session.prepared(include_str!("sql/claim_parked.sql")).await?;
                let followers = FOLLOWERS_MAX.min(heads);
                session.client.query(&statement, &[&self.options.route, &lanes, &in_hand, &heads, &followers]).await
            })
            .await?;
        let mut state = self.state();
        let mut deliveries = Vec::with_capacity(rows.len());
        let mut cut = HashSet::new();
        for row in &rows {
            let lane_number = get::<i16>(row, "lane")? as u16;
            let key: Option<String> = get(row, "ordering_key")?;
            let Some(epoch) = state.lanes.get(&lane_number).map(|lane| lane.epoch) else { continue };
            // Ordered by seq, so what is cut off of a key is its end.
            if deliveries.len() >= want.max(1) || key.as_ref().is_some_and(|key| cut.contains(key)) {
                cut.extend(key);
                continue;
            }
            let out = Out { lane: lane_number, epoch, seq: get(row, "seq")?, key, read: None };
            let token = state.hand_out(out);
            deliveries.push(Delivery {
                token,
                lane: lane_number,
                origin: Origin::Parked,
                attempts: get::<i32>(row, "attempts")?.max(0) as u32,
                scheduled: false,
                behind: false,
                message: message_of(row)?,
            });
        }
        Ok(deliveries)
    }

    /// Writes the positions reached so far. A lane that is not ours any more is dropped.
    async fn write_positions(&self) -> Result<(), StoreError> {
        let moves: Vec<(u16, i64, Position)> = {
            let mut state = self.state();
            state
                .lanes
                .iter_mut()
                .filter_map(|(number, lane)| lane.unwritten.take().map(|position| (*number, lane.epoch, position)))
                .collect()
        };
        if moves.is_empty() {
            return Ok(());
        }
        match record::positions(&self.positions, &self.options.route, &moves).await {
            Ok(written) => {
                let mut state = self.state();
                for (number, epoch, _) in &moves {
                    if !written.contains(number) {
                        state.lose(*number, *epoch);
                    }
                }
                Ok(())
            }
            Err(error) => {
                let mut state = self.state();
                for (number, epoch, position) in moves {
                    if let Some(lane) = state.lanes.get_mut(&number).filter(|lane| lane.epoch == epoch) {
                        lane.unwritten.get_or_insert(position);
                    }
                }
                Err(error)
            }
        }
    }
}

#[async_trait]
impl Source for LogSource {
    async fn renew(&self) -> Result<Standing, StoreError> {
        let (lanes, epochs): (Vec<i16>, Vec<i64>) =
            self.state().lanes.iter().map(|(number, lane)| (*number as i16, lane.epoch)).unzip();
        let lease_ms = self.options.lease.as_millis() as i64;
        let deadline = Instant::now() + self.options.lease;
        let rows = self
            .leases
            .call("renew the lease", async |session| {
                let statement = session.prepared(include_str!("sql/renew.sql")).await?;
                session
                    .client
                    .query(&statement, &[&self.options.route, &self.options.owner, &lanes, &epochs, &lease_ms])
                    .await
            })
            .await?;
        let mut state = self.state();
        let mut seen = HashSet::new();
        for row in &rows {
            let number = get::<i16>(row, 0)? as u16;
            let epoch: i64 = get(row, 1)?;
            let kept: bool = get(row, 2)?;
            seen.insert(number);
            match state.lanes.get_mut(&number) {
                Some(lane) if kept && lane.epoch == epoch => lane.deadline = deadline,
                _ => {
                    if let Some(lane) = state.lanes.get(&number) {
                        let before = lane.epoch;
                        state.lose(number, before);
                    }
                    let position = position_of(row)?;
                    let lane = Lane {
                        epoch,
                        position,
                        watermark: Watermark::default(),
                        unwritten: None,
                        full: true,
                        deadline,
                    };
                    state.lanes.insert(number, lane);
                }
            }
        }
        for (number, epoch) in lanes.iter().zip(epochs) {
            if !seen.contains(&(*number as u16)) {
                state.lose(*number as u16, epoch);
            }
        }
        Ok(Standing { held: state.lanes.len(), lost_lanes: std::mem::take(&mut state.lost) })
    }

    async fn claim(&self, want: Want) -> Result<Claimed, StoreError> {
        let mut claimed = Claimed::default();
        if want.parked {
            claimed.deliveries = self.claim_parked(want.messages).await?;
            claimed.more = claimed.deliveries.len() >= want.messages;
        }
        match self.claim_fresh(want.messages).await {
            Ok((fresh, more)) => {
                claimed.deliveries.extend(fresh);
                claimed.more |= more;
            }
            // What was claimed before the error is handed out all the same: it is in our books.
            Err(error) if claimed.deliveries.is_empty() => return Err(error),
            Err(error) => tracing::warn!(%error, "fresh messages could not be claimed"),
        }
        claimed.lost_lanes = std::mem::take(&mut self.state().lost);
        Ok(claimed)
    }

    async fn settle(&self, settlements: &[Settlement]) -> Result<Settled, StoreError> {
        let mut settled = Settled::default();
        let record = {
            let mut state = self.state();
            let mut record = Record::default();
            for settlement in settlements {
                // A token that is not out any more was recorded by an earlier call whose answer was an error.
                let Some(out) = state.out.get(&settlement.token) else { continue };
                if state.lanes.get(&out.lane).is_none_or(|lane| lane.epoch != out.epoch) {
                    state.out.remove(&settlement.token);
                    settled.fenced += 1;
                    continue;
                }
                let out = &state.out[&settlement.token];
                record.add(out.lane, out.epoch, out.seq, out.key.as_deref(), out.read.is_none(), &settlement.outcome);
            }
            record
        };
        if !record.is_empty() {
            let held = record.write(&self.durable, &self.options.route).await?;
            let mut state = self.state();
            for (number, epoch) in record.lanes() {
                if !held.contains(&number) {
                    state.lose(number, epoch);
                }
            }
            settled.more_parked = record.frees_parked();
        }
        {
            let mut state = self.state();
            for settlement in settlements {
                let Some(out) = state.out.remove(&settlement.token) else { continue };
                let Some(lane) = state.lanes.get_mut(&out.lane).filter(|lane| lane.epoch == out.epoch) else {
                    settled.fenced += 1;
                    continue;
                };
                debug_assert!(
                    out.read.is_none() || settlement.outcome != Outcome::Release,
                    "a message of the outbox cannot be released one by one"
                );
                if let Some(read) = out.read {
                    lane.watermark.settled(read);
                }
                if let Some(position) = lane.watermark.advance() {
                    lane.unwritten = Some(position);
                }
            }
        }
        if let Err(error) = self.write_positions().await {
            // Everything durable is recorded; the positions are kept and written with the next settling.
            tracing::debug!(%error, "positions will be written later");
        }
        settled.lost_lanes = std::mem::take(&mut self.state().lost);
        Ok(settled)
    }

    async fn release(&self) -> Result<(), StoreError> {
        self.write_positions().await?;
        let (lanes, epochs): (Vec<i16>, Vec<i64>) =
            self.state().lanes.iter().map(|(number, lane)| (*number as i16, lane.epoch)).unzip();
        self.leases
            .call("give the lanes back", async |session| {
                session.client.execute(include_str!("sql/release.sql"), &[&self.options.route, &lanes, &epochs]).await
            })
            .await?;
        let mut state = self.state();
        state.lanes.clear();
        state.out.clear();
        Ok(())
    }

    fn lease(&self) -> Duration {
        self.options.lease
    }
}

impl State {
    /// Divides `want` among the lanes: half of it evenly, the other half among those that had more last time.
    fn ask(&self, want: usize) -> Vec<Asked> {
        let now = Instant::now();
        let lanes: Vec<(&u16, &Lane)> = self.lanes.iter().filter(|(_, lane)| lane.deadline > now).collect();
        if lanes.is_empty() || want == 0 {
            return Vec::new();
        }
        let full = lanes.iter().filter(|(_, lane)| lane.full).count();
        let even = if full == 0 { want } else { want.div_ceil(2) } / lanes.len();
        let extra = (want - even * lanes.len()).checked_div(full).unwrap_or(0);
        let mut left = want;
        lanes
            .into_iter()
            .filter_map(|(number, lane)| {
                let limit = (even + if lane.full { extra } else { 0 }).max(1).min(left);
                left -= limit;
                (limit > 0).then(|| Asked { lane: *number, epoch: lane.epoch, position: lane.position.clone(), limit })
            })
            .collect()
    }

    fn take_in(&mut self, asked: Vec<Asked>, rows: Vec<Row>) -> Result<(Vec<Delivery>, bool), StoreError> {
        let mut rows = rows.into_iter();
        let header = rows.next().ok_or_else(|| unreadable("the read brought no snapshot".into()))?;
        let snapshot: Arc<str> = get::<String>(&header, "topic")?.into();
        let xmax = xmax(&snapshot).ok_or_else(|| unreadable(format!("snapshot {snapshot:?}").into()))?;
        let floor = self.floors.floor(xmax);

        let mut by_lane: BTreeMap<u16, (Vec<Row>, Vec<Row>)> = BTreeMap::new();
        for row in rows {
            let (late, fresh) = by_lane.entry(get::<i16>(&row, "lane")? as u16).or_default();
            if get::<bool>(&row, "late")? { late.push(row) } else { fresh.push(row) }
        }
        let mut deliveries = Vec::new();
        let mut more = false;
        for ask in asked {
            if self.lanes.get(&ask.lane).is_none_or(|lane| lane.epoch != ask.epoch) {
                continue;
            }
            let (mut late, mut fresh) = by_lane.remove(&ask.lane).unwrap_or_default();
            if cfg!(seeded_bug = "cursor_by_id") {
                late.clear();
            }
            let late_more = late.len() > ask.limit;
            late.truncate(ask.limit);
            let full = late_more || fresh.len() + late.len() >= ask.limit;
            fresh.truncate(if late_more { 0 } else { ask.limit - late.len() });
            let seq_of = |row: Option<&Row>| row.map(|row| get::<i64>(row, "seq")).transpose();
            let found = Found { late_last: seq_of(late.last())?, late_more, fresh_last: seq_of(fresh.last())? };
            self.reads.late += late.len() as u64;
            self.reads.fresh += fresh.len() as u64;
            self.reads.catch_ups += u64::from(late_more);
            self.floor_is_stale |= !fresh.is_empty();
            let next = ask.position.after(&snapshot, floor, &found);
            let moved = next.seq != ask.position.seq || !late.is_empty() || late_more;

            let wanted = late.iter().chain(&fresh).map(|row| get::<bool>(row, "wanted"));
            let wanted: usize = wanted.collect::<Result<Vec<_>, _>>()?.into_iter().filter(|wanted| *wanted).count();
            let Some(lane) = self.lanes.get_mut(&ask.lane) else { continue };
            lane.position = next.clone();
            lane.full = full;
            more |= full || next.catch_up.is_some();
            if !moved {
                // Nothing found: the newer snapshot is ours in memory and need not be written.
                continue;
            }
            let read = lane.watermark.opened(next, wanted);
            if let Some(position) = lane.watermark.advance() {
                lane.unwritten = Some(position);
            }
            for row in late.iter().chain(&fresh) {
                if !get::<bool>(row, "wanted")? {
                    continue;
                }
                let message = message_of(row)?;
                let key = message.ordering_key().map(str::to_owned);
                let out = Out { lane: ask.lane, epoch: ask.epoch, seq: get(row, "seq")?, key, read: Some(read) };
                let token = self.hand_out(out);
                deliveries.push(Delivery {
                    token,
                    lane: ask.lane,
                    origin: Origin::Outbox,
                    attempts: 0,
                    scheduled: get(row, "scheduled")?,
                    behind: get(row, "behind")?,
                    message,
                });
            }
        }
        Ok((deliveries, more))
    }

    fn hand_out(&mut self, out: Out) -> Token {
        let token = Token(self.next_token);
        self.next_token += 1;
        self.out.insert(token, out);
        token
    }

    fn lose(&mut self, number: u16, epoch: i64) {
        if self.lanes.get(&number).is_some_and(|lane| lane.epoch == epoch) {
            self.lanes.remove(&number);
            self.lost.push(number);
        }
    }
}

fn unreadable(source: postroom::BoxError) -> StoreError {
    StoreError::Refused { what: "read a row of the outbox", source }
}

fn get<'a, T: tokio_postgres::types::FromSql<'a>>(
    row: &'a Row,
    column: impl tokio_postgres::row::RowIndex + std::fmt::Display,
) -> Result<T, StoreError> {
    row.try_get(column).map_err(|error| unreadable(error.into()))
}

fn position_of(row: &Row) -> Result<Position, StoreError> {
    let catch_up = match (get::<Option<String>>(row, 6)?, get::<Option<i64>>(row, 7)?) {
        (Some(snapshot), Some(seq)) => Some(CatchUp { snapshot: snapshot.into(), seq }),
        _ => None,
    };
    Ok(Position { snapshot: get::<String>(row, 3)?.into(), seq: get(row, 4)?, floor: get(row, 5)?, catch_up })
}

/// Header values that are not text (a plain `insert` may have put them there before the constraint) show as their JSON.
fn headers_of(json: Option<serde_json::Value>) -> Headers {
    match json {
        Some(serde_json::Value::Object(fields)) => fields
            .into_iter()
            .map(|(name, value)| match value {
                serde_json::Value::String(text) => (name, text),
                other => (name, other.to_string()),
            })
            .collect(),
        _ => Headers::new(),
    }
}

fn message_of(row: &Row) -> Result<Message, StoreError> {
    Ok(Message {
        id: MessageId::from(get::<uuid::Uuid>(row, "id")?),
        topic: get(row, "topic")?,
        kind: get(row, "type")?,
        key: get(row, "key")?,
        routing_key: get(row, "routing_key")?,
        payload: Bytes::copy_from_slice(get(row, "payload")?),
        content_type: get(row, "content_type")?,
        headers: headers_of(get(row, "headers")?),
        tenant_id: get(row, "tenant_id")?,
        aggregate_type: get(row, "aggregate_type")?,
        aggregate_id: get(row, "aggregate_id")?,
        aggregate_version: get(row, "aggregate_version")?,
        occurred_at: get(row, "occurred_at")?,
        delay: Duration::ZERO,
    })
}
