//! Benchmarks. Every figure stands behind a gate: a run that lost, repeated or (where order is promised) reordered a message
//! has no figure. Rounds of rivals are interleaved in one run; what is reported are medians, spread and ratios.
//!
//! `cargo xtask bench` starts the servers and runs it.

mod admission;
mod articles;
mod brokers;
mod claim_cost;
mod drain;
mod immediate;
mod latency;
mod mariadb;
mod measure;
mod ours;
mod replay;
mod resources;
mod retention;
mod rivals;
mod setup;

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use measure::Report;
use postroom::BoxError;

/// What to measure, and how much of it.
#[derive(Debug, Parser)]
struct Args {
    /// Only these: drain, null, poison, claim, latency, held, business, steady, idle, admission, retention, replay, mariadb, immediate,
    /// writers, a-table, brokers
    only: Vec<String>,
    /// Rounds of each rival
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Backlog of a drain
    #[arg(long, default_value_t = 200_000)]
    messages: usize,
    /// Largest backlog at which a claim is measured
    #[arg(long, default_value_t = 1_000_000)]
    backlog: usize,
    /// Rows of the inbox at which admission is measured
    #[arg(long, default_value_t = 1_000_000)]
    history: usize,
    /// How long the snapshot is held
    #[arg(long, default_value_t = 60)]
    held_seconds: u64,
    /// How long the stream runs whose messages are kept for five minutes, once for each way to remove them. This benchmark runs only
    /// when it is named
    #[arg(long, default_value_t = 30)]
    retention_minutes: u64,
    /// Messages that are replayed beside new traffic. This benchmark, too, runs only when it is named
    #[arg(long, default_value_t = 1_000_000)]
    replayed: usize,
    /// Messages a second of the replay
    #[arg(long, default_value_t = 2000)]
    replay_rate: u32,
    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
}

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    let mut report = Report::default();
    let result = run(&args, &mut report).await;
    if args.json {
        println!("{}", report.json());
    } else {
        print!("{}", report.tables());
    }
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error}: {error:?}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: &Args, report: &mut Report) -> Result<(), BoxError> {
    setup::autovacuum_as_shipped().await?;
    let wanted = |name: &str| args.only.is_empty() || args.only.iter().any(|only| only == name);
    if wanted("drain") {
        drain::to_rabbitmq(report, args.messages, args.rounds).await?;
    }
    if wanted("null") {
        drain::to_nowhere(report, args.messages.max(500_000), args.rounds).await?;
    }
    if wanted("poison") {
        drain::with_poison(report, args.messages / 2, args.rounds).await?;
    }
    if wanted("claim") {
        claim_cost::by_backlog(report, args.backlog).await?;
    }
    if wanted("latency") {
        latency::by_rate(report).await?;
    }
    if wanted("held") {
        latency::under_a_held_snapshot(report, args.held_seconds, args.rounds).await?;
    }
    if wanted("business") {
        latency::of_business_transactions(report, args.rounds).await?;
    }
    if wanted("steady") {
        drain::steady(report, args.rounds).await?;
    }
    if wanted("idle") {
        resources::idle(report).await?;
    }
    if wanted("admission") {
        admission::by_history(report, args.rounds, args.history).await?;
    }
    // These take long, or start a server of their own: only when they are asked for.
    if args.only.iter().any(|only| only == "mariadb") {
        mariadb::four_relays(report, args.messages, args.rounds).await?;
    }
    if args.only.iter().any(|only| only == "writers") {
        articles::writers_cost_on_mariadb(report, args.rounds).await?;
    }
    if args.only.iter().any(|only| only == "a-table") {
        articles::a_table(report, args.messages, args.rounds).await?;
    }
    if args.only.iter().any(|only| only == "brokers") {
        brokers::drain(report, args.messages, args.rounds).await?;
        brokers::latency(report).await?;
    }
    if args.only.iter().any(|only| only == "immediate") {
        immediate::on_each_store(report).await?;
    }
    if args.only.iter().any(|only| only == "retention") {
        let times =
            retention::Times { run: Duration::from_secs(args.retention_minutes * 60), keep: Duration::from_secs(300) };
        retention::compared(report, times).await?;
    }
    if args.only.iter().any(|only| only == "replay") {
        replay::beside_new_traffic(report, args.replayed, args.replay_rate).await?;
    }
    Ok(())
}
