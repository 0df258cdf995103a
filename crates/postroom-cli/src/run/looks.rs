//! Looks at stores that are not worked at, and what is to be done in all of them from time to time.

use std::collections::HashMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use postroom::{MessageId, Store, StoreError, UnroutedTopic};
use postroom_relay::Summary;
use postroom_server::{FleetShown, Meter, Seen, WorkEnded};
use tokio::sync::mpsc;

use crate::config::{Config, Taken};
use crate::exit::{self, Failure};
use crate::intake;
use crate::retention;
use crate::store;
use crate::stores::{Found, Listed};
use crate::supervise::Ended;

/// A look that takes longer waits for something that is gone.
const LOOK_WITHIN: Duration = Duration::from_secs(10);
/// A failure that took so long was silence, and no refusal.
const SILENT_AFTER: Duration = Duration::from_millis(1500);
/// How often housekeeping is done in a store; and at least this passes from one store to the next, so that all together cost little.
const HOUSEKEEPING_EVERY: Duration = Duration::from_secs(60);
const HOUSEKEEPING_SHARE: Duration = Duration::from_millis(500);
const HOUSEKEEPING_WITHIN: Duration = Duration::from_secs(60);
/// Removing what is finished and old takes no longer at one time; it goes on with the next.
const RETENTION_WITHIN: Duration = Duration::from_secs(10);
const TELL_EVERY: Duration = Duration::from_secs(3600);
/// So many things are remembered as told; more are not told.
const TOLD_MAX: usize = 20_000;

/// What is told to the one loop.
pub(super) enum Told {
    Looked(Arc<str>, Seen),
    Ended(Arc<str>, WorkEnded),
    /// The databases of a group, or why they could not be asked for.
    Found(usize, Result<Listed, String>),
    /// An operation goes on in it.
    HasWork(Arc<str>),
    /// What it counted, for the report at the end.
    Counted(String, Ended<Summary>),
}

/// What all stores share.
pub(super) struct Shared {
    pub config: Arc<Config>,
    pub owner: String,
    pub unique: MessageId,
    pub meter: Meter,
    pub shown: FleetShown,
    pub tell: mpsc::UnboundedSender<Told>,
    /// Whether somebody reads metrics, for which stores are asked for their state.
    pub is_watched: bool,
    /// Each time that a store was worked at; relays of one time must not take lanes of another for their own.
    pub times: AtomicU64,
    /// Stores that are not in trouble.
    pub up: Mutex<Vec<Found>>,
    /// What was told of stores, and when: topics without a route, and housekeeping that fails.
    pub told: Mutex<HashMap<(Arc<str>, String), Instant>>,
}

impl Shared {
    /// The routes and intakes of a store.
    pub fn of_store(&self, name: &str) -> (Vec<usize>, Vec<Taken>) {
        let config = &self.config;
        let routes = (0..config.routes.len()).filter(|index| config.routes[*index].stores.takes(name)).collect();
        (routes, config.intakes.iter().filter(|taken| taken.stores.takes(name)).cloned().collect())
    }

    fn names_of(&self, routes: &[usize]) -> Vec<String> {
        routes.iter().map(|index| self.config.routes[*index].route.name.clone()).collect()
    }

    /// These stores are not in trouble.
    pub fn are_up<'a>(&self, up: impl Iterator<Item = &'a Found>) {
        *self.up.lock().unwrap_or_else(PoisonError::into_inner) = up.cloned().collect();
    }

    /// Whether this was not told of the store within an hour.
    pub fn is_news(&self, store: &Arc<str>, what: &str) -> bool {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if told.len() >= TOLD_MAX {
            told.retain(|_, at| at.elapsed() < TELL_EVERY);
        }
        let key = (store.clone(), what.to_owned());
        if told.get(&key).is_some_and(|at| at.elapsed() < TELL_EVERY) || told.len() >= TOLD_MAX {
            return false;
        }
        told.insert(key, Instant::now());
        true
    }
}

