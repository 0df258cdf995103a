//! The log source: rows of the outbox are appended and never updated, progress is a position a lane, written once a batch.
//!
//! `sql/claim.sql` says how rows are found, `position.rs` how positions move, `record.rs` what is written.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use postroom::{
    Claimed, Delivery, OnDead, Order, Report, Settled, Settlement, Source, Standing, StoreError, Token, TopicFilter,
    Want, crash_point,
};
use tokio_postgres::types::ToSql;

use crate::connect::{Connector, behind_a_pooler};
use crate::lanes::Lanes;
use crate::link::{Link, Server};
use crate::migrate::schema_version;
use crate::position::{CatchUp, astray_bounds};
use crate::record::{self, Record};
use crate::row::{self, Granted, ParkedRow, Read};
use crate::seeded::unless;
use crate::watch::{Seen, Watch};

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
    /// Order within a key; the relay has to be told the same.
    pub order: Order,
    /// What becomes of a key whose message is dead; the relay has to be told the same.
    pub on_dead: OnDead,
    /// Positions are written at most so often, unless many messages wait for it; [`POSITIONS_EVERY`] is a good choice.
    pub positions_every: Duration,
}

/// Each write of positions leaves a dead row version a lane, which a snapshot held open somewhere keeps alive, and which every
/// later write has to pass. So they are written 20 times a second and not hundreds of times.
pub const POSITIONS_EVERY: Duration = Duration::from_millis(50);

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
    connector: Arc<Connector>,
    /// Reads; writes nothing that may not be lost.
    claims: Link,
    /// Positions: durable like everything else, so that a crash of the server repeats no more than a crash of the relay.
    positions: Link,
    /// Parked messages and dead letters: durable before a position passes them.
    durable: Link,
    /// Lease renewals never wait behind anything else.
    leases: Link,
    server: Arc<Server>,
    state: Mutex<Lanes>,
    watch: Mutex<Watch>,
    /// A read found rows that no read would look for again.
    astray: AtomicBool,
    /// The delivery that travels alone now, with its lane and seq.
    marked: Mutex<Option<(Token, i16, i64)>>,
    /// One write of positions at a time: an older one must not come after a newer.
    position_turn: tokio::sync::Mutex<()>,
}

