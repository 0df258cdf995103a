//! Which messages an operation is about.

use postroom::{
    Candidate, Candidates, Cause, Headline, MessageId, NewOperation, OperationFilter, OperationKind, Side, Survey,
};
use tiberius::error::Error;

use crate::conn::Conn;
use crate::desk::Failed;
use crate::operate::{hash, word};
use crate::routes::{self, takes};
use crate::sql::{Value, get, json, named, same, seconds_since, since_1970};

/// Rows that one look reads.
const ROWS: usize = 2_000;

/// One look at what an operation would be about.
pub(crate) async fn survey(conn: &mut Conn, operation: &NewOperation, mut survey: Survey) -> Result<Survey, Failed> {
    let upto = upto(conn, operation).await?;
    let scope =
        Scope { kind: operation.kind, side: operation.side, route: &operation.route, filter: &operation.filter };
    let found = candidates(conn, &scope, survey.to_seq, upto).await?;
    let (ids, keys) = survey.add(&found);
    if !ids.is_empty() && operation.kind == OperationKind::Replay {
        let sql = "select count_big(*) from openjson(@ids) with (id uniqueidentifier '$') n
                     join postroom_inbox i on i.consumer = @consumer and i.message_id = n.id";
        for consumer in crate::operate::consumers(conn, &["inbox"]).await? {
            let parameters = named! { "ids" => json(&ids), "consumer" => &consumer };
            let count: i64 = conn.first(sql, parameters).await?.unwrap_or_default();
            if count > 0 {
                *survey.remembered_by.entry(consumer).or_default() += count.unsigned_abs();
            }
        }
    }
    if operation.side == Side::Out && !keys.is_empty() && survey.blocked_keys.len() < 20 {
        let sql = format!(
            "select distinct top (20) b.ordering_key
               from openjson(@keys) with (ordering_key nvarchar(512) '$') n
               join postroom_blocked_keys b on b.route = @route and b.key_hash = {} order by b.ordering_key",
            hash("n.ordering_key")
        );
        let parameters = named! { "keys" => json(&keys), "route" => &operation.route };
        let blocked: Vec<String> = conn.query(&sql, parameters).await?;
        for key in blocked {
            if survey.blocked_keys.len() < 20 && !survey.blocked_keys.contains(&key) {
                survey.blocked_keys.push(key);
            }
        }
    }
    Ok(survey)
}

/// The last seq that an operation may be about: what is written, or dies, later is not meant.
pub(super) async fn upto(conn: &mut Conn, operation: &NewOperation) -> Result<i64, Error> {
    let sql = match (operation.kind, operation.side) {
        (OperationKind::Replay, _) => "select coalesce(max(seq), 0) from postroom_outbox",
        (_, Side::Out) => "select coalesce(max(seq), 0) from postroom_dead_letters where route = @route",
        (_, Side::In) => "select coalesce(max(seq), 0) from postroom_dead_consume where consumer = @route",
    };
    Ok(conn.first(sql, named! { "route" => &operation.route }).await?.unwrap_or_default())
}

pub(super) struct Scope<'a> {
    pub kind: OperationKind,
    pub side: Side,
    pub route: &'a str,
    pub filter: &'a OperationFilter,
}

