//! Removing what is finished and old.

use std::time::Duration;

use postroom::{Deed, Expired, Part, Removed, Retention, StoreError, Sweep, lasting};
use rusqlite::{Connection, Transaction, TransactionBehavior, params};

use crate::connect::{NOW, store_error};
use crate::operate::dead::audit;
use crate::operate::prune::prune_step;
use crate::operate::status::TAKES;

/// Rows that one step looks at: a write transaction keeps all other writers waiting.
const STEP: i64 = 2_000;
const DAY: Duration = Duration::from_secs(24 * 3600);
const WHAT: &str = "remove what is finished and old";

/// One step of removing, in a transaction of its own; returns how far the sweep has come then.
pub(crate) fn retain_step(
    connection: &mut Connection,
    retention: &Retention,
    mut sweep: Sweep,
) -> Result<(Removed, Sweep), StoreError> {
    let failed = |error| store_error(WHAT, error);
    let mut removed = Removed::default();
    let Some(part) = sweep.parts.first().copied() else { return Ok((removed, sweep)) };
    let deed = |age: Duration| Deed {
        actor: "retention".to_owned(),
        reason: format!("older than {}", lasting(age.as_secs_f64())),
    };
    let (rows, more) = match (part, retention.dead, retention.inbox, retention.audit) {
        (Part::Outbox, ..) => {
            not_too_short(retention)?;
            not_archived(connection)?;
            let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(failed)?;
            // Nobody finishes these any more.
            tx.execute("delete from postroom_archive_leaving", []).map_err(failed)?;
            tx.execute("delete from postroom_archive_segments", []).map_err(failed)?;
            let done = outbox(&tx, retention, &mut sweep).map_err(failed)?;
            tx.commit().map_err(failed)?;
            done
        }
        (Part::Dead, Some(age), ..) => {
            least(Some(age), DAY)?;
            let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(failed)?;
            let done = dead(&tx, age, &deed(age)).map_err(failed)?;
            tx.commit().map_err(failed)?;
            done
        }
        (Part::Inbox, _, Some(age), _) => prune_step(connection, age, false, &deed(age))?,
        (Part::Audit, _, _, Some(age)) => {
            least(Some(age), 30 * DAY)?;
            let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(failed)?;
            let done = old_audit(&tx, age, &deed(age)).map_err(failed)?;
            tx.commit().map_err(failed)?;
            done
        }
        _ => (0, false),
    };
    if !more {
        sweep.next_part();
    }
    removed.add(part, rows);
    Ok((removed, sweep))
}

