//! Claims messages of one route from SQL Server.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use postroom::lane_book::{Asked, Passed, Reached, Tenant};
use postroom::{
    Claimed, LaneBook, Order, Report, Route, RouteSettings, Settled, Settlement, Source, Standing, StoreError, Want,
};

use crate::conn::Conn;
use crate::connect::{Settings, is_duplicate, store_error};
use crate::link::Link;
use crate::log::claim::{self, LaneRead};
use crate::log::lanes::{self, Renewed, Watch};
use crate::log::places;
use crate::log::record::{self, Holder};
use crate::migrate::{self, schema_version};
use crate::routes;
use crate::sql::{distinct, named};

/// Each write of positions is a transaction that waits for the disk.
const POSITIONS_EVERY: Duration = Duration::from_millis(50);
/// Rows that get their places with one claim, at least: a small window must not make as many transactions.
const PLACED_LEAST: usize = 500;

/// Claims messages of one route. Claims and settlements wait for each other, on one connection; renewals have their own.
pub struct MssqlSource {
    route: Route,
    owner: String,
    positions_every: Duration,
    work: Link,
    leases: Link,
    opened: Instant,
    state: Mutex<State>,
    watch: tokio::sync::Mutex<Watch>,
    turn: tokio::sync::Mutex<()>,
    registered: tokio::sync::OnceCell<()>,
}

struct State {
    book: LaneBook<i64>,
    /// The positions in the database, as this relay found or wrote them last.
    stored: HashMap<u16, i64>,
    /// What the route is, as it was read last.
    settings: RouteSettings,
}

impl MssqlSource {
    /// Prepares to claim, for a relay of this name, which no other relay may have, and registers the route. A database that cannot be
    /// reached now is no error: the route is registered with the first renewal that reaches it.
    pub async fn open(settings: &Settings, route: &Route, owner: impl Into<String>) -> Result<Self, StoreError> {
        let state = State { book: LaneBook::default(), stored: HashMap::new(), settings: route.settings() };
        let source = Self {
            route: route.clone(),
            owner: owner.into(),
            positions_every: POSITIONS_EVERY,
            work: Link::new(settings.clone()),
            leases: Link::new(settings.clone()),
            opened: Instant::now(),
            state: Mutex::new(state),
            watch: tokio::sync::Mutex::default(),
            turn: tokio::sync::Mutex::default(),
            registered: tokio::sync::OnceCell::new(),
        };
        match source.be_registered().await {
            Err(error) if error.is_transient() => {
                tracing::warn!(route = route.name, %error, "the route is not registered yet, trying again");
            }
            registered => registered?,
        }
        Ok(source)
    }

    /// Positions are written at most so often, unless many messages wait for it; 50 ms unless told.
    pub fn positions_every(mut self, pause: Duration) -> Self {
        self.positions_every = pause;
        self
    }

    async fn be_registered(&self) -> Result<(), StoreError> {
        self.registered.get_or_try_init(|| self.register()).await.map(drop)
    }

    async fn register(&self) -> Result<(), StoreError> {
        let look = async |conn: &mut Conn| {
            let sql = "select (select max(number) from postroom_migrations), (select max(oldest_program) from postroom_settings)";
            conn.first::<(Option<i64>, Option<i64>)>(sql, named! {}).await
        };
        self.leases.call("look at the database", migrate::check).await?.map_or(Ok(()), Err)?;
        for (what, name) in [("route", &self.route.name), ("relay", &self.owner)] {
            distinct(what, name).map_err(|error| store_error("register the route", error))?;
        }
        let (version, oldest) = self.leases.call("look at the schema", look).await?.unwrap_or_default();
        let (version, known) = (version.unwrap_or_default(), schema_version());
        if version < known {
            return Err(StoreError::Schema {
                problem: format!("it is at version {version}, and this program needs version {known}"),
                hint: "run `postroom migrate` on this database",
            });
        }
        if let Some(oldest) = oldest.filter(|oldest| *oldest > known) {
            return Err(StoreError::Schema {
                problem: format!(
                    "it is at version {version} and works with programs that know version {oldest} or newer; this one knows {known}"
                ),
                hint: "use a newer postroom",
            });
        }
        let work = async |conn: &mut Conn| match lanes::register(conn, &self.route, &self.owner).await {
            // Another relay has registered it at this moment.
            Err(error) if is_duplicate(&error) => {
                conn.rollback().await?;
                lanes::register(conn, &self.route, &self.owner).await
            }
            done => done,
        };
        let settings = self.leases.call("register the route", work).await?;
        if settings != self.route.settings() {
            tracing::warn!(
                route = self.route.name, topics = %settings.topics, order = settings.order.map(|order| order.as_str()),
                on_dead = settings.on_dead.map(|on_dead| on_dead.as_str()),
                "the route's stored settings differ from this relay's configuration and take precedence: a relay that starts \
                 only adds topics and makes order and on_dead stricter"
            );
        }
        self.state().settings = settings;
        Ok(())
    }