/// Whether something waits in a store.
pub(super) async fn look(shared: &Shared, found: &Found) -> Seen {
    let began = Instant::now();
    match tokio::time::timeout(LOOK_WITHIN, waits(shared, found)).await {
        Ok(Ok(true)) => Seen::Work,
        Ok(Ok(false)) => Seen::Nothing,
        Ok(Err(why)) => Seen::Down { why, silent: began.elapsed() >= SILENT_AFTER },
        Err(_) => Seen::Down { why: format!("no answer within {} s", LOOK_WITHIN.as_secs()), silent: true },
    }
}

/// The error is for people.
async fn waits(shared: &Shared, found: &Found) -> Result<bool, String> {
    let text = |error: StoreError| Failure::of(exit::FAILURE, &error).text;
    let (routes, taken) = shared.of_store(&found.name);
    let (store, _) = store::open_frugal(&found.url, 1, 1).map_err(|failure| failure.text)?;
    let mut waits = store.work_waits(&shared.names_of(&routes)).await.map_err(text)?;
    if let Some(intakes) = store.intakes() {
        for taken in &taken {
            waits = waits || !intakes.preview_intake(&taken.intake, 1).await.map_err(text)?.is_empty();
        }
    }
    Ok(waits)
}

/// Housekeeping in one store after the other, for ever.
pub(super) async fn keep_houses(shared: Arc<Shared>) {
    loop {
        let began = Instant::now();
        let up = shared.up.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for found in &up {
            let since = Instant::now();
            let kept = tokio::time::timeout(HOUSEKEEPING_WITHIN, keep_house(&shared, found)).await;
            let why = match kept {
                Ok(Ok(goes_on)) => {
                    if goes_on {
                        let _ = shared.tell.send(Told::HasWork(found.name.clone()));
                    }
                    None
                }
                // A store that is away is told elsewhere. Messages are sent all the same.
                Ok(Err(error)) if error.is_transient() => None,
                Ok(Err(error)) => {
                    Some(format!("{}; `postroom check` names missing rights", Failure::of(exit::FAILURE, &error).text))
                }
                Err(_) => Some(format!("it did not end within {} s", HOUSEKEEPING_WITHIN.as_secs())),
            };
            if let Some(why) = why
                && shared.is_news(&found.name, &why)
            {
                tracing::error!(store = %found.name, "housekeeping fails: {why}");
            }
            tokio::time::sleep(HOUSEKEEPING_SHARE.saturating_sub(since.elapsed())).await;
        }
        // Soon after the start, before anything is known, and then once in a while.
        let every = if up.is_empty() { Duration::from_secs(1) } else { HOUSEKEEPING_EVERY };
        tokio::time::sleep(every.saturating_sub(began.elapsed())).await;
    }
}

/// What is not the relays' work; returns whether an operation goes on, for which relays are needed.
async fn keep_house(shared: &Shared, found: &Found) -> Result<bool, StoreError> {
    let (routes, taken) = shared.of_store(&found.name);
    let Ok((store, _)) = store::open_frugal(&found.url, 1, 1) else { return Ok(false) };
    let store: &dyn Store = store.as_ref();
    let stepped = store.step_operations().await?;
    intake::finish(&taken, store).await;
    let config = &shared.config;
    if !config.retention.parts().is_empty() {
        let removed =
            retention::pass_once(&config.retention, store, &shared.names_of(&routes), RETENTION_WITHIN).await?;
        shared.meter.removed(&removed);
    }
    for UnroutedTopic { topic, messages, .. } in store.unrouted_topics().await? {
        if shared.is_news(&found.name, &topic) {
            tracing::warn!(store = %found.name, topic, messages, "no route takes this topic, so its messages are not sent");
        }
    }
    if shared.is_watched {
        shared.shown.seen(&found.name, store.status().await?.routes);
    }
    Ok(stepped.given_out > 0 || stepped.going_on > 0)
}
