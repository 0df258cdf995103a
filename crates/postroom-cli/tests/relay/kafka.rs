//! Relays that publish to Kafka and fill an inbox from it, under kills of all of them; and what the doctor says of a topic.

use std::path::PathBuf;
use std::process::{Command, Output};

use postroom_testkit::judge::History;
use postroom_testkit::kafka::AuditTopic;
use postroom_testkit::services::KafkaServer;
use postroom_testkit::surroundings;

use crate::commands::json as told;
use crate::killed;
use crate::rig::{Rig, assert_clean};

/// The one of the tests, which has the feature.
fn program() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_postroom"))
}

fn postroom(arguments: &[&str]) -> Output {
    let mut command = Command::new(program());
    surroundings::without_tests(&mut command);
    command.args(arguments).output().unwrap()
}

const MESSAGES: usize = 20_000;
/// What a relay that is killed, or a broker that does not answer, may have on its way: four batches of a thousand.
const IN_FLIGHT_MAX: usize = 4_000;

fn configuration(rig: &Rig, server: &KafkaServer, (more, inbox): (&str, bool)) -> String {
    let inbox = format!(
        "[[inboxes]]\nconsumer = \"billing\"\n[inboxes.from]\nkind = \"kafka\"\nurl = \"kafka://{}\"\ntopics = [\"shop\"]\ngroup = \"billing\"\n\
         prefetch = 200\n",
        server.address()
    )
    .repeat(usize::from(inbox));
    format!(
        "[store]\nurl = {:?}\n[relay]\nlease = \"1s\"\npoll_idle = \"50ms\"\n[[routes]]\nname = \"orders\"\n[routes.sink]\nkind = \"kafka\"\n\
         url = \"kafka://{}\"\ntopic = \"shop\"\npublish_deadline_seconds = 3\n{more}{inbox}",
        rig.database.url(),
        server.address()
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_or_out_of_order_through_kafka_while_everything_is_killed() {
    let rig = Rig::shared().await;
    let mut server = KafkaServer::start(&surroundings::scratch("kafka"), 0).unwrap();
    let topic = AuditTopic::create(&server.address(), "shop", 6, &[]).await;
    let text = configuration(&rig, &server, ("", true));
    carried(&rig, &mut server, &topic, &text, (MESSAGES, 8), IN_FLIGHT_MAX).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_transactions_nothing_is_there_twice_while_everything_is_killed() {
    in_transactions(10_000, 8).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes: cargo xtask test --all"]
async fn in_transactions_nothing_of_200_000_is_there_twice() {
    in_transactions(200_000, 24).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes: cargo xtask test --all"]
async fn nothing_of_200_000_is_lost_or_out_of_order_through_kafka() {
    let rig = Rig::shared().await;
    let mut server = KafkaServer::start(&surroundings::scratch("kafka"), 0).unwrap();
    let topic = AuditTopic::create(&server.address(), "shop", 6, &[]).await;
    let text = configuration(&rig, &server, ("", true));
    carried(&rig, &mut server, &topic, &text, (200_000, 24), IN_FLIGHT_MAX).await;
}

async fn in_transactions(messages: usize, faults: usize) {
    let rig = Rig::shared().await;
    let mut server = KafkaServer::start(&surroundings::scratch("kafka"), 0).unwrap();
    let topic = AuditTopic::create(&server.address(), "shop", 6, &[]).await;
    AuditTopic::create(&server.address(), "postroom-ledger", 16, &[]).await;
    let more = "transactional_id = \"shop-orders\"\nledger = \"postroom-ledger\"\n";
    let text = configuration(&rig, &server, (more, true));
    carried(&rig, &mut server, &topic, &text, (messages, faults), 0).await;
}

/// Carries messages through faults, after each of which so many may be in the topic twice.
async fn carried(
    rig: &Rig,
    server: &mut KafkaServer,
    topic: &AuditTopic,
    text: &str,
    (messages, faults): (usize, usize),
    in_flight_max: usize,
) {
    let kept = killed::carry(rig, server, (&program(), text), (messages, 71), faults).await;
    let history = History {
        stored: topic.read().await.into_iter().map(|stored| stored.id).collect(),
        // What the topic has twice is there once.
        kept: Some(kept),
        ..rig.history(faults * in_flight_max, false).await
    };
    println!("{} committed, {} in the topic", history.committed.len(), history.stored.len());
    assert!(history.pending.is_empty() && history.dead.is_empty() && history.committed.len() >= messages);
    assert_clean(&history);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_topic_holds_up_the_route_and_the_doctor_says_what_a_topic_would_lose() {
    let rig = Rig::shared().await;
    let server = KafkaServer::start(&surroundings::scratch("kafka"), 0).unwrap();
    let config = rig.dir.join("kafka.toml");
    std::fs::write(&config, configuration(&rig, &server, ("", false))).unwrap();
    let config = config.display().to_string();
    rig.write_some(30).await;
    let checked = postroom(&["check", "--config", &config]);
    assert!(String::from_utf8_lossy(&checked.stdout).contains("topic \"shop\" does not exist"), "{checked:?}");
    let relay = rig.relay_with(&program(), "relay", &std::fs::read_to_string(&config).unwrap(), &[]);
    let client = rig.database.connect().await;
    rig.until("the relay says that its sink is away", async || {
        let row =
            client.query_opt("select sink_error from postroom.relays where sink_error is not null", &[]).await.unwrap();
        row.is_some_and(|row| row.get::<_, String>(0).contains("kafka-topics.sh"))
    })
    .await;
    // Nothing was used up meanwhile.
    let topic = AuditTopic::create(&server.address(), "shop", 3, &[]).await;
    rig.drained().await;
    assert!(topic.read().await.len() >= 30);
    let checked = told(&postroom(&["--json", "check", "--config", &config]));
    assert!(checked.to_string().contains("has 3 partitions with 1 replica"), "{checked}");
    let examined = told(&postroom(&["--json", "doctor", "--config", &config]));
    let settings = examined["examined"].as_array().unwrap().iter().find(|one| one["code"] == "sink-settings").unwrap();
    assert_eq!(settings["severity"], "danger", "{settings}");
    assert!(settings["found"].as_str().unwrap().contains("has one replica"), "{settings}");
    assert_eq!(relay.terminate().0, Some(0));
}

/// Each would take what the other has stored for its own, or refuse the other's producers all the time.
#[tokio::test]
async fn two_routes_with_one_transactional_id_are_refused_and_so_are_too_many_messages_in_flight() {
    let dir = surroundings::scratch("kafka-config");
    let route = |name: &str, id: &str| {
        format!(
            "[[routes]]\nname = {name:?}\n[routes.sink]\nkind = \"kafka\"\nurl = \"kafka://127.0.0.1:1\"\ntopic = {name:?}\n\
             transactional_id = {id:?}\nledger = \"ledger\"\n"
        )
    };
    let checked = |text: String| {
        let file = dir.join("postroom.toml");
        std::fs::write(&file, text).unwrap();
        let output = postroom(&["check", "--config", &file.display().to_string()]);
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let one = format!("[store]\nurl = \"sqlite:x.db\"\n{}", route("a", "shop"));
    let (code, told) = checked(format!("{one}{}", route("b", "shop")));
    assert!(
        code == Some(78) && told.contains("\"a\" and \"b\" both have transactional_id \"shop\""),
        "{code:?}: {told}"
    );
    let (code, told) = checked(format!("{one}[relay]\nin_flight_max = 20000\n"));
    assert!(code == Some(78) && told.contains("at most 10000"), "{code:?}: {told}");
    let (code, told) = checked(format!("[[stores]]\nname = \"one\"\nurl = \"sqlite:x.db\"\n{}", route("a", "shop")));
    assert!(code == Some(78) && told.contains("no two databases may share"), "{code:?}: {told}");
    let (_, told) = checked(format!("{one}{}", route("b", "other")));
    assert!(!told.contains("both have"), "{told}");
}
