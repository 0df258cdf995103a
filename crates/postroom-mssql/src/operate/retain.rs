//! Removing what is finished and old.

use std::time::Duration;

use postroom::{Deed, Expired, Part, Removed, Retention, StoreError, Sweep, TopicFilter, lasting};
use tiberius::error::Error;

use crate::conn::Conn;
use crate::desk::{Failed, begin};
use crate::operate::audit::audit;
use crate::operate::dead::COMES_BACK;
use crate::operate::prune::prune_step;
use crate::routes::{self, takes};
use crate::sql::{Named, age, ago, get, json, named};

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
    let archives: Option<bool> = conn.first("select archives from postroom_settings", named! {}).await?;
    if archives == Some(true) {
        let source = "messages of this outbox are archived before they are removed, and no archive is given; configure [archive], or end \
                      archiving with `update postroom_settings set archives = 0`";
        return Err(StoreError::Refused { what: WHAT, source: source.into() }.into());
    }
    // A process that begins to archive says so first.
    let tx = begin(conn).await?;
    let sql = "select archives from postroom_settings with (updlock)";
    let archives: Option<bool> = tx.first(sql, named! {}).await?;
    if archives == Some(true) {
        return Ok((0, true));
    }
    // Nobody finishes these any more.
    for table in ["leaving", "segments"] {
        let any: Option<i64> = tx.first(&format!("select top (1) 1 from postroom_archive_{table}"), named! {}).await?;
        if any.is_some() {
            tx.exec(&format!("delete from postroom_archive_{table}"), named! {}).await?;
        }
    }
    let (found, more) = expired(tx, retention, sweep).await?;
    let seqs: Vec<i64> = found.iter().map(|found| found.seq).collect();
    let removed = remove(tx, &seqs).await?;
    tx.commit().await?;
    Ok((removed, more))
}

/// Deletes these rows of the outbox.
pub(super) async fn remove(tx: &mut Conn, seqs: &[i64]) -> Result<u64, Error> {
    if seqs.is_empty() {
        return Ok(0);
    }
    let sql = "delete o
                 from openjson(@seqs) with (seq bigint '$') n join postroom_outbox o with (rowlock) on o.seq = n.seq
               option (loop join, force order)";
    tx.exec(sql, named! { "seqs" => json(seqs) }).await
}

/// Up to which place every route has passed each lane, as a table of (lane, passed); a lane that a route lacks was not passed. No rows at all:
/// there is no route, and nothing is passed.
pub(super) const PASSED: &str = "(select p.lane, min(coalesce(l.position, 0)) as passed
       from postroom_places p cross join postroom_routes r left join postroom_lanes l on l.route = r.name and l.lane = p.lane
      group by p.lane)";

/// Messages that may be removed, of those behind `sweep`, which is moved on; and whether there may be more.
pub(super) async fn expired(
    conn: &mut Conn,
    retention: &Retention,
    sweep: &mut Sweep,
) -> Result<(Vec<Expired>, bool), Error> {
    let ages = retention.topics.iter().map(|topics| topics.outbox).chain([retention.outbox]).flatten();
    let Some(shortest) = ages.min() else { return Ok((Vec::new(), false)) };
    let looked = format!(
        "select coalesce(max(x.seq), 0), count_big(*), case when min(x.occurred_at) < {} then 1 else 0 end
           from (select top ({STEP}) seq, occurred_at from postroom_outbox where seq > @after order by seq) x",
        ago("@age")
    );
    let parameters = named! { "age" => age(shortest), "after" => sweep.after };
    let (last, count, any_old): (i64, i64, bool) = conn.first(&looked, parameters).await?.unwrap_or_default();
    if count == 0 {
        return Ok((Vec::new(), false));
    }
    let mut parameters = named! { "after" => sweep.after, "last" => last, "age" => retention.outbox.map(age) };
    // Topics in the order of the configuration; the first that fits counts. Null: kept.
    let mut kept = String::from("case when 1 = 0 then convert(bigint, null)");
    for (index, topics) in retention.topics.iter().enumerate() {
        let takes = takes(&topics.topics, &format!("g{index}"), &mut parameters);
        kept.push_str(&format!(" when {takes} then @age{index}"));
        parameters.push((format!("age{index}").into(), topics.outbox.map(age).into()));
    }
    kept.push_str(" else @age end");
    let mut taken = vec!["1 = 0".to_owned()];
    for (index, (route, settings)) in routes::all(conn).await?.into_iter().enumerate() {
        let takes = takes(&settings.topics, &format!("r{index}"), &mut parameters);
        // A route that takes the topic now, and took it when the message was written.
        taken.push(format!("({takes} and {})", took(conn, &route, index, &mut parameters).await?));
    }
    let sql = format!(
        "select o.lane, o.seq, convert(bigint, datalength(o.payload)) + coalesce(convert(bigint, datalength(o.headers)), 0) as bytes
           from (select o.lane, o.seq, o.id, o.place, o.topic, o.payload, o.headers, o.occurred_at, {kept} as kept_us
                   from postroom_outbox o where o.seq > @after and o.seq <= @last) o
           join {PASSED} a on a.lane = o.lane and o.place <= a.passed
          where o.kept_us is not null and o.occurred_at < {}
            and ({})
            and not exists (select 1 from postroom_routes r join postroom_parked p on p.route = r.name and p.seq = o.seq and p.id = o.id)
            and not exists (select 1 from postroom_archive_leaving g join postroom_settings s on s.archives = 1 where g.seq = o.seq and g.id = o.id)
            and not exists (select 1 from postroom_archive_restored e where e.seq = o.seq and e.id = o.id)
          order by o.seq",
        ago("o.kept_us"),
        taken.join(" or ")
    );
    let rows = conn.rows(&sql, parameters).await?;
    let mut found = Vec::with_capacity(rows.len());
    for row in &rows {
        let bytes: i64 = get(row, "bytes")?;
        found.push(Expired { lane: get(row, "lane")?, seq: get(row, "seq")?, bytes: bytes.unsigned_abs() });
    }
    sweep.after = last;
    Ok((found, count == STEP && any_old))
}

