//! The log source: rows of the outbox are appended and never updated, progress is a position a lane, written about twenty times a second.
//!
//! `sql/claim.sql` says how rows are found, `position.rs` how positions move, `record.rs` what is written.

mod upkeep;

use std::error::Error as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use postroom::lane_book::{Granted, Tenant};
use postroom::{
    Claimed, Delivery, Noted, Order, Outcome, Report, Route, Settled, Settlement, Source, Standing, StoreError, Token,
    Want, crash_point,
};
use tokio_postgres::types::ToSql;

use crate::database::{Database, Links};
use crate::link::Link;
use crate::log::lanes::Lanes;
use crate::log::position::{CatchUp, Position, astray_bounds};
use crate::log::record::{self, Record};
use crate::log::row::{self, ParkedRow, Read};
use crate::log::watch::Watch;

/// Followers of one parked head that are claimed with it.
const FOLLOWERS_MAX: i64 = 200;

/// Each write of positions leaves a dead row version a lane, which a snapshot held open somewhere keeps alive, and which every
/// later write has to pass. So they are written 20 times a second and not hundreds of times.
const POSITIONS_EVERY: Duration = Duration::from_millis(50);

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
    route: Route,
    owner: String,
    positions_every: Duration,
    links: Arc<Links>,
    opened: Instant,
    state: Mutex<Lanes>,
    watch: Mutex<Watch>,
    /// A read found rows that no read would look for again.
    astray: AtomicBool,
    /// The delivery that travels alone now.
    marked: Mutex<Option<Marked>>,
    /// One write of positions at a time: an older one must not come after a newer.
    position_turn: tokio::sync::Mutex<()>,
    /// The schema was looked at and the route registered.
    registered: tokio::sync::OnceCell<()>,
}

/// A delivery noted in `postroom.suspects`.
#[derive(Clone)]
struct Marked {
    token: Token,
    lane: i16,
    epoch: i64,
    seq: i64,
}

impl LogSource {
    /// Registers the route and prepares to claim, for a relay of this name, which no other relay may have. Refuses a database
    /// without our schema, and one whose outbox sequence caches values: cached seqs would appear behind a position that has
    /// passed them. A database that cannot be reached now is no error: the route is registered with the first renewal that
    /// reaches it.
    pub async fn open(database: &Database, route: &Route, owner: impl Into<String>) -> Result<Self, StoreError> {
        let source = Self {
            owner: owner.into(),
            positions_every: POSITIONS_EVERY,
            links: database.links().clone(),
            opened: Instant::now(),
            state: Mutex::new(Lanes::default()),
            watch: Mutex::new(Watch::new(route.lease)),
            astray: AtomicBool::new(false),
            marked: Mutex::new(None),
            position_turn: tokio::sync::Mutex::new(()),
            registered: tokio::sync::OnceCell::new(),
            route: route.clone(),
        };
        match source.be_registered().await {
            Err(error) if error.is_transient() => {
                let mut why = error.to_string();
                let mut cause = error.source();
                while let Some(inner) = cause {
                    why = format!("{why}: {inner}");
                    cause = inner.source();
                }
                tracing::warn!(route = route.name, "the route is not registered yet, trying again: {why}");
            }
            registered => registered?,
        }
        Ok(source)
    }

    async fn be_registered(&self) -> Result<(), StoreError> {
        self.registered.get_or_try_init(|| self.register()).await.map(drop)
    }

    /// Positions are written at most so often, unless many messages wait for it; 50 ms unless told.
    pub fn positions_every(mut self, pause: Duration) -> Self {
        self.positions_every = pause;
        self
    }

    /// The time as the book of lanes counts it.
    fn now(&self) -> Duration {
        self.opened.elapsed()
    }

    /// How messages were found so far.
    pub fn reads(&self) -> ReadCounters {
        self.state().reads
    }

