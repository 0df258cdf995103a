//! Many stores: which there are, by name or by asking a database, and `postroom stores`.

use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use futures_util::StreamExt;
use futures_util::stream;
use postroom::{RouteStatus, Store, StoreStatus};

use crate::ConfigArgs;
use crate::config::{self, Config, Discovery, Group, Stores, name_fits};
use crate::exit::{self, Failure};
use crate::say::{ends_with, show};
use crate::store;
use crate::table::{Table, duration, number};

/// So many stores are asked at the same time.
const TOGETHER: usize = 8;
/// A store that has not answered within this time is shown as down.
const ANSWERS_WITHIN: Duration = Duration::from_secs(20);

/// One database.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    pub name: Arc<str>,
    pub url: String,
}

/// The databases of a group. The error is for people; a name that does not fit, or that another group has, is told and left out.
pub async fn of_group(group: &Group) -> Result<Vec<Found>, String> {
    match group {
        Group::Named { name, url } => Ok(vec![Found { name: name.as_str().into(), url: url.clone() }]),
        Group::Discovered(discovery) => discovered(discovery).await,
    }
}

async fn discovered(discovery: &Discovery) -> Result<Vec<Found>, String> {
    let (asked, _) = store::open_frugal(&discovery.store, 0, 0).map_err(|failure| failure.text)?;
    let rows = asked.discover(&discovery.query).await.map_err(|error| Failure::of(exit::FAILURE, &error).text)?;
    let mut found = Vec::with_capacity(rows.len());
    for row in rows {
        let url = name_fits(&row.name).and_then(|()| discovery.url_of(&row.name, row.url.as_deref()));
        match url {
            Ok(url) => found.push(Found { name: row.name.into(), url }),
            Err(wrong) => tracing::error!("stores {}: a database is left out: its name or URL {wrong}", discovery.name),
        }
    }
    Ok(found)
}

/// All databases by name, and the groups whose databases could not be asked for, with the reason.
pub async fn all(groups: &[Group]) -> (Vec<Found>, Vec<(String, String)>) {
    let (mut all, mut troubles): (Vec<Found>, Vec<(String, String)>) = (Vec::new(), Vec::new());
    for group in groups {
        match of_group(group).await {
            Ok(found) => all.extend(found),
            Err(why) => troubles.push((group.name().to_owned(), why)),
        }
    }
    all.sort_by(|a, b| a.name.cmp(&b.name));
    all.dedup_by(|a, b| a.name == b.name);
    (all, troubles)
}

/// The database with this name.
pub async fn named(groups: &[Group], wanted: &str) -> Result<Found, Failure> {
    let mut troubles = Vec::new();
    // Those that are named cost nothing to look at.
    let (named, asked): (Vec<_>, Vec<_>) = groups.iter().partition(|group| matches!(group, Group::Named { .. }));
    for group in named.into_iter().chain(asked) {
        match of_group(group).await {
            Ok(found) => {
                if let Some(found) = found.into_iter().find(|found| *found.name == *wanted) {
                    return Ok(found);
                }
            }
            Err(why) => troubles.push(format!("; the databases of {} could not be asked for: {why}", group.name())),
        }
    }
    let text =
        format!("there is no store {wanted:?} in the configuration; `postroom stores` lists them{}", troubles.concat());
    Err(Failure::new(exit::USAGE, text))
}

/// The configuration for one of its stores: with the routes and intakes that this store has.
pub fn config_of(config: Config, found: &Found) -> Config {
    let Config { routes, intakes, .. } = config;
    let name = &*found.name;
    Config {
        stores: Stores::One(found.url.clone()),
        routes: routes.into_iter().filter(|routed| routed.stores.takes(name)).collect(),
        intakes: intakes.into_iter().filter(|taken| taken.stores.takes(name)).collect(),
        ..config
    }
}

/// A configuration, and which of its stores if it has many.
#[derive(Debug, Args)]
pub struct OfStore {
    #[command(flatten)]
    config: ConfigArgs,
    /// Which of the configuration's [[stores]]
    #[arg(long, value_name = "NAME")]
    store: Option<String>,
}

impl OfStore {
    /// The configuration as it is for this store, and the store.
    pub async fn load(&self) -> Result<(Config, Arc<dyn Store>), Failure> {
        let config = config::load(&self.config.config)?;
        let config = match (&config.stores, &self.store) {
            (Stores::Many(groups), Some(name)) => {
                let found = named(groups, name).await?;
                config_of(config, &found)
            }
            (Stores::One(_), Some(_)) => {
                return Err(Failure::new(
                    exit::USAGE,
                    "--store names one of [[stores]], and the configuration has one [store]",
                ));
            }
            (_, None) => config,
        };
        let store = store::open(config.stores.one()?)?;
        Ok((config, store))
    }
}

