//! SIGTERM under load: nothing twice, exit 0.

use std::time::Duration;

use postroom_testkit::postgres::Database;
use postroom_testkit::services::PostgresServer;
use postroom_testkit::surroundings;

use crate::rig::{Rig, assert_clean};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_graceful_stop_under_load_repeats_nothing() {
    let rig = Rig::shared().await;
    let (_, writers) = rig.write(60_000, 11);
    let client = rig.database.connect().await;
    // The one before has given them back. A signal that comes before it listens for signals would end it at once.
    let held = "select exists (select from postroom.lanes where owner is not null and expires_at > clock_timestamp())";
    for stop in 1..=100 {
        let relay = rig.relay();
        rig.until("it holds lanes", async || client.query_one(held, &[]).await.unwrap().get(0)).await;
        let enough = stop * 500;
        rig.until("more has flowed", async || rig.audit.ready().await >= enough).await;
        let (code, printed) = relay.terminate();
        assert_eq!(code, Some(0), "{printed}");
        let summary: serde_json::Value = serde_json::from_str(printed.trim()).unwrap();
        for trouble in ["unfinished", "unknown", "fenced", "lanes_lost", "sink_outages"] {
            assert_eq!(summary["routes"][0][trouble], 0, "{trouble} without a fault: {printed}");
        }
    }
    for writer in writers {
        writer.await.unwrap();
    }
    let relay = rig.relay();
    rig.drained().await;
    assert_eq!(relay.terminate().0, Some(0));
    assert_clean(&rig.history(0, false).await);
}

/// What the broker has and the store does not know of is sent again; the stop says how much that can be, and is no clean one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_while_the_database_is_down_says_what_is_not_written() {
    let mut server = PostgresServer::start(&surroundings::scratch("stop-without-store").join("postgres")).unwrap();
    let rig = Rig::new(Database::create_on(&server.url("postgres")).await, surroundings::rabbitmq_url()).await;
    let (_, writers) = rig.write(30_000, 12);
    let variables = [("POSTROOM_RELAY_STOP_DEADLINE", "2s".to_owned())];
    let relay = rig.relay_over("relay", rig.database.url(), &rig.rabbitmq, &variables);
    rig.until("a part has flowed", async || rig.audit.ready().await >= 5_000).await;
    server.kill().unwrap();
    let (code, printed) = relay.terminate();
    assert_eq!(code, Some(69), "{printed}");
    let summary: serde_json::Value = serde_json::from_str(printed.lines().next().unwrap()).unwrap();
    assert_eq!(summary["routes"][0]["lanes_given_back"], false, "{printed}");
    let count = |name: &str| summary["routes"][0][name].as_u64().unwrap() as usize;
    let repeats_max = count("unwritten") + count("unfinished") + count("unknown");

    server.start_again().unwrap();
    for writer in writers {
        writer.await.unwrap();
    }
    let mut relay = rig.relay();
    rig.drained().await;
    // A hangup is a graceful stop too.
    relay.signal("HUP");
    assert!(relay.dies_within(Duration::from_secs(60)), "it stops");
    assert_eq!(relay.code(), Some(0));
    assert_clean(&rig.history(repeats_max, false).await);
}
