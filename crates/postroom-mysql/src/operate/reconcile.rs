//! One side of a comparison of messages with effects.

use std::collections::{HashMap, HashSet};

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Error, Params, Row, TxOpts, Value, params};
use postroom::{
    AggregateChange, Consumer, DISCOVER, Discovered, Fate, IdPrint, IdPrints, MessageId, Reconciled, Span, StoreError,
    Tally, TopicFilter, Unhandled, Unwritten, id_ms,
};

use crate::connect::store_error;
use crate::desk::{Failed, begin};
use crate::log::{get, json};
use crate::operate::uuid;
use crate::routes::{self, Named, takes};

const WHAT: &str = "compare messages with effects";
const BUSINESS: &str = "run the query `business` of the comparison (it returns tenant, type and a count, and has the parameters :from_ms and :to_ms)";
const CHANGES: &str = "run the query `changes` of the comparison (it returns aggregate type, aggregate id and version, and has the parameters :from_ms and :to_ms)";
const READ_ONLY_TRANSACTION: u16 = 1792;
/// Groups of one span that are told apart.
const GROUPS_MAX: usize = 10_000;

fn ids_from(rows: Vec<String>) -> Result<Vec<MessageId>, Failed> {
    Ok(rows.iter().map(|id| uuid(id).map(MessageId::from)).collect::<Result<_, _>>()?)
}

/// The messages `o` of a span, with its parameters.
fn of_span(span: Span) -> (&'static str, Named) {
    let (from, to) = span.ids();
    let named = vec![("from_id".to_owned(), from.to_string().into()), ("to_id".to_owned(), to.to_string().into())];
    ("o.id >= :from_id and o.id < :to_id", named)
}

/// Counts of ids and their XOR by piece; `id` is the column.
fn prints_of(id: &str) -> String {
    format!(
        "select cast(conv(concat(substr({id}, 1, 8), substr({id}, 10, 4)), 16, 10) as unsigned) div :piece as piece, count(*) as ids,
                bit_xor(cast(conv(concat(substr({id}, 20, 4), substr({id}, 25, 12)), 16, 10) as unsigned)) as x"
    )
}

fn prints_from(rows: Vec<(i64, u64, u64)>) -> IdPrints {
    rows.into_iter().map(|(piece, ids, xor)| (piece, IdPrint { ids, xor })).collect()
}

/// When the oldest and the newest message were written.
pub(crate) async fn outbox_times(conn: &mut Conn, plausible: Span) -> Result<Option<Span>, Failed> {
    let sql = "select count(*) from (select id from postroom_outbox order by seq desc limit 1000) o where substr(o.id, 15, 1) <> '7'";
    let others: i64 = conn.query_first(sql).await?.unwrap_or_default();
    if others > 0 {
        let source = format!(
            "{others} of the newest messages have ids that are not UUIDv7, so there is no time in them to compare by"
        );
        return Err(StoreError::Refused { what: WHAT, source: source.into() }.into());
    }
    let mut edges = Vec::new();
    for direction in ["asc", "desc"] {
        let (of_span, named) = of_span(plausible);
        let sql = format!("select o.id from postroom_outbox o where {of_span} order by o.id {direction} limit 1");
        let edge: Option<String> = conn.exec_first(sql, Params::from(named)).await?;
        edges.extend(edge.map(|id| uuid(&id)).transpose()?.map(|id| id_ms(&id)));
    }
    Ok(match edges[..] {
        [oldest, newest] => Some(Span { from_ms: oldest, to_ms: newest + 1 }),
        _ => None,
    })
}

/// Messages whose ids lie outside a span.
pub(crate) async fn outbox_outside(conn: &mut Conn, span: Span) -> Result<u64, Failed> {
    let (_, named) = of_span(span);
    let sql = "select (select count(*) from (select 1 from postroom_outbox where id < :from_id limit 10000) o)
                    + (select count(*) from (select 1 from postroom_outbox where id >= :to_id limit 10000) o)";
    Ok(conn.exec_first::<i64, _, _>(sql, Params::from(named)).await?.unwrap_or_default().unsigned_abs())
}

/// Ids of the outbox, piece by piece.
pub(crate) async fn outbox_prints(
    conn: &mut Conn,
    topics: &TopicFilter,
    span: Span,
    piece_ms: i64,
) -> Result<IdPrints, Failed> {
    let (of_span, mut named) = of_span(span);
    let takes = takes(topics, "t", &mut named);
    named.push(("piece".to_owned(), piece_ms.max(1).into()));
    let sql = format!("{} from postroom_outbox o where {of_span} and {takes} group by piece", prints_of("o.id"));
    Ok(prints_from(conn.exec(sql, Params::from(named)).await?))
}

