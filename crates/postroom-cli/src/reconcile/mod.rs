//! `postroom reconcile`: whether every change became a message, and every message an effect.

mod compare;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, Subcommand};
use postroom::{Consumer, ConsumerCompared, MessageId, Reconciled, Store, TopicFilter};

use crate::StoreArgs;
use crate::config::{self, Config, Reconcile};
use crate::exit::{self, Failure};
use crate::operations::{moment, the_route};
use crate::progress::Progress;
use crate::say::{say, show};
use crate::store;
use crate::table::{Table, counted, number};
use compare::{Asked, at, compare};

/// Between two looks whether a comparison is due.
const LOOKS_EVERY: Duration = Duration::from_secs(30);

/// A comparison with everything that it needs.
pub struct Comparison {
    options: Reconcile,
    route: String,
    store: Arc<dyn Store>,
    inboxes: Vec<Inbox>,
    /// The shortest time for which messages are kept; none: for ever.
    kept: Option<Duration>,
}

/// A consumer's inbox.
struct Inbox {
    consumer: Consumer,
    store: Arc<dyn Store>,
    topics: Option<TopicFilter>,
    /// It began then: what is older it need not have.
    since_ms: Option<i64>,
}

impl Comparison {
    async fn open(config: &Config, options: &Reconcile, store: Arc<dyn Store>) -> Result<Self, Failure> {
        let route = the_route(store.as_ref(), options.route.clone()).await?;
        let inbox = |inbox: &config::ReconciledConsumer| -> Result<Inbox, Failure> {
            let store = inbox.store.as_deref().map_or_else(|| Ok(store.clone()), store::open)?;
            Ok(Inbox {
                consumer: inbox.consumer.clone(),
                store,
                topics: inbox.topics.clone(),
                since_ms: inbox.since_ms,
            })
        };
        let inboxes = options.consumers.iter().map(inbox).collect::<Result<_, _>>()?;
        let kept = config.retention.shortest_of(&options.topics);
        Ok(Self { options: options.clone(), route, store, inboxes, kept })
    }
}

#[derive(Debug, Args)]
pub struct ReconcileArgs {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Compare now, as [[reconcile]] of the configuration says, and keep the result; exit code 1 if something differs
    Run(RunArgs),
    /// Show the newest results
    Report {
        #[command(flatten)]
        store: StoreArgs,
        /// Only of this comparison
        name: Option<String>,
    },
    /// Show the messages that a consumer lacks, or has and the outbox has not
    Show(ShowArgs),
    /// Show the changes of aggregates that have no message
    Changes {
        #[command(flatten)]
        store: StoreArgs,
        /// The comparison
        name: String,
        /// Maximum number of changes
        #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=10_000), value_name = "N")]
        limit: u16,
    },
}

#[derive(Debug, Args)]
struct RunArgs {
    /// Configuration file
    #[arg(long, default_value = "postroom.toml", value_name = "FILE")]
    config: PathBuf,
    /// Only this comparison
    name: Option<String>,
    /// From this time on: 2026-11-22T10:00:00Z, or an age such as 30d; otherwise the comparison's window
    #[arg(long, value_name = "TIME", value_parser = moment)]
    from: Option<i64>,
    /// Up to this time, and never later than `settles` before now
    #[arg(long, value_name = "TIME", value_parser = moment)]
    to: Option<i64>,
}

#[derive(Debug, Args)]
struct ShowArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// The comparison
    name: String,
    /// The consumer; not needed if there is only one
    #[arg(long)]
    consumer: Option<String>,
    /// Those that the consumer has and the outbox has not, in place of those that it lacks
    #[arg(long)]
    strangers: bool,
    /// Maximum number of messages
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=10_000), value_name = "N")]
    limit: u16,
}

pub async fn reconcile(args: ReconcileArgs, json: bool) -> Result<(), Failure> {
    match args.verb {
        Verb::Run(args) => run(args, json).await,
        Verb::Report { store, name } => {
            let found = store.open().await?.reconciled(name.as_deref()).await?;
            if found.is_empty() {
                return Err(nothing(name.as_deref()));
            }
            shown(&found, json);
            Ok(())
        }
        Verb::Show(args) => show_messages(args, json).await,
        Verb::Changes { store, name, limit } => {
            let found = store.open().await?.reconciled(Some(&name)).await?;
            let result = found.into_iter().next().ok_or_else(|| nothing(Some(&name)))?;
            show_changes(&result, usize::from(limit), json)
        }
    }
}

