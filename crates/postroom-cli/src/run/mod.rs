//! `postroom run`: one relay for each route and one filler for each inbox, until a signal.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use postroom::{Live, MessageId, Store, UnroutedTopic, Wake};
use postroom_consumer::{FillCounters, Filler, InboxNow};
use postroom_relay::{Counters, RouteNow, Summary};
use postroom_server::Meter;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::admin;
use crate::archiver::Archiver;
use crate::carrier;
use crate::config::{self, Config, Routed, Stores};
use crate::exit::{self, Failure};
use crate::intake;
use crate::presets::intakes_of;
use crate::reconcile;
use crate::retention;
use crate::say::{say, show};
use crate::store;
use crate::supervise::{Attempt, Ended, supervise};

mod looks;
mod many;
mod route;

use route::{Start, not_running, stop_of};

pub async fn run(path: &Path, json: bool) -> Result<(), Failure> {
    let config = config::load(path)?;
    if matches!(config.stores, Stores::Many(_)) {
        return many::run(config, json).await;
    }
    let store = store::open(config.stores.one()?).map_err(|failure| Failure { code: exit::CONFIG, ..failure })?;
    let unique = MessageId::new();
    let owner = owner(&config, unique);
    if !config.intakes.is_empty() {
        intakes_of(store.as_ref())?;
    }
    for inbox in &config.inboxes {
        inbox.from.open(inbox.consumer.as_str()).map_err(|error| Failure::of(exit::CONFIG, &error))?;
    }
    let (stop, stopped) = watch::channel(false);
    // From here on a signal means stop; before the lanes are taken, it ends the program at once.
    wait_for_signals(stop)?;
    let config = Arc::new(config);
    let wakes: Vec<Wake> = config.routes.iter().map(|_| Wake::new()).collect();
    let now: Vec<Live<RouteNow>> = wakes.iter().map(|_| Live::new()).collect();
    let inboxes_now: Vec<Live<InboxNow>> = config.inboxes.iter().map(|_| Live::new()).collect();
    let meter = Meter::new();
    // Before the store is asked for anything: whoever watches the process sees why it is not ready.
    admin::serve(&config, store.clone(), &meter, &now, &inboxes_now).await?;
    let starts = wakes.iter().zip(&now).enumerate().map(|(index, (wake, live))| {
        let (config, store, wake, live) = (config.clone(), store.clone(), wake.clone(), live.clone());
        let meter = meter.clone();
        Start {
            config,
            store,
            index,
            owner: owner.clone(),
            wake,
            live,
            meter,
            unique,
            stopped: stopped.clone(),
            brief: false,
        }
    });
    let starts: Vec<Start> = starts.collect();
    // A wrong configuration ends the program; an unreachable store does not.
    let opened = tokio::select! {
        biased;
        opened = try_join_all(starts.iter().map(|start| start.open(0))) => opened?,
        () = stop_of(stopped.clone()) => {
            report_nothing(&config, json);
            return Ok(());
        }
    };
    let mut relays = Vec::new();
    for ((Routed { route, .. }, start), first) in config.routes.iter().zip(starts).zip(opened) {
        let first = start.clone().relay(first);
        relays.push(supervise(format!("route {}", route.name), stopped.clone(), first, move |restart| {
            let start = start.clone();
            Box::pin(async move {
                let relay = tokio::select! {
                    () = stop_of(start.stopped.clone()) => return Err(not_running()),
                    relay = start.open(restart) => relay?,
                };
                start.relay(relay).await
            })
        }));
    }
    let mut receivers = Vec::new();
    for (index, inbox) in config.inboxes.iter().enumerate() {
        let live = inboxes_now[index].clone();
        let (config, store, owner, stopped) = (config.clone(), store.clone(), owner.clone(), stopped.clone());
        let meter = meter.clone();
        let stop = stopped.clone();
        let fill = move |_| -> Attempt<FillCounters> {
            let (inbox, from) = (&config.inboxes[index], config.inboxes[index].from.clone());
            let consumer = inbox.consumer.clone();
            let subscribe = move || from.open(consumer.as_str()).map_err(postroom::BoxError::from);
            let filler = Filler::new(subscribe, store.keeper(&inbox.consumer), owner.clone()).lease(config.relay.lease);
            let filler = filler.shown_in(live.clone()).observed_by(Arc::new(meter.clone()));
            let filling = filler.run(stop_of(stop.clone()));
            Box::pin(async move { filling.await.map_err(|error| Failure::of(exit::FAILURE, &error)) })
        };
        receivers.push(supervise(format!("inbox {}", inbox.consumer), stopped, fill(0), fill));
    }
    for taken in &config.intakes {
        tokio::spawn(intake::keep_taking(taken.clone(), store.clone(), wakes.clone(), None));
    }
    let _listener = if config.relay.listen {
        let text = "relay.listen: this store has no notifications; remove the key, polling is cheap";
        Some(store.listen(wakes).ok_or_else(|| Failure::new(exit::CONFIG, text))?)
    } else {
        None
    };
    tokio::spawn(warn_of_unrouted(store.clone()));
    tokio::spawn(carrier::carry_out(store.clone()));
    if !config.retention.parts().is_empty() {
        let archive = config.archive.as_ref().map(Archiver::open).transpose()?;
        let routes = config.routes.iter().map(|routed| routed.route.name.clone()).collect();
        tokio::spawn(retention::keep_to(config.retention.clone(), store.clone(), archive, routes, meter.clone()));
    }
    if !config.reconcile.is_empty() {
        tokio::spawn(reconcile::keep_comparing(config.clone(), store.clone()));
    }
    show_on_signal(config.clone(), now, inboxes_now)?;
    announce(&config, &owner);

    // All of them are awaited, even if one has failed.
    let (mut routes, mut inboxes) = (Vec::new(), Vec::new());
    for (Routed { route, .. }, relay) in config.routes.iter().zip(relays) {
        routes.push((route.name.clone(), relay.ended().await));
    }
    for (inbox, receiver) in config.inboxes.iter().zip(receivers) {
        inboxes.push((inbox.consumer.to_string(), receiver.ended().await));
    }
    intake::finish(&config.intakes, store.as_ref()).await;
    let unwritten = unwritten(&routes);
    let (of_routes, of_inboxes): (Vec<_>, Vec<_>) = (
        routes.iter_mut().filter_map(|(_, ended)| ended.failed.take()).collect(),
        inboxes.iter_mut().filter_map(|(_, ended)| ended.failed.take()).collect(),
    );
    let failed = of_routes.into_iter().chain(unwritten).chain(of_inboxes).next();
    report(&routes, &inboxes, failed.as_ref(), json);
    failed.map_or(Ok(()), |failure| Err(Failure { answered: true, ..failure }))
}

