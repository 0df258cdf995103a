//! Claims messages of one route from a SQLite file: the log source with one lane, whose position is a seq.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use postroom::lane_book::{Asked, Granted, Move, Passed, Reached};
use postroom::{
    Claimed, LaneBook, OnDead, Order, Report, Route, RouteSettings, Settled, Settlement, Source, Standing, StoreError,
    TopicFilter, Want,
};
use rusqlite::{Connection, OptionalExtension, Transaction, TransactionBehavior, params};

use crate::connect::{FileId, NOW, connect, file_at, store_error};
use crate::database::Database;
use crate::log::reads;
use crate::log::record;
use crate::log::row::FoundRow;
use crate::log::watch::{self, Position};
use crate::migrate::schema_version;
use crate::operate::routes;

/// The one lane of a SQLite store.
pub(crate) const LANE: u16 = 0;
/// How often waits are reset without a reason that is seen.
const RESET_EVERY: Duration = Duration::from_secs(300);
/// A clock may be slewed by so much between two looks without having gone back.
const CLOCK_SLACK_MS: i64 = 2000;

/// What a source relays, and as whom.
struct SqliteSourceOptions {
    path: PathBuf,
    route: String,
    topics: TopicFilter,
    owner: String,
    lease: Duration,
    order: Order,
    on_dead: OnDead,
}

/// Claims messages of one route. All work happens on blocking threads, on one connection.
pub struct SqliteSource {
    inner: Arc<Mutex<Inner>>,
    lease: Duration,
}

struct Inner {
    options: SqliteSourceOptions,
    connection: Connection,
    /// Which file the connection has open.
    file: Option<FileId>,
    /// What the route is, as it was read last.
    settings: RouteSettings,
    book: LaneBook<Position>,
    opened: Instant,
    /// The position in the file, as this relay found or wrote it last.
    stored: i64,
    /// How another relay's lease stands, and since when it has stood so.
    other: Option<((String, i64), Instant)>,
    /// The database's clock at the last renewal.
    clock: Option<(i64, Instant)>,
    /// When waits were reset last.
    waits_reset: Option<Instant>,
}

