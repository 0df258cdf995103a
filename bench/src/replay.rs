//! A replay of many messages beside new traffic, by relays that are killed: what new messages pay for it, and whether the report is exact.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use postroom::{
    Answer, Arrival, Bound, BoxError, Message, MessageId, OperationState, Operator, Outbox, ShownOperation,
    Subscription,
};
use postroom_brokers::rabbitmq::{Binding, RabbitmqSubscription, RabbitmqSubscriptionOptions};
use postroom_postgres::Postgres;
use postroom_testkit::postgres::Database;
use postroom_testkit::surroundings;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::measure::{Report, percentile};
use crate::setup;

const NEW_RATE: u64 = 1000;
const BASELINE: Duration = Duration::from_secs(60);
const KILLS_AT: [f64; 3] = [0.6, 0.75, 0.9];

/// The `postroom` program beside this one, as a process.
struct Relay {
    config: PathBuf,
    process: Child,
    /// Most memory that any of its processes had, in MiB.
    memory: f64,
}

impl Relay {
    fn start(config: PathBuf) -> Result<Self, BoxError> {
        let process = Self::run(&config)?;
        Ok(Self { config, process, memory: 0.0 })
    }

    fn run(config: &PathBuf) -> Result<Child, BoxError> {
        let program = std::env::current_exe()?.with_file_name("postroom");
        let log = std::fs::File::options().create(true).append(true).open(config.with_file_name("relay.log"))?;
        let mut run = Command::new(program);
        // It rejects variables of ours that it does not know.
        Ok(run.env_clear().args(["run", "--config"]).arg(config).stdout(Stdio::null()).stderr(log).spawn()?)
    }

