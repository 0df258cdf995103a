//! One side of a comparison of messages with effects.

use std::collections::{HashMap, HashSet};

use postroom::{
    AggregateChange, Consumer, DISCOVER, Discovered, Fate, IdPrints, MessageId, Reconciled, Span, StoreError, Tally,
    TopicFilter, Unhandled, Unwritten, id_ms,
};
use tiberius::error::Error;
use tiberius::{ColumnData, Row};
use uuid::Uuid;

use crate::conn::Conn;
use crate::connect::store_error;
use crate::desk::{Failed, begin};
use crate::operate::uuid;
use crate::routes::{self, takes};
use crate::sql::{FromColumn, NOW, Named, get, json, named};

const WHAT: &str = "compare messages with effects";
const BUSINESS: &str = "run the query `business` of the comparison (it returns tenant, type and a count, and has the parameters @from_ms and @to_ms)";
const CHANGES: &str = "run the query `changes` of the comparison (it returns aggregate type, aggregate id and version, and has the parameters @from_ms and @to_ms)";
/// Ids that are read at once.
const PAGE: usize = 50_000;
/// Groups of one span that are told apart.
const GROUPS_MAX: usize = 10_000;

fn ids_from(rows: Vec<String>) -> Result<Vec<MessageId>, Failed> {
    Ok(rows.iter().map(|id| uuid(id).map(MessageId::from)).collect::<Result<_, _>>()?)
}

/// The id as a text that is ordered like its bytes. The server orders ids by their last bytes first, and the time is in the first ones.
fn ordered(id: &str) -> String {
    format!("convert(nchar(36), {id}) collate Latin1_General_100_BIN2")
}

/// The condition on an id that its time is in a span, with its parameters. The server writes ids in capitals.
fn of_span(id: &str, span: Span) -> (String, Named) {
    let (from, to) = span.ids();
    let id = ordered(id);
    let parameters = named! { "from_id" => capitals(from), "to_id" => capitals(to) };
    (format!("{id} >= @from_id and {id} < @to_id"), parameters)
}

fn capitals(id: Uuid) -> String {
    id.to_string().to_uppercase()
}

/// Counts of ids and their XOR by piece. The server has no such aggregate.
fn print(prints: &mut IdPrints, ids: &[String], piece_ms: i64) -> Result<(), Error> {
    for id in ids {
        let id = uuid(id)?;
        let print = prints.entry(id_ms(&id) / piece_ms.max(1)).or_default();
        print.ids += 1;
        print.xor ^= id.as_u64_pair().1;
    }
    Ok(())
}

/// When the oldest and the newest message were written.
pub(crate) async fn outbox_times(conn: &mut Conn, plausible: Span) -> Result<Option<Span>, Failed> {
    let sql = format!(
        "select count_big(*) from (select top (1000) id from postroom_outbox order by seq desc) o where substring({}, 15, 1) <> '7'",
        ordered("o.id")
    );
    let others: i64 = conn.first(&sql, named! {}).await?.unwrap_or_default();
    if others > 0 {
        let source = format!(
            "{others} of the newest messages have ids that are not UUIDv7, so there is no time in them to compare by"
        );
        return Err(StoreError::Refused { what: WHAT, source: source.into() }.into());
    }
    let (of_span, parameters) = of_span("o.id", plausible);
    let (least, most) = (format!("min({})", ordered("o.id")), format!("max({})", ordered("o.id")));
    let sql = format!("select {least}, {most} from postroom_outbox o where {of_span}");
    let edges: Option<(Option<String>, Option<String>)> = conn.first(&sql, parameters).await?;
    Ok(match edges {
        Some((Some(oldest), Some(newest))) => {
            Some(Span { from_ms: id_ms(&uuid(&oldest)?), to_ms: id_ms(&uuid(&newest)?) + 1 })
        }
        _ => None,
    })
}

/// Messages whose ids lie outside a span.
pub(crate) async fn outbox_outside(conn: &mut Conn, span: Span) -> Result<u64, Failed> {
    let (of_span, parameters) = of_span("o.id", span);
    let sql = format!(
        "select count_big(*) from (select top (20000) 1 as one from postroom_outbox o where not ({of_span})) x"
    );
    Ok(conn.first::<i64>(&sql, parameters).await?.unwrap_or_default().unsigned_abs())
}

