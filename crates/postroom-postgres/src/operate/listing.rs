//! Messages as an operator looks them up, and the test message that an operator sends.

use postroom::{
    BoxError, Deed, Listed, ListedMessage, ListedPlace, Message, MessageFilter, MessageId, Outbox, StoreError,
    StoredMessage, headers_from_json,
};
use tokio_postgres::Row;

use crate::Postgres;
use crate::connect::Connector;
use crate::link::store_error;
use crate::operate::dead::audit;
use crate::operate::session::OperatorSession;
use crate::text::{shown, shown_opt, word};

/// So many rows are looked at for a page: of the outbox, among the parked and among the dead messages, each; over all routes that are asked for.
const ROWS_MAX: i64 = 8_000;

/// Messages by filter, newest first.
pub(crate) async fn messages(connector: &Connector, filter: &MessageFilter, limit: i64) -> Result<Listed, StoreError> {
    const WHAT: &str = "look for messages";
    let failed = |error| store_error(WHAT, error);
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.look().await?;
    let MessageFilter { route, topic, key, place, newer_than, older_than, after } = filter;
    let place = place.map(ListedPlace::as_str);
    let (newer, older) = (newer_than.map(|age| age.as_secs_f64()), older_than.map(|age| age.as_secs_f64()));
    let after_seq = after.as_ref().map(|after| after.seq);
    let entry = after.as_ref().and_then(|after| after.entry.as_ref());
    let after_id = entry.map(|entry| entry.id.replace('-', ""));
    let after_route = entry.map(|entry| entry.route.as_deref().unwrap_or_default());
    // One more than asked for tells whether there are more.
    let more = limit.saturating_add(1);
    // As many rows as could all be on the page; more, when too few of them match.
    let (few, many) = (more.max(100), more.max(ROWS_MAX));
    for share in [few, (few * 10).min(many), many] {
        let rows = tx
            .query(
                include_str!("sql/messages.sql"),
                &[route, topic, key, &place, &newer, &older, &more, &share, &many, &after_seq, &after_id, &after_route],
            )
            .await
            .map_err(failed)?;
        let (mut found, mut read_to) = (Vec::new(), None);
        for row in &rows {
            if row.try_get::<_, Option<uuid::Uuid>>(1).map_err(failed)?.is_some() {
                let message = one(row).map_err(|source| StoreError::Refused { what: WHAT, source })?;
                found.push((message, row.try_get(8).map_err(failed)?));
            } else {
                read_to = row.try_get(8).map_err(failed)?;
            }
        }
        if share == many || read_to.is_none() || found.len() as i64 > limit {
            return Ok(Listed::page(found, limit, read_to));
        }
    }
    Ok(Listed::page(Vec::new(), limit, None))
}

fn one(row: &Row) -> Result<ListedMessage, BoxError> {
    Ok(ListedMessage {
        route: shown_opt(row, 0)?,
        id: row.try_get::<_, uuid::Uuid>(1)?.to_string(),
        state: word(row, 2, ListedPlace::of)?,
        topic: shown(row, 3)?,
        kind: shown(row, 4)?,
        key: shown_opt(row, 5)?,
        attempts: row.try_get(6)?,
        age_seconds: row.try_get(7)?,
    })
}

/// One message with its payload.
pub(crate) async fn message(connector: &Connector, id: MessageId) -> Result<Option<StoredMessage>, StoreError> {
    let failed = |error| store_error("look for a message", error);
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.look().await?;
    let row = tx.query_opt(include_str!("sql/message.sql"), &[id.as_uuid()]).await.map_err(failed)?;
    row.map(|row| {
        Ok(StoredMessage {
            found_in: row.try_get(0)?,
            id: row.try_get::<_, uuid::Uuid>(1)?.to_string(),
            topic: shown(&row, 2)?,
            kind: shown(&row, 3)?,
            key: shown_opt(&row, 4)?,
            routing_key: shown_opt(&row, 5)?,
            content_type: shown(&row, 6)?,
            headers: headers_from_json(shown_opt(&row, 7)?.as_deref()),
            tenant_id: shown_opt(&row, 8)?,
            aggregate_type: shown_opt(&row, 9)?,
            aggregate_id: shown_opt(&row, 10)?,
            aggregate_version: row.try_get(11)?,
            age_seconds: row.try_get::<_, Option<f64>>(12)?.unwrap_or_default(),
            payload: row.try_get(13)?,
        })
    })
    .transpose()
    .map_err(failed)
}

/// Leaves an audit row about somebody who looks at a payload.
pub(crate) async fn note_payload_read(connector: &Connector, id: MessageId, deed: &Deed) -> Result<(), StoreError> {
    let failed = |error| store_error("note that a payload is read; it was not shown", error);
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.deed().await?;
    audit(&tx, deed, "payload.read", "{}", &[&id.to_string()]).await.map_err(failed)?;
    tx.commit().await.map_err(failed)
}

/// Writes one message, in a transaction of its own.
pub(crate) async fn send(connector: &Connector, message: &Message) -> Result<(), StoreError> {
    const WHAT: &str = "write the message; nothing was written";
    let mut session = OperatorSession::open(connector).await?;
    let mut tx = session.deed().await?;
    Postgres
        .enqueue(&mut tx, std::slice::from_ref(message))
        .await
        .map_err(|error| StoreError::Refused { what: WHAT, source: error.into() })?;
    tx.commit().await.map_err(|error| store_error(WHAT, error))
}
