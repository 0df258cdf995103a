//! One side of a comparison of messages with effects.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use postroom::{
    AggregateChange, Consumer, DISCOVER, DISCOVERED_MAX, Discovered, Fate, IdPrint, IdPrints, MessageId, Reconciled,
    Span, StoreError, Tally, TopicFilter, Unhandled, Unwritten, id_ms,
};
use tokio_postgres::Row;
use tokio_postgres::SimpleQueryMessage;
use tokio_postgres::types::ToSql;
use uuid::Uuid;

use crate::connect::Connector;
use crate::link::store_error;
use crate::operate::session::OperatorSession;
use crate::text::{shown, shown_opt};

/// Groups of one span that are told apart.
const GROUPS_MAX: i64 = 10_000;
/// Of a UUID: the milliseconds in it, and its lower half.
const MS: &str = "('x' || substr(replace(i.id::text, '-', ''), 1, 12))::bit(48)::bigint";
const LOW: &str = "('x' || right(replace(i.id::text, '-', ''), 16))::bit(64)::bigint";
const TAKES: &str = "exists (select from unnest($3::text[]) t where o.topic = t or (t like '%*' and starts_with(o.topic, left(t, -1))))";
const WHAT: &str = "compare messages with effects";

fn failed(error: tokio_postgres::Error) -> StoreError {
    store_error(WHAT, error)
}

async fn look(connector: &Connector, sql: &str, parameters: &[&(dyn ToSql + Sync)]) -> Result<Vec<Row>, StoreError> {
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.look().await?;
    // The ranges of ids are few rows of many, whatever old statistics say.
    tx.batch_execute("set local enable_seqscan = off").await.map_err(failed)?;
    tx.query(sql, parameters).await.map_err(failed)
}

fn prints(rows: &[Row]) -> Result<IdPrints, StoreError> {
    let print = |row: &Row| -> Result<(i64, IdPrint), tokio_postgres::Error> {
        let (ids, xor): (i64, i64) = (row.try_get(1)?, row.try_get(2)?);
        Ok((row.try_get(0)?, IdPrint { ids: ids.unsigned_abs(), xor: xor.cast_unsigned() }))
    };
    rows.iter().map(print).collect::<Result<_, _>>().map_err(failed)
}

fn ids(rows: &[Row]) -> Result<Vec<MessageId>, StoreError> {
    rows.iter().map(|row| row.try_get::<_, Uuid>(0).map(MessageId::from)).collect::<Result<_, _>>().map_err(failed)
}

/// The times in the oldest and the newest id.
pub(crate) async fn outbox_times(connector: &Connector, plausible: Span) -> Result<Option<Span>, StoreError> {
    let sql = "select (select o.id from postroom.outbox o where o.id >= $1 and o.id < $2 order by o.id limit 1),
                      (select o.id from postroom.outbox o where o.id >= $1 and o.id < $2 order by o.id desc limit 1),
                      (select count(*) from (select i.id from (select n.lane from postroom.settings s cross join generate_series(0, s.lanes - 1) n (lane)) l
                                               cross join lateral (select o.id from postroom.outbox o where o.lane = l.lane order by o.seq desc limit 100) i) i
                        where substr(i.id::text, 15, 1) <> '7')";
    let (from, to) = plausible.ids();
    let rows = look(connector, sql, &[&from, &to]).await?;
    let Some(row) = rows.first() else { return Ok(None) };
    let others: i64 = row.try_get(2).map_err(failed)?;
    if others > 0 {
        let source = format!(
            "{others} of the newest messages have ids that are not UUIDv7, so there is no time in them to compare by"
        )
        .into();
        return Err(StoreError::Refused { what: WHAT, source });
    }
    let (oldest, newest): (Option<Uuid>, Option<Uuid>) =
        (row.try_get(0).map_err(failed)?, row.try_get(1).map_err(failed)?);
    Ok(oldest.zip(newest).map(|(oldest, newest)| Span { from_ms: id_ms(&oldest), to_ms: id_ms(&newest) + 1 }))
}

/// Messages whose ids lie outside a span.
pub(crate) async fn outbox_outside(connector: &Connector, span: Span) -> Result<u64, StoreError> {
    let sql = "select (select count(*) from (select from postroom.outbox o where o.id < $1 limit 10000) b)
                    + (select count(*) from (select from postroom.outbox o where o.id >= $2 limit 10000) a)";
    let (from, to) = span.ids();
    let rows = look(connector, sql, &[&from, &to]).await?;
    rows.first().map_or(Ok(0), |row| row.try_get::<_, i64>(0)).map(i64::unsigned_abs).map_err(failed)
}

