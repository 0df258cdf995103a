//! What may be done. Each deed leaves an audit row with the token's name and a reason.

use axum::http::StatusCode;
use postroom::{
    KeyDeed, NewOperation, OnDead, OperationFilter, OperationId, OperationKind, Order, ReplayPlace, RouteChange, Side,
    Steer, Store, Survey, TopicFilter,
};
use serde::Deserialize;
use serde_json::json;

use super::answer::Answer;
use super::call::Call;
use super::problem::Problem;
use super::reads::shown;

type Result<T> = std::result::Result<T, Problem>;

/// Ids that one operation may name.
const IDS_MAX: usize = 10_000;
/// A preview looks at most at so many pieces of the outbox; one that is larger says that it is not complete.
const LOOKS_MAX: usize = 40;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Why {
    reason: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Begin {
    kind: OperationKind,
    #[serde(default = "out")]
    side: Side,
    route: String,
    #[serde(default)]
    filter: OperationFilter,
    /// Without a filter.
    #[serde(default)]
    all: bool,
    canary: Option<u32>,
    #[serde(default)]
    goes_on: bool,
    rate: Option<u32>,
    #[serde(default)]
    place: ReplayPlace,
    #[serde(default)]
    new_ids: bool,
    #[serde(default)]
    dry_run: bool,
    #[serde(default)]
    reason: String,
}

fn out() -> Side {
    Side::Out
}

pub(super) async fn begin(call: Call) -> Result<Answer> {
    let asked: Begin = call.body()?;
    let wrong = |text: &str| Err(Problem::bad("bad-operation", text));
    if asked.filter.is_everything() && !asked.all {
        return Err(Problem::bad("filter-required", "without a filter, \"all\": true is required"));
    }
    if asked.filter.ids.len() > IDS_MAX {
        return wrong("an operation names 10000 ids at most");
    }
    if asked.canary == Some(0) || asked.rate == Some(0) {
        return wrong("canary and rate are at least 1");
    }
    if asked.goes_on && asked.canary.is_none() {
        return wrong("goes_on is about a canary");
    }
    if asked.kind == OperationKind::Replay {
        if asked.side != Side::Out {
            return wrong("only what goes out is replayed");
        }
        if asked.filter.error.is_some() || asked.filter.group.is_some() {
            return wrong("error and group are conditions of dead letters, which are retried and not replayed");
        }
    } else if asked.new_ids || asked.place != ReplayPlace::Before {
        return wrong("new_ids and place are about replays");
    }
    if asked.side == Side::Out {
        known_route(call.store.as_ref(), &asked.route).await?;
    }
    let deed = if asked.dry_run { None } else { Some(call.deed(&asked.reason)?) };
    let mut operation = NewOperation {
        kind: asked.kind,
        side: asked.side,
        route: asked.route,
        filter: asked.filter,
        planned: None,
        canary: asked.canary,
        goes_on: asked.goes_on,
        rate: asked.rate,
        place: asked.place,
        new_ids: asked.new_ids,
    };
    let mut survey = Survey::default();
    for _ in 0..LOOKS_MAX {
        if survey.complete {
            break;
        }
        call.store.survey_operation(&operation, &mut survey).await?;
    }
    let Some(deed) = deed else { return Ok(Answer::json(json!({ "operation": null, "preview": survey }))) };
    if survey.complete && survey.matching == survey.not_ready {
        let text = "nothing matches that this operation could work on; nothing was changed";
        return Err(Problem::new(StatusCode::CONFLICT, "nothing-matches", text));
    }
    let id = OperationId::new();
    operation.planned = survey.complete.then_some(survey.matching);
    call.store.begin_operation(id, &operation, &deed).await?;
    Ok(Answer::Json(StatusCode::CREATED, json!({ "operation": id, "preview": survey })))
}

async fn known_route(store: &dyn Store, route: &str) -> Result<()> {
    match store.routes().await?.iter().any(|known| known.route == route) {
        true => Ok(()),
        false => Err(no_route()),
    }
}

fn no_route() -> Problem {
    Problem::missing("no-such-route", "no such route has run; nothing was changed")
}

pub(super) async fn pause(call: Call) -> Result<Answer> {
    steer(call, Steer::Pause).await
}

pub(super) async fn resume(call: Call) -> Result<Answer> {
    steer(call, Steer::Resume).await
}

pub(super) async fn cancel(call: Call) -> Result<Answer> {
    steer(call, Steer::Cancel).await
}

async fn steer(call: Call, what: Steer) -> Result<Answer> {
    let id = call.operation_id()?;
    let deed = call.deed(&call.body::<Why>()?.reason)?;
    let done = call.store.steer_operation(id, what, &deed).await?;
    let (operation, object) = shown(call.store.as_ref(), id).await?;
    if !done {
        let text = format!("the operation is {}, so there is nothing to {what}; nothing was changed", operation.state);
        return Err(Problem::new(StatusCode::CONFLICT, "nothing-to-do", text));
    }
    Ok(Answer::json(object))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Note {
    group: String,
    note: String,
    reason: String,
}

pub(super) async fn note(call: Call) -> Result<Answer> {
    let Note { group, note, reason } = call.body()?;
    if note.trim().is_empty() || note.len() > 4000 || group.is_empty() || group.len() > 255 {
        return Err(Problem::bad("bad-note", "a note has 1 to 4000 bytes, and a group 1 to 255"));
    }
    call.store.note_dead(&group, note.trim(), &call.deed(&reason)?).await?;
    Ok(Answer::json(json!({ "group": group, "note": note.trim() })))
}

pub(super) async fn park(call: Call) -> Result<Answer> {
    act_on_key(call, KeyDeed::Park).await
}

pub(super) async fn unpark(call: Call) -> Result<Answer> {
    act_on_key(call, KeyDeed::Unpark).await
}

pub(super) async fn skip(call: Call) -> Result<Answer> {
    act_on_key(call, KeyDeed::Skip).await
}

async fn act_on_key(call: Call, what: KeyDeed) -> Result<Answer> {
    let (route, key) = (call.part("route")?, call.part("key")?);
    let deed = call.deed(&call.body::<Why>()?.reason)?;
    known_route(call.store.as_ref(), route).await?;
    let changed = call.store.act_on_key(route, key, what, &deed).await?;
    Ok(Answer::json(json!({ "route": route, "key": key, "changed": changed })))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Change {
    topics: Option<Vec<String>>,
    order: Option<Order>,
    on_dead: Option<OnDead>,
    reason: String,
}

pub(super) async fn set_route(call: Call) -> Result<Answer> {
    let Change { topics, order, on_dead, reason } = call.body()?;
    let wrong = |text: String| Problem::bad("bad-route", text);
    let topics = topics.map(TopicFilter::new).transpose().map_err(|error| wrong(format!("topics: {error}")))?;
    if topics.is_none() && order.is_none() && on_dead.is_none() {
        return Err(wrong("nothing is to be changed: give topics, order or on_dead".to_owned()));
    }
    let route = call.part("route")?;
    let change = RouteChange { topics, order, on_dead };
    let now = call.store.set_route(route, &change, &call.deed(&reason)?).await?.ok_or_else(no_route)?;
    let object = json!({ "route": route, "topics": now.topics.patterns(), "order": now.order, "on_dead": now.on_dead });
    Ok(Answer::json(object))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Forget {
    #[serde(default)]
    discard: bool,
    reason: String,
}

pub(super) async fn forget(call: Call) -> Result<Answer> {
    let Forget { discard, reason } = call.body()?;
    let route = call.part("route")?;
    let forgotten = call.store.forget_route(route, discard, &call.deed(&reason)?).await?.ok_or_else(no_route)?;
    if !forgotten.done {
        let text = format!(
            "{} relays were seen within the lease, and the route has {} unsent, {} waiting and {} dead messages; stop the relays, and let them be sent or \
             set discard. Nothing was changed",
            forgotten.relays, forgotten.unread, forgotten.parked, forgotten.dead
        );
        return Err(Problem::new(StatusCode::CONFLICT, "route-in-use", text));
    }
    Ok(Answer::json(json!({ "route": route, "forgotten": forgotten })))
}
