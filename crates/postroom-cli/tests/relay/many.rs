//! Several relays on one route: they share it, take over from each other, and a stale one changes nothing.

use std::path::PathBuf;

use postroom::Operator;
use postroom_postgres::Database;
use postroom_testkit::chance::Chance;

use crate::rig::{Rig, assert_clean};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn relays_that_come_go_and_die_share_a_route_without_loss_and_in_order() {
    const MESSAGES: usize = 40_000;
    let rig = Rig::shared().await;
    let mut chance = Chance::new(31);
    let (_, writers) = rig.write(MESSAGES, 31);
    let mut relays = vec![rig.relay(), rig.relay(), rig.relay()];
    let mut kills = 0;
    for change in 1..=8 {
        let enough = change * MESSAGES / 10;
        rig.until("more has flowed", async || rig.audit.ready().await >= enough).await;
        let mut relay = relays.swap_remove(chance.below(relays.len() as u64) as usize);
        if change % 2 == 0 {
            relay.kill();
            kills += 1;
        } else {
            assert_eq!(relay.terminate().0, Some(0));
        }
        relays.push(rig.relay());
    }
    for writer in writers {
        writer.await.unwrap();
    }
    rig.drained().await;
    let store = Database::new(rig.database.url()).unwrap();
    rig.until("the three share every lane", async || {
        let route = &store.status().await.unwrap().routes[0];
        (route.lanes_held, route.relays.len()) == (16, 3)
    })
    .await;
    for relay in relays {
        assert_eq!(relay.terminate().0, Some(0));
    }
    let history = rig.history(kills * rig.in_flight_max, false).await;
    assert!(history.committed.len() >= MESSAGES && history.dead.is_empty() && history.pending.is_empty());
    assert_clean(&history);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_that_is_paused_beyond_its_lease_changes_nothing_when_it_comes_back() {
    const MESSAGES: usize = 20_000;
    let rig = Rig::shared().await;
    let (_, writers) = rig.write(MESSAGES, 32);
    let paused = rig.relay();
    rig.until("the first relay works", async || rig.audit.ready().await >= MESSAGES / 10).await;
    paused.signal("STOP");
    let other = rig.relay();
    let store = Database::new(rig.database.url()).unwrap();
    rig.until("the other relay has taken every lane over", async || {
        let route = &store.status().await.unwrap().routes[0];
        route.lanes_held == 16 && route.relays.len() == 1
    })
    .await;
    let reached = rig.audit.ready().await;
    rig.until("the other relay works", async || rig.audit.ready().await > reached).await;
    paused.signal("CONT");
    for writer in writers {
        writer.await.unwrap();
    }
    rig.drained().await;
    assert_eq!(paused.terminate().0, Some(0));
    assert_eq!(other.terminate().0, Some(0));
    // What the paused one had with the broker is repeated by the other; nothing is lost or out of order.
    let history = rig.history(2 * rig.in_flight_max, false).await;
    assert!(history.committed.len() >= MESSAGES && history.dead.is_empty() && history.pending.is_empty());
    assert_clean(&history);
}

/// A rolling upgrade, and one taken back: the schema is this version's, and relays of both share the route.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "POSTROOM_PREVIOUS_BIN names the program of the version before; run it with --ignored"]
async fn relays_of_this_version_and_the_one_before_share_a_route() {
    const MESSAGES: usize = 40_000;
    const CHANGES: usize = 8;
    let previous = PathBuf::from(std::env::var_os("POSTROOM_PREVIOUS_BIN").expect("POSTROOM_PREVIOUS_BIN"));
    let rig = Rig::shared().await;
    let (_, writers) = rig.write(MESSAGES, 33);
    let old = || rig.relay_of(&previous, "previous", rig.database.url(), &rig.rabbitmq, &[]);
    let (mut before, mut now) = (old(), rig.relay());
    for change in 1..=CHANGES {
        let enough = change * MESSAGES / 10;
        rig.until("more has flowed", async || rig.audit.ready().await >= enough).await;
        let (stopped, killed) = if change % 2 == 0 {
            (std::mem::replace(&mut before, old()), std::mem::replace(&mut now, rig.relay()))
        } else {
            (std::mem::replace(&mut now, rig.relay()), std::mem::replace(&mut before, old()))
        };
        assert_eq!(stopped.terminate().0, Some(0));
        drop(killed);
    }
    for writer in writers {
        writer.await.unwrap();
    }
    rig.drained().await;
    assert_eq!(before.terminate().0, Some(0));
    assert_eq!(now.terminate().0, Some(0));
    let history = rig.history(CHANGES * rig.in_flight_max, false).await;
    assert!(history.committed.len() >= MESSAGES && history.dead.is_empty() && history.pending.is_empty());
    assert_clean(&history);
}