impl SqliteSource {
    /// Registers the route and prepares to claim, for a relay of this name, which no other relay may have. Blocks for a moment.
    pub fn open(database: &Database, route: &Route, owner: impl Into<String>) -> Result<Self, StoreError> {
        let options = SqliteSourceOptions {
            path: database.path().to_owned(),
            route: route.name.clone(),
            topics: route.topics.clone(),
            owner: owner.into(),
            lease: route.lease,
            order: route.order,
            on_dead: route.on_dead,
        };
        let (connection, file, settings) = open(&options)?;
        let given = given(&options);
        if settings != given {
            tracing::warn!(
                route = options.route, topics = %settings.topics, order = settings.order.map(|order| order.as_str()),
                on_dead = settings.on_dead.map(|on_dead| on_dead.as_str()),
                "the route's stored settings differ from this relay's configuration and take precedence: a relay that starts \
                 only adds topics and makes order and on_dead stricter. `postroom routes set` changes them"
            );
        }
        let lease = options.lease;
        let inner = Inner {
            options,
            connection,
            file,
            settings,
            book: LaneBook::default(),
            opened: Instant::now(),
            stored: 0,
            other: None,
            clock: None,
            waits_reset: None,
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
    async fn renew(&self, report: &Report) -> Result<Standing, StoreError> {
        self.blocking("look at the database file", |inner| Ok(inner.open_again_if_replaced())).await??;
        let report = report.clone();
        self.blocking("renew the lease", move |inner| inner.renew(&report)).await
    }

    async fn claim(&self, want: Want) -> Result<Claimed, StoreError> {
        self.blocking("claim messages", move |inner| {
            let mut claimed = inner.claim(want)?;
            // Rows of other routes are passed without any settling.
            claimed.unwritten = inner.book.has_unwritten();
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
            inner.write_position();
            let sql = "update postroom_lanes set owner = null, expires_ms = null
                        where route = ?1 and lane = 0 and epoch = ?2 and owner = ?3";
            inner.connection.execute(sql, params![inner.options.route, inner.epoch(), inner.options.owner])?;
            let sql = "delete from postroom_relays where route = ?1 and owner = ?2";
            inner.connection.execute(sql, params![inner.options.route, inner.options.owner])?;
            inner.book.forget();
            Ok(())
        })
        .await
    }

    fn lease(&self) -> Duration {
        self.lease
    }
}

impl Inner {
    /// A file that was replaced is another one, although our connection still sees the old.
    fn open_again_if_replaced(&mut self) -> Result<(), StoreError> {
        let now = file_at(&self.options.path);
        if now.is_some() && now == self.file {
            return Ok(());
        }
        if now.is_none() {
            let source = format!("{} is gone", self.options.path.display()).into();
            return Err(StoreError::Unavailable { what: "look at the database file", source });
        }
        tracing::warn!(route = self.options.route, "the database file was replaced; it is opened again");
        self.book.lose_all();
        (self.connection, self.file, self.settings) = open(&self.options)?;
        // Its waits may have been noted with a clock that was ahead.
        self.clock = None;
        Ok(())
    }

    fn renew(&mut self, report: &Report) -> Result<Standing, rusqlite::Error> {
        let tx = Transaction::new_unchecked(&self.connection, TransactionBehavior::Immediate)?;
        say_alive(&tx, &self.options, report)?;
        let silent = silent_one(&tx, &self.options, &mut self.other)?;
        let sql = format!(
            "update postroom_lanes
                set epoch = case when owner = ?2 and epoch = ?3 then epoch else epoch + 1 end,
                    owner = ?2, expires_ms = {NOW} + ?4
              where route = ?1 and lane = 0
                and (owner is null or expires_ms < {NOW} or owner = ?2 or (owner = ?5 and expires_ms = ?6))
            returning epoch, position_seq, position_id"
        );
        let (ours, lease) = (self.epoch(), self.options.lease.as_millis() as i64);
        let deadline = self.now() + self.options.lease;
        let (other, until) = silent.unzip();
        let held: Option<(i64, Position)> = tx
            .query_row(&sql, params![self.options.route, self.options.owner, ours, lease, other, until], |row| {
                Ok((row.get(0)?, Position { seq: row.get(1)?, id: row.get(2)? }))
            })
            .optional()?;
        let taken = held.as_ref().filter(|(epoch, _)| ours != Some(*epoch));
        let mut moved = None;
        if let Some((_, position)) = &taken {
            // Read by the relay before and only queued up, without its position having passed them: they are read again, in
            // order with those before them that it had in hand.
            let sql = "delete from postroom_parked where route = ?1 and seq > ?2 and state <> 'scheduled'
                          and attempts = 0 and last_error is null";
            tx.execute(sql, params![self.options.route, position.seq])?;
            if watch::seqs_again(&tx, position)? {
                moved = Some(watch::give_new_seqs(&tx)?);
            }
        }
        let settings = routes::settings(&tx, &self.options.route)?;
        let clock: i64 = tx.query_row(&format!("select {NOW}"), [], |row| row.get(0))?;
        let now = Instant::now();
        let went_back = self.clock.is_none_or(|(before, at)| {
            clock < before + now.saturating_duration_since(at).as_millis() as i64 - CLOCK_SLACK_MS
        });
        // It may also have gone forth and back since the last look.
        let reset =
            went_back || self.waits_reset.is_none_or(|reset| now.saturating_duration_since(reset) >= RESET_EVERY);
        if reset {
            watch::reset_waits(&tx, &self.options.route)?;
        }
        tx.commit()?;
        if reset {
            self.waits_reset = Some(now);
        }
        self.clock = Some((clock, now));
        if let Some(settings) = settings {
            self.settings = settings;
        }
        if let Some((_, position)) = taken {
            self.stored = position.seq;
        }
        let granted = held.map(|(epoch, position)| {
            let position = Position { id: position.id.filter(|_| moved.is_none()), ..position };
            Granted { lane: LANE, epoch, kept: ours == Some(epoch), position, deaths: 0 }
        });
        let before = self.book.held();
        self.book.renewed(&before, granted.into_iter().collect(), deadline);
        if let Some(moved) = moved {
            tell_new_seqs(&self.options.route, moved);
        }
        let (held, settled_ahead) = (self.book.held().len(), self.book.settled_ahead());
        let (order, on_dead) = (self.settings.order, self.settings.on_dead);
        Ok(Standing { held, lost_lanes: self.book.take_lost(), settled_ahead, deaths: 0, order, on_dead })
    }

    fn now(&self) -> Duration {
        self.opened.elapsed()
    }

    /// The tenure in which the lane is ours.
    fn epoch(&self) -> Option<i64> {
        self.book.held().first().map(|(_, epoch)| *epoch)
    }

    fn claim(&mut self, want: Want) -> Result<Claimed, rusqlite::Error> {
        let mut claimed = Claimed { lost_lanes: self.book.take_lost(), ..Claimed::default() };
        let Some(epoch) = self.epoch() else { return Ok(claimed) };
        // Everything is read before anything is taken in, and in one transaction: an error half-way must not leave a read in
        // nobody's hand, and what is read belongs to the position that was looked at.
        match self.look(epoch)? {
            watch::Standing::Known => {}
            watch::Standing::Another => return Ok(self.lost_before_the_read()),
            watch::Standing::SeqsAgain => {
                let tx = Transaction::new_unchecked(&self.connection, TransactionBehavior::Immediate)?;
                let moved = watch::give_new_seqs(&tx)?;
                tx.commit()?;
                tell_new_seqs(&self.options.route, moved);
                return Ok(self.lost_before_the_read());
            }
        }
        let tx = self.connection.unchecked_transaction()?;
        if self.look(epoch)? != watch::Standing::Known {
            // It changed since; the next claim finds out how.
            return Ok(claimed);
        }
        let settings = routes::settings(&tx, &self.options.route)?;
        let heads = if want.single { 1 } else { want.messages };
        let (parked, parked_cut) = if want.parked { self.read_parked(heads, want.bytes)? } else { (Vec::new(), false) };
        let now = self.now();
        let asked = if want.single && !parked.is_empty() {
            None
        } else {
            let lane_max = if want.single { 1 } else { want.lane_messages_max };
            self.book.ask(now, want.messages, lane_max).pop()
        };
        let (fresh, fresh_cut) = match &asked {
            Some(asked) => self.read_fresh(asked, want.bytes)?,
            None => (Vec::new(), false),
        };
        drop(tx);
        if let Some(settings) = settings {
            self.settings = settings;
        }
        let full = asked.as_ref().is_some_and(|asked| fresh.len() >= asked.limit);
        claimed.more = parked_cut || fresh_cut || full || parked.len() >= want.messages;

        for row in parked {
            claimed.deliveries.extend(self.book.took_in_parked(LANE, row.found()));
        }
        if let Some((asked, last)) = asked.zip(fresh.last()) {
            let behind = |row: &FoundRow| Position { seq: row.seq, id: Some(row.written_id.clone()) };
            let reached = Reached { position: behind(last), full: fresh_cut || fresh.len() >= asked.limit };
            let topics = &self.settings.topics;
            let rows = fresh.into_iter().map(|row| {
                let position = behind(&row);
                let wanted = !row.dealt_with && topics.takes(&row.message.topic);
                Passed { position, found: wanted.then(|| row.found()) }
            });
            claimed.deliveries.extend(self.book.took_in(&asked, reached, rows));
        }
        Ok(claimed)
    }

    fn look(&self, epoch: i64) -> Result<watch::Standing, rusqlite::Error> {
        let (route, owner) = (&self.options.route, &self.options.owner);
        let read = self.book.position(LANE).cloned().unwrap_or_default();
        watch::look(&self.connection, route, owner, epoch, self.stored, &read)
    }

    /// The lane is taken again with the next renewal, and read from the position in the file.
    fn lost_before_the_read(&mut self) -> Claimed {
        self.book.lose_all();
        Claimed { lost_lanes: self.book.take_lost(), ..Claimed::default() }
    }

    /// In order, at most about `bytes`; whether there was more.
    fn read_fresh(&self, asked: &Asked<Position>, bytes: usize) -> Result<(Vec<FoundRow>, bool), rusqlite::Error> {
        let mut statement = self.connection.prepare_cached(&reads::fresh())?;
        up_to(
            bytes,
            statement.query_map(params![self.options.route, asked.position.seq, asked.limit as i64], FoundRow::of)?,
        )
    }

    /// Heads that are due, each with what queues behind it, up to the next head of the key.
    fn read_parked(&self, limit: usize, bytes: usize) -> Result<(Vec<FoundRow>, bool), rusqlite::Error> {
        let in_hand: Vec<i64> = self.book.parked_in_hand().map(|(_, seq)| seq).collect();
        let in_hand = serde_json::to_string(&in_hand).unwrap_or_default();
        let route = &self.options.route;
        let mut heads = self.connection.prepare_cached(&reads::heads())?;
        let mut heads = heads.query(params![route, in_hand, limit as i64])?;
        let mut behind = self.connection.prepare_cached(&reads::followers())?;
        let (mut taken, mut weight): (Vec<FoundRow>, usize) = (Vec::new(), 0);
        let mut cut = false;
        'all: while let Some(head) = heads.next()? {
            cut = taken.len() >= limit || (weight >= bytes && !taken.is_empty());
            if cut {
                break;
            }
            let is_retried = head.get::<_, String>("state")? == "retry";
            let head = FoundRow::of(head)?;
            let seq = head.seq;
            weight += head.message.weight();
            taken.push(head);
            let count = limit.saturating_sub(taken.len()).min(FOLLOWERS_MAX);
            if !is_retried || count == 0 {
                continue;
            }
            let mut followers = behind.query(params![route, seq, count as i64])?;
            while let Some(row) = followers.next()? {
                if row.get::<_, String>("state")? != "queued" {
                    break;
                }
                cut = weight >= bytes;
                if cut {
                    break 'all;
                }
                let row = FoundRow::of(row)?;
                weight += row.message.weight();
                taken.push(row);
            }
        }
        taken.sort_by_key(|row| row.seq);
        Ok((taken, cut))
    }

    fn settle(&mut self, settlements: &[Settlement]) -> Result<Settled, rusqlite::Error> {
        let mut settled = Settled::default();
        let Some(epoch) = self.epoch() else {
            settled.fenced = settlements.len();
            settled.lost_lanes = self.book.take_lost();
            return Ok(settled);
        };
        // The book changes only after the transaction committed, so that a repeated call repeats it whole.
        let entries = self.book.entries(settlements, self.ordered());
        if !entries.is_empty() {
            let (route, ordered) = (self.options.route.clone(), self.ordered());
            let tx = self.connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            // The position too: owner and epoch may be in a backup that was restored.
            let held: bool = tx.query_row(
                "select exists (select 1 from postroom_lanes
                                 where route = ?1 and lane = 0 and epoch = ?2 and owner = ?3 and position_seq = ?4)",
                params![route, epoch, self.options.owner, self.stored],
                |row| row.get(0),
            )?;
            if held {
                record::write(&tx, &entries, &route, ordered)?;
                tx.commit()?;
                settled.more_parked = true;
            } else {
                tx.rollback()?;
                self.book.lose_all();
            }
        }
        for settlement in settlements {
            // Not in our books: the lane was lost, before this or just now.
            settled.fenced += usize::from(!self.book.settle(settlement.token));
        }
        self.write_position();
        settled.lost_lanes = self.book.take_lost();
        settled.settled_ahead = self.book.settled_ahead();
        settled.unwritten = self.book.has_unwritten();
        Ok(settled)
    }