#[derive(Debug, Args)]
pub struct StoresArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Exit with code 1 if a store is down, if a query for stores fails, or if a store has messages that wait for longer than this, such as 5m
    #[arg(long, value_name = "AGE", value_parser = crate::dead::duration)]
    fail_on_age: Option<Duration>,
}

/// What is shown of a store.
struct Seen {
    found: Found,
    /// None: it is down, and why.
    status: Result<StoreStatus, String>,
}

/// One line for each store.
pub async fn stores(args: StoresArgs, json: bool) -> Result<(), Failure> {
    let config = config::load(&args.config.config)?;
    let Stores::Many(groups) = &config.stores else {
        return Err(Failure::new(exit::USAGE, "the configuration has one [store]; `postroom status` shows it"));
    };
    let (all, troubles) = all(groups).await;
    let seen: Vec<Seen> = stream::iter(all).map(look).buffered(TOGETHER).collect().await;
    let oldest =
        |status: &StoreStatus| status.routes.iter().filter_map(|route| route.oldest_unsent_seconds).reduce(f64::max);
    let late = |seen: &Seen, age: Duration| match &seen.status {
        Err(_) => true,
        Ok(status) => oldest(status).is_some_and(|seconds| seconds > age.as_secs_f64()),
    };
    let failing = args.fail_on_age.is_some_and(|age| !troubles.is_empty() || seen.iter().any(|seen| late(seen, age)));
    if failing {
        ends_with(exit::FAILURE);
    }
    let sum = |status: &StoreStatus, of: fn(&RouteStatus) -> i64| status.routes.iter().map(of).sum::<i64>();
    if json {
        let shown = |seen: &Seen| match &seen.status {
            Ok(status) => serde_json::json!({
                "store": &*seen.found.name, "up": true, "schema_version": status.schema_version,
                "backlog": sum(status, |route| route.backlog), "backlog_is_bound": status.routes.iter().any(|route| route.backlog_is_bound),
                "oldest_unsent_seconds": oldest(status), "parked": sum(status, |route| route.parked), "dead": sum(status, |route| route.dead),
            }),
            Err(why) => serde_json::json!({ "store": &*seen.found.name, "up": false, "problem": why }),
        };
        let problems: Vec<_> =
            troubles.iter().map(|(group, why)| serde_json::json!({ "stores": group, "problem": why })).collect();
        let stores: Vec<_> = seen.iter().map(shown).collect();
        show!("{}", serde_json::json!({ "stores": stores, "not_found": problems }));
    } else {
        let mut table = Table::new(&["STORE", "STATE", ">SCHEMA", ">BACKLOG", ">OLDEST", ">PARKED", ">DEAD"]);
        for seen in &seen {
            let name = seen.found.name.to_string();
            match &seen.status {
                Ok(status) => table.row([
                    name,
                    "up".to_owned(),
                    status.schema_version.to_string(),
                    number(
                        sum(status, |route| route.backlog),
                        status.routes.iter().any(|route| route.backlog_is_bound),
                    ),
                    oldest(status).map_or_else(|| "-".to_owned(), duration),
                    sum(status, |route| route.parked).to_string(),
                    sum(status, |route| route.dead).to_string(),
                ]),
                Err(_) => {
                    table.row([name, "down".to_owned(), "?".into(), "?".into(), "?".into(), "?".into(), "?".into()])
                }
            }
        }
        table.lines().iter().for_each(|line| show!("{line}"));
        for seen in &seen {
            if let Err(why) = &seen.status {
                show!("! {} is down: {why}", seen.found.name);
            }
        }
        troubles.iter().for_each(|(group, why)| show!("! the databases of {group} could not be asked for: {why}"));
    }
    if failing {
        let text = "a store is down, could not be asked for, or has messages that wait for longer";
        return Err(Failure { answered: true, ..Failure::new(exit::FAILURE, text) });
    }
    Ok(())
}

async fn look(found: Found) -> Seen {
    let status = async {
        let (store, _) = store::open_frugal(&found.url, 0, 0).map_err(|failure| failure.text)?;
        match tokio::time::timeout(ANSWERS_WITHIN, store.status()).await {
            Ok(status) => status.map_err(|error| Failure::of(exit::FAILURE, &error).text),
            Err(_) => Err(format!("no answer within {} s", ANSWERS_WITHIN.as_secs())),
        }
    };
    let status = status.await;
    Seen { found, status }
}
