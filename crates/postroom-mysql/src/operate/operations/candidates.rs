//! Which messages an operation is about.

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Error, Params, Row};
use postroom::{
    Candidate, Candidates, Cause, Headline, MessageId, NewOperation, OperationFilter, OperationKind, Side, Survey,
};

use crate::desk::Failed;
use crate::log::{get, json};
use crate::operate::word;
use crate::routes::{self, Named, takes};

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
        let sql = "select count(*) from json_table(?, '$[*]' columns (id char(36) character set ascii path '$')) n
                     straight_join postroom_inbox i on i.consumer = ? and i.message_id = n.id";
        for consumer in crate::operate::consumers(conn, &["inbox"]).await? {
            let count: i64 = conn.exec_first(sql, (json(&ids), &consumer)).await?.unwrap_or_default();
            if count > 0 {
                *survey.remembered_by.entry(consumer).or_default() += count.unsigned_abs();
            }
        }
    }
    if operation.side == Side::Out && !keys.is_empty() && survey.blocked_keys.len() < 20 {
        let sql = "select distinct b.ordering_key from postroom_blocked_keys b
                     join json_table(?, '$[*]' columns (k varchar(512) path '$')) n on n.k = b.ordering_key
                    where b.route = ? order by 1 limit 20";
        let blocked: Vec<String> = conn.exec(sql, (json(&keys), &operation.route)).await?;
        for key in blocked {
            if survey.blocked_keys.len() < 20 && !survey.blocked_keys.contains(&key) {
                survey.blocked_keys.push(key);
            }
        }
    }
    Ok(survey)
}

/// The last seq that an operation may be about: what is written, or dies, later is not meant.
pub(super) async fn upto(conn: &mut impl Queryable, operation: &NewOperation) -> Result<i64, Error> {
    if operation.kind == OperationKind::Replay {
        let newest = "select seq from postroom_outbox order by seq desc limit 1";
        return Ok(conn.query_first(newest).await?.unwrap_or_default());
    }
    let sql = match operation.side {
        Side::Out => "select coalesce(max(seq), 0) from postroom_dead_letters where route = ?",
        Side::In => "select coalesce(max(seq), 0) from postroom_dead_consume where consumer = ?",
    };
    Ok(conn.exec_first(sql, (&operation.route,)).await?.unwrap_or_default())
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
        (true, _) => {
            ("outbox", ":route is not null", "coalesce(o.`key`, o.aggregate_id)", "o.occurred_at", "'permanent'", "''")
        }
        (_, Side::Out) => (
            "dead_letters",
            "o.route = :route",
            "coalesce(o.`key`, o.aggregate_id)",
            "o.died_at",
            "o.cause",
            "left(o.error, 1000)",
        ),
        (_, Side::In) => {
            ("dead_consume", "o.consumer = :route", "o.ordering_key", "o.died_at", "o.cause", "left(o.error, 1000)")
        }
    };
    let mut named: Named =
        vec![("route".to_owned(), (*route).into()), ("from".to_owned(), from.into()), ("upto".to_owned(), upto.into())];
    let mut ids = String::new();
    if !filter.ids.is_empty() {
        let wanted: Vec<String> = filter.ids.iter().map(MessageId::to_string).collect();
        named.push(("ids".to_owned(), json(&wanted).into()));
        ids.push_str(" and o.id in (select n.id from json_table(:ids, '$[*]' columns (id char(36) character set ascii path '$')) n)");
    }
    let page = format!(
        "select o.seq from postroom_{table} o where {of} and o.seq > :from and o.seq <= :upto{ids} order by o.seq limit {ROWS}"
    );
    let rows: Vec<i64> = conn.exec(page, Params::from(named.clone())).await?;
    let to_seq = rows.last().copied().filter(|_| rows.len() >= ROWS).unwrap_or(upto);
    named.retain(|(name, _)| name != "upto");
    named.push(("upto".to_owned(), to_seq.into()));

    let mut conditions = String::new();
    let mut only = |condition: String, name: &str, value: mysql_async::Value| {
        conditions.push_str(&format!(" and {condition}"));
        named.push((name.to_owned(), value));
    };
    for (comparison, name, ms) in [(">=", "since", filter.since_ms), ("<", "until", filter.until_ms)] {
        if let Some(ms) = ms {
            let condition = format!("timestampdiff(microsecond, '1970-01-01', {at}) {comparison} :{name}");
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
            only(format!("{column} = :{name}"), name, value.into());
        }
    }
    if let Some(part) = &filter.error {
        only(format!("instr({error}, :error) > 0"), "error", part.into());
    }
    let ready = if replay {
        let settings = routes::settings(conn, route).await?;
        let takes = settings.map_or("false".to_owned(), |settings| takes(&settings.topics, "t", &mut named));
        conditions.push_str(&format!(" and {takes}"));
        "coalesce(o.place <= (select l.position from postroom_lanes l where l.route = :route and l.lane = o.lane), 0)
           and not exists (select 1 from postroom_parked p where p.route = :route and p.seq = o.seq and p.id = o.id)
           and not exists (select 1 from postroom_dead_letters d where d.route = :route and d.seq = o.seq and d.id = o.id)"
    } else {
        "1"
    };
    let sql = format!(
        "select o.seq, o.id, o.type, o.topic, {key} as ordering_key, timestampdiff(microsecond, '1970-01-01', {at}) div 1000 as at_ms,
                {cause} as cause, {error} as error, timestampdiff(microsecond, {at}, utc_timestamp(6)) / 1e6 as ago, {ready} as ready
           from postroom_{table} o
          where {of} and o.seq > :from and o.seq <= :upto{ids}{conditions} order by o.seq"
    );
    let rows: Vec<Row> = conn.exec(sql, Params::from(named)).await?;
    let mut found = Vec::with_capacity(rows.len());
    for mut row in rows {
        let row = &mut row;
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
