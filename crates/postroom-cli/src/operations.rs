//! `postroom replay` and `postroom operations`: what is done to many messages, step by step.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::{Args, Subcommand};
use postroom::{
    MessageId, NewOperation, OperationEffects, OperationFilter, OperationId, OperationKind, OperationState,
    ReplayPlace, ShownOperation, Side, Steer, Store, Survey, lasting,
};
use postroom_brokers::SinkOptions;

use crate::StoreArgs;
use crate::actor::DeedArgs;
use crate::archive::{self, PlaceArgs};
use crate::exit::{self, Failure};
use crate::progress::Progress;
use crate::reconcile;
use crate::say::{printable, say, show};
use crate::swallowed;
use crate::table::{Table, counted, number};

/// How an operation goes about it.
#[derive(Debug, Clone, Args)]
pub struct PaceArgs {
    /// Begin with so many messages, and wait for `postroom operations resume` when they have an outcome
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub canary: Option<u32>,
    /// After a canary of which no message failed, go on without waiting
    #[arg(long, requires = "canary")]
    pub go_on: bool,
    /// Maximum messages per second
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub rate: Option<u32>,
    /// Wait until the operation is over or waits for you, and show its report; exit code 1 if not everything is done
    #[arg(long)]
    pub wait: bool,
}

/// Which messages, of those in the outbox or in an archive.
#[derive(Debug, Args)]
pub struct WhichArgs {
    /// Only the message with this id; may be given several times
    #[arg(long, value_name = "ID")]
    id: Vec<MessageId>,
    /// Only messages of this topic
    #[arg(long)]
    topic: Option<String>,
    /// Only messages of this type
    #[arg(long = "type", value_name = "TYPE")]
    kind: Option<String>,
    /// Only messages with this key
    #[arg(long)]
    key: Option<String>,
    /// Only messages of this tenant
    #[arg(long)]
    tenant: Option<String>,
    /// Only messages of the aggregate with this id
    #[arg(long)]
    aggregate: Option<String>,
}

impl WhichArgs {
    /// With these times, in milliseconds since 1970.
    pub fn filter(self, since_ms: Option<i64>, until_ms: Option<i64>) -> OperationFilter {
        let Self { id, topic, kind, key, tenant, aggregate } = self;
        OperationFilter {
            ids: id,
            since_ms,
            until_ms,
            topic,
            kind,
            key,
            tenant_id: tenant,
            aggregate_id: aggregate,
            error: None,
            group: None,
        }
    }
}

#[derive(Debug, Args)]
pub struct ReplayArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// Route on which to send them again; not needed if there is only one
    #[arg(long)]
    route: Option<String>,
    /// Only messages that happened at this time or later: 2026-11-22T10:00:00Z, or an age such as 2h
    #[arg(long, value_name = "TIME", value_parser = moment)]
    since: Option<i64>,
    /// Only messages that happened before this time
    #[arg(long, value_name = "TIME", value_parser = moment)]
    until: Option<i64>,
    #[command(flatten)]
    which: WhichArgs,
    /// Every message that the route has sent and that is still in the outbox; required if no filter is given
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    pace: PaceArgs,
    /// Put them behind the messages of their keys that wait in the store, not in front of them; not on SQLite
    #[arg(long)]
    behind: bool,
    /// Give them new ids: inboxes that have the messages already then take them for new ones, and apply their effects again
    #[arg(long)]
    new_id: bool,
    /// The messages that a consumer lacks, as the comparison with this name found last (`postroom reconcile`); NAME/CONSUMER if it is
    /// about several
    #[arg(long, value_name = "NAME", conflicts_with_all = ["id", "new_id"])]
    missing: Option<String>,
    /// Also what was archived: it is put back into the outbox first, for a week
    #[arg(long)]
    from_archive: bool,
    #[command(flatten)]
    archive: PlaceArgs,
    /// Show what would be sent again, and change nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    deed: DeedArgs,
}

#[derive(Debug, Args)]
pub struct OperationsArgs {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// List operations, newest first
    List {
        #[command(flatten)]
        store: StoreArgs,
        /// Maximum number of operations
        #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(i64).range(1..=1000), value_name = "N")]
        limit: i64,
    },
    /// Show one operation: its progress, and at its end its report
    Show {
        #[command(flatten)]
        store: StoreArgs,
        /// Id of the operation
        id: OperationId,
        /// Wait until it is over or waits for you; exit code 1 if not everything is done
        #[arg(long)]
        wait: bool,
    },
    /// Give out nothing more until it is resumed
    Pause(SteerArgs),
    /// Go on, also after a canary
    Resume(SteerArgs),
    /// Give out nothing more, ever; what was given out already is sent or handled
    Cancel(SteerArgs),
}