fn nothing(name: Option<&str>) -> Failure {
    let of = name.map(|name| format!(" {name:?}")).unwrap_or_default();
    let text = format!(
        "there is no result of a comparison{of}; `postroom reconcile run` makes one, and `postroom run` does so from time to time"
    );
    Failure::new(exit::FAILURE, text)
}

async fn run(args: RunArgs, json: bool) -> Result<(), Failure> {
    let config = config::load(&args.config)?;
    let named = |options: &&Reconcile| args.name.as_ref().is_none_or(|name| *name == options.name);
    let chosen: Vec<&Reconcile> = config.reconcile.iter().filter(named).collect();
    if chosen.is_empty() {
        let names: Vec<&str> = config.reconcile.iter().map(|options| options.name.as_str()).collect();
        let known = if names.is_empty() {
            "it has no [[reconcile]]".to_owned()
        } else {
            format!("it has {}", names.join(", "))
        };
        return Err(Failure::new(exit::USAGE, format!("the configuration has no such comparison; {known}")));
    }
    if let (Some(from), Some(to)) = (args.from, args.to)
        && from >= to
    {
        return Err(Failure::new(exit::USAGE, "--from is not before --to, so there is nothing to compare"));
    }
    let store = store::open(config.stores.one()?)?;
    let mut results = Vec::new();
    for options in chosen {
        let comparison = Comparison::open(&config, options, store.clone()).await?;
        let mut progress = Progress::new("ids compared");
        let result = compare(&comparison, Asked { from_ms: args.from, to_ms: args.to }, |ids| progress.at(ids)).await?;
        progress.end();
        // One that leaves something out must not take the place of one that does not.
        if !result.partial {
            store.note_reconciled(&result).await?;
        }
        results.push(result);
    }
    shown(&results, json);
    if results.iter().any(Reconciled::differs) {
        let text = "something differs or could not be compared; `postroom reconcile show` names messages, and `changes` changes";
        return Err(Failure { answered: true, ..Failure::new(exit::FAILURE, text) });
    }
    Ok(())
}

fn shown(results: &[Reconciled], json: bool) {
    if json {
        show!("{}", serde_json::json!({ "reconciled": results }));
        return;
    }
    for (index, result) in results.iter().enumerate() {
        if index > 0 {
            show!("");
        }
        lines(result).iter().for_each(|line| show!("{line}"));
    }
}

