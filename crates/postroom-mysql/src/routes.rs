//! What a route is: topics, order and what becomes of a key whose message is dead. The database has the say, not the relay that happens
//! to run.

use mysql_async::prelude::Queryable;
use mysql_async::{Error, Row, Value};
use postroom::{OnDead, Order, RouteSettings, TopicFilter};

/// Registers a route or adds to it what a relay was started with; returns what the route is now. In a transaction.
pub(crate) async fn register(
    tx: &mut impl Queryable,
    route: &str,
    given: &RouteSettings,
    owner: &str,
) -> Result<RouteSettings, Error> {
    let now = match read(tx, route, "for update").await? {
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
pub(crate) async fn settings(conn: &mut impl Queryable, route: &str) -> Result<Option<RouteSettings>, Error> {
    read(conn, route, "").await
}

async fn read(conn: &mut impl Queryable, route: &str, locked: &str) -> Result<Option<RouteSettings>, Error> {
    let sql = format!("select topics, ordering, on_dead from postroom_routes where name = ? {locked}");
    let row: Option<Row> = conn.exec_first(sql, (route,)).await?;
    Ok(row.map(|mut row| {
        let mut text = |column| row.take::<Option<String>, _>(column).flatten();
        let patterns: Vec<String> = text(0).and_then(|topics| serde_json::from_str(&topics).ok()).unwrap_or_default();
        RouteSettings {
            // What cannot be read takes everything rather than pass a message by.
            topics: TopicFilter::new(patterns).unwrap_or_else(|_| TopicFilter::all()),
            order: text(1).as_deref().and_then(Order::of),
            on_dead: text(2).as_deref().and_then(OnDead::of),
        }
    }))
}

/// What a route is, which stays so until the transaction ends; none: it never ran.
pub(crate) async fn locked(tx: &mut impl Queryable, route: &str) -> Result<Option<RouteSettings>, Error> {
    read(tx, route, "for update").await
}

/// All routes that have run, by name.
pub(crate) async fn all(conn: &mut impl Queryable) -> Result<Vec<(String, RouteSettings)>, Error> {
    let names: Vec<String> = conn.query("select name from postroom_routes order by name").await?;
    let mut all = Vec::with_capacity(names.len());
    for name in names {
        if let Some(settings) = settings(conn, &name).await? {
            all.push((name, settings));
        }
    }
    Ok(all)
}

/// Named parameters of a statement.
pub(crate) type Named = Vec<(String, Value)>;

/// The condition that the topic of `o` is one of these, whose parameters are added with this prefix.
pub(crate) fn takes(topics: &TopicFilter, prefix: &str, parameters: &mut Named) -> String {
    if topics.patterns().iter().any(|pattern| pattern == "*") {
        return "true".to_owned();
    }
    let mut any = Vec::new();
    for (index, pattern) in topics.patterns().iter().enumerate() {
        let name = format!("{prefix}_{index}");
        match pattern.strip_suffix('*') {
            Some(start) => {
                any.push(format!("left(o.topic, {}) = :{name}", start.chars().count()));
                parameters.push((name, start.into()));
            }
            None => {
                any.push(format!("o.topic = :{name}"));
                parameters.push((name, pattern.into()));
            }
        }
    }
    if any.is_empty() { "false".to_owned() } else { format!("({})", any.join(" or ")) }
}

/// Gives a route these settings and keeps the change.
pub(crate) async fn change(
    tx: &mut impl Queryable,
    route: &str,
    now: &RouteSettings,
    set_by: &str,
) -> Result<(), Error> {
    let topics = serde_json::to_string(now.topics.patterns()).unwrap_or_default();
    let (order, on_dead) = (now.order.map(|order| order.as_str()), now.on_dead.map(|on_dead| on_dead.as_str()));
    let sql = "insert into postroom_routes (name, topics, ordering, on_dead) values (?, ?, ?, ?)
               on duplicate key update topics = values(topics), ordering = values(ordering), on_dead = values(on_dead),
                   revision = revision + 1";
    tx.exec_drop(sql, (route, topics, order, on_dead)).await?;
    let sql = "insert into postroom_route_revisions (route, revision, topics, ordering, on_dead, set_by)
               select name, revision, topics, ordering, on_dead, ? from postroom_routes where name = ?
               on duplicate key update topics = values(topics), ordering = values(ordering), on_dead = values(on_dead),
                   set_by = values(set_by)";
    tx.exec_drop(sql, (set_by, route)).await
}
