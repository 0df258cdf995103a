//! Several processes that fill one inbox, and tasks of one process that panic.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use postroom::{Batch, Message, Sink, Verdict};
use postroom_brokers::rabbitmq::{RabbitmqOptions, RabbitmqSink};
use postroom_testkit::postgres::Database;
use postroom_testkit::rabbitmq::AuditQueue;
use postroom_testkit::surroundings;
use tokio_postgres::Client;

use crate::commands::{json, postroom};

const KEYS: usize = 40;

/// `postroom run`; killed when dropped.
pub struct Running(Child);

impl Running {
    pub fn start(config: &std::path::Path, log: &std::path::Path, panics: &str) -> Self {
        let log = std::fs::File::options().create(true).append(true).open(log).unwrap();
        let mut command = surroundings::postroom();
        command.args(["run", "--json", "--config"]).arg(config).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
        if !panics.is_empty() {
            command.env("POSTROOM_PANIC_AT", panics);
        }
        Self(command.spawn().unwrap())
    }

    fn signal(&self, name: &str) {
        let pid = self.0.id().to_string();
        assert!(Command::new("kill").args([&format!("-{name}"), &pid]).status().unwrap().success());
    }

    pub fn terminate(mut self) -> std::process::Output {
        self.signal("TERM");
        let mut stdout = Vec::new();
        std::io::Read::read_to_end(self.0.stdout.as_mut().unwrap(), &mut stdout).unwrap();
        std::process::Output { status: self.0.wait().unwrap(), stdout, stderr: Vec::new() }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Who fills the inbox now: host, process and run.
async fn owner(client: &Client) -> Option<String> {
    let sql = "select owner from postroom.inbox_fillers where owner is not null";
    client.query_opt(sql, &[]).await.unwrap().map(|row| row.get(0))
}

pub async fn until(client: &Client, what: &str) {
    for _ in 0..6000 {
        if client.query_one(what, &[]).await.unwrap().get(0) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("waited in vain until {what}");
}

/// Waits until another process than this one fills, and returns its place among them.
async fn another(client: &Client, running: &[Running], than: Option<u32>) -> usize {
    for _ in 0..6000 {
        if let Some(owner) = owner(client).await {
            let fills = |running: &Running| owner.contains(&format!("/{}/", running.0.id()));
            if let Some(place) = running.iter().position(fills)
                && Some(running[place].0.id()) != than
            {
                return place;
            }
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("nobody took over");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_processes_that_fill_one_inbox_keep_the_order_over_kills_stops_and_hangs() {
    const MESSAGES: usize = 6000;
    let database = Database::create().await;
    let client = database.connect().await;
    assert_eq!(postroom(&["migrate", "--store", database.url()]).status.code(), Some(0));
    let dir = surroundings::scratch("fillers");
    let mut options = RabbitmqOptions::new(surroundings::rabbitmq_url());
    options.exchange = format!("e-{}", surroundings::unique());
    let queue = AuditQueue::bound(&options.url, &options.exchange, "#").await;
    let sink = RabbitmqSink::new(options.clone()).unwrap();
    let config = dir.join("postroom.toml");
    // The broker notices within seconds that a process hangs.
    let text = format!(
        "[store]\nurl = {:?}\n[relay]\nlease = \"1s\"\n[[inboxes]]\nconsumer = \"billing\"\n[inboxes.from]\nkind = \"rabbitmq\"\n\
         url = \"{}?heartbeat=2\"\nqueue = {:?}\nprefetch = 200\n",
        database.url(),
        options.url,
        queue.name()
    );
    std::fs::write(&config, text).unwrap();
    let log = dir.join("fillers.log");
    let mut running: Vec<Running> = (0..3).map(|_| Running::start(&config, &log, "")).collect();

    let mut events = 0;
    let mut written = 0;
    for part in 0..MESSAGES / 100 {
        let messages: Vec<Message> = (0..100)
            .map(|n| {
                let n = part * 100 + n;
                Message::new("orders", "told", n.to_string()).key(format!("k{}", n % KEYS))
            })
            .collect();
        let mut left = messages;
        while !left.is_empty() {
            let mut verdicts = sink.publish(&Batch::new(left.clone())).await.unwrap();
            let mut places = 0..;
            left.retain(|_| places.next().is_some_and(|place| verdicts.take(place) != Verdict::Stored));
        }
        written += 100;
        if part % 8 != 3 {
            continue;
        }
        // In the middle of its work.
        until(&client, &format!("select count(*) > {} from postroom.inbox", written.max(300) - 300)).await;
        let active = another(&client, &running, None).await;
        let than = Some(running[active].0.id());
        match events % 4 {
            0 => running[active] = Running::start(&config, &log, ""),
            1 => {
                running[active].signal("STOP");
                another(&client, &running, than).await;
                running[active].signal("CONT");
            }
            2 => {
                let gone = std::mem::replace(&mut running[active], Running::start(&config, &log, ""));
                let output = gone.terminate();
                assert_eq!(output.status.code(), Some(0));
            }
            _ => {
                // Until the broker has given up on it, and the next one has kept something.
                running[active].signal("STOP");
                another(&client, &running, than).await;
                until(&client, &format!("select count(*) >= {written} from postroom.inbox")).await;
                running[active].signal("CONT");
            }
        }
        events += 1;
    }
    until(&client, &format!("select count(*) = {MESSAGES} from postroom.inbox_messages")).await;
    while queue.ready().await > 0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let inverted = "select count(*) from (select n, lag(n) over (partition by key order by seq) as before
                      from (select seq, key, convert_from(payload, 'UTF8')::int as n from postroom.inbox_messages) m) m
                     where before > n";
    let inverted: i64 = client.query_one(inverted, &[]).await.unwrap().get(0);
    let counts = "select count(*), count(distinct payload), (select epoch from postroom.inbox_fillers) from postroom.inbox_messages";
    let counts = client.query_one(counts, &[]).await.unwrap();
    assert_eq!((counts.get::<_, i64>(0), counts.get::<_, i64>(1)), (MESSAGES as i64, MESSAGES as i64));
    println!("{events} faults, epoch {}", counts.get::<_, i64>(2));
    assert_eq!(inverted, 0, "order within a key");
    assert!(events >= 7 && counts.get::<_, i64>(2) > events, "it changed hands every time");
    let told = std::fs::read_to_string(&log).unwrap();
    assert!(told.contains("standing by") && told.contains("took over filling the inbox"), "{told}");
    for running in running {
        assert_eq!(running.terminate().status.code(), Some(0));
    }
    let free: bool = client.query_one("select owner is null from postroom.inbox_fillers", &[]).await.unwrap().get(0);
    assert!(free, "given back at a graceful stop");
}

/// The most memory that a process has had, in MiB.
fn peak_mib(running: &Running) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", running.0.id())).unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    peak.trim().trim_end_matches(" kB").parse::<u64>().unwrap() / 1024
}

/// What is large stays with the broker while a table is locked, for longer than the library or the broker wait for a sign of life.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_messages_wait_at_the_broker_while_the_inbox_cannot_be_written() {
    const MESSAGES: usize = 80;
    const LARGE: usize = 4 << 20;
    const LOCKED: Duration = Duration::from_secs(25);
    let database = Database::create().await;
    let client = database.connect().await;
    assert_eq!(postroom(&["migrate", "--store", database.url()]).status.code(), Some(0));
    let dir = surroundings::scratch("large");
    let mut options = RabbitmqOptions::new(surroundings::rabbitmq_url());
    options.exchange = format!("e-{}", surroundings::unique());
    let queue = AuditQueue::bound(&options.url, &options.exchange, "#").await;
    let sink = RabbitmqSink::new(options.clone()).unwrap();
    for n in 0..MESSAGES {
        let mut payload = vec![b' '; LARGE];
        payload[..4].copy_from_slice(format!("{n:04}").as_bytes());
        let message = Message::new("orders", "told", payload).key("k");
        let mut verdicts = sink.publish(&Batch::new([message])).await.unwrap();
        assert_eq!(verdicts.take(0), Verdict::Stored);
    }
    let config = dir.join("postroom.toml");
    let text = format!(
        "[store]\nurl = {:?}\n[[inboxes]]\nconsumer = \"billing\"\n[inboxes.from]\nkind = \"rabbitmq\"\nurl = {:?}\nqueue = {:?}\n\
         unsettled_bytes_max = {}\n",
        database.url(),
        options.url,
        queue.name(),
        16 << 20
    );
    std::fs::write(&config, text).unwrap();
    let lock = "begin; lock table postroom.inbox_messages in access exclusive mode";
    client.batch_execute(lock).await.unwrap();
    let running = Running::start(&config, &dir.join("run.log"), "");
    while queue.ready().await > MESSAGES - 4 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    tokio::time::sleep(LOCKED).await;
    let peak = peak_mib(&running);
    client.batch_execute("commit").await.unwrap();
    until(&client, &format!("select count(*) = {MESSAGES} from postroom.inbox_messages")).await;
    let in_order = "select bool_and(n = place) from (select left(convert_from(payload, 'UTF8'), 4)::int as n,
                    row_number() over (order by seq) - 1 as place from postroom.inbox_messages) m";
    assert!(client.query_one(in_order, &[]).await.unwrap().get::<_, bool>(0), "order within a key");
    println!("peak {peak} MiB while the table was locked, {} MiB at the end", peak_mib(&running));
    let all = (MESSAGES * LARGE) >> 20;
    assert!(peak < all as u64 / 2, "{peak} MiB, and {all} MiB were waiting");
    assert_eq!(running.terminate().status.code(), Some(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_route_and_an_inbox_that_panic_are_started_again_and_lose_nothing_and_the_others_run_on() {
    const MESSAGES: i64 = 300;
    let database = Database::create().await;
    let client = database.connect().await;
    assert_eq!(postroom(&["migrate", "--store", database.url()]).status.code(), Some(0));
    let (rabbitmq, exchange) = (surroundings::rabbitmq_url(), format!("e-{}", surroundings::unique()));
    let dir = surroundings::scratch("supervised");
    let config = dir.join("postroom.toml");
    let route = |name: &str| {
        format!(
            "[[routes]]\nname = {name:?}\ntopics = [{name:?}]\n[routes.sink]\nkind = \"rabbitmq\"\nurl = {rabbitmq:?}\nexchange = {exchange:?}\n"
        )
    };
    let text = format!(
        "[store]\nurl = {:?}\n[relay]\nlease = \"1s\"\npoll_idle = \"50ms\"\n{}{}[[inboxes]]\nconsumer = \"billing\"\n[inboxes.from]\n\
         kind = \"rabbitmq\"\nurl = {rabbitmq:?}\nqueue = \"billing-{exchange}\"\nprefetch = 20\n\
         bind = [{{ exchange = {exchange:?}, routing_key = \"#\" }}]\n",
        database.url(),
        route("orders"),
        route("invoices")
    );
    std::fs::write(&config, text).unwrap();
    let log = dir.join("run.log");
    let running = Running::start(&config, &log, "publish=orders.placed:40,keep.written:5");
    // The queue is bound when the inbox is filled for the first time.
    until(&client, "select count(*) = 1 from postroom.inbox_fillers").await;
    while postroom_testkit::rabbitmq::exists(&rabbitmq, &format!("billing-{exchange}")).await.is_none() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    for topic in ["orders", "invoices"] {
        let write = format!(
            "select postroom.enqueue('{topic}', '{topic}.placed', n::text, key => '{topic}-' || n % 7)
               from generate_series(1, {MESSAGES}) n"
        );
        client.batch_execute(&write).await.unwrap();
    }
    until(&client, &format!("select count(*) = {} from postroom.inbox_messages", 2 * MESSAGES)).await;
    let output = running.terminate();
    assert_eq!(output.status.code(), Some(0));
    let ended = json(&output);
    let restarts = |of: &str, n: usize| ended[of][n]["restarts"].as_u64();
    assert_eq!(
        (restarts("routes", 0), restarts("routes", 1), restarts("inboxes", 0)),
        (Some(1), Some(0), Some(1)),
        "{ended}"
    );
    let told = std::fs::read_to_string(&log).unwrap();
    assert!(told.contains("route orders ended: it panicked: told to panic at publish=orders.placed"), "{told}");
    assert!(told.contains("inbox billing ended"), "{told}");
    let inverted = "select count(*) from (select n, lag(n) over (partition by key order by seq) as before
                      from (select seq, key, convert_from(payload, 'UTF8')::int as n from postroom.inbox_messages) m) m
                     where before > n";
    assert_eq!(client.query_one(inverted, &[]).await.unwrap().get::<_, i64>(0), 0, "order within a key");
}
