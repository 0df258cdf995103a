//! `postroom routes`: what each route is, and what an operator may change of it.

use clap::{Args, Subcommand};
use postroom::{Deed, OnDead, Order, RouteChange, ShownRoute, TopicFilter};

use crate::StoreArgs;
use crate::dead::actor;
use crate::exit::{self, Failure};
use crate::say::show;

#[derive(Debug, Args)]
pub struct RoutesArgs {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// List the routes that have run: topics, order, on_dead, and who changed them last
    List(StoreArgs),
    /// Change what a relay that starts cannot: drop topics, or make order or on_dead less strict. Change the configuration of
    /// the relays first
    Set(SetArgs),
}

#[derive(Debug, Args)]
struct SetArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// The route
    route: String,
    /// Topics that it takes from now on, such as orders,billing.*; messages of others are passed by
    #[arg(long, value_delimiter = ',', value_name = "TOPICS")]
    topics: Option<Vec<String>>,
    /// Order within a key: key, pipelined or none
    #[arg(long, value_name = "ORDER")]
    order: Option<String>,
    /// What becomes of a key whose message is dead: skip or block
    #[arg(long, value_name = "WHAT")]
    on_dead: Option<String>,
    /// Why; it is kept in the audit row
    #[arg(long, value_name = "TEXT")]
    reason: String,
}

pub async fn routes(args: RoutesArgs, json: bool) -> Result<(), Failure> {
    match args.verb {
        Verb::List(args) => {
            let routes = args.open()?.routes().await?;
            print(&routes, json);
            Ok(())
        }
        Verb::Set(args) => set(args, json).await,
    }
}

async fn set(args: SetArgs, json: bool) -> Result<(), Failure> {
    let change = change(&args).map_err(|text| Failure::new(exit::USAGE, text))?;
    let (route, deed) = (args.route.as_str(), Deed { actor: actor(), reason: args.reason });
    let now = args.store.open()?.set_route(route, &change, &deed).await?;
    let Some(now) = now else {
        let text = format!("there is no route {route:?}; `postroom routes list` shows them. Nothing was changed");
        return Err(Failure::new(exit::FAILURE, text));
    };
    if json {
        let (topics, order, on_dead) = (now.topics.patterns(), now.order, now.on_dead);
        show!("{}", serde_json::json!({ "route": route, "topics": topics, "order": order, "on_dead": on_dead }));
    } else {
        let order = now.order.map_or("-", Order::as_str);
        let on_dead = now.on_dead.map_or("-", OnDead::as_str);
        show!("route {route} takes {}; order {order}, on_dead {on_dead}", now.topics);
    }
    Ok(())
}

fn change(args: &SetArgs) -> Result<RouteChange, String> {
    if args.reason.trim().is_empty() {
        return Err("--reason is empty; the audit row keeps it".to_owned());
    }
    let topics = args.topics.as_ref().map(|topics| TopicFilter::new(topics.iter().map(String::as_str)));
    let order = args
        .order
        .as_deref()
        .map(|word| Order::of(word).ok_or_else(|| format!("--order is {word:?}; use key, pipelined or none")));
    let on_dead = args
        .on_dead
        .as_deref()
        .map(|word| OnDead::of(word).ok_or_else(|| format!("--on-dead is {word:?}; use skip or block")));
    let change = RouteChange {
        topics: topics.transpose().map_err(|error| format!("--topics: failed to {error}"))?,
        order: order.transpose()?,
        on_dead: on_dead.transpose()?,
    };
    if change == RouteChange::default() {
        return Err("say what to change: --topics, --order or --on-dead".to_owned());
    }
    if change.order == Some(Order::None) && change.on_dead == Some(OnDead::Block) {
        return Err("--on-dead block needs an order: without one no key is blocked".to_owned());
    }
    Ok(change)
}

fn print(routes: &[ShownRoute], json: bool) {
    if json {
        show!("{}", serde_json::json!({ "routes": routes }));
        return;
    }
    if routes.is_empty() {
        show!("no route has run yet");
    }
    for route in routes {
        show!(
            "{}  topics {}  order {}  on_dead {}  revision {}, set {:.0} s ago by {}",
            route.route,
            route.topics.join(", "),
            route.order.map_or("-", Order::as_str),
            route.on_dead.map_or("-", OnDead::as_str),
            route.revision,
            route.set_seconds_ago,
            route.set_by
        );
    }
}