    /// Puts back what the relays before had queued up in lanes that were taken just now, and learns what they had dealt with.
    async fn unread(&self, generation: u64, granted: &[Granted<Position>]) -> Result<(), StoreError> {
        let taken = granted.iter().filter(|granted| !granted.kept);
        let (lanes, epochs): (Vec<i16>, Vec<i64>) = taken.map(|granted| (granted.lane as i16, granted.epoch)).unzip();
        if lanes.is_empty() {
            return Ok(());
        }
        let dealt_with = self
            .links
            .leases
            .call(generation, "take lanes over", async |session| {
                let sql = include_str!("../sql/unread.sql");
                session.client.execute(sql, &[&self.route.name, &lanes, &epochs, &self.owner]).await?;
                session.client.query_one(include_str!("../sql/dealt_with.sql"), &[&self.route.name]).await
            })
            .await?;
        let dealt_with = row::get(&dealt_with, 0)?;
        let mut state = self.state();
        if state.generation == generation {
            state.dealt_with = dealt_with;
            state.any_parked = None;
        }
        Ok(())
    }

    async fn give_back(&self, generation: u64, lanes: &[Tenant]) -> Result<(), StoreError> {
        let (lanes, epochs): (Vec<i16>, Vec<i64>) = lanes.iter().map(|(lane, epoch)| (*lane as i16, *epoch)).unzip();
        self.links
            .leases
            .call(generation, "give lanes back", async |session| {
                let sql = include_str!("../sql/release.sql");
                session.client.execute(sql, &[&self.route.name, &lanes, &epochs, &self.owner]).await
            })
            .await
            .map(drop)
    }

