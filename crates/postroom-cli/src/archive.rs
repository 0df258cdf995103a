//! `postroom archive`: what was archived, whether it is whole, and how it comes back.

use std::time::Duration;

use clap::{Args, Subcommand};
use jiff::Timestamp;
use postroom::{ArchivedMessage, Deed, OperationFilter, Restored, Store};
use postroom_archive::{Archive, ArchiveError, ArchiveOptions, Found, Manifest, Place};

use crate::StoreArgs;
use crate::actor::DeedArgs;
use crate::archiver::PassFailed;
use crate::config;
use crate::dead::duration;
use crate::environment;
use crate::exit::{self, Failure};
use crate::operations::{WhichArgs, moment};
use crate::progress::Progress;
use crate::say::{say, show};
use crate::table::{Table, counted, number};

/// Messages that are put back in one transaction.
const BATCH: usize = 1_000;
/// How long messages stay that were put back, unless it is said.
pub const STAYS: Duration = Duration::from_secs(7 * 24 * 3600);

/// Which archive.
#[derive(Debug, Args)]
pub struct PlaceArgs {
    /// The archive: a folder, file:///FOLDER or s3://BUCKET/PREFIX; otherwise POSTROOM_ARCHIVE_URL or [archive] of the configuration
    /// says it
    #[arg(long, value_name = "URL")]
    archive: Option<String>,
}

impl PlaceArgs {
    /// The archive, if there is one. A configuration counts where the store is taken from it too.
    pub fn options(&self, store: &StoreArgs) -> Result<Option<ArchiveOptions>, Failure> {
        let wrong =
            |code| move |problem: postroom_archive::InvalidPlace| Failure::new(code, format!("archive: {problem}"));
        if let Some(url) = &self.archive {
            return Place::of(url).map(|place| Some(place.into())).map_err(wrong(exit::USAGE));
        }
        if store.store.is_some() || (!store.config.exists() && environment::store_url().is_ok_and(|url| url.is_some()))
        {
            let url = environment::archive_url().map_err(|problem| Failure::new(exit::CONFIG, problem))?;
            let place = url.map(|url| Place::of(&url)).transpose().map_err(wrong(exit::CONFIG))?;
            return Ok(place.map(ArchiveOptions::from));
        }
        Ok(config::load(&store.config)?.archive)
    }

    pub fn open(&self, store: &StoreArgs) -> Result<Archive, Failure> {
        let options = self.options(store)?.ok_or_else(|| {
            let text = "name the archive with --archive URL, or with [archive] in the configuration";
            Failure::new(exit::USAGE, text)
        })?;
        Archive::open(&options).map_err(failure)
    }
}

pub fn failure(error: ArchiveError) -> Failure {
    PassFailed::Archive(error).into()
}

#[derive(Debug, Args)]
pub struct ArchiveArgs {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// List the segments that were archived, oldest first
    List {
        #[command(flatten)]
        store: StoreArgs,
        #[command(flatten)]
        archive: PlaceArgs,
        #[command(flatten)]
        times: Times,
    },
    /// Read everything and compare it with its manifests; exit code 1 if something is damaged
    Verify {
        #[command(flatten)]
        store: StoreArgs,
        #[command(flatten)]
        archive: PlaceArgs,
        #[command(flatten)]
        times: Times,
    },
    /// Put messages back into the outbox, with their ids, so that they can be replayed; nobody sends them before that
    Restore(Box<RestoreArgs>),
}

#[derive(Debug, Clone, Copy, Args)]
pub struct Times {
    /// Only segments with messages that happened at this time or later: 2026-11-22T10:00:00Z, or an age such as 30d
    #[arg(long, value_name = "TIME", value_parser = moment)]
    from: Option<i64>,
    /// Only segments with messages that happened before this time
    #[arg(long, value_name = "TIME", value_parser = moment)]
    to: Option<i64>,
}

impl Times {
    fn overlap(self, manifest: &Manifest) -> bool {
        let at = |ms: Option<i64>| ms.and_then(|ms| Timestamp::from_millisecond(ms).ok());
        manifest.overlaps(at(self.from), at(self.to))
    }
}

#[derive(Debug, Args)]
struct RestoreArgs {
    #[command(flatten)]
    store: StoreArgs,
    #[command(flatten)]
    archive: PlaceArgs,
    #[command(flatten)]
    times: Times,
    #[command(flatten)]
    which: WhichArgs,
    /// Everything that was archived; required if no filter is given
    #[arg(long)]
    all: bool,
    /// How long they stay in the outbox before retention removes them again, such as 7d
    #[arg(long, value_parser = duration, default_value = "7d", value_name = "AGE")]
    stays: Duration,
    #[command(flatten)]
    deed: DeedArgs,
}

pub async fn archive(args: ArchiveArgs, json: bool) -> Result<(), Failure> {
    match args.verb {
        Verb::List { store, archive, times } => list(&archive.open(&store)?, times, json).await,
        Verb::Verify { store, archive, times } => {
            verify(&archive.open(&store)?, store.open().await?.as_ref(), times, json).await
        }
        Verb::Restore(args) => restore(*args, json).await,
    }
}

