//! Relays that die: what is counted, and against whom.

use std::time::Duration;

use postroom::{Cause, Delivery, MessageId, Noted, Outcome, Report, Source, Want};
use postroom_postgres::{LogSource, migrate};
use postroom_testkit::postgres::Database;
use tokio_postgres::Client;

use crate::setup::{claim_all, connector, done, drain, enqueue, open, prepared, renew, route, settled, source};

const SINGLE: Want = Want { messages: 1, bytes: usize::MAX, lane_messages_max: usize::MAX, parked: true, single: true };

/// As if the relay that holds the lanes had died, and its lease had run out.
pub async fn dies(database: &Database, source: LogSource) {
    drop(source);
    let client = database.connect().await;
    client
        .batch_execute(
            "update postroom.lanes set expires_at = '-infinity'; update postroom.relays set expires_at = '-infinity'",
        )
        .await
        .unwrap();
}

pub async fn succeeds(database: &Database, n: usize) -> (LogSource, u32) {
    let source = open(database, &route(), &format!("relay-{n}")).await.unwrap();
    let deaths = renew(&source).await.deaths;
    (source, deaths)
}

/// What is next alone; whether it is noted as proven. Returns what is known of it.
async fn next_alone(source: &LogSource, proven: bool) -> (Delivery, (u32, u32)) {
    let mut claimed = source.claim(SINGLE).await.unwrap().deliveries;
    assert_eq!(claimed.len(), 1);
    let delivery = claimed.remove(0);
    let Noted { deaths, doubts, .. } = source.note(delivery.token, proven).await.unwrap();
    (delivery, (deaths, doubts))
}

fn dead() -> Outcome {
    Outcome::Dead { attempts: 1, cause: Cause::Poison, error: "it kills".to_owned(), blocks_key: false }
}

fn retry() -> Outcome {
    Outcome::Retry { after: Duration::ZERO, attempts: 0, error: "others first".to_owned() }
}

async fn count(client: &Client, sql: &str) -> i64 {
    client.query_one(sql, &[]).await.unwrap().get(0)
}

#[tokio::test]
async fn relays_that_die_are_counted_and_the_message_that_was_alone_is_told() {
    let database = prepared().await;
    let client = database.connect().await;
    let ids = enqueue(&client, Some("a"), 3).await;
    let mut seen = Vec::new();
    for n in 0..4 {
        let (source, deaths) = succeeds(&database, n).await;
        assert_eq!(deaths as usize, n);
        let (delivery, known) = next_alone(&source, true).await;
        assert_eq!(delivery.message.id, ids[0]);
        seen.push(known);
        dies(&database, source).await;
    }
    assert_eq!(seen, [(0, 0), (1, 0), (2, 0), (3, 0)], "I7");
    // It is buried; what is known of it is forgotten, so that it is tried when an operator gives it back.
    let (source, deaths) = succeeds(&database, 5).await;
    assert_eq!(deaths, 4);
    let (delivery, known) = next_alone(&source, true).await;
    assert_eq!(known, (4, 0));
    source.settle(&[settled(delivery.token, dead())]).await.unwrap();
    assert_eq!(count(&client, "select count(*) from postroom.suspects").await, 0);
    // The next one begins anew, and whoever survives says so.
    let (delivery, known) = next_alone(&source, true).await;
    assert_eq!((delivery.message.id, known), (ids[1], (0, 0)));
    let survived = Report { survived: true, ..Report::default() };
    assert_eq!(source.renew(&survived).await.unwrap().deaths, 0);
    assert_eq!(
        count(&client, "select count(*) from postroom.suspects where alone").await,
        1,
        "it is with the sink now"
    );
    source.settle(&done([delivery.token])).await.unwrap();
    source.release().await.unwrap();
    let (_, deaths) = succeeds(&database, 6).await;
    assert_eq!(deaths, 0, "a graceful end is no death");
}

