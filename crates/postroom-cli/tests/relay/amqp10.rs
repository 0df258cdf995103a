//! Relays that publish to a RabbitMQ 4 over AMQP 1.0 and fill an inbox from it, while all of them are killed and frozen.

use std::path::PathBuf;

use postroom_testkit::judge::History;
use postroom_testkit::rabbitmq::{AuditQueue, QueueKind};
use postroom_testkit::services::RabbitServer;
use postroom_testkit::surroundings;

use crate::killed;
use crate::rig::{Rig, assert_clean};

const MESSAGES: usize = 12_000;
/// What a relay that is killed, or a broker that does not answer, may have on its way: four batches of five hundred.
const IN_FLIGHT_MAX: usize = 2_000;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_or_out_of_order_over_amqp_1_0_while_everything_is_killed() {
    let rig = Rig::shared().await;
    let mut server = RabbitServer::start_newer(&surroundings::scratch("rabbitmq4"), None).unwrap();
    // What no consumer takes, and what the inbox is filled from.
    let audit = AuditQueue::named(&server.url(), "shop", "#", "audit", QueueKind::Classic).await;
    AuditQueue::named(&server.url(), "shop", "#", "billing", QueueKind::QuorumWithOneActive).await;
    // Version 4.0.5 forgets a quorum queue that was declared seconds before it is killed ("configured member … was not found").
    server.stop().unwrap();
    server.start_again().unwrap();
    let text = format!(
        "[store]\nurl = {:?}\n[relay]\nlease = \"1s\"\npoll_idle = \"50ms\"\n[[routes]]\nname = \"orders\"\n[routes.sink]\nkind = \"amqp10\"\n\
         url = {url:?}\naddress = \"/exchanges/shop/{{routing_key}}\"\npublish_deadline_seconds = 3\n\
         [[inboxes]]\nconsumer = \"billing\"\n[inboxes.from]\nkind = \"amqp10\"\nurl = {url:?}\naddress = \"/queues/billing\"\nprefetch = 200\n",
        rig.database.url(),
        url = format!("amqp://guest:guest@127.0.0.1:{}", server.port()),
    );
    let faults = 8;
    // The one of the tests, which has the feature.
    let program = PathBuf::from(env!("CARGO_BIN_EXE_postroom"));
    let kept = killed::carry(&rig, &mut server, (&program, &text), (MESSAGES, 91), faults).await;
    let history = History {
        stored: audit.drain().await.into_iter().map(|stored| stored.id).collect(),
        // What the queue has handed out twice is there once.
        kept: Some(kept),
        ..rig.history(faults * IN_FLIGHT_MAX, false).await
    };
    println!("{} committed, {} in the queue", history.committed.len(), history.stored.len());
    assert!(history.pending.is_empty() && history.dead.is_empty() && history.committed.len() >= MESSAGES);
    assert_clean(&history);
}