    /// An error leaves the position unwritten for the next settling; everything else is recorded.
    fn write_position(&mut self) {
        let now = self.now();
        let moves = self.book.begin_write(now);
        let Some(Move { epoch, position, .. }) = moves.first() else { return };
        let sql = "update postroom_lanes set position_seq = ?3, position_id = ?4
                    where route = ?1 and lane = 0 and epoch = ?2 and owner = ?5 and position_seq = ?6";
        let (route, owner) = (&self.options.route, &self.options.owner);
        let written =
            self.connection.execute(sql, params![route, epoch, position.seq, position.id, owner, self.stored]);
        let written = match written {
            Ok(1) => {
                self.stored = position.seq;
                Some(HashSet::from([LANE]))
            }
            Ok(_) => Some(HashSet::new()),
            Err(error) => {
                tracing::warn!(%error, "the position could not be saved; it will be saved when messages are settled next");
                None
            }
        };
        let now = self.now();
        self.book.end_write(now, moves, written.as_ref());
    }

    fn ordered(&self) -> bool {
        self.settings.order.unwrap_or(self.options.order) != Order::None
    }
}

/// The relay that holds the lane and the end of its lease, if that has not changed for a lease as we saw it: then it is silent,
/// whatever the clocks say. `other` is what was seen last, and since when.
fn silent_one(
    tx: &Transaction<'_>,
    options: &SqliteSourceOptions,
    other: &mut Option<((String, i64), Instant)>,
) -> Result<Option<(String, i64)>, rusqlite::Error> {
    let sql = "select owner, expires_ms from postroom_lanes
                where route = ?1 and lane = 0 and owner <> ?2 and expires_ms is not null";
    let seen: Option<(String, i64)> =
        tx.query_row(sql, params![options.route, options.owner], |row| Ok((row.get(0)?, row.get(1)?))).optional()?;
    let now = Instant::now();
    match (&other, seen) {
        (_, None) => *other = None,
        (Some((known, since)), Some(seen)) if *known == seen => {
            return Ok((now.saturating_duration_since(*since) > options.lease).then_some(seen));
        }
        (_, Some(seen)) => *other = Some((seen, now)),
    }
    Ok(None)
}

