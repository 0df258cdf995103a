//! An order service on PostgreSQL: eight writers place orders and enqueue messages in the same transactions, `postroom run`
//! relays them to RabbitMQ, a shipping service applies them through an inbox. Ends with a ledger that is computed from the
//! database and from the broker's queue, never from counters of the code under test.

mod audit;
mod ledger;
mod relay;
mod shipping;
mod writers;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use postroom::{BoxError, MessageId};
use postroom_postgres::Connector;
use tokio::sync::watch;

use ledger::Ledger;

/// Places orders, relays and applies them, and shows the ledger.
#[derive(Debug, Parser)]
#[command(name = "orders", max_term_width = 120)]
struct Args {
    /// PostgreSQL database to work in; the tables of the example are created anew in the schema `orders_example`
    #[arg(long, value_name = "URL")]
    store: String,
    /// RabbitMQ to publish to; exchange and queues of the example get names of their own
    #[arg(long, value_name = "URL")]
    rabbitmq: String,
    /// Orders to commit
    #[arg(long, default_value_t = 100_000, value_name = "N")]
    orders: usize,
    /// Concurrent writers
    #[arg(long, default_value_t = 8, value_name = "N")]
    writers: usize,
    /// The postroom binary; by default the one beside this program
    #[arg(long, value_name = "FILE")]
    postroom: Option<std::path::PathBuf>,
    /// Print the ledger as one JSON object
    #[arg(long)]
    json: bool,
}

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    match run(&args).await {
        Ok(ledger) => {
            if args.json {
                println!("{}", ledger.json());
            } else {
                print!("{}", ledger.table());
            }
            if ledger.balances() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => {
            eprintln!("orders: failed: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Without any progress for so long, what is missing counts as lost.
const PATIENCE: Duration = Duration::from_secs(60);

async fn run(args: &Args) -> Result<Ledger, BoxError> {
    let connector = Connector::new(&args.store)?;
    postroom_postgres::migrate(&connector, postroom::LANES_DEFAULT).await?;
    let client = connector.connect().await?;
    client.batch_execute(include_str!("tables.sql")).await?;

    // A route, an exchange and queues of this run alone; other messages of the database are not its business.
    let run = format!("orders-example-{}", MessageId::new());
    let audit = audit::Audit::begin(&args.rabbitmq, &run).await?;
    let (stop, stopped) = watch::channel(false);
    let shipping = shipping::begin(&connector, &args.rabbitmq, &run, stopped).await?;
    let mut relay = relay::start(args, &run)?;

    let began = Instant::now();
    let say = |text: &str| {
        if !args.json {
            println!("{:6.1} s  {text}", began.elapsed().as_secs_f64());
        }
    };
    say(&format!("{} writers place {} orders; one transaction in ten rolls back", args.writers, args.orders));
    let mut writing = writers::begin(&connector, &run, args.writers, args.orders);
    let mut tried = None;
    let (mut effects, mut progressed) = (0, Instant::now());
    loop {
        tokio::select! {
            all = &mut writing, if tried.is_none() => {
                tried = Some(all??);
                say("all orders are placed");
            }
            () = tokio::time::sleep(Duration::from_millis(500)) => {}
        }
        let row = client
            .query_one(
                "select (select count(*) from orders_example.committed),
                                           (select count(*) from orders_example.effects)",
                &[],
            )
            .await?;
        let (committed, applied): (i64, i64) = (row.get(0), row.get(1));
        if applied != effects {
            (effects, progressed) = (applied, Instant::now());
        }
        say(&format!("committed {committed:>7}   stored by the broker {:>7}   shipped {applied:>7}", audit.seen()));
        let complete = applied >= committed && audit.distinct() as i64 >= committed;
        if tried.is_some() && (complete || progressed.elapsed() > PATIENCE) {
            break;
        }
    }
    let seconds = began.elapsed().as_secs_f64();
    relay::stop(&mut relay).await?;
    stop.send(true)?;
    shipping.await?;
    let stored = audit.end().await;
    say("everything stopped; the ledger is computed from the database and the broker's queue\n");
    Ledger::compute(&client, &tried.unwrap_or_default(), &stored, seconds).await
}
