//! One message's life, for an operator who asks why it has not arrived.

use postroom::{MessageId, ParkedState, Place, TopicFilter, Whereabouts, attempts_of, lasting};
use tiberius::error::Error;

use crate::conn::Conn;
use crate::desk::Failed;
use crate::operate::hash;
use crate::routes;
use crate::sql::{NOW, get, named, seconds_since, seconds_until};

/// Messages before it in its lane that are counted.
const BEFORE_MAX: i64 = 100_000;

/// What is known of the message itself. One that left the outbox may wait, or be dead.
struct Found {
    seq: i64,
    lane: i64,
    in_outbox: bool,
    /// None: no relay has seen it yet.
    place: Option<i64>,
    topic: String,
    key: Option<String>,
}

/// Whether it was put back from the archive.
async fn came_back(conn: &mut Conn, seq: i64, id: &str) -> Result<bool, Error> {
    let sql = "select 1 from postroom_archive_restored where seq = @seq and id = @id";
    let found: Option<i64> = conn.first(sql, named! { "seq" => seq, "id" => id }).await?;
    Ok(found.is_some())
}

/// Where a message is on every route that has run.
pub(crate) async fn whereabouts(conn: &mut Conn, id: MessageId) -> Result<Vec<Whereabouts>, Failed> {
    let id = id.to_string();
    let Some(found) = find(conn, &id).await? else { return Ok(Vec::new()) };
    let mut places = Vec::new();
    for (route, settings) in routes::all(conn).await? {
        let sql = "select topics from postroom_route_revisions where route = @route";
        let revisions: Vec<String> = conn.query(sql, named! { "route" => &route }).await?;
        let took = |topics: &String| {
            let patterns: Vec<String> = serde_json::from_str(topics).unwrap_or_default();
            TopicFilter::new(patterns).is_ok_and(|topics| topics.takes(&found.topic))
        };
        let takes = settings.topics.takes(&found.topic);
        // It is not known what was done with it if the route took its topic at one time and not at another.
        let took = revisions.iter().any(took) && (!takes || !revisions.iter().all(took));
        places.push(whereabouts_on(conn, &id, &found, route, takes, took).await?);
    }
    Ok(places)
}

async fn find(conn: &mut Conn, id: &str) -> Result<Option<Found>, Error> {
    for (table, place) in [("outbox", "place"), ("parked", "0"), ("dead_letters", "0")] {
        let sql = format!(
            "select top (1) seq, lane, {place} as place, topic, coalesce([key], aggregate_id) as ordering_key from postroom_{table} where id = @id"
        );
        let rows = conn.rows(&sql, named! { "id" => id }).await?;
        let Some(row) = rows.first() else { continue };
        return Ok(Some(Found {
            seq: get(row, "seq")?,
            lane: get(row, "lane")?,
            in_outbox: table == "outbox",
            place: get(row, "place")?,
            topic: get(row, "topic")?,
            key: get(row, "ordering_key")?,
        }));
    }
    Ok(None)
}