impl LogSource {
    /// Registers the route and prepares to claim. Refuses a database without our schema, and one whose outbox sequence
    /// caches values: cached seqs would appear behind a position that has passed them.
    pub async fn open(connector: Connector, options: LogSourceOptions) -> Result<Self, StoreError> {
        let connector = Arc::new(connector);
        let server = Arc::new(Server::default());
        let link = |settings| Link::new(connector.clone(), server.clone(), settings);
        let source = Self {
            claims: link("-c synchronous_commit=off"),
            positions: link(""),
            durable: link(""),
            // A renewal that takes this long is of no use any more.
            leases: link("").call_timeout(options.lease / 2),
            connector,
            server,
            state: Mutex::new(Lanes::default()),
            watch: Mutex::new(Watch::new(options.lease)),
            astray: AtomicBool::new(false),
            marked: Mutex::new(None),
            position_turn: tokio::sync::Mutex::new(()),
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
        let generation = self.server.generation();
        let (version, missing, cache) = self
            .durable
            .call(generation, "look at the schema", async |session| {
                let sql = "select (select max(number) from postroom.migrations), postroom.missing_indexes(), s.seqcache
                             from pg_sequence s where s.seqrelid = 'postroom.outbox_seq_seq'::regclass";
                let row = session.client.query_one(sql, &[]).await?;
                Ok((row.get::<_, Option<i32>>(0), row.get::<_, Vec<String>>(1), row.get::<_, i64>(2)))
            })
            .await?;
        let version = version.unwrap_or_default();
        if version < schema_version() {
            return Err(StoreError::Schema {
                problem: format!("it is at version {version}, and this program needs version {}", schema_version()),
                hint: "run `postroom migrate` on this database",
            });
        }
        if !missing.is_empty() {
            return Err(StoreError::Schema {
                problem: format!("it is not whole: missing {}", missing.join(", ")),
                hint: "finish the restore that made it, or run `postroom migrate` on an empty database",
            });
        }
        if cache != 1 {
            return Err(StoreError::Schema {
                problem: format!("postroom.outbox_seq_seq caches {cache} values a session, which would lose messages"),
                hint: "run `alter sequence postroom.outbox_seq_seq cache 1` and reconnect the writers",
            });
        }
        self.mend_if(generation, "postroom.positions_are_foreign()").await?;
        self.register_route(self.server.generation()).await
    }

    async fn register_route(&self, generation: u64) -> Result<(), StoreError> {
        let LogSourceOptions { route, topics, owner, order, on_dead, .. } = &self.options;
        let given = topics.patterns();
        let from_now = self.options.start_at == StartAt::Now;
        let now = self
            .durable
            .call(generation, "register the route", async |session| {
                // The checkpoint commits first, so that its id is older than the snapshot that the lanes start from.
                let floor: i64 =
                    session.client.query_one("select floor_seq from postroom.checkpoint()", &[]).await?.get(0);
                let sql =
                    "select topics_now, ordering_now, on_dead_now from postroom.register_route($1, $2, $3, $4, $5)";
                let parameters: [&(dyn ToSql + Sync); 5] = [route, &given, &order.as_str(), &on_dead.as_str(), owner];
                let row = session.client.query_one(sql, &parameters).await?;
                if cfg!(seeded_bug = "the_last_one_started_decides_topics") {
                    let sql = "update postroom.routes set topics = $2 where name = $1";
                    session.client.execute(sql, &[route, &given]).await?;
                }
                let now: (Vec<String>, String, String) = (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
                if from_now {
                    let sql = include_str!("sql/register_lanes_now.sql");
                    session.client.execute(sql, &[route, &floor]).await?;
                } else {
                    session.client.execute(include_str!("sql/register_lanes_oldest.sql"), &[route]).await?;
                }
                Ok(now)
            })
            .await?;
        let (topics_now, order_now, on_dead_now) = now;
        let more: Vec<&String> =
            topics_now.iter().filter(|topic| !given.contains(topic) && !given.iter().any(|own| own == "*")).collect();
        if !more.is_empty() || order_now != order.as_str() || on_dead_now != on_dead.as_str() {
            let topics = topics_now.join(", ");
            tracing::warn!(
                %route, %topics, order = %order_now, on_dead = %on_dead_now,
                "the route has other settings than this relay's configuration, and they are what counts: a relay that starts \
                 only adds topics and makes order and on_dead stricter. `postroom routes set` changes them"
            );
        }
        Ok(())
    }

    /// Puts back what the relays before had queued up in lanes that were taken just now.
    async fn unread(&self, generation: u64, granted: &[Granted]) -> Result<(), StoreError> {
        let taken = granted.iter().filter(|granted| !granted.kept);
        let (lanes, epochs): (Vec<i16>, Vec<i64>) = taken.map(|granted| (granted.lane as i16, granted.epoch)).unzip();
        if lanes.is_empty() || cfg!(seeded_bug = "what_was_queued_up_stays_parked") {
            return Ok(());
        }
        self.leases
            .call(generation, "take lanes over", async |session| {
                let sql = include_str!("sql/unread.sql");
                session.client.execute(sql, &[&self.options.route, &lanes, &epochs, &self.options.owner]).await
            })
            .await
            .map(drop)
    }

    async fn give_back(&self, generation: u64, lanes: &[(u16, i64)]) -> Result<(), StoreError> {
        let (lanes, epochs): (Vec<i16>, Vec<i64>) = lanes.iter().map(|(lane, epoch)| (*lane as i16, *epoch)).unzip();
        self.leases
            .call(generation, "give lanes back", async |session| {
                let sql = include_str!("sql/release.sql");
                session.client.execute(sql, &[&self.options.route, &lanes, &epochs, &self.options.owner]).await
            })
            .await
            .map(drop)
    }

    /// Runs postroom.mend() if `condition` holds. What it changes makes everything worthless that was learnt before.
    async fn mend_if(&self, generation: u64, condition: &'static str) -> Result<(), StoreError> {
        // It may rewrite a large outbox: on a link of its own, without our usual deadlines.
        let link = Link::new(self.connector.clone(), self.server.clone(), "").call_timeout(Duration::MAX);
        let mended = link
            .call(generation, "put the positions right after the database was changed", async |session| {
                let tx = session.client.transaction().await?;
                let needed = tx.query_one(&format!("select {condition}"), &[]).await?.try_get::<_, Option<bool>>(0)?;
                if needed == Some(false) {
                    return Ok("nothing".to_owned());
                }
                tx.batch_execute("set local statement_timeout = 0; set local lock_timeout = 0").await?;
                let mended = tx.query_one("select postroom.mend()", &[]).await?.try_get::<_, String>(0)?;
                tx.commit().await?;
                Ok(mended)
            })
            .await?;
        let what = match mended.as_str() {
            "rebased" => "the database or its outbox was restored or replaced: positions were re-based",
            "sequence" => {
                "the sequence of the outbox had gone back: it was set forward, and what hid below got new places"
            }
            _ => return Ok(()),
        };
        tracing::warn!(route = %self.options.route, "{what}; nothing was passed over, some messages may be sent again");
        self.server.forget();
        Ok(())
    }

    /// Looks whether the tables are still those that we know, and puts right what is not; learns what the route is now and
    /// which other relays are silent. Before anything is renewed or taken.
    async fn look_around(&self) -> Result<Seen, StoreError> {
        let generation = self.server.generation();
        let astray = self.astray.load(Ordering::Relaxed);
        let (route, owner) = (&self.options.route, &self.options.owner);
        let (row, backend) = self
            .leases
            .call(generation, "look at the route", async |session| {
                let statement = session.prepared(include_str!("sql/watch.sql")).await?;
                Ok((session.client.query_opt(&statement, &[route, owner]).await?, session.backend))
            })
            .await?;
        let seen = row.as_ref().map(Seen::of).transpose()?;
        if seen.as_ref().is_some_and(|seen| seen.backend != backend) {
            return Err(behind_a_pooler());
        }
        match seen {
            Some(mut seen) if seen.at_home && !seen.sequence_behind && !astray => {
                if !seen.registered {
                    tracing::warn!(%route, "the route was deleted from the database; it is registered again");
                    self.register_route(generation).await?;
                }
                let news = self.watch.lock().unwrap_or_else(PoisonError::into_inner).look(&seen);
                if news.another_incarnation {
                    // Another relay has put the positions right.
                    self.server.forget();
                }
                if news.clock_went_back {
                    self.reset_waits(self.server.generation()).await?;
                }
                seen.silent = news.silent;
                Ok(seen)
            }
            _ => {
                // The settings may be missing while a restore is under way; mend() says so.
                self.mend_if(generation, "true").await?;
                self.astray.store(false, Ordering::Relaxed);
                Err(StoreError::Busy { what: "renew the lease", source: "positions had to be put right first".into() })
            }
        }
    }

    async fn reset_waits(&self, generation: u64) -> Result<(), StoreError> {
        let waits = self
            .leases
            .call(generation, "shorten waits after the clock went back", async |session| {
                session.client.execute(include_str!("sql/reset_waits.sql"), &[&self.options.route]).await
            })
            .await?;
        if waits > 0 {
            tracing::warn!(route = %self.options.route, waits, "the database's clock went back; waits were shortened by as much");
        }
        Ok(())
    }

    /// What we know of our lanes, as long as the server is the one that told us.
    fn state(&self) -> MutexGuard<'_, Lanes> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.belong_to(self.server.generation());
        state
    }

    async fn claim_all(&self, want: Want) -> Result<Claimed, StoreError> {
        let mut claimed = Claimed::default();
        let looks = want.parked && !self.state().none_parked;
        if looks {
            claimed.deliveries = self.claim_parked(want).await?;
            claimed.more = claimed.deliveries.len() >= want.messages;
        }
        let enough = want.alone && !claimed.deliveries.is_empty();
        match if enough { Ok((Vec::new(), true)) } else { self.claim_fresh(want).await } {
            Ok((fresh, more)) => {
                claimed.deliveries.extend(fresh);
                claimed.more |= more;
            }
            // What was claimed before the error is handed out all the same: it is in our books.
            Err(error) if claimed.deliveries.is_empty() => return Err(error),
            Err(error) => tracing::warn!(%error, "fresh messages could not be claimed"),
        }
        if want.alone
            && let Some(delivery) = claimed.deliveries.first_mut()
        {
            delivery.deaths = self.mark_alone(delivery).await;
        }
        let mut state = self.state();
        // A lane may have been lost since its rows were taken in.
        claimed.deliveries.retain(|delivery| state.out_of(delivery.token).is_some());
        claimed.lost_lanes = state.take_lost();
        // There were none before this read, and now there are some.
        claimed.more |= want.parked && !looks && !state.none_parked;
        // Rows of other routes are passed without any settling.
        claimed.unwritten = state.has_unwritten();
        drop(state);
        Ok(claimed)
    }

    /// Notes the one delivery that will be in flight; how many relays died over it before.
    async fn mark_alone(&self, delivery: &Delivery) -> u32 {
        let (out, generation) = {
            let state = self.state();
            (state.out_of(delivery.token).map(|out| (out.lane as i16, out.epoch, out.seq)), state.generation)
        };
        let Some((lane, epoch, seq)) = out else { return 0 };
        let marked = self
            .durable
            .call(generation, "note the message that travels alone", async |session| {
                let sql = include_str!("sql/mark_alone.sql");
                session.client.query_opt(sql, &[&self.options.route, &lane, &epoch, &self.options.owner, &seq]).await
            })
            .await;
        *self.marked.lock().unwrap_or_else(PoisonError::into_inner) = Some((delivery.token, lane, seq));
        match marked {
            Ok(row) => row.map_or(0, |row| row.get::<_, i32>(0).max(0) as u32),
            Err(error) => {
                // It goes out all the same; only its culprit would be found later.
                tracing::warn!(%error, "a message that travels alone could not be noted");
                0
            }
        }
    }

    /// What travelled alone is settled: a relay that dies now did not die over it.
    async fn unmark(&self, settlements: &[Settlement]) {
        let marked = {
            let mut marked = self.marked.lock().unwrap_or_else(PoisonError::into_inner);
            let settled = |(token, ..): &(Token, i16, i64)| settlements.iter().any(|one| one.token == *token);
            marked.take_if(|marked| settled(marked))
        };
        let Some((_, lane, seq)) = marked else { return };
        let generation = self.state().generation;
        let unmarked = self
            .durable
            .call(generation, "note that a message is through", async |session| {
                let sql = "update postroom.suspects set alone = false where route = $1 and lane = $2 and seq = $3";
                session.client.execute(sql, &[&self.options.route, &lane, &seq]).await
            })
            .await;
        if let Err(error) = unmarked {
            tracing::debug!(%error, "the mark of a message stays until the next one is marked");
        }
    }

    async fn claim_fresh(&self, want: Want) -> Result<(Vec<Delivery>, bool), StoreError> {
        let (asked, checkpoint, generation) = {
            let mut state = self.state();
            let messages = if want.alone { usize::MAX / 2 } else { want.messages };
            let unbounded = cfg!(seeded_bug = "one_lane_takes_every_place");
            let lane_max = if want.alone { 1 } else { want.lane_messages_max };
            let lane_max = if unbounded { usize::MAX } else { lane_max };
            state.wanted(want.messages);
            (state.ask(messages, lane_max), std::mem::take(&mut state.floor_is_stale), state.generation)
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
        let bounds = bounds.filter(|_| !cfg!(seeded_bug = "rows_astray_are_not_looked_for"));
        let (oldest, highest) = (bounds.map(|(xmax, _)| xmax.to_string()), bounds.map(|(_, floor)| floor));
        let bytes = i64::try_from(want.bytes).unwrap_or(i64::MAX);

        let result = self
            .claims
            .call(generation, "claim messages", async |session| {
                let mark = session.prepared("select floor_seq, xid::text from postroom.checkpoint()").await?;
                let sql = include_str!("sql/claim.sql");
                let barrier = "f.seq > h.seq and f.xid < pg_snapshot_xmin(pg_current_snapshot())";
                let sql = unless(cfg!(seeded_bug = "xmin_barrier"), sql, "f.seq > h.seq", barrier);
                let twice = cfg!(seeded_bug = "reads_again_what_was_parked");
                let sql = unless(twice, sql, "p.route = $8 and p.seq = f.seq and p.id = f.id", "false");
                let read = session.prepared(sql).await?;
                // Sent together, done in this order: the checkpoint has committed when the read takes its snapshot.
                let mark =
                    async { if checkpoint { session.client.query_one(&mark, &[]).await.map(Some) } else { Ok(None) } };
                let parameters: [&(dyn ToSql + Sync); 11] = [
                    &lanes,
                    &seqs,
                    &floors,
                    &snapshots,
                    &catch_up_snapshots,
                    &catch_up_seqs,
                    &limits,
                    &self.options.route,
                    &bytes,
                    &oldest,
                    &highest,
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
        if read.astray || read.unregistered {
            // Nothing of it is taken in, so no position passes it.
            self.astray.fetch_or(read.astray, Ordering::Relaxed);
            let what = if read.astray { "the sequence of the outbox went back" } else { "the route was deleted" };
            let source = format!("{what}; it is put right at the next renewal").into();
            return Err(StoreError::Busy { what: "claim messages", source });
        }
        if want.alone {
            read.keep_first(&mut asked);
        }
        let mark = mark.as_ref().map(row::checkpoint).transpose()?;
        let mut state = self.state();
        if state.generation != generation {
            return Ok((Vec::new(), false));
        }
        if let Some((seq, xid)) = mark {
            state.floors.checkpoint(seq, xid);
        }
        Ok(state.take_in(asked, read))
    }

    async fn claim_parked(&self, want: Want) -> Result<Vec<Delivery>, StoreError> {
        let (lanes, in_hand, generation) = {
            let state = self.state();
            (state.claimable(), state.parked_in_hand(), state.generation)
        };
        if lanes.is_empty() {
            return Ok(Vec::new());
        }
        let heads = want.messages as i64;
        let bytes = i64::try_from(want.bytes).unwrap_or(i64::MAX);
        let rows = self
            .claims
            .call(generation, "claim parked messages", async |session| {
                let sql = include_str!("sql/claim_parked.sql");
                let early = cfg!(seeded_bug = "parked_ones_go_before_they_are_due");
                let sql = unless(early, sql, "p.due_at <= clock_timestamp()", "p.due_at is not null");
                let overtakes = cfg!(seeded_bug = "follower_overtakes_a_second_head");
                let sql = unless(overtakes, sql, "n.state = 'retry'", "false");
                let statement = session.prepared(sql).await?;
                let followers = FOLLOWERS_MAX.min(heads);
                let route = &self.options.route;
                session.client.query(&statement, &[route, &lanes, &in_hand, &heads, &followers, &bytes]).await
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
        let began = Instant::now();
        let (moves, generation) = {
            let mut state = self.state();
            (state.begin_write(), state.generation)
        };
        if moves.is_empty() {
            return Ok(());
        }
        let key = (generation, self.options.route.as_str(), self.options.owner.as_str());
        crash_point("positions.before");
        match record::positions(&self.positions, key, &moves).await {
            Ok(written) => {
                crash_point("positions.after");
                let mut state = self.state();
                for (number, epoch, _) in &moves {
                    if !written.contains(number) {
                        state.lose(*number, *epoch);
                    }
                }
                state.end_write(moves, true);
                state.wrote_in(began.elapsed());
                Ok(())
            }
            Err(error) => {
                self.state().end_write(moves, false);
                Err(error)
            }
        }
    }
}

#[async_trait]
impl Source for LogSource {
    async fn renew(&self, report: &Report) -> Result<Standing, StoreError> {
        let seen = self.look_around().await?;
        let (held, generation) = {
            let state = self.state();
            (state.epochs(), state.generation)
        };
        let (lanes, epochs): (Vec<i16>, Vec<i64>) = held.iter().map(|(lane, epoch)| (*lane as i16, *epoch)).unzip();
        let lease_ms = self.options.lease.as_millis() as i64;
        let deadline = Instant::now() + self.options.lease;
        let rows = self
            .leases
            .call(generation, "renew the lease", async |session| {
                let sql = include_str!("sql/renew.sql");
                let deathless = cfg!(seeded_bug = "deaths_are_not_counted");
                let sql = unless(deathless, sql, "s.deaths + 1", "s.deaths");
                let inlined = cfg!(seeded_bug = "renewal_loses_lanes_that_are_being_written");
                let sql = unless(inlined, sql, "mine as materialized", "mine as");
                let statement = session.prepared(sql).await?;
                let (route, owner) = (&self.options.route, &self.options.owner);
                let Report { sink_down, survived, .. } = report;
                let parameters: [&(dyn ToSql + Sync); 8] =
                    [route, owner, &lanes, &epochs, &lease_ms, sink_down, survived, &seen.silent];
                session.client.query(&statement, &parameters).await
            })
            .await?;
        crash_point("renew.after");
        let (share, granted) = Granted::all(&rows)?;
        // Until this has worked the lanes are not ours as far as we know; they are taken again with the next renewal.
        self.unread(generation, &granted).await?;
        {
            let mut state = self.state();
            if state.generation == generation {
                state.renewed(&held, granted, deadline);
            }
        }
        let leaving = self.state().keep_to(share);
        if !leaving.is_empty() {
            self.give_back(generation, &leaving).await?;
            crash_point("give_back.after");
            self.state().gave_back(&leaving);
        }
        let mut state = self.state();
        let (held, settled_ahead, deaths) = (state.held(), state.settled_ahead(), state.deaths());
        let (order, on_dead) = (seen.order, seen.on_dead);
        state.ordered = order.unwrap_or(self.options.order) != Order::None;
        Ok(Standing { held, lost_lanes: state.take_lost(), settled_ahead, deaths, order, on_dead })
    }

    async fn claim(&self, want: Want) -> Result<Claimed, StoreError> {
        self.state().begin_claim();
        let claimed = self.claim_all(want).await;
        self.state().end_claim();
        claimed
    }

    async fn settle(&self, settlements: &[Settlement]) -> Result<Settled, StoreError> {
        crash_point("settle.begin");
        let mut settled = Settled::default();
        let (record, generation, ordered) = {
            let state = self.state();
            let mut record = Record::default();
            for settlement in settlements {
                if let Some(out) = state.out_of(settlement.token) {
                    // Without order a message waits for no other, but those that an operator gave back do.
                    let waits = state.ordered || out.read.is_none();
                    record.add(out, out.key.as_deref().filter(|_| waits), &settlement.outcome);
                }
            }
            (record, state.generation, state.ordered)
        };
        if !record.is_empty() {
            let key = (generation, self.options.route.as_str(), self.options.owner.as_str());
            let held = record.write(&self.durable, key, ordered).await?;
            let mut state = self.state();
            for (number, epoch) in record.lanes() {
                if !held.contains(&number) {
                    state.lose(number, epoch);
                }
            }
            state.none_parked = false;
            settled.more_parked = record.frees_parked();
        }
        {
            let mut state = self.state();
            for settlement in settlements {
                // Not in our books: its lane was lost, before this or just now.
                settled.fenced += usize::from(!state.settle(settlement.token));
            }
        }
        self.unmark(settlements).await;
        let due = self.state().positions_are_due(self.options.positions_every);
        if due && let Err(error) = self.write_positions().await {
            // Everything durable is recorded; the positions are kept and written with the next settling.
            tracing::warn!(%error, "positions could not be written; they are with the next settling");
        }
        let mut state = self.state();
        settled.unwritten = state.has_unwritten();
        settled.settled_ahead = state.settled_ahead();
        settled.lost_lanes = state.take_lost();
        drop(state);
        Ok(settled)
    }

    async fn release(&self) -> Result<(), StoreError> {
        crash_point("release.before");
        // Lanes are given back even when the newest positions could not be written: that repeats, and loses nothing.
        let written = self.write_positions().await;
        let (held, generation) = {
            let state = self.state();
            (state.epochs(), state.generation)
        };
        let given = self.give_back(generation, &held).await;
        let gone = self
            .leases
            .call(generation, "take the relay off the list", async |session| {
                let sql = "delete from postroom.relays where route = $1 and owner = $2";
                session.client.execute(sql, &[&self.options.route, &self.options.owner]).await
            })
            .await;
        given?;
        gone?;
        self.state().forget();
        written
    }

    fn lease(&self) -> Duration {
        self.options.lease
    }
}