async fn list(archive: &Archive, times: Times, json: bool) -> Result<(), Failure> {
    let Found { manifests, damaged, unfinished } = archive.manifests().await.map_err(failure)?;
    let manifests: Vec<Manifest> = manifests.into_iter().filter(|manifest| times.overlap(manifest)).collect();
    if json {
        show!(
            "{}",
            serde_json::json!({ "segments": manifests, "damaged": objects(&damaged), "unfinished": unfinished })
        );
        return Ok(());
    }
    if manifests.is_empty() {
        show!("no segments");
    } else {
        let mut table = Table::new(&["SEGMENT", "OUTBOX", "ARCHIVED", "FROM", "TO", ">MESSAGES", ">BYTES"]);
        for manifest in &manifests {
            table.row([
                manifest.segment.to_string(),
                manifest.outbox.to_string(),
                at(manifest.begun_at),
                at(manifest.first_at),
                at(manifest.last_at),
                number(manifest.messages as i64, false),
                number(manifest.bytes as i64, false),
            ]);
        }
        table.lines().iter().for_each(|line| show!("{line}"));
        let messages: u64 = manifests.iter().map(|manifest| manifest.messages).sum();
        show!(
            "{} in {}",
            counted(messages as i64, false, "message"),
            counted(manifests.len() as i64, false, "segment")
        );
    }
    damaged.iter().for_each(|(object, problem)| say!("postroom: {object}: {problem}"));
    unfinished
        .iter()
        .for_each(|object| say!("postroom: {object}: of a segment that was not finished; no manifest names it"));
    Ok(())
}

fn objects(problems: &[(String, String)]) -> Vec<serde_json::Value> {
    problems.iter().map(|(object, problem)| serde_json::json!({ "object": object, "problem": problem })).collect()
}

