//! Servers that go away in the middle and come back. The length of an outage is the fault itself, so it is waited for;
//! everything else waits for signals.

use std::time::Duration;

use postroom_testkit::postgres::Database;
use postroom_testkit::proxy::{Link, Proxy};
use postroom_testkit::services::{PostgresServer, RabbitServer};
use postroom_testkit::surroundings;
use tokio::task::JoinHandle;

use crate::commands::postroom;
use crate::fillers::{Running, until};
use crate::rig::{RelayProcess, Rig, assert_clean};

const MESSAGES: usize = 30_000;
const OUTAGE: Duration = Duration::from_secs(60);

/// The broker is down: after so long nothing is parked or dead, and when it is back everything flows.
async fn outlasted(
    rig: Rig,
    mut broker: RabbitServer,
    relay: RelayProcess,
    (messages, writers): (usize, Vec<JoinHandle<()>>),
    outage: Duration,
) {
    tokio::time::sleep(outage).await;
    for writer in writers {
        writer.await.unwrap();
    }
    let client = rig.database.connect().await;
    let trouble = "select (select count(*) from postroom.parked) + (select count(*) from postroom.dead_letters)";
    let before: i64 = client.query_one(trouble, &[]).await.unwrap().get(0);
    assert_eq!(before, 0, "an outage parks nothing and kills nothing");
    broker.start_again().unwrap();
    rig.drained().await;
    assert_eq!(relay.terminate().0, Some(0));
    let history = rig.history(rig.in_flight_max, false).await;
    assert!(history.committed.len() >= messages && history.dead.is_empty() && history.pending.is_empty());
    assert_clean(&history);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_is_down_for_a_minute_burns_no_attempt_and_loses_nothing() {
    let mut broker = RabbitServer::start(&surroundings::scratch("outage-broker").join("rabbitmq")).unwrap();
    let rig = Rig::new(Database::create().await, broker.url()).await;
    let (_, writers) = rig.write(MESSAGES, 21);
    let relay = rig.relay();
    rig.until("a part has flowed", async || rig.audit.ready().await >= MESSAGES / 4).await;
    broker.kill().unwrap();
    outlasted(rig, broker, relay, (MESSAGES, writers), OUTAGE).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_with_nothing_to_publish_notices_that_its_broker_is_away_and_that_it_is_back() {
    let broker = surroundings::rabbitmq_url();
    let (_, address) = broker.rsplit_once('@').unwrap();
    let address = address.split('/').next().unwrap();
    let link = Proxy::to(address).await;
    let mut rig = Rig::new(Database::create().await, broker.clone()).await;
    rig.rabbitmq = broker.replace(address, &link.address());
    let (_, writers) = rig.write(50, 25);
    for writer in writers {
        writer.await.unwrap();
    }
    let relay = rig.relay();
    rig.drained().await;
    let client = rig.database.connect().await;
    let sink_is = async |state: &str| {
        let sql = "select bool_and(sink_error is null) from postroom.relays";
        let up = client.query_one(sql, &[]).await.unwrap().get::<_, Option<bool>>(0);
        up == Some(state == "up")
    };
    rig.until("the sink is up", async || sink_is("up").await).await;
    link.set(Link::BlackHole);
    link.reset();
    rig.until("the store knows that the sink is down", async || sink_is("down").await).await;
    let said = |words: &str| std::fs::read_to_string(rig.dir.join("relay.log")).unwrap().contains(words);
    rig.until("the log says so", async || said("the sink is down, messages wait in the store")).await;
    link.set(Link::Open);
    link.reset();
    rig.until("the store knows that it is back", async || sink_is("up").await).await;
    rig.until("the log says so", async || said("the sink is back after")).await;
    assert_eq!(relay.terminate().0, Some(0));
    assert_clean(&rig.history(0, false).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_inbox_whose_queue_is_empty_says_once_that_its_broker_is_away_and_that_it_is_back() {
    let broker = surroundings::rabbitmq_url();
    let (_, address) = broker.rsplit_once('@').unwrap();
    let address = address.split('/').next().unwrap();
    let link = Proxy::to(address).await;
    let database = Database::create().await;
    assert_eq!(postroom(&["migrate", "--store", database.url()]).status.code(), Some(0));
    let dir = surroundings::scratch("inbox-outage");
    let (config, log) = (dir.join("postroom.toml"), dir.join("run.log"));
    let name = surroundings::unique();
    let text = format!(
        "[store]\nurl = {:?}\n[[inboxes]]\nconsumer = \"billing\"\n[inboxes.from]\nkind = \"rabbitmq\"\nurl = {:?}\nqueue = {name:?}\n\
         bind = [{{ exchange = {name:?}, routing_key = \"#\" }}]\n",
        database.url(),
        broker.replace(address, &link.address())
    );
    std::fs::write(&config, text).unwrap();
    let running = Running::start(&config, &log, "");
    let said = |words: &str| std::fs::read_to_string(&log).unwrap().matches(words).count();
    let client = database.connect().await;
    let connected = "select count(*) = 1 from postroom.inbox_fillers where source is not null and source_error is null";
    until(&client, connected).await;
    link.set(Link::BlackHole);
    link.reset();
    until(&client, "select bool_and(source_error is not null) from postroom.inbox_fillers").await;
    // Long enough for several tries.
    while said("failed to") == 0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    link.set(Link::Open);
    link.reset();
    until(&client, connected).await;
    while said("messages can be received again after") == 0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(running.terminate().status.code(), Some(0));
    // Said every half a minute at most, however often it fails.
    assert!(said("failed to") <= 2, "{}", std::fs::read_to_string(&log).unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "the outage lasts ten minutes; run it with --ignored"]
async fn a_broker_that_is_down_for_ten_minutes_with_100_000_waiting_burns_no_attempt() {
    const WAITING: usize = 100_000;
    let mut broker = RabbitServer::start(&surroundings::scratch("long-outage").join("rabbitmq")).unwrap();
    let rig = Rig::new(Database::create().await, broker.url()).await;
    let relay = rig.relay();
    broker.kill().unwrap();
    let (_, writers) = rig.write(WAITING, 23);
    outlasted(rig, broker, relay, (WAITING, writers), Duration::from_secs(600)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_memory_alarm_of_the_broker_holds_everything_up_and_repeats_nothing() {
    let broker = RabbitServer::start(&surroundings::scratch("alarmed-broker").join("rabbitmq")).unwrap();
    let mut rig = Rig::new(Database::create().await, broker.url()).await;
    // Longer than a busy machine lets a broker wait that is not blocked.
    rig.sink = "publish_deadline_seconds = 5\n".to_owned();
    let (_, writers) = rig.write(MESSAGES, 24);
    let relay = rig.relay();
    rig.until("a part has flowed", async || rig.audit.ready().await >= MESSAGES / 4).await;
    broker.memory_alarm(true).unwrap();
    let log = rig.dir.join("relay.log");
    let said = |words: &str| std::fs::read_to_string(&log).unwrap().contains(words);
    rig.until("the log tells of the alarm", async || said("the sink accepts nothing for now")).await;
    let client = rig.database.connect().await;
    rig.until("the relay has waited beyond its deadline, and the store knows it", async || {
        let sql = "select bool_or(sink_blocked and sink_down_since < clock_timestamp() - interval '7 s') from postroom.relays";
        client.query_one(sql, &[]).await.unwrap().get::<_, Option<bool>>(0) == Some(true)
    })
    .await;
    broker.memory_alarm(false).unwrap();
    rig.until("the log tells of its end", async || said("the sink accepts messages again")).await;
    for writer in writers {
        writer.await.unwrap();
    }
    rig.drained().await;
    let (code, printed) = relay.terminate();
    assert_eq!(code, Some(0));
    crate::commands::holds_to("run", printed.trim(), &["run"]);
    let summary: serde_json::Value = serde_json::from_str(printed.trim()).unwrap();
    assert_eq!(summary["routes"][0]["sink_outages"], 0, "{printed}");
    let history = rig.history(0, false).await;
    assert!(history.dead.is_empty() && history.pending.is_empty());
    assert_clean(&history);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_that_is_restarted_and_killed_in_the_middle_loses_nothing() {
    let mut server = PostgresServer::start(&surroundings::scratch("outage-database").join("postgres")).unwrap();
    let database = Database::create_on(&server.url("postgres")).await;
    let rig = Rig::new(database, surroundings::rabbitmq_url()).await;
    let (_, writers) = rig.write(MESSAGES, 22);
    let relay = rig.relay();
    rig.until("a part has flowed", async || rig.audit.ready().await >= MESSAGES / 4).await;
    server.stop().unwrap();
    server.start_again().unwrap();
    rig.until("the flow has resumed", async || rig.audit.ready().await >= MESSAGES / 2).await;
    server.kill().unwrap();
    server.start_again().unwrap();
    for writer in writers {
        writer.await.unwrap();
    }
    rig.drained().await;
    assert_eq!(relay.terminate().0, Some(0));
    let history = rig.history(2 * rig.in_flight_max, false).await;
    assert!(history.dead.is_empty() && history.pending.is_empty());
    assert_clean(&history);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_that_starts_while_its_database_is_down_delivers_when_it_is_back() {
    const MESSAGES: usize = 2_000;
    let mut server = PostgresServer::start(&surroundings::scratch("start-down").join("postgres")).unwrap();
    let database = Database::create_on(&server.url("postgres")).await;
    let rig = Rig::new(database, surroundings::rabbitmq_url()).await;
    let (_, writers) = rig.write(MESSAGES, 27);
    for writer in writers {
        writer.await.unwrap();
    }
    server.kill().unwrap();
    // Says that it runs, and does: a process with other stores must not wait for this one.
    let relay = rig.relay();
    server.start_again().unwrap();
    rig.drained().await;
    assert_eq!(relay.terminate().0, Some(0));
    let history = rig.history(0, false).await;
    assert!(history.committed.len() >= MESSAGES && history.dead.is_empty() && history.pending.is_empty());
    assert_clean(&history);
}
