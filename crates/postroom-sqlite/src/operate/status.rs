//! What `postroom status` shows of a SQLite store.

use postroom::{
    InboxStatus, LinkStatus, LinkTrouble, ReconciledStatus, RouteStatus, StoreError, StoreStatus, UnroutedTopic,
    WorkerStatus,
};
use rusqlite::{Connection, Row};

use crate::connect::NOW;
use crate::connect::store_error;
use crate::migrate::version;
use crate::text::{text, text_or_null};

/// Whether a relay of these routes would find something to do.
pub(crate) fn work_waits(connection: &Connection, routes: &[String]) -> Result<bool, StoreError> {
    let failed = |error| store_error("look whether something is to be sent", error);
    let sql = format!(
        "select not exists (select 1 from postroom_routes r where r.name = ?1)
             or exists (select 1 from postroom_lanes l join postroom_outbox o on o.seq > l.position_seq where l.route = ?1)
             or exists (select 1 from postroom_parked p
                         where p.route = ?1 and p.state <> 'queued' and p.due_ms <= {NOW}
                           and not exists (select 1 from postroom_blocked_keys b
                                            where b.route = p.route and b.ordering_key = p.ordering_key))"
    );
    for route in routes {
        if connection.query_row(&sql, [route], |row| row.get(0)).map_err(failed)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Reads the state of the store; writes nothing.
pub(crate) fn status(connection: &Connection) -> Result<StoreStatus, StoreError> {
    let failed = |error| store_error("read the status", error);
    let one = |sql: &str| connection.query_row(sql, [], |row| row.get::<_, i64>(0)).map_err(failed);
    let sql = format!(
        "select r.name,
                (select count(*) from postroom_outbox o where o.seq > l.position_seq and {TAKES}),
                (select ({NOW} - min(o.occurred_ms)) / 1000.0 from postroom_outbox o
                  where o.seq > l.position_seq and {TAKES}),
                (select count(*) from postroom_parked p where p.route = r.name),
                (select count(*) from postroom_parked p where p.route = r.name and p.state = 'scheduled'),
                (select count(*) from postroom_dead_letters d where d.route = r.name),
                coalesce(l.owner is not null and l.expires_ms > {NOW}, 0),
                (select ({NOW} - min(p.occurred_ms)) / 1000.0 from postroom_parked p
                  where p.route = r.name and p.state <> 'scheduled'
                    -- What is replayed was sent before.
                    and not exists (select 1 from postroom_operation_watch w
                                      join postroom_operations a on a.id = w.operation and a.kind = 'replay'
                                     where w.message_id = p.id and w.seq = p.seq)),
                (select count(*) from postroom_parked p where p.route = r.name and p.state = 'retry' and p.last_error is not null),
                (select p.last_error from postroom_parked p where p.route = r.name and p.state = 'retry' and p.last_error is not null
                  order by p.due_ms desc limit 1)
           from postroom_routes r join postroom_lanes l on l.route = r.name order by r.name"
    );
    let relays = rows(connection, &relays_sql(), relay).map_err(failed)?;
    let route = |row: &Row<'_>| {
        let (name, unread, parked, scheduled): (String, i64, i64, i64) =
            (row.get(0)?, row.get(1)?, row.get(3)?, row.get(4)?);
        let (unread_for, parked_for): (Option<f64>, Option<f64>) = (row.get(2)?, row.get(7)?);
        let oldest = [unread_for, parked_for].into_iter().flatten().reduce(f64::max);
        Ok(RouteStatus {
            backlog: unread + parked - scheduled,
            backlog_is_bound: false,
            oldest_unsent_seconds: oldest,
            oldest_unread_seconds: unread_for,
            parked,
            parked_is_bound: false,
            scheduled,
            scheduled_is_bound: false,
            retrying: row.get(8)?,
            retrying_is_bound: false,
            last_failure: text_or_null(row, 9)?,
            dead: row.get(5)?,
            dead_is_bound: false,
            lanes: 1,
            lanes_held: row.get(6)?,
            relays: relays.iter().filter(|(route, _)| *route == name).map(|(_, relay)| relay.clone()).collect(),
            route: name,
        })
    };
    Ok(StoreStatus {
        store: "sqlite",
        schema_version: version(connection)?,
        outbox_rows: one("select count(*) from postroom_outbox")?,
        outbox_rows_is_bound: false,
        routes: rows(connection, &sql, route).map_err(failed)?,
        inboxes: rows(connection, &inboxes_sql(), inbox).map_err(failed)?,
        unrouted: unrouted_topics(connection)?,
        reconciled: rows(connection, &reconciled_sql(), reconciled).map_err(failed)?,
    })
}

fn reconciled_sql() -> String {
    format!(
        "select r.name, ({NOW} - r.at_ms) / 1000.0, r.missing, r.strangers, r.days, r.result ->> '$.every_seconds',
                coalesce(r.result ->> '$.not_compared', 0),
                (select count(*) from json_each(r.result, '$.consumers') c where c.value ->> '$.trouble' is not null)
                    + (r.result ->> '$.business_trouble' is not null)
                    + (r.result ->> '$.changes_trouble' is not null) + (r.result ->> '$.trouble' is not null),
                coalesce(r.result ->> '$.unwritten', 0)
           from postroom_reconciliations r
          where r.at_ms = (select max(n.at_ms) from postroom_reconciliations n
                            where n.name = r.name and n.at_ms <= {NOW})
          order by r.name limit 100"
    )
}

fn reconciled(row: &Row<'_>) -> Result<ReconciledStatus, rusqlite::Error> {
    Ok(ReconciledStatus {
        name: row.get(0)?,
        seconds_ago: row.get(1)?,
        missing: row.get(2)?,
        strangers: row.get(3)?,
        days: row.get(4)?,
        every_seconds: row.get(5)?,
        not_compared: row.get(6)?,
        troubles: row.get(7)?,
        unwritten: row.get(8)?,
    })
}

fn rows<T>(
    connection: &Connection,
    sql: &str,
    read: impl FnMut(&Row<'_>) -> Result<T, rusqlite::Error>,
) -> Result<Vec<T>, rusqlite::Error> {
    connection.prepare(sql)?.query_map([], read)?.collect()
}

/// Relays that are alive, and those that own the lane although their lease is over.
fn relays_sql() -> String {
    format!(
        "select y.route, y.owner, y.expires_ms > {NOW}, ({NOW} - y.seen_ms) / 1000.0,
                exists (select 1 from postroom_lanes l where l.route = y.route and l.owner = y.owner) as owns,
                y.sink, y.sink_blocked, ({NOW} - y.sink_down_since_ms) / 1000.0, y.sink_error
           from postroom_relays y where y.expires_ms > {NOW} or owns order by 1, 2 limit 1000"
    )
}

fn relay(row: &Row<'_>) -> Result<(String, WorkerStatus), rusqlite::Error> {
    let error: Option<String> = row.get(8)?;
    let (blocked, since): (bool, Option<f64>) = (row.get(6)?, row.get(7)?);
    let trouble = error.map(|error| LinkTrouble { blocked, since_seconds: since.unwrap_or_default(), error });
    let worker = WorkerStatus {
        name: row.get(1)?,
        alive: row.get(2)?,
        seen_seconds_ago: row.get(3)?,
        lanes: row.get(4)?,
        link: LinkStatus { name: row.get(5)?, trouble },
    };
    Ok((row.get(0)?, worker))
}

fn inboxes_sql() -> String {
    format!(
        "with consumers as (select consumer from postroom_inbox union select consumer from postroom_inbox_messages
                            union select consumer from postroom_dead_consume union select consumer from postroom_inbox_fillers)
         select c.consumer, count(m.id), coalesce(sum(m.state = 'ready' and m.attempts > 0), 0),
                ({NOW} - min(coalesce(m.received_ms, m.occurred_ms))) / 1000.0,
                (select count(*) from postroom_dead_consume d where d.consumer = c.consumer),
                f.owner, coalesce(f.expires_ms > {NOW}, 0), ({NOW} - (f.expires_ms - f.lease_ms)) / 1000.0,
                f.source, ({NOW} - f.source_down_ms) / 1000.0, f.source_error,
                (select e.last_error from postroom_inbox_messages e
                  where e.consumer = c.consumer and e.attempts > 0 and e.last_error is not null order by e.due_ms desc limit 1)
           from consumers c
           left join postroom_inbox_messages m on m.consumer = c.consumer
           left join postroom_inbox_fillers f on f.consumer = c.consumer
          group by c.consumer order by c.consumer"
    )
}

fn inbox(row: &Row<'_>) -> Result<InboxStatus, rusqlite::Error> {
    let (alive, since, error): (bool, Option<f64>, Option<String>) = (row.get(6)?, row.get(9)?, row.get(10)?);
    let trouble = error.map(|error| LinkTrouble { blocked: false, since_seconds: since.unwrap_or_default(), error });
    let link = LinkStatus { name: row.get(8)?, trouble };
    let seen_seconds_ago = row.get(7)?;
    let filler = row.get::<_, Option<String>>(5)?.map(|name| WorkerStatus {
        name,
        alive,
        seen_seconds_ago,
        lanes: i64::from(alive),
        link,
    });
    Ok(InboxStatus {
        consumer: row.get(0)?,
        waiting: row.get(1)?,
        retrying: row.get(2)?,
        waiting_is_bound: false,
        last_failure: text_or_null(row, 11)?,
        oldest_seconds: row.get(3)?,
        dead: row.get(4)?,
        dead_is_bound: false,
        filler,
    })
}

/// Topics that no route takes, among the newest 10,000 messages.
pub(crate) fn unrouted_topics(connection: &Connection) -> Result<Vec<UnroutedTopic>, StoreError> {
    let sql = format!(
        "select o.topic, count(*), ({NOW} - min(o.occurred_ms)) / 1000.0
           from (select topic, occurred_ms from postroom_outbox order by seq desc limit 10000) o
          where not exists (select 1 from postroom_routes r where {TAKES})
          group by o.topic order by 2 desc, 1 limit 20"
    );
    let topic =
        |row: &Row<'_>| Ok(UnroutedTopic { topic: text(row, 0)?, messages: row.get(1)?, oldest_seconds: row.get(2)? });
    connection
        .prepare(&sql)
        .and_then(|mut statement| statement.query_map([], topic)?.collect())
        .map_err(|error| store_error("look for topics that no route takes", error))
}

/// Whether the route `r` takes the topic of `o`; patterns are kept as a JSON array.
pub(crate) const TAKES: &str = "exists (
    select 1 from json_each(r.topics) t
     where o.topic = t.value
        or (substr(t.value, -1) = '*' and substr(o.topic, 1, length(t.value) - 1) = substr(t.value, 1, length(t.value) - 1)))";
