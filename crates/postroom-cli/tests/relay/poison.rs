//! Messages that kill: their connection to the broker, or the relay itself. Each delays only its key.

use postroom::MessageId;
use postroom_testkit::judge::Committed;

use crate::rig::{Rig, assert_clean};

const MESSAGES: usize = 6_000;
/// Patience in seconds would only make the tests slow.
const QUICK: &str = "[routes.retry]\nbase = 1.0\ncap = \"1s\"\njitter = \"100ms\"\nattempts_max = 3\n";

/// Commits one message of a key of its own, noted in the ledger like every other.
async fn write_one(rig: &Rig, kind: &str, headers: &str) -> MessageId {
    let id = MessageId::new();
    let client = rig.database.connect().await;
    let sql = "with l as (insert into ledger values ($1, 'doomed', 1))
               select postroom.enqueue('orders', $2, '\\x00'::bytea, key => 'doomed', id => $1,
                                       routing_key => 'orders.placed', headers => $3::text::jsonb)";
    client.execute(sql, &[id.as_uuid(), &kind, &headers]).await.unwrap();
    id
}

async fn cause_of_death(rig: &Rig, id: MessageId) -> Option<String> {
    let client = rig.database.connect().await;
    let sql = "select cause || ': ' || error from postroom.dead_letters where id = $1";
    client.query_opt(sql, &[id.as_uuid()]).await.unwrap().map(|row| row.get(0))
}

async fn judged(rig: &Rig, id: MessageId, duplicates_max: usize) {
    let history = rig.history(duplicates_max, false).await;
    assert_eq!(history.dead, [id.to_string()], "I7: it alone is dead");
    assert!(history.pending.is_empty() && history.committed.len() > MESSAGES);
    let doomed = |message: &Committed| message.id == id.to_string();
    assert!(history.committed.iter().any(doomed));
    assert_clean(&history);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_ends_its_connection_every_time_is_found_and_buried() {
    let mut rig = Rig::shared().await;
    rig.route = QUICK.to_owned();
    // Its headers do not fit into one AMQP frame: the broker closes the connection over it.
    let id = write_one(&rig, "order.placed", &format!("{{\"much\": {:?}}}", "x".repeat(40_000))).await;
    let (_, writers) = rig.write(MESSAGES, 41);
    let broker = format!("{}?frame_max=32768", rig.rabbitmq);
    let relay = rig.relay_over("relay", rig.database.url(), &broker, &[]);
    rig.until("all others are stored", async || rig.audit.ready().await >= MESSAGES).await;
    // Traffic goes on, as it does; it shows that the broker takes others.
    rig.until("it is dead", async || {
        rig.write_some(3).await;
        cause_of_death(&rig, id).await.is_some()
    })
    .await;
    for writer in writers {
        writer.await.unwrap();
    }
    rig.drained().await;
    assert_eq!(relay.terminate().0, Some(0));
    let cause = cause_of_death(&rig, id).await.unwrap();
    assert!(cause.starts_with("poison: published alone, it made the sink fail"), "{cause}");
    judged(&rig, id, 20 * rig.in_flight_max).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_kills_its_relay_every_time_travels_alone_in_the_end_and_is_buried() {
    let mut rig = Rig::shared().await;
    rig.route = QUICK.to_owned();
    rig.in_flight_max = 200;
    let id = write_one(&rig, "order.doomed", "{}").await;
    let (_, writers) = rig.write(MESSAGES, 42);
    let deadly = [("POSTROOM_CRASH_AT", "publish=order.doomed:1".to_owned())];
    let mut deaths = 0;
    let mut relay = rig.relay_over("relay", rig.database.url(), &rig.rabbitmq, &deadly);
    while cause_of_death(&rig, id).await.is_none() {
        if !relay.lives() {
            deaths += 1;
            assert!(deaths <= 12, "I7: bounded");
            relay = rig.relay_over("relay", rig.database.url(), &rig.rabbitmq, &deadly);
        }
        // Traffic goes on, as it does; it shows that the broker takes others.
        rig.write_some(3).await;
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    for writer in writers {
        writer.await.unwrap();
    }
    rig.drained().await;
    assert_eq!(relay.terminate().0, Some(0));
    let cause = cause_of_death(&rig, id).await.unwrap();
    assert!(cause.contains("relays in a row died while this was the only message in flight"), "{cause}");
    println!("{deaths} relays died over it");
    judged(&rig, id, deaths * rig.in_flight_max).await;
}
