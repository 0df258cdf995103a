//! Migrations: repeatable, concurrent, guarded by checksums.

use postroom::{LANES_DEFAULT, MigrateError, Operator};
use postroom_postgres::{migrate, print_sql, schema_version};
use postroom_testkit::postgres::Database;

use crate::setup::connector;

#[tokio::test]
async fn migrating_again_changes_nothing() {
    let database = Database::create().await;
    let first = migrate(&connector(&database), 4).await.unwrap();
    let names = [
        "foundation",
        "relays",
        "audit",
        "trouble",
        "receiving",
        "watch",
        "fillers",
        "doubts",
        "clocks",
        "locks",
        "prune",
        "safe_names",
        "truth",
        "operators",
        "retention",
        "sizes",
        "operations",
        "archive",
        "reconcile",
        "waits",
        "steps",
        "intake",
        "queues",
        "taking",
    ];
    assert_eq!(first.applied, (1..).zip(names).collect::<Vec<_>>());
    let second = migrate(&connector(&database), 4).await.unwrap();
    assert_eq!((second.applied.len(), second.version), (0, first.version));
}

#[tokio::test]
async fn processes_that_migrate_at_once_do_not_meet() {
    let database = Database::create().await;
    let connector = connector(&database);
    let runs = futures_util::future::join_all((0..8).map(|_| migrate(&connector, 4))).await;
    let applied: usize = runs.into_iter().map(|run| run.unwrap().applied.len()).sum();
    assert_eq!(applied, schema_version() as usize, "one of them does all of it");
}

#[tokio::test]
async fn the_printed_script_is_the_same_schema() {
    let database = Database::create().await;
    database.connect().await.batch_execute(&print_sql(LANES_DEFAULT).unwrap()).await.unwrap();
    assert!(migrate(&connector(&database), LANES_DEFAULT).await.unwrap().applied.is_empty());
}

#[tokio::test]
async fn rows_with_times_that_are_none_get_the_nearest_time() {
    let database = Database::create().await;
    let client = database.connect().await;
    // The schema of before, with rows that it let in.
    let script = print_sql(LANES_DEFAULT).unwrap();
    let before = &script[..script.find("-- A time beyond year 9999").unwrap()];
    client.batch_execute(&format!("{before} commit;")).await.unwrap();
    let insert =
        "insert into postroom.outbox (topic, type, payload, occurred_at) values ('t', 'k', '', $1::text::timestamptz)";
    for time in ["infinity", "-infinity", "294276-12-31", "2026-11-23 18:00:00+00"] {
        client.execute(insert, &[&time]).await.unwrap();
    }
    assert_eq!(
        migrate(&connector(&database), None).await.unwrap().applied,
        [(21, "steps"), (22, "intake"), (23, "queues"), (24, "taking")]
    );
    let years = "select extract(year from occurred_at at time zone 'UTC')::int from postroom.outbox order by seq";
    let years: Vec<i32> = client.query(years, &[]).await.unwrap().iter().map(|row| row.get(0)).collect();
    assert_eq!(years, [9999, 1, 9999, 2026]);
    let store = crate::setup::store(&database);
    let filter = postroom::MessageFilter::default();
    assert_eq!(store.messages(&filter, 10).await.unwrap().messages.len(), 4);
}

#[tokio::test]
async fn a_changed_or_newer_schema_is_refused() {
    let database = Database::create().await;
    migrate(&connector(&database), 4).await.unwrap();
    let client = database.connect().await;
    client.batch_execute("update postroom.migrations set checksum = 'other' where number = 1").await.unwrap();
    assert!(matches!(migrate(&connector(&database), 4).await, Err(MigrateError::Changed { number: 1, .. })));
    client.batch_execute("insert into postroom.migrations values (999, 'future', 'x')").await.unwrap();
    client.batch_execute("delete from postroom.migrations where number = 1").await.unwrap();
    assert!(matches!(migrate(&connector(&database), 4).await, Err(MigrateError::Newer { number: 999, .. })));
}

#[tokio::test]
async fn lanes_out_of_range_are_refused_before_anything_is_done() {
    let database = Database::create().await;
    for lanes in [0, 1025] {
        assert!(matches!(migrate(&connector(&database), lanes).await, Err(MigrateError::Lanes(_))));
    }
    let there: bool =
        database.connect().await.query_one("select to_regnamespace('postroom') is not null", &[]).await.unwrap().get(0);
    assert!(!there);
}

#[tokio::test]
async fn a_database_without_the_schema_says_what_to_do() {
    let database = Database::create().await;
    let error = crate::setup::store(&database).status().await.unwrap_err();
    assert!(error.to_string().contains("postroom migrate"), "{error}");
}

#[tokio::test]
async fn the_plan_tells_what_migrate_would_do_and_another_number_of_lanes_is_refused() {
    use postroom::Store;
    let database = Database::create().await;
    let store = crate::setup::store(&database);
    let plan = store.plan().await.unwrap();
    assert_eq!((plan.version, plan.steps.len()), (0, schema_version() as usize));
    assert!(plan.steps.iter().all(|step| !step.locks.is_empty()));
    store.migrate(Some(4)).await.unwrap();
    let plan = store.plan().await.unwrap();
    assert_eq!((plan.version, plan.steps.len()), (i64::from(schema_version()), 0));
    let refused = store.migrate(Some(8)).await.unwrap_err();
    assert!(matches!(refused, MigrateError::OtherLanes { schema: 4, asked: 8 }), "{refused}");
    assert!(store.migrate(None).await.unwrap().applied.is_empty());
}
