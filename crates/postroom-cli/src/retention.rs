//! Removing what is finished and old: by `postroom run` as `[retention]` says, and once by `postroom prune`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use postroom::{Part, Removed, Retention, Store, StoreError, Sweep};
use postroom_server::Meter;

use crate::StoreArgs;
use crate::archive::PlaceArgs;
use crate::archiver::{Archived, Archiver, PassFailed};
use crate::config;
use crate::dead::duration;
use crate::exit::{self, Failure};
use crate::progress::Progress;
use crate::say::{say, show};
use crate::table::counted;

/// Between two passes over a store.
const EVERY: Duration = Duration::from_secs(60);
/// After an error that a person has to fix.
const EVERY_IF_REFUSED: Duration = Duration::from_secs(600);
/// Until the routes of the configuration are registered.
const EVERY_IF_UNKNOWN: Duration = Duration::from_secs(1);
/// A step is followed by a pause of at least this, and of so many times its own length: new messages go first.
const PAUSE_LEAST: Duration = Duration::from_millis(50);
const PAUSE_TIMES: u32 = 3;

#[derive(Debug, Args)]
pub struct PruneArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// Delete messages of the outbox that are older and that every route has finished with, such as 7d. If no age is given, the
    /// configuration's section `retention` applies
    #[arg(long, value_parser = duration, value_name = "AGE")]
    outbox: Option<Duration>,
    /// Delete dead letters that died longer ago, on both sides
    #[arg(long, value_parser = duration, value_name = "AGE")]
    dead: Option<Duration>,
    /// Delete inbox rows of messages that were processed longer ago; an age below the redelivery horizon is rejected
    #[arg(long, value_parser = duration, value_name = "AGE")]
    inbox: Option<Duration>,
    /// Delete audit rows that are older, 30d at least
    #[arg(long, value_parser = duration, value_name = "AGE")]
    audit: Option<Duration>,
    #[command(flatten)]
    archive: PlaceArgs,
}

pub async fn prune(args: PruneArgs, json: bool) -> Result<(), Failure> {
    let PruneArgs { store, outbox, dead, inbox, audit, archive } = args;
    let given = Retention { outbox, topics: Vec::new(), dead, inbox, audit };
    let retention = if given.parts().is_empty() { config::load(&store.config)?.retention } else { given };
    if retention.parts().is_empty() {
        let text = "nothing expires: give an age, such as --outbox 7d, or add [retention] to the configuration";
        return Err(Failure::new(exit::USAGE, text));
    }
    let archive = archive.options(&store)?;
    let mut archiver = archive.as_ref().map(Archiver::open).transpose()?;
    let routes = routes_of(&store);
    let store = store.open().await?;
    if retention.parts().contains(&Part::Outbox) {
        let unknown = unregistered(store.as_ref(), &routes).await?;
        if !unknown.is_empty() {
            let text = format!(
                "nothing was removed: {} of the configuration {} not registered with the store, so messages could be removed that {} has \
                 not seen; start `postroom run` with this configuration first, or remove the route from it",
                named(&unknown),
                if unknown.len() == 1 { "is" } else { "are" },
                if unknown.len() == 1 { "it" } else { "one of them" }
            );
            return Err(Failure::new(exit::FAILURE, text));
        }
    }
    let mut removed = Removed::default();
    let mut progress = Progress::new("rows");
    let mut failed = None;
    if let Some(archiver) = archiver.as_mut().filter(|_| retention.parts().contains(&Part::Outbox)) {
        let mut archived = Archived::default();
        let passed =
            archiver.pass(store.as_ref(), &retention, true, &mut archived, |removed| progress.at(removed)).await;
        removed.outbox = archived.removed;
        match passed {
            Ok(()) => {
                if archived.others {
                    say!(
                        "postroom: a segment is in other hands: another process archives this store, or one failed or died less than a minute ago. \
                         What it has not removed is left to it, so run this command again later"
                    );
                }
            }
            // The other parts go all the same.
            Err(error) => failed = Some(Failure::from(error)),
        }
    }
    let mut sweep = sweep(&retention, archiver.as_ref());
    while !sweep.is_over() {
        removed += store.retain(&retention, &mut sweep).await?;
        progress.at(removed.total());
    }
    progress.end();
    if json {
        show!("{}", serde_json::json!(removed));
    } else {
        show!("removed {}", told(&removed));
    }
    failed.map_or(Ok(()), |failure| Err(Failure { answered: true, ..failure }))
}

/// Names of the routes of the configuration file, when the store is named there too or by a variable.
fn routes_of(store: &StoreArgs) -> Vec<String> {
    let config = if store.is_from_the_configuration() { config::load(&store.config).ok() } else { None };
    config.map_or_else(Vec::new, |config| config.routes.into_iter().map(|routed| routed.route.name).collect())
}

/// Those of the routes that the store does not know. It keeps nothing for them.
async fn unregistered(store: &dyn Store, routes: &[String]) -> Result<Vec<String>, StoreError> {
    if routes.is_empty() {
        return Ok(Vec::new());
    }
    let known = store.routes().await?;
    let unknown = routes.iter().filter(|name| !known.iter().any(|known| known.route == **name));
    Ok(unknown.cloned().collect())
}

fn named(routes: &[String]) -> String {
    let names: Vec<String> = routes.iter().map(|name| format!("{name:?}")).collect();
    format!("{} {}", if routes.len() == 1 { "route" } else { "routes" }, names.join(", "))
}

/// A pass over everything that is not archived.
fn sweep(retention: &Retention, archiver: Option<&Archiver>) -> Sweep {
    let mut sweep = Sweep::begin(retention);
    sweep.parts.retain(|part| archiver.is_none() || *part != Part::Outbox);
    sweep
}