#[derive(Debug, Args)]
struct SteerArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// Id of the operation
    id: OperationId,
    #[command(flatten)]
    deed: DeedArgs,
}

/// A time, or an age before now, in milliseconds since 1970.
pub fn moment(text: &str) -> Result<i64, String> {
    if let Some(age) = crate::config::parse_duration(text) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        return i64::try_from(now.saturating_sub(age).as_millis()).map_err(|error| error.to_string());
    }
    let time: jiff::Timestamp =
        text.parse().map_err(|_| "it must be a time such as 2026-11-22T10:00:00Z, or an age such as 2h".to_owned())?;
    Ok(time.as_millisecond())
}

/// A time for people.
pub fn at(ms: i64) -> String {
    jiff::Timestamp::from_millisecond(ms).map_or_else(|_| ms.to_string(), |time| time.to_string())
}

pub async fn replay(args: ReplayArgs, json: bool) -> Result<(), Failure> {
    let ReplayArgs { store, route, since, until, which, all, pace, .. } = args;
    let mut filter = which.filter(since, until);
    if filter.is_everything() && args.missing.is_none() && !all {
        let text = "without a filter, `replay` requires --all; --dry-run shows what would be sent again";
        return Err(Failure::new(exit::USAGE, text));
    }
    if let (Some(since), Some(until)) = (filter.since_ms, filter.until_ms)
        && since >= until
    {
        return Err(Failure::new(exit::USAGE, "--since is not before --until, so no message can match"));
    }
    let place = store.clone();
    let archive = args.from_archive.then(|| args.archive.open(&store)).transpose()?;
    let store = store.open().await?;
    let route = the_route(store.as_ref(), route).await?;
    if let Some(name) = &args.missing {
        filter.ids = reconcile::missing(store.as_ref(), name).await?;
    }
    match &archive {
        Some(archive) if args.dry_run => {
            let matching = archive::count(archive, store.as_ref(), &filter).await?;
            say!(
                "postroom: {} match in the archive, and would be put back",
                counted(matching as i64, false, "message")
            );
        }
        Some(archive) => {
            let back = archive::put_back(archive, store.as_ref(), &filter, archive::STAYS, &args.deed.deed()?).await?;
            say!("postroom: from the archive: {}", archive::told(&back));
            if !back.is_whole() {
                let text = "not everything that matches came back from the archive, so nothing is replayed; without --from-archive, what is in \
                            the outbox is";
                return Err(Failure::new(exit::FAILURE, text));
            }
        }
        None => {}
    }
    let operation = NewOperation {
        kind: OperationKind::Replay,
        side: Side::Out,
        route,
        filter,
        planned: None,
        canary: pace.canary,
        goes_on: pace.go_on,
        rate: pace.rate,
        place: if args.behind { ReplayPlace::Behind } else { ReplayPlace::Before },
        new_ids: args.new_id,
    };
    let sink = swallowed::sink_of(&place, &operation.route)?;
    carry_out(store.as_ref(), operation, sink.as_deref(), (args.dry_run, pace.wait), &args.deed, json).await
}

/// The route that was named, or the only one there is.
pub async fn the_route(store: &dyn Store, named: Option<String>) -> Result<String, Failure> {
    let routes: Vec<String> = store.routes().await?.into_iter().map(|route| route.route).collect();
    match (named, routes.as_slice()) {
        (Some(named), known) if known.contains(&named) => Ok(named),
        (Some(named), _) => {
            let known = if routes.is_empty() { "no route has run yet".to_owned() } else { routes.join(", ") };
            Err(Failure::new(exit::FAILURE, format!("there is no route {named:?}; known routes: {known}")))
        }
        (None, [only]) => Ok(only.clone()),
        (None, []) => {
            Err(Failure::new(exit::FAILURE, "no route has run yet, so nothing was sent that could be sent again"))
        }
        (None, _) => {
            Err(Failure::new(exit::USAGE, format!("name one of the routes with --route: {}", routes.join(", "))))
        }
    }
}

