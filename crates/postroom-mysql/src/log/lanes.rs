//! Leases on lanes, by the database's clock; and what relays see of each other.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Error, Row, TxOpts, params};
use postroom::lane_book::{Granted, Tenant};
use postroom::{Report, Route, RouteSettings, StartAt};

use crate::log::places::{self, json};
use crate::log::record;
use crate::log::row::get;
use crate::routes;

/// How often waits are reset without a reason that is seen.
const RESET_EVERY: Duration = Duration::from_secs(300);
/// A clock may be slewed by so much between two looks without having gone back.
const CLOCK_SLACK_US: i64 = 2_000_000;
/// Rows that get their places in one transaction while a route that starts now is registered.
const PLACED_AT_ONCE: usize = 5_000;

/// What was seen of other relays and of the clock with the renewals before.
#[derive(Default)]
pub(crate) struct Watch {
    /// The end of each owner's lease, and since when it has been that.
    others: HashMap<String, (String, Instant)>,
    /// The database's clock in microseconds.
    clock: Option<(i64, Instant)>,
    waits_reset: Option<Instant>,
}

impl Watch {
    /// Owners whose lease has not changed for a lease as we saw it: they are silent, whatever the clocks say.
    fn silent(&mut self, seen: Vec<(String, String)>, lease: Duration) -> Vec<String> {
        let now = Instant::now();
        let mut silent = Vec::new();
        let mut others = HashMap::with_capacity(seen.len());
        for (owner, until) in seen {
            let since = match self.others.get(&owner) {
                Some((known, since)) if *known == until => *since,
                _ => now,
            };
            if now.saturating_duration_since(since) > lease {
                silent.push(owner.clone());
            }
            others.insert(owner, (until, since));
        }
        self.others = others;
        silent
    }

    /// Whether waits may have been noted with a clock that was ahead: it went back since the last look, or may have gone forth and back.
    fn must_reset(&self, clock: i64) -> bool {
        let now = Instant::now();
        let since = |at: Instant| now.saturating_duration_since(at);
        let went_back = self.clock.is_none_or(|(before, at)| {
            clock < before.saturating_add(i64::try_from(since(at).as_micros()).unwrap_or(i64::MAX)) - CLOCK_SLACK_US
        });
        went_back || self.waits_reset.is_none_or(|reset| since(reset) >= RESET_EVERY)
    }
}

/// What a renewal brought.
pub(crate) struct Renewed {
    pub granted: Vec<Granted<i64>>,
    /// Lanes divided by the relays that live.
    pub share: usize,
    /// What the route is now.
    pub settings: Option<RouteSettings>,
}

/// Creates the route and its lanes, or adds to the route what it was configured with.
pub(crate) async fn register(conn: &mut Conn, route: &Route, owner: &str) -> Result<RouteSettings, Error> {
    let lanes: Vec<u16> = conn.query("select lane from postroom_places order by lane").await?;
    let there = "select count(*) from postroom_lanes where route = ?";
    let begins = conn.exec_first(there, (&route.name,)).await? == Some(0_i64);
    if begins && route.start_at == StartAt::Now {
        // What was committed until now has places then, and what is committed later gets later ones.
        while places::give(conn, &lanes, PLACED_AT_ONCE).await? {}
    }
    let mut tx = conn.start_transaction(TxOpts::default()).await?;
    let settings = routes::register(&mut tx, &route.name, &route.settings(), owner).await?;
    let now = route.start_at == StartAt::Now;
    let sql = "insert into postroom_lanes (route, lane, position)
               select ?, p.lane, if(?, p.next_place - 1, 0) from postroom_places p
               on duplicate key update postroom_lanes.lane = postroom_lanes.lane";
    tx.exec_drop(sql, (&route.name, begins && now)).await?;
    tx.commit().await?;
    Ok(settings)
}