/// Once a message of this outbox was archived, none is removed without that.
fn not_archived(connection: &Connection) -> Result<(), StoreError> {
    let archives: bool = connection
        .query_row("select archives from postroom_settings", [], |row| row.get(0))
        .map_err(|error| store_error(WHAT, error))?;
    if archives {
        let source = "messages of this outbox are archived before they are removed, and no archive is given; configure [archive], or end \
                      archiving with `update postroom_settings set archives = 0`";
        return Err(StoreError::Refused { what: WHAT, source: source.into() });
    }
    Ok(())
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

fn millis(age: Duration) -> i64 {
    i64::try_from(age.as_millis()).unwrap_or(i64::MAX / 4)
}

fn outbox(tx: &Transaction<'_>, retention: &Retention, sweep: &mut Sweep) -> Result<(u64, bool), rusqlite::Error> {
    let (found, more) = expired(tx, retention, sweep)?;
    let seqs: Vec<i64> = found.iter().map(|found| found.seq).collect();
    let sql = "delete from postroom_outbox where seq in (select value from json_each(?1))";
    let removed = tx.execute(sql, [serde_json::json!(seqs).to_string()])?;
    Ok((removed as u64, more))
}

/// Up to which seq every route has passed; none: a route has passed nothing, or a position may not be one in this outbox, which a relay
/// puts right. The message at a position stays, since that is how it is recognized.
pub(super) fn passed(connection: &Connection) -> Result<Option<i64>, rusqlite::Error> {
    let astray: bool = connection.query_row(
        "select exists (select 1 from postroom_routes r where not exists (select 1 from postroom_lanes l where l.route = r.name))
             or exists (select 1 from postroom_lanes l
                         where l.position_seq > coalesce((select max(seq) from sqlite_sequence where name = 'postroom_outbox'), 0)
                            or coalesce((select o.id <> l.position_id from postroom_outbox o where o.seq = l.position_seq), 0))",
        [],
        |row| row.get(0),
    )?;
    let passed: Option<i64> =
        connection.query_row("select min(position_seq) from postroom_lanes", [], |row| row.get(0))?;
    Ok(passed.filter(|_| !astray))
}

/// Messages that may be removed, of those behind `sweep`, which is moved on; and whether there may be more.
pub(super) fn expired(
    connection: &Connection,
    retention: &Retention,
    sweep: &mut Sweep,
) -> Result<(Vec<Expired>, bool), rusqlite::Error> {
    let ages = retention.topics.iter().map(|topics| topics.outbox).chain([retention.outbox]).flatten();
    let Some(shortest) = ages.min() else { return Ok((Vec::new(), false)) };
    let Some(passed) = passed(connection)?.filter(|passed| *passed > sweep.after) else {
        return Ok((Vec::new(), false));
    };
    let now: i64 = connection.query_row(&format!("select {NOW}"), [], |row| row.get(0))?;
    // Topics in the order of the configuration; the first that fits counts.
    let mut rules = Vec::new();
    for topics in &retention.topics {
        for pattern in topics.topics.patterns() {
            rules.push(serde_json::json!({ "pattern": pattern, "ms": topics.outbox.map(millis) }));
        }
    }
    let rules = serde_json::Value::from(rules).to_string();
    let fits = |topic: &str, pattern: &str| {
        format!(
            "({topic} = {pattern} or (substr({pattern}, -1) = '*'
              and substr({topic}, 1, length({pattern}) - 1) = substr({pattern}, 1, length({pattern}) - 1)))"
        )
    };
    let rule = fits("o.topic", "(g.value ->> 'pattern')");
    let looked = "select seq from postroom_outbox where seq > ?1 and seq < ?2 order by seq limit ?3";
    let sql = format!(
        "select o.seq, length(cast(o.payload as blob)) + coalesce(length(cast(o.headers as blob)), 0) from postroom_outbox o
          where o.seq in ({looked})
            and o.occurred_ms < ?4 - case when exists (select 1 from json_each(?5) g where {rule})
                                          then (select g.value ->> 'ms' from json_each(?5) g where {rule} order by g.key limit 1)
                                          else ?6 end
            and not exists (select 1 from postroom_routes r join postroom_parked p on p.route = r.name and p.seq = o.seq)
            -- A route that takes the topic now, and took it when the message was written.
            and exists (select 1 from postroom_routes r
                         where {TAKES}
                           and o.occurred_ms > coalesce((
                               select max(n.set_ms) from postroom_route_revisions v
                                 join postroom_route_revisions n on n.route = v.route and n.revision = v.revision + 1
                                where v.route = r.name
                                  and not exists (select 1 from json_each(v.topics) b where {})), -9223372036854775807 - 1))
            -- On the way to an archive, or from one.
            and not exists (select 1 from postroom_archive_leaving a join postroom_settings s on s.archives where a.seq = o.seq and a.id = o.id)
            and not exists (select 1 from postroom_archive_restored a where a.seq = o.seq and a.id = o.id)
          order by o.seq",
        fits("o.topic", "b.value")
    );
    let (last, count, oldest): (Option<i64>, i64, Option<i64>) = connection.query_row(
        &format!("select max(seq), count(*), min(occurred_ms) from postroom_outbox where seq in ({looked})"),
        params![sweep.after, passed, STEP],
        |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)),
    )?;
    let usual = retention.outbox.map(millis);
    let mut statement = connection.prepare(&sql)?;
    let found = statement
        .query_map(params![sweep.after, passed, STEP, now, rules, usual], |row| {
            Ok(Expired { lane: 0, seq: row.get(0)?, bytes: row.get::<_, i64>(1)?.unsigned_abs() })
        })?
        .collect::<Result<_, _>>()?;
    sweep.after = last.unwrap_or(sweep.after);
    let any_old = oldest.is_some_and(|oldest| oldest < now - millis(shortest));
    Ok((found, count == STEP && any_old))
}

/// One that blocks its key stays, and so does one that its route has not passed: a crash would bring it back.
fn dead(tx: &Transaction<'_>, age: Duration, deed: &Deed) -> Result<(u64, bool), rusqlite::Error> {
    let conditions = format!("{{\"older_than_seconds\":{}}}", age.as_secs());
    let sides = [
        (
            "dead.expire",
            format!(
                "delete from postroom_dead_letters where (route, seq) in (
                     select d.route, d.seq from postroom_dead_letters d
                      where d.died_ms < {NOW} - ?1
                        and not exists (select 1 from postroom_blocked_keys b where b.route = d.route and b.seq = d.seq)
                        and not exists (select 1 from postroom_lanes l where l.route = d.route and l.position_seq < d.seq)
                      limit ?2) returning id"
            ),
        ),
        (
            "inbox.expire",
            format!(
                "delete from postroom_dead_consume where (consumer, id) in (
                     select d.consumer, d.id from postroom_dead_consume d where d.died_ms < {NOW} - ?1 limit ?2) returning id"
            ),
        ),
    ];
    let mut removed = 0;
    for (action, sql) in sides {
        let mut statement = tx.prepare(&sql)?;
        let ids: Vec<String> =
            statement.query_map(params![millis(age), STEP - removed], |row| row.get(0))?.collect::<Result<_, _>>()?;
        if !ids.is_empty() {
            audit(tx, deed, action, &conditions, &ids.iter().map(String::as_str).collect::<Vec<_>>())?;
        }
        removed += ids.len() as i64;
    }
    Ok((removed as u64, removed == STEP))
}

fn old_audit(tx: &Transaction<'_>, age: Duration, deed: &Deed) -> Result<(u64, bool), rusqlite::Error> {
    let sql = format!(
        "delete from postroom_audit where id in (
             select id from postroom_audit where at_ms < {NOW} - ?1 order by id limit ?2)"
    );
    let removed = tx.execute(&sql, params![millis(age), STEP])?;
    if removed > 0 {
        let conditions = format!("{{\"older_than_seconds\":{},\"rows\":{removed}}}", age.as_secs());
        audit(tx, deed, "audit.expire", &conditions, &[])?;
    }
    Ok((removed as u64, removed as i64 == STEP))
}