fn at(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

async fn verify(archive: &Archive, store: &dyn Store, times: Times, json: bool) -> Result<(), Failure> {
    let Found { manifests, mut damaged, unfinished } = archive.manifests().await.map_err(failure)?;
    let (mut segments, mut messages) = (0u64, 0u64);
    let mut progress = Progress::new("messages");
    for manifest in manifests.iter().filter(|manifest| times.overlap(manifest)) {
        match archive.verify(manifest).await {
            Ok(read) => {
                segments += 1;
                messages += read.len() as u64;
            }
            Err(ArchiveError::Damaged { object, problem, .. }) => damaged.push((object, problem)),
            // Such as one that is missing although its manifest is there.
            Err(error) => damaged.push((manifest.object.clone(), Failure::of(exit::FAILURE, &error).text)),
        }
        progress.at(messages);
    }
    progress.end();
    // An archive that has lost all of it has nothing that is damaged.
    let state = store.archive_state().await?;
    let here = manifests.iter().filter(|manifest| manifest.outbox == state.outbox).count() as u64;
    let lacking = state.segments.saturating_sub(here);
    if json {
        let verified = serde_json::json!({
            "segments": segments, "messages": messages, "damaged": objects(&damaged), "unfinished": unfinished, "lacking": lacking
        });
        show!("{verified}");
    } else {
        show!(
            "{} with {}: whole",
            counted(segments as i64, false, "segment"),
            counted(messages as i64, false, "message")
        );
        damaged.iter().for_each(|(object, problem)| show!("{object}: {problem}"));
        unfinished
            .iter()
            .for_each(|object| show!("{object}: of a segment that was not finished; no manifest names it"));
        if lacking > 0 {
            show!(
                "this store has archived {}, and {} of them are here: is it the whole archive, and is its volume mounted?",
                counted(state.segments as i64, false, "segment"),
                number(here as i64, false)
            );
        }
    }
    let missing = damaged.len() as u64 + lacking;
    if missing == 0 {
        return Ok(());
    }
    let text = format!("the archive is not whole: {} damaged or missing", counted(missing as i64, false, "object"));
    Err(Failure { answered: true, ..Failure::new(exit::FAILURE, text) })
}

async fn restore(args: RestoreArgs, json: bool) -> Result<(), Failure> {
    let RestoreArgs { store, archive, times, which, all, stays, deed } = args;
    let filter = which.filter(times.from, times.to);
    if filter.is_everything() && !all {
        return Err(Failure::new(exit::USAGE, "without a filter, `archive restore` requires --all"));
    }
    let deed = deed.deed()?;
    let archive = archive.open(&store)?;
    let store = store.open().await?;
    let back = put_back(&archive, store.as_ref(), &filter, stays, &deed).await?;
    if json {
        let mut object = serde_json::to_value(&back.restored).unwrap_or_default();
        object["damaged"] = serde_json::json!(objects(&back.damaged));
        object["of_other_outboxes"] = back.of_others.into();
        show!("{object}");
    } else {
        show!("{}", told(&back));
    }
    if !back.is_whole() {
        let text = "not everything that matches was put back";
        return Err(Failure { answered: true, ..Failure::new(exit::FAILURE, text) });
    }
    Ok(())
}

/// What became of what matched.
pub struct PutBack {
    restored: Restored,
    /// Segments that could not be read.
    damaged: Vec<(String, String)>,
    /// Segments of other outboxes, which are left alone.
    of_others: usize,
}

impl PutBack {
    /// Everything that matches is in the outbox now.
    pub fn is_whole(&self) -> bool {
        let Restored { ahead, taken, unreadable, .. } = self.restored;
        ahead + taken + unreadable == 0 && self.damaged.is_empty()
    }
}

/// What was put back, in words.
pub fn told(back: &PutBack) -> String {
    let PutBack { restored, damaged, of_others } = back;
    let mut text = format!("{} put back", counted(restored.restored as i64, false, "message"));
    let parts = [
        (restored.present, "were there already"),
        (restored.ahead, "were not, since a route has not passed their place, or the outbox has not come to it"),
        (restored.taken, "were not, since other messages have their places, or the store refuses them"),
        (restored.unreadable, "were not, since they have text that is not UTF-8; their bytes are in the archive"),
        (*of_others as u64, "segments of other outboxes were left alone"),
    ];
    for (count, what) in parts.iter().filter(|(count, _)| *count > 0) {
        text += &format!("; {} {what}", number(*count as i64, false));
    }
    for (object, problem) in damaged {
        text += &format!("; {object} is left out: {problem}");
    }
    text
}

/// How many archived messages match.
pub async fn count(archive: &Archive, store: &dyn Store, filter: &OperationFilter) -> Result<u64, Failure> {
    let mut matching = 0;
    let mut progress = Progress::new("archived messages that match");
    let (manifests, _) = wanted(archive, store, filter).await?;
    for manifest in manifests.manifests {
        let messages = archive.read(&manifest).await.map_err(failure)?;
        matching += messages.iter().filter(|message| matches(filter, message)).count() as u64;
        progress.at(matching);
    }
    progress.end();
    Ok(matching)
}

/// Puts back what matches; what is damaged does not keep the rest from coming back.
pub async fn put_back(
    archive: &Archive,
    store: &dyn Store,
    filter: &OperationFilter,
    stays: Duration,
    deed: &Deed,
) -> Result<PutBack, Failure> {
    let (found, of_others) = wanted(archive, store, filter).await?;
    let mut back = PutBack { restored: Restored::default(), damaged: found.damaged, of_others };
    let mut progress = Progress::new("messages put back");
    for manifest in found.manifests {
        let mut messages = match archive.read(&manifest).await {
            Ok(messages) => messages,
            Err(error) => {
                back.damaged.push((manifest.object.clone(), Failure::of(exit::FAILURE, &error).text));
                continue;
            }
        };
        messages.retain(|message| matches(filter, message));
        let all = messages.len();
        messages.retain(|message| message.unreadable.is_empty());
        back.restored.unreadable += (all - messages.len()) as u64;
        for batch in messages.chunks(BATCH) {
            let mut some = store.restore(batch, stays, deed).await?;
            some.ids.clear();
            back.restored += some;
            progress.at(back.restored.restored);
        }
    }
    progress.end();
    Ok(back)
}

/// The segments of this outbox that may have what matches, and how many are of others.
async fn wanted(archive: &Archive, store: &dyn Store, filter: &OperationFilter) -> Result<(Found, usize), Failure> {
    let mut found = archive.manifests().await.map_err(failure)?;
    let outbox = store.archive_state().await?.outbox;
    let all = found.manifests.len();
    found.manifests.retain(|manifest| manifest.outbox == outbox);
    let of_others = all - found.manifests.len();
    let times = Times { from: filter.since_ms, to: filter.until_ms };
    found.manifests.retain(|manifest| times.overlap(manifest));
    Ok((found, of_others))
}

fn matches(filter: &OperationFilter, message: &ArchivedMessage) -> bool {
    let is = |wanted: &Option<String>, has: Option<&str>| wanted.as_deref().is_none_or(|wanted| has == Some(wanted));
    let OperationFilter { ids, since_ms, until_ms, topic, kind, key, tenant_id, aggregate_id, error: _, group: _ } =
        filter;
    (ids.is_empty() || ids.iter().any(|id| *id.as_uuid() == message.id))
        && since_ms.is_none_or(|since| message.occurred_us >= since.saturating_mul(1000))
        && until_ms.is_none_or(|until| message.occurred_us < until.saturating_mul(1000))
        && is(topic, Some(&message.topic))
        && is(kind, Some(&message.kind))
        && is(key, message.key.as_deref().or(message.aggregate_id.as_deref()))
        && is(tenant_id, message.tenant_id.as_deref())
        && is(aggregate_id, message.aggregate_id.as_deref())
}