/// Ids of the outbox, piece by piece.
pub(crate) async fn outbox_prints(
    connector: &Connector,
    topics: &TopicFilter,
    span: Span,
    piece_ms: i64,
) -> Result<IdPrints, StoreError> {
    let sql = format!(
        "select {MS} / $4::bigint, count(*), bit_xor({LOW})
           from (select o.id from postroom.outbox o where o.id >= $1 and o.id < $2 and {TAKES}) i group by 1"
    );
    let (from, to) = span.ids();
    prints(&look(connector, &sql, &[&from, &to, &topics.patterns(), &piece_ms]).await?)
}

/// Ids of the outbox.
pub(crate) async fn outbox_ids(
    connector: &Connector,
    topics: &TopicFilter,
    span: Span,
) -> Result<Vec<MessageId>, StoreError> {
    let sql = format!("select o.id from postroom.outbox o where o.id >= $1 and o.id < $2 and {TAKES} order by o.id");
    let (from, to) = span.ids();
    ids(&look(connector, &sql, &[&from, &to, &topics.patterns()]).await?)
}

/// The time in the oldest id of an inbox.
pub(crate) async fn inbox_begins(connector: &Connector, consumer: &Consumer) -> Result<Option<i64>, StoreError> {
    let sql = "select i.message_id from postroom.inbox i where i.consumer = $1 order by i.message_id limit 1";
    Ok(ids(&look(connector, sql, &[&consumer.as_str()]).await?)?.first().map(|id| id_ms(id.as_uuid())))
}

/// Ids of an inbox, piece by piece.
pub(crate) async fn inbox_prints(
    connector: &Connector,
    consumer: &Consumer,
    span: Span,
    piece_ms: i64,
) -> Result<IdPrints, StoreError> {
    let sql = format!(
        "select {MS} / $4::bigint, count(*), bit_xor({LOW})
           from (select x.message_id as id from postroom.inbox x where x.consumer = $3 and x.message_id >= $1 and x.message_id < $2) i group by 1"
    );
    let (from, to) = span.ids();
    prints(&look(connector, &sql, &[&from, &to, &consumer.as_str(), &piece_ms]).await?)
}

/// Ids of an inbox.
pub(crate) async fn inbox_ids(
    connector: &Connector,
    consumer: &Consumer,
    span: Span,
) -> Result<Vec<MessageId>, StoreError> {
    let sql = "select x.message_id from postroom.inbox x
                where x.consumer = $3 and x.message_id >= $1 and x.message_id < $2 order by x.message_id";
    let (from, to) = span.ids();
    ids(&look(connector, sql, &[&from, &to, &consumer.as_str()]).await?)
}

/// What a consumer has received without an effect so far.
pub(crate) async fn inbox_unhandled(
    connector: &Connector,
    consumer: &Consumer,
    span: Span,
) -> Result<Unhandled, StoreError> {
    let sql = "select (select count(*) from postroom.inbox_messages m
                        where m.consumer = $3 and m.message_id >= $1 and m.message_id < $2 and m.state <> 'done'),
                      (select count(*) from postroom.dead_consume d where d.consumer = $3 and d.message_id >= $1 and d.message_id < $2)";
    let (from, to) = span.ids();
    let rows = look(connector, sql, &[&from, &to, &consumer.as_str()]).await?;
    let Some(row) = rows.first() else { return Ok(Unhandled::default()) };
    let count = |column: usize| row.try_get::<_, i64>(column).map(i64::unsigned_abs).map_err(failed);
    Ok(Unhandled { waiting: count(0)?, dead: count(1)? })
}

/// Which of these are dead letters of a consumer.
pub(crate) async fn dead_at(
    connector: &Connector,
    consumer: &Consumer,
    of: &[MessageId],
) -> Result<Vec<MessageId>, StoreError> {
    let of: Vec<Uuid> = of.iter().map(|id| Uuid::from(*id)).collect();
    let sql = "select d.message_id from postroom.dead_consume d where d.consumer = $1 and d.message_id = any ($2)";
    ids(&look(connector, sql, &[&consumer.as_str(), &of]).await?)
}