/// What `postroom status` shows of this relay. Those that were not heard of for an hour are forgotten.
fn say_alive(tx: &Transaction<'_>, options: &SqliteSourceOptions, report: &Report) -> Result<(), rusqlite::Error> {
    let sql = format!(
        "insert into postroom_relays (route, owner, seen_ms, expires_ms, sink, sink_blocked, sink_down_since_ms, sink_error)
         values (?1, ?2, {NOW}, {NOW} + ?3, ?4, ?5, case when ?6 is not null then {NOW} end, ?6)
             on conflict (route, owner) do update
            set seen_ms = excluded.seen_ms, expires_ms = excluded.expires_ms, sink = excluded.sink,
                sink_blocked = excluded.sink_blocked, sink_error = excluded.sink_error,
                sink_down_since_ms = case when excluded.sink_error is not null
                                          then coalesce(sink_down_since_ms, excluded.sink_down_since_ms) end"
    );
    let trouble = report.sink_down.as_ref().or(report.sink_blocked.as_ref());
    let blocked = report.sink_down.is_none() && report.sink_blocked.is_some();
    let lease = options.lease.as_millis() as i64;
    tx.execute(&sql, params![options.route, options.owner, lease, report.sink, blocked, trouble])?;
    let sql = format!("delete from postroom_relays where route = ?1 and owner <> ?2 and expires_ms < {NOW} - 3600000");
    tx.execute(&sql, params![options.route, options.owner]).map(drop)
}