/// Ids of the outbox.
pub(crate) async fn outbox_ids(conn: &mut Conn, topics: &TopicFilter, span: Span) -> Result<Vec<MessageId>, Failed> {
    let (of_span, mut named) = of_span(span);
    let takes = takes(topics, "t", &mut named);
    let sql = format!("select o.id from postroom_outbox o where {of_span} and {takes} order by o.id");
    ids_from(conn.exec(sql, Params::from(named)).await?)
}

/// The time in the oldest id of an inbox.
pub(crate) async fn inbox_begins(conn: &mut Conn, consumer: &Consumer) -> Result<Option<i64>, Failed> {
    let sql = "select message_id from postroom_inbox where consumer = ? order by message_id limit 1";
    let oldest: Option<String> = conn.exec_first(sql, (consumer.as_str(),)).await?;
    Ok(oldest.map(|id| uuid(&id)).transpose()?.map(|id| id_ms(&id)))
}

/// Ids of an inbox, piece by piece.
pub(crate) async fn inbox_prints(
    conn: &mut Conn,
    consumer: &Consumer,
    span: Span,
    piece_ms: i64,
) -> Result<IdPrints, Failed> {
    let (from, to) = span.ids();
    let sql = format!(
        "{} from postroom_inbox i where i.consumer = :consumer and i.message_id >= :from and i.message_id < :to group by piece",
        prints_of("i.message_id")
    );
    let parameters = params! {
        "consumer" => consumer.as_str(), "from" => from.to_string(), "to" => to.to_string(), "piece" => piece_ms.max(1)
    };
    Ok(prints_from(conn.exec(sql, parameters).await?))
}

/// Ids of an inbox.
pub(crate) async fn inbox_ids(conn: &mut Conn, consumer: &Consumer, span: Span) -> Result<Vec<MessageId>, Failed> {
    let (from, to) = span.ids();
    let sql = "select message_id from postroom_inbox where consumer = ? and message_id >= ? and message_id < ? order by message_id";
    ids_from(conn.exec(sql, (consumer.as_str(), from.to_string(), to.to_string())).await?)
}

/// What a consumer has received without an effect so far.
pub(crate) async fn inbox_unhandled(conn: &mut Conn, consumer: &Consumer, span: Span) -> Result<Unhandled, Failed> {
    let (from, to) = span.ids();
    let mut counts = [0; 2];
    for (count, table) in counts.iter_mut().zip(["inbox_messages", "dead_consume"]) {
        let sql = format!("select count(*) from postroom_{table} where consumer = ? and id >= ? and id < ?");
        let found: Option<i64> = conn.exec_first(sql, (consumer.as_str(), from.to_string(), to.to_string())).await?;
        *count = found.unwrap_or_default().unsigned_abs();
    }
    Ok(Unhandled { waiting: counts[0], dead: counts[1] })
}

/// Which of these are dead letters of a consumer.
pub(crate) async fn dead_at(conn: &mut Conn, consumer: &Consumer, ids: &[MessageId]) -> Result<Vec<MessageId>, Failed> {
    let sql =
        "select straight_join d.id from json_table(?, '$[*]' columns (id char(36) character set ascii path '$')) n
                 join postroom_dead_consume d on d.consumer = ? and d.id = n.id";
    ids_from(conn.exec(sql, (json(ids), consumer.as_str())).await?)
}

/// Where messages are on a route.
pub(crate) async fn fates(conn: &mut Conn, route: &str, ids: &[MessageId]) -> Result<Vec<(MessageId, Fate)>, Failed> {
    let Some(settings) = routes::settings(conn, route).await? else {
        return Ok(ids.iter().map(|id| (*id, Fate::Unrouted)).collect());
    };
    let sql = "select straight_join o.id, o.topic,
                      exists (select 1 from postroom_dead_letters d where d.route = :route and d.seq = o.seq and d.id = o.id) as dead,
                      o.place is null or o.place > coalesce((select l.position from postroom_lanes l where l.route = :route and l.lane = o.lane), 0)
                          or exists (select 1 from postroom_parked p where p.route = :route and p.seq = o.seq and p.id = o.id) as waits
                 from json_table(:ids, '$[*]' columns (id char(36) character set ascii path '$')) n join postroom_outbox o on o.id = n.id";
    let rows: Vec<(String, String, bool, bool)> =
        conn.exec(sql, params! { "route" => route, "ids" => json(ids) }).await?;
    let fate = |(id, topic, dead, waits): (String, String, bool, bool)| {
        let fate = match (dead, waits, settings.topics.takes(&topic)) {
            (true, _, _) => Fate::Dead,
            (false, _, false) => Fate::Unrouted,
            (false, true, true) => Fate::Waiting,
            (false, false, true) => Fate::Passed,
        };
        Ok::<_, Error>((uuid(&id)?.into(), fate))
    };
    Ok(rows.into_iter().map(fate).collect::<Result<_, _>>()?)
}

