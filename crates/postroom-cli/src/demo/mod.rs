//! `postroom demo`: an order service on SQLite, a relay, an in-process broker and an inbox consumer, with the failures that
//! happen in production. It ends with a ledger that is computed from the tables and the broker's log.

mod ledger;
mod projection;
mod shop;
mod trouble;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use postroom::{MessageId, Route, Store, TopicFilter, Wake};
use postroom_brokers::in_process::InProcessBroker;
use postroom_relay::Relay;
use postroom_sqlite::Database;
use tokio::sync::{oneshot, watch};

use crate::exit::{self, Failure};
use crate::say::show;
use ledger::{Files, Ledger};
use trouble::SendsSomeTwice;

const QUEUE: &str = "order-totals";
const ROUTE: &str = "demo";
/// When things happen, since the start.
const CONSUMER_CRASHES_AT: Duration = Duration::from_secs(3);
const BROKER_STOPS_AT: Duration = Duration::from_secs(5);
const BROKER_STARTS_AT: Duration = Duration::from_secs(8);
const SHOP_CLOSES_AT: Duration = Duration::from_secs(11);
/// The demo gives up here and shows what is missing.
const DEADLINE: Duration = Duration::from_secs(27);
const TICK: Duration = Duration::from_millis(500);

#[derive(Debug, Args)]
pub struct DemoArgs {
    /// Keep the database files in this folder instead of a temporary one
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

pub async fn demo(args: DemoArgs, json: bool) -> Result<(), Failure> {
    let (dir, temporary) = match args.dir {
        Some(dir) => (dir, false),
        None => (std::env::temp_dir().join(format!("postroom-demo-{}", MessageId::new())), true),
    };
    std::fs::create_dir_all(&dir)
        .map_err(|error| Failure::new(exit::FAILURE, format!("failed to create {}: {error}", dir.display())))?;
    let result = play(&dir, json).await;
    if temporary {
        // Files left in the temporary folder do no harm.
        let _ = std::fs::remove_dir_all(&dir);
    }
    let ledger = result?;
    if json {
        show!("{}", serde_json::to_string(&ledger).map_err(|error| Failure::of(exit::FAILURE, &error))?);
    } else {
        crate::say::to_stdout_as_it_is(ledger.table().trim_end());
        if ledger.balances() {
            show!("");
            show!("Next, with your own PostgreSQL and RabbitMQ:");
            show!("  postroom init      # writes a commented postroom.toml");
            show!("  postroom migrate   # creates the tables");
            show!("  postroom check     # says what is missing");
            show!("  postroom run       # relays what `select postroom.enqueue(...)` writes");
            show!("README.md has the whole path, in five minutes.");
        }
    }
    if ledger.balances() {
        Ok(())
    } else {
        Err(Failure::new(exit::FAILURE, "the ledger does not balance: this is a bug in postroom, please report it"))
    }
}

/// What the screen shows while it runs.
struct Screen {
    began: Instant,
    quiet: bool,
}

impl Screen {
    fn say(&self, text: &str) {
        if !self.quiet {
            println!("{:5.1} s  {text}", self.began.elapsed().as_secs_f64());
        }
    }
}

async fn play(dir: &Path, json: bool) -> Result<Ledger, Failure> {
    let files = Files::new(dir);
    shop::prepare(&files)?;
    projection::prepare(&files)?;
    let screen = Screen { began: Instant::now(), quiet: json };
    screen.say("an order service writes orders and messages to SQLite; one transaction in ten rolls back");
    screen.say("a relay publishes them to a broker in this process, and sends some twice on purpose");
    screen.say("a consumer with an inbox adds them up, each once");

    let broker = InProcessBroker::new();
    broker.declare_queue(QUEUE, TopicFilter::all());
    let wake = Wake::new();
    let (stop, stopped) = watch::channel(false);
    let until = |mut stopped: watch::Receiver<bool>| async move {
        let _ = stopped.wait_for(|stopped| *stopped).await;
    };
    let route = Route::new(ROUTE);
    let source = Database::new(&files.shop).source(&route, &format!("demo/{}", MessageId::new())).await?;
    let sink = Arc::new(SendsSomeTwice::new(broker.sink()));
    let relay = Relay::new(route, source, sink).wake_by(wake.clone());
    let relay = tokio::spawn(relay.run(until(stopped.clone())));
    let (close, closed) = oneshot::channel();
    let shop = tokio::task::spawn_blocking({
        let (files, wake) = (files.clone(), wake.clone());
        move || shop::sell(&files, &wake, closed)
    });
    let consume = |crash: bool| -> Result<_, Failure> {
        let (crashed, crash_seen) = oneshot::channel();
        let receiver = projection::receiver(&files, broker.subscribe(QUEUE, 50), crash.then_some(crashed))?;
        Ok((tokio::spawn(receiver.run(until(stopped.clone()))), crash_seen))
    };
    let (consumer, _) = consume(false)?;
    let mut consumer = Some(consumer);
    let mut close = Some(close);

    let (mut crashed, mut down, mut up) = (false, false, false);
    loop {
        tokio::time::sleep(TICK).await;
        let elapsed = screen.began.elapsed();
        screen.say(&ledger::progress(&files, &broker)?);
        if elapsed >= CONSUMER_CRASHES_AT && !crashed {
            crashed = true;
            if let Some(running) = consumer.take() {
                running.abort();
                // The abort is intended.
                let _ = running.await;
            }
            // This one dies between its commit and its ack: the message is delivered again, but its effect must not be applied again.
            let (dying, seen) = consume(true)?;
            let _ = seen.await;
            dying.abort();
            let _ = dying.await;
            consumer = Some(consume(false)?.0);
            screen
                .say("!! the consumer crashed after a commit, before the ack; a new one starts and receives the message again");
        }
        if elapsed >= BROKER_STOPS_AT && !down {
            down = true;
            broker.stop();
            screen.say("!! the broker is down; orders are still written");
        }
        if elapsed >= BROKER_STARTS_AT && !up {
            up = true;
            broker.start();
            screen.say("!! the broker is back");
        }
        if elapsed >= SHOP_CLOSES_AT
            && let Some(close) = close.take()
        {
            let _ = close.send(());
            screen.say("the shop closes; the remaining messages are delivered");
        }
        let quiet = close.is_none() && shop.is_finished() && ledger::is_drained(&files, &broker)?;
        if quiet || elapsed >= DEADLINE {
            break;
        }
    }
    if let Some(close) = close.take() {
        let _ = close.send(());
    }
    shop.await.map_err(|error| Failure::of(exit::FAILURE, &error))??;
    let _ = stop.send(true);
    relay.await.map_err(|error| Failure::of(exit::FAILURE, &error))?;
    if let Some(consumer) = consumer {
        let ended = consumer.await.map_err(|error| Failure::of(exit::FAILURE, &error))?;
        ended.map_err(|error| Failure::of(exit::FAILURE, &error))?;
    }
    screen.say("everything stopped; the ledger is computed from the tables and the broker's log\n");
    Ledger::compute(&files, &broker)
}
