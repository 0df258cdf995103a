//! `postroom keys`: keys that wait, and what an operator may do about them.

use clap::{Args, Subcommand};
use postroom::{Deed, KEY_BYTES_MAX, KeyDeed, WaitingKey};

use crate::StoreArgs;
use crate::dead::actor;
use crate::exit::{self, Failure};
use crate::say::show;

#[derive(Debug, Args)]
pub struct KeysArgs {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// List keys that wait, longest first: for a retry, for an operator's decision about a dead message, or parked
    List(ListArgs),
    /// Send nothing more of a key; its messages queue up in order
    Park(DeedArgs),
    /// Let a parked key go on
    Unpark(DeedArgs),
    /// Let a key go on without the dead message that blocks it
    Skip(DeedArgs),
}

#[derive(Debug, Args)]
struct ListArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// Of this route
    #[arg(long)]
    route: Option<String>,
    /// At most so many
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(i64).range(1..=100_000), value_name = "N")]
    limit: i64,
}

#[derive(Debug, Args)]
struct DeedArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// The key
    key: String,
    /// On this route
    #[arg(long)]
    route: String,
    /// Why; it is kept in the audit row
    #[arg(long, value_name = "TEXT")]
    reason: String,
}

pub async fn keys(args: KeysArgs, json: bool) -> Result<(), Failure> {
    match args.verb {
        Verb::List(args) => {
            let (route, limit) = (args.route.as_deref(), args.limit);
            let keys = args.store.open()?.waiting_keys(route, limit).await?;
            print(&keys, json);
            Ok(())
        }
        Verb::Park(args) => act(args, json, KeyDeed::Park).await,
        Verb::Unpark(args) => act(args, json, KeyDeed::Unpark).await,
        Verb::Skip(args) => act(args, json, KeyDeed::Skip).await,
    }
}

async fn act(args: DeedArgs, json: bool, what: KeyDeed) -> Result<(), Failure> {
    if args.reason.trim().is_empty() {
        return Err(Failure::new(exit::USAGE, "--reason is empty; the audit row keeps it"));
    }
    if args.key.is_empty() || args.key.len() > KEY_BYTES_MAX {
        let text = format!("a key has 1 to {KEY_BYTES_MAX} bytes; this one has {}", args.key.len());
        return Err(Failure::new(exit::USAGE, text));
    }
    let (route, key) = (args.route.as_str(), args.key.as_str());
    let deed = Deed { actor: actor(), reason: args.reason };
    let changed = args.store.open()?.act_on_key(route, key, what, &deed).await?;
    let (done, nothing) = match what {
        KeyDeed::Park => ("parked: what a relay has not claimed yet waits", "is parked already"),
        KeyDeed::Unpark => ("goes on", "is not parked by an operator"),
        KeyDeed::Skip => ("goes on; the dead message stays among the dead letters", "is not blocked by a dead message"),
    };
    if json {
        show!("{}", serde_json::json!({ "route": route, "key": key, "changed": changed }));
    } else {
        show!("key {key} of route {route} {}", if changed { done } else { nothing });
    }
    Ok(())
}

fn print(keys: &[WaitingKey], json: bool) {
    if json {
        show!("{}", serde_json::json!({ "keys": keys }));
        return;
    }
    if keys.is_empty() {
        show!("no key waits");
    }
    for key in keys {
        let next = key.retry_in_seconds.map_or_else(|| "an operator".to_owned(), |s| format!("retry in {s:.1} s"));
        show!(
            "{}  key {}  {} for {:.0} s  {} messages  head {}  attempts {}  next: {next}  {}",
            key.route,
            key.key,
            key.waits_for,
            key.since_seconds,
            key.messages,
            key.head.as_deref().unwrap_or("-"),
            key.attempts,
            key.reason.as_deref().unwrap_or("")
        );
    }
}
