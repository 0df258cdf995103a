//! Relays that publish to an MQTT broker and fill an inbox from it, while all of them die.

use std::path::PathBuf;

use postroom_testkit::judge::History;
use postroom_testkit::mqtt::AuditSession;
use postroom_testkit::services::MosquittoServer;
use postroom_testkit::surroundings;

use crate::killed;
use crate::rig::{Rig, assert_clean};

const MESSAGES: usize = 8_000;
/// What a relay that is killed, or a broker that does not answer, may have on its way: four batches of five hundred.
const IN_FLIGHT_MAX: usize = 2_000;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_or_out_of_order_through_mqtt_while_everything_ends() {
    let rig = Rig::shared().await;
    let mut server = MosquittoServer::start(&surroundings::scratch("mqtt"), "").unwrap();
    // A broker keeps nothing for a session that it has not seen yet.
    let audit = AuditSession::begin(&server.address(), "audit", "#").await;
    drop(AuditSession::begin(&server.address(), "billing", "shop/#").await);
    let text = format!(
        "[store]\nurl = {:?}\n[relay]\nlease = \"1s\"\npoll_idle = \"50ms\"\n[[routes]]\nname = \"orders\"\n[routes.sink]\nkind = \"mqtt\"\n\
         url = {url:?}\ntopic = \"shop/{{topic}}\"\npublish_deadline_seconds = 3\n\
         [[inboxes]]\nconsumer = \"billing\"\n[inboxes.from]\nkind = \"mqtt\"\nurl = {url:?}\ntopics = [\"shop/#\"]\nclient_id = \"billing\"\n\
         prefetch = 200\n",
        rig.database.url(),
        url = server.url()
    );
    let faults = 8;
    // The one of the tests, which has the feature.
    let program = PathBuf::from(env!("CARGO_BIN_EXE_postroom"));
    let kept = killed::carry(&rig, &mut server, (&program, &text), (MESSAGES, 73), faults).await;
    let history = History {
        stored: audit.heard().await.into_iter().map(|heard| heard.id).collect(),
        // What the broker has handed out twice is there once.
        kept: Some(kept),
        ..rig.history(faults * IN_FLIGHT_MAX, false).await
    };
    println!("{} committed, {} handed out", history.committed.len(), history.stored.len());
    assert!(history.pending.is_empty() && history.dead.is_empty() && history.committed.len() >= MESSAGES);
    assert_clean(&history);
}