/// Messages by tenant and type.
pub(crate) async fn tallies(
    conn: &mut Conn,
    route: &str,
    topics: &TopicFilter,
    span: Span,
) -> Result<Vec<Tally>, Failed> {
    let (of_span, mut named) = of_span(span);
    let takes = takes(topics, "t", &mut named);
    named.push(("route".to_owned(), route.into()));
    let sql = format!(
        "select x.tenant_id, x.type, count(*) as committed, cast(sum(not x.dead and x.waits) as signed) as waiting,
                cast(sum(x.dead) as signed) as dead
           from (select o.tenant_id, o.type,
                        exists (select 1 from postroom_dead_letters d where d.route = :route and d.seq = o.seq and d.id = o.id) as dead,
                        o.place is null or o.place > coalesce((select l.position from postroom_lanes l where l.route = :route and l.lane = o.lane), 0)
                            or exists (select 1 from postroom_parked p where p.route = :route and p.seq = o.seq and p.id = o.id) as waits
                   from postroom_outbox o where {of_span} and {takes}) x
          group by x.tenant_id, x.type limit {GROUPS_MAX}"
    );
    let rows: Vec<Row> = conn.exec(sql, Params::from(named)).await?;
    let tally = |mut row: Row| {
        let row = &mut row;
        let mut count = |column| get::<i64>(row, column).map(i64::unsigned_abs);
        let (committed, waiting, dead) = (count("committed")?, count("waiting")?, count("dead")?);
        Ok::<_, Error>(Tally { tenant: get(row, "tenant_id")?, kind: get(row, "type")?, committed, waiting, dead })
    };
    Ok(rows.into_iter().map(tally).collect::<Result<_, _>>()?)
}

/// The application's own tables.
pub(crate) async fn business(
    conn: &mut Conn,
    query: &str,
    span: Span,
) -> Result<Vec<(Option<String>, String, u64)>, Failed> {
    let rows = read_only(conn, query, span).await.map_err(|error| refused(BUSINESS, error))?;
    let mut changes = Vec::with_capacity(rows.len());
    for row in rows {
        let [tenant, kind, count] = cells(row, BUSINESS)?;
        let count: i64 = count.as_deref().unwrap_or("0").parse().map_err(|_| {
            let source = "its third column is not a whole number".into();
            StoreError::Refused { what: BUSINESS, source }
        })?;
        changes.push((tenant, kind.unwrap_or_default(), count.max(0).unsigned_abs()));
    }
    Ok(changes)
}

/// Databases that a query finds.
pub(crate) async fn discover(conn: &mut Conn, query: &str) -> Result<Vec<Discovered>, Failed> {
    let asked = async {
        let mut options = TxOpts::new();
        options.with_readonly(true);
        let mut tx = conn.start_transaction(options).await?;
        let rows: Vec<Row> = tx.query(query.trim().trim_end_matches(';')).await?;
        tx.rollback().await?;
        Ok(rows)
    };
    let rows = asked.await.map_err(|error| refused(DISCOVER, error))?;
    let mut found = Vec::with_capacity(rows.len());
    for mut row in rows {
        let columns = row.len();
        let mut column = |n: usize| row.take_opt::<Option<String>, _>(n).and_then(Result::ok).flatten();
        found.push((0..columns.min(2)).map(&mut column).collect());
    }
    Ok(Discovered::of(found)?)
}

/// What somebody else wrote runs where it can change nothing.
async fn read_only(conn: &mut Conn, query: &str, span: Span) -> Result<Vec<Row>, Error> {
    let mut options = TxOpts::new();
    options.with_readonly(true);
    let mut tx = conn.start_transaction(options).await?;
    let query = query.trim().trim_end_matches(';');
    let rows = tx.exec(query, params! { "from_ms" => span.from_ms, "to_ms" => span.to_ms }).await?;
    tx.rollback().await?;
    Ok(rows)
}

/// A query that is wrong stays wrong.
fn refused(what: &'static str, error: Error) -> Failed {
    let writes = matches!(&error, Error::Server(server) if server.code == READ_ONLY_TRANSACTION);
    if writes || matches!(error, Error::Driver(_)) {
        return StoreError::Refused { what, source: error.into() }.into();
    }
    match store_error(what, error) {
        StoreError::Schema { problem, .. } => StoreError::Refused { what, source: problem.into() }.into(),
        other => other.into(),
    }
}

