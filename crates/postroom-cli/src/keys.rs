//! `postroom keys`: keys that wait, and what an operator can do about them.

use clap::{Args, Subcommand};
use postroom::{KEY_BYTES_MAX, KeyDeed, Side, WaitingKey};

use crate::StoreArgs;
use crate::actor::DeedArgs;
use crate::dead::{SideArg, known_route};
use crate::exit::{self, Failure};
use crate::say::{say, show};
use crate::table::{Table, duration, number};

#[derive(Debug, Args)]
pub struct KeysArgs {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// List keys that wait, longest wait first: for a retry, for a decision about a dead message, or because they are parked
    List(ListArgs),
    /// Stop sending messages of a key; they queue up in order
    Park(ActArgs),
    /// Resume sending messages of a parked key
    Unpark(ActArgs),
    /// Resume a key without the dead message that blocks it
    Skip(ActArgs),
}

#[derive(Debug, Args)]
struct ListArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// Which side: keys that a relay cannot send now (out), or keys that a consumer cannot handle now (in)
    #[arg(long, value_enum, default_value = "out")]
    side: SideArg,
    /// Only of this route; with --side in, only of this consumer
    #[arg(long)]
    route: Option<String>,
    /// Maximum number of keys
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(i64).range(1..=100_000), value_name = "N")]
    limit: i64,
}

#[derive(Debug, Args)]
struct ActArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// The key
    key: String,
    /// The route
    #[arg(long)]
    route: String,
    #[command(flatten)]
    deed: DeedArgs,
}

pub async fn keys(args: KeysArgs, json: bool) -> Result<(), Failure> {
    match args.verb {
        Verb::List(args) => {
            let side = args.side.into();
            let store = args.store.open().await?;
            let keys = store.waiting_keys(side, args.route.as_deref(), args.limit).await?;
            if keys.is_empty() && side == Side::Out {
                known_route(store.as_ref(), args.route.as_deref()).await?;
            }
            print(&keys, side, json);
            if keys.len() as i64 >= args.limit {
                say!("postroom: these are the first {}; raise --limit to see more", number(args.limit, false));
            }
            Ok(())
        }
        Verb::Park(args) => act(args, json, KeyDeed::Park).await,
        Verb::Unpark(args) => act(args, json, KeyDeed::Unpark).await,
        Verb::Skip(args) => act(args, json, KeyDeed::Skip).await,
    }
}

async fn act(args: ActArgs, json: bool, what: KeyDeed) -> Result<(), Failure> {
    let deed = args.deed.deed()?;
    if args.key.is_empty() || args.key.len() > KEY_BYTES_MAX {
        let text = format!("a key has 1 to {KEY_BYTES_MAX} bytes; this one has {}", args.key.len());
        return Err(Failure::new(exit::USAGE, text));
    }
    let (route, key) = (args.route.as_str(), args.key.as_str());
    let changed = args.store.open().await?.act_on_key(route, key, what, &deed).await?;
    let (done, nothing) = match what {
        KeyDeed::Park => ("is parked: its messages that no relay has claimed yet wait", "was already parked"),
        KeyDeed::Unpark => ("is resumed", "is not parked by an operator"),
        KeyDeed::Skip => {
            ("is resumed; the dead message stays among the dead letters", "is not blocked by a dead message")
        }
    };
    if json {
        show!("{}", serde_json::json!({ "route": route, "key": key, "changed": changed }));
    } else {
        show!("key {key} of route {route} {}", if changed { done } else { nothing });
    }
    Ok(())
}

fn print(keys: &[WaitingKey], side: Side, json: bool) {
    if json {
        show!("{}", serde_json::json!({ "keys": keys }));
        return;
    }
    if keys.is_empty() {
        show!("no key waits");
        return;
    }
    let of = if side == Side::Out { "ROUTE" } else { "CONSUMER" };
    let mut table =
        Table::new(&[of, "KEY", "STATE", ">SINCE", ">MESSAGES", ">ATTEMPTS", "NEXT", "FIRST MESSAGE", "REASON"]);
    for key in keys {
        table.row([
            key.route.clone(),
            key.key.clone(),
            key.waits_for.to_string(),
            duration(key.since_seconds),
            number(key.messages, false),
            number(key.attempts, false),
            key.retry_in_seconds.map_or_else(|| "an operator".to_owned(), |s| format!("retry in {}", duration(s))),
            key.head.clone().unwrap_or_else(|| "-".to_owned()),
            key.reason.clone().unwrap_or_default(),
        ]);
    }
    table.lines().iter().for_each(|line| show!("{line}"));
}
