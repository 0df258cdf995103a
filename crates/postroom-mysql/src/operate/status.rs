//! What `postroom status` shows of a MariaDB or MySQL store.

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Error, Params, Row, Value, params};
use postroom::{
    InboxStatus, LinkStatus, LinkTrouble, Reconciled, ReconciledStatus, RouteSettings, RouteStatus, StoreStatus,
    UnroutedTopic, WorkerStatus,
};

use crate::desk::Failed;
use crate::log::get;
use crate::migrate::version;
use crate::routes::{self, Named, takes};

/// Rows of one table, or of one lane, that are counted.
const COUNTED: i64 = 50_000;

/// Messages that a route has not read.
pub(crate) struct Unread {
    pub messages: i64,
    /// There may be more.
    pub is_bound: bool,
    pub oldest_seconds: Option<f64>,
}

/// Lane by lane, each by its index.
pub(crate) async fn unread(conn: &mut impl Queryable, route: &str, settings: &RouteSettings) -> Result<Unread, Error> {
    let sql = "select lane, position from postroom_lanes where route = ? order by lane";
    let lanes: Vec<(i64, i64)> = conn.exec(sql, (route,)).await?;
    let mut unread = Unread { messages: 0, is_bound: false, oldest_seconds: None };
    for chunk in lanes.chunks(64) {
        let mut named = Named::new();
        let takes = takes(&settings.topics, "t", &mut named);
        let mut parts = Vec::with_capacity(2 * chunk.len());
        for (index, (lane, position)) in chunk.iter().enumerate() {
            for condition in [format!("o.place > :p{index}"), "o.place is null".to_owned()] {
                parts.push(format!(
                    "select count(*) as messages, min(x.occurred_at) as oldest
                       from (select o.occurred_at from postroom_outbox o
                              where o.lane = :l{index} and {condition} and {takes} order by o.place limit {COUNTED}) x"
                ));
            }
            named.extend([(format!("l{index}"), (*lane).into()), (format!("p{index}"), (*position).into())]);
        }
        let sql = format!(
            "select cast(coalesce(sum(messages), 0) as signed) as messages, coalesce(max(messages), 0) >= {COUNTED} as is_bound,
                    timestampdiff(microsecond, min(oldest), utc_timestamp(6)) / 1e6 as oldest from ({}) lanes",
            parts.join(" union all ")
        );
        let Some(mut row): Option<Row> = conn.exec_first(sql, Params::from(named)).await? else { continue };
        let row = &mut row;
        unread.messages += get::<i64>(row, "messages")?;
        unread.is_bound |= get::<bool>(row, "is_bound")?;
        let oldest: Option<f64> = get(row, "oldest")?;
        unread.oldest_seconds = [unread.oldest_seconds, oldest].into_iter().flatten().reduce(f64::max);
    }
    Ok(unread)
}

/// A count, and whether there may be more.
async fn counted(conn: &mut Conn, of: &str, values: Vec<Value>) -> Result<(i64, bool), Error> {
    let sql = format!("select count(*) from (select 1 from {of} limit {COUNTED}) x");
    let parameters = if values.is_empty() { Params::Empty } else { Params::Positional(values) };
    let count: i64 = conn.exec_first(sql, parameters).await?.unwrap_or_default();
    Ok((count, count >= COUNTED))
}

