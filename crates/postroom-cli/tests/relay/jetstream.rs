//! NATS JetStream between a relay and an inbox, under kills of all of them; and what the doctor and a replay say of it.

use postroom_testkit::judge::History;
use postroom_testkit::nats::AuditStream;
use postroom_testkit::services::NatsServer;
use postroom_testkit::surroundings;
use serde_json::json;

use crate::commands::{json as told, postroom};
use crate::killed;
use crate::rig::{Rig, assert_clean};

const MESSAGES: usize = 20_000;

fn configuration(rig: &Rig, server: &NatsServer, inbox: bool) -> String {
    let inbox = format!(
        "[[inboxes]]\nconsumer = \"billing\"\n[inboxes.from]\nkind = \"nats\"\nurl = {:?}\nstream = \"ORDERS\"\nconsumer = \"billing\"\n\
         prefetch = 200\n",
        server.url()
    )
    .repeat(usize::from(inbox));
    format!(
        "[store]\nurl = {:?}\n[relay]\nlease = \"1s\"\npoll_idle = \"50ms\"\n[[routes]]\nname = \"orders\"\n[routes.sink]\nkind = \"nats\"\n\
         url = {:?}\nstream = \"ORDERS\"\npublish_deadline_seconds = 2\nmonitoring_url = {:?}\n{inbox}",
        rig.database.url(),
        server.url(),
        server.monitoring_url()
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_doubled_or_out_of_order_through_jetstream_while_everything_is_killed() {
    through_jetstream(MESSAGES, 8).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes: cargo xtask test --all"]
async fn nothing_of_200_000_is_lost_doubled_or_out_of_order_through_jetstream() {
    through_jetstream(200_000, 24).await;
}

async fn through_jetstream(messages: usize, faults: usize) {
    let rig = Rig::shared().await;
    let mut server = NatsServer::start(&surroundings::scratch("nats"), "").unwrap();
    let stream = AuditStream::create(&server.address(), "ORDERS", &["orders.>"], json!({})).await;
    let text = configuration(&rig, &server, true);
    let program = surroundings::postroom_binary();
    let kept = killed::carry(&rig, &mut server, (&program, &text), (messages, 61), faults).await;
    let history = History {
        stored: stream.all().await.into_iter().map(|stored| stored.id).collect(),
        kept: Some(kept),
        // The stream recognises what it has stored.
        ..rig.history(0, false).await
    };
    assert!(history.pending.is_empty() && history.dead.is_empty() && history.committed.len() >= messages);
    assert_clean(&history);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_doctor_and_a_replay_say_what_the_stream_would_lose_and_swallow() {
    let rig = Rig::shared().await;
    let server = NatsServer::start(&surroundings::scratch("nats"), "").unwrap();
    let stream = AuditStream::create(&server.address(), "ORDERS", &["orders.>"], json!({})).await;
    let config = rig.dir.join("jetstream.toml");
    std::fs::write(&config, configuration(&rig, &server, false)).unwrap();
    let config = config.display().to_string();
    rig.write_some(30).await;
    let relay =
        rig.relay_with(&surroundings::postroom_binary(), "relay", &std::fs::read_to_string(&config).unwrap(), &[]);
    rig.drained().await;
    // Its transactions have several.
    let sent = stream.all().await.len();
    assert!(sent >= 30);

    let checked = told(&postroom(&["--json", "check", "--config", &config]));
    assert!(checked.to_string().contains("it recognises an id for 120 s"), "{checked}");
    let examined = told(&postroom(&["--json", "doctor", "--config", &config]));
    let settings = examined["examined"].as_array().unwrap().iter().find(|one| one["code"] == "sink-settings").unwrap();
    assert_eq!(settings["severity"], "danger", "{settings}");
    assert!(settings["found"].as_str().unwrap().contains("every 120 s"), "{settings}");
    assert_eq!(postroom(&["explain", "sink-settings"]).status.code(), Some(0));

    let preview = |more: &[&str]| {
        let all = [&["--json", "replay", "--all", "--dry-run", "--config", &config], more].concat();
        told(&postroom(&all))["preview"]["broker"].clone()
    };
    let expected = json!({ "recognises_ids_for_seconds": 120, "swallows_at_least": sent, "problem": null });
    assert_eq!(preview(&[]), expected);
    assert_eq!(preview(&["--new-id"]), serde_json::Value::Null);
    let people = postroom(&["replay", "--all", "--dry-run", "--config", &config]);
    let people = String::from_utf8(people.stdout).unwrap();
    assert!(people.contains(&format!("{sent} of them at least, would be confirmed and not stored again")), "{people}");
    // And so it is.
    let replay = ["--json", "replay", "--all", "--wait", "--actor", "test", "--reason", "x", "--config", &config];
    let report = told(&postroom(&replay));
    assert_eq!((&report["state"], &report["done"]), (&"done".into(), &sent.into()), "{report}");
    assert_eq!(stream.all().await.len(), sent);
    let report = told(&postroom(&[&replay[..], &["--new-id"]].concat()));
    assert_eq!(report["done"], sent, "{report}");
    assert_eq!(stream.all().await.len(), 2 * sent);
    assert_eq!(relay.terminate().0, Some(0));
    drop(server);
    assert!(preview(&[])["problem"].as_str().unwrap().contains("Connection refused"));
}
