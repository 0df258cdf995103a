//! What operators see of routes and do to them.

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Row};
use postroom::{Deed, Forgotten, RouteChange, RouteSettings, ShownRoute};

use crate::desk::{Failed, begin};
use crate::log::get;
use crate::operate::audit::audit;
use crate::operate::status::unread;
use crate::routes;

/// Routes that have run, by name.
pub(crate) async fn routes(conn: &mut Conn) -> Result<Vec<ShownRoute>, Failed> {
    let sql = "select r.name, r.revision, coalesce(v.set_by, '') as set_by,
                      coalesce(timestampdiff(microsecond, v.set_at, utc_timestamp(6)), 0) / 1e6 as set_ago
                 from postroom_routes r
                 left join postroom_route_revisions v on v.route = r.name and v.revision = r.revision order by r.name";
    let rows: Vec<Row> = conn.query(sql).await?;
    let mut shown = Vec::new();
    for mut row in rows {
        let row = &mut row;
        let route: String = get(row, "name")?;
        let last = (get(row, "revision")?, get(row, "set_by")?, get(row, "set_ago")?);
        if let Some(settings) = routes::settings(conn, &route).await? {
            shown.push(ShownRoute::new(route, &settings, last));
        }
    }
    Ok(shown)
}

/// Gives a route other settings, with an audit row in the same transaction; relays have them with their next read. Returns what the route
/// is then; none: there is no such route.
pub(crate) async fn set_route(
    conn: &mut Conn,
    route: &str,
    wanted: &RouteChange,
    deed: &Deed,
) -> Result<Option<RouteSettings>, Failed> {
    let mut tx = begin(conn).await?;
    let Some(before) = routes::locked(&mut tx, route).await? else { return Ok(None) };
    let now = wanted.of(&before);
    routes::change(&mut tx, route, &now, &deed.actor).await?;
    let noted = serde_json::json!({
        "route": route, "topics": now.topics.patterns(), "order": now.order.map(|order| order.as_str()),
        "on_dead": now.on_dead.map(|on_dead| on_dead.as_str()),
    });
    audit(&mut tx, deed, "route.set", &noted.to_string(), &[] as &[&str]).await?;
    tx.commit().await?;
    Ok(Some(now))
}

/// Removes a route that is gone for good, with an audit row in the same transaction. Refused while a relay runs it, and without
/// `discard` while it has unsent or dead messages. Returns what it had; none: there is no such route.
pub(crate) async fn forget_route(
    conn: &mut Conn,
    route: &str,
    discard: bool,
    deed: &Deed,
) -> Result<Option<Forgotten>, Failed> {
    let mut tx = begin(conn).await?;
    let Some(settings) = routes::locked(&mut tx, route).await? else { return Ok(None) };
    // A relay that takes lanes now waits, and finds them gone.
    let lanes = "select lane from postroom_lanes where route = ? order by lane for update";
    let _: Vec<i64> = tx.exec(lanes, (route,)).await?;
    let unread = unread(&mut tx, route, &settings).await?;
    let count = async |tx: &mut mysql_async::Transaction<'_>, sql: &str| -> Result<i64, mysql_async::Error> {
        Ok(tx.exec_first(sql, (route,)).await?.unwrap_or_default())
    };
    let parked = count(&mut tx, "select count(*) from postroom_parked where route = ?").await?;
    let dead = count(&mut tx, "select count(*) from postroom_dead_letters where route = ?").await?;
    let relays =
        count(&mut tx, "select count(*) from postroom_relays where route = ? and expires_at > utc_timestamp(6)")
            .await?;
    let done = relays == 0 && (discard || unread.messages + parked + dead == 0);
    if done {
        let mut ids: Vec<String> = Vec::new();
        for table in ["parked", "dead_letters"] {
            ids.extend(
                tx.exec::<String, _, _>(format!("select id from postroom_{table} where route = ?"), (route,)).await?,
            );
        }
        let noted = serde_json::json!({ "route": route, "unread": unread.messages }).to_string();
        audit(&mut tx, deed, "route.forget", &noted, &ids).await?;
        for table in ["blocked_keys", "parked", "dead_letters", "relays", "lanes", "route_revisions"] {
            tx.exec_drop(format!("delete from postroom_{table} where route = ?"), (route,)).await?;
        }
        tx.exec_drop("delete from postroom_routes where name = ?", (route,)).await?;
    }
    tx.commit().await?;
    Ok(Some(Forgotten { unread: unread.messages, unread_is_bound: unread.is_bound, parked, dead, relays, done }))
}