/// Two relays with one name would treat each other's lanes as their own: a part of the name is always unique.
fn owner(config: &Config, unique: MessageId) -> String {
    match &config.relay.name {
        Some(name) => format!("{name}/{unique}"),
        None => format!("{}/{}/{unique}", host(), std::process::id()),
    }
}

/// Stopped before anything was claimed or received: nothing can be left over.
fn report_nothing(config: &Config, json: bool) {
    let nothing = Summary { counters: Counters::default(), unfinished: 0, unwritten: 0, released: true };
    let routes = config.routes.iter().map(|routed| (routed.route.name.clone(), ended(nothing)));
    let inboxes = config.inboxes.iter().map(|inbox| (inbox.consumer.to_string(), ended(FillCounters::default())));
    report(&routes.collect::<Vec<_>>(), &inboxes.collect::<Vec<_>>(), None, json);
}

fn ended<T>(last: T) -> Ended<T> {
    Ended { last: Some(last), failed: None, restarts: 0 }
}

/// A stop that could not be recorded in the store is not clean.
fn unwritten(routes: &[(String, Ended<Summary>)]) -> Option<Failure> {
    let last = |(route, ended): &'_ (String, Ended<Summary>)| Some((route.clone(), ended.last?));
    let (route, summary) = routes.iter().filter_map(last).find(|(_, summary)| !summary.released)?;
    let text = format!(
        "stopped, but the store of route {route} could not be reached: {} messages whose outcome is not recorded will be sent again, \
         and other relays take over its lanes when the lease expires",
        summary.unwritten
    );
    Some(Failure::new(exit::UNREACHABLE, text))
}