/// Shows what an operation would do, and begins it unless this is a dry run. `sink` is what it sends to, where that is known.
pub async fn carry_out(
    store: &dyn Store,
    mut operation: NewOperation,
    sink: Option<&dyn SinkOptions>,
    (dry_run, wait): (bool, bool),
    deed: &DeedArgs,
    json: bool,
) -> Result<(), Failure> {
    // Before anything is looked at: it may take a while.
    let deed = if dry_run { None } else { Some(deed.deed()?) };
    let mut survey = Survey::default();
    let mut progress = Progress::new("matching messages");
    while !survey.complete {
        store.survey_operation(&operation, &mut survey).await?;
        progress.at(survey.matching);
    }
    progress.end();
    let swallowed = match sink {
        Some(sink) => swallowed::of(store, &operation, sink).await?,
        None => None,
    };
    let as_json = || {
        let mut preview = serde_json::json!(survey);
        preview["broker"] = serde_json::json!(swallowed);
        preview
    };
    if !json {
        preview(&operation, &survey).iter().for_each(|line| show!("{line}"));
        swallowed.iter().for_each(|swallowed| show!("{}", printable(&swallowed.told())));
    }
    let Some(deed) = deed.filter(|_| survey.matching > survey.not_ready) else {
        if json {
            show!("{}", serde_json::json!({ "operation": null, "preview": as_json() }));
        } else {
            show!("nothing was changed");
        }
        return Ok(());
    };
    let id = OperationId::new();
    operation.planned = Some(survey.matching);
    store.begin_operation(id, &operation, &deed).await?;
    if !json {
        show!("operation {id} has begun; `postroom operations show {id}` shows how it stands");
    }
    if !relayed(store).await {
        say!(
            "postroom: no relay is running here, and a relay carries operations out; start `postroom run`, unless it works with [[stores]]: then it comes by itself within minutes"
        );
    }
    if !wait {
        if json {
            show!("{}", serde_json::json!({ "operation": id, "preview": as_json() }));
        }
        return Ok(());
    }
    report(store, id, true, json).await
}

/// Whether some relay is alive; if that cannot be found out, nobody is warned.
async fn relayed(store: &dyn Store) -> bool {
    let Ok(status) = store.status().await else { return true };
    let relays = status.routes.iter().any(|route| route.relays.iter().any(|relay| relay.alive));
    relays || status.inboxes.iter().any(|inbox| inbox.filler.as_ref().is_some_and(|filler| filler.alive))
}

fn preview(operation: &NewOperation, survey: &Survey) -> Vec<String> {
    let count = |count: u64| number(i64::try_from(count).unwrap_or(i64::MAX), false);
    let what = match (operation.kind, operation.side) {
        (OperationKind::Replay, _) => format!("would be sent on route {}", operation.route),
        (OperationKind::Retry, Side::Out) => format!("would be given back to route {}", operation.route),
        (OperationKind::Retry, Side::In) => format!("would be given back to consumer {}", operation.route),
        (OperationKind::Discard, _) => "would be deleted permanently".to_owned(),
    };
    let mut lines = vec![format!(
        "{} match, of which {} {what}",
        count(survey.matching),
        count(survey.matching - survey.not_ready)
    )];
    if survey.not_ready > 0 {
        lines.push(format!(
            "{} are left alone: they are not finished yet, or are dead letters",
            count(survey.not_ready)
        ));
    }
    if let (Some(oldest), Some(newest)) = (survey.oldest_ms, survey.newest_ms) {
        lines.push(format!("from {} to {}", at(oldest), at(newest)));
    }
    lines.extend(survey.by_type.iter().map(|(of, messages)| format!("  {} {of}", count(*messages))));
    lines.extend(survey.samples.iter().map(|id| format!("  for example {id}")));
    if !survey.blocked_keys.is_empty() {
        lines.push(format!(
            "keys that are parked or blocked, so that their messages would wait: {}",
            survey.blocked_keys.join(", ")
        ));
    }
    for (consumer, messages) in &survey.remembered_by {
        let (messages, asked) = (count(*messages), count(survey.asked));
        lines.push(if operation.new_ids {
            format!(
                "consumer {consumer} has {messages} of {asked} in its inbox; with new ids it would apply them again"
            )
        } else {
            format!("consumer {consumer} has {messages} of {asked} in its inbox and would take those for duplicates")
        });
    }
    lines
}

pub async fn operations(args: OperationsArgs, json: bool) -> Result<(), Failure> {
    match args.verb {
        Verb::List { store, limit } => {
            let found = store.open().await?.operations(None, limit).await?;
            if json {
                show!("{}", serde_json::json!({ "operations": found }));
                return Ok(());
            }
            if found.is_empty() {
                show!("no operations");
                return Ok(());
            }
            let mut table = Table::new(&[
                "ID",
                "KIND",
                "OF",
                "STATE",
                ">GIVEN OUT",
                ">DONE",
                ">FAILED",
                ">PENDING",
                ">BEGAN",
                "REASON",
            ]);
            for operation in &found {
                table.row([
                    operation.id.to_string(),
                    operation.kind.to_string(),
                    operation.route.clone(),
                    operation.state.to_string(),
                    number(operation.given_out, false),
                    number(operation.done, false),
                    number(operation.failed.values().sum(), false),
                    number(operation.pending, false),
                    format!("{} ago", lasting(operation.began_seconds_ago)),
                    operation.reason.clone(),
                ]);
            }
            table.lines().iter().for_each(|line| show!("{line}"));
            Ok(())
        }
        Verb::Show { store, id, wait } => report(store.open().await?.as_ref(), id, wait, json).await,
        Verb::Pause(args) => steer(args, Steer::Pause, json).await,
        Verb::Resume(args) => steer(args, Steer::Resume, json).await,
        Verb::Cancel(args) => steer(args, Steer::Cancel, json).await,
    }
}

