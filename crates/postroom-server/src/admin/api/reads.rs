//! What may be looked at.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::Bytes;
use futures_util::StreamExt;
use futures_util::stream;
use postroom::{
    DeadCursor, DeadFilter, DeadLetter, ListedPlace, MessageFilter, OperationKind, OperationState, ShownOperation,
    Store,
};
use serde_json::{Value, json};

use super::answer::{Answer, escaped};
use super::call::Call;
use super::problem::Problem;
use postroom::OperationId;

type Result<T> = std::result::Result<T, Problem>;

pub(super) const LIMIT: (i64, i64) = (100, 1_000);
/// Between two events of an operation.
const EVENT_EVERY: Duration = Duration::from_secs(1);

pub(super) async fn status(call: Call) -> Result<Answer> {
    Ok(Answer::json(call.store.status().await?))
}

pub(super) async fn sizes(call: Call) -> Result<Answer> {
    Ok(Answer::json(call.store.vitals().await?))
}

pub(super) async fn routes(call: Call) -> Result<Answer> {
    Ok(Answer::json(json!({ "routes": call.store.routes().await? })))
}

pub(super) async fn messages(call: Call) -> Result<Answer> {
    let place = match call.text("state") {
        None => None,
        Some(state) => Some(ListedPlace::of(&state).ok_or_else(|| {
            Problem::bad("bad-query", "state must be waiting, scheduled, retry, queued, dead, done or unrouted")
        })?),
    };
    let filter = MessageFilter {
        route: call.text("route"),
        topic: call.text("topic"),
        key: call.text("key"),
        place,
        newer_than: call.seconds("newer_than_seconds")?,
        older_than: call.seconds("older_than_seconds")?,
        after: match call.text("after") {
            None => None,
            Some(after) => {
                Some(after.parse().map_err(|why| Problem::bad("bad-query", format!("after cannot be read: {why}")))?)
            }
        },
    };
    if let Some(why) = filter.contradiction() {
        return Err(Problem::bad("bad-query", format!("no message can match: {why}")));
    }
    if let Some(route) = &filter.route
        && !call.store.routes().await?.iter().any(|known| known.route == *route)
    {
        return Err(Problem::missing("no-such-route", "no such route has run"));
    }
    Ok(Answer::json(call.store.messages(&filter, call.number("limit", LIMIT.0, LIMIT.1)?).await?))
}

fn no_message() -> Problem {
    Problem::missing(
        "no-such-message",
        "no such message is stored: its transaction did not commit, or its row was deleted",
    )
}

pub(super) async fn message(call: Call) -> Result<Answer> {
    let message = call.store.message(call.message_id()?).await?.ok_or_else(no_message)?;
    let mut object = serde_json::to_value(&message).unwrap_or_default();
    object["payload_bytes"] = message.payload.len().into();
    Ok(Answer::json(object))
}

pub(super) async fn whereabouts(call: Call) -> Result<Answer> {
    let id = call.message_id()?;
    let (routes, consumers) = (call.store.whereabouts(id).await?, call.store.receptions(id).await?);
    if routes.is_empty() && consumers.is_empty() {
        return Err(no_message());
    }
    Ok(Answer::json(json!({ "id": id, "routes": routes, "consumers": consumers })))
}

pub(super) async fn payload(call: Call) -> Result<Answer> {
    let id = call.message_id()?;
    let deed = call.deed(&call.text("reason").unwrap_or_default())?;
    let message = call.store.message(id).await?.ok_or_else(no_message)?;
    // Before anybody sees it.
    call.store.note_payload_read(id, &deed).await?;
    Ok(Answer::Bytes(message.payload))
}

pub(super) async fn keys(call: Call) -> Result<Answer> {
    let (of, limit) = (call.text("route"), call.number("limit", LIMIT.0, LIMIT.1)?);
    Ok(Answer::json(json!({ "keys": call.store.waiting_keys(call.side()?, of.as_deref(), limit).await? })))
}

pub(super) async fn dead(call: Call) -> Result<Answer> {
    let id = match call.text("id") {
        None => None,
        Some(id) => Some(id.parse().map_err(|_| Problem::bad("bad-id", "id must be a UUID"))?),
    };
    let filter = DeadFilter {
        route: call.text("route"),
        id,
        topic: call.text("topic"),
        kind: call.text("type"),
        tenant_id: call.text("tenant"),
        aggregate_id: call.text("aggregate"),
        error: call.text("error"),
        newer_than: call.seconds("newer_than_seconds")?,
        older_than: call.seconds("older_than_seconds")?,
    };
    let limit = call.number("limit", LIMIT.0, LIMIT.1)?;
    let after = behind(&call)?;
    let letters = call.store.dead_letters_behind(after.as_ref(), call.side()?, &filter, limit).await?;
    let next = next(letters.last().filter(|_| letters.len() as i64 == limit).map(DeadLetter::cursor));
    Ok(Answer::json(json!({ "dead_letters": letters, "next": next })))
}

