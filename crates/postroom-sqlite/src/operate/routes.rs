//! What a route is: topics, order and what becomes of a key whose message is dead. The file has the say, not the relay that
//! happens to run.

use postroom::{Deed, Forgotten, OnDead, Order, RouteChange, RouteSettings, ShownRoute, StoreError, TopicFilter};
use rusqlite::{Connection, OptionalExtension, Transaction, TransactionBehavior, params};

use crate::connect::NOW;
use crate::connect::store_error;
use crate::operate::dead::audit;
use crate::operate::status::TAKES;

/// Registers a route or adds to it what a relay was started with; returns what the route is now.
pub(crate) fn register(
    tx: &Transaction<'_>,
    route: &str,
    given: &RouteSettings,
    owner: &str,
) -> Result<RouteSettings, rusqlite::Error> {
    let now = match settings(tx, route)? {
        Some(known) => {
            let merged = known.with(given);
            if merged == known {
                return Ok(known);
            }
            merged
        }
        None => given.clone(),
    };
    change(tx, route, &now, owner)?;
    Ok(now)
}

/// What a route is; none: it never ran.
pub(crate) fn settings(connection: &Connection, route: &str) -> Result<Option<RouteSettings>, rusqlite::Error> {
    let sql = "select topics, ordering, on_dead from postroom_routes where name = ?1";
    let read = |row: &rusqlite::Row<'_>| {
        let topics: String = row.get(0)?;
        let patterns: Vec<String> = serde_json::from_str(&topics).unwrap_or_default();
        Ok(RouteSettings {
            // What cannot be read takes everything rather than pass a message by.
            topics: TopicFilter::new(patterns).unwrap_or_else(|_| TopicFilter::all()),
            order: row.get::<_, Option<String>>(1)?.as_deref().and_then(Order::of),
            on_dead: row.get::<_, Option<String>>(2)?.as_deref().and_then(OnDead::of),
        })
    };
    connection.prepare_cached(sql)?.query_row([route], read).optional()
}

/// Gives a route these settings and keeps the change.
pub(crate) fn change(
    tx: &Transaction<'_>,
    route: &str,
    now: &RouteSettings,
    set_by: &str,
) -> Result<(), rusqlite::Error> {
    let topics = serde_json::to_string(now.topics.patterns()).unwrap_or_default();
    let (order, on_dead) = (now.order.map(|order| order.as_str()), now.on_dead.map(|on_dead| on_dead.as_str()));
    let sql = "insert into postroom_routes (name, topics, ordering, on_dead) values (?1, ?2, ?3, ?4)
               on conflict (name) do update set topics = excluded.topics, ordering = excluded.ordering,
                   on_dead = excluded.on_dead, revision = revision + 1";
    tx.execute(sql, params![route, topics, order, on_dead])?;
    let sql = "insert into postroom_route_revisions (route, revision, topics, ordering, on_dead, set_by)
               select name, revision, topics, ordering, on_dead, ?2 from postroom_routes where name = ?1
               on conflict (route, revision) do update set topics = excluded.topics, ordering = excluded.ordering,
                   on_dead = excluded.on_dead, set_by = excluded.set_by";
    tx.execute(sql, params![route, set_by]).map(drop)
}

/// Routes that have run, by name.
pub(crate) fn routes(connection: &Connection) -> Result<Vec<ShownRoute>, StoreError> {
    let failed = |error| store_error("read the routes", error);
    let sql = format!(
        "select r.name, r.revision, coalesce(v.set_by, ''), coalesce(({NOW} - v.set_ms) / 1000.0, 0.0)
           from postroom_routes r
           left join postroom_route_revisions v on v.route = r.name and v.revision = r.revision order by r.name"
    );
    let rows: Vec<(String, (i64, String, f64))> = connection
        .prepare(&sql)
        .and_then(|mut statement| {
            statement.query_map([], |row| Ok((row.get(0)?, (row.get(1)?, row.get(2)?, row.get(3)?))))?.collect()
        })
        .map_err(failed)?;
    let mut shown = Vec::new();
    for (route, last) in rows {
        if let Some(settings) = settings(connection, &route).map_err(failed)? {
            shown.push(ShownRoute::new(route, &settings, last));
        }
    }
    Ok(shown)
}