/// A link to the store that is slow makes leases run out; that is no death, and no message is to blame.
#[tokio::test]
async fn a_relay_that_goes_on_takes_back_the_death_that_was_counted_when_its_lanes_were_taken() {
    let database = prepared().await;
    let client = database.connect().await;
    let ids = enqueue(&client, Some("a"), 3).await;
    let (one, _) = succeeds(&database, 1).await;
    let (other, _) = succeeds(&database, 2).await;
    let late =
        "update postroom.lanes set expires_at = '-infinity'; update postroom.relays set expires_at = '-infinity'";
    let (mut holds, mut waits) = (one, other);
    let mut taken = 0;
    // Each takes the lanes from the other in turn, and each goes on.
    for _ in 0..30 {
        client.batch_execute(late).await.unwrap();
        let deaths = renew(&holds).await.deaths;
        assert!(deaths < 3, "{deaths} relays are said to have died");
        let claimed = holds.claim(SINGLE).await.unwrap().deliveries;
        if let Some(delivery) = claimed.into_iter().next() {
            let known = holds.note(delivery.token, true).await.unwrap();
            assert!(known.deaths < 3, "I7: {known:?}");
            assert_eq!(delivery.message.id, ids[0]);
            taken += 1;
        }
        std::mem::swap(&mut holds, &mut waits);
    }
    assert!(taken >= 5, "{taken}");
}

#[tokio::test]
async fn a_death_while_nothing_shows_that_the_sink_works_is_a_doubt_only() {
    let database = prepared().await;
    let client = database.connect().await;
    let ids = enqueue(&client, Some("a"), 1).await;
    for n in 0..3 {
        let (source, _) = succeeds(&database, n).await;
        assert_eq!(next_alone(&source, false).await.1, (0, n as u32));
        dies(&database, source).await;
    }
    // It is set aside; those who claim it next are told, also in company.
    let (source, _) = succeeds(&database, 3).await;
    let (delivery, known) = next_alone(&source, false).await;
    assert_eq!(known, (0, 3));
    source.settle(&[settled(delivery.token, retry())]).await.unwrap();
    let claimed = claim_all(&source).await;
    assert_eq!((claimed[0].message.id, claimed[0].deaths, claimed[0].doubts), (ids[0], 0, 3));
    // Now the sink works, and the relay dies: that counts.
    source.note(claimed[0].token, true).await.unwrap();
    dies(&database, source).await;
    let (source, _) = succeeds(&database, 4).await;
    let claimed = claim_all(&source).await;
    assert_eq!((claimed[0].deaths, claimed[0].doubts), (1, 3));
    source.settle(&[settled(claimed[0].token, retry())]).await.unwrap();
    // Neither a relay that got past its trouble nor a graceful end forgets what is set aside and was not tried since.
    source.renew(&Report { survived: true, ..Report::default() }).await.unwrap();
    source.release().await.unwrap();
    let (source, _) = succeeds(&database, 5).await;
    let claimed = claim_all(&source).await;
    assert_eq!((claimed[0].deaths, claimed[0].doubts), (1, 3));
    source.note(claimed[0].token, true).await.unwrap();
    source.settle(&done([claimed[0].token])).await.unwrap();
    assert_eq!(count(&client, "select count(*) from postroom.suspects").await, 0, "it is through");
}

#[tokio::test]
async fn a_relay_that_dies_while_the_sink_is_blocked_died_over_no_message() {
    let database = prepared().await;
    let client = database.connect().await;
    enqueue(&client, Some("a"), 1).await;
    let (source, _) = succeeds(&database, 0).await;
    next_alone(&source, true).await;
    source.renew(&Report { sink_blocked: Some("a memory alarm".to_owned()), ..Report::default() }).await.unwrap();
    let said: String = client.query_one("select sink_error from postroom.relays", &[]).await.unwrap().get(0);
    assert_eq!(said, "a memory alarm", "it is told");
    dies(&database, source).await;
    let (source, _) = succeeds(&database, 1).await;
    assert_eq!(next_alone(&source, true).await.1, (0, 0));
}

#[tokio::test]
async fn a_stale_relay_takes_no_note_off() {
    let database = prepared().await;
    let client = database.connect().await;
    enqueue(&client, Some("a"), 1).await;
    let (stale, _) = succeeds(&database, 0).await;
    let (delivery, _) = next_alone(&stale, true).await;
    client.batch_execute("update postroom.lanes set expires_at = '-infinity'").await.unwrap();
    client.batch_execute("delete from postroom.relays").await.unwrap();
    let (source, _) = succeeds(&database, 1).await;
    next_alone(&source, true).await;
    stale.settle(&done([delivery.token])).await.unwrap();
    assert_eq!(count(&client, "select count(*) from postroom.suspects where alone").await, 1, "I9");
}

