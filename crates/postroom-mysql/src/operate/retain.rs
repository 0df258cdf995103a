//! Removing what is finished and old.

use std::time::Duration;

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Error, Params, Row};
use postroom::{Deed, Expired, Part, Removed, Retention, StoreError, Sweep, TopicFilter, lasting};

use crate::desk::{Failed, begin};
use crate::log::{get, json};
use crate::operate::audit::audit;
use crate::operate::dead::COMES_BACK;
use crate::operate::keys::ago;
use crate::operate::prune::prune_step;
use crate::routes::{self, Named, takes};

/// Rows that one step looks at.
const STEP: i64 = 2_000;
const DAY: Duration = Duration::from_secs(24 * 3600);
const WHAT: &str = "remove what is finished and old";

/// One step of removing, in a transaction of its own; how far the sweep has come then is in it.
pub(crate) async fn retain_step(conn: &mut Conn, retention: &Retention, sweep: &mut Sweep) -> Result<Removed, Failed> {
    let mut removed = Removed::default();
    let Some(part) = sweep.parts.first().copied() else { return Ok(removed) };
    let deed = |age: Duration| Deed {
        actor: "retention".to_owned(),
        reason: format!("older than {}", lasting(age.as_secs_f64())),
    };
    let (rows, more) = match (part, retention.dead, retention.inbox, retention.audit) {
        (Part::Outbox, ..) => outbox(conn, retention, sweep).await?,
        (Part::Dead, Some(age), ..) => {
            least(Some(age), DAY)?;
            dead(conn, age, &deed(age)).await?
        }
        (Part::Inbox, _, Some(age), _) => prune_step(conn, age, false, &deed(age)).await?,
        (Part::Audit, _, _, Some(age)) => {
            least(Some(age), 30 * DAY)?;
            old_audit(conn, age, &deed(age)).await?
        }
        _ => (0, false),
    };
    if !more {
        sweep.next_part();
    }
    removed.add(part, rows);
    Ok(removed)
}

pub(super) fn not_too_short(retention: &Retention) -> Result<(), StoreError> {
    least(retention.outbox, Duration::from_secs(60))?;
    retention.topics.iter().try_for_each(|topics| least(topics.outbox, Duration::from_secs(60)))
}

fn least(age: Option<Duration>, least: Duration) -> Result<(), StoreError> {
    match age {
        Some(age) if age < least => {
            let least = lasting(least.as_secs_f64());
            let source = format!("{} is too short; {least} is the least", lasting(age.as_secs_f64())).into();
            Err(StoreError::Refused { what: WHAT, source })
        }
        _ => Ok(()),
    }
}

async fn outbox(conn: &mut Conn, retention: &Retention, sweep: &mut Sweep) -> Result<(u64, bool), Failed> {
    not_too_short(retention)?;
    let archives: Option<bool> = conn.query_first("select archives from postroom_settings").await?;
    if archives == Some(true) {
        let source = "messages of this outbox are archived before they are removed, and no archive is given; configure [archive], or end \
                      archiving with `update postroom_settings set archives = 0`";
        return Err(StoreError::Refused { what: WHAT, source: source.into() }.into());
    }
    // A process that begins to archive says so first.
    let mut tx = begin(conn).await?;
    let archives: Option<bool> = tx.query_first("select archives from postroom_settings lock in share mode").await?;
    if archives == Some(true) {
        return Ok((0, true));
    }
    // Nobody finishes these any more.
    for table in ["leaving", "segments"] {
        let any: Option<i64> = tx.query_first(format!("select 1 from postroom_archive_{table} limit 1")).await?;
        if any.is_some() {
            tx.query_drop(format!("delete from postroom_archive_{table}")).await?;
        }
    }
    let (found, more) = expired(&mut tx, retention, sweep).await?;
    let seqs: Vec<i64> = found.iter().map(|found| found.seq).collect();
    let removed = remove(&mut tx, &seqs).await?;
    tx.commit().await?;
    Ok((removed, more))
}