    /// What we know of our lanes, as long as the server is the one that told us.
    fn state(&self) -> MutexGuard<'_, Lanes> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.belong_to(self.links.server.generation());
        state
    }

    async fn claim_all(&self, want: Want) -> Result<Claimed, StoreError> {
        let mut claimed = Claimed::default();
        if want.parked {
            claimed.deliveries = self.look_for_parked(want).await?;
            claimed.more = claimed.deliveries.len() >= want.messages;
        }
        let enough = want.single && !claimed.deliveries.is_empty();
        match if enough { Ok((Vec::new(), true)) } else { self.claim_fresh(want).await } {
            Ok((fresh, more)) => {
                claimed.deliveries.extend(fresh);
                claimed.more |= more;
            }
            // What was claimed before the error is handed out all the same: it is in our books.
            Err(error) if claimed.deliveries.is_empty() => return Err(error),
            Err(error) => tracing::warn!(%error, "fresh messages could not be claimed"),
        }
        let mut state = self.state();
        // A lane may have been lost since its rows were taken in.
        claimed.deliveries.retain(|delivery| state.book.out(delivery.token).is_some());
        claimed.lost_lanes = state.book.take_lost();
        // Rows of other routes are passed without any settling.
        claimed.unwritten = state.book.has_unwritten();
        drop(state);
        Ok(claimed)
    }

    /// Takes the note off the message that travelled alone, if it is settled or, with none, in any case: a relay that dies now did
    /// not die over it. What is through is forgotten.
    /// Takes back the deaths that were counted when lanes were taken from this relay, which lives.
    async fn outlive(&self, generation: u64) {
        let outlived = self.state().book.outlived();
        if outlived.is_empty() {
            return;
        }
        let (lanes, epochs): (Vec<i16>, Vec<i64>) = outlived.iter().map(|(lane, epoch)| (*lane as i16, *epoch)).unzip();
        let told = self
            .links
            .leases
            .call_within(self.route.lease / 2, generation, "say that this relay lives", async |session| {
                let sql = include_str!("../sql/outlived.sql");
                session.client.execute(sql, &[&self.route.name, &lanes, &epochs]).await
            })
            .await;
        match told {
            Ok(_) => self.state().book.forgiven(&outlived),
            Err(error) => tracing::debug!(%error, "that this relay lives is said with the next renewal"),
        }
    }

    async fn unmark(&self, link: &Link, settlements: Option<&[Settlement]>) -> Result<(), StoreError> {
        let of = |marked: &Marked| {
            let settlement = settlements?.iter().find(|settlement| settlement.token == marked.token)?;
            Some(matches!(settlement.outcome, Outcome::Done | Outcome::Dead { .. }))
        };
        let marked = self.marked.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(marked) = marked else { return Ok(()) };
        let through = match (settlements, of(&marked)) {
            (None, _) => false,
            (Some(_), None) => return Ok(()),
            (Some(_), Some(through)) => through,
        };
        let Marked { token, lane, epoch, seq } = marked;
        let generation = self.state().generation;
        link.call(generation, "clear the note about a message", async |session| {
            let (route, owner) = (&self.route.name, &self.owner);
            let sql = include_str!("../sql/unmark.sql");
            session.client.execute(sql, &[route, &lane, &epoch, owner, &seq, &through]).await
        })
        .await?;
        if settlements.is_some() {
            let mut marked = self.marked.lock().unwrap_or_else(PoisonError::into_inner);
            marked.take_if(|marked| marked.token == token);
        }
        Ok(())
    }

    async fn claim_fresh(&self, want: Want) -> Result<(Vec<Delivery>, bool), StoreError> {
        let now = self.now();
        let (asked, checkpoint, generation, dealt_with, any_parked) = {
            let mut state = self.state();
            // Alone, the oldest of all lanes is next: what killed the relay before is among the first.
            let messages = if want.single { usize::MAX / 2 } else { want.messages };
            let lane_max = if want.single { 1 } else { want.lane_messages_max };
            state.book.wants(want.messages);
            let asked = state.book.ask(now, messages, lane_max);
            let checkpoint = state.wants_checkpoint(now, &asked);
            if checkpoint {
                (state.floor_is_stale, state.checkpoint_at) = (false, Some(now));
            }
            (asked, checkpoint, state.generation, state.dealt_with, state.any_parked.unwrap_or(true))
        };
        if asked.is_empty() {
            return Ok((Vec::new(), false));
        }
        let lanes: Vec<i16> = asked.iter().map(|ask| ask.lane as i16).collect();
        let seqs: Vec<i64> = asked.iter().map(|ask| ask.position.seq).collect();
        let floors: Vec<i64> = asked.iter().map(|ask| ask.position.floor).collect();
        let snapshots: Vec<&str> = asked.iter().map(|ask| ask.position.snapshot.as_ref()).collect();
        let catch_ups: Vec<Option<CatchUp>> = asked.iter().map(|ask| ask.position.catch_up.clone()).collect();
        let catch_up_snapshots: Vec<Option<&str>> =
            catch_ups.iter().map(|catch_up| catch_up.as_ref().map(|c| c.snapshot.as_ref())).collect();
        let catch_up_seqs: Vec<Option<i64>> =
            catch_ups.iter().map(|catch_up| catch_up.as_ref().map(|c| c.seq)).collect();
        let limits: Vec<i64> = asked.iter().map(|ask| ask.limit as i64).collect();
        let bounds = astray_bounds(asked.iter().map(|ask| &ask.position));
        let (oldest, highest) = (bounds.map(|(xmax, _)| xmax.to_string()), bounds.map(|(_, floor)| floor));
        let bytes = i64::try_from(want.bytes).unwrap_or(i64::MAX);

        let result = self
            .links
            .claims
            .call(generation, "claim messages", async |session| {
                let mark = session.prepared("select floor_seq, xid::text from postroom.checkpoint()").await?;
                let read = session.prepared(include_str!("../sql/claim.sql")).await?;
                // Sent together, done in this order: the checkpoint has committed when the read takes its snapshot.
                let mark =
                    async { if checkpoint { session.client.query_one(&mark, &[]).await.map(Some) } else { Ok(None) } };
                let parameters: [&(dyn ToSql + Sync); 13] = [
                    &lanes,
                    &seqs,
                    &floors,
                    &snapshots,
                    &catch_up_snapshots,
                    &catch_up_seqs,
                    &limits,
                    &self.route.name,
                    &bytes,
                    &oldest,
                    &highest,
                    &dealt_with,
                    &any_parked,
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
        crash_point("claim.read");
        let mut asked = asked;
        let mut read = Read::of(&rows)?;
        read.astray |= asked.iter().any(|ask| ask.position.seq > read.drawn) && bounds.is_some();
        if read.astray || read.unregistered {
            // Nothing of it is taken in, so no position passes it.
            self.astray.fetch_or(read.astray, Ordering::Relaxed);
            let what = if read.astray {
                "the outbox was restored, or its sequence went back"
            } else {
                "the route was deleted"
            };
            let source = format!("{what}; this is corrected at the next renewal").into();
            return Err(StoreError::Busy { what: "claim messages", source });
        }
        let places = if want.single { 1 } else { want.messages };
        let left_out = if places < asked.len() { read.keep_first(places, &mut asked) } else { Vec::new() };
        let mark = mark.as_ref().map(row::checkpoint).transpose()?;
        let mut state = self.state();
        if state.generation != generation {
            return Ok((Vec::new(), false));
        }
        if let Some((seq, xid)) = mark {
            state.floors.checkpoint(seq, xid);
        }
        state.book.have_more(&left_out);
        let (deliveries, more) = state.take_in(asked, read);
        Ok((deliveries, more || !left_out.is_empty()))
    }

    /// Claims parked messages if there are any, and if it is time to look.
    async fn look_for_parked(&self, want: Want) -> Result<Vec<Delivery>, StoreError> {
        let began = self.now();
        let (generation, parks) = {
            let state = self.state();
            if !state.may_look(began) {
                return Ok(Vec::new());
            }
            (state.generation, state.parks)
        };
        let row = self
            .links
            .claims
            .call(generation, "look for parked messages", async |session| {
                let statement = session.prepared(include_str!("../sql/any_parked.sql")).await?;
                session.client.query_one(&statement, &[&self.route.name]).await
            })
            .await?;
        let any_parked = row::get(&row, 0)?;
        {
            let mut state = self.state();
            if state.generation == generation {
                state.looked(any_parked, parks);
            }
        }
        let found = if any_parked { self.claim_parked(want).await? } else { Vec::new() };
        let now = self.now();
        self.state().look_took(now, now - began, !found.is_empty());
        Ok(found)
    }

    async fn claim_parked(&self, want: Want) -> Result<Vec<Delivery>, StoreError> {
        let now = self.now();
        let (lanes, in_hand, generation) = {
            let state = self.state();
            let lanes: Vec<i16> = state.book.claimable(now).into_iter().map(|lane| lane as i16).collect();
            let in_hand: Vec<i64> = state.book.parked_in_hand().map(|(_, seq)| seq).collect();
            (lanes, in_hand, state.generation)
        };
        if lanes.is_empty() {
            return Ok(Vec::new());
        }
        let heads = want.messages as i64;
        let bytes = i64::try_from(want.bytes).unwrap_or(i64::MAX);
        let rows = self
            .links
            .claims
            .call(generation, "claim parked messages", async |session| {
                let statement = session.prepared(include_str!("../sql/claim_parked.sql")).await?;
                let followers = FOLLOWERS_MAX.min(heads);
                let route = &self.route.name;
                let client = &session.client;
                // Sent together, done in this order.
                let parameters: [&(dyn ToSql + Sync); 6] = [route, &lanes, &in_hand, &heads, &followers, &bytes];
                let begin = client.batch_execute(include_str!("../sql/one_index.sql"));
                let rows = client.query(&statement, &parameters);
                let end = client.batch_execute("commit");
                let ((), rows, ()) = tokio::try_join!(biased; begin, rows, end)?;
                Ok(rows)
            })
            .await?;
        crash_point("claim.parked");
        let found: Vec<ParkedRow> = rows.iter().map(ParkedRow::of).collect::<Result<_, _>>()?;
        let mut state = self.state();
        if state.generation != generation {
            return Ok(Vec::new());
        }
        Ok(state.take_in_parked(found))
    }

    /// Writes the positions reached so far. A lane that is not ours any more is dropped.
    async fn write_positions(&self) -> Result<(), StoreError> {
        let _turn = self.position_turn.lock().await;
        let now = self.now();
        let (moves, generation) = {
            let mut state = self.state();
            (state.book.begin_write(now), state.generation)
        };
        if moves.is_empty() {
            return Ok(());
        }
        let key = (generation, self.route.name.as_str(), self.owner.as_str());
        crash_point("positions.before");
        match record::positions(&self.links.writes, key, &moves).await {
            Ok(written) => {
                crash_point("positions.after");
                let now = self.now();
                self.state().book.end_write(now, moves, Some(&written));
                Ok(())
            }
            Err(error) => {
                let now = self.now();
                self.state().book.end_write(now, moves, None);
                Err(error)
            }
        }
    }
}

#[async_trait]
impl Source for LogSource {
    async fn renew(&self, report: &Report) -> Result<Standing, StoreError> {
        self.be_registered().await?;
        let seen = self.look_around().await?;
        let (held, generation) = {
            let state = self.state();
            (state.book.held(), state.generation)
        };
        let (lanes, epochs): (Vec<i16>, Vec<i64>) = held.iter().map(|(lane, epoch)| (*lane as i16, *epoch)).unzip();
        let lease_ms = self.route.lease.as_millis() as i64;
        let deadline = self.now() + self.route.lease;
        let rows = self
            .links
            .leases
            .call_within(self.route.lease / 2, generation, "renew the lease", async |session| {
                let statement = session.prepared(include_str!("../sql/renew.sql")).await?;
                let (route, owner) = (&self.route.name, &self.owner);
                let Report { sink, sink_down, sink_blocked, survived } = report;
                let trouble = sink_down.as_ref().or(sink_blocked.as_ref());
                let blocked = sink_down.is_none() && sink_blocked.is_some();
                let parameters: [&(dyn ToSql + Sync); 10] =
                    [route, owner, &lanes, &epochs, &lease_ms, &trouble, survived, &seen.silent, sink, &blocked];
                session.client.query(&statement, &parameters).await
            })
            .await?;
        crash_point("renew.after");
        let (share, granted) = row::granted(&rows)?;
        if report.sink_blocked.is_some()
            && let Err(error) = self.unmark(&self.links.leases, None).await
        {
            tracing::debug!(%error, "the note about a message stays until the next renewal");
        }
        // Until this has worked the lanes are not ours as far as we know; they are taken again with the next renewal.
        self.unread(generation, &granted).await?;
        {
            let mut state = self.state();
            if state.generation == generation {
                state.book.renewed(&held, granted, deadline);
            }
        }
        self.outlive(generation).await;
        let leaving = self.state().book.keep_to(share);
        if !leaving.is_empty() {
            self.give_back(generation, &leaving).await?;
            crash_point("give_back.after");
            self.state().book.gave_back(&leaving);
        }
        let mut state = self.state();
        let (held, settled_ahead, deaths) = (state.book.held().len(), state.book.settled_ahead(), state.book.deaths());
        let (order, on_dead) = (seen.order, seen.on_dead);
        state.ordered = order.unwrap_or(self.route.order) != Order::None;
        if seen.statistics_stale {
            self.links.refresh_statistics();
        }
        Ok(Standing { held, lost_lanes: state.book.take_lost(), settled_ahead, deaths, order, on_dead })
    }

    async fn claim(&self, want: Want) -> Result<Claimed, StoreError> {
        self.state().book.begin_claim();
        let claimed = self.claim_all(want).await;
        self.state().book.end_claim();
        claimed
    }

    async fn note(&self, token: Token, proven: bool) -> Result<Noted, StoreError> {
        let (out, generation) = {
            let state = self.state();
            (state.book.out(token).map(|out| (out.lane as i16, out.epoch, out.seq)), state.generation)
        };
        // Its lane was lost: it is another relay's to note.
        let Some((lane, epoch, seq)) = out else { return Ok(Noted { proven, ..Noted::default() }) };
        *self.marked.lock().unwrap_or_else(PoisonError::into_inner) = Some(Marked { token, lane, epoch, seq });
        let row = self
            .links
            .writes
            .call(generation, "note the message that is published alone", async |session| {
                let sql = include_str!("../sql/mark_alone.sql");
                let (route, owner) = (&self.route.name, &self.owner);
                session.client.query_opt(sql, &[route, &lane, &epoch, owner, &seq, &proven]).await
            })
            .await?;
        let Some(row) = row else { return Ok(Noted { proven, ..Noted::default() }) };
        let count = |column| row::get::<i32>(&row, column).map(|count| count.max(0) as u32);
        Ok(Noted { deaths: count(0)?, doubts: count(1)?, proven })
    }

    async fn clear_note(&self) -> Result<(), StoreError> {
        self.unmark(&self.links.writes, None).await
    }

    async fn settle(&self, settlements: &[Settlement]) -> Result<Settled, StoreError> {
        crash_point("settle.begin");
        let mut settled = Settled::default();
        let (record, generation, ordered) = {
            let state = self.state();
            let record = Record::of(state.book.entries(settlements, state.ordered));
            (record, state.generation, state.ordered)
        };
        if !record.is_empty() {
            let key = (generation, self.route.name.as_str(), self.owner.as_str());
            let held = record.write(&self.links.writes, key, ordered).await?;
            let mut state = self.state();
            for (number, epoch) in record.lanes() {
                if !held.contains(&number) {
                    state.book.lose(number, epoch);
                }
            }
            state.parked();
            settled.more_parked = record.frees_parked();
        }
        // Before the book says that it is settled: the relay goes on with others then.
        self.unmark(&self.links.writes, Some(settlements)).await?;
        {
            let mut state = self.state();
            for settlement in settlements {
                // Not in our books: its lane was lost, before this or just now.
                settled.fenced += usize::from(!state.book.settle(settlement.token));
            }
        }
        let now = self.now();
        let due = self.state().book.due(now, self.positions_every);
        if due && let Err(error) = self.write_positions().await {
            // Everything durable is recorded; the positions are kept and written with the next settling.
            tracing::warn!(%error, "positions could not be saved; they will be saved when messages are settled next");
        }
        let mut state = self.state();
        settled.unwritten = state.book.has_unwritten();
        settled.settled_ahead = state.book.settled_ahead();
        settled.lost_lanes = state.book.take_lost();
        drop(state);
        Ok(settled)
    }

    async fn release(&self) -> Result<(), StoreError> {
        if self.registered.get().is_none() {
            // It never held anything.
            return Ok(());
        }
        crash_point("release.before");
        // Lanes are given back even when the newest positions could not be written: that repeats, and loses nothing.
        let written = self.write_positions().await;
        let (held, generation) = {
            let state = self.state();
            (state.book.held(), state.generation)
        };
        let given = self.give_back(generation, &held).await;
        let gone = self
            .links
            .leases
            .call(generation, "take the relay off the list", async |session| {
                let sql = "delete from postroom.relays where route = $1 and owner = $2";
                session.client.execute(sql, &[&self.route.name, &self.owner]).await
            })
            .await;
        given?;
        gone?;
        self.state().book.forget();
        written
    }

    fn lease(&self) -> Duration {
        self.route.lease
    }
}
