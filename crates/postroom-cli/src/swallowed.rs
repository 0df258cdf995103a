//! What the broker would take for a duplicate, of messages that are to be sent again with their ids.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use postroom::{NewOperation, OperationFilter, OperationKind, Store, Survey};
use postroom_brokers::SinkOptions;
use serde::Serialize;

use crate::StoreArgs;
use crate::check::ANSWERS_WITHIN;
use crate::config;
use crate::exit::Failure;
use crate::table::number;

/// What is known of it.
#[derive(Debug, Default, Serialize)]
pub struct Swallowed {
    /// For so long the broker stores no second message with an id that it has; null: it could not be asked.
    recognises_ids_for_seconds: Option<u64>,
    /// Matching messages that happened within that time, and were sent after that: the broker would confirm them and store nothing. Others
    /// may have been sent that late too.
    swallows_at_least: u64,
    /// Why it could not be asked.
    problem: Option<String>,
}

/// The sink of a route, by the configuration that also names the store.
pub fn sink_of(store: &StoreArgs, route: &str) -> Result<Option<std::sync::Arc<dyn SinkOptions>>, Failure> {
    let is_url = store.store.as_ref().is_some_and(|named| named.contains(':'));
    if is_url || !store.config.exists() {
        return Ok(None);
    }
    let routes = config::load(&store.config)?.routes;
    Ok(routes.into_iter().find(|routed| routed.route.name == route).map(|routed| routed.sink))
}

/// None: the broker does not look at ids, or would see new ones.
pub async fn of(
    store: &dyn Store,
    operation: &NewOperation,
    sink: &dyn SinkOptions,
) -> Result<Option<Swallowed>, Failure> {
    if operation.kind != OperationKind::Replay || operation.new_ids {
        return Ok(None);
    }
    let asked = tokio::time::timeout(ANSWERS_WITHIN, sink.recognises_ids_for()).await;
    let window = match asked {
        Ok(Ok(None)) => return Ok(None),
        Ok(Ok(Some(window))) => window,
        Ok(Err(failed)) => return Ok(Some(Swallowed { problem: Some(failed.problem), ..Swallowed::default() })),
        Err(_) => {
            let problem = Some(format!("no answer within {} s", ANSWERS_WITHIN.as_secs()));
            return Ok(Some(Swallowed { problem, ..Swallowed::default() }));
        }
    };
    let mut survey = Survey::default();
    if window > Duration::ZERO {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let since = i64::try_from(now.saturating_sub(window).as_millis()).unwrap_or(i64::MAX);
        let since_ms = Some(operation.filter.since_ms.map_or(since, |given| given.max(since)));
        let recent =
            NewOperation { filter: OperationFilter { since_ms, ..operation.filter.clone() }, ..operation.clone() };
        while !survey.complete {
            store.survey_operation(&recent, &mut survey).await?;
        }
    }
    Ok(Some(Swallowed {
        recognises_ids_for_seconds: Some(window.as_secs()),
        swallows_at_least: survey.matching - survey.not_ready,
        problem: None,
    }))
}

impl Swallowed {
    /// For people.
    pub fn told(&self) -> String {
        match (self.recognises_ids_for_seconds, &self.problem) {
            (Some(0), _) => "the broker recognises no ids now".to_owned(),
            (Some(seconds), _) => {
                let least = number(i64::try_from(self.swallows_at_least).unwrap_or(i64::MAX), false);
                format!(
                    "the broker recognises an id for {seconds} s after it has stored it: what was sent so recently, {least} of them at least, \
                     would be confirmed and not stored again; wait, or use --new-id"
                )
            }
            (None, problem) => format!(
                "the broker could not be asked whether it recognises ids, and so would confirm some of these and not store them again: {}",
                problem.as_deref().unwrap_or("unknown")
            ),
        }
    }
}