/// Deletes these rows of the outbox.
pub(super) async fn remove(tx: &mut impl Queryable, seqs: &[i64]) -> Result<u64, Error> {
    if seqs.is_empty() {
        return Ok(0);
    }
    let sql = "delete o from json_table(?, '$[*]' columns (seq bigint path '$')) n straight_join postroom_outbox o force index (primary) on o.seq = n.seq";
    tx.exec_drop(sql, (json(seqs),)).await?;
    Ok(tx.query_first::<i64, _>("select row_count()").await?.unwrap_or_default().unsigned_abs())
}

/// Up to which place every route has passed each lane, as a table of (lane, passed); a lane that a route lacks was not passed. No rows at all:
/// there is no route, and nothing is passed.
pub(super) const PASSED: &str = "(select p.lane, min(coalesce(l.position, 0)) as passed
       from postroom_places p join postroom_routes r on true left join postroom_lanes l on l.route = r.name and l.lane = p.lane
      group by p.lane)";

/// Messages that may be removed, of those behind `sweep`, which is moved on; and whether there may be more.
pub(super) async fn expired(
    conn: &mut impl Queryable,
    retention: &Retention,
    sweep: &mut Sweep,
) -> Result<(Vec<Expired>, bool), Error> {
    let ages = retention.topics.iter().map(|topics| topics.outbox).chain([retention.outbox]).flatten();
    let Some(shortest) = ages.min() else { return Ok((Vec::new(), false)) };
    let looked = "select cast(coalesce(max(x.seq), 0) as signed), count(*), coalesce(min(x.occurred_at) < timestampadd(microsecond, -?, utc_timestamp(6)), 0)
                    from (select seq, occurred_at from postroom_outbox where seq > ? order by seq limit ?) x";
    let (last, count, any_old): (i64, i64, bool) =
        conn.exec_first(looked, (ago(shortest), sweep.after, STEP)).await?.unwrap_or_default();
    if count == 0 {
        return Ok((Vec::new(), false));
    }
    let mut named: Named = vec![("after".to_owned(), sweep.after.into()), ("last".to_owned(), last.into())];
    // Topics in the order of the configuration; the first that fits counts. Null: kept.
    let mut age = String::from("case when false then null");
    for (index, topics) in retention.topics.iter().enumerate() {
        let takes = takes(&topics.topics, &format!("g{index}"), &mut named);
        age.push_str(&format!(" when {takes} then :age{index}"));
        named.push((format!("age{index}"), topics.outbox.map(ago).into()));
    }
    age.push_str(" else :age end");
    named.push(("age".to_owned(), retention.outbox.map(ago).into()));
    let mut taken = vec!["false".to_owned()];
    for (index, (route, settings)) in routes::all(conn).await?.into_iter().enumerate() {
        let takes = takes(&settings.topics, &format!("r{index}"), &mut named);
        // A route that takes the topic now, and took it when the message was written.
        taken.push(format!("({takes} and {})", took(conn, &route, index, &mut named).await?));
    }
    let sql = format!(
        "select straight_join o.lane, o.seq, octet_length(o.payload) + coalesce(octet_length(o.headers), 0) as bytes
           from postroom_outbox o
           join {PASSED} a on a.lane = o.lane and o.place <= a.passed
          where o.seq > :after and o.seq <= :last
            and o.occurred_at < timestampadd(microsecond, -({age}), utc_timestamp(6))
            and ({})
            and not exists (select 1 from postroom_routes r join postroom_parked p on p.route = r.name and p.seq = o.seq and p.id = o.id)
            -- On the way to an archive, or from one.
            and not exists (select 1 from postroom_archive_leaving a join postroom_settings s on s.archives where a.seq = o.seq and a.id = o.id)
            and not exists (select 1 from postroom_archive_restored a where a.seq = o.seq and a.id = o.id)
          order by o.seq",
        taken.join(" or ")
    );
    let rows: Vec<Row> = conn.exec(sql, Params::from(named)).await?;
    let mut found = Vec::with_capacity(rows.len());
    for mut row in rows {
        let row = &mut row;
        let bytes: i64 = get(row, "bytes")?;
        found.push(Expired { lane: get(row, "lane")?, seq: get(row, "seq")?, bytes: bytes.unsigned_abs() });
    }
    sweep.after = last;
    Ok((found, count == STEP && any_old))
}

