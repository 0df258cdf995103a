//! `postroom status`.

use std::time::Duration;

use clap::Args;
use postroom::{InboxStatus, ReconciledStatus, RouteStatus, StoreStatus, UnroutedTopic, WorkerStatus};
use serde::Serialize;

use crate::StoreArgs;
use crate::config::parse_duration;
use crate::exit::{self, Failure};
use crate::say::{ends_with, say, show};
use crate::table::{Table, counted, duration, number};

#[derive(Debug, Args)]
pub struct StatusArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// Show it again at this interval (2s if none is given), until ctrl-c
    #[arg(long, value_name = "TIME", value_parser = interval, num_args = 0..=1, default_missing_value = "2s")]
    watch: Option<Duration>,
    /// Exit with code 1 if one of these conditions is true, for monitoring: any, relay (no relay runs a route), sink (a sink or a queue
    /// is down or blocked), dead, retry, unrouted, inbox (nobody fills an inbox, or it has dead or retried messages), age=TIME (the oldest message is
    /// older), backlog=N (more messages wait), reconcile (a comparison found something, is late, left something out, or was never made). May be given several times or separated by commas
    #[arg(long, value_name = "CONDITION", value_delimiter = ',', value_parser = condition)]
    fail_on: Vec<Condition>,
}

/// No shorter than a store can answer without harm.
fn interval(text: &str) -> Result<Duration, String> {
    let every = crate::dead::duration(text)?;
    if every < Duration::from_millis(100) { Err("use 100ms or more, such as 2s".to_owned()) } else { Ok(every) }
}

/// What `--fail-on` names.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Condition {
    Any,
    Kind(Kind),
    Age(Duration),
    Backlog(i64),
}

/// Kinds of what needs attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Relay,
    Sink,
    Retry,
    Dead,
    Unrouted,
    Inbox,
    Reconcile,
    Age,
}

fn condition(text: &str) -> Result<Condition, String> {
    Ok(match text.split_once('=') {
        Some(("age", age)) => Condition::Age(parse_duration(age).ok_or("age must be a duration, such as age=5m")?),
        Some(("backlog", count)) => {
            let wrong = "backlog must be a whole number, 0 or more, such as backlog=10000";
            Condition::Backlog(count.parse().ok().filter(|count| *count >= 0).ok_or(wrong)?)
        }
        None if text == "any" => Condition::Any,
        None if text == "relay" => Condition::Kind(Kind::Relay),
        None if text == "sink" => Condition::Kind(Kind::Sink),
        None if text == "retry" => Condition::Kind(Kind::Retry),
        None if text == "dead" => Condition::Kind(Kind::Dead),
        None if text == "unrouted" => Condition::Kind(Kind::Unrouted),
        None if text == "inbox" => Condition::Kind(Kind::Inbox),
        None if text == "reconcile" => Condition::Kind(Kind::Reconcile),
        _ => {
            return Err(
                "use any, relay, sink, dead, retry, unrouted, inbox, reconcile, age=TIME or backlog=N".to_owned()
            );
        }
    })
}

/// Something that needs a person's attention, and the next command.
#[derive(Debug, Serialize)]
struct Attention {
    kind: Kind,
    text: String,
}

impl Attention {
    fn new(kind: Kind, text: impl Into<String>) -> Self {
        Self { kind, text: text.into() }
    }
}

/// A comparison is late when so many of them were left out.
const LEFT_OUT: f64 = 3.0;

/// A message that waits longer than this although everything is up needs attention.
const LONG: f64 = 60.0;