/// Ids of the outbox, piece by piece.
pub(crate) async fn outbox_prints(
    conn: &mut Conn,
    topics: &TopicFilter,
    span: Span,
    piece_ms: i64,
) -> Result<IdPrints, Failed> {
    let mut prints = IdPrints::default();
    let mut after = i64::MIN;
    loop {
        let (of_span, mut parameters) = of_span("o.id", span);
        let takes = takes(topics, "t", &mut parameters);
        parameters.extend(named! { "after" => after });
        let sql = format!(
            "select top ({PAGE}) o.seq, o.id from postroom_outbox o where o.seq > @after and {of_span} and {takes} order by o.seq"
        );
        let page: Vec<(i64, String)> = conn.query(&sql, parameters).await?;
        let Some((last, _)) = page.last() else { return Ok(prints) };
        after = *last;
        let ids: Vec<String> = page.into_iter().map(|(_, id)| id).collect();
        print(&mut prints, &ids, piece_ms)?;
    }
}

/// Ids of the outbox.
pub(crate) async fn outbox_ids(conn: &mut Conn, topics: &TopicFilter, span: Span) -> Result<Vec<MessageId>, Failed> {
    let (of_span, mut parameters) = of_span("o.id", span);
    let takes = takes(topics, "t", &mut parameters);
    let sql = format!("select o.id from postroom_outbox o where {of_span} and {takes} order by {}", ordered("o.id"));
    ids_from(conn.query(&sql, parameters).await?)
}

/// The time in the oldest id of an inbox.
pub(crate) async fn inbox_begins(conn: &mut Conn, consumer: &Consumer) -> Result<Option<i64>, Failed> {
    let sql = format!("select min({}) from postroom_inbox i where i.consumer = @consumer", ordered("i.message_id"));
    let oldest: Option<Option<String>> = conn.first(&sql, named! { "consumer" => consumer.as_str() }).await?;
    Ok(oldest.flatten().map(|id| uuid(&id)).transpose()?.map(|id| id_ms(&id)))
}

/// Ids of an inbox, piece by piece.
pub(crate) async fn inbox_prints(
    conn: &mut Conn,
    consumer: &Consumer,
    span: Span,
    piece_ms: i64,
) -> Result<IdPrints, Failed> {
    let mut prints = IdPrints::default();
    // In the server's own order of ids, by the primary key.
    let mut after: Option<String> = None;
    loop {
        let (of_span, mut parameters) = of_span("i.message_id", span);
        parameters.extend(named! { "consumer" => consumer.as_str(), "after" => after });
        let sql = format!(
            "select top ({PAGE}) i.message_id from postroom_inbox i
              where i.consumer = @consumer and (@after is null or i.message_id > convert(uniqueidentifier, @after)) and {of_span}
              order by i.message_id"
        );
        let ids: Vec<String> = conn.query(&sql, parameters).await?;
        let Some(last) = ids.last() else { return Ok(prints) };
        after = Some(last.clone());
        print(&mut prints, &ids, piece_ms)?;
    }
}

/// Ids of an inbox.
pub(crate) async fn inbox_ids(conn: &mut Conn, consumer: &Consumer, span: Span) -> Result<Vec<MessageId>, Failed> {
    let (of_span, mut parameters) = of_span("i.message_id", span);
    parameters.extend(named! { "consumer" => consumer.as_str() });
    let sql = format!(
        "select i.message_id from postroom_inbox i where i.consumer = @consumer and {of_span} order by {}",
        ordered("i.message_id")
    );
    ids_from(conn.query(&sql, parameters).await?)
}

/// What a consumer has received without an effect so far.
pub(crate) async fn inbox_unhandled(conn: &mut Conn, consumer: &Consumer, span: Span) -> Result<Unhandled, Failed> {
    let mut counts = [0; 2];
    for (count, table) in counts.iter_mut().zip(["inbox_messages", "dead_consume"]) {
        let (of_span, mut parameters) = of_span("x.id", span);
        parameters.extend(named! { "consumer" => consumer.as_str() });
        let sql = format!("select count_big(*) from postroom_{table} x where x.consumer = @consumer and {of_span}");
        *count = conn.first::<i64>(&sql, parameters).await?.unwrap_or_default().unsigned_abs();
    }
    Ok(Unhandled { waiting: counts[0], dead: counts[1] })
}