/// Where messages are on a route.
pub(crate) async fn fates(
    connector: &Connector,
    route: &str,
    of: &[MessageId],
) -> Result<Vec<(MessageId, Fate)>, StoreError> {
    let of: Vec<Uuid> = of.iter().map(|id| Uuid::from(*id)).collect();
    let sql = "select o.id,
                      exists (select from postroom.dead_letters d where d.route = $1 and d.seq = o.seq and d.id = o.id),
                      not (o.seq <= l.position_seq and pg_visible_in_snapshot(o.xid, l.position_snapshot))
                          or exists (select from postroom.parked p where p.route = $1 and p.seq = o.seq and p.id = o.id),
                      exists (select from postroom.routes r cross join unnest(r.topics) t
                               where r.name = $1 and (o.topic = t or (t like '%*' and starts_with(o.topic, left(t, -1)))))
                 from postroom.outbox o join postroom.lanes l on l.route = $1 and l.lane = o.lane
                where o.id = any ($2)";
    let fate = |row: &Row| -> Result<(MessageId, Fate), tokio_postgres::Error> {
        let fate = match (row.try_get(1)?, row.try_get(2)?, row.try_get(3)?) {
            (true, _, _) => Fate::Dead,
            (false, _, false) => Fate::Unrouted,
            (false, true, true) => Fate::Waiting,
            (false, false, true) => Fate::Passed,
        };
        Ok((row.try_get::<_, Uuid>(0)?.into(), fate))
    };
    look(connector, sql, &[&route, &of]).await?.iter().map(fate).collect::<Result<_, _>>().map_err(failed)
}

/// Messages by tenant and type.
pub(crate) async fn tallies(
    connector: &Connector,
    route: &str,
    topics: &TopicFilter,
    span: Span,
) -> Result<Vec<Tally>, StoreError> {
    let sql = format!(
        "select o.tenant_id, o.type, count(*),
                count(*) filter (where d.seq is null and (p.seq is not null
                                 or not (o.seq <= l.position_seq and pg_visible_in_snapshot(o.xid, l.position_snapshot)))),
                count(d.seq)
           from postroom.outbox o
           join postroom.lanes l on l.route = $4 and l.lane = o.lane
           left join postroom.parked p on p.route = $4 and p.seq = o.seq and p.id = o.id
           left join postroom.dead_letters d on d.route = $4 and d.seq = o.seq and d.id = o.id
          where o.id >= $1 and o.id < $2 and {TAKES}
          group by 1, 2 limit $5"
    );
    let (from, to) = span.ids();
    let rows = look(connector, &sql, &[&from, &to, &topics.patterns(), &route, &GROUPS_MAX]).await?;
    let tally = |row: &Row| -> Result<Tally, tokio_postgres::Error> {
        let count = |column: usize| row.try_get::<_, i64>(column).map(i64::unsigned_abs);
        Ok(Tally {
            tenant: shown_opt(row, 0)?,
            kind: shown(row, 1)?,
            committed: count(2)?,
            waiting: count(3)?,
            dead: count(4)?,
        })
    };
    rows.iter().map(tally).collect::<Result<_, _>>().map_err(failed)
}

const BUSINESS: &str = "run the query `business` of the comparison (it returns tenant, type and number of changes, and has the parameters $1 and $2)";
const CHANGES: &str = "run the query `changes` of the comparison (it returns aggregate type, aggregate id and version, and has the parameters $1 and $2)";

/// Asks the application's own tables, by the names that its role finds; the first two parameters are the times.
async fn ask_application(
    connector: &Connector,
    what: &'static str,
    sql: &str,
    span: Span,
    more: &[&(dyn ToSql + Sync)],
) -> Result<Vec<Row>, StoreError> {
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.look().await?;
    tx.batch_execute("set local search_path to default").await.map_err(failed)?;
    let at = |ms: i64| -> SystemTime { UNIX_EPOCH + Duration::from_millis(ms.max(0).unsigned_abs()) };
    let (from, to) = (at(span.from_ms), at(span.to_ms));
    let mut parameters: Vec<&(dyn ToSql + Sync)> = vec![&from, &to];
    parameters.extend(more);
    tx.query(sql, &parameters).await.map_err(asked(what))
}

/// Neither the query's fault nor the schema's, if nobody answered.
fn asked(what: &'static str) -> impl Fn(tokio_postgres::Error) -> StoreError {
    move |error| {
        if error.is_closed() || error.code().is_some_and(|code| code.code().starts_with("57")) {
            failed(error)
        } else {
            StoreError::Refused { what, source: error.into() }
        }
    }
}

fn bare(query: &str) -> &str {
    query.trim().trim_end_matches(';')
}

/// Databases that a query finds.
pub(crate) async fn discover(connector: &Connector, query: &str) -> Result<Vec<Discovered>, StoreError> {
    let sql = format!("select d.* from (\n{}\n) d limit {}", bare(query), DISCOVERED_MAX + 1);
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.look().await?;
    tx.batch_execute("set local search_path to default").await.map_err(failed)?;
    // Simple queries answer with texts, whatever the types are.
    let answers = tx.simple_query(&sql).await.map_err(asked(DISCOVER))?;
    let rows = answers.iter().filter_map(|answer| match answer {
        SimpleQueryMessage::Row(row) => Some((0..row.len()).map(|column| row.get(column).map(str::to_owned)).collect()),
        _ => None,
    });
    Discovered::of(rows.collect())
}