/// The three columns of an answer, as text.
fn cells(mut row: Row, what: &'static str) -> Result<[Option<String>; 3], StoreError> {
    if row.len() != 3 {
        let source = format!("it returns {} columns", row.len()).into();
        return Err(StoreError::Refused { what, source });
    }
    let mut cells = [None, None, None];
    for (index, cell) in cells.iter_mut().enumerate() {
        *cell = match row.take::<Value, _>(index).unwrap_or(Value::NULL) {
            Value::NULL => None,
            Value::Bytes(bytes) => Some(String::from_utf8_lossy(&bytes).into_owned()),
            Value::Int(number) => Some(number.to_string()),
            Value::UInt(number) => Some(number.to_string()),
            other => Some(other.as_sql(true).trim_matches('\'').to_owned()),
        };
    }
    Ok(cells)
}

/// Changes without a message.
pub(crate) async fn unwritten(
    conn: &mut Conn,
    query: &str,
    topics: &TopicFilter,
    changed: Span,
    written: Span,
    limit: usize,
) -> Result<Unwritten, Failed> {
    type Versions = HashSet<(Option<String>, Option<i64>)>;
    // Changes are read first: a change that is seen has its message then, if it has one.
    let changes = read_only(conn, query, changed).await.map_err(|error| refused(CHANGES, error))?;
    let (of_span, mut named) = of_span(written);
    let takes = takes(topics, "t", &mut named);
    let sql = format!(
        "select o.aggregate_type, o.aggregate_id, o.aggregate_version from postroom_outbox o
          where {of_span} and {takes} and o.aggregate_id is not null"
    );
    let rows: Vec<(Option<String>, String, Option<i64>)> = conn.exec(sql, Params::from(named)).await?;
    let mut messages: HashMap<String, Versions> = HashMap::new();
    for (kind, id, version) in rows {
        let versions = messages.entry(id).or_default();
        // As every question may be put: with type and version, or without one of them.
        for kind in [kind, None] {
            versions.extend([(kind.clone(), version), (kind, None)]);
        }
    }
    let mut found = Unwritten::default();
    for row in changes {
        let [aggregate_type, aggregate_id, version] = cells(row, CHANGES)?;
        let aggregate_version = version.map(|version| version.parse::<i64>()).transpose().map_err(|_| {
            let source = "its third column is not a whole number".into();
            StoreError::Refused { what: CHANGES, source }
        })?;
        let change =
            AggregateChange { aggregate_type, aggregate_id: aggregate_id.unwrap_or_default(), aggregate_version };
        let asked = (change.aggregate_type.clone(), change.aggregate_version);
        if !messages.get(&change.aggregate_id).is_some_and(|versions| versions.contains(&asked)) {
            found.count += 1;
            if found.changes.len() < limit {
                found.changes.push(change);
            }
        }
    }
    Ok(found)
}

/// Keeps a result, and of each comparison the newest 100.
pub(crate) async fn note(conn: &mut Conn, result: &Reconciled) -> Result<(), Failed> {
    let text = serde_json::to_string(result)?;
    let count = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
    let mut tx = begin(conn).await?;
    let sql = "insert into postroom_reconciliations (name, at, missing, strangers, days, result)
               values (:name, utc_timestamp(6), :missing, :strangers, :days, :result)
               on duplicate key update missing = values(missing), strangers = values(strangers), days = values(days), result = values(result)";
    let parameters = params! {
        "name" => &result.name, "missing" => count(result.missing()), "strangers" => count(result.strangers()),
        "days" => count(result.days_that_differ()), "result" => text
    };
    tx.exec_drop(sql, parameters).await?;
    let sql = "select cast(at as char) from postroom_reconciliations where name = ? order by at desc limit 1 offset 99";
    let oldest: Option<String> = tx.exec_first(sql, (&result.name,)).await?;
    if let Some(oldest) = oldest {
        let sql = "delete from postroom_reconciliations where name = ? and at < ?";
        tx.exec_drop(sql, (&result.name, oldest)).await?;
    }
    tx.commit().await?;
    Ok(())
}

/// The newest results.
pub(crate) async fn reconciled(conn: &mut Conn, name: Option<&str>) -> Result<Vec<Reconciled>, Failed> {
    let sql = "select r.result from postroom_reconciliations r
                where (:name is null or r.name = :name)
                  and r.at = (select max(n.at) from postroom_reconciliations n where n.name = r.name) order by r.name";
    let results: Vec<String> = conn.exec(sql, params! { "name" => name }).await?;
    Ok(results.iter().map(|result| serde_json::from_str(result)).collect::<Result<_, _>>()?)
}