/// Where a page of dead letters begins.
fn behind(call: &Call) -> Result<Option<DeadCursor>> {
    match (call.text("after_route"), call.text("after_seq"), call.text("after_id")) {
        (None, None, None) => Ok(None),
        (Some(route), Some(seq), Some(id)) => {
            let seq = seq.parse().map_err(|_| Problem::bad("bad-query", "after_seq must be a whole number"))?;
            Ok(Some(DeadCursor { route, seq, id }))
        }
        _ => Err(Problem::bad("bad-query", "after_route, after_seq and after_id are given together")),
    }
}

/// The parameters of the next page of dead letters; null: there is none.
fn next(last: Option<DeadCursor>) -> Option<Value> {
    last.map(|last| json!({ "after_route": last.route, "after_seq": last.seq, "after_id": last.id }))
}

pub(super) async fn headlines(call: Call) -> Result<Answer> {
    let after = behind(&call)?;
    let limit = call.number("limit", LIMIT.0, LIMIT.1)?;
    let side = call.side()?;
    let found = call.store.dead_headlines(side, after.as_ref(), limit).await?;
    let headline = |letter: &postroom::Headline| {
        json!({
            "route": letter.route, "seq": letter.seq, "id": letter.id, "type": letter.kind, "cause": letter.cause,
            "error": letter.error, "group": letter.group(side), "died_seconds_ago": letter.died_seconds_ago,
        })
    };
    let next = next(found.last().filter(|_| found.len() as i64 == limit).map(postroom::Headline::cursor));
    Ok(Answer::json(json!({ "headlines": found.iter().map(headline).collect::<Vec<_>>(), "next": next })))
}

pub(super) async fn operations(call: Call) -> Result<Answer> {
    let limit = call.number("limit", LIMIT.0, LIMIT.1)?;
    Ok(Answer::json(json!({ "operations": call.store.operations(None, limit).await? })))
}

/// One operation with its effects.
pub(super) async fn shown(store: &dyn Store, id: OperationId) -> Result<(ShownOperation, Value)> {
    let operation = store.operations(Some(id), 1).await?.into_iter().next();
    let operation = operation.ok_or_else(|| Problem::missing("no-such-operation", "there is no such operation"))?;
    let effects = match operation.kind {
        OperationKind::Discard => Vec::new(),
        _ => store.operation_effects(id).await?,
    };
    let mut object = serde_json::to_value(&operation).unwrap_or_default();
    object["effects"] = json!(effects);
    Ok((operation, object))
}

pub(super) async fn operation(call: Call) -> Result<Answer> {
    let (_, object) = shown(call.store.as_ref(), call.operation_id()?).await?;
    Ok(Answer::json(object))
}

pub(super) async fn events(call: Call) -> Result<Answer> {
    let id = call.operation_id()?;
    // An error is an answer, and no event.
    shown(call.store.as_ref(), id).await?;
    let store = call.store;
    let events = stream::unfold(Some(Duration::ZERO), move |wait| {
        let store = store.clone();
        async move {
            tokio::time::sleep(wait?).await;
            let (event, next) = match shown(store.as_ref(), id).await {
                Ok((operation, object)) => {
                    let over = match operation.state {
                        OperationState::Running => false,
                        OperationState::Cancelled => operation.pending == 0,
                        OperationState::Waiting | OperationState::Paused | OperationState::Done => true,
                    };
                    let kind = if over { "end" } else { "progress" };
                    (format!("event: {kind}\ndata: {}\n\n", escaped(&object)), (!over).then_some(EVENT_EVERY))
                }
                // The store is away for a moment: the operation is not.
                Err(problem) if problem.retry_after_seconds.is_some() => {
                    (": the store is away\n\n".to_owned(), Some(EVENT_EVERY * 5))
                }
                Err(problem) => {
                    let told = escaped(&json!({ "code": problem.code, "detail": problem.detail }));
                    (format!("event: error\ndata: {told}\n\n"), None)
                }
            };
            Some((Ok::<_, Infallible>(Bytes::from(event)), next))
        }
    });
    Ok(Answer::Events(events.boxed()))
}

pub(super) async fn reconciliations(call: Call) -> Result<Answer> {
    Ok(Answer::json(json!({ "reconciled": call.store.reconciled(call.text("name").as_deref()).await? })))
}