/// The condition that the route already took the topic when the message was written: it is younger than the last settings of the route that did
/// not take it.
async fn took(conn: &mut impl Queryable, route: &str, index: usize, named: &mut Named) -> Result<String, Error> {
    let sql = "select v.topics, cast(n.set_at as char) from postroom_route_revisions v
                 join postroom_route_revisions n on n.route = v.route and n.revision = v.revision + 1
                where v.route = ? order by v.revision";
    let rows: Vec<(String, String)> = conn.exec(sql, (route,)).await?;
    let mut conditions = vec!["true".to_owned()];
    for (number, (topics, until)) in rows.into_iter().enumerate() {
        let patterns: Vec<String> = serde_json::from_str(&topics).unwrap_or_default();
        // What cannot be read took nothing, for all that is known.
        let takes = match TopicFilter::new(patterns) {
            Ok(topics) => takes(&topics, &format!("v{index}_{number}"), named),
            Err(_) => "false".to_owned(),
        };
        conditions.push(format!("({takes} or o.occurred_at > :until{index}_{number})"));
        named.push((format!("until{index}_{number}"), until.into()));
    }
    Ok(conditions.join(" and "))
}

/// One that blocks its key stays, and so does one that its route has not passed: a crash would bring it back.
async fn dead(conn: &mut Conn, age: Duration, deed: &Deed) -> Result<(u64, bool), Failed> {
    let conditions = format!("{{\"older_than_seconds\":{}}}", age.as_secs());
    let mut tx = begin(conn).await?;
    let sql = format!(
        "select d.route, d.seq, d.id from postroom_dead_letters d
          where d.died_at < timestampadd(microsecond, -?, utc_timestamp(6))
            and not exists (select 1 from postroom_blocked_keys b where b.route = d.route and b.seq = d.seq)
            and not {COMES_BACK}
          order by d.route, d.seq limit ? for update"
    );
    let old: Vec<(String, i64, String)> = tx.exec(sql, (ago(age), STEP)).await?;
    for (route, seq, id) in &old {
        let sql = "delete from postroom_dead_letters where route = ? and seq = ? and id = ?";
        tx.exec_drop(sql, (route, seq, id)).await?;
    }
    let sql = "select consumer, id from postroom_dead_consume
                where died_at < timestampadd(microsecond, -?, utc_timestamp(6)) order by consumer, id limit ? for update";
    let old_in: Vec<(String, String)> = tx.exec(sql, (ago(age), STEP - old.len() as i64)).await?;
    for (consumer, id) in &old_in {
        tx.exec_drop("delete from postroom_dead_consume where consumer = ? and id = ?", (consumer, id)).await?;
    }
    let sides = [
        ("dead.expire", old.into_iter().map(|(_, _, id)| id).collect::<Vec<_>>()),
        ("inbox.expire", old_in.into_iter().map(|(_, id)| id).collect()),
    ];
    let mut removed = 0;
    for (action, ids) in sides {
        if !ids.is_empty() {
            audit(&mut tx, deed, action, &conditions, &ids).await?;
        }
        removed += ids.len() as i64;
    }
    tx.commit().await?;
    Ok((removed.unsigned_abs(), removed == STEP))
}

async fn old_audit(conn: &mut Conn, age: Duration, deed: &Deed) -> Result<(u64, bool), Failed> {
    let mut tx = begin(conn).await?;
    let sql = "select id from postroom_audit where at < timestampadd(microsecond, -?, utc_timestamp(6)) order by id limit ? for update";
    let old: Vec<i64> = tx.exec(sql, (ago(age), STEP)).await?;
    if !old.is_empty() {
        let sql = "delete a from json_table(?, '$[*]' columns (id bigint path '$')) n straight_join postroom_audit a force index (primary) on a.id = n.id";
        tx.exec_drop(sql, (json(&old),)).await?;
        let conditions = format!("{{\"older_than_seconds\":{},\"rows\":{}}}", age.as_secs(), old.len());
        audit(&mut tx, deed, "audit.expire", &conditions, &[] as &[&str]).await?;
    }
    tx.commit().await?;
    Ok((old.len() as u64, old.len() as i64 == STEP))
}
