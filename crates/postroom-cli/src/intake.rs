//! `postroom intake`: how tables whose rows are taken stand; and the part of `postroom run` that takes them.

mod run;

use std::time::Duration;

use clap::{Args, Subcommand};
use postroom::{IntakeStatus, Previewed, lasting};

use crate::actor::DeedArgs;
use crate::config::{self, Taken};
use crate::dead::duration;
use crate::exit::{self, Failure};
use crate::presets::intakes_of;
use crate::say::{say, show};
use crate::stores::OfStore;
use crate::table::Table;

pub use run::{finish, keep_taking};

#[derive(Debug, Args)]
pub struct IntakeArgs {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Show each table: how many rows are to be taken, taken, set aside, and why
    List(OfStore),
    /// Show what would be made of the next rows; changes nothing
    Preview(PreviewArgs),
    /// Let rows that were set aside be taken or marked again: all that were refused or are unmarked, or one by its key
    Again(AgainArgs),
    /// Give rows back that a former relay has claimed and left behind when it died; stop it first, or choose an age that no claim reaches
    Free(FreeArgs),
}

#[derive(Debug, Args)]
struct PreviewArgs {
    #[command(flatten)]
    of: OfStore,
    /// Name of the intake
    name: String,
    /// Maximum number of rows
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=10_000), value_name = "N")]
    limit: u32,
    /// Also show the payloads, which may contain personal data
    #[arg(long)]
    payload: bool,
}

#[derive(Debug, Args)]
struct AgainArgs {
    #[command(flatten)]
    of: OfStore,
    /// Name of the intake
    name: String,
    /// Only the row with this key; needed for a row that may have been sent
    #[arg(long, value_name = "KEY")]
    row: Option<String>,
    #[command(flatten)]
    deed: DeedArgs,
}

#[derive(Debug, Args)]
struct FreeArgs {
    #[command(flatten)]
    of: OfStore,
    /// Name of the intake
    name: String,
    /// Only rows that were written, and due, at least this long ago, such as 1h
    #[arg(long, value_parser = duration, value_name = "AGE")]
    older_than: Duration,
    #[command(flatten)]
    deed: DeedArgs,
}

/// So many rows are given back in one transaction.
const FREED_AT_ONCE: usize = 1_000;

pub async fn intake(args: IntakeArgs, json: bool) -> Result<(), Failure> {
    match args.verb {
        Verb::List(args) => list(&args, json).await,
        Verb::Preview(args) => preview(args, json).await,
        Verb::Again(args) => again(args, json).await,
        Verb::Free(args) => free(args, json).await,
    }
}

fn named<'a>(config: &'a config::Config, name: &str) -> Result<&'a Taken, Failure> {
    config.intakes.iter().find(|taken| taken.intake.name == name).ok_or_else(|| {
        let names: Vec<&str> = config.intakes.iter().map(|taken| taken.intake.name.as_str()).collect();
        let text = format!("the configuration has no intake {name:?}; it has: {}", names.join(", "));
        Failure::new(exit::USAGE, text)
    })
}

async fn list(args: &OfStore, json: bool) -> Result<(), Failure> {
    let (config, store) = args.load().await?;
    let intakes = intakes_of(store.as_ref())?;
    let mut all: Vec<(&Taken, Result<IntakeStatus, String>)> = Vec::new();
    for taken in &config.intakes {
        match intakes.intake_status(&taken.intake).await {
            Ok(status) => all.push((taken, Ok(status))),
            // The others are told all the same.
            Err(error) if !error.is_transient() => all.push((taken, Err(Failure::of(exit::FAILURE, &error).text))),
            Err(error) => return Err(error.into()),
        }
    }
    if json {
        let shown = |(taken, status): &(&Taken, Result<IntakeStatus, String>)| {
            let mut object = serde_json::json!(status.as_ref().unwrap_or(&IntakeStatus::default()));
            object["name"] = taken.intake.name.as_str().into();
            object["table"] = taken.intake.table.to_string().into();
            object["mode"] = taken.mode.as_str().into();
            object["problem"] = status.as_ref().err().cloned().into();
            object
        };
        show!("{}", serde_json::json!({ "intakes": all.iter().map(shown).collect::<Vec<_>>() }));
        return Ok(());
    }
    if all.is_empty() {
        show!("the configuration has no [[intake]]; `postroom presets detect` looks for tables");
        return Ok(());
    }
    let columns =
        ["INTAKE", "TABLE", "MODE", ">PENDING", ">OLDEST", ">TAKEN", ">DEAD", ">REFUSED", ">UNCLEAR", ">UNMARKED"];
    let mut table = Table::new(&columns);
    for (taken, status) in &all {
        let first = [taken.intake.name.clone(), taken.intake.table.to_string(), taken.mode.as_str().to_owned()];
        let counts = match status {
            Err(_) => ["?", "-", "?", "?", "?", "?", "?"].map(str::to_owned),
            Ok(status) => [
                format!("{}{}", status.pending, if status.pending_is_bound { "+" } else { "" }),
                status.oldest_seconds.map_or_else(|| "-".to_owned(), lasting),
                status.taken.to_string(),
                status.dead.to_string(),
                status.refused.to_string(),
                status.unclear.to_string(),
                status.unmarked.to_string(),
            ],
        };
        table.row(first.into_iter().chain(counts));
    }
    table.lines().iter().for_each(|line| show!("{line}"));
    for (taken, status) in &all {
        let name = &taken.intake.name;
        match status {
            Err(problem) => show!("{name}: {problem}"),
            Ok(status) => status.set_aside.iter().for_each(|aside| {
                show!("{name}: row {} {} {} ago: {}", aside.row, aside.state, lasting(aside.age_seconds), aside.error);
            }),
        }
    }
    Ok(())
}