    fn now(&self) -> Duration {
        self.opened.elapsed()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Who writes about these lanes.
    fn holder(&self, lanes: impl IntoIterator<Item = Tenant>) -> Holder<'_> {
        let state = self.state();
        let with_position = |(lane, epoch): Tenant| (lane, epoch, state.stored.get(&lane).copied().unwrap_or_default());
        let lanes: HashSet<Tenant> = lanes.into_iter().collect();
        let mut lanes: Vec<_> = lanes.into_iter().map(with_position).collect();
        lanes.sort_unstable();
        drop(state);
        Holder { route: &self.route.name, owner: &self.owner, lanes }
    }

    async fn claim_all(&self, want: Want) -> Result<Claimed, StoreError> {
        let mut claimed = Claimed::default();
        let now = self.now();
        let (lanes, in_hand) = {
            let mut state = self.state();
            state.book.wants(want.messages);
            let in_hand: HashSet<i64> = state.book.parked_in_hand().map(|(_, seq)| seq).collect();
            (state.book.claimable(now), in_hand)
        };
        if lanes.is_empty() {
            claimed.lost_lanes = self.state().book.take_lost();
            return Ok(claimed);
        }
        if want.parked {
            let limits = (if want.single { 1 } else { want.messages }, want.bytes);
            let work = async |conn: &mut Conn| claim::parked(conn, &self.route.name, &lanes, &in_hand, limits).await;
            let (found, more) = self.work.call("claim parked messages", work).await?;
            claimed.more = more;
            let mut state = self.state();
            let taken = found.into_iter().filter_map(|(lane, found)| state.book.took_in_parked(lane, found));
            claimed.deliveries = taken.collect();
        }
        if !want.single || claimed.deliveries.is_empty() {
            match self.claim_fresh(want, &lanes).await {
                Ok((fresh, more)) => {
                    claimed.deliveries.extend(fresh);
                    claimed.more |= more;
                }
                // What was claimed before the error is handed out all the same: it is in our books.
                Err(error) if claimed.deliveries.is_empty() => return Err(error),
                Err(error) => tracing::warn!(%error, "fresh messages could not be claimed"),
            }
        }
        let mut state = self.state();
        // A lane may have been lost since its rows were taken in.
        claimed.deliveries.retain(|delivery| state.book.out(delivery.token).is_some());
        claimed.lost_lanes = state.book.take_lost();
        // Rows of other routes are passed without any settling.
        claimed.unwritten = state.book.has_unwritten();
        Ok(claimed)
    }