pub(super) async fn candidates(conn: &mut Conn, scope: &Scope<'_>, from: i64, upto: i64) -> Result<Candidates, Error> {
    let Scope { kind, side, route, filter } = scope;
    let replay = *kind == OperationKind::Replay;
    let (table, of, key, at, cause, error) = match (replay, side) {
        (true, _) => ("outbox", "1 = 1", "coalesce(o.[key], o.aggregate_id)", "o.occurred_at", "'permanent'", "N''"),
        (_, Side::Out) => (
            "dead_letters",
            "o.route = @route",
            "coalesce(o.[key], o.aggregate_id)",
            "o.died_at",
            "o.cause",
            "left(o.error, 1000)",
        ),
        (_, Side::In) => {
            ("dead_consume", "o.consumer = @route", "o.ordering_key", "o.died_at", "o.cause", "left(o.error, 1000)")
        }
    };
    let mut parameters = named! { "route" => *route, "from" => from };
    let mut ids = "";
    if !filter.ids.is_empty() {
        let wanted: Vec<String> = filter.ids.iter().map(MessageId::to_string).collect();
        parameters.extend(named! { "ids" => json(&wanted) });
        ids = " and o.id in (select n.id from openjson(@ids) with (id uniqueidentifier '$') n)";
    }
    let page = format!(
        "select top ({ROWS}) o.seq from postroom_{table} o where {of} and o.seq > @from and o.seq <= @upto{ids} order by o.seq"
    );
    let mut of_page = parameters.clone();
    of_page.extend(named! { "upto" => upto });
    let rows: Vec<i64> = conn.query(&page, of_page).await?;
    let to_seq = rows.last().copied().filter(|_| rows.len() >= ROWS).unwrap_or(upto);
    parameters.extend(named! { "upto" => to_seq });

    let mut conditions = String::new();
    let mut only = |condition: String, name: &'static str, value: Value| {
        conditions.push_str(&format!(" and {condition}"));
        parameters.push((name.into(), value));
    };
    for (comparison, name, ms) in [(">=", "since", filter.since_ms), ("<", "until", filter.until_ms)] {
        if let Some(ms) = ms {
            let condition = format!("{} {comparison} @{name}", since_1970(at));
            only(condition, name, ms.saturating_mul(1000).into());
        }
    }
    for (column, name, value) in [
        ("o.topic", "topic", &filter.topic),
        ("o.type", "type", &filter.kind),
        (key, "key", &filter.key),
        ("o.tenant_id", "tenant", &filter.tenant_id),
        ("o.aggregate_id", "aggregate", &filter.aggregate_id),
    ] {
        if let Some(value) = value {
            only(same(column, &format!("@{name}")), name, value.into());
        }
    }
    if let Some(part) = &filter.error {
        only(format!("charindex(@error, {error}) > 0"), "error", part.into());
    }
    let ready = if replay {
        let settings = routes::settings(conn, route).await?;
        let takes = settings.map_or("1 = 0".to_owned(), |settings| takes(&settings.topics, "t", &mut parameters));
        conditions.push_str(&format!(" and {takes}"));
        "case when o.place <= (select l.position from postroom_lanes l where l.route = @route and l.lane = o.lane)
               and not exists (select 1 from postroom_parked p where p.route = @route and p.seq = o.seq and p.id = o.id)
               and not exists (select 1 from postroom_dead_letters d where d.route = @route and d.seq = o.seq and d.id = o.id)
         then 1 else 0 end"
    } else {
        "1"
    };
    let sql = format!(
        "select o.seq, o.id, o.type, o.topic, {key} as ordering_key, {} / 1000 as at_ms,
                {cause} as cause, {error} as error, {} as ago, {ready} as ready
           from postroom_{table} o
          where {of} and o.seq > @from and o.seq <= @upto{ids}{conditions} order by o.seq",
        since_1970(at),
        seconds_since(at)
    );
    let rows = conn.rows(&sql, parameters).await?;
    let mut found = Vec::with_capacity(rows.len());
    for row in &rows {
        let headline = Headline {
            route: (*route).to_owned(),
            seq: get(row, "seq")?,
            id: get(row, "id")?,
            kind: get(row, "type")?,
            cause: word(row, "cause", Cause::of)?,
            error: get(row, "error")?,
            died_seconds_ago: get(row, "ago")?,
        };
        found.push(Candidate {
            headline,
            topic: get(row, "topic")?,
            key: get(row, "ordering_key")?,
            at_ms: get(row, "at_ms")?,
            ready: get(row, "ready")?,
        });
    }
    Ok(Candidates { found, to_seq, all_read: to_seq >= upto }.of_group(*side, filter))
}