/// The condition that the route already took the topic when the message was written: it is younger than the last settings of the route that did
/// not take it.
async fn took(conn: &mut Conn, route: &str, index: usize, parameters: &mut Named) -> Result<String, Error> {
    let sql = "select v.topics, convert(nvarchar(33), n.set_at, 126) from postroom_route_revisions v
                 join postroom_route_revisions n on n.route = v.route and n.revision = v.revision + 1
                where v.route = @route order by v.revision";
    let rows: Vec<(String, String)> = conn.query(sql, named! { "route" => route }).await?;
    let mut conditions = vec!["1 = 1".to_owned()];
    for (number, (topics, until)) in rows.into_iter().enumerate() {
        let patterns: Vec<String> = serde_json::from_str(&topics).unwrap_or_default();
        // What cannot be read took nothing, for all that is known.
        let takes = match TopicFilter::new(patterns) {
            Ok(topics) => takes(&topics, &format!("v{index}_{number}"), parameters),
            Err(_) => "1 = 0".to_owned(),
        };
        conditions.push(format!("({takes} or o.occurred_at > convert(datetime2(6), @until{index}_{number}))"));
        parameters.push((format!("until{index}_{number}").into(), until.into()));
    }
    Ok(conditions.join(" and "))
}

/// One that blocks its key stays, and so does one that its route has not passed: a crash would bring it back.
async fn dead(conn: &mut Conn, older: Duration, deed: &Deed) -> Result<(u64, bool), Failed> {
    let conditions = format!("{{\"older_than_seconds\":{}}}", older.as_secs());
    let tx = begin(conn).await?;
    let sql = format!(
        "select top (@most) d.route, d.seq, d.id from postroom_dead_letters d with (updlock, rowlock, readcommittedlock, readpast)
          where d.died_at < {}
            and not exists (select 1 from postroom_blocked_keys b where b.route = d.route and b.seq = d.seq)
            and not {COMES_BACK}
          order by d.route, d.seq",
        ago("@age")
    );
    let parameters = |most: i64| named! { "age" => age(older), "most" => most };
    let old: Vec<(String, i64, String)> = tx.query(&sql, parameters(STEP)).await?;
    let sql = "delete d
                 from openjson(@old) with (route nvarchar(200) '$[0]', seq bigint '$[1]', id uniqueidentifier '$[2]') n
                 join postroom_dead_letters d with (rowlock) on d.route = n.route collate Latin1_General_100_BIN2 and d.seq = n.seq and d.id = n.id
               option (loop join, force order)";
    if !old.is_empty() {
        tx.exec(sql, named! { "old" => json(&old) }).await?;
    }
    let sql = format!(
        "select top (@most) d.consumer, d.id from postroom_dead_consume d with (updlock, rowlock, readcommittedlock, readpast)
          where d.died_at < {} order by d.consumer, d.id",
        ago("@age")
    );
    let old_in: Vec<(String, String)> = tx.query(&sql, parameters(STEP - old.len() as i64)).await?;
    let sql = "delete d
                 from openjson(@old) with (consumer nvarchar(255) '$[0]', id uniqueidentifier '$[1]') n
                 join postroom_dead_consume d with (rowlock) on d.consumer = n.consumer collate Latin1_General_100_BIN2 and d.id = n.id
               option (loop join, force order)";
    if !old_in.is_empty() {
        tx.exec(sql, named! { "old" => json(&old_in) }).await?;
    }
    let sides = [
        ("dead.expire", old.into_iter().map(|(_, _, id)| id).collect::<Vec<_>>()),
        ("inbox.expire", old_in.into_iter().map(|(_, id)| id).collect()),
    ];
    let mut removed = 0;
    for (action, ids) in sides {
        if !ids.is_empty() {
            audit(tx, deed, action, &conditions, &ids).await?;
        }
        removed += ids.len() as i64;
    }
    tx.commit().await?;
    Ok((removed.unsigned_abs(), removed == STEP))
}

async fn old_audit(conn: &mut Conn, older: Duration, deed: &Deed) -> Result<(u64, bool), Failed> {
    let tx = begin(conn).await?;
    let sql = format!(
        "select top (@most) a.id from postroom_audit a with (updlock, rowlock) where a.at < {} order by a.id",
        ago("@age")
    );
    let old: Vec<i64> = tx.query(&sql, named! { "age" => age(older), "most" => STEP }).await?;
    if !old.is_empty() {
        let sql = "delete a
                     from openjson(@old) with (id bigint '$') n join postroom_audit a with (rowlock) on a.id = n.id
                   option (loop join, force order)";
        tx.exec(sql, named! { "old" => json(&old) }).await?;
        let conditions = format!("{{\"older_than_seconds\":{},\"rows\":{}}}", older.as_secs(), old.len());
        audit(tx, deed, "audit.expire", &conditions, &[] as &[&str]).await?;
    }
    tx.commit().await?;
    Ok((old.len() as u64, old.len() as i64 == STEP))
}