/// Whether a relay of these routes would find something to do. A few index look-ups for each lane.
pub(crate) async fn work_waits(conn: &mut Conn, routes: &[String]) -> Result<bool, Failed> {
    let sql = "select (not exists (select 1 from postroom_routes r where r.name = :route)
                    or exists (select 1 from postroom_lanes l
                                where l.route = :route
                                  and (exists (select 1 from postroom_outbox o where o.lane = l.lane and o.place > l.position)
                                       or exists (select 1 from postroom_outbox o where o.lane = l.lane and o.place is null)))
                    or exists (select 1 from postroom_parked p
                                where p.route = :route and p.state <> 'queued' and p.due_at <= utc_timestamp(6)
                                  and not exists (select 1 from postroom_blocked_keys b
                                                   where b.route = p.route and b.ordering_key = p.ordering_key))) as waits";
    for route in routes {
        if conn.exec_first(sql, params! { "route" => route }).await?.unwrap_or(false) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Reads the state of the store; writes nothing.
pub(crate) async fn status(conn: &mut Conn) -> Result<StoreStatus, Failed> {
    let schema_version = version(conn).await?;
    let (outbox_rows, outbox_rows_is_bound) = counted(conn, "postroom_outbox", Vec::new()).await?;
    let mut shown = Vec::new();
    for (name, settings) in routes::all(conn).await? {
        shown.push(route(conn, name, &settings).await?);
    }
    Ok(StoreStatus {
        store: "mysql",
        schema_version,
        outbox_rows,
        outbox_rows_is_bound,
        routes: shown,
        inboxes: inboxes(conn).await?,
        unrouted: unrouted_topics(conn).await?,
        reconciled: reconciled(conn).await?,
    })
}

async fn route(conn: &mut Conn, name: String, settings: &RouteSettings) -> Result<RouteStatus, Error> {
    let unread = unread(conn, &name, settings).await?;
    let of = |table: &str, more: &str| format!("postroom_{table} where route = ? {more}");
    let mine = || vec![Value::from(name.as_str())];
    let (parked, parked_is_bound) = counted(conn, &of("parked", ""), mine()).await?;
    let (scheduled, scheduled_is_bound) = counted(conn, &of("parked", "and state = 'scheduled'"), mine()).await?;
    let failing = "and state = 'retry' and last_error is not null";
    let (retrying, retrying_is_bound) = counted(conn, &of("parked", failing), mine()).await?;
    let (dead, dead_is_bound) = counted(conn, &of("dead_letters", ""), mine()).await?;
    // What is replayed was sent before.
    let sql = "select timestampdiff(microsecond, min(p.occurred_at), utc_timestamp(6)) / 1e6
                 from postroom_parked p where p.route = ? and p.state <> 'scheduled'
                  and not exists (select 1 from postroom_operation_watch w
                                    join postroom_operations a on a.id = w.operation and a.kind = 'replay'
                                   where w.message_id = p.id and w.seq = p.seq)";
    let parked_for: Option<Option<f64>> = conn.exec_first(sql, (&name,)).await?;
    let sql = "select last_error from postroom_parked where route = ? and state = 'retry' and last_error is not null
                order by due_at desc limit 1";
    let last_failure: Option<String> = conn.exec_first(sql, (&name,)).await?;
    let sql = "select count(*) as lanes, cast(coalesce(sum(owner is not null and expires_at > utc_timestamp(6)), 0) as signed) as held
                 from postroom_lanes where route = ?";
    let (lanes, lanes_held): (i64, i64) = conn.exec_first(sql, (&name,)).await?.unwrap_or_default();
    let oldest = [unread.oldest_seconds, parked_for.flatten()].into_iter().flatten().reduce(f64::max);
    Ok(RouteStatus {
        backlog: unread.messages + parked - scheduled,
        backlog_is_bound: unread.is_bound || parked_is_bound || scheduled_is_bound,
        oldest_unsent_seconds: oldest,
        oldest_unread_seconds: unread.oldest_seconds,
        parked,
        parked_is_bound,
        scheduled,
        scheduled_is_bound,
        retrying,
        retrying_is_bound,
        last_failure,
        dead,
        dead_is_bound,
        lanes,
        lanes_held,
        relays: relays(conn, &name).await?,
        route: name,
    })
}

/// Relays that are alive, and those that own lanes although their lease is over.
async fn relays(conn: &mut Conn, route: &str) -> Result<Vec<WorkerStatus>, Error> {
    let sql = "select x.owner, x.alive, x.seen_ago, x.lanes, x.sink, x.sink_blocked, x.down_for, x.sink_error
                 from (select y.owner, y.expires_at > utc_timestamp(6) as alive,
                              timestampdiff(microsecond, y.seen_at, utc_timestamp(6)) / 1e6 as seen_ago,
                              (select count(*) from postroom_lanes l where l.route = y.route and l.owner = y.owner) as lanes,
                              y.sink, y.sink_blocked, timestampdiff(microsecond, y.sink_down_since, utc_timestamp(6)) / 1e6 as down_for,
                              y.sink_error
                         from postroom_relays y where y.route = ?) x
                where x.alive or x.lanes > 0 order by x.owner limit 1000";
    let rows: Vec<Row> = conn.exec(sql, (route,)).await?;
    let relay = |mut row: Row| {
        let row = &mut row;
        let (blocked, since): (bool, Option<f64>) = (get(row, "sink_blocked")?, get(row, "down_for")?);
        let error: Option<String> = get(row, "sink_error")?;
        let trouble = error.map(|error| LinkTrouble { blocked, since_seconds: since.unwrap_or_default(), error });
        Ok(WorkerStatus {
            name: get(row, "owner")?,
            alive: get(row, "alive")?,
            seen_seconds_ago: get(row, "seen_ago")?,
            lanes: get(row, "lanes")?,
            link: LinkStatus { name: get(row, "sink")?, trouble },
        })
    };
    rows.into_iter().map(relay).collect()
}

async fn inboxes(conn: &mut Conn) -> Result<Vec<InboxStatus>, Error> {
    let tables = ["inbox", "inbox_messages", "dead_consume", "inbox_fillers"];
    let mut inboxes = Vec::new();
    for consumer in super::consumers(conn, &tables).await?.into_iter().take(1000) {
        inboxes.push(inbox(conn, consumer).await?);
    }
    Ok(inboxes)
}

async fn inbox(conn: &mut Conn, consumer: String) -> Result<InboxStatus, Error> {
    let mine = || vec![Value::from(consumer.as_str())];
    let (waiting, waiting_is_bound) = counted(conn, "postroom_inbox_messages where consumer = ?", mine()).await?;
    let (dead, dead_is_bound) = counted(conn, "postroom_dead_consume where consumer = ?", mine()).await?;
    let sql = "select cast(coalesce(sum(x.state = 'ready' and x.attempts > 0), 0) as signed),
                      timestampdiff(microsecond, min(x.since), utc_timestamp(6)) / 1e6
                 from (select state, attempts, coalesce(received_at, occurred_at) as since from postroom_inbox_messages
                        where consumer = :consumer order by seq limit :most) x";
    let parameters = params! { "consumer" => &consumer, "most" => COUNTED };
    let (retrying, oldest_seconds): (i64, Option<f64>) = conn.exec_first(sql, parameters).await?.unwrap_or_default();
    let sql = "select last_error from postroom_inbox_messages
                where consumer = ? and attempts > 0 and last_error is not null order by due_at desc limit 1";
    let last_failure: Option<String> = conn.exec_first(sql, (&consumer,)).await?;
    let sql = "select owner, expires_at > utc_timestamp(6) as alive,
                      timestampdiff(microsecond, timestampadd(microsecond, -lease_us, expires_at), utc_timestamp(6)) / 1e6 as seen_ago,
                      source, timestampdiff(microsecond, source_down_since, utc_timestamp(6)) / 1e6 as down_for, source_error
                 from postroom_inbox_fillers where consumer = ? and owner is not null";
    let row: Option<Row> = conn.exec_first(sql, (&consumer,)).await?;
    let filler = |mut row: Row| -> Result<WorkerStatus, Error> {
        let row = &mut row;
        let (alive, since): (bool, Option<f64>) = (get(row, "alive")?, get(row, "down_for")?);
        let error: Option<String> = get(row, "source_error")?;
        let trouble =
            error.map(|error| LinkTrouble { blocked: false, since_seconds: since.unwrap_or_default(), error });
        Ok(WorkerStatus {
            name: get(row, "owner")?,
            alive,
            seen_seconds_ago: get(row, "seen_ago")?,
            lanes: i64::from(alive),
            link: LinkStatus { name: get(row, "source")?, trouble },
        })
    };
    Ok(InboxStatus {
        waiting,
        retrying,
        waiting_is_bound,
        last_failure,
        oldest_seconds,
        dead,
        dead_is_bound,
        filler: row.map(filler).transpose()?,
        consumer,
    })
}

/// Topics that no route takes, among the newest 10,000 messages.
pub(crate) async fn unrouted_topics(conn: &mut Conn) -> Result<Vec<UnroutedTopic>, Failed> {
    let mut named = Named::new();
    let mut any = vec!["false".to_owned()];
    for (index, (_, settings)) in routes::all(conn).await?.into_iter().enumerate() {
        any.push(takes(&settings.topics, &format!("t{index}"), &mut named));
    }
    let sql = format!(
        "select o.topic, count(*) as messages, timestampdiff(microsecond, min(o.occurred_at), utc_timestamp(6)) / 1e6 as oldest
           from (select topic, occurred_at from postroom_outbox order by seq desc limit 10000) o
          where not ({}) group by o.topic order by messages desc, o.topic limit 20",
        any.join(" or ")
    );
    let parameters = if named.is_empty() { Params::Empty } else { Params::from(named) };
    let rows: Vec<(String, i64, f64)> = conn.exec(sql, parameters).await?;
    let topic = |(topic, messages, oldest_seconds)| UnroutedTopic { topic, messages, oldest_seconds };
    Ok(rows.into_iter().map(topic).collect())
}

async fn reconciled(conn: &mut Conn) -> Result<Vec<ReconciledStatus>, Failed> {
    let sql = "select r.name, timestampdiff(microsecond, r.at, utc_timestamp(6)) / 1e6 as ago, r.missing, r.strangers, r.days, r.result
                 from postroom_reconciliations r
                where r.at = (select max(n.at) from postroom_reconciliations n where n.name = r.name and n.at <= utc_timestamp(6))
                order by r.name limit 100";
    let rows: Vec<Row> = conn.query(sql).await?;
    let mut shown = Vec::with_capacity(rows.len());
    for mut row in rows {
        let row = &mut row;
        let result: Reconciled = serde_json::from_str(&get::<String>(row, "result")?)?;
        let troubles = result.consumers.iter().filter(|consumer| consumer.trouble.is_some()).count()
            + [&result.business_trouble, &result.changes_trouble, &result.trouble]
                .iter()
                .filter(|it| it.is_some())
                .count();
        let count = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
        shown.push(ReconciledStatus {
            name: get(row, "name")?,
            seconds_ago: get(row, "ago")?,
            missing: get(row, "missing")?,
            strangers: get(row, "strangers")?,
            days: get(row, "days")?,
            every_seconds: result.every_seconds,
            not_compared: result.not_compared as _,
            troubles: troubles as _,
            unwritten: count(result.unwritten),
        });
    }
    Ok(shown)
}