async fn steer(args: SteerArgs, what: Steer, json: bool) -> Result<(), Failure> {
    let deed = args.deed.deed()?;
    let store = args.store.open().await?;
    if store.steer_operation(args.id, what, &deed).await? {
        let operation = one(store.as_ref(), args.id).await?;
        if json {
            show!("{}", serde_json::json!(operation));
        } else {
            show!("operation {} is {} now", args.id, operation.state);
        }
        return Ok(());
    }
    let operation = one(store.as_ref(), args.id).await?;
    let text =
        format!("operation {} is {}, so there is nothing to {what}; nothing was changed", args.id, operation.state);
    Err(Failure::new(exit::FAILURE, text))
}

async fn one(store: &dyn Store, id: OperationId) -> Result<ShownOperation, Failure> {
    let found = store.operations(Some(id), 1).await?.into_iter().next();
    found.ok_or_else(|| {
        Failure::new(
            exit::FAILURE,
            format!("there is no operation {id}; `postroom operations list` shows those there are"),
        )
    })
}

/// How an operation stands; with `wait`, once it is over, or waits for somebody.
async fn report(store: &dyn Store, id: OperationId, wait: bool, json: bool) -> Result<(), Failure> {
    let mut progress = Progress::new("messages done");
    let operation = loop {
        let operation = one(store, id).await?;
        let over = match operation.state {
            OperationState::Running => false,
            OperationState::Cancelled => operation.pending == 0,
            OperationState::Waiting | OperationState::Paused | OperationState::Done => true,
        };
        if !wait || over {
            break operation;
        }
        progress.at(operation.done.unsigned_abs());
        tokio::time::sleep(Duration::from_millis(200)).await;
    };
    progress.end();
    let effects = match operation.kind {
        OperationKind::Discard => Vec::new(),
        _ => store.operation_effects(id).await?,
    };
    if json {
        let mut object = serde_json::to_value(&operation).unwrap_or_default();
        object["effects"] = serde_json::json!(effects);
        show!("{object}");
    } else {
        told(&operation, &effects).iter().for_each(|line| show!("{line}"));
    }
    let failed: i64 = operation.failed.values().sum::<i64>() + operation.removed + operation.gone;
    if wait && (operation.state != OperationState::Done || failed > 0) {
        let text = format!("operation {id} is {}, and not everything that it is about is done", operation.state);
        return Err(Failure { answered: true, ..Failure::new(exit::FAILURE, text) });
    }
    Ok(())
}

fn told(operation: &ShownOperation, effects: &[OperationEffects]) -> Vec<String> {
    let of = if operation.side == Side::Out { "route" } else { "consumer" };
    let mut lines = vec![
        format!(
            "operation {}: {} on {of} {}, {}{}",
            operation.id,
            operation.kind,
            operation.route,
            operation.state,
            operation.note.as_deref().map(|note| format!(" ({note})")).unwrap_or_default()
        ),
        format!("began {} ago by {}: {}", lasting(operation.began_seconds_ago), operation.actor, operation.reason),
    ];
    let verb = match (operation.kind, operation.side) {
        (OperationKind::Discard, _) => "deleted",
        (_, Side::Out) => "published",
        (_, Side::In) => "handled",
    };
    lines.push(format!(
        "{} looked at and matching, {} given out, {} left alone",
        counted(operation.matched, !operation.read_all, "message"),
        number(operation.given_out, false),
        number(operation.left_alone, false)
    ));
    lines.push(format!(
        "{} {verb}, {} without an outcome yet, {} removed by an operator",
        number(operation.done, false),
        number(operation.pending, false),
        number(operation.removed, false)
    ));
    if operation.gone > 0 {
        lines.push(format!(
            "{} matched when it began, and were gone before it came to them",
            number(operation.gone, false)
        ));
    }
    for (cause, messages) in &operation.failed {
        lines.push(format!("{} became dead letters: {cause}", number(*messages, false)));
    }
    let coverage = operation.coverage.map_or_else(
        || "coverage is known when all was looked at".to_owned(),
        |coverage| format!("coverage {:.1} %", coverage * 100.0),
    );
    lines.push(format!("{coverage}; {}, {:.0} per second", lasting(operation.lasted_seconds), operation.per_second));
    for OperationEffects { consumer, effects, suppressed, waiting, dead, missing } in effects {
        lines.push(format!(
            "consumer {consumer}: {} handled since it began, {} handled before it, {} wait, {} dead, {} not there",
            number(*effects, false),
            number(*suppressed, false),
            number(*waiting, false),
            number(*dead, false),
            number(*missing, false)
        ));
    }
    lines
}
