//! Many stores: which there are, by name or by asking a database, and `postroom stores`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use futures_util::StreamExt;
use futures_util::stream;
use postroom::{RouteStatus, Store, StoreStatus};

use crate::ConfigArgs;
use crate::config::{self, Config, Discovery, Group, Stores, name_fits};
use crate::exit::{self, Failure};
use crate::say::{ends_with, printable, show};
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

/// The databases of one of `[[stores]]`.
#[derive(Debug, Clone, Default)]
pub struct Listed {
    pub found: Vec<Found>,
    /// What cannot be a store as the query names it, in words.
    pub left_out: Vec<String>,
}

/// The databases of a group. The error is for people.
pub async fn of_group(group: &Group) -> Result<Listed, String> {
    match group {
        Group::Named { name, url } => {
            let found = vec![Found { name: name.as_str().into(), url: url.clone() }];
            Ok(Listed { found, left_out: Vec::new() })
        }
        Group::Discovered(discovery) => discovered(discovery).await,
    }
}

async fn discovered(discovery: &Discovery) -> Result<Listed, String> {
    let (asked, _) = store::open_frugal(&discovery.store, 0, 0).map_err(|failure| failure.text)?;
    let rows = asked.discover(&discovery.query).await.map_err(|error| Failure::of(exit::FAILURE, &error).text)?;
    let mut listed = Listed::default();
    for row in rows {
        // A name may be anything that is in that database.
        let shown: String = printable(&row.name).chars().take(255).collect();
        let name = name_fits(&row.name).map_err(|wrong| format!("its name {wrong}"));
        match name.and_then(|()| discovery.url_of(&row.name, row.url.as_deref())) {
            Ok(url) => listed.found.push(Found { name: row.name.into(), url }),
            Err(wrong) => listed.left_out.push(format!("stores {}: {shown:?} is left out: {wrong}", discovery.name)),
        }
    }
    Ok(listed)
}

/// Pure: all of them by name, and what is left out: of two databases with one name the second.
pub fn merged<'a>(groups: impl IntoIterator<Item = (&'a str, &'a Listed)>) -> (BTreeMap<Arc<str>, Found>, Vec<String>) {
    let (mut all, mut left_out): (BTreeMap<Arc<str>, Found>, Vec<String>) = (BTreeMap::new(), Vec::new());
    for (group, listed) in groups {
        left_out.extend(listed.left_out.iter().cloned());
        for found in &listed.found {
            match all.get(&found.name) {
                None => drop(all.insert(found.name.clone(), found.clone())),
                Some(other) if other.url == found.url => {}
                Some(_) => left_out.push(format!(
                    "stores {group}: a second database is named {:?}, with another URL, and is left out; names have to be unique among all [[stores]]",
                    found.name
                )),
            }
        }
    }
    left_out.sort();
    left_out.dedup();
    (all, left_out)
}

/// All databases by name, and what is wrong with the groups: one could not be asked, or databases are left out.
pub async fn all(groups: &[Group]) -> (Vec<Found>, Vec<String>) {
    let (mut listed, mut troubles): (Vec<(&str, Listed)>, Vec<String>) = (Vec::new(), Vec::new());
    for group in groups {
        match of_group(group).await {
            Ok(of_group) => listed.push((group.name(), of_group)),
            Err(why) => troubles.push(format!("stores {}: the databases could not be asked for: {why}", group.name())),
        }
    }
    let (all, left_out) = merged(listed.iter().map(|(group, listed)| (*group, listed)));
    troubles.extend(left_out);
    (all.into_values().collect(), troubles)
}