pub async fn status(args: &StatusArgs, json: bool) -> Result<(), Failure> {
    let (store, one_of_many) = (args.store.open().await?, args.store.is_one_of_many());
    loop {
        let status = store.status().await;
        if let (Err(error), Some(every)) = (&status, args.watch)
            && error.is_transient()
        {
            say!("postroom: {}", Failure::of(exit::FAILURE, error).text);
            tokio::time::sleep(every).await;
            continue;
        }
        let status = status?;
        let mut found = attention(&status);
        // What waits for too long is told by its age.
        found.retain(|found| !(one_of_many && found.kind == Kind::Relay));
        if status.reconciled.is_empty() && args.fail_on.contains(&Condition::Kind(Kind::Reconcile)) {
            let none = "messages were never compared with their effects; add [[reconcile]] to the configuration of `postroom run`, or run `postroom reconcile run`";
            found.push(Attention::new(Kind::Reconcile, none));
        }
        let verdict = verdict(&found);
        let failing = args.fail_on.iter().any(|condition| holds(*condition, &status, &found));
        if failing && args.watch.is_none() {
            ends_with(exit::FAILURE);
        }
        if json {
            let mut object = serde_json::to_value(&status).map_err(|error| Failure::of(exit::FAILURE, &error))?;
            object["attention"] = serde_json::json!(found);
            object["verdict"] = verdict.as_str().into();
            show!("{object}");
        } else {
            if args.watch.is_some() && std::io::IsTerminal::is_terminal(&std::io::stdout()) {
                // Home, and clear what is below.
                crate::say::to_stdout_as_it_is("\u{1b}[H\u{1b}[J");
            }
            lines(&store.shown(), &status, &found, &verdict).iter().for_each(|line| show!("{line}"));
        }
        if let Some(every) = args.watch {
            tokio::time::sleep(every).await;
            continue;
        }
        return if failing { Err(Failure { answered: true, ..Failure::new(exit::FAILURE, verdict) }) } else { Ok(()) };
    }
}

fn holds(condition: Condition, status: &StoreStatus, found: &[Attention]) -> bool {
    match condition {
        Condition::Any => !found.is_empty(),
        Condition::Kind(kind) => found.iter().any(|found| found.kind == kind),
        Condition::Age(age) => {
            let older = |seconds: Option<f64>| seconds.is_some_and(|seconds| seconds > age.as_secs_f64());
            status.routes.iter().any(|route| older(route.oldest_unsent_seconds))
                || status.inboxes.iter().any(|inbox| older(inbox.oldest_seconds))
        }
        // Where counting was cut, nobody knows that it is not more.
        Condition::Backlog(count) => status.routes.iter().any(|route| route.backlog > count || route.backlog_is_bound),
    }
}

fn verdict(found: &[Attention]) -> String {
    match found.len() {
        0 => "nothing needs attention".to_owned(),
        1 => "1 thing needs attention".to_owned(),
        many => format!("{many} things need attention"),
    }
}

fn lines(shown: &str, status: &StoreStatus, found: &[Attention], verdict: &str) -> Vec<String> {
    let mut lines = vec![format!(
        "{shown} ({}, schema version {}), {} in the outbox",
        status.store,
        status.schema_version,
        counted(status.outbox_rows, status.outbox_rows_is_bound, "row")
    )];
    let mut section = |table: Table| {
        lines.push(String::new());
        lines.extend(table.lines());
    };
    if !status.routes.is_empty() {
        let mut routes = Table::new(&[
            "ROUTE",
            ">BACKLOG",
            ">OLDEST",
            ">RETRYING",
            ">PARKED",
            ">SCHEDULED",
            ">DEAD",
            ">LANES",
            "RELAYS",
        ]);
        status.routes.iter().for_each(|route| routes.row(row(route)));
        section(routes);
        let mut relays = Table::new(&["RELAY", "ROUTE", ">LANES", ">LAST SEEN", "SINK", "STATE"]);
        for route in &status.routes {
            for relay in &route.relays {
                relays.row([
                    relay.short_name().to_owned(),
                    route.route.clone(),
                    relay.lanes.to_string(),
                    seen(relay),
                    relay.link.name.clone().unwrap_or_else(|| "-".to_owned()),
                    state(relay),
                ]);
            }
        }
        if status.routes.iter().any(|route| !route.relays.is_empty()) {
            section(relays);
        }
    }
    if !status.inboxes.is_empty() {
        let mut inboxes = Table::new(&[
            "INBOX",
            ">WAITING",
            ">OLDEST",
            ">RETRYING",
            ">DEAD",
            "FILLED BY",
            ">LAST SEEN",
            "FROM",
            "STATE",
        ]);
        status.inboxes.iter().for_each(|inbox| inboxes.row(inbox_row(inbox)));
        section(inboxes);
    }
    lines.push(String::new());
    if status.routes.is_empty() && status.inboxes.is_empty() {
        lines.push("no route has run yet; start one with `postroom run`".to_owned());
    }
    lines.push(verdict.to_owned());
    lines.extend(found.iter().map(|found| format!("! {}", found.text)));
    lines
}

fn seen(worker: &WorkerStatus) -> String {
    worker.seen_seconds_ago.map_or_else(|| "-".to_owned(), |ago| format!("{} ago", duration(ago)))
}