async fn preview(args: PreviewArgs, json: bool) -> Result<(), Failure> {
    let (config, store) = args.of.load().await?;
    let taken = named(&config, &args.name)?;
    let rows = intakes_of(store.as_ref())?.preview_intake(&taken.intake, args.limit as usize).await?;
    let shown: Vec<serde_json::Value> = rows.iter().map(|row| shown(row, args.payload)).collect();
    if json {
        show!("{}", serde_json::json!({ "rows": shown }));
        return Ok(());
    }
    if rows.is_empty() {
        show!("no row is to be taken");
    }
    for row in &rows {
        match &row.message {
            Err(error) => show!("row {}: refused: {error}", row.row),
            Ok(message) => {
                let key = message.key.as_ref().or(message.aggregate_id.as_ref());
                let key = key.map_or_else(|| "no key".to_owned(), |key| format!("key {key}"));
                let bytes = message.payload.len();
                show!(
                    "row {}: topic {}, type {}, {key}, {bytes} bytes, id {}",
                    row.row,
                    message.topic,
                    message.kind,
                    message.id
                );
                if args.payload {
                    show!("  {}", String::from_utf8_lossy(&message.payload));
                }
            }
        }
    }
    let refused = rows.iter().filter(|row| row.message.is_err()).count();
    say!("postroom: {} rows looked at, {refused} refused; nothing was changed", rows.len());
    Ok(())
}

fn shown(row: &Previewed, payload: bool) -> serde_json::Value {
    match &row.message {
        Err(error) => serde_json::json!({ "row": row.row, "refused": error }),
        Ok(message) => {
            let mut object = serde_json::json!({
                "row": row.row, "id": message.id, "topic": message.topic, "type": message.kind, "key": message.key,
                "aggregate_type": message.aggregate_type, "aggregate_id": message.aggregate_id, "aggregate_version": message.aggregate_version,
                "routing_key": message.routing_key, "content_type": message.content_type, "tenant_id": message.tenant_id,
                "headers": message.headers, "payload_bytes": message.payload.len(), "delay_seconds": message.delay.as_secs_f64(),
            });
            if payload {
                object["payload"] = String::from_utf8_lossy(&message.payload).into();
            }
            object
        }
    }
}

async fn again(args: AgainArgs, json: bool) -> Result<(), Failure> {
    let (config, store) = args.of.load().await?;
    let taken = named(&config, &args.name)?;
    let deed = args.deed.deed()?;
    let rows = intakes_of(store.as_ref())?.take_again(&taken.intake, args.row.as_deref(), &deed).await?;
    if let (0, Some(row)) = (rows, &args.row) {
        let text =
            format!("row {row:?} is not set aside; `postroom intake list` shows those that are. Nothing was changed");
        return Err(Failure::new(exit::FAILURE, text));
    }
    match json {
        true => show!("{}", serde_json::json!({ "rows": rows })),
        false => show!("{rows} rows can be taken again"),
    }
    Ok(())
}

async fn free(args: FreeArgs, json: bool) -> Result<(), Failure> {
    let (config, store) = args.of.load().await?;
    let taken = named(&config, &args.name)?;
    let Some(stuck) = &taken.stuck else {
        let text = format!(
            "intake {}: nothing says which rows are stuck; add stuck = {{ rows = {{ … }}, set = {{ … }} }} to its [[intake]]",
            args.name
        );
        return Err(Failure::new(exit::CONFIG, text));
    };
    let deed = args.deed.deed()?;
    let intakes = intakes_of(store.as_ref())?;
    let mut rows = 0;
    loop {
        match intakes.free_rows(&taken.intake, stuck, args.older_than, FREED_AT_ONCE, &deed).await {
            Ok(0) => break,
            Ok(freed) => rows += freed,
            Err(error) => {
                if rows > 0 {
                    say!("postroom: {rows} rows were given back before this failed");
                }
                return Err(error.into());
            }
        }
    }
    match json {
        true => show!("{}", serde_json::json!({ "rows": rows })),
        false => show!("{rows} rows were given back"),
    }
    Ok(())
}
