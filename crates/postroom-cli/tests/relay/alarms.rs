//! Relays that an orchestrator kills again and again while they can do nothing, or have nothing to do: nobody is blamed for it.

use postroom_testkit::postgres::Database;
use postroom_testkit::services::RabbitServer;
use postroom_testkit::surroundings;

use crate::rig::{Rig, assert_clean};

const MESSAGES: usize = 3_000;
/// What was set aside comes back soon; patience would only make the tests slow.
const QUICK: &str = "[routes.retry]\nbase = 1.0\ncap = \"1s\"\njitter = \"100ms\"\n";

/// When the orchestrator kills a relay under the alarm.
#[derive(Clone, Copy, PartialEq)]
enum Kill {
    /// When it has waited beyond its deadline.
    Waiting,
    /// As soon as a message is noted as alone in flight, if any is; before the relay knows that it is blocked.
    Noted,
}

/// Kills relays one after the other under a memory alarm; when the alarm is over everything flows, and nothing is dead.
async fn survived(in_flight_max: usize, kills: usize, when: Kill) {
    let broker = RabbitServer::start(&surroundings::scratch("alarm-kills").join("rabbitmq")).unwrap();
    let mut rig = Rig::new(Database::create().await, broker.url()).await;
    rig.in_flight_max = in_flight_max;
    rig.sink = "publish_deadline_seconds = 1\n".to_owned();
    rig.route = QUICK.to_owned();
    let (_, writers) = rig.write(MESSAGES, 26);
    for writer in writers {
        writer.await.unwrap();
    }
    broker.memory_alarm(true).unwrap();
    let client = rig.database.connect().await;
    let log = rig.dir.join("relay.log");
    let waits =
        || std::fs::read_to_string(&log).unwrap_or_default().matches("the sink accepts nothing for now").count();
    for _ in 0..kills {
        let before = waits();
        let newest = "select coalesce(max(epoch), 0) from postroom.lanes";
        let epoch: i64 = client.query_one(newest, &[]).await.map_or(0, |row| row.get(0));
        let mut relay = rig.relay();
        rig.until("it publishes, and nothing comes of it", async || {
            let noted = "select exists (select from postroom.suspects s join postroom.lanes l using (route, lane)
                                         where s.alone and l.epoch > $1)";
            waits() > before
                || (when == Kill::Noted
                    && client.query_one(noted, &[&epoch]).await.is_ok_and(|row| row.get::<_, bool>(0)))
        })
        .await;
        relay.kill();
    }
    broker.memory_alarm(false).unwrap();
    let relay = rig.relay();
    rig.drained().await;
    assert_eq!(relay.terminate().0, Some(0));
    let history = rig.history((kills + 1) * in_flight_max, false).await;
    assert_eq!(history.dead, [""; 0], "an outage kills nothing");
    assert!(history.committed.len() >= MESSAGES && history.pending.is_empty());
    assert_clean(&history);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn relays_killed_again_and_again_under_an_alarm_kill_no_message() {
    survived(2000, 14, Kill::Waiting).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn relays_killed_under_an_alarm_right_after_they_noted_a_message_kill_none() {
    survived(8, 8, Kill::Noted).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn relays_that_are_killed_while_idle_leave_the_next_one_at_full_speed() {
    let rig = Rig::shared().await;
    let client = rig.database.connect().await;
    let owners = async || -> Vec<String> {
        let rows = client.query("select distinct coalesce(owner, '') from postroom.lanes", &[]).await.unwrap();
        rows.iter().map(|row| row.get(0)).collect()
    };
    let mut before = Vec::new();
    for _ in 0..5 {
        let mut relay = rig.relay();
        rig.until("it holds all lanes", async || {
            let now = owners().await;
            now.len() == 1 && !now[0].is_empty() && now != before
        })
        .await;
        before = owners().await;
        rig.write_some(10).await;
        rig.drained().await;
        relay.kill();
    }
    let relay = rig.relay();
    rig.until("it holds all lanes", async || owners().await != before && owners().await.len() == 1).await;
    let deaths: i64 = client.query_one("select sum(deaths)::bigint from postroom.lanes", &[]).await.unwrap().get(0);
    assert_eq!(deaths, 0, "nothing was in flight");
    let (_, writers) = rig.write(MESSAGES, 27);
    for writer in writers {
        writer.await.unwrap();
    }
    rig.drained().await;
    assert_eq!(relay.terminate().0, Some(0));
    assert_clean(&rig.history(0, false).await);
}