/// Says that this relay is alive, extends the lease on the lanes held, and takes lanes that are free, expired, or another's who is silent, up
/// to its share.
pub(crate) async fn renew(
    conn: &mut Conn,
    route: &Route,
    owner: &str,
    held: &[Tenant],
    report: &Report,
    watch: &mut Watch,
) -> Result<Renewed, Error> {
    let lease = i64::try_from(route.lease.as_micros()).unwrap_or(i64::MAX);
    let name = &route.name;
    let mut tx = conn.start_transaction(TxOpts::default()).await?;
    say_alive(&mut tx, name, owner, lease, report).await?;
    let sql = "select x.owner, cast(max(x.expires_at) as char)
                 from (select l.owner, l.expires_at from postroom_lanes l
                        where l.route = :route and l.owner is not null and l.expires_at is not null
                        union all
                       select r.owner, r.expires_at from postroom_relays r where r.route = :route) x
                where x.owner <> :owner group by x.owner";
    let seen = tx.exec(sql, params! { "route" => name, "owner" => owner }).await?;
    let silent = watch.silent(seen, route.lease);
    let share = share(&mut tx, name, owner, &silent).await?;

    // Waits for what this relay itself is recording about its lanes.
    let sql = "update json_table(:held, '$[*]' columns (lane smallint path '$[0]', epoch bigint path '$[1]')) n
                 straight_join postroom_lanes l force index (primary) on l.route = :route and l.lane = n.lane and l.epoch = n.epoch
                  set l.expires_at = timestampadd(microsecond, :lease, utc_timestamp(6))
                where l.owner = :owner";
    let parameters = params! { "held" => json(held), "lease" => lease, "route" => name, "owner" => owner };
    tx.exec_drop(sql, parameters).await?;
    let sql = "select l.lane, l.epoch, l.position from postroom_lanes l
                 join json_table(:held, '$[*]' columns (lane smallint path '$[0]', epoch bigint path '$[1]')) n
                   on n.lane = l.lane and n.epoch = l.epoch
                where l.route = :route and l.owner = :owner";
    let kept: Vec<Row> = tx.exec(sql, params! { "held" => json(held), "route" => name, "owner" => owner }).await?;
    let mut granted: Vec<Granted<i64>> = kept.into_iter().map(|row| granted_of(row, true)).collect::<Result<_, _>>()?;

    // Another relay that takes lanes now is passed by.
    let kept: Vec<u16> = granted.iter().map(|granted| granted.lane).collect();
    let sql = "select l.lane, l.epoch + 1 as epoch, l.position from postroom_lanes l
                where l.route = :route
                  and (l.owner is null or l.expires_at is null or l.expires_at < utc_timestamp(6) or l.owner = :owner
                       or l.owner in (select s.owner from json_table(:silent, '$[*]' columns (owner varchar(512) path '$')) s))
                  and l.lane not in (select k.lane from json_table(:kept, '$[*]' columns (lane smallint path '$')) k)
                order by l.lane limit :count for update skip locked";
    let count = i64::try_from(share.saturating_sub(kept.len())).unwrap_or(i64::MAX);
    let parameters = params! {
        "route" => name, "owner" => owner, "silent" => json(&silent), "kept" => json(&kept), "count" => count
    };
    let free: Vec<Row> = tx.exec(sql, parameters).await?;
    let taken: Vec<Granted<i64>> = free.into_iter().map(|row| granted_of(row, false)).collect::<Result<_, _>>()?;
    if !taken.is_empty() {
        take(&mut tx, name, owner, lease, &taken).await?;
    }
    granted.extend(taken);

    let clock = "select timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))";
    let clock: i64 = tx.query_first(clock).await?.unwrap_or_default();
    let reset = watch.must_reset(clock);
    if reset {
        reset_waits(&mut tx, name).await?;
    }
    let settings = routes::settings(&mut tx, name).await?;
    tx.commit().await?;
    let now = Instant::now();
    watch.clock = Some((clock, now));
    if reset {
        watch.waits_reset = Some(now);
    }
    Ok(Renewed { granted, share, settings })
}

fn granted_of(mut row: Row, kept: bool) -> Result<Granted<i64>, Error> {
    let row = &mut row;
    Ok(Granted { lane: get(row, "lane")?, epoch: get(row, "epoch")?, kept, position: get(row, "position")?, deaths: 0 })
}

/// What is shown of this relay. Those that were not heard of for an hour are forgotten.
async fn say_alive(
    tx: &mut impl Queryable,
    route: &str,
    owner: &str,
    lease: i64,
    report: &Report,
) -> Result<(), Error> {
    let sql = "insert into postroom_relays (route, owner, seen_at, expires_at, sink, sink_blocked, sink_down_since, sink_error)
               values (:route, :owner, utc_timestamp(6), timestampadd(microsecond, :lease, utc_timestamp(6)), :sink, :blocked,
                       if(:trouble is null, null, utc_timestamp(6)), :trouble)
               on duplicate key update seen_at = values(seen_at), expires_at = values(expires_at), sink = values(sink),
                   sink_blocked = values(sink_blocked), sink_error = values(sink_error),
                   sink_down_since = if(values(sink_error) is null, null, coalesce(sink_down_since, values(sink_down_since)))";
    let trouble = report.sink_down.as_ref().or(report.sink_blocked.as_ref());
    let blocked = report.sink_down.is_none() && report.sink_blocked.is_some();
    let parameters = params! {
        "route" => route, "owner" => owner, "lease" => lease, "sink" => &report.sink, "blocked" => blocked, "trouble" => trouble
    };
    tx.exec_drop(sql, parameters).await?;
    let sql = "select owner from postroom_relays
                where route = ? and owner <> ? and expires_at < utc_timestamp(6) - interval 1 hour for update skip locked";
    let gone: Vec<String> = tx.exec(sql, (route, owner)).await?;
    for gone in gone {
        tx.exec_drop("delete from postroom_relays where route = ? and owner = ?", (route, gone)).await?;
    }
    Ok(())
}

