//! What became of the messages of rows that were taken.

use std::collections::HashMap;

use mysql_async::prelude::Queryable;
use mysql_async::{Params, Row, Transaction, Value};
use postroom::{Intake, OnRoute, RowFate, TopicFilter};

use crate::desk::Failed;
use crate::log::get;
use crate::routes;

/// A row, and what became of its message.
pub(super) struct Taken {
    pub place: i64,
    pub row: String,
    pub was_dead: bool,
    pub fate: RowFate,
}

/// One as it is stored.
struct Stored {
    place: i64,
    row: String,
    id: String,
    was_dead: bool,
    at_us: i64,
    /// None: it is not in the outbox.
    message: Option<InOutbox>,
}

struct InOutbox {
    lane: i64,
    /// None: no relay has seen it yet.
    place: Option<i64>,
    topic: String,
}

/// A route, and until when it did not take which topics.
struct Known {
    name: String,
    topics: TopicFilter,
    former: Vec<(TopicFilter, i64)>,
}

/// Looks at up to `max` rows behind `after`.
pub(super) async fn of(
    tx: &mut Transaction<'_>,
    intake: &Intake,
    after: i64,
    max: usize,
) -> Result<Vec<Taken>, Failed> {
    // Before everything else: what a position has passed was parked or buried before, and is seen by what is read afterwards.
    let sql = "select route, lane, position from postroom_lanes";
    let lanes: Vec<(String, i64, i64)> = tx.query(sql).await?;
    let lanes: HashMap<(String, i64), i64> =
        lanes.into_iter().map(|(route, lane, position)| ((route, lane), position)).collect();
    let sql =
        "select b.place as at_place, b.row_key, b.id, b.state, timestampdiff(microsecond, '1970-01-01', b.at) as at_us,
                      o.seq, o.lane, o.place, o.topic
                 from postroom_intake_rows b left join postroom_outbox o on o.id = b.id
                where b.intake = ? and b.state in ('taken', 'dead') and b.place > ? order by b.place limit ?";
    let mut stored = Vec::new();
    for mut row in tx.exec::<Row, _, _>(sql, (&intake.name, after, max as u64)).await? {
        let row = &mut row;
        let message = match get::<Option<i64>>(row, "seq")? {
            None => None,
            Some(_) => Some(InOutbox { lane: get(row, "lane")?, place: get(row, "place")?, topic: get(row, "topic")? }),
        };
        stored.push(Stored {
            place: get(row, "at_place")?,
            row: get(row, "row_key")?,
            id: get::<Option<String>>(row, "id")?.unwrap_or_default(),
            was_dead: get::<String>(row, "state")? == "dead",
            at_us: get(row, "at_us")?,
            message,
        });
    }
    let (Some(first), Some(last)) = (stored.first().map(|row| row.place), stored.last().map(|row| row.place)) else {
        return Ok(Vec::new());
    };
    let between = (intake.name.as_str(), first, last);
    let sql = "select r.name, b.id, p.id is not null, d.error
                 from postroom_intake_rows b
                 join postroom_routes r on true
                 left join postroom_parked p on p.route = r.name and p.seq = b.seq and p.id = b.id
                 left join postroom_dead_letters d on d.route = r.name and d.seq = b.seq and d.id = b.id
                where b.intake = ? and b.place between ? and ? and b.state in ('taken', 'dead') and (p.id is not null or d.id is not null)";
    let waiting: Vec<(String, String, bool, Option<String>)> = tx.exec(sql, between).await?;
    let waiting: HashMap<(String, String), (bool, Option<String>)> =
        waiting.into_iter().map(|(route, id, parked, dead)| ((route, id), (parked, dead))).collect();
    let routes = known_routes(tx).await?;
    let discarded = discarded(tx, &stored).await?;
    let taken = stored.into_iter().map(|stored| {
        let of_id = |route: &str| waiting.get(&(route.to_owned(), stored.id.clone()));
        let on_route = |route: &Known| {
            let (parked, dead) = of_id(&route.name).cloned().unwrap_or_default();
            let takes = stored.message.as_ref().is_some_and(|message| route.topics.takes(&message.topic));
            // One that waits or is dead is the route's, whatever it takes now.
            (takes || parked || dead.is_some()).then(|| OnRoute {
                passed: stored.message.as_ref().is_none_or(|message| {
                    let position = lanes.get(&(route.name.clone(), message.lane));
                    message.place.zip(position).is_some_and(|(place, position)| place <= *position)
                }),
                parked,
                dead,
                unsure: stored.message.as_ref().is_some_and(|message| {
                    let lacked =
                        |(topics, until): &(TopicFilter, i64)| *until >= stored.at_us && !topics.takes(&message.topic);
                    route.former.iter().any(lacked)
                }),
            })
        };
        let on: Vec<OnRoute> = routes.iter().filter_map(on_route).collect();
        let waits = on.iter().any(|route| route.parked);
        let fate = match RowFate::of(stored.message.is_some(), &on, discarded.get(&stored.id).cloned()) {
            // Its copy waits, though the outbox has it no more.
            RowFate::Unclear if waits => RowFate::Waits,
            fate => fate,
        };
        Taken { place: stored.place, row: stored.row, was_dead: stored.was_dead, fate }
    });
    Ok(taken.collect())
}

async fn known_routes(tx: &mut Transaction<'_>) -> Result<Vec<Known>, Failed> {
    let sql = "select v.route, v.topics, timestampdiff(microsecond, '1970-01-01', n.set_at)
                 from postroom_route_revisions v
                 join postroom_route_revisions n on n.route = v.route and n.revision = v.revision + 1";
    let revisions: Vec<(String, String, i64)> = tx.query(sql).await?;
    let routes = routes::all(tx).await?.into_iter().map(|(name, settings)| {
        let former = revisions.iter().filter(|(route, ..)| *route == name).filter_map(|(_, topics, until)| {
            let patterns: Vec<String> = serde_json::from_str(topics).ok()?;
            Some((TopicFilter::new(patterns).ok()?, *until))
        });
        Known { former: former.collect(), topics: settings.topics, name }
    });
    Ok(routes.collect())
}

/// Who discarded which of these messages.
async fn discarded(tx: &mut Transaction<'_>, stored: &[Stored]) -> Result<HashMap<String, String>, Failed> {
    let since = stored.iter().map(|stored| stored.at_us).min().unwrap_or_default();
    let sql = "select concat(actor, ': ', reason), message_ids from postroom_audit
                where action in ('dead.discard', 'dead.expire') and at >= timestampadd(microsecond, ?, '1970-01-01')";
    let rows: Vec<(String, String)> = tx.exec(sql, Params::Positional(vec![Value::from(since)])).await?;
    let mut by_id = HashMap::new();
    for (by, ids) in rows {
        let ids: Vec<String> = serde_json::from_str(&ids).unwrap_or_default();
        by_id.extend(ids.into_iter().map(|id| (id, by.clone())));
    }
    by_id.retain(|id, _| stored.iter().any(|stored| stored.id == *id));
    Ok(by_id)
}
