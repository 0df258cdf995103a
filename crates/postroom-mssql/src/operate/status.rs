//! What `postroom status` shows of a SQL Server store.

use postroom::{
    InboxStatus, LinkStatus, LinkTrouble, Reconciled, ReconciledStatus, RouteSettings, RouteStatus, StoreStatus,
    UnroutedTopic, WorkerStatus,
};
use tiberius::Row;
use tiberius::error::Error;

use crate::conn::Conn;
use crate::desk::Failed;
use crate::migrate::version;
use crate::routes::{self, takes};
use crate::sql::{NOW, Named, get, json, named, seconds_since};

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
pub(crate) async fn unread(conn: &mut Conn, route: &str, settings: &RouteSettings) -> Result<Unread, Error> {
    let sql = "select lane, position from postroom_lanes where route = @route order by lane";
    let lanes: Vec<(i64, i64)> = conn.query(sql, named! { "route" => route }).await?;
    let mut unread = Unread { messages: 0, is_bound: false, oldest_seconds: None };
    for (condition, order) in [("o.place > n.position", "o.place"), ("o.place is null", "o.seq")] {
        let mut parameters = named! { "lanes" => json(&lanes) };
        let takes = takes(&settings.topics, "t", &mut parameters);
        let sql = format!(
            "select coalesce(convert(bigint, sum(x.messages)), 0) as messages,
                    case when coalesce(max(x.messages), 0) >= {COUNTED} then 1 else 0 end as is_bound, {} as oldest
               from openjson(@lanes) with (lane smallint '$[0]', position bigint '$[1]') n
              cross apply (
                   select count_big(*) as messages, min(y.occurred_at) as oldest
                     from (select top ({COUNTED}) o.occurred_at from postroom_outbox o
                            where o.lane = n.lane and {condition} and {takes} order by {order}) y) x",
            seconds_since("min(x.oldest)")
        );
        let rows = conn.rows(&sql, parameters).await?;
        let Some(row) = rows.first() else { continue };
        unread.messages += get::<i64>(row, "messages")?;
        unread.is_bound |= get::<bool>(row, "is_bound")?;
        let oldest: Option<f64> = get(row, "oldest")?;
        unread.oldest_seconds = [unread.oldest_seconds, oldest].into_iter().flatten().reduce(f64::max);
    }
    Ok(unread)
}

/// A count, and whether there may be more.
async fn counted(conn: &mut Conn, of: &str, parameters: Named) -> Result<(i64, bool), Error> {
    let sql = format!("select count_big(*) from (select top ({COUNTED}) 1 as one from {of}) x");
    let count: i64 = conn.first(&sql, parameters).await?.unwrap_or_default();
    Ok((count, count >= COUNTED))
}

