//! `postroom doctor` looks at a whole installation and says for each thing whether it is fine, or what to do. `postroom explain` tells
//! more about one of its codes.

use clap::Args;
use postroom::{ArchiveState, Diagnosis, Severity, StoreStatus, Vitals, lasting};
use postroom_brokers::{Hazard, SinkOptions};
use serde::Serialize;

use crate::StoreArgs;
use crate::check::{ANSWERS_WITHIN, answered, made};
use crate::config::{self, Config};
use crate::doctor_tables;
use crate::exit::{self, Failure};
use crate::say::{printable, show};
use crate::table::counted;

/// The explanations, one section for each code.
const CODES: &str = include_str!("../../../docs/doctor.md");
/// A route that nobody relays for longer keeps rows from being deleted.
const FORGOTTEN: f64 = 86_400.0;
/// A message that waits for longer is late, whatever the reason.
const LATE: f64 = 300.0;
/// A store that is full sooner is worth a word.
const FULL_SOON_DAYS: f64 = 30.0;

#[derive(Debug, Args)]
pub struct DoctorArgs {
    #[command(flatten)]
    store: StoreArgs,
}

#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// A code that `postroom doctor` shows; without one, all are listed
    code: Option<String>,
}

/// One thing that was looked at, and where.
#[derive(Debug, Serialize)]
struct Examined {
    part: String,
    #[serde(flatten)]
    diagnosis: Diagnosis,
}

pub async fn doctor(args: &DoctorArgs, json: bool) -> Result<(), Failure> {
    // A configuration tells of brokers too. Whoever names a store by its URL need not have one.
    let config = match args.store.store {
        Some(_) => None,
        None if args.store.config.exists() => Some(config::load(&args.store.config)?),
        None => None,
    };
    let store = args.store.open().await?;
    let mut examined = Vec::new();
    let mut found = |part: String, diagnosis: Diagnosis| examined.push(Examined { part, diagnosis });
    let part = || format!("store {}", store.shown());
    let diagnosed = store.diagnose().await?;
    diagnosed.into_iter().for_each(|diagnosis| found(part(), diagnosis));
    let (status, vitals) = (store.status().await?, store.vitals().await?);
    let one_of_many = args.store.is_one_of_many();
    let of_status = of_status(&status).into_iter().filter(|diagnosis| !(one_of_many && diagnosis.code == "no-relay"));
    of_status.for_each(|diagnosis| found(part(), diagnosis));
    let capacity = config.as_ref().and_then(|config| config.capacity_bytes);
    found(part(), growth(&vitals, capacity, config.as_ref()));
    found(part(), archive(&store.archive_state().await?));
    let taken = config.as_ref().map_or(&[][..], |config| &config.intakes);
    for (table, diagnosis) in doctor_tables::diagnose(store.as_ref(), taken).await? {
        found(format!("table {}", printable(&table)), diagnosis);
    }
    if let Some(config) = &config {
        for (part, diagnosis) in of_brokers(config).await {
            found(part, diagnosis);
        }
        found("configuration".to_owned(), listener(config));
    }
    examined.sort_by_key(|examined| std::cmp::Reverse(examined.diagnosis.severity));
    let worst = examined.first().map_or(Severity::Fine, |worst| worst.diagnosis.severity);
    if json {
        show!("{}", serde_json::json!({ "worst": worst, "examined": examined }));
    } else {
        for Examined { part, diagnosis: Diagnosis { code, severity, found, advice } } in &examined {
            show!("{severity:8}{code}: {found} ({part})");
            if let Some(advice) = advice {
                show!("        {advice}");
            }
        }
    }
    if worst >= Severity::Warning {
        let bad = examined.iter().filter(|examined| examined.diagnosis.severity >= Severity::Warning).count();
        let verb = if bad == 1 { "needs" } else { "need" };
        let text =
            format!("{} {verb} attention; `postroom explain CODE` tells more", counted(bad as i64, false, "thing"));
        return Err(Failure { answered: true, ..Failure::new(exit::FAILURE, text) });
    }
    Ok(())
}

