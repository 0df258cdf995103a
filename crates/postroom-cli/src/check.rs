//! `postroom check`: whether everything that `postroom run` needs is there. Changes nothing.

use std::time::Duration;

use postroom::{Consumer, Finding, Needs, Span, Store};
use postroom_archive::Archive;
use postroom_brokers::CheckFailed;

use crate::ConfigArgs;
use crate::config::{self, Config, Group, Routed, Stores};
use crate::exit::{self, Failure};
use crate::presets::intakes_of;
use crate::say::show;
use crate::store;
use crate::stores;

/// A broker that has not answered within this time counts as unreachable.
pub const ANSWERS_WITHIN: Duration = Duration::from_secs(15);

/// What the sinks of a configuration create where it is missing.
pub fn made(config: &Config) -> Vec<String> {
    config.routes.iter().filter_map(|routed| routed.sink.makes()).collect()
}

/// What one part of the configuration needs.
#[derive(serde::Serialize)]
struct Checked {
    part: String,
    #[serde(flatten)]
    finding: Finding,
}

pub async fn check(args: &ConfigArgs, json: bool) -> Result<(), Failure> {
    let config = config::load(&args.config)?;
    let mut checked = Vec::new();
    let mut found = |part: String, finding: Finding| checked.push(Checked { part, finding });
    found("configuration".to_owned(), Finding::good(format!("{} is valid", args.config.display())));
    match &config.stores {
        Stores::One(url) => {
            let store = store::open(url).map_err(|failure| Failure { code: exit::CONFIG, ..failure })?;
            for finding in of_store(&config, store.as_ref()).await? {
                found(format!("store {}", store.shown()), finding);
            }
            for Routed { route, .. } in &config.routes {
                if let Some(what) = store.cannot(route) {
                    found(format!("route {}", route.name), Finding::bad(what, "change the route"));
                }
            }
        }
        Stores::Many(groups) => of_many(&config, groups, &mut found).await?,
    }
    if let Some(options) = &config.archive {
        let finding = match Archive::open(options) {
            Ok(archive) => {
                answered(async {
                    let found = archive.manifests().await.map_err(|error| CheckFailed {
                        problem: Failure::of(exit::FAILURE, &error).text,
                        advice: "create the folder or bucket, and allow this user to read and write it".to_owned(),
                    })?;
                    Ok(format!("it can be read, and has {} segments", found.manifests.len()))
                })
                .await
            }
            Err(error) => Finding::bad(Failure::of(exit::FAILURE, &error).text, "create the folder"),
        };
        found(format!("archive {}", options.place), finding);
    }
    for Routed { route, sink, .. } in &config.routes {
        let part = || format!("route {}, sink {}", route.name, sink.shown());
        found(part(), answered(sink.check()).await);
    }
    let made = made(&config);
    for inbox in &config.inboxes {
        let part = format!("inbox {}, {}", inbox.consumer, inbox.from.shown());
        found(part, answered(inbox.from.check(&made)).await);
    }
    for options in &config.reconcile {
        for consumer in &options.consumers {
            let Some(url) = &consumer.store else { continue };
            let part = format!("reconcile {}, consumer {}", options.name, consumer.consumer);
            let finding = match store::open(url) {
                Ok(theirs) => answered(inbox_of(theirs.as_ref(), &consumer.consumer)).await,
                Err(failure) => Finding::bad(failure.text, "correct the URL"),
            };
            found(part, finding);
        }
    }
    let bad = checked.iter().filter(|checked| !checked.finding.ok).count();
    if json {
        show!("{}", serde_json::json!({ "ok": bad == 0, "checked": checked }));
    } else {
        for Checked { part, finding } in &checked {
            show!("{} {part}: {}", if finding.ok { "ok  " } else { "FAIL" }, finding.found);
            if let Some(advice) = &finding.advice {
                show!("     {advice}");
            }
        }
    }
    if bad > 0 {
        let text = if bad == 1 { "1 check failed".to_owned() } else { format!("{bad} checks failed") };
        return Err(Failure { answered: true, ..Failure::new(exit::FAILURE, text) });
    }
    Ok(())
}

