//! What a running postroom says of itself over HTTP, on real servers.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use postroom_testkit::postgres::Database;
use postroom_testkit::proxy::{Link, Proxy};
use postroom_testkit::surroundings;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::commands::postroom;
use crate::rig::{RelayProcess, Rig, assert_clean};

/// A relay with a listener at this address, by the two links.
pub fn listening_at(rig: &Rig, store: &str, broker: &str, listen: &str, admin: &str) -> RelayProcess {
    let text = format!(
        "[store]\nurl = {store:?}\ncapacity_bytes = 100000000000\n[relay]\nlease = \"1s\"\npoll_idle = \"50ms\"\nin_flight_max = {}\n\
         [[routes]]\nname = \"orders\"\n[routes.sink]\nkind = \"rabbitmq\"\nurl = {broker:?}\nexchange = {:?}\n\
         [admin]\nlisten = {listen:?}\n{admin}",
        rig.in_flight_max, rig.exchange
    );
    rig.relay_with(&surroundings::postroom_binary(), "admin", &text, &[])
}

/// The same at some address, which is returned too.
pub async fn listening(rig: &Rig, store: &str, broker: &str, admin: &str) -> (RelayProcess, String) {
    let relay = listening_at(rig, store, broker, "127.0.0.1:0", admin);
    let log = rig.dir.join("relay.log");
    let address = || {
        let log = std::fs::read_to_string(&log).ok()?;
        let (_, after) = log.split_once("/metrics are at http://")?;
        after.split_once('\n').map(|(address, _)| address.trim().to_owned())
    };
    rig.until("the log names the listener", async || address().is_some()).await;
    (relay, address().unwrap())
}

