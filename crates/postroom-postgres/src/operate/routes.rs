//! What operators see and change of routes.

use postroom::{Deed, Forgotten, OnDead, Order, RouteChange, RouteSettings, ShownRoute, StoreError, TopicFilter};
use tokio_postgres::Row;

use crate::connect::Connector;
use crate::link::store_error;
use crate::operate::dead::audit;
use crate::operate::session::OperatorSession;
use crate::text::shown;

const READ: &str = "select r.name, r.topics, r.ordering, r.on_dead, r.revision::bigint, coalesce(v.set_by, ''),
                           coalesce(extract(epoch from clock_timestamp() - v.set_at), 0)::float8
                      from postroom.routes r
                      left join postroom.route_revisions v on v.route = r.name and v.revision = r.revision";

/// Routes that have run, by name.
pub(crate) async fn routes(connector: &Connector) -> Result<Vec<ShownRoute>, StoreError> {
    let failed = |error| store_error("read the routes", error);
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.look().await?;
    let rows = tx.query(&format!("{READ} order by r.name"), &[]).await.map_err(failed)?;
    rows.iter()
        .map(|row| {
            let last = (row.try_get(4)?, shown(row, 5)?, row.try_get(6)?);
            Ok(ShownRoute::new(shown(row, 0)?, &settings(row)?, last))
        })
        .collect::<Result<_, _>>()
        .map_err(failed)
}

/// Gives a route other settings, with an audit row in the same transaction; every relay has them with its next read. Returns
/// what the route is then; none: there is no such route.
pub(crate) async fn set_route(
    connector: &Connector,
    route: &str,
    change: &RouteChange,
    deed: &Deed,
) -> Result<Option<RouteSettings>, StoreError> {
    let failed = |error| store_error("change a route; nothing was changed", error);
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.deed().await?;
    let sql = format!("{READ} where r.name = $1 for no key update of r");
    let Some(row) = tx.query_opt(&sql, &[&route]).await.map_err(failed)? else { return Ok(None) };
    let now = change.of(&settings(&row).map_err(failed)?);
    let (order, on_dead) = (now.order.map(|order| order.as_str()), now.on_dead.map(|on_dead| on_dead.as_str()));
    let topics = now.topics.patterns();
    tx.execute("select postroom.change_route($1, $2, $3, $4, $5)", &[&route, &topics, &order, &on_dead, &deed.actor])
        .await
        .map_err(failed)?;
    let noted = serde_json::json!({ "route": route, "topics": topics, "order": order, "on_dead": on_dead }).to_string();
    audit(&tx, deed, "route.set", &noted, &[]).await.map_err(failed)?;
    tx.commit().await.map_err(failed)?;
    Ok(Some(now))
}

/// Removes a route that is gone for good. Returns what it had; none: there is no such route.
pub(crate) async fn forget_route(
    connector: &Connector,
    route: &str,
    discard: bool,
    deed: &Deed,
) -> Result<Option<Forgotten>, StoreError> {
    let failed = |error| store_error("forget a route; nothing was changed", error);
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.deed().await?;
    let sql = "select unread, unread_is_bound, parked, dead, relays, done from postroom.forget_route($1, $2, $3, $4)";
    let row = tx.query_opt(sql, &[&route, &discard, &deed.actor, &deed.reason]).await.map_err(failed)?;
    let forgotten = row
        .map(|row| {
            Ok(Forgotten {
                unread: row.try_get(0)?,
                unread_is_bound: row.try_get(1)?,
                parked: row.try_get(2)?,
                dead: row.try_get(3)?,
                relays: row.try_get(4)?,
                done: row.try_get(5)?,
            })
        })
        .transpose()
        .map_err(failed)?;
    tx.commit().await.map_err(failed)?;
    Ok(forgotten)
}

fn settings(row: &Row) -> Result<RouteSettings, tokio_postgres::Error> {
    Ok(RouteSettings {
        topics: TopicFilter::new(row.try_get::<_, Vec<String>>(1)?).unwrap_or_else(|_| TopicFilter::all()),
        order: row.try_get::<_, Option<&str>>(2)?.and_then(Order::of),
        on_dead: row.try_get::<_, Option<&str>>(3)?.and_then(OnDead::of),
    })
}