/// Gives a route other settings, with an audit row in the same transaction; the relay has them with its next read. Returns
/// what the route is then; none: there is no such route.
pub(crate) fn set_route(
    connection: &mut Connection,
    route: &str,
    wanted: &RouteChange,
    deed: &Deed,
) -> Result<Option<RouteSettings>, StoreError> {
    let failed = |error| store_error("change a route; nothing was changed", error);
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(failed)?;
    let Some(before) = settings(&tx, route).map_err(failed)? else { return Ok(None) };
    let now = wanted.of(&before);
    change(&tx, route, &now, &deed.actor).map_err(failed)?;
    let noted = serde_json::json!({
        "route": route, "topics": now.topics.patterns(), "order": now.order.map(|order| order.as_str()),
        "on_dead": now.on_dead.map(|on_dead| on_dead.as_str()),
    });
    let sql = "insert into postroom_audit (actor, action, reason, filter, message_ids)
               values (?1, 'route.set', ?2, ?3, '[]')";
    tx.execute(sql, params![deed.actor, deed.reason, noted.to_string()]).map_err(failed)?;
    tx.commit().map_err(failed)?;
    Ok(Some(now))
}

/// Removes a route that is gone for good, with an audit row in the same transaction. Refused while a relay runs it, and without
/// `discard` while it has unsent or dead messages. Returns what it had; none: there is no such route.
pub(crate) fn forget_route(
    connection: &mut Connection,
    route: &str,
    discard: bool,
    deed: &Deed,
) -> Result<Option<Forgotten>, StoreError> {
    let failed = |error| store_error("forget a route; nothing was changed", error);
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(failed)?;
    if settings(&tx, route).map_err(failed)?.is_none() {
        return Ok(None);
    }
    let sql = format!(
        "select (select count(*) from postroom_routes r join postroom_lanes l on l.route = r.name
                   join postroom_outbox o on o.seq > l.position_seq where r.name = ?1 and {TAKES}),
                (select count(*) from postroom_parked p where p.route = ?1),
                (select count(*) from postroom_dead_letters d where d.route = ?1),
                (select count(*) from postroom_relays y where y.route = ?1 and y.expires_ms > {NOW})"
    );
    let (unread, parked, dead, relays): (i64, i64, i64, i64) =
        tx.query_row(&sql, [route], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?))).map_err(failed)?;
    let done = relays == 0 && (discard || unread + parked + dead == 0);
    if done {
        let mut ids: Vec<String> = Vec::new();
        for table in ["postroom_parked", "postroom_dead_letters"] {
            let sql = format!("select id from {table} where route = ?1");
            let mut statement = tx.prepare(&sql).map_err(failed)?;
            let found = statement.query_map([route], |row| row.get(0)).map_err(failed)?;
            ids.extend(found.collect::<Result<Vec<String>, _>>().map_err(failed)?);
        }
        let noted = serde_json::json!({ "route": route, "unread": unread }).to_string();
        audit(&tx, deed, "route.forget", &noted, &ids.iter().map(String::as_str).collect::<Vec<_>>())
            .map_err(failed)?;
        for table in ["blocked_keys", "parked", "dead_letters", "relays", "lanes", "route_revisions"] {
            tx.execute(&format!("delete from postroom_{table} where route = ?1"), [route]).map_err(failed)?;
        }
        tx.execute("delete from postroom_routes where name = ?1", [route]).map_err(failed)?;
    }
    tx.commit().map_err(failed)?;
    Ok(Some(Forgotten { unread, unread_is_bound: false, parked, dead, relays, done }))
}
