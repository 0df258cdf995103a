//! What `postroom status` shows of a SQLite store.

use postroom::{RouteStatus, StoreError, StoreStatus, UnroutedTopic};
use rusqlite::{Connection, Row};

use crate::connect::NOW;
use crate::connect::store_error;
use crate::migrate::version;

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
                coalesce(l.owner is not null and l.expires_ms > {NOW}, 0), l.owner
           from postroom_routes r join postroom_lanes l on l.route = r.name order by r.name"
    );
    let routes = connection
        .prepare(&sql)
        .and_then(|mut statement| {
            statement
                .query_map([], |row| {
                    let held: i64 = row.get(6)?;
                    let owner: Option<String> = row.get(7)?;
                    Ok(RouteStatus {
                        route: row.get(0)?,
                        backlog: row.get(1)?,
                        backlog_is_bound: false,
                        oldest_unsent_seconds: row.get(2)?,
                        oldest_unread_seconds: row.get(2)?,
                        parked: row.get(3)?,
                        parked_is_bound: false,
                        scheduled: row.get(4)?,
                        scheduled_is_bound: false,
                        dead: row.get(5)?,
                        dead_is_bound: false,
                        lanes: 1,
                        lanes_held: held,
                        relays: owner.filter(|_| held == 1).into_iter().collect(),
                        // A relay of this store keeps to itself how its sink stands.
                        sinks_down: Vec::new(),
                    })
                })?
                .collect::<Result<Vec<_>, _>>()
        })
        .map_err(failed)?;
    Ok(StoreStatus {
        store: "sqlite",
        schema_version: version(connection)?,
        outbox_rows: one("select count(*) from postroom_outbox")?,
        outbox_rows_is_bound: false,
        routes,
        unrouted: unrouted_topics(connection)?,
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
        |row: &Row<'_>| Ok(UnroutedTopic { topic: row.get(0)?, messages: row.get(1)?, oldest_seconds: row.get(2)? });
    connection
        .prepare(&sql)
        .and_then(|mut statement| statement.query_map([], topic)?.collect())
        .map_err(|error| store_error("look for topics that no route takes", error))
}

/// Whether the route `r` takes the topic of `o`; patterns are kept as a JSON array.
const TAKES: &str = "exists (
    select 1 from json_each(r.topics) t
     where o.topic = t.value
        or (substr(t.value, -1) = '*' and substr(o.topic, 1, length(t.value) - 1) = substr(t.value, 1, length(t.value) - 1)))";