#[tokio::test]
async fn a_relay_that_dies_with_nothing_in_flight_is_not_counted() {
    let database = prepared().await;
    let client = database.connect().await;
    for n in 0..5 {
        let (source, _) = succeeds(&database, n).await;
        enqueue(&client, Some("a"), 2).await;
        assert_eq!(drain(&source).await.len(), 2);
        dies(&database, source).await;
    }
    let (source, deaths) = succeeds(&database, 5).await;
    assert_eq!((deaths, count(&client, "select sum(deaths)::bigint from postroom.lanes").await), (0, 0));
    // In one lane something is in flight: only its deaths are counted.
    enqueue(&client, Some("a"), 1).await;
    assert_eq!(claim_all(&source).await.len(), 1);
    dies(&database, source).await;
    let (source, deaths) = succeeds(&database, 6).await;
    assert_eq!((deaths, count(&client, "select sum(deaths)::bigint from postroom.lanes").await), (1, 1));
    // A parked message that is due.
    let claimed = claim_all(&source).await;
    source.settle(&[settled(claimed[0].token, retry())]).await.unwrap();
    dies(&database, source).await;
    assert_eq!(succeeds(&database, 7).await.1, 2);
}

#[tokio::test]
async fn late_rows_can_have_been_in_flight_too() {
    let database = prepared().await;
    let client = database.connect().await;
    let (mut first, mut second) = (database.connect().await, database.connect().await);
    let source = source(&database, "relay-0").await;
    // Listed in the snapshot as in progress, and without an id when it was taken.
    let early = first.transaction().await.unwrap();
    let write = "select postroom.enqueue('orders', 'order.placed', 'x'::text, key => 'a')";
    early.execute(write, &[]).await.unwrap();
    enqueue(&client, Some("a"), 1).await;
    assert_eq!(drain(&source).await.len(), 1);
    dies(&database, source).await;
    let (source, deaths) = succeeds(&database, 1).await;
    assert_eq!(deaths, 0, "it was not committed then");
    early.commit().await.unwrap();
    dies(&database, source).await;
    let (source, deaths) = succeeds(&database, 2).await;
    assert_eq!(deaths, 1);
    assert_eq!(drain(&source).await.len(), 1);
    let late = second.transaction().await.unwrap();
    late.execute(write, &[]).await.unwrap();
    enqueue(&client, Some("a"), 1).await;
    assert_eq!(drain(&source).await.len(), 1);
    late.commit().await.unwrap();
    dies(&database, source).await;
    assert_eq!(succeeds(&database, 3).await.1, 2);
}

#[tokio::test]
async fn a_few_places_over_many_lanes_find_what_there_is_in_few_reads() {
    const MESSAGES: usize = 60;
    let database = Database::create().await;
    migrate(&connector(&database), 1024).await.unwrap();
    let client = database.connect().await;
    let source = source(&database, "relay").await;
    // Into three lanes of 1,024.
    for key in ["a", "b", "c"] {
        enqueue(&client, Some(key), MESSAGES / 3).await;
    }
    let want = Want { messages: 4, lane_messages_max: 1, ..SINGLE };
    let (mut claims, mut found) = (0, Vec::<MessageId>::new());
    while found.len() < MESSAGES {
        claims += 1;
        assert!(claims <= 2 * MESSAGES, "{claims} reads found {}", found.len());
        let claimed = source.claim(Want { single: false, ..want }).await.unwrap().deliveries;
        assert!(claimed.len() <= 4);
        source.settle(&done(claimed.iter().map(|delivery| delivery.token))).await.unwrap();
        found.extend(claimed.into_iter().map(|delivery| delivery.message.id));
    }
    println!("{claims} reads for {MESSAGES} messages");
    found.sort();
    found.dedup();
    assert_eq!(found.len(), MESSAGES);
}