    async fn claim_fresh(&self, want: Want, lanes: &[u16]) -> Result<(Vec<postroom::Delivery>, bool), StoreError> {
        let asked: Vec<Asked<i64>> = {
            let mut state = self.state();
            // Alone, the oldest of all lanes is next.
            let messages = if want.single { usize::MAX / 2 } else { want.messages };
            let lane_max = if want.single { 1 } else { want.lane_messages_max };
            state.book.ask(self.now(), messages, lane_max)
        };
        if asked.is_empty() {
            return Ok((Vec::new(), false));
        }
        let placed = want.messages.max(PLACED_LEAST);
        let work = async |conn: &mut Conn| {
            let more = places::give(conn, lanes, placed).await?;
            let mut reads = claim::fresh(conn, &self.route.name, asked, want.bytes).await?;
            // Read after the rows: whoever wrote a message after the route took its topic wrote it before this. With what the last renewal
            // saw, a message of a new topic would be passed by.
            let Some(settings) = routes::settings(conn, &self.route.name).await? else { return Ok(None) };
            let most = if want.single { 1 } else { want.messages };
            if want.single {
                reads.sort_by_key(|read| read.heads.first().map(|head| head.seq));
            }
            let left = keep_first(&mut reads, most, &settings);
            let wanted = reads.iter().flat_map(|read| &read.heads).filter(|head| is_wanted(head, &settings));
            let messages = claim::messages(conn, &wanted.collect::<Vec<_>>()).await?;
            Ok(Some((more || left, reads, messages, settings)))
        };
        let Some((mut more, reads, mut messages, settings)) = self.work.call("claim messages", work).await? else {
            let source = "the route was deleted; it is registered again with the next renewal".into();
            return Err(StoreError::Busy { what: "claim messages", source });
        };
        let mut state = self.state();
        state.settings = settings;
        let mut deliveries = Vec::new();
        for LaneRead { asked, heads, full } in reads {
            more |= full;
            let Some(last) = heads.last() else {
                // A lane whose first message has to wait for another claim is asked again.
                if full {
                    state.book.have_more(&[(asked.lane, asked.epoch)]);
                }
                continue;
            };
            let reached = Reached { position: last.place, full };
            let rows = heads.iter().map(|head| Passed { position: head.place, found: messages.remove(&head.seq) });
            deliveries.extend(state.book.took_in(&asked, reached, rows));
        }
        Ok((deliveries, more))
    }

    /// Writes the positions reached so far. A lane that is not ours any more is dropped.
    async fn write_positions(&self) -> Result<(), StoreError> {
        let now = self.now();
        let moves = self.state().book.begin_write(now);
        if moves.is_empty() {
            return Ok(());
        }
        let holder = self.holder(moves.iter().map(|to| (to.lane, to.epoch)));
        let work = async |conn: &mut Conn| record::positions(conn, &holder, &moves).await;
        let written = self.work.call("save positions", work).await;
        let now = self.now();
        let mut state = self.state();
        match written {
            Ok(written) => {
                let kept: Vec<_> =
                    moves.iter().filter(|to| written.contains(&to.lane)).map(|to| (to.lane, to.position)).collect();
                state.stored.extend(kept);
                state.book.end_write(now, moves, Some(&written));
                Ok(())
            }
            Err(error) => {
                // Whether it was written is not known, so neither is the position; the next renewal tells.
                state.book.end_write(now, moves, None);
                Err(error)
            }
        }
    }
}

fn is_wanted(head: &crate::log::row::Head, settings: &RouteSettings) -> bool {
    !head.dealt_with && settings.topics.takes(&head.topic)
}

/// Cuts a read off behind so many messages that go out; whether something was cut off.
fn keep_first(reads: &mut [LaneRead], most: usize, settings: &RouteSettings) -> bool {
    let (mut taken, mut cut) = (0, false);
    for read in reads {
        let mut keep = 0;
        for head in &read.heads {
            if is_wanted(head, settings) {
                if taken >= most {
                    break;
                }
                taken += 1;
            }
            keep += 1;
        }
        if keep < read.heads.len() {
            read.heads.truncate(keep);
            (read.full, cut) = (true, true);
        }
    }
    cut
}

