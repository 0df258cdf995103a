//! Order, payment and inventory: three services with a database each, and RabbitMQ between them. The payment service is
//! killed in the middle of its work and started again. Ends with a ledger that is computed from the three databases.

mod events;
mod process;
mod services;

use std::process::{ExitCode, Stdio};
use std::time::{Duration, Instant};

use clap::{Parser, Subcommand};
use postroom::{BoxError, MessageId};
use postroom_postgres::{Connector, migrate};
use tokio::process::{Child, Command};
use tokio_postgres::Client;

use services::Service;

/// Checks out orders through three services, one of which dies on the way, and shows that each order ended once.
#[derive(Debug, Parser)]
#[command(name = "checkout", max_term_width = 120)]
struct Args {
    #[command(subcommand)]
    process: Option<Process>,
    /// PostgreSQL server on which each service gets a database of its own, dropped at the end
    #[arg(long, global = true, value_name = "URL", default_value = "postgres://postgres@localhost/postgres")]
    store: String,
    /// RabbitMQ between them
    #[arg(long, global = true, value_name = "URL", default_value = "amqp://guest:guest@localhost:5672/%2f")]
    rabbitmq: String,
    /// Orders to place
    #[arg(long, default_value_t = 2000, value_name = "N")]
    orders: i64,
}

#[derive(Debug, Subcommand)]
enum Process {
    /// One service; started by this program itself
    Service {
        service: Service,
        /// Its exchange
        exchange: String,
    },
}

/// Without any progress for so long, what is missing counts as lost.
const PATIENCE: Duration = Duration::from_secs(60);

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    let ended = match &args.process {
        Some(Process::Service { service, exchange }) => {
            process::run(*service, &args.store, &args.rabbitmq, exchange).await.map(|()| true)
        }
        None => checkout(&args).await,
    };
    match ended {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("checkout: failed: {error}");
            ExitCode::FAILURE
        }
    }
}

/// A service, its database, and the process that runs it.
struct Running {
    service: Service,
    store: String,
    client: Client,
    process: Child,
}

async fn checkout(args: &Args) -> Result<bool, BoxError> {
    let exchange = format!("checkout-{}", MessageId::new());
    let admin = Connector::new(&args.store)?.connect().await?;
    let mut all = Vec::new();
    for service in Service::ALL {
        let database = format!("{exchange}-{}", service.name());
        admin.batch_execute(&format!("create database \"{database}\"")).await?;
        let store = with_database(&args.store, &database)?;
        let connector = Connector::new(&store)?;
        migrate(&connector, 8).await?;
        let client = connector.connect().await?;
        client.batch_execute(service.tables()).await?;
        // Declared before anything is sent, so that no queue misses a message.
        process::subscription(service, &args.rabbitmq, &exchange)?.connect().await?;
        let process = start(service, &store, &args.rabbitmq, &exchange)?;
        all.push(Running { service, store, client, process });
    }
    let balanced = through(args, &exchange, &mut all).await;
    for running in all {
        stop(running.process).await?;
        drop(running.client);
        admin.batch_execute(&format!("drop database \"{exchange}-{}\" with (force)", running.service.name())).await?;
    }
    balanced
}

async fn through(args: &Args, exchange: &str, all: &mut [Running]) -> Result<bool, BoxError> {
    let [orders, payments, inventory] = all else { return Err("there are three services".into()) };
    for order in 0..args.orders {
        let mut tx = orders.client.transaction().await?;
        services::place(&mut tx, format!("order-{order}"), 1000 + order).await?;
        tx.commit().await?;
        if order == args.orders / 2 {
            // kill -9, in the middle of whatever it does.
            payments.process.kill().await?;
            println!("the payment service was killed");
            payments.process = start(payments.service, &payments.store, &args.rabbitmq, exchange)?;
        }
    }
    let (mut best, mut since) = (0, Instant::now());
    loop {
        let ended = count(&orders.client, "select count(*) from orders where state <> 'placed'").await?;
        if ended >= args.orders || since.elapsed() > PATIENCE {
            break;
        }
        if ended > best {
            (best, since) = (ended, Instant::now());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let lines = [
        ("orders placed", count(&orders.client, "select count(*) from orders").await?, args.orders),
        (
            "orders that ended",
            count(&orders.client, "select count(*) from orders where state <> 'placed'").await?,
            args.orders,
        ),
        ("ended more than once", count(&orders.client, "select count(*) from orders where changes > 1").await?, 0),
        ("payments", count(&payments.client, "select count(*) from payments").await?, args.orders),
        (
            "orders paid for",
            count(&payments.client, "select count(distinct order_id) from payments").await?,
            args.orders,
        ),
        (
            "goods reserved, of orders confirmed",
            count(&inventory.client, "select count(*) from reservations").await?,
            count(&orders.client, "select count(*) from orders where state = 'confirmed'").await?,
        ),
        (
            "orders cancelled, of payments refused",
            count(&orders.client, "select count(*) from orders where state = 'cancelled'").await?,
            count(&payments.client, "select count(*) from payments where not taken").await?,
        ),
        (
            "messages that could not be handled",
            count(&payments.client, "select count(*) from postroom.dead_consume").await?,
            0,
        ),
    ];
    for (what, found, expected) in lines {
        println!("{what:<40}{found:>8}   {}", if found == expected { "as it should be" } else { "WRONG" });
    }
    Ok(lines.iter().all(|(_, found, expected)| found == expected))
}

async fn count(client: &Client, sql: &str) -> Result<i64, BoxError> {
    Ok(client.query_one(sql, &[]).await?.try_get(0)?)
}

fn start(service: Service, store: &str, rabbitmq: &str, exchange: &str) -> Result<Child, BoxError> {
    let process = Command::new(std::env::current_exe()?)
        .args(["service", service.name(), exchange, "--store", store, "--rabbitmq", rabbitmq])
        .stdin(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    Ok(process)
}

/// The end of its standard input stops a service in order.
async fn stop(mut process: Child) -> Result<(), BoxError> {
    drop(process.stdin.take());
    let status = process.wait().await?;
    if status.success() { Ok(()) } else { Err(format!("a service ended with {status}").into()) }
}

/// The same server, another database.
fn with_database(url: &str, database: &str) -> Result<String, BoxError> {
    let (address, parameters) = url.split_once('?').map_or((url, None), |(address, rest)| (address, Some(rest)));
    let (server, _) = address.rsplit_once('/').ok_or("--store wants postgres://USER@HOST/DATABASE")?;
    let parameters = parameters.map_or_else(String::new, |parameters| format!("?{parameters}"));
    Ok(format!("{server}/{database}{parameters}"))
}
