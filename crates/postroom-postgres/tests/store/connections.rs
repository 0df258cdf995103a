//! One database, many routes: they share connections, and wait for a database that is away.

use std::sync::Arc;
use std::time::Duration;

use postroom::{Report, Route, Source, Store, Want};
use postroom_testkit::postgres::Database;
use postroom_testkit::services::PostgresServer;
use postroom_testkit::surroundings;

use crate::setup::{claim_all, done, enqueue, open, prepared, route, store};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twenty_five_routes_share_a_few_connections_and_each_gets_everything() {
    let database = prepared().await;
    let client = database.connect().await;
    let store = store(&database);
    let mut sources: Vec<Arc<dyn Source>> = Vec::new();
    for n in 0..25 {
        sources.push(store.source(&Route { name: format!("route-{n}"), ..route() }, "relay").await.unwrap());
    }
    let mut ids = enqueue(&client, None, 200).await;
    ids.sort();
    let work = sources.into_iter().map(|source| {
        let ids = ids.clone();
        tokio::spawn(async move {
            let mut found = Vec::new();
            while found.len() < ids.len() {
                source.renew(&Report::default()).await.unwrap();
                let claimed = source.claim(Want::up_to(30)).await.unwrap();
                source.settle(&done(claimed.deliveries.iter().map(|delivery| delivery.token))).await.unwrap();
                found.extend(claimed.deliveries.into_iter().map(|delivery| delivery.message.id));
            }
            found.sort();
            assert_eq!(found, ids);
        })
    });
    for work in work.collect::<Vec<_>>() {
        work.await.unwrap();
    }
    let sql = "select count(*) from pg_stat_activity
                where datname = current_database() and pid <> pg_backend_pid() and application_name = 'postroom'";
    let connections: i64 = client.query_one(sql, &[]).await.unwrap().get(0);
    assert!((1..=15).contains(&connections), "{connections} connections for 25 routes");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_route_that_starts_while_its_database_is_away_is_registered_when_it_is_back() {
    let mut server = PostgresServer::start(&surroundings::scratch("away").join("postgres")).unwrap();
    let database = Database::create_on(&server.url("postgres")).await;
    postroom_postgres::migrate(store(&database).connector(), 4).await.unwrap();
    let ids = enqueue(&database.connect().await, Some("a"), 3).await;
    server.kill().unwrap();
    let source = open(&database, &route(), "relay").await.unwrap();
    assert!(source.renew(&Report::default()).await.is_err_and(|error| error.is_transient()));
    let claimed = source.claim(Want::up_to(10)).await;
    assert!(claimed.map_or(true, |claimed| claimed.deliveries.is_empty()), "it holds nothing");
    server.start_again().unwrap();
    while !source.renew(&Report::default()).await.is_ok_and(|standing| standing.held == 4) {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let claimed = claim_all(&source).await;
    assert_eq!(claimed.iter().map(|delivery| delivery.message.id).collect::<Vec<_>>(), ids);
}

/// The waits of some must not use up the connections of all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn routes_whose_rows_are_locked_do_not_keep_the_others_from_renewing_and_settling() {
    let database = prepared().await;
    let (client, locker) = (database.connect().await, database.connect().await);
    let store = store(&database);
    let mut sources: Vec<Arc<dyn Source>> = Vec::new();
    for n in 0..12 {
        let source = store.source(&Route { name: format!("route-{n:02}"), ..route() }, "relay").await.unwrap();
        assert_eq!(source.renew(&Report::default()).await.unwrap().held, 16);
        sources.push(source);
    }
    enqueue(&client, None, 100).await;
    let lock = "begin; select from postroom.lanes where route < 'route-06' for update";
    locker.batch_execute(lock).await.unwrap();
    let locked: Vec<_> = sources[..6]
        .iter()
        .cloned()
        .map(|source| {
            tokio::spawn(async move {
                loop {
                    let claimed = source.claim(Want::up_to(10)).await.unwrap_or_default();
                    let _ = source.settle(&done(claimed.deliveries.iter().map(|delivery| delivery.token))).await;
                    let _ = source.renew(&Report::default()).await;
                }
            })
        })
        .collect();
    let free = sources[6..].iter().cloned().map(|source| {
        tokio::spawn(async move {
            let mut found = 0;
            while found < 100 {
                assert_eq!(source.renew(&Report::default()).await.unwrap().held, 16);
                let claimed = source.claim(Want::up_to(10)).await.unwrap();
                source.settle(&done(claimed.deliveries.iter().map(|delivery| delivery.token))).await.unwrap();
                found += claimed.deliveries.len();
            }
        })
    });
    // Far below the lease, however slow the machine is.
    let free = futures_util::future::join_all(free.collect::<Vec<_>>());
    for ended in tokio::time::timeout(Duration::from_secs(120), free).await.expect("they are not held up") {
        ended.unwrap();
    }
    locked.iter().for_each(tokio::task::JoinHandle::abort);
    locker.batch_execute("rollback").await.unwrap();
}
