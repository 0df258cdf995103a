//! `postroom run`: one relay a route and one receiver an inbox, until a signal.

use std::path::Path;

use postroom::{MessageId, Wake};
use postroom_consumer::ReceiveCounters;
use postroom_relay::{Relay, Summary};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::config::{self, Config};
use crate::exit::{self, Failure};
use crate::store::{RouteOptions, Store};

pub async fn run(path: &Path, json: bool) -> Result<(), Failure> {
    let config = config::load(path)?;
    let store = Store::of(&config.store_url).map_err(|failure| Failure { code: exit::CONFIG, ..failure })?;
    // Two relays of one name would take each other's lanes for their own: a part of the name is always ours alone.
    let unique = MessageId::new();
    let owner = match &config.relay.name {
        Some(name) => format!("{name}/{unique}"),
        None => format!("{}/{}/{unique}", host(), std::process::id()),
    };
    let (stop, stopped) = watch::channel(false);
    // From here on a signal is a stop; before the lanes are taken it ends at once.
    wait_for_signals(stop)?;
    let mut relays = Vec::new();
    let mut wakes = Vec::new();
    for route in &config.routes {
        let options = RouteOptions {
            name: route.name.clone(),
            topics: route.topics.clone(),
            owner: owner.clone(),
            lease: config.relay.lease,
            start_at: route.start_at,
            order: route.order,
        };
        let source = store.source(options).await?;
        let sink = route.sink.open().map_err(|error| Failure::of(exit::CONFIG, &error))?;
        let wake = Wake::new();
        wakes.push(wake.clone());
        let relay = Relay::new(route.name.clone(), source, sink)
            .wake_by(wake)
            .in_flight_max(config.relay.in_flight_max)
            .in_flight_bytes_max(config.relay.in_flight_bytes_max)
            .order(route.order)
            .on_dead(route.on_dead)
            .rate(route.rate)
            .breaker_after(route.breaker_after)
            .poll_idle(config.relay.poll_idle)
            .stop_deadline(config.relay.stop_deadline)
            .retry(route.retry.clone())
            .seed(unique.as_uuid().as_u64_pair().1);
        let mut stopped = stopped.clone();
        tracing::info!(route = %route.name, topics = %route.topics, store = %store.shown(), sink = %route.sink.shown(), "relaying");
        relays.push((
            route.name.clone(),
            tokio::spawn(relay.run(async move {
                // An error means that the sender is gone, which is a stop too.
                let _ = stopped.wait_for(|stopped| *stopped).await;
            })),
        ));
    }
    let mut receivers = Vec::new();
    for inbox in &config.inboxes {
        let mut stopped = stopped.clone();
        let stop = async move {
            let _ = stopped.wait_for(|stopped| *stopped).await;
        };
        let from = inbox.from.open().map_err(|error| Failure::of(exit::CONFIG, &error))?;
        let receiving =
            store.keep_inbox(from, inbox.consumer.clone(), stop).map_err(|error| Failure::of(exit::CONFIG, &error))?;
        tracing::info!(consumer = %inbox.consumer, store = %store.shown(), from = %inbox.from.shown(), "receiving");
        receivers.push((inbox.consumer.to_string(), tokio::spawn(receiving)));
    }
    let _listener = store.listen(config.relay.listen, wakes)?;
    announce(&config, &owner);

    let mut summaries: Vec<(String, Summary)> = Vec::new();
    for (route, relay) in relays {
        let summary = relay.await.map_err(|error| Failure::of(exit::FAILURE, &error))?;
        summaries.push((route, summary));
    }
    let mut received: Vec<(String, ReceiveCounters)> = Vec::new();
    for (consumer, receiver) in receivers {
        let counters = receiver.await.map_err(|error| Failure::of(exit::FAILURE, &error))?;
        received.push((consumer, counters.map_err(|error| Failure::of(exit::FAILURE, &error))?));
    }
    report(&summaries, &received, json);
    Ok(())
}

/// The first signal stops gracefully, the second at once.
fn wait_for_signals(stop: watch::Sender<bool>) -> Result<(), Failure> {
    let failed = |error: std::io::Error| Failure::new(exit::FAILURE, format!("failed to listen for signals: {error}"));
    let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
    tokio::spawn(async move {
        for again in [false, true] {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            if again {
                tracing::warn!("stopped hard by a second signal; what was in flight is published again");
                std::process::exit(i32::from(exit::FAILURE));
            }
            let _ = stop.send(true);
        }
    });
    Ok(())
}

/// For those who wait for the start: one line, once every route is registered.
fn announce(config: &Config, owner: &str) {
    let (routes, inboxes) = (config.routes.len(), config.inboxes.len());
    let inboxes = if inboxes == 0 { String::new() } else { format!(" and {inboxes} inbox(es)") };
    eprintln!("postroom: running {routes} route(s){inboxes} as {owner}");
}

fn report(summaries: &[(String, Summary)], received: &[(String, ReceiveCounters)], json: bool) {
    if json {
        let routes: Vec<_> = summaries
            .iter()
            .map(|(route, summary)| {
                let counters = summary.counters;
                serde_json::json!({
                    "route": route, "claimed": counters.claimed, "acked": counters.stored, "retried": counters.retried,
                    "queued": counters.queued, "scheduled": counters.scheduled, "dead": counters.dead,
                    "unknown": counters.unknown, "fenced": counters.fenced,
                    "lanes_lost": counters.lanes_lost, "sink_outages": counters.sink_outages,
                    "unfinished": summary.unfinished,
                })
            })
            .collect();
        let inboxes: Vec<_> = received
            .iter()
            .map(|(consumer, counters)| {
                serde_json::json!({
                    "consumer": consumer, "kept": counters.kept, "duplicates": counters.duplicates,
                    "rejected": counters.rejected, "requeued": counters.requeued,
                })
            })
            .collect();
        println!("{}", serde_json::json!({ "routes": routes, "inboxes": inboxes }));
        return;
    }
    for (route, Summary { counters, unfinished }) in summaries {
        eprintln!(
            "postroom: route {route}: acked {}, retried {}, dead {}, fenced {}, lanes lost {}, unfinished {unfinished}",
            counters.stored, counters.retried, counters.dead, counters.fenced, counters.lanes_lost
        );
    }
    for (consumer, counters) in received {
        eprintln!(
            "postroom: inbox {consumer}: kept {}, duplicates {}, rejected {}",
            counters.kept, counters.duplicates, counters.rejected
        );
    }
}

fn host() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map(|name| name.trim().to_owned())
        .or_else(|_| std::env::var("HOSTNAME"))
        .unwrap_or_else(|_| "relay".to_owned())
}
