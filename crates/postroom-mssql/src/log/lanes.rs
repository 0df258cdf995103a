//! Leases on lanes, by the database's clock; and what relays see of each other.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use postroom::lane_book::{Granted, Tenant};
use postroom::{Report, Route, RouteSettings, StartAt};
use tiberius::Row;
use tiberius::error::Error;

use crate::conn::Conn;
use crate::log::{places, record};
use crate::routes;
use crate::sql::{from_now, get, json, microseconds, named};

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
    let lanes: Vec<u16> = conn.query("select lane from postroom_places order by lane", named! {}).await?;
    let there = "select count(*) from postroom_lanes where route = @route";
    let begins = conn.first(there, named! { "route" => &route.name }).await? == Some(0_i64);
    if begins && route.start_at == StartAt::Now {
        // What was committed until now has places then, and what is committed later gets later ones.
        while places::give(conn, &lanes, PLACED_AT_ONCE).await? {}
    }
    conn.begin().await?;
    let settings = routes::register(conn, &route.name, &route.settings(), owner).await?;
    let now = route.start_at == StartAt::Now;
    let sql = "insert into postroom_lanes (route, lane, position)
               select @route, p.lane, case when @begins_now = 1 then p.next_place - 1 else 0 end from postroom_places p
                where not exists (select 1 from postroom_lanes l where l.route = @route and l.lane = p.lane)";
    conn.exec(sql, named! { "route" => &route.name, "begins_now" => begins && now }).await?;
    conn.commit().await?;
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
    let lease = microseconds(route.lease);
    let name = &route.name;
    // Locked in the order in which others lock them.
    let mut held = held.to_vec();
    held.sort_unstable();
    conn.begin().await?;
    say_alive(conn, name, owner, lease, report).await?;
    let sql = "select x.owner, convert(nvarchar(33), max(x.expires_at), 126)
                 from (select l.owner, l.expires_at from postroom_lanes l
                        where l.route = @route and l.owner is not null and l.expires_at is not null
                        union all
                       select r.owner, r.expires_at from postroom_relays r where r.route = @route) x
                where x.owner <> @owner group by x.owner";
    let seen = conn.query(sql, named! { "route" => name, "owner" => owner }).await?;
    let silent = watch.silent(seen, route.lease);
    let share = share(conn, name, owner, &silent).await?;

    // Waits for what this relay itself is recording about its lanes.
    let sql = format!(
        "update l set expires_at = {}
           from openjson(@held) with (lane smallint '$[0]', epoch bigint '$[1]') n
           join postroom_lanes l with (rowlock) on l.route = @route and l.lane = n.lane
          where l.owner = @owner and l.epoch = n.epoch
         option (loop join, force order)",
        from_now("@lease")
    );
    let parameters = named! { "held" => json(&held), "lease" => lease, "route" => name, "owner" => owner };
    conn.exec(&sql, parameters).await?;
    let sql = "select l.lane, l.epoch, l.position
                 from openjson(@held) with (lane smallint '$[0]', epoch bigint '$[1]') n
                 join postroom_lanes l on l.route = @route and l.lane = n.lane
                where l.owner = @owner and l.epoch = n.epoch
               option (loop join, force order)";
    let kept = conn.rows(sql, named! { "held" => json(&held), "route" => name, "owner" => owner }).await?;
    let mut granted: Vec<Granted<i64>> = kept.iter().map(|row| granted_of(row, true)).collect::<Result<_, _>>()?;

    // Another relay that takes lanes now is passed by.
    let kept: Vec<u16> = granted.iter().map(|granted| granted.lane).collect();
    let sql = "select top (@count) l.lane, l.epoch + 1 as epoch, l.position
                 from postroom_lanes l with (updlock, rowlock, readcommittedlock, readpast)
                where l.route = @route
                  and (l.owner is null or l.expires_at is null or l.expires_at < sysutcdatetime() or l.owner = @owner
                       or l.owner in (select s.owner collate Latin1_General_100_BIN2 from openjson(@silent) with (owner nvarchar(512) '$') s))
                  and l.lane not in (select k.lane from openjson(@kept) with (lane smallint '$') k)
                order by l.lane";
    let count = share.saturating_sub(kept.len());
    let parameters = named! {
        "route" => name, "owner" => owner, "silent" => json(&silent), "kept" => json(&kept), "count" => count
    };
    let free = conn.rows(sql, parameters).await?;
    let taken: Vec<Granted<i64>> = free.iter().map(|row| granted_of(row, false)).collect::<Result<_, _>>()?;
    if !taken.is_empty() {
        take(conn, name, owner, lease, &taken).await?;
    }
    granted.extend(taken);

    let clock = "select datediff_big(microsecond, '1970-01-01', sysutcdatetime())";
    let clock: i64 = conn.first(clock, named! {}).await?.unwrap_or_default();
    let reset = watch.must_reset(clock);
    if reset {
        reset_waits(conn, name).await?;
    }
    let settings = routes::settings(conn, name).await?;
    conn.commit().await?;
    let now = Instant::now();
    watch.clock = Some((clock, now));
    if reset {
        watch.waits_reset = Some(now);
    }
    Ok(Renewed { granted, share, settings })
}