fn given(options: &SqliteSourceOptions) -> RouteSettings {
    RouteSettings { topics: options.topics.clone(), order: Some(options.order), on_dead: Some(options.on_dead) }
}

/// Opens the file, checks the schema and registers the route.
fn open(options: &SqliteSourceOptions) -> Result<(Connection, Option<FileId>, RouteSettings), StoreError> {
    let connection = connect(&options.path)?;
    let file = file_at(&options.path);
    let failed = |error| store_error("register the route", error);
    let version: Option<i64> =
        connection.query_row("select max(number) from postroom_migrations", [], |row| row.get(0)).map_err(failed)?;
    if version.unwrap_or_default() < schema_version() {
        return Err(StoreError::Schema {
            problem: format!(
                "it is at version {}, and this program needs version {}",
                version.unwrap_or_default(),
                schema_version()
            ),
            hint: "run `postroom migrate` on this database",
        });
    }
    let oldest: i64 = connection
        .query_row("select coalesce(max(oldest_program), 0) from postroom_settings", [], |row| row.get(0))
        .map_err(failed)?;
    if oldest > schema_version() {
        return Err(StoreError::Schema {
            problem: format!(
                "it is at version {} and works with programs that know version {oldest} or newer; this one knows {}",
                version.unwrap_or_default(),
                schema_version()
            ),
            hint: "use a newer postroom",
        });
    }
    // Losing the newest position repeats messages and never loses any; WAL keeps the file consistent.
    connection.pragma_update(None, "synchronous", "normal").map_err(failed)?;
    let tx = Transaction::new_unchecked(&connection, TransactionBehavior::Immediate).map_err(failed)?;
    let settings = routes::register(&tx, &options.route, &given(options), &options.owner).map_err(failed)?;
    let sql = "insert into postroom_lanes (route, lane) values (?1, ?2) on conflict (route, lane) do nothing";
    tx.execute(sql, params![options.route, LANE]).map_err(failed)?;
    tx.commit().map_err(failed)?;
    Ok((connection, file, settings))
}

fn tell_new_seqs(route: &str, moved: usize) {
    tracing::warn!(
        route,
        moved,
        "the outbox was emptied and its seq starts at one again: messages that would have been missed got new seqs; \
         no message was skipped, some may be sent again"
    );
}

/// Messages of one key that are claimed with the parked one before them.
const FOLLOWERS_MAX: usize = 200;

/// Takes rows as long as they fit in `bytes`, the first whatever its size; whether one did not.
fn up_to(
    bytes: usize,
    rows: impl Iterator<Item = Result<FoundRow, rusqlite::Error>>,
) -> Result<(Vec<FoundRow>, bool), rusqlite::Error> {
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