/// Which of these are dead letters of a consumer.
pub(crate) async fn dead_at(conn: &mut Conn, consumer: &Consumer, ids: &[MessageId]) -> Result<Vec<MessageId>, Failed> {
    let sql = "select d.id from openjson(@ids) with (id uniqueidentifier '$') n
                 join postroom_dead_consume d on d.consumer = @consumer and d.id = n.id";
    ids_from(conn.query(sql, named! { "ids" => json(ids), "consumer" => consumer.as_str() }).await?)
}

/// Whether a message `o` is dead on a route, and whether it waits there.
const DEAD: &str =
    "case when exists (select 1 from postroom_dead_letters d where d.route = @route and d.seq = o.seq and d.id = o.id)
                    then 1 else 0 end as dead";
const WAITS: &str = "case when o.place is null
                            or o.place > coalesce((select l.position from postroom_lanes l where l.route = @route and l.lane = o.lane), 0)
                            or exists (select 1 from postroom_parked p where p.route = @route and p.seq = o.seq and p.id = o.id)
                     then 1 else 0 end as waits";

/// Where messages are on a route.
pub(crate) async fn fates(conn: &mut Conn, route: &str, ids: &[MessageId]) -> Result<Vec<(MessageId, Fate)>, Failed> {
    let Some(settings) = routes::settings(conn, route).await? else {
        return Ok(ids.iter().map(|id| (*id, Fate::Unrouted)).collect());
    };
    let sql = format!(
        "select o.id, o.topic, {DEAD}, {WAITS} from openjson(@ids) with (id uniqueidentifier '$') n join postroom_outbox o on o.id = n.id"
    );
    let rows: Vec<(String, String, bool, bool)> =
        conn.query(&sql, named! { "route" => route, "ids" => json(ids) }).await?;
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
    let (of_span, mut parameters) = of_span("o.id", span);
    let takes = takes(topics, "t", &mut parameters);
    parameters.extend(named! { "route" => route });
    let sql = format!(
        "select top ({GROUPS_MAX}) x.tenant_id, x.type, count_big(*) as committed,
                convert(bigint, sum(case when x.dead = 0 and x.waits = 1 then 1 else 0 end)) as waiting,
                convert(bigint, sum(x.dead)) as dead
           from (select o.tenant_id, o.type, {DEAD}, {WAITS} from postroom_outbox o where {of_span} and {takes}) x
          group by x.tenant_id, x.type"
    );
    let rows = conn.rows(&sql, parameters).await?;
    let tally = |row: &Row| {
        let count = |column| get::<i64>(row, column).map(i64::unsigned_abs);
        let (committed, waiting, dead) = (count("committed")?, count("waiting")?, count("dead")?);
        Ok::<_, Error>(Tally { tenant: get(row, "tenant_id")?, kind: get(row, "type")?, committed, waiting, dead })
    };
    Ok(rows.iter().map(tally).collect::<Result<_, _>>()?)
}