/// What every store shows in its status.
fn of_status(status: &StoreStatus) -> Vec<Diagnosis> {
    let mut found = Vec::new();
    let named = |names: Vec<String>| names.join(", ");
    let unrouted: Vec<String> = status.unrouted.iter().map(|topic| topic.topic.clone()).collect();
    found.push(Diagnosis::unless(
        !unrouted.is_empty(),
        ("unrouted-topics", "a route takes every topic, among the newest messages"),
        Severity::Danger,
        &format!("no route takes {}: messages of it are not sent", named(unrouted)),
        "add the topic to a route's `topics` and restart the relay, or postroom routes set ROUTE --topics …",
    ));
    let lonely = |route: &&postroom::RouteStatus| route.relays.iter().all(|relay| !relay.alive);
    let idle: Vec<String> = status.routes.iter().filter(lonely).map(|route| route.route.clone()).collect();
    found.push(Diagnosis::unless(
        !idle.is_empty(),
        ("no-relay", if status.routes.is_empty() { "no route has run yet" } else { "a relay runs every route" }),
        Severity::Danger,
        &format!("no relay runs {}", named(idle)),
        "postroom run; if a route is gone for good: postroom routes forget ROUTE",
    ));
    let pins = |route: &&postroom::RouteStatus| {
        lonely(route) && route.oldest_unread_seconds.is_some_and(|age| age > FORGOTTEN)
    };
    let pinning: Vec<String> = status.routes.iter().filter(pins).map(|route| route.route.clone()).collect();
    found.push(Diagnosis::unless(
        !pinning.is_empty(),
        ("retention-pinned", "no route without a relay keeps old rows from being deleted"),
        Severity::Warning,
        &format!("{} has not read messages of more than a day ago, and no relay runs it: retention deletes nothing behind that", named(pinning)),
        "postroom run with this route, or postroom routes forget ROUTE --reason …",
    ));
    let late: Vec<String> = status
        .routes
        .iter()
        .filter_map(|route| {
            let age = route.oldest_unsent_seconds.filter(|age| *age > LATE)?;
            Some(format!("{} ({})", route.route, lasting(age)))
        })
        .collect();
    found.push(Diagnosis::unless(
        !late.is_empty(),
        ("late-messages", "no message waits for longer than 5 minutes"),
        Severity::Warning,
        &format!("messages wait on {}", named(late)),
        "postroom status; then postroom why ID of one that postroom messages list shows",
    ));
    let down = status.routes.iter().flat_map(|route| &route.relays).filter(|relay| relay.alive);
    let down: Vec<String> =
        down.filter_map(|relay| relay.link.trouble.as_ref()).map(|trouble| trouble.error.clone()).collect();
    found.push(Diagnosis::unless(
        !down.is_empty(),
        ("sink-down", "every relay can publish, as far as it reported"),
        Severity::Danger,
        &format!("a relay cannot publish: {}", down.first().map(String::as_str).unwrap_or_default()),
        "postroom status; postroom check",
    ));
    let dead: i64 = status.routes.iter().map(|route| route.dead).sum::<i64>()
        + status.inboxes.iter().map(|inbox| inbox.dead).sum::<i64>();
    found.push(Diagnosis::unless(
        dead > 0,
        ("dead-letters", "there are no dead letters"),
        Severity::Warning,
        &format!("there are {dead} dead letters"),
        "postroom dead groups, and postroom dead groups --side in",
    ));
    found
}

/// A segment that stays is one that cannot be written: nothing is removed behind it.
fn archive(state: &ArchiveState) -> Diagnosis {
    const LONG: f64 = 3600.0;
    match state.unfinished_seconds.filter(|age| *age > LONG && state.archives) {
        Some(age) => Diagnosis::of(
            "archive",
            Severity::Warning,
            format!(
                "a segment was begun {} ago and is not in the archive: no message is removed before it is",
                lasting(age)
            ),
            "postroom prune --outbox AGE --archive URL says what is wrong; to end archiving, explain archive",
        ),
        None if state.archives => Diagnosis::fine("archive", "no segment waits to be archived"),
        None => Diagnosis::fine("archive", "messages are removed without being archived"),
    }
}

fn growth(vitals: &Vitals, capacity: Option<i64>, config: Option<&Config>) -> Diagnosis {
    const CODE: &str = "growth";
    let days = capacity.and_then(|capacity| vitals.days_until(capacity));
    let grows = vitals.growth.and_then(|growth| growth.bytes_per_day).is_some_and(|bytes| bytes > 0.0);
    match days {
        Some(days) if days < FULL_SOON_DAYS => Diagnosis::of(
            CODE,
            Severity::Warning,
            format!("the store reaches its capacity in about {days:.0} days"),
            "postroom sizes; set an age in [retention]",
        ),
        _ if grows && config.is_some_and(|config| config.retention.outbox.is_none()) => Diagnosis::of(
            CODE,
            Severity::Note,
            "the store grows, and nothing deletes what is finished",
            "set outbox = \"7d\" or another age in [retention]",
        ),
        _ => Diagnosis::fine(CODE, format!("{} MiB", vitals.bytes >> 20)),
    }
}

