//! What operators see of routes and do to them.

use postroom::{Deed, Forgotten, RouteChange, RouteSettings, ShownRoute};

use crate::conn::Conn;
use crate::desk::{Failed, begin};
use crate::operate::audit::audit;
use crate::operate::status::unread;
use crate::routes;
use crate::sql::{NOW, get, named, seconds_since};

/// Routes that have run, by name.
pub(crate) async fn routes(conn: &mut Conn) -> Result<Vec<ShownRoute>, Failed> {
    let sql = format!(
        "select r.name, r.revision, coalesce(v.set_by, N'') as set_by, coalesce({}, 0) as set_ago
           from postroom_routes r
           left join postroom_route_revisions v on v.route = r.name and v.revision = r.revision order by r.name",
        seconds_since("v.set_at")
    );
    let mut shown = Vec::new();
    for row in conn.rows(&sql, named! {}).await? {
        let route: String = get(&row, "name")?;
        let last = (get(&row, "revision")?, get(&row, "set_by")?, get(&row, "set_ago")?);
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
    let tx = begin(conn).await?;
    let Some(before) = routes::locked(tx, route).await? else { return Ok(None) };
    let now = wanted.of(&before);
    routes::change(tx, route, &now, &deed.actor).await?;
    let noted = serde_json::json!({
        "route": route, "topics": now.topics.patterns(), "order": now.order.map(|order| order.as_str()),
        "on_dead": now.on_dead.map(|on_dead| on_dead.as_str()),
    });
    audit(tx, deed, "route.set", &noted.to_string(), &[] as &[&str]).await?;
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
    let tx = begin(conn).await?;
    let Some(settings) = routes::locked(tx, route).await? else { return Ok(None) };
    // A relay that takes lanes now waits, and finds them gone.
    let lanes = "select lane from postroom_lanes with (updlock, holdlock) where route = @route order by lane";
    let _: Vec<i64> = tx.query(lanes, named! { "route" => route }).await?;
    let unread = unread(tx, route, &settings).await?;
    let count = async |tx: &mut Conn, of: &str| -> Result<i64, tiberius::error::Error> {
        let sql = format!("select count_big(*) from postroom_{of}");
        Ok(tx.first(&sql, named! { "route" => route }).await?.unwrap_or_default())
    };
    let parked = count(tx, "parked where route = @route").await?;
    let dead = count(tx, "dead_letters where route = @route").await?;
    let relays = count(tx, &format!("relays where route = @route and expires_at > {NOW}")).await?;
    let done = relays == 0 && (discard || unread.messages + parked + dead == 0);
    if done {
        let mut ids: Vec<String> = Vec::new();
        for table in ["parked", "dead_letters"] {
            let sql = format!("select id from postroom_{table} where route = @route");
            ids.extend(tx.query::<String>(&sql, named! { "route" => route }).await?);
        }
        let noted = serde_json::json!({ "route": route, "unread": unread.messages }).to_string();
        audit(tx, deed, "route.forget", &noted, &ids).await?;
        for table in ["blocked_keys", "parked", "dead_letters", "relays", "lanes", "route_revisions"] {
            tx.exec(&format!("delete from postroom_{table} where route = @route"), named! { "route" => route }).await?;
        }
        tx.exec("delete from postroom_routes where name = @route", named! { "route" => route }).await?;
    }
    tx.commit().await?;
    Ok(Some(Forgotten { unread: unread.messages, unread_is_bound: unread.is_bound, parked, dead, relays, done }))
}