fn granted_of(row: &Row, kept: bool) -> Result<Granted<i64>, Error> {
    Ok(Granted { lane: get(row, "lane")?, epoch: get(row, "epoch")?, kept, position: get(row, "position")?, deaths: 0 })
}

/// What is shown of this relay. Those that were not heard of for an hour are forgotten.
async fn say_alive(tx: &mut Conn, route: &str, owner: &str, lease: i64, report: &Report) -> Result<(), Error> {
    let trouble = report.sink_down.as_ref().or(report.sink_blocked.as_ref());
    let blocked = report.sink_down.is_none() && report.sink_blocked.is_some();
    let parameters = named! {
        "route" => route, "owner" => owner, "lease" => lease, "sink" => report.sink.as_deref(), "blocked" => blocked, "trouble" => trouble
    };
    let sql = format!(
        "update postroom_relays with (rowlock)
            set seen_at = sysutcdatetime(), expires_at = {}, sink = @sink, sink_blocked = @blocked, sink_error = @trouble,
                sink_down_since = case when @trouble is not null then coalesce(sink_down_since, sysutcdatetime()) end
          where route = @route and owner = @owner",
        from_now("@lease")
    );
    if tx.exec(&sql, parameters.clone()).await? == 0 {
        let sql = format!(
            "insert into postroom_relays (route, owner, seen_at, expires_at, sink, sink_blocked, sink_down_since, sink_error)
             values (@route, @owner, sysutcdatetime(), {}, @sink, @blocked, case when @trouble is not null then sysutcdatetime() end, @trouble)",
            from_now("@lease")
        );
        tx.exec(&sql, parameters).await?;
    }
    let sql = "delete r from postroom_relays r with (rowlock, readcommittedlock, readpast)
                where r.route = @route and r.owner <> @owner and r.expires_at < dateadd(hour, -1, sysutcdatetime())";
    tx.exec(sql, named! { "route" => route, "owner" => owner }).await.map(drop)
}

async fn share(tx: &mut Conn, route: &str, owner: &str, silent: &[String]) -> Result<usize, Error> {
    let sql =
        "select owner from postroom_relays where route = @route and owner <> @owner and expires_at > sysutcdatetime()";
    let others: Vec<String> = tx.query(sql, named! { "route" => route, "owner" => owner }).await?;
    let others = others.iter().filter(|other| !silent.contains(other)).count();
    let sql = "select count(*) from postroom_lanes where route = @route";
    let lanes: Option<usize> = tx.first(sql, named! { "route" => route }).await?;
    Ok(lanes.unwrap_or_default().div_ceil(1 + others))
}

/// New tenures of lanes that are locked. What was read by the relay before and only queued up, without its position having passed it, is read
/// again, in order with what that one had in hand; left parked, it could go out before that.
async fn take(tx: &mut Conn, route: &str, owner: &str, lease: i64, taken: &[Granted<i64>]) -> Result<(), Error> {
    let lanes: Vec<u16> = taken.iter().map(|granted| granted.lane).collect();
    let sql = format!(
        "update l set epoch = l.epoch + 1, owner = @owner, expires_at = {}
           from openjson(@lanes) with (lane smallint '$') n
           join postroom_lanes l with (rowlock) on l.route = @route and l.lane = n.lane
         option (loop join, force order)",
        from_now("@lease")
    );
    let parameters = named! { "lanes" => json(&lanes), "owner" => owner, "lease" => lease, "route" => route };
    tx.exec(&sql, parameters).await?;
    let sql = "select p.seq, p.id
                 from postroom_parked p
                 join openjson(@lanes) with (lane smallint '$') n on n.lane = p.lane
                 join postroom_lanes l on l.route = p.route and l.lane = p.lane
                 join postroom_outbox o on o.seq = p.seq and o.id = p.id
                where p.route = @route and p.state <> 'scheduled' and p.attempts = 0 and p.last_error is null
                  and (o.place is null or o.place > l.position)";
    let queued: Vec<(i64, String)> = tx.query(sql, named! { "lanes" => json(&lanes), "route" => route }).await?;
    if queued.is_empty() { Ok(()) } else { record::unpark(tx, route, &queued).await }
}

/// What waits since a moment that has not come yet waits from now on, no longer than it was to wait then.
async fn reset_waits(tx: &mut Conn, route: &str) -> Result<(), Error> {
    let wait = "datediff_big(microsecond, waits_since, due_at)";
    let sql = format!(
        "update postroom_parked with (rowlock, readcommittedlock, readpast) set due_at = {}, waits_since = sysutcdatetime()
          where route = @route and state in ('retry', 'scheduled') and waits_since > dateadd(second, 2, sysutcdatetime())",
        from_now(wait)
    );
    tx.exec(&sql, named! { "route" => route }).await.map(drop)
}

/// Gives lanes back at once, so that another relay can take them.
pub(crate) async fn give_back(conn: &mut Conn, route: &str, owner: &str, lanes: &[Tenant]) -> Result<(), Error> {
    let sql = "update l set owner = null, expires_at = null
                 from openjson(@lanes) with (lane smallint '$[0]', epoch bigint '$[1]') n
                 join postroom_lanes l with (rowlock) on l.route = @route and l.lane = n.lane
                where l.owner = @owner and l.epoch = n.epoch
               option (loop join, force order)";
    conn.exec(sql, named! { "lanes" => json(lanes), "route" => route, "owner" => owner }).await.map(drop)
}
