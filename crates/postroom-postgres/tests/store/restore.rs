//! A database restored into another cluster: stored transaction ids mean nothing there.

use postroom::{Outcome, Source};

use crate::setup::{claim_all, done, drain, enqueue, prepared, settled, source};

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