async fn whereabouts_on(
    conn: &mut Conn,
    id: &str,
    found: &Found,
    route: String,
    takes: bool,
    took: bool,
) -> Result<Whereabouts, Error> {
    let key_hash = hash("convert(nvarchar(512), @key)");
    let sql = format!(
        "select l.position, case when l.expires_at > {NOW} then l.owner end as owner,
                p.state, p.attempts, p.last_error, p.history, {} as due_in,
                d.attempts as dead_attempts, d.cause, d.error, d.history as dead_history,
                (select top (1) b.reason from postroom_blocked_keys b where b.route = l.route and b.key_hash = {key_hash}) as blocked,
                (select top (1) h.id from postroom_parked h where h.route = l.route and h.key_hash = {key_hash}
                    and h.state <> 'scheduled' and h.seq < @seq order by h.seq) as behind,
                y.sink_error, y.sink_blocked, {} as down_for
           from postroom_lanes l
           left join postroom_relays y on y.route = l.route and y.owner = l.owner
           left join postroom_parked p on p.route = l.route and p.seq = @seq and p.id = @id
           left join postroom_dead_letters d on d.route = l.route and d.seq = @seq and d.id = @id
          where l.route = @route and l.lane = @lane",
        seconds_until("p.due_at"),
        seconds_since("y.sink_down_since")
    );
    let parameters = named! {
        "route" => &route, "lane" => found.lane, "key" => found.key.as_ref(), "seq" => found.seq, "id" => id
    };
    let key = found.key.clone();
    let rows = conn.rows(&sql, parameters).await?;
    let Some(row) = rows.first() else {
        let because = vec!["the route has no lanes: start a relay with `postroom run`".to_owned()];
        return Ok(Whereabouts { route, state: Place::Waiting, key, attempts: 0, because, history: Vec::new() });
    };
    let position: i64 = get(row, "position")?;
    let passed = found.place.is_some_and(|place| place <= position);
    let blocked: Option<String> = get(row, "blocked")?;
    let owner: Option<String> = get(row, "owner")?;
    let mut because = Vec::new();
    let (mut attempts, mut history) = (0, Vec::new());
    let read = |text: Option<String>| serde_json::from_str(&text.unwrap_or_default()).unwrap_or_default();
    let discarded = discarded(conn, id, &route).await?;
    let state = if let Some(cause) = get::<Option<String>>(row, "cause")? {
        (attempts, history) = (get(row, "dead_attempts")?, read(get(row, "dead_history")?));
        because.push(format!("{cause} after {}: {}", attempts_of(attempts), get::<String>(row, "error")?));
        because.push("`postroom dead retry` sends it again, `postroom dead discard` deletes it".to_owned());
        Place::Dead
    } else if let Some(parked) = get::<Option<String>>(row, "state")? {
        (attempts, history) = (get(row, "attempts")?, read(get(row, "history")?));
        match get::<Option<String>>(row, "behind")? {
            Some(head) => because.push(format!("it waits behind message {head} of its key")),
            None => because
                .push(format!("it is due in {}", lasting(get::<Option<f64>>(row, "due_in")?.unwrap_or_default()))),
        }
        because.extend(get::<Option<String>>(row, "last_error")?.map(|error| format!("its last error: {error}")));
        match ParkedState::of(&parked) {
            _ if blocked.is_some() => Place::Blocked,
            Some(ParkedState::Scheduled) => Place::Scheduled,
            Some(ParkedState::Queued) => Place::Queued,
            Some(ParkedState::Retry) | None => Place::Retry,
        }
    } else if let Discarded::Here(by) = &discarded {
        because.push(format!("it was dead, and an operator discarded it ({by})"));
        Place::Discarded
    } else if !found.in_outbox {
        because.push("it is not in the outbox any more; nothing here tells what this route did with it".to_owned());
        Place::Passed
    } else if passed && took {
        because.push(
            "the route has passed it: the broker confirmed it, or the route did not take its topic at that time \
             (postroom_route_revisions has the dates)"
                .to_owned(),
        );
        Place::Passed
    } else if !takes {
        because.push("the route does not take its topic".to_owned());
        Place::NotTaken
    } else if passed && came_back(conn, found.seq, id).await? {
        because.push(postroom::CAME_BACK.to_owned());
        Place::Passed
    } else if passed && matches!(discarded, Discarded::Somewhere) {
        because.push(
            "the broker confirmed it, or it was dead on this route and an operator discarded it (see the audit table)"
                .to_owned(),
        );
        Place::Passed
    } else if passed {
        because.push("the broker confirmed it".to_owned());
        Place::Acked
    } else {
        because.push(match before(conn, found, position).await? {
            0 if owner.is_some() => "it is the next message, or its relay has already claimed it".to_owned(),
            0 => "it is the next message of its lane".to_owned(),
            1 => "1 message is before it in its lane".to_owned(),
            before => format!("{before} messages are before it in its lane"),
        });
        Place::Waiting
    };
    if matches!(state, Place::Waiting | Place::Retry | Place::Queued | Place::Scheduled | Place::Blocked) {
        because.extend(blocked.map(|reason| {
            format!("its key is blocked ({reason}); `postroom keys list` shows it, `keys unpark` or `keys skip` lets it continue")
        }));
        because.push(match &owner {
            Some(owner) => format!("relay {owner} holds its lane"),
            None => "no relay holds its lane: start one with `postroom run`".to_owned(),
        });
        if let (Some(error), Some(_)) = (get::<Option<String>>(row, "sink_error")?, &owner) {
            let accepts = get::<Option<bool>>(row, "sink_blocked")? == Some(true);
            let what = if accepts { "has accepted nothing" } else { "has been down" };
            let since = get::<Option<f64>>(row, "down_for")?.unwrap_or_default();
            because.push(format!("that relay's sink {what} for {}: {error}", lasting(since)));
        }
    }
    Ok(Whereabouts { route, state, key, attempts, because, history })
}

async fn before(conn: &mut Conn, found: &Found, position: i64) -> Result<i64, Error> {
    // One without a place comes after all that have one.
    let sql = format!(
        "select count_big(*) from (
             select top ({BEFORE_MAX}) 1 as one from postroom_outbox o
              where o.lane = convert(smallint, @lane) and o.place > @position and (@place is null or o.place < @place)) x"
    );
    let parameters = named! { "lane" => found.lane, "position" => position, "place" => found.place };
    let placed: i64 = conn.first(&sql, parameters).await?.unwrap_or_default();
    if found.place.is_some() {
        return Ok(placed);
    }
    let sql = format!(
        "select count_big(*) from (
             select top ({BEFORE_MAX}) 1 as one from postroom_outbox o
              where o.lane = convert(smallint, @lane) and o.place is null and o.seq < @seq) x"
    );
    let fresh: i64 = conn.first(&sql, named! { "lane" => found.lane, "seq" => found.seq }).await?.unwrap_or_default();
    Ok(placed + fresh)
}

/// Whether an operator deleted it as a dead letter.
enum Discarded {
    No,
    /// Of this route: who, and why.
    Here(String),
    /// Of a route that the audit does not name.
    Somewhere,
}

async fn discarded(conn: &mut Conn, id: &str, route: &str) -> Result<Discarded, Error> {
    let sql = "select top (100) concat(a.actor, N': ', a.reason), json_value(a.filter, N'$.route'),
                      (select count_big(*) from postroom_routes r where r.name <> @route)
                 from postroom_audit a
                where a.action = 'dead.discard' and charindex(@id, a.message_ids) > 0 order by a.id desc";
    let parameters = named! { "route" => route, "id" => format!("\"{id}\"") };
    let rows: Vec<(String, Option<String>, i64)> = conn.query(sql, parameters).await?;
    let mut somewhere = false;
    for (by, of, others) in rows {
        match of {
            Some(of) if of == route => return Ok(Discarded::Here(by)),
            Some(_) => {}
            None if others == 0 => return Ok(Discarded::Here(by)),
            None => somewhere = true,
        }
    }
    Ok(if somewhere { Discarded::Somewhere } else { Discarded::No })
}