/// The answer to a request with these headers.
async fn get(address: &str, path: &str, headers: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let host = if headers.contains("host:") { String::new() } else { format!("host: {address}\r\n") };
    stream.write_all(format!("GET {path} HTTP/1.0\r\n{host}{headers}\r\n").as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

/// The values of all series, by name and labels.
async fn scraped(address: &str) -> HashMap<String, f64> {
    let (status, text) = get(address, "/metrics", "").await;
    assert_eq!(status, 200, "{text}");
    assert!(text.ends_with("# EOF\n"), "{text}");
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| line.rsplit_once(' ').unwrap())
        .map(|(name, value)| (name.to_owned(), value.parse().unwrap()))
        .collect()
}

/// I21: after outages of broker and store, what was counted is what the writers and the broker's audit queue say.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counters_equal_the_ledger_after_outages() {
    let rig = Rig::shared().await;
    let broker = surroundings::rabbitmq_url();
    let (_, address) = broker.rsplit_once('@').unwrap();
    let address = address.split('/').next().unwrap();
    let to_broker = Proxy::to(address).await;
    let (_, store) = rig.database.url().rsplit_once('@').unwrap_or(("", rig.database.url()));
    let store = store.trim_start_matches("postgres://").split('/').next().unwrap().to_owned();
    let to_store = Proxy::to(&store).await;
    let over = rig.database.url().replace(&store, &to_store.address());
    let (relay, admin) = listening(&rig, &over, &broker.replace(address, &to_broker.address()), "").await;
    let (committed, writers) = rig.write(6000, 31);
    for part in 1..=4 {
        let enough = || committed.load(std::sync::atomic::Ordering::Relaxed) >= part * 1200;
        rig.until("a part is written", async || enough()).await;
        to_broker.reset();
        if part % 2 == 0 {
            to_store.reset();
        }
    }
    for writer in writers {
        writer.await.unwrap();
    }
    rig.drained().await;
    let now = scraped(&admin).await;
    let of = |name: &str| now.get(&format!("postroom_{name}{{route=\"orders\"}}")).copied().unwrap_or(0.0);
    assert_eq!(relay.terminate().0, Some(0));
    let history = rig.history(rig.in_flight_max * 8, false).await;
    assert_clean(&history);
    // The last confirms that the broker sent may not have arrived; those messages were sent again and count as unknown before.
    let (ledger, stored) = (history.committed.len() as f64, history.stored.len() as f64);
    let acked = of("acked_messages_total");
    assert!(acked >= ledger && acked <= stored, "ledger {ledger}, stored {stored}, {now:?}");
    assert!(stored <= acked + of("unknown_messages_total"), "ledger {ledger}, stored {stored}, {now:?}");
    assert_eq!(of("delivery_latency_seconds_count"), acked, "each with its age");
    assert!(of("unavailable_batches_total") > 0.0 && of("sink_outages_total") > 0.0, "{now:?}");
    let dead: Vec<&f64> = now
        .iter()
        .filter(|(name, _)| name.starts_with("postroom_dead_messages_total{"))
        .map(|(_, count)| count)
        .collect();
    assert_eq!(dead, [&0.0; 3], "one for each cause, from the start");
    assert_eq!(of("rejected_messages_total"), 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_store_makes_a_relay_unready_and_a_lost_broker_does_not() {
    let rig = Rig::shared().await;
    let broker = surroundings::rabbitmq_url();
    let (_, address) = broker.rsplit_once('@').unwrap();
    let to_broker = Proxy::to(address.split('/').next().unwrap()).await;
    let broker = broker.replace(address.split('/').next().unwrap(), &to_broker.address());
    let (_, store) = rig.database.url().rsplit_once('@').unwrap_or(("", rig.database.url()));
    let store = store.trim_start_matches("postgres://").split('/').next().unwrap().to_owned();
    let to_store = Proxy::to(&store).await;
    let over = rig.database.url().replace(&store, &to_store.address());
    let (relay, admin) = listening(&rig, &over, &broker, "").await;
    let ready = async || get(&admin, "/readyz", "").await;
    let sees = async |name: &str, value: f64| scraped(&admin).await.get(name) == Some(&value);
    rig.until("it is ready", async || ready().await.0 == 200).await;
    rig.until("the store was sampled", async || sees("postroom_store_up", 1.0).await).await;
    let health = postroom(&["health", "--at", &admin]);
    assert_eq!(health.status.code(), Some(0));
    assert!(String::from_utf8_lossy(&health.stdout).contains("route orders: ready"), "{health:?}");

    to_broker.set(Link::BlackHole);
    to_broker.reset();
    rig.until("it knows that the broker is away", async || sees("postroom_sink_up{route=\"orders\"}", 0.0).await).await;
    assert_eq!(ready().await.0, 200, "the broker is away");
    to_broker.set(Link::Open);

    to_store.set(Link::BlackHole);
    to_store.reset();
    rig.until("it is not ready", async || ready().await.0 == 503).await;
    let (_, why) = ready().await;
    assert!(why.contains("the store has not answered for"), "{why}");
    assert_eq!(get(&admin, "/livez", "").await, (200, "ok\n".to_owned()));
    let health = postroom(&["health", "--at", &admin]);
    assert_eq!(health.status.code(), Some(1), "{health:?}");
    assert_eq!(postroom(&["health", "--live", "--at", &admin]).status.code(), Some(0));
    to_store.set(Link::Open);
    rig.until("it is ready again", async || ready().await.0 == 200).await;
    assert_eq!(relay.terminate().0, Some(0));
    assert_eq!(postroom(&["health", "--at", &admin]).status.code(), Some(69), "nobody is there");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_listener_answers_nobody_whom_it_does_not_know_and_waits_for_nobody() {
    let rig = Rig::new(Database::create().await, surroundings::rabbitmq_url()).await;
    let made = postroom(&["--json", "token", "prometheus"]);
    let made: serde_json::Value = serde_json::from_slice(&made.stdout).unwrap();
    let (token, hash) = (made["token"].as_str().unwrap(), made["sha256"].as_str().unwrap());
    let tokens = format!("[[admin.tokens]]\nname = \"prometheus\"\nrole = \"viewer\"\nsha256 = {hash:?}\n");
    let (relay, admin) = listening(&rig, rig.database.url(), &rig.rabbitmq, &tokens).await;
    rig.until("it is ready", async || get(&admin, "/readyz", "").await.0 == 200).await;
    assert_eq!(get(&admin, "/readyz", "").await.1, "{\"ready\":true}", "and nothing else");
    assert_eq!(get(&admin, "/metrics", "").await.0, 401);
    assert_eq!(get(&admin, "/metrics", "authorization: Bearer postroom_wrong\r\n").await.0, 401);
    let known = format!("authorization: Bearer {token}\r\n");
    let (status, text) = get(&admin, "/metrics", &known).await;
    assert!(status == 200 && text.contains("postroom_build_info"), "{text}");
    assert!(get(&admin, "/readyz", &known).await.1.contains("route orders"));
    assert_eq!(get(&admin, "/api", &known).await.0, 404);

    // More clients that send nothing than there are places: each is closed in its time, and messages flow meanwhile.
    let began = Instant::now();
    let mut silent = Vec::new();
    for _ in 0..300 {
        silent.push(TcpStream::connect(&admin).await.unwrap());
    }
    rig.write_some(200).await;
    rig.drained().await;
    let mut nothing = Vec::new();
    let first = silent.swap_remove(0);
    tokio::time::timeout(Duration::from_secs(60), tokio::io::BufReader::new(first).read_to_end(&mut nothing))
        .await
        .unwrap()
        .unwrap();
    assert_eq!(get(&admin, "/livez", "").await.0, 200, "after {:?}", began.elapsed());
    assert_eq!(relay.terminate().0, Some(0));

    // Without tokens, this machine may look, and a page of the web that had its name point here may not.
    let (relay, admin) = {
        std::fs::remove_file(rig.dir.join("relay.log")).unwrap();
        listening(&rig, rig.database.url(), &rig.rabbitmq, "").await
    };
    assert_eq!(get(&admin, "/metrics", "").await.0, 200);
    assert_eq!(get(&admin, "/metrics", "host: attacker.example\r\n").await.0, 421);
    assert_eq!(relay.terminate().0, Some(0));
}
