//! Tables that already exist, with what only PostgreSQL has.

use std::collections::BTreeMap;

use postroom::{Done, DoneWhen, Intake, Intakes, Literal, Mapping, Setting, Template};
use postroom_postgres::{Connector, Database as Store};
use postroom_testkit::postgres::Database;

/// Rows of `e` at `new` become `done`.
fn intake(pending: &str, sent: &str) -> Intake {
    let template = |text: &str| text.parse::<Template>().unwrap();
    let state = |value: &str| vec![("state".to_owned(), Setting::Text(value.to_owned()))];
    Intake {
        name: "e".to_owned(),
        table: "e".parse().unwrap(),
        row: None,
        order: Vec::new(),
        pending: vec![("state".to_owned(), vec![Literal::Text(pending.to_owned())])],
        taken: state("taken"),
        sent: Done::Set(state(sent)),
        dead: Vec::new(),
        done: DoneWhen::Sent,
        message: Mapping {
            id: None,
            topic: template("orders"),
            kind: template("order.placed"),
            payload: template("${p}"),
            key: None,
            routing_key: None,
            content_type: None,
            headers: None,
            header: BTreeMap::new(),
            tenant_id: None,
            aggregate_type: None,
            aggregate_id: None,
            aggregate_version: None,
            occurred_at: None,
            visible_at: None,
        },
    }
}

async fn table(rest: &str) -> (Database, Store) {
    let database = Database::create().await;
    let connector = Connector::new(database.url()).unwrap();
    postroom_postgres::migrate(&connector, 4).await.unwrap();
    let store = Store::new(database.url()).unwrap();
    let client = database.connect().await;
    client.batch_execute(&format!("create table e (id int primary key, p text, state text {rest})")).await.unwrap();
    (database, store)
}

/// A row of such a state never comes, so nothing would ever be taken.
#[tokio::test]
async fn a_state_that_no_row_can_have_is_told() {
    let (database, store) = table("check (state in ('new', 'taken', 'done')), other int check (other > 1)").await;
    let found = store.check_intake(&intake("nwe", "done")).await.unwrap();
    assert!(!found[0].ok && found[0].found.contains("never \"nwe\": constraint e_state_check"), "{found:?}");
    assert!(store.check_intake(&intake("new", "done")).await.unwrap()[0].ok);
    database.connect().await.batch_execute("insert into e values (1, 'p', 'new')").await.unwrap();
    let found = store.check_intake(&intake("new", "dnoe")).await.unwrap();
    assert!(!found[0].ok && found[0].found.contains(": sent: the one row"), "{found:?}");
}

/// I7, I25: a trigger that drops the update. The message must not go out again with each look.
#[tokio::test]
async fn a_mark_that_is_suppressed_is_told() {
    let (database, store) = table("").await;
    let client = database.connect().await;
    client
        .batch_execute(
            "insert into e values (1, 'p', 'new'), (2, 'p', 'new');
             create function no_change() returns trigger language plpgsql as $$ begin return null; end $$;
             create trigger t before update on e for each row when (old.id = 1) execute function no_change()",
        )
        .await
        .unwrap();
    assert!(store.check_intake(&intake("new", "done")).await.unwrap()[0].ok, "one row takes it");
    let took = store.take_in(&intake("new", "done"), 10).await.unwrap();
    assert_eq!((took.taken, took.refused), (1, 1));
    let status = store.intake_status(&intake("new", "done")).await.unwrap();
    assert!(status.set_aside[0].error.contains("had no effect"), "{status:?}");
    client.batch_execute("delete from e where id = 2; insert into e values (1 + 2, 'p', 'new')").await.unwrap();
    client
        .batch_execute(
            "drop trigger t on e; create trigger t before update on e for each row execute function no_change()",
        )
        .await
        .unwrap();
    let found = store.check_intake(&intake("new", "done")).await.unwrap();
    assert!(!found[0].ok && found[0].found.contains("had no effect"), "{found:?}");
}

/// I25: rows that the relay's role sees and may not change stand before others for ever.
#[tokio::test]
async fn rows_that_a_policy_keeps_hold_up_no_others() {
    let (database, store) = table("").await;
    let role = format!("relay_{}", postroom_testkit::surroundings::unique());
    database
        .connect()
        .await
        .batch_execute(&format!(
            "insert into e select n, 'p', 'new' from generate_series(1, 700) n; create index on e (state, id);
             create role {role} login; grant usage on schema postroom to {role};
             grant all on all tables in schema postroom to {role}; grant usage on all sequences in schema postroom to {role};
             grant select, update on e to {role}; alter table e enable row level security;
             create policy seen on e for select using (true); create policy changed on e for update using (id > 600)"
        ))
        .await
        .unwrap();
    let limited = Store::new(&database.url().replace("postgres://postgres@", &format!("postgres://{role}@"))).unwrap();
    let took = limited.take_in(&intake("new", "done"), 500).await.unwrap();
    assert_eq!((took.taken, took.held), (100, 600));
    drop(store);
}

/// A trigger that names a table without its schema finds it, as it does in the application's sessions.
#[tokio::test]
async fn triggers_find_what_they_name() {
    let (database, store) = table("").await;
    let client = database.connect().await;
    client
        .batch_execute(
            "create table audit (n int); insert into e values (1, 'p', 'new');
             create function note() returns trigger language plpgsql as $$ begin insert into audit values (new.id); return new; end $$;
             create trigger t after update on e for each row execute function note()",
        )
        .await
        .unwrap();
    let found = store.check_intake(&intake("new", "done")).await.unwrap();
    assert!(found[0].ok, "{found:?}");
    let count: i64 = client.query_one("select count(*) from audit", &[]).await.unwrap().get(0);
    assert_eq!(count, 0, "the trial was rolled back");
    assert_eq!(store.take_in(&intake("new", "done"), 10).await.unwrap().taken, 1);
    client.batch_execute("drop table audit; insert into e values (2, 'p', 'new')").await.unwrap();
    let found = store.check_intake(&intake("new", "done")).await.unwrap();
    assert!(!found[0].ok && found[0].found.contains("relation \"audit\" does not exist"), "{found:?}");
}