/// The database with this name.
pub async fn named(groups: &[Group], wanted: &str) -> Result<Found, Failure> {
    let mut troubles = Vec::new();
    // Those that are named cost nothing to look at.
    let (named, asked): (Vec<_>, Vec<_>) = groups.iter().partition(|group| matches!(group, Group::Named { .. }));
    for group in named.into_iter().chain(asked) {
        match of_group(group).await {
            Ok(listed) => {
                if let Some(found) = listed.found.into_iter().find(|found| *found.name == *wanted) {
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
    /// Exit with code 1 if a store is down or left out, if a query for stores fails, if a route has not run in its store yet, or if messages wait for longer than this, such as 5m
    #[arg(long, value_name = "AGE", value_parser = crate::dead::duration)]
    fail_on_age: Option<Duration>,
}

/// What is shown of a store.
struct Seen {
    found: Found,
    /// An error: it is down, and why.
    status: Result<StoreStatus, String>,
    /// Routes of the configuration that have not run in it: what waits for them is in no backlog.
    new_routes: Vec<String>,
}

/// One line for each store.
pub async fn stores(args: StoresArgs, json: bool) -> Result<(), Failure> {
    let config = config::load(&args.config.config)?;
    let Stores::Many(groups) = &config.stores else {
        return Err(Failure::new(exit::USAGE, "the configuration has one [store]; `postroom status` shows it"));
    };
    let (all, troubles) = all(groups).await;
    let seen: Vec<Seen> = stream::iter(all).map(|found| look(&config, found)).buffered(TOGETHER).collect().await;
    let oldest =
        |status: &StoreStatus| status.routes.iter().filter_map(|route| route.oldest_unsent_seconds).reduce(f64::max);
    let late = |seen: &Seen, age: Duration| match &seen.status {
        Err(_) => true,
        Ok(status) => !seen.new_routes.is_empty() || oldest(status).is_some_and(|seconds| seconds > age.as_secs_f64()),
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
                "routes_not_run": seen.new_routes,
            }),
            Err(why) => serde_json::json!({ "store": &*seen.found.name, "up": false, "problem": why }),
        };
        let stores: Vec<_> = seen.iter().map(shown).collect();
        show!("{}", serde_json::json!({ "stores": stores, "problems": troubles }));
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
            match &seen.status {
                Err(why) => show!("! {} is down: {why}", seen.found.name),
                Ok(_) if !seen.new_routes.is_empty() => show!(
                    "! {}: {} has not run there yet, so its backlog is not known; `postroom run` registers it",
                    seen.found.name,
                    seen.new_routes.join(", ")
                ),
                Ok(_) => {}
            }
        }
        troubles.iter().for_each(|trouble| show!("! {trouble}"));
    }
    if failing {
        let text = "a store is down, left out, could not be asked for, or has messages that wait for longer";
        return Err(Failure { answered: true, ..Failure::new(exit::FAILURE, text) });
    }
    Ok(())
}

async fn look(config: &Config, found: Found) -> Seen {
    let status = async {
        let (store, _) = store::open_frugal(&found.url, 0, 0).map_err(|failure| failure.text)?;
        match tokio::time::timeout(ANSWERS_WITHIN, store.status()).await {
            Ok(status) => status.map_err(|error| Failure::of(exit::FAILURE, &error).text),
            Err(_) => Err(format!("no answer within {} s", ANSWERS_WITHIN.as_secs())),
        }
    };
    let status = status.await;
    let routes = config.routes.iter().filter(|routed| routed.stores.takes(&found.name));
    let has_run = |name: &String| match &status {
        Ok(status) => status.routes.iter().any(|route| route.route == *name),
        Err(_) => true,
    };
    let new_routes = routes.map(|routed| &routed.route.name).filter(|name| !has_run(name)).cloned().collect();
    Seen { found, status, new_routes }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_two_databases_with_one_name_the_second_is_left_out_and_told() {
        let listed = |found: &[(&str, &str)]| Listed {
            found: found.iter().map(|(name, url)| Found { name: (*name).into(), url: (*url).to_owned() }).collect(),
            left_out: Vec::new(),
        };
        let (first, second) =
            (listed(&[("a", "sqlite:1"), ("b", "sqlite:2")]), listed(&[("b", "sqlite:3"), ("a", "sqlite:1")]));
        let (all, left_out) = merged([("one", &first), ("two", &second)]);
        assert_eq!(all.values().map(|found| found.url.as_str()).collect::<Vec<_>>(), ["sqlite:1", "sqlite:2"]);
        assert_eq!(left_out.len(), 1, "one that is the same is no other");
        assert!(left_out[0].starts_with("stores two: a second database is named \"b\""), "{left_out:?}");
    }
}