/// Signals within this time after the first are the same one.
const SAME_SIGNAL: Duration = Duration::from_secs(1);

/// The first signal stops gracefully, the second at once.
fn wait_for_signals(stop: watch::Sender<bool>) -> Result<(), Failure> {
    let failed = |error: std::io::Error| Failure::new(exit::FAILURE, format!("failed to listen for signals: {error}"));
    let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
    let mut hangup = signal(SignalKind::hangup()).map_err(failed)?;
    tokio::spawn(async move {
        let mut first: Option<Instant> = None;
        loop {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
                _ = hangup.recv() => {}
            }
            // A terminal or a supervisor may send the same one to a program and to its group.
            if first.is_some_and(|first| first.elapsed() < SAME_SIGNAL) {
                continue;
            }
            if first.is_some() {
                tracing::warn!("stopped at once by a second signal; the messages in flight will be published again");
                std::process::exit(i32::from(exit::FAILURE));
            }
            first = Some(Instant::now());
            let _ = stop.send(true);
        }
    });
    Ok(())
}

/// How often to look for topics that no route takes.
const UNROUTED_EVERY: Duration = Duration::from_secs(60);

/// Warns about each topic that no route takes when it is first seen, and again every hour: nothing else in the log says so.
async fn warn_of_unrouted(store: Arc<dyn Store>) {
    const AGAIN: Duration = Duration::from_secs(3600);
    let mut told: HashMap<String, Instant> = HashMap::new();
    let mut first = true;
    loop {
        // Routes of this process are registered by then.
        tokio::time::sleep(if first { Duration::from_secs(5) } else { UNROUTED_EVERY }).await;
        first = false;
        // A store that is away is told elsewhere.
        let Ok(unrouted) = store.unrouted_topics().await else { continue };
        told.retain(|topic, at| at.elapsed() < AGAIN && unrouted.iter().any(|unrouted| unrouted.topic == *topic));
        for UnroutedTopic { topic, messages, .. } in unrouted {
            if told.insert(topic.clone(), Instant::now()).is_none() {
                tracing::warn!(
                    topic,
                    messages,
                    "no route takes this topic, so its messages are not sent; `postroom routes list` shows what each route takes"
                );
            }
        }
    }
}

/// SIGUSR1 prints the state of each route and inbox, as one line of JSON on standard error.
fn show_on_signal(
    config: Arc<Config>,
    routes: Vec<Live<RouteNow>>,
    inboxes: Vec<Live<InboxNow>>,
) -> Result<(), Failure> {
    let mut asked = signal(SignalKind::user_defined1())
        .map_err(|error| Failure::new(exit::FAILURE, format!("failed to listen for signals: {error}")))?;
    tokio::spawn(async move {
        while asked.recv().await.is_some() {
            let routes: Vec<_> = config
                .routes
                .iter()
                .zip(&routes)
                .map(|(routed, live)| route_now(&routed.route.name, &live.now()))
                .collect();
            let inboxes: Vec<_> = config
                .inboxes
                .iter()
                .zip(&inboxes)
                .map(|(inbox, live)| {
                    let InboxNow { counters, filling, waiting } = live.now();
                    serde_json::json!({
                        "consumer": inbox.consumer.as_str(), "filling": filling, "waiting": waiting, "kept": counters.kept,
                        "duplicates": counters.duplicates, "dead": counters.dead, "requeued": counters.requeued,
                    })
                })
                .collect();
            say!("{}", serde_json::json!({ "routes": routes, "inboxes": inboxes }));
        }
    });
    Ok(())
}