    fn look(&mut self) -> Result<(), BoxError> {
        if let Some(status) = self.process.try_wait()? {
            return Err(format!(
                "the relay ended ({status}): see {}",
                self.config.with_file_name("relay.log").display()
            )
            .into());
        }
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.process.id())).unwrap_or_default();
        let line = text.lines().find(|line| line.starts_with("VmHWM:")).unwrap_or_default();
        let kib = line.split_whitespace().nth(1).and_then(|kib| kib.parse::<f64>().ok()).unwrap_or_default();
        self.memory = self.memory.max(kib / 1024.0);
        Ok(())
    }

    /// As `kill -9` does, and at once another one.
    fn kill_and_start(&mut self) -> Result<(), BoxError> {
        self.look()?;
        self.process.kill()?;
        self.process.wait()?;
        self.process = Self::run(&self.config)?;
        Ok(())
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// What came out of the broker.
enum Came {
    Old { key: usize, number: usize },
    New { id: MessageId, at: Instant },
}

/// Replays all of them at this rate while new ones flow, and kills the relay three times on the way.
pub async fn beside_new_traffic(report: &mut Report, messages: usize, rate: u32) -> Result<(), BoxError> {
    let (database, client) = setup::database().await?;
    setup::fill(&client, messages).await?;
    let exchange = format!("replay-{}", surroundings::unique());
    let (came, mut coming) = mpsc::unbounded_channel();
    let mut tasks = JoinSet::new();
    let subscription = Arc::new(RabbitmqSubscription::new(RabbitmqSubscriptionOptions {
        url: surroundings::rabbitmq_url(),
        queue: exchange.clone(),
        bind: vec![Binding::new(&exchange, "orders.#")],
        prefetch: 2000,
        unsettled_bytes_max: 64 << 20,
    })?);
    subscription.connect().await?;
    tasks.spawn(receive(subscription, came));
    let config = surroundings::scratch("bench-replay").join("postroom.toml");
    let text = format!(
        "[store]\nurl = {:?}\n[[routes]]\nname = \"bench\"\ntopics = [\"orders\"]\nstart_at = \"now\"\n\
         [routes.sink]\nkind = \"rabbitmq\"\nurl = {:?}\nexchange = {exchange:?}\n",
        database.url(),
        surroundings::rabbitmq_url()
    );
    std::fs::write(&config, text)?;
    let mut relay = Relay::start(config.clone())?;
    let held = "select count(*) > 0 from postroom.lanes where owner is not null";
    while !client.query_one(held, &[]).await?.get::<_, bool>(0) {
        relay.look()?;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let stop = Arc::new(AtomicBool::new(false));
    let written = Arc::new(AtomicUsize::new(0));
    let (committed, mut commits) = mpsc::unbounded_channel();
    for writer in 0..2 {
        let (database, stop, written, committed) = (database.clone(), stop.clone(), written.clone(), committed.clone());
        tasks.spawn(async move { write(&database, writer, &stop, &written, &committed).await });
    }
    drop(committed);

    let store = postroom_postgres::Database::new(database.url())?;
    let began = Instant::now();
    let mut operation: Option<(String, Instant)> = None;
    let (mut kills, mut shown) = (0, None::<ShownOperation>);
    let (mut done_at, mut over) = (None::<Instant>, None::<Instant>);
    let (mut without, mut during) = (Vec::new(), Vec::new());
    let mut open: HashMap<MessageId, Instant> = HashMap::new();
    let mut early: HashMap<MessageId, Instant> = HashMap::new();
    let (mut new, mut old) = (0_usize, HashSet::with_capacity(messages));
    let mut newest = vec![0_usize; setup::KEYS];
    let (mut repeated, mut inversions) = (0_usize, 0_usize);
    let mut ticks = tokio::time::interval(Duration::from_secs(1));
    loop {
        let mut latency = None;
        tokio::select! {
            Some((id, at)) = commits.recv() => match early.remove(&id) {
                Some(seen) => { new += 1; latency = Some(seen.saturating_duration_since(at)); }
                None => { open.insert(id, at); }
            },
            Some(came) = coming.recv() => match came {
                Came::New { id, at } => match open.remove(&id) {
                    Some(commit) => { new += 1; latency = Some(at.saturating_duration_since(commit)); }
                    // Its commit has not been told yet, or it comes again after a kill.
                    None => { early.insert(id, at); }
                },
                Came::Old { key, number } => {
                    if old.insert(number) {
                        inversions += usize::from(number < newest[key]);
                        newest[key] = newest[key].max(number);
                    } else {
                        repeated += 1;
                    }
                }
            },
            Some(ended) = tasks.join_next() => ended??,
            _ = ticks.tick() => {
                relay.look()?;
                if operation.is_none() && began.elapsed() > BASELINE {
                    operation = Some((begin(&database, rate).await?, Instant::now()));
                }
                if let Some((id, _)) = &operation && done_at.is_none() {
                    let found = store.operations(Some(id.parse()?), 1).await?.into_iter().next().ok_or("no operation")?;
                    let part = found.done as f64 / messages as f64;
                    if kills < KILLS_AT.len() && part > KILLS_AT[kills] {
                        eprintln!("  kill -9 at {:.0}%", part * 100.0);
                        relay.kill_and_start()?;
                        kills += 1;
                    }
                    if found.state == OperationState::Done {
                        done_at = Some(Instant::now());
                    }
                    shown = Some(found);
                }
                if over.is_none() && done_at.is_some_and(|at| at.elapsed() > BASELINE) {
                    over = Some(Instant::now());
                    stop.store(true, Ordering::Relaxed);
                }
                if let Some(at) = over {
                    let all = written.load(Ordering::Relaxed);
                    if open.is_empty() && old.len() == messages && new >= all {
                        break;
                    }
                    if at.elapsed() > Duration::from_secs(120) {
                        return Err(format!("{} of {messages} old messages and {new} of {all} new ones came", old.len()).into());
                    }
                }
            }
        }
        if let Some(latency) = latency {
            // The first seconds are of a relay that begins, or that was killed.
            let quiet = |since: Instant| since.elapsed() > Duration::from_secs(10);
            let times = match (&operation, done_at) {
                (None, _) => quiet(began).then_some(&mut without),
                (Some(_), Some(done_at)) => (quiet(done_at) && over.is_none()).then_some(&mut without),
                (Some(_), None) => (kills == 0).then_some(&mut during),
            };
            times.into_iter().for_each(|times| times.push(latency.as_secs_f64() * 1000.0));
        }
    }
    let shown = shown.ok_or("nothing was replayed")?;
    let (done, failed) = (shown.done as usize, shown.failed.values().sum::<i64>());
    if done != messages || failed != 0 || shown.removed != 0 || inversions > 0 {
        return Err(
            format!("the report says {done} of {messages} and {failed} dead; {inversions} came out of order").into()
        );
    }
    let row = |name: &str, value: f64| (name.to_owned(), vec![value]);
    report.table(
        format!("From the commit to the consumer at {NEW_RATE}/s"),
        "ms",
        vec![
            row("p50 without a replay", percentile(&without, 0.5)),
            row("p50 during it", percentile(&during, 0.5)),
            row("p99 without a replay", percentile(&without, 0.99)),
            row("p99 during it", percentile(&during, 0.99)),
        ],
    );
    report.note(format!(
        "p99 during the replay, until the first kill, is {:.2} times that of a minute before and a minute after it",
        percentile(&during, 0.99) / percentile(&without, 0.99)
    ));
    report.table(
        format!("A replay of {messages} messages at up to {rate}/s beside new traffic, the relay killed {kills} times"),
        "see row",
        vec![
            row("replayed, messages/s", messages as f64 / shown.lasted_seconds),
            row("came twice after kills, messages", repeated as f64),
            row("most memory of the relay, MiB", relay.memory),
        ],
    );
    Ok(())
}

/// Begins the operation as an operator would.
async fn begin(database: &Database, rate: u32) -> Result<String, BoxError> {
    let (program, url) = (std::env::current_exe()?.with_file_name("postroom"), database.url().to_owned());
    let rate = rate.to_string();
    let began = tokio::task::spawn_blocking(move || {
        let arguments =
            ["replay", "--json", "--type", "order.placed", "--rate", &rate, "--reason", "a benchmark", "--store", &url];
        Command::new(program).env_clear().args(arguments).output()
    });
    let output = began.await??;
    let said: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let id = said.get("operation").and_then(|id| id.as_str());
    Ok(id.ok_or_else(|| format!("no operation began: {said} {}", String::from_utf8_lossy(&output.stderr)))?.to_owned())
}

async fn receive(subscription: Arc<RabbitmqSubscription>, came: mpsc::UnboundedSender<Came>) -> Result<(), BoxError> {
    loop {
        let Arrival::Messages(received) = subscription.receive(Bound { messages: 256, bytes: 8 << 20 }).await? else {
            continue;
        };
        let at = Instant::now();
        let answers: Vec<_> = received.iter().map(|received| (received.receipt, Answer::Ack)).collect();
        for received in received {
            let message = received.message;
            if message.kind == "order.new" {
                let _ = came.send(Came::New { id: message.id, at });
                continue;
            }
            let text = String::from_utf8_lossy(&message.payload);
            let number = text.split(|c: char| !c.is_ascii_digit()).find(|part| !part.is_empty());
            let number: usize = number.ok_or("a message without its number")?.parse()?;
            let _ = came.send(Came::Old { key: number % setup::KEYS, number });
        }
        subscription.settle(&answers).await?;
    }
}

async fn write(
    database: &Database,
    writer: u64,
    stop: &AtomicBool,
    written: &AtomicUsize,
    committed: &mpsc::UnboundedSender<(MessageId, Instant)>,
) -> Result<(), BoxError> {
    let mut client = database.connect().await;
    let began = Instant::now();
    for n in 0.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let due = began + Duration::from_secs_f64((n * 2 + writer) as f64 / NEW_RATE as f64);
        tokio::time::sleep_until(due.into()).await;
        // Keys of their own: one whose old messages are replayed waits for them, as it should.
        let message = Message::new("orders", "order.new", vec![b'x'; setup::PAYLOAD])
            .key(format!("new-{writer}-{}", n % 1000))
            .routing_key("orders.new");
        let id = message.id;
        let mut tx = client.transaction().await?;
        Postgres.enqueue(&mut tx, &[message]).await?;
        tx.commit().await?;
        written.fetch_add(1, Ordering::Relaxed);
        let _ = committed.send((id, Instant::now()));
    }
    Ok(())
}
