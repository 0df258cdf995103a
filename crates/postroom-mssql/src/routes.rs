//! What a route is: topics, order and what becomes of a key whose message is dead. The database has the say, not the relay that happens
//! to run.

use postroom::{OnDead, Order, RouteSettings, TopicFilter};
use tiberius::error::Error;

use crate::conn::Conn;
use crate::sql::{Named, named};

/// Registers a route or adds to it what a relay was started with; returns what the route is now. In a transaction.
pub(crate) async fn register(
    tx: &mut Conn,
    route: &str,
    given: &RouteSettings,
    owner: &str,
) -> Result<RouteSettings, Error> {
    let now = match read(tx, route, LOCKED).await? {
        Some(known) => {
            let merged = known.with(given);
            if merged == known {
                return Ok(known);
            }
            merged
        }
        None => given.clone(),
    };
    change(tx, route, &now, owner).await?;
    Ok(now)
}

/// What a route is; none: it never ran.
pub(crate) async fn settings(conn: &mut Conn, route: &str) -> Result<Option<RouteSettings>, Error> {
    read(conn, route, "").await
}

/// What a route is, which stays so until the transaction ends; none: it never ran.
pub(crate) async fn locked(tx: &mut Conn, route: &str) -> Result<Option<RouteSettings>, Error> {
    read(tx, route, LOCKED).await
}

/// All routes that have run, by name.
pub(crate) async fn all(conn: &mut Conn) -> Result<Vec<(String, RouteSettings)>, Error> {
    let names: Vec<String> = conn.query("select name from postroom_routes order by name", named! {}).await?;
    let mut all = Vec::with_capacity(names.len());
    for name in names {
        if let Some(settings) = settings(conn, &name).await? {
            all.push((name, settings));
        }
    }
    Ok(all)
}

/// The condition that the topic of `o` is one of these, whose parameters are added with this prefix. A mark at the end keeps the server from
/// comparing without trailing spaces; it counts characters in units of UTF-16.
pub(crate) fn takes(topics: &TopicFilter, prefix: &str, parameters: &mut Named) -> String {
    if topics.patterns().iter().any(|pattern| pattern == "*") {
        return "1 = 1".to_owned();
    }
    let mut any = Vec::new();
    for (index, pattern) in topics.patterns().iter().enumerate() {
        let name = format!("{prefix}_{index}");
        let text = pattern.strip_suffix('*');
        any.push(match text {
            Some(start) => format!("concat(left(o.topic, {}), N'|') = @{name}", start.encode_utf16().count()),
            None => format!("concat(o.topic, N'|') = @{name}"),
        });
        parameters.push((name.into(), format!("{}|", text.unwrap_or(pattern)).into()));
    }
    if any.is_empty() { "1 = 0".to_owned() } else { format!("({})", any.join(" or ")) }
}

/// Keeps a row as it is until the transaction ends, or that there is none.
const LOCKED: &str = "with (updlock, holdlock, rowlock)";

async fn read(conn: &mut Conn, route: &str, hint: &str) -> Result<Option<RouteSettings>, Error> {
    let sql = format!("select topics, ordering, on_dead from postroom_routes {hint} where name = @route");
    let row: Option<(String, Option<String>, Option<String>)> = conn.first(&sql, named! { "route" => route }).await?;
    Ok(row.map(|(topics, order, on_dead)| {
        let patterns: Vec<String> = serde_json::from_str(&topics).unwrap_or_default();
        RouteSettings {
            // What cannot be read takes everything rather than pass a message by.
            topics: TopicFilter::new(patterns).unwrap_or_else(|_| TopicFilter::all()),
            order: order.as_deref().and_then(Order::of),
            on_dead: on_dead.as_deref().and_then(OnDead::of),
        }
    }))
}

/// Gives a route these settings and keeps the change.
pub(crate) async fn change(tx: &mut Conn, route: &str, now: &RouteSettings, set_by: &str) -> Result<(), Error> {
    let topics = serde_json::to_string(now.topics.patterns()).unwrap_or_default();
    let (order, on_dead) = (now.order.map(|order| order.as_str()), now.on_dead.map(|on_dead| on_dead.as_str()));
    let parameters =
        named! { "route" => route, "topics" => topics, "order" => order, "on_dead" => on_dead, "set_by" => set_by };
    let sql = "update postroom_routes with (updlock, holdlock)
                  set topics = @topics, ordering = @order, on_dead = @on_dead, revision = revision + 1
                where name = @route";
    if tx.exec(sql, parameters.clone()).await? == 0 {
        let sql =
            "insert into postroom_routes (name, topics, ordering, on_dead) values (@route, @topics, @order, @on_dead)";
        tx.exec(sql, parameters.clone()).await?;
    }
    // A route that was forgotten and begins again has its first revisions still.
    let sql = "delete v from postroom_route_revisions v join postroom_routes r on r.name = v.route and r.revision = v.revision
                where v.route = @route";
    tx.exec(sql, parameters.clone()).await?;
    let sql = "insert into postroom_route_revisions (route, revision, topics, ordering, on_dead, set_by)
               select name, revision, topics, ordering, on_dead, @set_by from postroom_routes where name = @route";
    tx.exec(sql, parameters).await.map(drop)
}