/// Of many stores, what must be changed in each, and how many have everything.
async fn of_many(config: &Config, groups: &[Group], found: &mut impl FnMut(String, Finding)) -> Result<(), Failure> {
    let (all, troubles) = stores::all(groups).await;
    for why in troubles {
        found("stores".to_owned(), Finding::bad(why, "correct the URL or the query, or start the database"));
    }
    let (count, mut good) = (all.len(), 0);
    for one in all {
        let part = format!("store {}", one.name);
        let findings = match store::open(&one.url) {
            Ok(store) => of_store(config, store.as_ref()).await?,
            Err(failure) => vec![Finding::bad(failure.text, "correct the URL")],
        };
        let bad: Vec<Finding> = findings.into_iter().filter(|finding| !finding.ok).collect();
        good += usize::from(bad.is_empty());
        bad.into_iter().for_each(|finding| found(part.clone(), finding));
    }
    if count == 0 {
        let advice = "correct the query, unless there are to be none now";
        found("stores".to_owned(), Finding::bad("there is none", advice));
    } else if good > 0 {
        found("stores".to_owned(), Finding::good(format!("{good} of {count} have everything that they need")));
    }
    Ok(())
}

/// What one store has and lacks.
async fn of_store(config: &Config, store: &dyn Store) -> Result<Vec<Finding>, Failure> {
    let needs = Needs {
        relay: !config.routes.is_empty(),
        filler: !config.inboxes.is_empty(),
        retention: !config.retention.parts().is_empty(),
        metrics: config.admin.is_some() || crate::admin::exports(),
        operations: true,
        comparisons: !config.reconcile.is_empty(),
        intakes: !config.intakes.is_empty(),
    };
    let mut found = match store.check(needs).await {
        Ok(findings) => findings,
        Err(error) => {
            // What is else to be said of it would be the same.
            return Ok(vec![Finding::bad(Failure::from(error).text, "correct the URL, or start the database")]);
        }
    };
    if !config.intakes.is_empty() {
        let intakes = intakes_of(store)?;
        for taken in &config.intakes {
            match intakes.check_intake(&taken.intake).await {
                Ok(findings) => found.extend(findings),
                Err(error) => found.push(Finding::bad(Failure::from(error).text, "start the database")),
            }
        }
    }
    Ok(found)
}

/// Whether a consumer's inbox can be read, in a database of its own.
async fn inbox_of(store: &dyn Store, consumer: &Consumer) -> Result<String, CheckFailed> {
    let at = Span { from_ms: 0, to_ms: 0 };
    let read = async {
        store.inbox_unhandled(consumer, at).await?;
        store.dead_at(consumer, &[]).await?;
        store.inbox_begins(consumer).await
    };
    match read.await {
        Ok(Some(_)) => Ok(format!("its inbox in {} can be read", store.shown())),
        Ok(None) => Ok(format!("{} can be read, and has no row of this consumer: is its name right?", store.shown())),
        Err(error) => Err(CheckFailed {
            problem: Failure::of(exit::FAILURE, &error).text,
            advice: "correct the URL, start the database, or grant what docs/grants-reader.sql grants".to_owned(),
        }),
    }
}

pub async fn answered(check: impl Future<Output = Result<String, CheckFailed>>) -> Finding {
    match tokio::time::timeout(ANSWERS_WITHIN, check).await {
        Ok(Ok(found)) => Finding::good(found),
        Ok(Err(CheckFailed { problem, advice })) => Finding::bad(problem, advice),
        Err(_) => {
            let text = format!("no answer within {} s", ANSWERS_WITHIN.as_secs());
            Finding::bad(text, "check for a firewall or a proxy in between")
        }
    }
}
