//! `postroom routes`: the settings of each route, and what an operator can change.

use clap::{Args, Subcommand};
use postroom::{Forgotten, OnDead, Order, RouteChange, ShownRoute, TopicFilter};

use crate::StoreArgs;
use crate::actor::DeedArgs;
use crate::exit::{self, Failure};
use crate::say::show;
use crate::table::{Table, counted, duration};

#[derive(Debug, Args)]
pub struct RoutesArgs {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// List the routes that have run: topics, order, on_dead, and who changed them last
    List(StoreArgs),
    /// Change what a starting relay cannot change: remove topics, or make order or on_dead less strict. Change the configuration of
    /// the relays first
    Set(SetArgs),
    /// Remove a route that is no longer used: its position then no longer prevents the clean-up of the outbox
    Forget(ForgetArgs),
}

#[derive(Debug, Args)]
struct SetArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// The route
    route: String,
    /// Topics that it takes from now on, such as orders,billing.*; messages of other topics are skipped
    #[arg(long, value_delimiter = ',', value_name = "TOPICS")]
    topics: Option<Vec<String>>,
    /// Order within a key: key, pipelined or none
    #[arg(long, value_name = "ORDER")]
    order: Option<String>,
    /// What happens to a key after a dead letter: skip or block
    #[arg(long, value_name = "WHAT")]
    on_dead: Option<String>,
    #[command(flatten)]
    deed: DeedArgs,
}

#[derive(Debug, Args)]
struct ForgetArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// The route
    route: String,
    /// Forget the route even if it has unsent, waiting or dead messages: they will not be sent on this route, and its dead letters are
    /// deleted. The audit row keeps the ids of the deleted ones
    #[arg(long)]
    discard: bool,
    #[command(flatten)]
    deed: DeedArgs,
}

pub async fn routes(args: RoutesArgs, json: bool) -> Result<(), Failure> {
    match args.verb {
        Verb::List(args) => {
            let routes = args.open().await?.routes().await?;
            print(&routes, json);
            Ok(())
        }
        Verb::Set(args) => set(args, json).await,
        Verb::Forget(args) => forget(args, json).await,
    }
}

async fn set(args: SetArgs, json: bool) -> Result<(), Failure> {
    let change = change(&args).map_err(|text| Failure::new(exit::USAGE, text))?;
    let (route, deed) = (args.route.as_str(), args.deed.deed()?);
    let now = args.store.open().await?.set_route(route, &change, &deed).await?;
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

async fn forget(args: ForgetArgs, json: bool) -> Result<(), Failure> {
    let (route, deed) = (args.route.as_str(), args.deed.deed()?);
    let Some(forgotten) = args.store.open().await?.forget_route(route, args.discard, &deed).await? else {
        let text = format!("there is no route {route:?}; `postroom routes list` shows them. Nothing was changed");
        return Err(Failure::new(exit::FAILURE, text));
    };
    let Forgotten { unread, unread_is_bound, parked, dead, relays, done } = forgotten;
    let had = format!(
        "{}, {} and {}",
        counted(unread, unread_is_bound, "unsent message"),
        counted(parked, false, "waiting message"),
        counted(dead, false, "dead message")
    );
    if relays > 0 {
        let text = format!(
            "{} within the lease, so route {route:?} may still be running (`postroom status` shows when each was last seen). Stop the relays \
             and take the route out of their configuration; one that was killed counts until its lease expires. Nothing was changed",
            if relays == 1 { "a relay was seen".to_owned() } else { format!("{relays} relays were seen") }
        );
        return Err(Failure::new(exit::FAILURE, text));
    }
    if !done {
        let text = format!(
            "route {route:?} has {had}. Let a relay send them, or use --discard to forget them with the route. Nothing was changed"
        );
        return Err(Failure::new(exit::FAILURE, text));
    }
    if json {
        show!("{}", serde_json::json!({ "route": route, "forgotten": forgotten }));
    } else {
        show!("route {route} is forgotten; it had {had}");
    }
    Ok(())
}

fn change(args: &SetArgs) -> Result<RouteChange, String> {
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
        return Err("--on-dead block requires an order: without an order no key is blocked".to_owned());
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
        return;
    }
    let mut table = Table::new(&["ROUTE", "TOPICS", "ORDER", "ON DEAD", ">REVISION", ">SET", "BY"]);
    for route in routes {
        table.row([
            route.route.clone(),
            route.topics.join(", "),
            route.order.map_or("-", Order::as_str).to_owned(),
            route.on_dead.map_or("-", OnDead::as_str).to_owned(),
            route.revision.to_string(),
            format!("{} ago", duration(route.set_seconds_ago)),
            route.set_by.clone(),
        ]);
    }
    table.lines().iter().for_each(|line| show!("{line}"));
}
