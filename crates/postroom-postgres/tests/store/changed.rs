//! What an operator does to the database under a running relay: restores in place, sequences set back, tables truncated.

use std::collections::HashSet;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use postroom::{MessageId, Report, Route, Source, StartAt};
use postroom_postgres::LogSource;
use postroom_testkit::postgres::Database;
use postroom_testkit::services::PostgresServer;
use postroom_testkit::surroundings;
use tokio_postgres::Client;

use crate::setup::{claim_all, connector, done, drain, enqueue, open, prepared, renew, route, source, source_of, want};

/// Nothing here takes as long as this unless it is stuck.
const STUCK: Duration = Duration::from_secs(20);

/// Goes on as a relay does until `expected` have come out, however often calls fail meanwhile.
async fn until_out(relay: &LogSource, expected: &[MessageId]) -> Vec<MessageId> {
    let (mut out, began) = (Vec::new(), Instant::now());
    while began.elapsed() < STUCK {
        let _ = relay.renew(&Report::default()).await;
        if let Ok(claimed) = relay.claim(postroom::Want::up_to(500)).await {
            out.extend(claimed.deliveries.iter().map(|delivery| delivery.message.id));
            let _ = relay.settle(&done(claimed.deliveries.iter().map(|delivery| delivery.token))).await;
        }
        if expected.iter().all(|id| out.contains(id)) {
            return out;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let missing = expected.iter().filter(|id| !out.contains(id)).count();
    panic!("I1: {missing} of {} messages were passed over", expected.len());
}

/// First occurrences only, of those that are expected.
fn firsts(out: &[MessageId], expected: &[MessageId]) -> Vec<MessageId> {
    let mut seen = HashSet::new();
    out.iter().filter(|id| expected.contains(id) && seen.insert(**id)).copied().collect()
}

fn program(name: &str) -> Command {
    let mut command = Command::new(name);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

fn run(mut command: Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn dump(database: &Database) -> std::path::PathBuf {
    let file = surroundings::scratch("dump").join("dump");
    let mut command = program("pg_dump");
    command.args(["-Fc", "-f"]).arg(&file).arg(database.url());
    run(command);
    file
}

/// A relay far ahead of the backup goes on over the restored tables: what is written after the restore comes out.
#[tokio::test]
async fn a_restore_in_place_by_clean_under_a_running_relay_loses_nothing_new() {
    let database = prepared().await;
    let client = database.connect().await;
    let relay = source(&database, "relay").await;
    let settled = enqueue(&client, Some("a"), 300).await;
    assert_eq!(drain(&relay).await.len(), settled.len());
    let waiting = enqueue(&client, Some("b"), 10).await;
    let file = dump(&database);
    assert_eq!(drain(&relay).await, waiting);
    let forgotten = enqueue(&client, Some("a"), 300).await;
    assert_eq!(drain(&relay).await, forgotten);

    let mut restore = program("pg_restore");
    restore.args(["--clean", "--if-exists", "-d", database.url()]).arg(&file);
    run(restore);
    let new = enqueue(&client, Some("a"), 200).await;
    let expected = [waiting, new.clone()].concat();
    let out = until_out(&relay, &expected).await;
    assert_eq!(firsts(&out, &new), new, "I4");
    assert!(
        settled.iter().all(|id| !out.contains(id)),
        "I3: what was settled when the backup was made does not come again"
    );

    let again = source(&database, "another relay").await;
    drop(relay);
    assert!(again.claim(want(10)).await.unwrap().deliveries.is_empty());
}

#[tokio::test]
async fn a_database_dropped_and_restored_on_the_same_server_under_a_running_relay_loses_nothing_new() {
    let server = PostgresServer::start(&surroundings::scratch("in-place").join("postgres")).unwrap();
    let database = Database::create_on(&server.url("postgres")).await;
    postroom_postgres::migrate(&connector(&database), 4).await.unwrap();
    let client = database.connect().await;
    let relay = source(&database, "relay").await;
    let settled = enqueue(&client, Some("a"), 300).await;
    assert_eq!(drain(&relay).await, settled);
    let file = dump(&database);
    let forgotten = enqueue(&client, Some("a"), 300).await;
    assert_eq!(drain(&relay).await, forgotten);
    drop(client);

    let name = database.url().rsplit('/').next().unwrap().to_owned();
    let admin = postroom_testkit::postgres::connect(&server.url("postgres")).await;
    admin.batch_execute(&format!("drop database {name} with (force)")).await.unwrap();
    let _ = relay.renew(&Report::default()).await;
    admin.batch_execute(&format!("create database {name}")).await.unwrap();
    let _ = relay.renew(&Report::default()).await;
    let mut restore = program("pg_restore");
    restore.args(["-d", database.url()]).arg(&file);
    run(restore);
    let client = database.connect().await;
    let new = enqueue(&client, Some("a"), 200).await;
    let out = until_out(&relay, &new).await;
    assert_eq!(firsts(&out, &new), new, "I4");
    assert!(settled.iter().all(|id| !out.contains(id)), "I3");
}

/// The relay must not write what it knows over what the backup says, not even in the moment before it notices.
#[tokio::test]
async fn positions_of_before_a_restore_are_not_written_over_the_restored_ones() {
    let database = prepared().await;
    let client = database.connect().await;
    let relay = source(&database, "relay").await;
    enqueue(&client, Some("a"), 20).await;
    drain(&relay).await;
    let file = dump(&database);
    enqueue(&client, Some("a"), 20).await;
    let in_hand = claim_all(&relay).await;
    let mut restore = program("pg_restore");
    restore.args(["--clean", "--if-exists", "--single-transaction", "-d", database.url()]).arg(&file);
    run(restore);
    let settled = relay.settle(&done(in_hand.iter().map(|delivery| delivery.token))).await.unwrap();
    assert!(!settled.lost_lanes.is_empty(), "I9: the epoch in the backup is the relay's own, but the table is not");
    let sql = "select max(position_seq) from postroom.lanes";
    assert_eq!(client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0), 20);
}

/// Sets the sequence back, and writes less, exactly as much, and more than it was set back by, in one transaction or many.
#[tokio::test]
async fn a_sequence_set_back_under_a_running_relay_loses_nothing_and_keeps_the_order() {
    for (back_to, written, at_once) in
        [(1, 100, false), (1, 100, true), (1, 40, true), (60, 40, true), (60, 100, false), (99, 30, false)]
    {
        for reset in
            ["select setval('postroom.outbox_seq_seq', $)", "alter table postroom.outbox alter seq restart with $"]
        {
            let database = prepared().await;
            let client = database.connect().await;
            let relay = source(&database, "relay").await;
            let before = enqueue(&client, Some("a"), 100).await;
            assert_eq!(drain(&relay).await, before);
            // The rows of before are gone, as after a clean-up, or their seqs would be taken.
            client.batch_execute("delete from postroom.outbox").await.unwrap();
            let waiting = enqueue(&client, Some("a"), 5).await;
            client.batch_execute(&reset.replace('$', &back_to.to_string())).await.unwrap();
            let client = database.connect().await;
            if at_once {
                client.batch_execute("begin").await.unwrap();
            }
            let mut new = Vec::new();
            for _ in 0..written {
                // One that meets a seq that is still there fails in its writer's hand; nothing is lost by it.
                if at_once {
                    client.batch_execute("savepoint s").await.unwrap();
                }
                let sql = "select postroom.enqueue('orders', 'order.placed', 'x'::text, key => 'a')";
                match client.query_one(sql, &[]).await {
                    Ok(row) => new.push(MessageId::from(row.get::<_, uuid::Uuid>(0))),
                    Err(error) => {
                        assert_eq!(error.code(), Some(&tokio_postgres::error::SqlState::UNIQUE_VIOLATION));
                        if at_once {
                            client.batch_execute("rollback to savepoint s").await.unwrap();
                        }
                    }
                }
            }
            if at_once {
                client.batch_execute("commit").await.unwrap();
            }
            let expected = [waiting, new].concat();
            let out = until_out(&relay, &expected).await;
            assert_eq!(firsts(&out, &expected), expected, "I4: back to {back_to}, {written} written, {reset}");
            assert!(out.len() <= 2 * expected.len(), "I3: {} for {}", out.len(), expected.len());
            let later = enqueue(&client, Some("a"), 20).await;
            assert_eq!(until_out(&relay, &later).await, later, "I4, and nothing is repeated any more");
        }
    }
}

/// Nobody relays while it happens, and the sequence has passed the position again when a relay comes.
#[tokio::test]
async fn a_sequence_set_back_while_no_relay_runs_loses_nothing() {
    let database = prepared().await;
    let client = database.connect().await;
    let relay = source(&database, "relay").await;
    enqueue(&client, Some("a"), 50).await;
    drain(&relay).await;
    // A floor is stored with a position that follows it.
    enqueue(&client, Some("a"), 50).await;
    drain(&relay).await;
    relay.release().await.unwrap();
    client.batch_execute("delete from postroom.outbox; select setval('postroom.outbox_seq_seq', 1)").await.unwrap();
    let new = enqueue(&client, Some("a"), 150).await;
    let relay = source(&database, "the next relay").await;
    let out = until_out(&relay, &new).await;
    assert_eq!(firsts(&out, &new), new);
}

/// Its seq is that of a message which is dead: it is not taken for that one.
#[tokio::test]
async fn a_message_that_got_the_seq_of_a_dead_one_is_not_passed_over() {
    let database = prepared().await;
    let client = database.connect().await;
    let relay = source(&database, "relay").await;
    enqueue(&client, Some("a"), 1).await;
    let claimed = claim_all(&relay).await;
    let dead = postroom::Outcome::Dead {
        attempts: 1,
        cause: postroom::Cause::Permanent,
        error: "no".to_owned(),
        blocks_key: false,
    };
    relay.settle(&[crate::setup::settled(claimed[0].token, dead)]).await.unwrap();
    client
        .batch_execute("delete from postroom.outbox; alter table postroom.outbox alter seq restart with 1")
        .await
        .unwrap();
    let new = enqueue(&client, Some("a"), 3).await;
    until_out(&relay, &new).await;
    let dead: i64 = client.query_one("select count(*) from postroom.dead_letters", &[]).await.unwrap().get(0);
    assert_eq!(dead, 1);
}

#[tokio::test]
async fn a_truncated_outbox_goes_on_where_its_sequence_was() {
    let database = prepared().await;
    let client = database.connect().await;
    let relay = source(&database, "relay").await;
    enqueue(&client, Some("a"), 100).await;
    drain(&relay).await;
    for statement in [
        "truncate postroom.outbox restart identity",
        "truncate postroom.outbox restart identity cascade",
        "truncate postroom.outbox",
    ] {
        client.batch_execute(statement).await.unwrap();
        let new = enqueue(&client, Some("a"), 100).await;
        assert_eq!(drain(&relay).await, new, "{statement}");
    }
    client.batch_execute("begin; truncate postroom.outbox restart identity; rollback").await.unwrap();
    client.batch_execute("select setval('postroom.outbox_seq_seq', 1000000)").await.unwrap();
    let new = enqueue(&client, Some("a"), 10).await;
    assert_eq!(drain(&relay).await, new, "setval forward is harmless");
}

/// Nothing is granted and nothing is read while only a part of the tables is back.
#[tokio::test]
async fn a_schema_that_is_not_whole_is_refused() {
    let database = prepared().await;
    let client = database.connect().await;
    let relay = source(&database, "relay").await;
    client
        .batch_execute("begin; delete from postroom.settings; drop index postroom.outbox_late; commit")
        .await
        .unwrap();
    let error = relay.renew(&Report::default()).await.unwrap_err();
    let shown = format!("{error}: {:?}", std::error::Error::source(&error));
    assert!(shown.contains("not whole") && shown.contains("outbox_late"), "{shown}");
    let Err(error) = open(&database, &route(), "another").await else { panic!("it opened") };
    assert!(error.to_string().contains("missing outbox_late"), "{error}");
}

async fn clock_back(client: &Client, lanes: &str) {
    // As it looks when the clock has gone back: what was noted with the clock of before lies in the future.
    client
        .batch_execute(&format!(
            "update postroom.lanes set expires_at = expires_at + interval '1 hour' {lanes};
             update postroom.relays set expires_at = expires_at + interval '1 hour';
             update postroom.parked set due_at = due_at + interval '1 hour', waits_since = waits_since + interval '1 hour'"
        ))
        .await
        .unwrap();
}

#[tokio::test]
async fn lanes_of_a_dead_relay_are_taken_over_although_the_clock_went_back() {
    let database = prepared().await;
    let client = database.connect().await;
    let lease = Duration::from_secs(1);
    let short = Route { lease, ..route() };
    let dead = source_of(&database, &short, "dead").await;
    let ids = enqueue(&client, Some("a"), 2).await;
    let claimed = claim_all(&dead).await;
    let retry = postroom::Outcome::Retry { after: Duration::from_millis(500), attempts: 1, error: "no".to_owned() };
    dead.settle(&[crate::setup::settled(claimed[0].token, retry)]).await.unwrap();
    drop(dead);
    clock_back(&client, "").await;
    let relay = open(&database, &short, "observer").await.unwrap();
    assert_eq!(renew(&relay).await.held, 0, "it has seen nothing yet");
    let out = until_out(&relay, &ids).await;
    assert_eq!(firsts(&out, &ids), ids, "the retry came first, and did not wait for an hour");
    assert_eq!(renew(&relay).await.held, 16, "the dead one has no share any more");
}

/// The backup was made while the clock was an hour ahead; nothing that the running relay sees of the clock tells that.
#[tokio::test]
async fn waits_of_a_backup_from_a_clock_that_was_ahead_are_shortened_when_it_is_restored() {
    let database = prepared().await;
    let client = database.connect().await;
    let relay = source(&database, "relay").await;
    let ids = enqueue(&client, Some("a"), 2).await;
    let claimed = claim_all(&relay).await;
    let retry = postroom::Outcome::Retry { after: Duration::from_millis(500), attempts: 1, error: "no".to_owned() };
    relay.settle(&[crate::setup::settled(claimed[0].token, retry)]).await.unwrap();
    clock_back(&client, "where false").await;
    let file = dump(&database);
    client.batch_execute("delete from postroom.parked").await.unwrap();
    renew(&relay).await;
    let mut restore = program("pg_restore");
    restore.args(["--clean", "--if-exists", "-d", database.url()]).arg(&file);
    run(restore);
    // It comes within seconds, and not in an hour.
    until_out(&relay, &ids).await;
}

/// Somebody thought that this starts a route afresh.
#[tokio::test]
async fn lanes_or_a_route_that_were_deleted_come_back_and_nothing_waiting_is_lost() {
    for start_at in StartAt::ALL {
        let start_at = *start_at;
        let database = prepared().await;
        let client = database.connect().await;
        let relay = source_of(&database, &Route { start_at, ..route() }, "relay").await;
        for delete in
            ["delete from postroom.lanes", "delete from postroom.routes", "truncate postroom.lanes, postroom.routes"]
        {
            let waiting = enqueue(&client, Some("a"), 3).await;
            client.batch_execute(delete).await.unwrap();
            let also = enqueue(&client, Some("b"), 3).await;
            if delete.starts_with("truncate") && start_at == StartAt::Now {
                // Nothing says any more that it ever ran.
                until_out(&relay, &[]).await;
            } else {
                until_out(&relay, &[waiting, also].concat()).await;
            }
        }
    }
}

/// Two at once, or one beside a relay that reads, ended in a deadlock; PostgreSQL does not see one while its clock is behind.
#[tokio::test]
async fn putting_positions_right_waits_for_no_reader_and_for_no_long_transaction_without_end() {
    let database = prepared().await;
    let client = database.connect().await;
    drop(source(&database, "relay").await);
    let waiting = enqueue(&client, Some("a"), 3).await;
    client.batch_execute("update postroom.settings set outbox_oid = 1").await.unwrap();
    let reader = database.connect().await;
    reader
        .batch_execute("begin; select from postroom.settings; select from postroom.lanes; select from postroom.outbox")
        .await
        .unwrap();
    let writer = database.connect().await;
    writer.batch_execute("begin; select postroom.enqueue('orders', 'order.placed', 'x')").await.unwrap();
    let refused = client.query_one("select postroom.mend()", &[]).await.unwrap_err();
    assert_eq!(refused.code(), Some(&tokio_postgres::error::SqlState::LOCK_NOT_AVAILABLE), "{refused}");
    writer.batch_execute("rollback").await.unwrap();
    client.batch_execute("set lock_timeout = '1s'").await.unwrap();
    let done: String = client.query_one("select postroom.mend()", &[]).await.unwrap().get(0);
    assert_eq!(done, "rebased");
    reader.batch_execute("commit").await.unwrap();
    assert_eq!(drain(&source(&database, "relay").await).await, waiting);
}