fn lines(result: &Reconciled) -> Vec<String> {
    let count = |count: u64| number(i64::try_from(count).unwrap_or(i64::MAX), false);
    let mut lines = vec![format!(
        "{}: messages of {} to {}, compared at {} in {:.1} s",
        result.name,
        at(result.span.from_ms),
        at(result.span.to_ms),
        at(result.at_ms),
        result.took_seconds
    )];
    if result.partial {
        lines.push(
            "note: this is about a part of the usual time, or leaves out what an earlier comparison left open, so it is shown and not kept"
                .to_owned(),
        );
    }
    lines.extend(result.notes.iter().map(|note| format!("note: {note}")));
    if !result.days.is_empty() {
        let mut table =
            Table::new(&["DAY", "TENANT", "TYPE", ">CHANGES", ">MESSAGES", ">DIFFERENCE", ">WAITING", ">DEAD"]);
        for day in &result.days {
            let changes = day.changes.unwrap_or(0);
            let difference = i128::from(changes) - i128::from(day.messages.committed);
            table.row([
                day.day.clone(),
                day.messages.tenant.clone().unwrap_or_else(|| "-".to_owned()),
                day.messages.kind.clone(),
                count(changes),
                count(day.messages.committed),
                if difference == 0 { "-".to_owned() } else { format!("{difference:+}") },
                count(day.messages.waiting),
                count(day.messages.dead),
            ]);
        }
        lines.extend(table.lines());
    }
    if !result.consumers.is_empty() {
        let mut table = Table::new(&[
            "CONSUMER",
            "STORE",
            ">MESSAGES",
            ">RECEIVED",
            ">MISSING",
            ">STRANGERS",
            ">UNSENT",
            ">DEAD (ROUTE)",
            ">UNROUTED",
            ">WAITING",
            ">DEAD",
        ]);
        for one in result.consumers.iter().filter(|one| one.trouble.is_none()) {
            let ConsumerCompared { consumer, store, expected, received, missing, strangers, .. } = one;
            table.row([
                consumer.clone(),
                store.clone(),
                count(*expected),
                count(*received),
                count(*missing),
                count(*strangers),
                count(one.unsent),
                count(one.dead_on_route),
                count(one.unrouted),
                count(one.waiting),
                count(one.dead),
            ]);
        }
        lines.extend(table.lines());
    }
    if result.not_compared > 0 {
        lines.push(format!(
            "{} (up to 20,000 are counted) could not be compared: their ids are not UUIDv7 with a time since 2020",
            counted(i64::try_from(result.not_compared).unwrap_or(i64::MAX), false, "message")
        ));
    }
    let troubles = result.troubles();
    lines.extend(troubles.iter().map(|(side, trouble)| format!("not compared: {side}: {trouble}")));
    if result.unwritten > 0 {
        lines.push(format!(
            "{} of aggregates without a message; `postroom reconcile changes {}` names them",
            counted(i64::try_from(result.unwritten).unwrap_or(i64::MAX), false, "change"),
            result.name
        ));
    }
    let open: u64 = result.consumers.iter().map(|one| one.unsent + one.dead_on_route + one.waiting + one.dead).sum();
    let verdict = match (result.missing(), result.strangers(), result.days_that_differ() + result.unwritten) {
        (0, 0, 0) if !troubles.is_empty() => "no difference in what could be compared".to_owned(),
        (0, 0, 0) if result.not_compared > 0 => "no difference in what could be compared".to_owned(),
        (0, 0, 0) if open > 0 => format!(
            "nothing is missing, and {} had no effect so far: not sent yet, dead, or waiting at a consumer",
            counted(i64::try_from(open).unwrap_or(i64::MAX), false, "message")
        ),
        (0, 0, 0) => "no difference".to_owned(),
        (missing, strangers, _) => format!(
            "{} missing, {} in no outbox, {} with another number of changes than messages, {} without a message",
            counted(i64::try_from(missing).unwrap_or(i64::MAX), false, "message"),
            count(strangers),
            counted(i64::try_from(result.days_that_differ()).unwrap_or(i64::MAX), false, "day"),
            counted(i64::try_from(result.unwritten).unwrap_or(i64::MAX), false, "change")
        ),
    };
    lines.push(verdict);
    lines
}

/// The newest result of a comparison, and one consumer of it.
pub async fn of_consumer(store: &dyn Store, name: &str, consumer: Option<&str>) -> Result<ConsumerCompared, Failure> {
    let result = store.reconciled(Some(name)).await?.into_iter().next().ok_or_else(|| nothing(Some(name)))?;
    let names: Vec<String> = result.consumers.iter().map(|one| one.consumer.clone()).collect();
    let mut fitting: Vec<ConsumerCompared> =
        result.consumers.into_iter().filter(|one| consumer.is_none_or(|wanted| wanted == one.consumer)).collect();
    match (fitting.len(), consumer) {
        (1, _) => Ok(fitting.remove(0)),
        (_, None) => Err(Failure::new(exit::USAGE, format!("name one of the consumers: {}", names.join(", ")))),
        (_, Some(wanted)) => {
            let text = format!("comparison {name} has no consumer {wanted:?}; it has {}", names.join(", "));
            Err(Failure::new(exit::FAILURE, text))
        }
    }
}

