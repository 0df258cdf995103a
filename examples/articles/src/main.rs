//! The systems of five articles about the outbox, as they are printed there: their tables, and writers that know nothing of postroom. `postroom run`
//! is the relay of each, and dies once in the middle; a consumer with an inbox applies what arrives. Ends with a ledger that is
//! computed from the tables.

mod consumer;
mod databases;
mod ledger;
mod process;
mod systems;
mod writers;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use postroom::BoxError;

use databases::On;
use ledger::Ledger;
use systems::SYSTEMS;

/// Runs each of them, and shows the ledgers.
#[derive(Debug, Parser)]
#[command(name = "articles", max_term_width = 120)]
struct Args {
    /// A PostgreSQL server, by a database whose role may create others; each system gets its own
    #[arg(long, value_name = "URL")]
    store: String,
    /// A MariaDB server, by a database whose user may create others; without it, the task table is left out
    #[arg(long, value_name = "URL")]
    mariadb: Option<String>,
    /// An empty database of a SQL Server, `sqlserver://…`; without it, the table on SQL Server is left out. The postroom binary needs its feature `mssql`
    #[arg(long, value_name = "URL")]
    mssql: Option<String>,
    /// RabbitMQ to publish to; exchanges and queues of the example get names of their own
    #[arg(long, value_name = "URL")]
    rabbitmq: String,
    /// Run this system alone; the ledgers name them
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
    /// Messages that each system commits
    #[arg(long, default_value_t = 2_000, value_name = "N")]
    messages: usize,
    /// The postroom binary; by default the one beside this program
    #[arg(long, value_name = "FILE")]
    postroom: Option<PathBuf>,
    /// Print the ledgers as one JSON object
    #[arg(long)]
    json: bool,
}

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    match run(&args).await {
        Ok((ledgers, left_out)) => {
            if args.json {
                println!("{}", serde_json::json!({ "systems": ledgers, "left_out": left_out }));
            } else {
                print!("\n{}", ledger::table(&ledgers));
                left_out.iter().for_each(|what| println!("not run: {what}"));
            }
            if ledgers.iter().all(Ledger::balances) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => {
            eprintln!("articles: failed: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: &Args) -> Result<(Vec<Ledger>, Vec<&'static str>), BoxError> {
    let mut ledgers = Vec::new();
    let mut left_out = Vec::new();
    if let Some(only) = args.only.as_deref().filter(|only| SYSTEMS.iter().all(|system| system.name != *only)) {
        let names: Vec<&str> = SYSTEMS.iter().map(|system| system.name).collect();
        return Err(format!("there is no system {only:?}; there are {}", names.join("; ")).into());
    }
    for system in SYSTEMS.iter().filter(|system| args.only.as_ref().is_none_or(|only| system.name == only)) {
        if system.on == On::Mariadb && args.mariadb.is_none() {
            left_out.push("the third article's task table: --mariadb names no server");
            continue;
        }
        if system.on == On::Mssql && args.mssql.is_none() {
            left_out.push("the fourth article's table on SQL Server: --mssql names no database");
            continue;
        }
        if !args.json {
            println!("{}: {}", system.name, system.about);
        }
        let ledger = systems::run(args, system).await.map_err(|error| format!("{}: {error}", system.name))?;
        ledgers.push(ledger);
    }
    Ok((ledgers, left_out))
}