#[async_trait]
impl Source for MssqlSource {
    async fn renew(&self, report: &Report) -> Result<Standing, StoreError> {
        self.be_registered().await?;
        let mut watch = self.watch.lock().await;
        let held = self.state().book.held();
        let deadline = self.now() + self.route.lease;
        let work =
            async |conn: &mut Conn| lanes::renew(conn, &self.route, &self.owner, &held, report, &mut watch).await;
        let Renewed { granted, share, settings } =
            self.leases.call_within(self.route.lease / 2, "renew the lease", work).await?;
        let Some(settings) = settings else {
            tracing::warn!(route = self.route.name, "the route was deleted from the database; it is registered again");
            self.state().book.lose_all();
            self.register().await?;
            let source = "the route had to be registered first".into();
            return Err(StoreError::Busy { what: "renew the lease", source });
        };
        let leaving = {
            let mut state = self.state();
            // Tables that were restored under us; the lane is taken anew with the next renewal.
            let (granted, gone_back): (Vec<_>, Vec<_>) = granted.into_iter().partition(|granted| {
                !granted.kept || state.stored.get(&granted.lane).is_none_or(|stored| granted.position >= *stored)
            });
            for granted in gone_back {
                tracing::warn!(
                    route = self.route.name,
                    lane = granted.lane,
                    "the position went back; the lane is read again from there"
                );
                state.book.lose(granted.lane, granted.epoch);
                state.stored.remove(&granted.lane);
            }
            let taken: Vec<_> = granted
                .iter()
                .filter(|granted| !granted.kept || !state.stored.contains_key(&granted.lane))
                .map(|granted| (granted.lane, granted.position))
                .collect();
            state.stored.extend(taken);
            state.settings = settings;
            state.book.renewed(&held, granted, deadline);
            state.book.keep_to(share)
        };
        if !leaving.is_empty() {
            let work = async |conn: &mut Conn| lanes::give_back(conn, &self.route.name, &self.owner, &leaving).await;
            self.leases.call("give lanes back", work).await?;
            self.state().book.gave_back(&leaving);
        }
        let mut state = self.state();
        let (held, settled_ahead) = (state.book.held().len(), state.book.settled_ahead());
        let (order, on_dead) = (state.settings.order, state.settings.on_dead);
        Ok(Standing { held, lost_lanes: state.book.take_lost(), settled_ahead, deaths: 0, order, on_dead })
    }

    async fn claim(&self, want: Want) -> Result<Claimed, StoreError> {
        let _turn = self.turn.lock().await;
        self.state().book.begin_claim();
        let claimed = self.claim_all(want).await;
        self.state().book.end_claim();
        claimed
    }

    async fn settle(&self, settlements: &[Settlement]) -> Result<Settled, StoreError> {
        let _turn = self.turn.lock().await;
        let mut settled = Settled::default();
        // The book changes only after the transaction committed, so that a repeated call repeats it whole.
        let (entries, ordered) = {
            let state = self.state();
            let ordered = state.settings.order.unwrap_or(self.route.order) != Order::None;
            (state.book.entries(settlements, ordered), ordered)
        };
        if !entries.is_empty() {
            let holder = self.holder(entries.iter().map(|entry| (entry.lane, entry.epoch)));
            let work = async |conn: &mut Conn| record::entries(conn, &holder, &entries, ordered).await;
            let held = self.work.call("record what became of messages", work).await?;
            let mut state = self.state();
            for (lane, epoch, _) in holder.lanes {
                if !held.contains(&lane) {
                    state.book.lose(lane, epoch);
                }
            }
            settled.more_parked = true;
        }
        let due = {
            let mut state = self.state();
            for settlement in settlements {
                // Not in our books: its lane was lost, before this or just now.
                settled.fenced += usize::from(!state.book.settle(settlement.token));
            }
            state.book.due(self.now(), self.positions_every)
        };
        if due && let Err(error) = self.write_positions().await {
            // Everything durable is recorded; the positions are kept and written with the next settling.
            tracing::warn!(%error, "positions could not be saved; they will be saved when messages are settled next");
        }
        let mut state = self.state();
        settled.unwritten = state.book.has_unwritten();
        settled.settled_ahead = state.book.settled_ahead();
        settled.lost_lanes = state.book.take_lost();
        Ok(settled)
    }

    async fn release(&self) -> Result<(), StoreError> {
        if self.registered.get().is_none() {
            // It never held anything.
            return Ok(());
        }
        let _turn = self.turn.lock().await;
        // Lanes are given back even when the newest positions could not be written: that repeats, and loses nothing.
        let written = self.write_positions().await;
        let held = self.state().book.held();
        let work = async |conn: &mut Conn| {
            lanes::give_back(conn, &self.route.name, &self.owner, &held).await?;
            let sql = "delete from postroom_relays where route = @route and owner = @owner";
            conn.exec(sql, named! { "route" => &self.route.name, "owner" => &self.owner }).await.map(drop)
        };
        self.leases.call("give lanes back", work).await?;
        self.state().book.forget();
        written
    }

    fn lease(&self) -> Duration {
        self.route.lease
    }
}