fn state(worker: &WorkerStatus) -> String {
    match &worker.link.trouble {
        _ if !worker.alive => "silent, its lease has expired".to_owned(),
        Some(trouble) => {
            let word = if trouble.blocked { "blocked" } else { "down" };
            format!("{word} for {}", duration(trouble.since_seconds))
        }
        None => "up".to_owned(),
    }
}

fn row(route: &RouteStatus) -> [String; 9] {
    let mut relays: Vec<&str> = route.relays.iter().filter(|relay| relay.alive).map(WorkerStatus::short_name).collect();
    relays.dedup();
    [
        route.route.clone(),
        // Nothing was found before counting was cut: that is not nothing.
        if route.backlog == 0 && route.backlog_is_bound {
            "?".to_owned()
        } else {
            number(route.backlog, route.backlog_is_bound)
        },
        oldest(route),
        number(route.retrying, route.retrying_is_bound),
        number(route.parked, route.parked_is_bound),
        number(route.scheduled, route.scheduled_is_bound),
        number(route.dead, route.dead_is_bound),
        format!("{}/{}", route.lanes_held, route.lanes),
        if relays.is_empty() { "nobody".to_owned() } else { relays.join(", ") },
    ]
}

/// If counting stopped before it found a message of the route: how old such a message can be at most.
fn oldest(route: &RouteStatus) -> String {
    match (route.oldest_unsent_seconds, route.oldest_unread_seconds) {
        (Some(seconds), _) => duration(seconds),
        (None, Some(at_most)) if route.backlog_is_bound => format!("<= {}", duration(at_most)),
        _ => "-".to_owned(),
    }
}

fn inbox_row(inbox: &InboxStatus) -> [String; 9] {
    let dash = || "-".to_owned();
    let filler = inbox.filler.as_ref();
    [
        inbox.consumer.clone(),
        number(inbox.waiting, inbox.waiting_is_bound),
        inbox.oldest_seconds.map_or_else(dash, duration),
        number(inbox.retrying, inbox.waiting_is_bound),
        number(inbox.dead, inbox.dead_is_bound),
        filler.map_or_else(dash, |filler| filler.short_name().to_owned()),
        filler.map_or_else(dash, seen),
        filler.and_then(|filler| filler.link.name.clone()).unwrap_or_else(dash),
        filler.map_or_else(dash, |filler| match filler.link.name {
            None if filler.alive => "starting".to_owned(),
            _ => state(filler),
        }),
    ]
}

/// What needs attention, in words, the most serious first.
fn attention(status: &StoreStatus) -> Vec<Attention> {
    let mut found = Vec::new();
    for route in &status.routes {
        of_route(route, &mut found);
    }
    for inbox in &status.inboxes {
        of_inbox(inbox, &mut found);
    }
    for UnroutedTopic { topic, messages, oldest_seconds } in &status.unrouted {
        found.push(Attention::new(
            Kind::Unrouted,
            format!(
                "topic {topic}: no route takes it now; {} among the newest, the oldest of them written {} ago. Correct the topic in the \
                 application that writes it, or add it to a route (`postroom routes list` shows what each takes): that sends what is \
                 written from then on. `postroom messages list --state unrouted` lists these messages; if a route took the topic \
                 earlier, `postroom why ID` says whether one may have been sent",
                counted(*messages, false, "message"),
                duration(*oldest_seconds)
            ),
        ));
    }
    for reconciled in &status.reconciled {
        let ReconciledStatus {
            name,
            seconds_ago,
            every_seconds,
            missing,
            strangers,
            days,
            unwritten,
            not_compared,
            troubles,
        } = reconciled;
        // Older results do not say it; then it is an hour.
        let every = every_seconds.unwrap_or(3600.0);
        if *seconds_ago > LEFT_OUT * every {
            let text = format!(
                "comparison {name} is to be made every {} and was last made {} ago; the log of `postroom run` says why",
                duration(every),
                duration(*seconds_ago)
            );
            found.push(Attention::new(Kind::Reconcile, text));
        }
        let parts = [
            (*missing, "messages that a consumer lacks"),
            (*strangers, "messages that a consumer has and the outbox has not"),
            (*days, "days on which business changes and messages differ"),
            (*unwritten, "changes without a message"),
            (*not_compared, "messages that could not be compared"),
            (*troubles, "sides that could not be compared"),
        ];
        let parts: Vec<String> = parts
            .iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, what)| format!("{} {what}", number(*count, false)))
            .collect();
        if !parts.is_empty() {
            found.push(Attention::new(
                Kind::Reconcile,
                format!(
                    "comparison {name} found {} {} ago; `postroom reconcile report {name}` tells more",
                    parts.join(", "),
                    duration(*seconds_ago)
                ),
            ));
        }
    }
    found
}

