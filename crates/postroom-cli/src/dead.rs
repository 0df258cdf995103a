//! `postroom dead`: look at dead letters, give them back to their relay, or discard them.

use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use postroom::{DeadDeed, DeadFilter, DeadLetter, Deed, MessageId, Side};

use crate::StoreArgs;
use crate::config;
use crate::exit::{self, Failure};
use crate::say::{say, show, to_stdout_as_it_is};

#[derive(Debug, Args)]
pub struct DeadArgs {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// List dead letters, oldest first
    List(ListArgs),
    /// Show one message with its headers; with --payload its bytes too
    Show(ShowArgs),
    /// Give dead letters back to their relay or consumer, with their ids and all their attempts before them
    Retry(DeedArgs),
    /// Delete dead letters for good; the audit row keeps their ids
    Discard(DeedArgs),
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum SideArg {
    /// Messages that a relay could not send
    Out,
    /// Messages that a consumer could not handle
    In,
}

impl From<SideArg> for Side {
    fn from(side: SideArg) -> Self {
        match side {
            SideArg::Out => Self::Out,
            SideArg::In => Self::In,
        }
    }
}

#[derive(Debug, Args)]
struct FilterArgs {
    /// Whose dead letters
    #[arg(long, value_enum, default_value = "out")]
    side: SideArg,
    /// Of this route; with --side in, of this consumer
    #[arg(long)]
    route: Option<String>,
    /// Of this message
    #[arg(long)]
    id: Option<MessageId>,
    /// Of this topic
    #[arg(long)]
    topic: Option<String>,
    /// Of this type
    #[arg(long = "type", value_name = "TYPE")]
    kind: Option<String>,
    /// Of this tenant
    #[arg(long)]
    tenant: Option<String>,
    /// Of this aggregate
    #[arg(long)]
    aggregate: Option<String>,
    /// Whose error contains this text
    #[arg(long, value_name = "TEXT")]
    error: Option<String>,
    /// That died at most this long ago, such as 90m
    #[arg(long, value_parser = duration)]
    newer_than: Option<Duration>,
    /// That died at least this long ago
    #[arg(long, value_parser = duration)]
    older_than: Option<Duration>,
    /// At most so many
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(i64).range(1..=100_000), value_name = "N")]
    limit: i64,
}

#[derive(Debug, Args)]
struct ListArgs {
    #[command(flatten)]
    store: StoreArgs,
    #[command(flatten)]
    filter: FilterArgs,
}

#[derive(Debug, Args)]
struct ShowArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// Whose dead letter
    #[arg(long, value_enum, default_value = "out")]
    side: SideArg,
    /// Message id
    id: MessageId,
    /// Show the payload: it may hold personal data
    #[arg(long)]
    payload: bool,
}

#[derive(Debug, Args)]
struct DeedArgs {
    #[command(flatten)]
    store: StoreArgs,
    #[command(flatten)]
    filter: FilterArgs,
    /// All dead letters: needed when no condition is given
    #[arg(long)]
    all: bool,
    /// Show which ones it would be, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Why; it is kept in the audit row
    #[arg(long, required_unless_present = "dry_run", value_name = "TEXT")]
    reason: Option<String>,
}

impl FilterArgs {
    fn filter(&self) -> DeadFilter {
        DeadFilter {
            route: self.route.clone(),
            id: self.id,
            topic: self.topic.clone(),
            kind: self.kind.clone(),
            tenant_id: self.tenant.clone(),
            aggregate_id: self.aggregate.clone(),
            error: self.error.clone(),
            newer_than: self.newer_than,
            older_than: self.older_than,
        }
    }
}

pub async fn dead(args: DeadArgs, json: bool) -> Result<(), Failure> {
    match args.verb {
        Verb::List(args) => {
            let (side, filter) = (args.filter.side.into(), args.filter.filter());
            let letters = args.store.open()?.dead_letters(side, &filter, args.filter.limit).await?;
            print(&letters, json, "no dead letters");
        }
        Verb::Show(args) => show(args, json).await?,
        Verb::Retry(args) => act(args, json, DeadDeed::Retry).await?,
        Verb::Discard(args) => act(args, json, DeadDeed::Discard).await?,
    }
    Ok(())
}

