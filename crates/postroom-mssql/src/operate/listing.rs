//! Messages as an operator looks them up, and the test message that an operator sends.

use postroom::{
    Deed, EnqueueError, Listed, ListedMessage, ListedPlace, Message, MessageFilter, MessageId, Outbox, StoreError,
    StoredMessage, headers_from_json,
};

use crate::Mssql;
use crate::conn::Conn;
use crate::desk::{Failed, begin};
use crate::operate::audit::audit;
use crate::routes::{self, takes};
use crate::sql::{age, ago, get, named, same, seconds_since};

/// So many rows of the outbox are looked at for a page.
const ROWS_MAX: i64 = 5_000;

/// Messages by filter, newest first.
pub(crate) async fn messages(conn: &mut Conn, filter: &MessageFilter, limit: i64) -> Result<Listed, Failed> {
    let MessageFilter { route, topic, key, place, newer_than, older_than, after } = filter;
    let upto = after.as_ref().map_or(i64::MAX, |after| after.seq);
    let of_outbox =
        place.is_none_or(|place| matches!(place, ListedPlace::Waiting | ListedPlace::Done | ListedPlace::Unrouted));
    // To this row the page reads; below it, nothing of the other tables is shown either.
    let sql = format!(
        "select min(x.seq), count_big(*) from (select top ({ROWS_MAX}) seq from postroom_outbox where seq <= @upto order by seq desc) x"
    );
    let read_to: Option<i64> = match of_outbox {
        true => match conn.first::<(Option<i64>, i64)>(&sql, named! { "upto" => upto }).await? {
            Some((read_to, ROWS_MAX)) => read_to,
            _ => None,
        },
        false => None,
    };
    let entry = after.as_ref().and_then(|after| after.entry.as_ref());
    let mut parameters = named! {
        "route" => route.as_ref(), "topic" => topic.as_ref(), "key" => key.as_ref(), "state" => place.map(ListedPlace::as_str),
        "newer" => newer_than.map(age), "older" => older_than.map(age), "limit" => limit.max(0).saturating_add(1),
        "read_to" => read_to.unwrap_or(i64::MIN), "upto" => upto, "of_outbox" => of_outbox, "is_first" => after.is_none(),
        "after_id" => entry.map(|entry| entry.id.as_str()),
        "after_route" => entry.map(|entry| entry.route.as_deref().unwrap_or_default())
    };
    let (mut by_route, mut by_any) = (vec!["1 = 0".to_owned()], vec!["1 = 0".to_owned()]);
    for (index, (name, settings)) in routes::all(conn).await?.into_iter().enumerate() {
        let takes = takes(&settings.topics, &format!("t{index}"), &mut parameters);
        by_route.push(format!("(r.name = @r{index} and {takes})"));
        by_any.push(takes);
        parameters.push((format!("r{index}").into(), name.into()));
    }
    let (by_route, by_any) = (by_route.join(" or "), by_any.join(" or "));
    let (newer, older) = (ago("@newer"), ago("@older"));
    let sql = format!(
        "with looked as (select seq, lane, place, id, topic, type, coalesce([key], aggregate_id) as ordering_key, occurred_at
                           from postroom_outbox where @of_outbox = 1 and seq between @read_to and @upto)
         select top (@limit) m.route, m.id, m.state, m.topic, m.type, m.ordering_key, m.attempts, m.seq, {} as age
           from (
             select r.name as route, o.id, case when o.place <= l.position then 'done' else 'waiting' end as state,
                    o.topic, o.type, o.ordering_key, 0 as attempts, o.occurred_at, o.seq
               from looked o cross join postroom_routes r join postroom_lanes l on l.route = r.name and l.lane = o.lane
              where ({by_route})
                and not exists (select 1 from postroom_parked p where p.route = r.name and p.seq = o.seq and p.id = o.id)
                and not exists (select 1 from postroom_dead_letters d where d.route = r.name and d.seq = o.seq and d.id = o.id)
             union all
             select null, o.id, 'unrouted', o.topic, o.type, o.ordering_key, 0, o.occurred_at, o.seq from looked o
              where not ({by_any})
             union all
             select route, id, state, topic, type, coalesce([key], aggregate_id), attempts, occurred_at, seq from postroom_parked
              where seq between @read_to and @upto
             union all
             select route, id, 'dead', topic, type, coalesce([key], aggregate_id), attempts, occurred_at, seq from postroom_dead_letters
              where seq between @read_to and @upto) m
          where (@route is null or m.route = @route) and (@topic is null or {}) and (@key is null or {})
            and (@state is null or m.state = @state)
            and (@newer is null or m.occurred_at >= {newer}) and (@older is null or m.occurred_at <= {older})
            and (@is_first = 1 or m.seq < @upto
                 or (m.seq = @upto and (m.id < @after_id or (m.id = @after_id and coalesce(m.route, N'') > @after_route))))
          order by m.seq desc, m.id desc, coalesce(m.route, N'')",
        seconds_since("m.occurred_at"),
        same("m.topic", "@topic"),
        same("m.ordering_key", "@key")
    );
    let rows = conn.rows(&sql, parameters).await?;
    let mut found = Vec::with_capacity(rows.len());
    for row in &rows {
        let message = ListedMessage {
            route: get(row, "route")?,
            id: get(row, "id")?,
            state: super::word(row, "state", ListedPlace::of)?,
            topic: get(row, "topic")?,
            kind: get(row, "type")?,
            key: get(row, "ordering_key")?,
            attempts: get(row, "attempts")?,
            age_seconds: get(row, "age")?,
        };
        found.push((message, get(row, "seq")?));
    }
    Ok(Listed::page(found, limit, read_to))
}

