//! Redis Streams between a relay and an inbox, under kills of all of them; and what is said of a stream that loses what waits in it.

use postroom_testkit::judge::History;
use postroom_testkit::redis::{ask, entries};
use postroom_testkit::services::RedisServer;
use postroom_testkit::surroundings;

use crate::commands::{json as told, postroom};
use crate::killed;
use crate::rig::{Rig, assert_clean};

const MESSAGES: usize = 20_000;
/// What a relay that is killed, or a server that does not answer, may have on its way: four batches of 500.
const IN_FLIGHT_MAX: usize = 2_000;

fn configuration(rig: &Rig, server: &RedisServer, inbox: bool) -> String {
    let inbox = format!(
        "[[inboxes]]\nconsumer = \"billing\"\n[inboxes.from]\nkind = \"redis\"\nurl = {:?}\nstreams = [\"shop\"]\ngroup = \"billing\"\n\
         prefetch = 200\n",
        server.url()
    )
    .repeat(usize::from(inbox));
    format!(
        "[store]\nurl = {:?}\n[relay]\nlease = \"1s\"\npoll_idle = \"50ms\"\n[[routes]]\nname = \"orders\"\n[routes.sink]\nkind = \"redis\"\n\
         url = {:?}\nstream = \"shop\"\npublish_deadline_seconds = 2\n{inbox}",
        rig.database.url(),
        server.url()
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_or_out_of_order_through_redis_while_everything_is_killed() {
    let rig = Rig::shared().await;
    let mut server = RedisServer::start(&surroundings::scratch("redis"), "").unwrap();
    let text = configuration(&rig, &server, true);
    let (program, faults) = (surroundings::postroom_binary(), 8);
    let kept = killed::carry(&rig, &mut server, (&program, &text), (MESSAGES, 81), faults).await;
    let history = History {
        stored: entries(&server.address(), "shop").await.into_iter().map(|entry| entry.id).collect(),
        // What the stream has twice is there once.
        kept: Some(kept),
        ..rig.history(faults * IN_FLIGHT_MAX, false).await
    };
    println!("{} committed, {} in the stream", history.committed.len(), history.stored.len());
    assert!(history.pending.is_empty() && history.dead.is_empty() && history.committed.len() >= MESSAGES);
    assert_clean(&history);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_removed_before_it_was_received_is_told_and_so_is_what_a_server_would_lose() {
    let rig = Rig::shared().await;
    let server = RedisServer::start(&surroundings::scratch("redis"), "appendfsync everysec").unwrap();
    let config = rig.dir.join("redis.toml");
    let program = surroundings::postroom_binary();
    std::fs::write(&config, configuration(&rig, &server, false)).unwrap();
    rig.write_some(60).await;
    let relay = rig.relay_with(&program, "relay", &std::fs::read_to_string(&config).unwrap(), &[]);
    rig.drained().await;
    assert_eq!(relay.terminate().0, Some(0));
    let there = entries(&server.address(), "shop").await.len();
    assert!(there >= 60);
    let config = config.display().to_string();
    let checked = told(&postroom(&["--json", "check", "--config", &config]));
    assert!(checked.to_string().contains(&format!("has {there} entries")), "{checked}");
    let examined = told(&postroom(&["--json", "doctor", "--config", &config]));
    let settings = examined["examined"].as_array().unwrap().iter().find(|one| one["code"] == "sink-settings").unwrap();
    assert!(settings["found"].as_str().unwrap().contains("everysec"), "{settings}");
    // Somebody trims what the group has not received.
    ask(&server.address(), &["XGROUP", "CREATE", "shop", "billing", "0", "ENTRIESREAD", "0"]).await;
    ask(&server.address(), &["XTRIM", "shop", "MAXLEN", "20"]).await;
    let filler = rig.relay_with(&program, "filler", &configuration(&rig, &server, true), &[]);
    let client = rig.database.connect().await;
    rig.until("what is left has arrived", async || {
        let row = client.query_one("select count(*) from postroom.inbox_messages", &[]).await.unwrap();
        row.get::<_, i64>(0) == 20
    })
    .await;
    assert_eq!(filler.terminate().0, Some(0));
    let log = std::fs::read_to_string(rig.dir.join("relay.log")).unwrap();
    let lost = format!("{} entries of stream \"shop\" of Redis were removed", there - 20);
    assert_eq!(log.matches(&lost).count(), 1, "{lost}: {log}");
}