/// Ids that a consumer lacks, for a replay; `named` is NAME or NAME/CONSUMER.
pub async fn missing(store: &dyn Store, named: &str) -> Result<Vec<MessageId>, Failure> {
    let (name, consumer) = named.split_once('/').map_or((named, None), |(name, consumer)| (name, Some(consumer)));
    let compared = of_consumer(store, name, consumer).await?;
    told_trouble(name, &compared, compared.missing)?;
    if compared.missing_ids.is_empty() {
        let text = format!("comparison {name} found no message that consumer {} lacks", compared.consumer);
        return Err(Failure::new(exit::FAILURE, text));
    }
    if (compared.missing_ids.len() as u64) < compared.missing {
        say!(
            "postroom: the result names the first {} of {} that are missing; compare again after this replay",
            number(compared.missing_ids.len() as i64, false),
            number(i64::try_from(compared.missing).unwrap_or(i64::MAX), false)
        );
    }
    Ok(compared.missing_ids)
}

async fn show_messages(args: ShowArgs, json: bool) -> Result<(), Failure> {
    let store = args.store.open().await?;
    let compared = of_consumer(store.as_ref(), &args.name, args.consumer.as_deref()).await?;
    told_trouble(&args.name, &compared, if args.strangers { compared.strangers } else { compared.missing })?;
    let (kind, ids, total) = match args.strangers {
        true => ("stranger", &compared.stranger_ids, compared.strangers),
        false => ("missing", &compared.missing_ids, compared.missing),
    };
    let mut found = Vec::new();
    for id in ids.iter().take(usize::from(args.limit)) {
        found.push((*id, store.message(*id).await?));
    }
    if json {
        let messages: Vec<_> = found
            .iter()
            .map(|(id, message)| {
                serde_json::json!({
                    "id": id,
                    "topic": message.as_ref().map(|message| &message.topic),
                    "type": message.as_ref().map(|message| &message.kind),
                    "tenant_id": message.as_ref().and_then(|message| message.tenant_id.as_ref()),
                })
            })
            .collect();
        let shown = serde_json::json!({
            "name": args.name, "consumer": compared.consumer, "kind": kind, "messages": messages, "total": total
        });
        show!("{shown}");
        return Ok(());
    }
    if found.is_empty() {
        show!("none");
        return Ok(());
    }
    let mut table = Table::new(&["ID", "TOPIC", "TYPE", "TENANT"]);
    for (id, message) in &found {
        let of = |part: Option<&String>| part.cloned().unwrap_or_else(|| "-".to_owned());
        table.row([
            id.to_string(),
            of(message.as_ref().map(|message| &message.topic)),
            of(message.as_ref().map(|message| &message.kind)),
            of(message.as_ref().and_then(|message| message.tenant_id.as_ref())),
        ]);
    }
    table.lines().iter().for_each(|line| show!("{line}"));
    if total > found.len() as u64 {
        say!("postroom: {} in all", number(i64::try_from(total).unwrap_or(i64::MAX), false));
    }
    Ok(())
}

/// Of a consumer that could not be compared, only what was found before is known.
fn told_trouble(name: &str, compared: &ConsumerCompared, known: u64) -> Result<(), Failure> {
    let Some(trouble) = &compared.trouble else { return Ok(()) };
    let text = format!("comparison {name} could not compare consumer {}: {trouble}", compared.consumer);
    if known == 0 {
        return Err(Failure::new(exit::FAILURE, text));
    }
    say!("postroom: {text}; this is what an earlier one found");
    Ok(())
}

fn show_changes(result: &Reconciled, limit: usize, json: bool) -> Result<(), Failure> {
    if let Some(trouble) = &result.changes_trouble {
        let text = format!("comparison {} could not ask the application's tables: {trouble}", result.name);
        if result.unwritten == 0 {
            return Err(Failure::new(exit::FAILURE, text));
        }
        say!("postroom: {text}; this is what an earlier one found");
    }
    result.notes.iter().for_each(|note| say!("postroom: note: {note}"));
    let shown = &result.unwritten_changes[..limit.min(result.unwritten_changes.len())];
    if json {
        show!("{}", serde_json::json!({ "name": result.name, "changes": shown, "total": result.unwritten }));
        return Ok(());
    }
    if shown.is_empty() {
        show!("none");
        return Ok(());
    }
    let mut table = Table::new(&["AGGREGATE TYPE", "AGGREGATE", ">VERSION"]);
    for change in shown {
        table.row([
            change.aggregate_type.clone().unwrap_or_else(|| "-".to_owned()),
            change.aggregate_id.clone(),
            change.aggregate_version.map_or_else(|| "-".to_owned(), |version| version.to_string()),
        ]);
    }
    table.lines().iter().for_each(|line| show!("{line}"));
    if result.unwritten > shown.len() as u64 {
        say!("postroom: {} in all", number(i64::try_from(result.unwritten).unwrap_or(i64::MAX), false));
    }
    Ok(())
}