/// One message with its payload, from the first table that has it.
pub(crate) async fn message(conn: &mut Conn, id: MessageId) -> Result<Option<StoredMessage>, Failed> {
    let id = id.to_string();
    for table in ["outbox", "dead_letters", "dead_consume", "parked", "inbox_messages"] {
        let sql = format!(
            "select top (1) id, topic, type, payload, [key], routing_key, content_type, headers, tenant_id, aggregate_type, aggregate_id,
                    aggregate_version, coalesce({}, 0) as age
               from postroom_{table} where id = @id",
            seconds_since("occurred_at")
        );
        let rows = conn.rows(&sql, named! { "id" => &id }).await?;
        let Some(row) = rows.first() else { continue };
        return Ok(Some(StoredMessage {
            found_in: table.to_owned(),
            id: get(row, "id")?,
            topic: get(row, "topic")?,
            kind: get(row, "type")?,
            key: get(row, "key")?,
            routing_key: get(row, "routing_key")?,
            content_type: get(row, "content_type")?,
            headers: headers_from_json(get::<Option<String>>(row, "headers")?.as_deref()),
            tenant_id: get(row, "tenant_id")?,
            aggregate_type: get(row, "aggregate_type")?,
            aggregate_id: get(row, "aggregate_id")?,
            aggregate_version: get(row, "aggregate_version")?,
            age_seconds: get(row, "age")?,
            payload: get(row, "payload")?,
        }));
    }
    Ok(None)
}

/// Writes one message, in a transaction of its own.
pub(crate) async fn send(conn: &mut Conn, message: &Message) -> Result<(), Failed> {
    let tx = begin(conn).await?;
    Mssql.enqueue(tx, std::slice::from_ref(message)).await.map_err(|error: EnqueueError| StoreError::Refused {
        what: "write the message; nothing was written",
        source: error.into(),
    })?;
    // The outbox uses the caller's connection, and has waited for its answer.
    tx.doubtful = false;
    tx.commit().await?;
    Ok(())
}

/// Leaves an audit row about somebody who looks at a payload.
pub(crate) async fn note_payload_read(conn: &mut Conn, id: MessageId, deed: &Deed) -> Result<(), Failed> {
    Ok(audit(conn, deed, "payload.read", "{}", &[id.to_string()]).await?)
}
