//! A database restored into another cluster: stored transaction ids mean nothing there.

use postroom::{Outcome, Source};
use postroom_postgres::migrate;
use postroom_testkit::postgres::Database;
use postroom_testkit::services::PostgresServer;
use postroom_testkit::surroundings;

use crate::setup::{claim_all, connector, done, drain, enqueue, prepared, settled, source};

#[tokio::test]
async fn after_a_restore_into_another_cluster_nothing_is_lost_and_nothing_settled_comes_again() {
    let database = prepared().await;
    let client = database.connect().await;
    let relay = source(&database, "relay").await;
    let _settled = enqueue(&client, Some("a"), 10).await;
    drain(&relay).await;
    // Late when the backup was taken: below the position and not consumed.
    let open = database.connect().await;
    open.batch_execute("begin").await.unwrap();
    let late = enqueue(&open, Some("late"), 3).await;
    enqueue(&client, Some("a"), 5).await;
    drain(&relay).await;
    open.batch_execute("commit").await.unwrap();
    let fresh = enqueue(&client, Some("b"), 2).await;
    relay.release().await.unwrap();

    // The other cluster: its id is another, and the rows carry ids from far ahead of its own.
    client
        .batch_execute(
            "update postroom.settings set system_identifier = 1;
             update postroom.outbox set xid = (xid::text::bigint + 1000000000)::text::xid8;
             update postroom.lanes l set position_snapshot =
                 (select ((pg_snapshot_xmin(l.position_snapshot)::text::bigint + 1000000000) || ':'
                      || (pg_snapshot_xmax(l.position_snapshot)::text::bigint + 1000000000) || ':'
                      || coalesce((select string_agg((x::text::bigint + 1000000000)::text, ',')
                                     from pg_snapshot_xip(l.position_snapshot) x), ''))::pg_snapshot)
              where l.position_seq > 0;",
        )
        .await
        .unwrap();
    let relay = source(&database, "relay in the other cluster").await;
    let mut found = Vec::new();
    for _ in 0..3 {
        let claimed = claim_all(&relay).await;
        let outcomes: Vec<_> = claimed.iter().map(|delivery| settled(delivery.token, Outcome::Done)).collect();
        found.extend(claimed.iter().map(|delivery| delivery.message.id));
        relay.settle(&outcomes).await.unwrap();
    }
    found.sort();
    let mut expected = [late, fresh].concat();
    expected.sort();
    assert_eq!(found, expected);
    let next = enqueue(&client, Some("a"), 2).await;
    let claimed = claim_all(&relay).await;
    assert_eq!(claimed.iter().map(|delivery| delivery.message.id).collect::<Vec<_>>(), next);
    relay.settle(&done(claimed.iter().map(|delivery| delivery.token))).await.unwrap();
}

/// The server goes back to an older state under a running relay, as it does when a standby that lagged behind is promoted:
/// transaction ids and seqs that the relay has seen are handed out again.
#[tokio::test]
async fn a_server_that_went_back_in_time_under_a_running_relay_loses_no_new_message() {
    let mut server = PostgresServer::start(&surroundings::scratch("failover").join("postgres")).unwrap();
    let database = Database::create_on(&server.url("postgres")).await;
    migrate(&connector(&database), 4).await.unwrap();
    let relay = source(&database, "relay").await;
    let client = database.connect().await;
    let early = enqueue(&client, Some("a"), 30).await;
    assert_eq!(drain(&relay).await, early);

    let backup = server.dir().with_extension("backup");
    let copy = |from: &std::path::Path, to: &std::path::Path| {
        let status = std::process::Command::new("cp").arg("-a").arg(from).arg(to).status().unwrap();
        assert!(status.success());
    };
    server.stop().unwrap();
    copy(server.dir(), &backup);
    server.start_again().unwrap();
    let client = database.connect().await;
    until_renewed(&relay).await;
    let forgotten = enqueue(&client, Some("a"), 50).await;
    assert_eq!(drain(&relay).await.len(), forgotten.len());

    server.kill().unwrap();
    std::fs::remove_dir_all(server.dir()).unwrap();
    copy(&backup, server.dir());
    server.start_again().unwrap();
    let client = database.connect().await;
    let new = enqueue(&client, Some("a"), 10).await;
    until_renewed(&relay).await;
    assert_eq!(drain(&relay).await, new, "I1: seqs below the old position are new again");
    std::fs::remove_dir_all(&backup).unwrap();
}

/// Renews until the relay has its lanes again: calls fail while it finds out that the server is another.
async fn until_renewed(relay: &postroom_postgres::LogSource) {
    for _ in 0..20 {
        if let Ok(standing) = relay.renew(&postroom::Report::default()).await
            && standing.held > 0
        {
            return;
        }
    }
    panic!("the relay did not get its lanes back");
}
