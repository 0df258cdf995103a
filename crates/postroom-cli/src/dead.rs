//! `postroom dead`: list dead letters, retry them, or discard them.

use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use postroom::{DeadDeed, DeadFilter, DeadLetter, MessageId, Side, Store};

use crate::StoreArgs;
use crate::actor::DeedArgs;
use crate::config;
use crate::dead_groups::{self, GroupsArgs, NoteArgs};
use crate::exit::{self, Failure};
use crate::operations::PaceArgs;
use crate::progress::Progress;
use crate::say::{say, show, to_stdout_as_it_is};
use crate::table::{Table, counted, duration as lasting, number};

#[derive(Debug, Args)]
pub struct DeadArgs {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// List dead letters, oldest first
    List(ListArgs),
    /// Show one message with its headers, and with --payload also its payload
    Show(ShowArgs),
    /// Return dead letters to their relay or consumer, with the same ids; their count of attempts starts again at zero
    Retry(ActArgs),
    /// Delete dead letters permanently; the audit row keeps their ids
    Discard(ActArgs),
    /// Group dead letters by what they died of, largest group first
    Groups(GroupsArgs),
    /// Write a note about a group, for those who look at it next
    Note(NoteArgs),
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum SideArg {
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
    /// Which side's dead letters
    #[arg(long, value_enum, default_value = "out")]
    side: SideArg,
    /// Only of this route; with --side in, only of this consumer
    #[arg(long)]
    route: Option<String>,
    /// Only the message with this id
    #[arg(long)]
    id: Option<MessageId>,
    /// Only messages of this topic
    #[arg(long)]
    topic: Option<String>,
    /// Only messages of this type
    #[arg(long = "type", value_name = "TYPE")]
    kind: Option<String>,
    /// Only messages of this tenant
    #[arg(long)]
    tenant: Option<String>,
    /// Only messages of the aggregate with this id
    #[arg(long)]
    aggregate: Option<String>,
    /// Only messages whose error contains this text
    #[arg(long, value_name = "TEXT")]
    error: Option<String>,
    /// Only messages that became dead letters at most this long ago, such as 90m
    #[arg(long, value_parser = duration)]
    newer_than: Option<Duration>,
    /// Only messages that became dead letters at least this long ago
    #[arg(long, value_parser = duration)]
    older_than: Option<Duration>,
    /// Maximum number of dead letters; 1000 unless given
    #[arg(long, value_parser = clap::value_parser!(i64).range(1..=100_000), value_name = "N")]
    limit: Option<i64>,
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
    /// Which side's dead letter
    #[arg(long, value_enum, default_value = "out")]
    side: SideArg,
    /// Message id
    id: MessageId,
    /// Also show the payload, which may contain personal data
    #[arg(long)]
    payload: bool,
}

#[derive(Debug, Args)]
struct ActArgs {
    #[command(flatten)]
    store: StoreArgs,
    #[command(flatten)]
    filter: FilterArgs,
    /// Only dead letters of this group, as `dead groups` names it; carried out as an operation
    #[arg(long, value_name = "GROUP")]
    group: Option<String>,
    #[command(flatten)]
    pace: PaceArgs,
    /// Select all dead letters; required if no filter is given
    #[arg(long)]
    all: bool,
    /// Show which dead letters match, and change nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    deed: DeedArgs,
}

impl FilterArgs {
    fn limit(&self) -> i64 {
        self.limit.unwrap_or(1000)
    }

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

/// If more dead letters than this were changed, the rest are counted and not listed.
const LISTED_MAX: usize = 20;

pub async fn dead(args: DeadArgs, json: bool) -> Result<(), Failure> {
    match args.verb {
        Verb::List(args) => {
            let (side, filter) = (args.filter.side.into(), args.filter.filter());
            let store = args.store.open().await?;
            let limit = args.filter.limit();
            let letters = store.dead_letters(side, &filter, limit).await?;
            if letters.is_empty() && side == Side::Out {
                known_route(store.as_ref(), filter.route.as_deref()).await?;
            }
            print(&letters, side, json, "no dead letters");
            tell_cut(letters.len(), limit);
        }
        Verb::Show(args) => show(args, json).await?,
        Verb::Retry(args) => act(args, json, DeadDeed::Retry).await?,
        Verb::Discard(args) => act(args, json, DeadDeed::Discard).await?,
        Verb::Groups(args) => dead_groups::groups(args, json).await?,
        Verb::Note(args) => dead_groups::note(args, json).await?,
    }
    Ok(())
}

/// A mistyped route also finds nothing; this makes it an error.
pub async fn known_route(store: &dyn Store, route: Option<&str>) -> Result<(), Failure> {
    let Some(route) = route else { return Ok(()) };
    let known: Vec<String> = store.routes().await?.into_iter().map(|known| known.route).collect();
    if known.iter().any(|known| known == route) {
        return Ok(());
    }
    let known = if known.is_empty() {
        "no route has run yet".to_owned()
    } else {
        format!("known routes: {}", known.join(", "))
    };
    Err(Failure::new(exit::FAILURE, format!("there is no route {route:?}; {known}")))
}

fn tell_cut(shown: usize, limit: i64) {
    if shown as i64 >= limit {
        say!("postroom: these are the first {}; there may be more, raise --limit to see them", number(limit, false));
    }
}

async fn act(args: ActArgs, json: bool, what: DeadDeed) -> Result<(), Failure> {
    let filter = args.filter.filter();
    let PaceArgs { canary, rate, wait, .. } = &args.pace;
    if args.group.is_some() || canary.is_some() || rate.is_some() || *wait {
        let ActArgs { store, filter, group, pace, all, dry_run, deed } = args;
        if filter.limit.is_some() {
            let text = "an operation is about everything that matches, so --limit does not go with --group, --canary, --rate or \
                        --wait; --canary begins with so many";
            return Err(Failure::new(exit::USAGE, text));
        }
        let side = Side::from(filter.side);
        return dead_groups::act(what, side, filter.filter(), group, &pace, all, dry_run, &deed, &store, json).await;
    }
    if filter.is_everything() && !args.all {
        let text = format!("without a filter, `dead {what}` requires --all; --dry-run shows which ones match");
        return Err(Failure::new(exit::USAGE, text));
    }
    let (side, limit) = (args.filter.side.into(), args.filter.limit());
    if args.dry_run {
        let letters = args.store.open().await?.dead_letters(side, &filter, limit).await?;
        print(&letters, side, json, "No matching dead letters; nothing would change.");
        if !json && !letters.is_empty() {
            show!(
                "{} would be {}; nothing was changed",
                counted(letters.len() as i64, false, "message"),
                done(what, side)
            );
        }
        tell_cut(letters.len(), limit);
        return Ok(());
    }
    let deed = args.deed.deed()?;
    let store = args.store.open().await?;
    let mut progress = Progress::new("dead letters");
    let letters = store.act_on_dead(what, side, &filter, limit, &deed, &mut |done| progress.at(done as u64)).await?;
    progress.end();
    if json || letters.len() <= LISTED_MAX {
        print(&letters, side, json, "No matching dead letters; nothing changed.");
    } else {
        print(&letters[..LISTED_MAX], side, json, "");
        show!("and {} more", number((letters.len() - LISTED_MAX) as i64, false));
    }
    if !json && !letters.is_empty() {
        show!("{} {}", counted(letters.len() as i64, false, "message"), done(what, side));
    }
    if letters.len() as i64 >= limit {
        say!(
            "postroom: that was the limit of {}; run the command again for the rest, or raise --limit",
            number(limit, false)
        );
    }
    let left = if what == DeadDeed::Discard && side == Side::Out {
        store.dead_letters(side, &filter, limit).await?.len()
    } else {
        0
    };
    if left > 0 {
        say!(
            "postroom: {} more match; those that died a moment ago can be discarded once their relay has saved its position",
            number(left as i64, false)
        );
    }
    Ok(())
}

fn done(what: DeadDeed, side: Side) -> &'static str {
    match (what, side) {
        (DeadDeed::Retry, Side::Out) => "given back to their relay",
        (DeadDeed::Retry, Side::In) => "given back to their consumer",
        (DeadDeed::Discard, _) => "discarded",
    }
}

async fn show(args: ShowArgs, json: bool) -> Result<(), Failure> {
    let store = args.store.open().await?;
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
            "  {} after {}, {} ago: {}",
            letter.cause,
            counted(letter.attempts, false, "attempt"),
            lasting(letter.died_seconds_ago),
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

fn print(letters: &[DeadLetter], side: Side, json: bool, none: &str) {
    if json {
        show!("{}", serde_json::json!({ "dead_letters": letters }));
        return;
    }
    if letters.is_empty() {
        show!("{none}");
        return;
    }
    let of = if side == Side::Out { "ROUTE" } else { "CONSUMER" };
    let mut table = Table::new(&["ID", of, "TYPE", "KEY", ">DIED", "CAUSE", ">ATTEMPTS", "ERROR"]);
    for letter in letters {
        table.row([
            letter.id.clone(),
            letter.route.clone(),
            letter.kind.clone(),
            shown(&letter.key).to_owned(),
            format!("{} ago", lasting(letter.died_seconds_ago)),
            letter.cause.to_string(),
            letter.attempts.to_string(),
            letter.error.clone(),
        ]);
    }
    table.lines().iter().for_each(|line| show!("{line}"));
}

fn shown(key: &Option<String>) -> &str {
    key.as_deref().unwrap_or("-")
}

pub fn duration(text: &str) -> Result<Duration, String> {
    config::parse_duration(text)
        .ok_or_else(|| "it must be a duration such as 30s, 90m or 24h, at most 3650d".to_owned())
}