async fn of_brokers(config: &Config) -> Vec<(String, Diagnosis)> {
    let mut found = Vec::new();
    for routed in &config.routes {
        let finding = answered(routed.sink.check()).await;
        let part = || format!("route {}", routed.route.name);
        let is_there = finding.ok;
        found.push((part(), of_finding("sink", finding)));
        if is_there {
            found.extend(hazards(&*routed.sink).await.into_iter().map(|diagnosis| (part(), diagnosis)));
        }
    }
    let made = made(config);
    for inbox in &config.inboxes {
        let finding = answered(inbox.from.check(&made)).await;
        found.push((format!("inbox {}", inbox.consumer), of_finding("inbox-source", finding)));
    }
    found
}

/// What may lose messages at a broker that has confirmed them.
async fn hazards(sink: &dyn SinkOptions) -> Vec<Diagnosis> {
    const CODE: &str = "sink-settings";
    let found = match tokio::time::timeout(ANSWERS_WITHIN, sink.hazards()).await {
        Ok(Ok(found)) => found,
        Ok(Err(failed)) => return vec![Diagnosis::of(CODE, Severity::Unknown, failed.problem, failed.advice)],
        Err(_) => return vec![Diagnosis::of(CODE, Severity::Unknown, "the broker did not answer", "try again")],
    };
    let diagnosis = |hazard: Hazard| {
        let severity = if hazard.is_known { Severity::Danger } else { Severity::Unknown };
        Diagnosis::of(CODE, severity, hazard.problem, hazard.advice)
    };
    found.into_iter().map(diagnosis).collect()
}

fn of_finding(code: &'static str, finding: postroom::Finding) -> Diagnosis {
    match finding.advice {
        _ if finding.ok => Diagnosis::fine(code, finding.found),
        advice => Diagnosis::of(code, Severity::Danger, finding.found, advice.unwrap_or_default()),
    }
}

fn listener(config: &Config) -> Diagnosis {
    const CODE: &str = "metrics";
    match &config.admin {
        Some(admin) => Diagnosis::fine(CODE, format!("metrics and health are served at {}", admin.listen)),
        None => Diagnosis::of(
            CODE,
            Severity::Note,
            "nothing serves metrics and health, so nobody is alerted",
            "add [admin] to the configuration; deploy/prometheus has rules and alerts",
        ),
    }
}

pub fn explain(args: &ExplainArgs, json: bool) -> Result<(), Failure> {
    let Some(code) = &args.code else {
        let codes: Vec<&str> = sections().map(|(code, _)| code).collect();
        if json {
            show!("{}", serde_json::json!({ "codes": codes }));
        } else {
            codes.iter().for_each(|code| show!("{code}"));
        }
        return Ok(());
    };
    let Some((_, text)) = sections().find(|(known, _)| known == code) else {
        let text = format!("there is no code {code:?}; `postroom explain` lists them");
        return Err(Failure::new(exit::USAGE, text));
    };
    if json {
        show!("{}", serde_json::json!({ "code": code, "text": text }));
    } else {
        text.lines().for_each(|line| show!("{line}"));
    }
    Ok(())
}

/// Codes and what is written about them.
fn sections() -> impl Iterator<Item = (&'static str, &'static str)> {
    CODES.split("\n## ").skip(1).filter_map(|section| {
        let (code, text) = section.split_once('\n')?;
        Some((code.trim(), text.trim()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_is_explained() {
        let known: Vec<&str> = sections().map(|(code, _)| code).collect();
        let sources = [
            include_str!("doctor.rs"),
            include_str!("doctor_tables.rs"),
            include_str!("../../postroom-postgres/src/operate/doctor.rs"),
            include_str!("../../postroom-mysql/src/operate/doctor.rs"),
            include_str!("../../postroom-mssql/src/operate/doctor.rs"),
            include_str!("../../postroom-sqlite/src/operate/doctor.rs"),
        ];
        for code in &known {
            assert!(sources.iter().any(|source| source.contains(&format!("\"{code}\""))), "nothing says {code}");
        }
        let empty = StoreStatus {
            store: "sqlite",
            schema_version: 1,
            outbox_rows: 0,
            outbox_rows_is_bound: false,
            routes: Vec::new(),
            inboxes: Vec::new(),
            unrouted: Vec::new(),
            reconciled: Vec::new(),
        };
        for diagnosis in of_status(&empty) {
            assert!(known.contains(&diagnosis.code), "{} is not explained", diagnosis.code);
            assert_eq!(diagnosis.severity, Severity::Fine, "{diagnosis:?}");
        }
    }
}
