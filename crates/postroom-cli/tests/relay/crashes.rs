//! kill -9 of the relay at random moments.

use postroom_testkit::chance::Chance;

use crate::rig::{Rig, assert_clean};

const MESSAGES: usize = 100_000;
const KILLS: usize = 12;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killing_the_relay_loses_nothing_and_every_effect_happens_once() {
    let rig = Rig::shared().await;
    let consumer = rig.consume().await;
    let mut chance = Chance::new(7);
    let (committed, writers) = rig.write(MESSAGES, 7);
    let mut relay = rig.relay();
    let mut kills = 0;
    while kills < KILLS {
        // The broker's own count says how far it is: a kill falls somewhere into each twelfth of the flow.
        let next = kills * MESSAGES / KILLS + chance.below((MESSAGES / KILLS) as u64) as usize;
        rig.until("more has flowed", async || rig.audit.ready().await >= next.max(1)).await;
        relay.kill();
        kills += 1;
        relay = rig.relay();
    }
    for writer in writers {
        writer.await.unwrap();
    }
    rig.drained().await;
    rig.effective().await;
    let (code, _) = relay.terminate();
    assert_eq!(code, Some(0));
    let counters = consumer.stop().await;
    let history = rig.history(kills * rig.in_flight_max, true).await;
    let duplicates = history.stored.len() - history.committed.len();
    println!(
        "{} committed by the writers' count {}, {kills} kills, {duplicates} duplicates at the broker, {} suppressed",
        history.committed.len(),
        committed.load(std::sync::atomic::Ordering::Relaxed),
        counters.duplicates
    );
    assert!(history.committed.len() >= MESSAGES);
    assert!(history.dead.is_empty() && history.pending.is_empty());
    assert_clean(&history);
}