async fn share(tx: &mut impl Queryable, route: &str, owner: &str, silent: &[String]) -> Result<usize, Error> {
    let sql = "select owner from postroom_relays where route = ? and owner <> ? and expires_at > utc_timestamp(6)";
    let others: Vec<String> = tx.exec(sql, (route, owner)).await?;
    let others = others.iter().filter(|other| !silent.contains(other)).count();
    let lanes: Option<i64> = tx.exec_first("select count(*) from postroom_lanes where route = ?", (route,)).await?;
    Ok(usize::try_from(lanes.unwrap_or_default()).unwrap_or_default().div_ceil(1 + others))
}

/// New tenures of lanes that are locked. What was read by the relay before and only queued up, without its position having passed it, is read
/// again, in order with what that one had in hand; left parked, it could go out before that.
async fn take(
    tx: &mut impl Queryable,
    route: &str,
    owner: &str,
    lease: i64,
    taken: &[Granted<i64>],
) -> Result<(), Error> {
    let lanes: Vec<u16> = taken.iter().map(|granted| granted.lane).collect();
    let sql = "update json_table(:lanes, '$[*]' columns (lane smallint path '$')) n
                 straight_join postroom_lanes l force index (primary) on l.route = :route and l.lane = n.lane
                  set l.epoch = l.epoch + 1, l.owner = :owner,
                      l.expires_at = timestampadd(microsecond, :lease, utc_timestamp(6))";
    let parameters = params! { "lanes" => json(&lanes), "owner" => owner, "lease" => lease, "route" => route };
    tx.exec_drop(sql, parameters).await?;
    let sql = "select p.seq, p.id
                 from postroom_parked p
                 join json_table(:lanes, '$[*]' columns (lane smallint path '$')) n on n.lane = p.lane
                 join postroom_lanes l on l.route = p.route and l.lane = p.lane
                 join postroom_outbox o on o.seq = p.seq and o.id = p.id
                where p.route = :route and p.state <> 'scheduled' and p.attempts = 0 and p.last_error is null
                  and (o.place is null or o.place > l.position)";
    let queued: Vec<(i64, String)> = tx.exec(sql, params! { "lanes" => json(&lanes), "route" => route }).await?;
    if queued.is_empty() { Ok(()) } else { record::unpark(tx, route, &queued).await }
}

/// What waits since a moment that has not come yet waits from now on, no longer than it was to wait then.
async fn reset_waits(tx: &mut impl Queryable, route: &str) -> Result<(), Error> {
    let sql = "select seq, id from postroom_parked
                where route = ? and state in ('retry', 'scheduled') and waits_since > utc_timestamp(6) + interval 2 second";
    let waits: Vec<(i64, String)> = tx.exec(sql, (route,)).await?;
    if waits.is_empty() {
        return Ok(());
    }
    let sql = "update json_table(?, '$[*]' columns (seq bigint path '$[0]', id char(36) character set ascii path '$[1]')) n
                 straight_join postroom_parked p force index (primary) on p.route = ? and p.seq = n.seq and p.id = n.id
                  set p.due_at = timestampadd(microsecond, timestampdiff(microsecond, p.waits_since, utc_timestamp(6)), p.due_at),
                      p.waits_since = utc_timestamp(6)
                where p.waits_since > utc_timestamp(6)";
    tx.exec_drop(sql, (json(&waits), route)).await
}

/// Gives lanes back at once, so that another relay can take them.
pub(crate) async fn give_back(conn: &mut Conn, route: &str, owner: &str, lanes: &[Tenant]) -> Result<(), Error> {
    let sql = "update json_table(?, '$[*]' columns (lane smallint path '$[0]', epoch bigint path '$[1]')) n
                 straight_join postroom_lanes l force index (primary) on l.route = ? and l.lane = n.lane and l.epoch = n.epoch
                  set l.owner = null, l.expires_at = null
                where l.owner = ?";
    conn.exec_drop(sql, (json(lanes), route, owner)).await
}