async fn act(args: DeedArgs, json: bool, what: DeadDeed) -> Result<(), Failure> {
    let filter = args.filter.filter();
    if filter.is_everything() && !args.all {
        let text = format!("without a filter, `dead {what}` requires --all; --dry-run shows which ones it would be");
        return Err(Failure::new(exit::USAGE, text));
    }
    let store = args.store.open()?;
    let (side, limit) = (args.filter.side.into(), args.filter.limit);
    if args.dry_run {
        let letters = store.dead_letters(side, &filter, limit).await?;
        print(&letters, json, "No matching dead letters; nothing would change.");
        return Ok(());
    }
    let reason = args.reason.unwrap_or_default();
    if reason.trim().is_empty() {
        return Err(Failure::new(exit::USAGE, "--reason is empty; the audit row keeps it"));
    }
    let deed = Deed { actor: actor(), reason };
    let letters = store.act_on_dead(what, side, &filter, limit, &deed).await?;
    print(&letters, json, "No matching dead letters; nothing changed.");
    if !json && !letters.is_empty() {
        let done = match (what, side) {
            (DeadDeed::Retry, Side::Out) => "given back to their relay",
            (DeadDeed::Retry, Side::In) => "given back to their consumer",
            (DeadDeed::Discard, _) => "discarded",
        };
        show!("{} {done}", letters.len());
    }
    let left = if what == DeadDeed::Discard && side == Side::Out {
        store.dead_letters(side, &filter, limit).await?.len()
    } else {
        0
    };
    if left > 0 {
        say!(
            "postroom: {left} more fit; those that died this moment can be discarded when their relay has passed them"
        );
    }
    Ok(())
}

async fn show(args: ShowArgs, json: bool) -> Result<(), Failure> {
    let store = args.store.open()?;
    let filter = DeadFilter { id: Some(args.id), ..DeadFilter::default() };
    let side = args.side.into();
    let letters = store.dead_letters(side, &filter, 100).await?;
    if letters.is_empty() {
        return Err(Failure::new(exit::FAILURE, format!("there is no dead letter with the id {}", args.id)));
    }
    for letter in letters {
        let payload = if args.payload { store.dead_payload(side, &letter.route, letter.seq).await? } else { None };
        let payload = payload.map(|bytes| match String::from_utf8(bytes) {
            Ok(text) => text,
            Err(error) => error.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect(),
        });
        if json {
            let mut object = serde_json::to_value(&letter).unwrap_or_default();
            if let Some(payload) = payload {
                object["payload"] = payload.into();
            }
            show!("{object}");
            continue;
        }
        let of = if side == Side::Out { "route" } else { "consumer" };
        show!("{} {} of {of} {}, key {}", letter.id, letter.kind, letter.route, shown(&letter.key));
        show!(
            "  {} after {} attempts, {:.0} s ago: {}",
            letter.cause,
            letter.attempts,
            letter.died_seconds_ago,
            letter.error
        );
        for failed in &letter.history {
            show!("  {}  attempt {}: {}", failed.at, failed.attempt, failed.error);
        }
        for (name, value) in &letter.headers {
            show!("  {name}: {value}");
        }
        show!("  payload: {} bytes", letter.payload_bytes);
        if let Some(payload) = payload {
            to_stdout_as_it_is(&payload);
        }
    }
    Ok(())
}

fn print(letters: &[DeadLetter], json: bool, none: &str) {
    if json {
        show!("{}", serde_json::json!({ "dead_letters": letters }));
        return;
    }
    if letters.is_empty() {
        show!("{none}");
    }
    for letter in letters {
        show!(
            "{}  {}  {}  key {}  {} after {} attempts  {}",
            letter.id,
            letter.route,
            letter.kind,
            shown(&letter.key),
            letter.cause,
            letter.attempts,
            letter.error
        );
    }
}

fn shown(key: &Option<String>) -> &str {
    key.as_deref().unwrap_or("-")
}

pub fn duration(text: &str) -> Result<Duration, String> {
    config::parse_duration(text).ok_or_else(|| "it wants a duration such as 30s, 90m or 24h".to_owned())
}

/// The person at the keyboard, as far as the system knows.
pub fn actor() -> String {
    std::env::var("USER").or_else(|_| std::env::var("LOGNAME")).unwrap_or_else(|_| "unknown".to_owned())
}