/// Compares for ever, each comparison when it is due. Several processes may do so: whoever comes first does it for all.
pub async fn keep_comparing(config: Arc<Config>, store: Arc<dyn Store>) {
    let mut told: Vec<String> = Vec::new();
    loop {
        tokio::time::sleep(LOOKS_EVERY).await;
        for options in &config.reconcile {
            match compare_if_due(&config, options, &store).await {
                Ok(None) => {}
                Ok(Some(result)) => {
                    told.retain(|name| *name != options.name);
                    for (side, trouble) in result.troubles() {
                        tracing::error!("comparison {}: {side} could not be compared: {trouble}", result.name);
                    }
                    if result.differs() {
                        tracing::warn!(
                            "comparison {}: {} messages missing, {} in no outbox, {} days differ, {} changes without a message; `postroom reconcile report {}` tells more",
                            result.name,
                            result.missing(),
                            result.strangers(),
                            result.days_that_differ(),
                            result.unwritten,
                            result.name
                        );
                    } else {
                        tracing::info!("comparison {}: no difference, in {:.1} s", result.name, result.took_seconds);
                    }
                }
                Err(failure) => {
                    if !told.contains(&options.name) {
                        told.push(options.name.clone());
                        tracing::error!("comparison {} fails: {}", options.name, failure.text);
                    }
                }
            }
        }
    }
}

async fn compare_if_due(
    config: &Config,
    options: &Reconcile,
    store: &Arc<dyn Store>,
) -> Result<Option<Reconciled>, Failure> {
    let last = store.status().await?.reconciled.into_iter().find(|last| last.name == options.name);
    if last.is_some_and(|last| last.seconds_ago < options.every.as_secs_f64()) {
        return Ok(None);
    }
    let compared = async {
        let comparison = Comparison::open(config, options, store.clone()).await?;
        Ok::<_, Failure>(compare(&comparison, Asked::default(), |_| ()).await?)
    };
    match compared.await {
        Ok(result) => {
            store.note_reconciled(&result).await?;
            Ok(Some(result))
        }
        Err(failure) => {
            store.note_reconciled(&failed(options, store, &failure).await?).await?;
            Err(failure)
        }
    }
}

/// A comparison that failed is a result too: what was known before, and why nothing is known since.
async fn failed(options: &Reconcile, store: &Arc<dyn Store>, failure: &Failure) -> Result<Reconciled, Failure> {
    let last = store.reconciled(Some(&options.name)).await?.into_iter().next();
    let now = store.vitals().await?.now.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let at_ms = i64::try_from(now.as_millis()).unwrap_or(i64::MAX);
    let back = options.window.saturating_add(options.settles);
    let from_ms = at_ms.saturating_sub(i64::try_from(back.as_millis()).unwrap_or(i64::MAX));
    let known = last.unwrap_or_else(|| Reconciled {
        name: options.name.clone(),
        at_ms,
        span: postroom::Span { from_ms, to_ms: from_ms },
        took_seconds: 0.0,
        days: Vec::new(),
        consumers: Vec::new(),
        unwritten: 0,
        unwritten_changes: Vec::new(),
        not_compared: 0,
        notes: Vec::new(),
        every_seconds: None,
        partial: false,
        business_trouble: None,
        changes_trouble: None,
        business_open_ms: None,
        trouble: None,
    });
    Ok(Reconciled {
        at_ms,
        every_seconds: Some(options.every.as_secs_f64()),
        partial: false,
        trouble: Some(failure.text.clone()),
        ..known
    })
}