fn of_route(route: &RouteStatus, found: &mut Vec<Attention>) {
    let name = &route.route;
    if route.lanes_held == 0 {
        found.push(Attention::new(
            Kind::Relay,
            format!("route {name}: no relay runs it; start one with `postroom run`"),
        ));
    } else if route.lanes_held < route.lanes {
        let free = counted(route.lanes - route.lanes_held, false, "lane");
        found.push(Attention::new(
            Kind::Relay,
            format!(
                "route {name}: no relay holds {free} of {}; while relays run, this lasts at most one lease",
                route.lanes
            ),
        ));
    }
    for relay in &route.relays {
        let Some(trouble) = relay.link.trouble.as_ref().filter(|_| relay.alive) else { continue };
        let sink = relay.link.name.as_deref().unwrap_or("its sink");
        let (short, since) = (relay.short_name(), duration(trouble.since_seconds));
        let what = if trouble.blocked { "has accepted nothing" } else { "has been down" };
        found.push(Attention::new(
            Kind::Sink,
            format!(
                "route {name}: {sink} {what} for {since}, according to relay {short}; messages wait: {}",
                trouble.error
            ),
        ));
    }
    if route.retrying > 0 {
        let count = counted(route.retrying, route.retrying_is_bound, "message");
        let why = route.last_failure.as_deref().unwrap_or("unknown");
        found.push(Attention::new(
            Kind::Retry,
            format!(
                "route {name}: {count} failed and will be tried again; the last error: {why}. See `postroom messages list \
                 --route {name} --state retry`"
            ),
        ));
    }
    if route.dead > 0 {
        let dead = counted(route.dead, route.dead_is_bound, "dead message");
        found
            .push(Attention::new(Kind::Dead, format!("route {name}: {dead}; see `postroom dead list --route {name}`")));
    }
    let all_is_up = route.lanes_held > 0 && route.relays.iter().all(|relay| relay.link.trouble.is_none());
    if let Some(oldest) =
        route.oldest_unsent_seconds.filter(|oldest| *oldest > LONG && all_is_up && route.retrying == 0)
    {
        found.push(Attention::new(
            Kind::Age,
            format!(
                "route {name}: the oldest message has waited for {}, and the sink is up: it is slow, one key has most of the messages, \
                 or a key is parked (`postroom keys list --route {name}`)",
                duration(oldest)
            ),
        ));
    }
}

fn of_inbox(inbox: &InboxStatus, found: &mut Vec<Attention>) {
    let name = &inbox.consumer;
    if let Some(filler) = &inbox.filler {
        let (short, from) = (filler.short_name(), filler.link.name.as_deref().unwrap_or("its queue"));
        if !filler.alive {
            let text = format!(
                "inbox {name}: the lease of {short}, which filled it, has expired; no other process has taken over yet"
            );
            found.push(Attention::new(Kind::Inbox, text));
        } else if let Some(trouble) = &filler.link.trouble {
            let since = duration(trouble.since_seconds);
            let text = format!(
                "inbox {name}: no message of {from} has come in for {since}, according to {short}: {}",
                trouble.error
            );
            found.push(Attention::new(Kind::Sink, text));
        }
    }
    if inbox.retrying > 0 {
        let count = counted(inbox.retrying, inbox.waiting_is_bound, "message");
        let why = inbox.last_failure.as_deref().unwrap_or("unknown");
        found.push(Attention::new(
            Kind::Inbox,
            format!("inbox {name}: {count} failed and will be tried again; the last error: {why}"),
        ));
    }
    if inbox.dead > 0 {
        let dead = counted(inbox.dead, inbox.dead_is_bound, "dead message");
        found.push(Attention::new(
            Kind::Inbox,
            format!("inbox {name}: {dead}; see `postroom dead list --side in --route {name}`"),
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_are_words_with_values() {
        assert_eq!(condition("any"), Ok(Condition::Any));
        assert_eq!(condition("age=5m"), Ok(Condition::Age(Duration::from_secs(300))));
        assert_eq!(condition("backlog=10"), Ok(Condition::Backlog(10)));
        for wrong in ["", "age", "age=soon", "backlog=many", "backlog=-1", "deaths"] {
            assert!(condition(wrong).is_err(), "{wrong}");
        }
    }
}