/// One pass, given up after this long; what is left is removed by the next one. Nothing of the outbox before these routes are registered.
pub async fn pass_once(
    retention: &Retention,
    store: &dyn Store,
    routes: &[String],
    within: Duration,
) -> Result<Removed, StoreError> {
    let (began, mut removed) = (Instant::now(), Removed::default());
    let mut sweep = sweep(retention, None);
    if !unregistered(store, routes).await?.is_empty() {
        sweep.parts.retain(|part| *part != Part::Outbox);
    }
    while !sweep.is_over() && began.elapsed() < within {
        let step = Instant::now();
        removed += store.retain(retention, &mut sweep).await?;
        tokio::time::sleep((step.elapsed() * PAUSE_TIMES).max(PAUSE_LEAST)).await;
    }
    Ok(removed)
}

/// Passes over the store for ever, one step at a time. With an archive, no message is removed that it does not have; and none
/// before these routes are registered.
pub async fn keep_to(
    retention: Retention,
    store: Arc<dyn Store>,
    mut archiver: Option<Archiver>,
    routes: Vec<String>,
    meter: Meter,
) {
    let mut away = Away::default();
    // From a counter that begins with its first event nobody sees that event.
    meter.removed(&Removed::default());
    let mut last = None;
    loop {
        let (mut sweep, mut removed) = (sweep(&retention, archiver.as_ref()), Removed::default());
        let mut wait = EVERY;
        let of_messages = retention.parts().contains(&Part::Outbox) && {
            let unknown = unregistered(store.as_ref(), &routes).await;
            let all_known = matches!(&unknown, Ok(unknown) if unknown.is_empty());
            if !all_known {
                away.routes_unknown(unknown);
                sweep.parts.retain(|part| *part != Part::Outbox);
                // The other parts are not looked at more often than usual.
                if last.is_some_and(|last: Instant| last.elapsed() < EVERY) {
                    sweep.parts.clear();
                }
                wait = EVERY_IF_UNKNOWN;
            }
            all_known
        };
        if of_messages || !sweep.is_over() {
            last = Some(Instant::now());
        }
        if let Some(archiver) = archiver.as_mut().filter(|_| of_messages) {
            let mut archived = Archived::default();
            let passed = archiver.pass(store.as_ref(), &retention, false, &mut archived, |_| ()).await;
            meter.archived(archived.segments, archived.removed);
            match passed {
                Ok(()) => {
                    away.archive_answered(archiver);
                    if archived.segments > 0 {
                        tracing::info!(
                            "retention archived {} in {}, and removed {}",
                            counted(archived.segments as i64, false, "segment"),
                            archiver.place(),
                            counted(archived.removed as i64, false, "message")
                        );
                    }
                }
                Err(error) => {
                    meter.archive_failed();
                    away.archive_failed(error);
                }
            }
        }
        while !sweep.is_over() {
            let began = Instant::now();
            match store.retain(&retention, &mut sweep).await {
                Ok(some) => removed += some,
                // A store that is away is told elsewhere.
                Err(error) if error.is_transient() => {
                    away.store_failed(&error);
                    break;
                }
                Err(error) => {
                    tracing::error!("retention removes nothing: {}", Failure::of(exit::FAILURE, &error).text);
                    wait = EVERY_IF_REFUSED;
                    break;
                }
            }
            away.store = false;
            tokio::time::sleep((began.elapsed() * PAUSE_TIMES).max(PAUSE_LEAST)).await;
        }
        meter.removed(&removed);
        if removed.total() > 0 {
            tracing::info!("retention removed {}", told(&removed));
        }
        tokio::time::sleep(wait).await;
    }
}

/// What was told already.
#[derive(Default)]
struct Away {
    store: bool,
    archive: bool,
    routes: bool,
    refused: bool,
}

impl Away {
    fn routes_unknown(&mut self, unknown: Result<Vec<String>, StoreError>) {
        match unknown {
            Ok(unknown) if !std::mem::replace(&mut self.routes, true) => {
                tracing::info!("no message is removed before {} can be registered", named(&unknown));
            }
            // A store that is away is told by the relays.
            Err(error) if !error.is_transient() && !std::mem::replace(&mut self.refused, true) => {
                tracing::error!(
                    "no message is removed, because the routes cannot be read: {}; `postroom check` names missing rights",
                    Failure::of(exit::FAILURE, &error).text
                );
            }
            _ => {}
        }
    }

    fn store_failed(&mut self, error: &StoreError) {
        if !std::mem::replace(&mut self.store, true) {
            tracing::warn!("retention goes on later: failed to {}", Failure::of(exit::FAILURE, error).text);
        }
    }

    fn archive_failed(&mut self, error: PassFailed) {
        match error {
            PassFailed::Store(error) if error.is_transient() => self.store_failed(&error),
            error => {
                if !std::mem::replace(&mut self.archive, true) {
                    tracing::error!("no message is archived, and so none is removed: {}", Failure::from(error).text);
                }
            }
        }
    }

    fn archive_answered(&mut self, archiver: &Archiver) {
        self.store = false;
        if std::mem::take(&mut self.archive) {
            tracing::info!("messages are archived in {} again", archiver.place());
        }
    }
}

fn told(removed: &Removed) -> String {
    let parts = [
        (removed.outbox, "message"),
        (removed.dead, "dead letter"),
        (removed.inbox, "inbox row"),
        (removed.audit, "audit row"),
    ];
    let told = |(count, what): &(u64, &str)| counted(i64::try_from(*count).unwrap_or(i64::MAX), false, what);
    let some: Vec<String> = parts.iter().filter(|(count, _)| *count > 0).map(told).collect();
    if some.is_empty() { "nothing".to_owned() } else { some.join(", ") }
}