/// Whether a relay of these routes would find something to do. A few index look-ups for each lane.
pub(crate) async fn work_waits(conn: &mut Conn, routes: &[String]) -> Result<bool, Failed> {
    let sql = format!(
        "select case when not exists (select 1 from postroom_routes r where r.name = @route)
                  or exists (select 1 from postroom_lanes l
                              where l.route = @route
                                and (exists (select 1 from postroom_outbox o where o.lane = l.lane and o.place > l.position)
                                     or exists (select 1 from postroom_outbox o where o.lane = l.lane and o.place is null)))
                  or exists (select 1 from postroom_parked p
                              where p.route = @route and p.state <> 'queued' and p.due_at <= {NOW}
                                and not exists (select 1 from postroom_blocked_keys b where b.route = p.route and b.key_hash = p.key_hash))
                then 1 else 0 end as waits"
    );
    for route in routes {
        if conn.first(&sql, named! { "route" => route }).await?.unwrap_or(false) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Reads the state of the store; writes nothing.
pub(crate) async fn status(conn: &mut Conn) -> Result<StoreStatus, Failed> {
    let schema_version = version(conn).await?;
    let (outbox_rows, outbox_rows_is_bound) = counted(conn, "postroom_outbox", named! {}).await?;
    let mut shown = Vec::new();
    for (name, settings) in routes::all(conn).await? {
        shown.push(route(conn, name, &settings).await?);
    }
    Ok(StoreStatus {
        store: "mssql",
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
    let of = |table: &str, more: &str| format!("postroom_{table} where route = @route {more}");
    let mine = || named! { "route" => &name };
    let (parked, parked_is_bound) = counted(conn, &of("parked", ""), mine()).await?;
    let (scheduled, scheduled_is_bound) = counted(conn, &of("parked", "and state = 'scheduled'"), mine()).await?;
    let failing = "and state = 'retry' and last_error is not null";
    let (retrying, retrying_is_bound) = counted(conn, &of("parked", failing), mine()).await?;
    let (dead, dead_is_bound) = counted(conn, &of("dead_letters", ""), mine()).await?;
    // What is replayed was sent before.
    let sql = format!(
        "select {} from postroom_parked p where p.route = @route and p.state <> 'scheduled'
            and not exists (select 1 from postroom_operation_watch w
                              join postroom_operations a on a.id = w.operation and a.kind = 'replay'
                             where w.message_id = p.id and w.seq = p.seq)",
        seconds_since("min(p.occurred_at)")
    );
    let parked_for: Option<Option<f64>> = conn.first(&sql, mine()).await?;
    let sql = "select top (1) last_error from postroom_parked where route = @route and state = 'retry' and last_error is not null
                order by due_at desc";
    let last_failure: Option<String> = conn.first(sql, mine()).await?;
    let sql = format!(
        "select count_big(*) as lanes, coalesce(convert(bigint, sum(case when owner is not null and expires_at > {NOW} then 1 else 0 end)), 0) as held
           from postroom_lanes where route = @route"
    );
    let (lanes, lanes_held): (i64, i64) = conn.first(&sql, mine()).await?.unwrap_or_default();
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
    let sql = format!(
        "select top (1000) x.owner, x.alive, x.seen_ago, x.lanes, x.sink, x.sink_blocked, x.down_for, x.sink_error
           from (select y.owner, case when y.expires_at > {NOW} then 1 else 0 end as alive, {} as seen_ago,
                        (select count_big(*) from postroom_lanes l where l.route = y.route and l.owner = y.owner) as lanes,
                        y.sink, y.sink_blocked, {} as down_for, y.sink_error
                   from postroom_relays y where y.route = @route) x
          where x.alive = 1 or x.lanes > 0 order by x.owner",
        seconds_since("y.seen_at"),
        seconds_since("y.sink_down_since")
    );
    let relay = |row: &Row| {
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
    conn.rows(&sql, named! { "route" => route }).await?.iter().map(relay).collect()
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
    let mine = || named! { "consumer" => &consumer };
    let (waiting, waiting_is_bound) =
        counted(conn, "postroom_inbox_messages where consumer = @consumer", mine()).await?;
    let (dead, dead_is_bound) = counted(conn, "postroom_dead_consume where consumer = @consumer", mine()).await?;
    let sql = format!(
        "select coalesce(convert(bigint, sum(case when x.state = 'ready' and x.attempts > 0 then 1 else 0 end)), 0), {}
           from (select top ({COUNTED}) state, attempts, coalesce(received_at, occurred_at) as since from postroom_inbox_messages
                  where consumer = @consumer order by seq) x",
        seconds_since("min(x.since)")
    );
    let (retrying, oldest_seconds): (i64, Option<f64>) = conn.first(&sql, mine()).await?.unwrap_or_default();
    let sql = "select top (1) last_error from postroom_inbox_messages
                where consumer = @consumer and attempts > 0 and last_error is not null order by due_at desc";
    let last_failure: Option<String> = conn.first(sql, mine()).await?;
    let sql = format!(
        "select owner, case when expires_at > {NOW} then 1 else 0 end as alive, {} + convert(float, lease_us) / 1000000 as seen_ago,
                source, {} as down_for, source_error
           from postroom_inbox_fillers where consumer = @consumer and owner is not null",
        seconds_since("expires_at"),
        seconds_since("source_down_since")
    );
    let filler = |row: &Row| -> Result<WorkerStatus, Error> {
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
    let filler = conn.rows(&sql, mine()).await?.first().map(filler).transpose()?;
    Ok(InboxStatus {
        waiting,
        retrying,
        waiting_is_bound,
        last_failure,
        oldest_seconds,
        dead,
        dead_is_bound,
        filler,
        consumer,
    })
}

/// Topics that no route takes, among the newest 10,000 messages.
pub(crate) async fn unrouted_topics(conn: &mut Conn) -> Result<Vec<UnroutedTopic>, Failed> {
    let mut parameters = named! {};
    let mut any = vec!["1 = 0".to_owned()];
    for (index, (_, settings)) in routes::all(conn).await?.into_iter().enumerate() {
        any.push(takes(&settings.topics, &format!("t{index}"), &mut parameters));
    }
    let sql = format!(
        "select top (20) o.topic, count_big(*) as messages, {} as oldest
           from (select top (10000) topic, occurred_at from postroom_outbox order by seq desc) o
          where not ({}) group by o.topic order by messages desc, o.topic",
        seconds_since("min(o.occurred_at)"),
        any.join(" or ")
    );
    let rows: Vec<(String, i64, f64)> = conn.query(&sql, parameters).await?;
    let topic = |(topic, messages, oldest_seconds)| UnroutedTopic { topic, messages, oldest_seconds };
    Ok(rows.into_iter().map(topic).collect())
}

async fn reconciled(conn: &mut Conn) -> Result<Vec<ReconciledStatus>, Failed> {
    let sql = format!(
        "select top (100) r.name, {} as ago, r.missing, r.strangers, r.days, r.result
           from postroom_reconciliations r
          where r.at = (select max(n.at) from postroom_reconciliations n where n.name = r.name and n.at <= {NOW})
          order by r.name",
        seconds_since("r.at")
    );
    let rows = conn.rows(&sql, named! {}).await?;
    let mut shown = Vec::with_capacity(rows.len());
    for row in &rows {
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