/// The application's own tables.
pub(crate) async fn business(
    conn: &mut Conn,
    query: &str,
    span: Span,
) -> Result<Vec<(Option<String>, String, u64)>, Failed> {
    let rows = read_only(conn, query, of_times(span)).await.map_err(|error| refused(BUSINESS, error))?;
    let mut changes = Vec::with_capacity(rows.len());
    for row in &rows {
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
    let rows = read_only(conn, query, named! {}).await.map_err(|error| refused(DISCOVER, error))?;
    let found = rows.iter().map(|row| row.cells().take(2).map(|(_, cell)| text(cell)).collect());
    Ok(Discovered::of(found.collect())?)
}

/// What somebody else wrote runs where it changes nothing: the server has no transactions that only read, so it is rolled back. A query that ends its
/// transaction is refused; the role that it runs with should have no right to change anything.
async fn read_only(conn: &mut Conn, query: &str, parameters: Named) -> Result<Vec<Row>, Error> {
    conn.begin().await?;
    let number = "select convert(bigint, current_transaction_id())";
    let begun: Option<i64> = conn.first(number, named! {}).await?;
    let rows = conn.rows(query.trim().trim_end_matches(';'), parameters).await?;
    if conn.first::<i64>(number, named! {}).await? != begun {
        return Err(Error::Conversion("it ended the transaction that it runs in".into()));
    }
    conn.rollback().await?;
    Ok(rows)
}

/// A query that is wrong stays wrong.
fn refused(what: &'static str, error: Error) -> Failed {
    match store_error(what, error) {
        StoreError::Schema { problem, .. } => StoreError::Refused { what, source: problem.into() }.into(),
        other => other.into(),
    }
}

fn of_times(span: Span) -> Named {
    named! { "from_ms" => span.from_ms, "to_ms" => span.to_ms }
}

/// The three columns of an answer, as text.
fn cells(row: &Row, what: &'static str) -> Result<[Option<String>; 3], StoreError> {
    if row.len() != 3 {
        let source = format!("it returns {} columns", row.len()).into();
        return Err(StoreError::Refused { what, source });
    }
    let mut cells = [None, None, None];
    for (cell, (_, value)) in cells.iter_mut().zip(row.cells()) {
        *cell = text(value);
    }
    Ok(cells)
}

/// What a cell says, as text.
fn text(cell: &ColumnData<'static>) -> Option<String> {
    match cell {
        ColumnData::String(value) => value.as_ref().map(|text| text.clone().into_owned()),
        ColumnData::Guid(value) => value.map(|id| id.hyphenated().to_string()),
        ColumnData::Numeric(value) => value.map(|number| number.to_string()),
        ColumnData::F64(value) => value.map(|number| number.to_string()),
        ColumnData::F32(value) => value.map(|number| number.to_string()),
        other => Option::<i64>::from_column(other).flatten().map(|number| number.to_string()),
    }
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
    let changes = read_only(conn, query, of_times(changed)).await.map_err(|error| refused(CHANGES, error))?;
    let (of_span, mut parameters) = of_span("o.id", written);
    let takes = takes(topics, "t", &mut parameters);
    let sql = format!(
        "select o.aggregate_type, o.aggregate_id, o.aggregate_version from postroom_outbox o
          where {of_span} and {takes} and o.aggregate_id is not null"
    );
    let rows: Vec<(Option<String>, String, Option<i64>)> = conn.query(&sql, parameters).await?;
    let mut messages: HashMap<String, Versions> = HashMap::new();
    for (kind, id, version) in rows {
        let versions = messages.entry(id).or_default();
        // As every question may be put: with type and version, or without one of them.
        for kind in [kind, None] {
            versions.extend([(kind.clone(), version), (kind, None)]);
        }
    }
    let mut found = Unwritten::default();
    for row in &changes {
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
    let tx = begin(conn).await?;
    let sql = format!(
        "insert into postroom_reconciliations (name, at, missing, strangers, days, result)
         select @name, x.at, @missing, @strangers, @days, @result from (select {NOW} as at) x
          where not exists (select 1 from postroom_reconciliations r with (updlock, holdlock) where r.name = @name and r.at = x.at)"
    );
    let parameters = named! {
        "name" => &result.name, "missing" => count(result.missing()), "strangers" => count(result.strangers()),
        "days" => count(result.days_that_differ()), "result" => text
    };
    tx.exec(&sql, parameters).await?;
    let sql = "select min(x.at) from (select top (100) at from postroom_reconciliations where name = @name order by at desc) x";
    let sql = format!("delete from postroom_reconciliations where name = @name and at < ({sql})");
    tx.exec(&sql, named! { "name" => &result.name }).await?;
    tx.commit().await?;
    Ok(())
}

/// The newest results.
pub(crate) async fn reconciled(conn: &mut Conn, name: Option<&str>) -> Result<Vec<Reconciled>, Failed> {
    let sql = "select r.result from postroom_reconciliations r
                where (@name is null or r.name = @name)
                  and r.at = (select max(n.at) from postroom_reconciliations n where n.name = r.name) order by r.name";
    let results: Vec<String> = conn.query(sql, named! { "name" => name }).await?;
    Ok(results.iter().map(|result| serde_json::from_str(result)).collect::<Result<_, _>>()?)
}