/// Numbers of changes.
pub(crate) async fn business(
    connector: &Connector,
    query: &str,
    span: Span,
) -> Result<Vec<(Option<String>, String, u64)>, StoreError> {
    let query = bare(query);
    let sql =
        format!("select b.tenant::text, b.type::text, b.changes::bigint from (\n{query}\n) b (tenant, type, changes)");
    let rows = ask_application(connector, BUSINESS, &sql, span, &[]).await?;
    let change = |row: &Row| -> Result<(Option<String>, String, u64), StoreError> {
        let asked = asked(BUSINESS);
        let changes: i64 = row.try_get(2).map_err(&asked)?;
        let changes = u64::try_from(changes).map_err(|_| StoreError::Refused {
            what: BUSINESS,
            source: format!("{changes} changes are fewer than none").into(),
        })?;
        Ok((shown_opt(row, 0).map_err(&asked)?, shown(row, 1).map_err(&asked)?, changes))
    };
    rows.iter().map(change).collect()
}

/// Changes without a message. Both sides are here, so nothing is moved but what is missing.
pub(crate) async fn unwritten(
    connector: &Connector,
    query: &str,
    topics: &TopicFilter,
    changed: Span,
    written: Span,
    limit: usize,
) -> Result<Unwritten, StoreError> {
    let query = bare(query);
    // Both halves can be answered by a hash; one condition with "or" could not.
    let sql = format!(
        "with changed as materialized (
             select c.type::text as type, c.id::text as id, c.version::bigint as version from (\n{query}\n) c (type, id, version)
         ),
         written as materialized (
             select o.aggregate_type, o.aggregate_id, o.aggregate_version from postroom.outbox o
              where o.id >= $4 and o.id < $5 and o.aggregate_id is not null and {TAKES}
         ),
         unwritten as (
             select * from changed c
              where c.version is not null
                and not exists (select from written w where w.aggregate_id = c.id and w.aggregate_version = c.version
                                                        and (c.type is null or w.aggregate_type = c.type))
             union all
             select * from changed c
              where c.version is null
                and not exists (select from written w where w.aggregate_id = c.id and (c.type is null or w.aggregate_type = c.type))
         )
         select u.type, coalesce(u.id, ''), u.version, (select count(*) from unwritten) from unwritten u
          order by u.type, u.id, u.version limit $6"
    );
    let (from, to) = written.ids();
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let more: [&(dyn ToSql + Sync); 4] = [&topics.patterns(), &from, &to, &limit];
    let rows = ask_application(connector, CHANGES, &sql, changed, &more).await?;
    let asked = asked(CHANGES);
    let change = |row: &Row| -> Result<AggregateChange, tokio_postgres::Error> {
        Ok(AggregateChange {
            aggregate_type: shown_opt(row, 0)?,
            aggregate_id: shown(row, 1)?,
            aggregate_version: row.try_get(2)?,
        })
    };
    Ok(Unwritten {
        count: rows.first().map_or(Ok(0), |row| row.try_get::<_, i64>(3)).map_err(&asked)?.unsigned_abs(),
        changes: rows.iter().map(change).collect::<Result<_, _>>().map_err(&asked)?,
    })
}

/// Keeps a result.
pub(crate) async fn note(connector: &Connector, result: &Reconciled) -> Result<(), StoreError> {
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.deed().await?;
    let text = serde_json::to_string(result)
        .map_err(|error| StoreError::Refused { what: "keep the result of a comparison", source: error.into() })?;
    let count = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
    let (missing, strangers, days) =
        (count(result.missing()), count(result.strangers()), count(result.days_that_differ()));
    let sql = "select postroom.note_reconciled($1, $2, $3, $4, $5::text::jsonb)";
    tx.execute(sql, &[&result.name, &missing, &strangers, &days, &text]).await.map_err(failed)?;
    tx.commit().await.map_err(failed)
}

/// The newest results.
pub(crate) async fn reconciled(connector: &Connector, name: Option<&str>) -> Result<Vec<Reconciled>, StoreError> {
    let sql = "select distinct on (r.name) r.result::text from postroom.reconciliations r
                where $1::text is null or r.name = $1 order by r.name, r.at desc";
    let rows = look(connector, sql, &[&name]).await?;
    let result = |row: &Row| -> Result<Reconciled, StoreError> {
        let text = shown(row, 0).map_err(failed)?;
        serde_json::from_str(&text).map_err(|error| StoreError::Refused { what: "read a result", source: error.into() })
    };
    rows.iter().map(result).collect()
}
