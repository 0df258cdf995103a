//! `postroom dead groups` and `note`, and dead letters that are acted on as an operation.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Args;
use postroom::{
    DeadCursor, DeadDeed, DeadFilter, DeadGroup, Grouping, NewOperation, OperationFilter, OperationKind, ReplayPlace,
    Side, Store, lasting,
};

use crate::StoreArgs;
use crate::actor::DeedArgs;
use crate::dead::SideArg;
use crate::exit::{self, Failure};
use crate::operations::{self, PaceArgs};
use crate::progress::Progress;
use crate::say::{say, show};
use crate::table::{Table, number};

/// Dead letters that one look reads, and that are grouped at most.
const PAGE: i64 = 5_000;
const LETTERS_MAX: u64 = 200_000;

#[derive(Debug, Args)]
pub struct GroupsArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// Which side's dead letters
    #[arg(long, value_enum, default_value = "out")]
    side: SideArg,
    /// Only of this route; with --side in, only of this consumer
    #[arg(long)]
    route: Option<String>,
}

#[derive(Debug, Args)]
pub struct NoteArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// The group, as `dead groups` names it
    group: String,
    /// What to write
    note: String,
    #[command(flatten)]
    deed: DeedArgs,
}

pub async fn groups(args: GroupsArgs, json: bool) -> Result<(), Failure> {
    let store = args.store.open().await?;
    let side = Side::from(args.side);
    if side == Side::Out {
        crate::dead::known_route(store.as_ref(), args.route.as_deref()).await?;
    }
    let (groups, complete) = grouped(store.as_ref(), side, args.route.as_deref()).await?;
    if json {
        show!("{}", serde_json::json!({ "groups": groups, "complete": complete }));
        return Ok(());
    }
    if groups.is_empty() {
        show!("no dead letters");
        return Ok(());
    }
    let of = if side == Side::Out { "ROUTE" } else { "CONSUMER" };
    let mut table = Table::new(&[
        "GROUP",
        ">DEAD",
        ">LAST HOUR",
        ">HOUR BEFORE",
        ">FIRST",
        ">LAST",
        of,
        "TYPE",
        "CAUSE",
        "ERROR",
        "NOTE",
    ]);
    for group in &groups {
        let count = |count: u64| number(i64::try_from(count).unwrap_or(i64::MAX), false);
        table.row([
            group.group.clone(),
            count(group.messages),
            count(group.last_hour),
            count(group.hour_before),
            format!("{} ago", lasting(group.first_seconds_ago)),
            format!("{} ago", lasting(group.last_seconds_ago)),
            group.route.clone(),
            group.kind.clone(),
            group.cause.to_string(),
            group.error.clone(),
            group.notes.first().map_or_else(|| "-".to_owned(), |note| format!("{} ({})", note.note, note.actor)),
        ]);
    }
    table.lines().iter().for_each(|line| show!("{line}"));
    if !complete {
        say!("postroom: there are more dead letters than were looked at; --route limits them");
    }
    Ok(())
}

/// The groups, and whether all dead letters are in them.
async fn grouped(store: &dyn Store, side: Side, route: Option<&str>) -> Result<(Vec<DeadGroup>, bool), Failure> {
    let mut grouping = Grouping::new(side);
    let mut progress = Progress::new("dead letters");
    // Behind everything that comes before the first of this route.
    let mut after = route.map(DeadCursor::before);
    let mut looked = 0;
    let complete = loop {
        let page = store.dead_headlines(side, after.as_ref(), PAGE).await?;
        let ours = |letter: &&postroom::Headline| route.is_none_or(|route| letter.route == route);
        page.iter().filter(ours).for_each(|letter| grouping.add(letter));
        looked += page.len() as u64;
        progress.at(looked);
        let last = page.last().map(postroom::Headline::cursor);
        let beyond = last.as_ref().is_some_and(|last| route.is_some_and(|route| last.route != route));
        if (page.len() as i64) < PAGE || beyond {
            break true;
        }
        if looked >= LETTERS_MAX {
            break false;
        }
        after = last;
    };
    progress.end();
    let (mut groups, others) = grouping.end();
    let names: Vec<String> = groups.iter().map(|group| group.group.clone()).collect();
    for (name, note) in store.dead_notes(&names).await? {
        if let Some(group) = groups.iter_mut().find(|group| group.group == name) {
            group.notes.push(note);
        }
    }
    Ok((groups, complete && others == 0))
}