fn route_now(route: &str, now: &RouteNow) -> serde_json::Value {
    let counters = now.counters;
    serde_json::json!({
        "route": route, "lanes": now.lanes, "in_flight": now.in_flight, "in_flight_bytes": now.in_flight_bytes,
        "with_sink": now.with_sink, "settled_ahead": now.settled_ahead, "sink_down": now.sink_down, "sink_blocked": now.sink_blocked, "stopping": now.stopping,
        "claimed": counters.claimed, "acked": counters.stored, "retried": counters.retried, "dead": counters.dead,
        "unknown": counters.unknown, "fenced": counters.fenced, "lanes_lost": counters.lanes_lost,
        "sink_outages": counters.sink_outages,
    })
}

/// For those who wait for the start: one line, once every route is registered, or known to wait for its store.
fn announce(config: &Config, owner: &str) {
    let (routes, inboxes) = (config.routes.len(), config.inboxes.len());
    let inboxes = if inboxes == 0 { String::new() } else { format!(" and {inboxes} inbox(es)") };
    say!("postroom: running {routes} route(s){inboxes} as {owner}");
}

/// The counts are those of the last run of each; `restarts` says how many runs there were before it.
fn report(
    routes: &[(String, Ended<Summary>)],
    inboxes: &[(String, Ended<FillCounters>)],
    failed: Option<&Failure>,
    json: bool,
) {
    if json {
        let routes: Vec<_> = routes.iter().map(|(route, ended)| shown_route(route, ended)).collect();
        let inboxes: Vec<_> = inboxes
            .iter()
            .map(|(consumer, Ended { last, restarts, .. })| match last {
                Some(counters) => serde_json::json!({
                    "consumer": consumer, "kept": counters.kept, "duplicates": counters.duplicates, "dead": counters.dead,
                    "requeued": counters.requeued, "fenced": counters.fenced, "restarts": restarts,
                }),
                None => serde_json::json!({ "consumer": consumer, "restarts": restarts }),
            })
            .collect();
        let mut told = serde_json::json!({ "routes": routes, "inboxes": inboxes });
        if let Some(failure) = failed {
            (told["error"], told["exit_code"]) = (failure.text.as_str().into(), failure.code.into());
        }
        show!("{told}");
        return;
    }
    for (route, Ended { last, restarts, .. }) in routes {
        match last {
            Some(Summary { counters, unfinished, unwritten, .. }) => say!(
                "postroom: route {route}: acked {}, retried {}, dead {}, fenced {}, lanes lost {}, restarts {restarts}, \
                 unfinished {unfinished}, unwritten {unwritten}",
                counters.stored,
                counters.retried,
                counters.dead,
                counters.fenced,
                counters.lanes_lost
            ),
            None => say!("postroom: route {route}: not running when postroom stopped, restarts {restarts}"),
        }
    }
    for (consumer, Ended { last, restarts, .. }) in inboxes {
        match last {
            Some(counters) => say!(
                "postroom: inbox {consumer}: kept {}, duplicates {}, dead {}, restarts {restarts}",
                counters.kept,
                counters.duplicates,
                counters.dead
            ),
            None => say!("postroom: inbox {consumer}: not running when postroom stopped, restarts {restarts}"),
        }
    }
}

fn shown_route(route: &str, Ended { last, restarts, .. }: &Ended<Summary>) -> serde_json::Value {
    let Some(Summary { counters, unfinished, unwritten, released }) = last else {
        return serde_json::json!({ "route": route, "restarts": restarts });
    };
    serde_json::json!({
        "route": route, "claimed": counters.claimed, "acked": counters.stored, "retried": counters.retried,
        "queued": counters.queued, "scheduled": counters.scheduled, "dead": counters.dead,
        "unknown": counters.unknown, "fenced": counters.fenced,
        "lanes_lost": counters.lanes_lost, "sink_outages": counters.sink_outages,
        "unfinished": unfinished, "unwritten": unwritten, "lanes_given_back": released, "restarts": restarts,
    })
}

fn host() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map(|name| name.trim().to_owned())
        .or_else(|_| std::env::var("HOSTNAME"))
        .unwrap_or_else(|_| "relay".to_owned())
}
