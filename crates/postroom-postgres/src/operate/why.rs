//! One message's life, for an operator who asks why it has not arrived.

use postroom::{BoxError, MessageId, ParkedState, Place, StoreError, Whereabouts, attempts_of, lasting};
use tokio_postgres::Row;

use crate::connect::Connector;
use crate::link::store_error;
use crate::operate::session::OperatorSession;
use crate::text::Text;

/// Where a message is on every route that has run; empty when no route has it or no route has run.
pub(crate) async fn whereabouts(connector: &Connector, id: MessageId) -> Result<Vec<Whereabouts>, StoreError> {
    let failed = |error| store_error("look for a message", error);
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.look().await?;
    let rows = tx.query(include_str!("sql/why.sql"), &[id.as_uuid()]).await.map_err(failed)?;
    rows.iter()
        .map(whereabouts_of)
        .collect::<Result<_, _>>()
        .map_err(|error| StoreError::Refused { what: "look for a message", source: BoxError::from(error) })
}

fn whereabouts_of(row: &Row) -> Result<Whereabouts, tokio_postgres::Error> {
    let mut because = Vec::new();
    let route: String = row.try_get("name")?;
    let key = row.try_get::<_, Option<Text>>("key")?.map(|key| key.text);
    let seconds = |column: &str| -> Result<String, tokio_postgres::Error> {
        Ok(row.try_get::<_, Option<f64>>(column)?.map_or_else(String::new, lasting))
    };
    let (mut attempts, mut history) = (0, Vec::new());
    let parked: Option<String> = row.try_get("state")?;
    let blocked: Option<String> = row.try_get("blocked_because")?;
    let cause: Option<String> = row.try_get("cause")?;
    let relay = |because: &mut Vec<String>| -> Result<(), tokio_postgres::Error> {
        match row.try_get::<_, Option<String>>("owner")? {
            Some(owner) => {
                because.push(format!("relay {owner} holds its lane"));
                if let Some(error) = row.try_get::<_, Option<String>>("sink_error")? {
                    let blocked: Option<bool> = row.try_get("sink_blocked")?;
                    let what = if blocked == Some(true) { "has accepted nothing" } else { "has been down" };
                    because.push(format!("that relay's sink {what} for {}: {error}", seconds("sink_down_for")?));
                }
            }
            None => because.push("no relay holds its lane: start one with `postroom run`".to_owned()),
        }
        if row.try_get::<_, i32>("deaths")? > 0 {
            let deaths: i32 = row.try_get("deaths")?;
            because
                .push(format!("{deaths} relays in a row died while they held its lane; it is relayed in small steps"));
        }
        Ok(())
    };
    let block = |because: &mut Vec<String>| -> Result<(), tokio_postgres::Error> {
        if let Some(reason) = &blocked {
            let by = if row.try_get::<_, i64>("blocked_seq")? > 0 { "skip" } else { "unpark" };
            let since = seconds("blocked_for")?;
            because.push(format!(
                "its key has been blocked for {since} ({reason}); `postroom keys {by}` lets it continue"
            ));
        }
        Ok(())
    };
    // It may have been, while the route still took its topic.
    let sent_before = row.try_get::<_, bool>("passed")? && row.try_get::<_, bool>("was_taken")?;
    let (taken, passed) = (row.try_get::<_, bool>("taken")?, row.try_get::<_, bool>("passed")?);
    let state = if let Some(cause) = cause {
        attempts = row.try_get("dead_attempts")?;
        history = serde_json::from_str(row.try_get("dead_history")?).unwrap_or_default();
        let error: String = row.try_get("error")?;
        because.push(format!("it died {} ago, {cause} after {}: {error}", seconds("died_ago")?, attempts_of(attempts)));
        because.push("`postroom dead retry` sends it again, `postroom dead discard` deletes it".to_owned());
        Place::Dead
    } else if let Some(parked) = parked {
        attempts = row.try_get("attempts")?;
        history = serde_json::from_str(row.try_get("parked_history")?).unwrap_or_default();
        let error: Option<String> = row.try_get("last_error")?;
        let behind: Option<String> = row.try_get("behind")?;
        let state = match ParkedState::of(&parked) {
            Some(ParkedState::Scheduled) => {
                because.push(format!("it is delayed and due in {}", seconds("due_in")?));
                Place::Scheduled
            }
            _ if blocked.is_some() => Place::Blocked,
            _ => match behind {
                Some(head) => {
                    because.push(format!("it waits behind message {head} of its key, which itself waits"));
                    Place::Queued
                }
                None => {
                    because.push(format!("it is tried again in {} (attempts so far: {attempts})", seconds("due_in")?));
                    Place::Retry
                }
            },
        };
        because.extend(error.map(|error| format!("its last error: {error}")));
        block(&mut because)?;
        relay(&mut because)?;
        state
    } else if let Some(discarded) = row.try_get::<_, Option<String>>("discarded")? {
        because.push(format!("it was dead, and an operator discarded it ({discarded})"));
        Place::Discarded
    } else if !taken && !sent_before {
        because.push("the route does not take its topic".to_owned());
        Place::NotTaken
    } else if passed && row.try_get::<_, Option<bool>>("before_start")?.unwrap_or_default() {
        let began = "it was written before the route began with start_at = \"now\"";
        match row.try_get::<_, Option<String>>("forgotten")? {
            None if row.try_get::<_, bool>("replayed")? => {
                because.push(format!(
                    "{began}, so the route passed it without sending it; a replay of this route may have sent it since (`postroom operations list`)"
                ));
                Place::Passed
            }
            None => {
                because.push(format!("{began}, so the route never sent it"));
                Place::NotTaken
            }
            Some(deed) => {
                because.push(format!(
                    "{began}; a route of the same name was forgotten before ({deed}), and that one may have sent it"
                ));
                Place::Passed
            }
        }
    } else if passed && row.try_get::<_, bool>("before_rebase")? {
        because.push(
            "the route had passed it when the database was restored or replaced; this database does not know whether \
             the broker has it"
                .to_owned(),
        );
        Place::Passed
    } else if passed && (!taken || row.try_get::<_, bool>("topic_is_newer")?) {
        because.push(
            "the route has passed it: the broker confirmed it, or the route did not take its topic at that time \
             (postroom.route_revisions has the dates)"
                .to_owned(),
        );
        Place::Passed
    } else if passed && row.try_get::<_, bool>("came_back")? {
        because.push(postroom::CAME_BACK.to_owned());
        Place::Passed
    } else if passed && row.try_get::<_, bool>("discarded_somewhere")? {
        because.push(
            "the broker confirmed it, or it was dead on this route and an operator discarded it (see the audit table)"
                .to_owned(),
        );
        Place::Passed
    } else if passed {
        because.push("the broker confirmed it".to_owned());
        Place::Acked
    } else {
        let before: i64 = row.try_get("before")?;
        if row.try_get::<_, Option<f64>>("visible_in")?.is_some_and(|seconds| seconds > 0.0) {
            because.push(format!("it is delayed and due in {}", seconds("visible_in")?));
        }
        let held = row.try_get::<_, Option<String>>("owner")?.is_some();
        because.push(match before {
            0 if held => "it is the next message of its lane, or its relay has already claimed it".to_owned(),
            0 => "it is the next message of its lane".to_owned(),
            1 => "1 message of its lane is before it".to_owned(),
            10_000.. => format!("{before} or more messages of its lane are before it"),
            _ => format!("{before} messages of its lane are before it"),
        });
        block(&mut because)?;
        relay(&mut because)?;
        Place::Waiting
    };
    if let Some(copy) = row.try_get::<_, Option<String>>("copy")? {
        because.push(
            match copy.as_str() {
                "dead" => {
                    "a replay behind new messages sent it again, and that copy is dead: `postroom dead list` shows it"
                }
                _ => "a replay has put it behind new messages once more, and that copy has not been sent yet",
            }
            .to_owned(),
        );
    }
    Ok(Whereabouts { route, state, key, attempts, because, history })
}