pub async fn note(args: NoteArgs, json: bool) -> Result<(), Failure> {
    let text = args.note.trim();
    if text.is_empty() || text.len() > 4000 {
        return Err(Failure::new(exit::USAGE, "a note has 1 to 4000 bytes"));
    }
    let deed = args.deed.deed()?;
    args.store.open().await?.note_dead(&args.group, text, &deed).await?;
    if json {
        show!("{}", serde_json::json!({ "group": args.group, "note": text }));
    } else {
        show!("noted");
    }
    Ok(())
}

/// So long before now, in milliseconds since 1970.
fn ago(now: SystemTime, age: Option<Duration>) -> Result<Option<i64>, Failure> {
    let Some(age) = age else { return Ok(None) };
    let since_1970 = now.checked_sub(age).and_then(|then| then.duration_since(UNIX_EPOCH).ok());
    let ms = since_1970.and_then(|since| i64::try_from(since.as_millis()).ok());
    ms.map(Some).ok_or_else(|| Failure::new(exit::USAGE, "the age reaches back to before 1970"))
}

/// Retries or discards dead letters step by step.
#[allow(clippy::too_many_arguments, reason = "they are the arguments of the command, each with a name of its own")]
pub async fn act(
    what: DeadDeed,
    side: Side,
    filter: DeadFilter,
    group: Option<String>,
    pace: &PaceArgs,
    all: bool,
    dry_run: bool,
    deed: &DeedArgs,
    store: &StoreArgs,
    json: bool,
) -> Result<(), Failure> {
    if filter.is_everything() && group.is_none() && !all {
        let text = format!("without a filter, `dead {what}` requires --all; --dry-run shows which ones match");
        return Err(Failure::new(exit::USAGE, text));
    }
    let store = store.open().await?;
    // Every condition is named: one that is left out would make the operation about more than was asked for.
    let DeadFilter { route, id, topic, kind, tenant_id, aggregate_id, error, newer_than, older_than } = filter;
    let (since_ms, until_ms) = match (newer_than, older_than) {
        (None, None) => (None, None),
        // By the clock that says when they died.
        _ => {
            let now = store.vitals().await?.now;
            (ago(now, newer_than)?, ago(now, older_than)?)
        }
    };
    let filter = OperationFilter {
        ids: id.into_iter().collect(),
        since_ms,
        until_ms,
        topic,
        kind,
        key: None,
        tenant_id,
        aggregate_id,
        error,
        group,
    };
    let route = match (route, &filter.group) {
        (Some(route), _) => {
            // A mistyped route also finds nothing.
            let of_route = DeadFilter { route: Some(route.clone()), ..DeadFilter::default() };
            if side == Side::Out && store.dead_letters(side, &of_route, 1).await?.is_empty() {
                crate::dead::known_route(store.as_ref(), Some(&route)).await?;
            }
            route
        }
        (None, Some(name)) => {
            let (groups, _) = grouped(store.as_ref(), side, None).await?;
            let found = groups.into_iter().find(|group| group.group == *name).map(|group| group.route);
            found.ok_or_else(|| {
                Failure::new(
                    exit::FAILURE,
                    format!("there is no group {name:?} of dead letters; `postroom dead groups` names them"),
                )
            })?
        }
        (None, None) => {
            let of = if side == Side::Out { "route" } else { "consumer" };
            let text = format!("an operation is about one {of}: name it with --route, or a group with --group");
            return Err(Failure::new(exit::USAGE, text));
        }
    };
    let operation = NewOperation {
        kind: match what {
            DeadDeed::Retry => OperationKind::Retry,
            DeadDeed::Discard => OperationKind::Discard,
        },
        side,
        route,
        filter,
        planned: None,
        canary: pace.canary,
        goes_on: pace.go_on,
        rate: pace.rate,
        place: ReplayPlace::Before,
        new_ids: false,
    };
    operations::carry_out(store.as_ref(), operation, None, (dry_run, pace.wait), deed, json).await
}
