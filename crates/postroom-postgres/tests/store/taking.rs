//! What is promised to a worker in any language that takes messages from an inbox by SQL.

use postroom::{Deed, KeyDeed, Operator, Report, Route, Source};
use postroom_postgres::LogSource;
use postroom_testkit::postgres::Database;
use tokio_postgres::Client;
use tokio_postgres::error::SqlState;

const TAKE: &str = "select ordering_key from postroom.inbox_take('billing', 10, 'me')";

async fn prepared() -> (Database, Client) {
    let database = Database::create().await;
    let store = crate::setup::store(&database);
    postroom_postgres::migrate(store.connector(), 4).await.unwrap();
    let client = database.connect().await;
    (database, client)
}

/// As a filler keeps them, in this order.
async fn keep(client: &Client, keys: &[&str]) {
    for key in keys {
        let sql = "insert into postroom.inbox_messages (consumer, message_id, state, due_at, ordering_key, topic, type, payload, key, content_type)
                   values ('billing', gen_random_uuid(), 'new', clock_timestamp(), $1, 't', 't', 'x', $1, 'text/plain')";
        client.execute(sql, &[key]).await.unwrap();
    }
}

async fn taken(client: &Client) -> Vec<String> {
    client.query(TAKE, &[]).await.unwrap().iter().map(|row| row.get(0)).collect()
}

async fn looks_again(client: &Client) {
    client.batch_execute("update postroom.inbox_clocks set at = at - interval '6 seconds'").await.unwrap();
}

/// With a snapshot of its own it would put a message behind one that is gone.
#[tokio::test]
async fn a_take_that_does_not_see_what_others_have_settled_is_refused() {
    let (_database, client) = prepared().await;
    keep(&client, &["a"]).await;
    client.batch_execute("begin isolation level repeatable read").await.unwrap();
    let error = client.query(TAKE, &[]).await.unwrap_err();
    assert_eq!(error.code(), Some(&SqlState::INVALID_TRANSACTION_STATE));
    client.batch_execute("rollback").await.unwrap();
    assert_eq!(taken(&client).await, ["a"]);
}

#[tokio::test]
async fn what_waits_behind_nothing_is_found_again_whatever_happened() {
    let (_database, client) = prepared().await;
    let keys: Vec<String> = (0..450).map(|n| format!("k{n:03}")).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    for _ in 0..2 {
        keep(&client, &keys).await;
    }
    while !taken(&client).await.is_empty() {}
    client.batch_execute("delete from postroom.inbox_messages where state = 'claimed'").await.unwrap();
    let mut found = Vec::new();
    for _ in 0..3 {
        looks_again(&client).await;
        loop {
            let more = taken(&client).await;
            if more.is_empty() {
                break;
            }
            found.extend(more);
        }
    }
    found.sort_unstable();
    assert_eq!(found, keys);
}

#[tokio::test]
async fn arguments_that_mean_nothing_are_errors() {
    let (_database, client) = prepared().await;
    keep(&client, &["a"]).await;
    for wrong in [
        "postroom.inbox_take('billing', null)",
        "postroom.inbox_take('billing', 0)",
        "postroom.inbox_take('billing', 1, 'me', null)",
        "postroom.inbox_take('billing', 1, 'me', '10 ms')",
        "postroom.inbox_take('billing', 1, 'me', '30 s', 0)",
        "postroom.inbox_renew('billing', 'me', '-1 hour')",
        "postroom.inbox_renew('billing', 'me', null)",
    ] {
        let error = client.query(&format!("select * from {wrong}"), &[]).await.unwrap_err();
        assert_eq!(error.code(), Some(&SqlState::INVALID_PARAMETER_VALUE), "{wrong}");
    }
    assert_eq!(taken(&client).await, ["a"]);
}

/// Many languages have errors without a text.
#[tokio::test]
async fn a_failure_without_a_text_is_one_and_a_long_text_is_cut() {
    let (_database, client) = prepared().await;
    keep(&client, &["a", "b"]).await;
    let rows = client.query("select message_id, claim from postroom.inbox_take('billing', 2)", &[]).await.unwrap();
    let of = |at: usize| (rows[at].get::<_, uuid::Uuid>(0), rows[at].get::<_, i64>(1));
    let sql = "select postroom.inbox_fail('billing', $1, $2, null, give_up => true)";
    client.query_one(sql, &[&of(0).0, &of(0).1]).await.unwrap();
    let sql = "select postroom.inbox_fail('billing', $1, $2, repeat('x', 1000000))";
    client.query_one(sql, &[&of(1).0, &of(1).1]).await.unwrap();
    let row = client.query_one("select error, cause from postroom.dead_consume", &[]).await.unwrap();
    assert_eq!((row.get(0), row.get(1)), ("the worker gave no error text", "permanent"));
    let row = client.query_one("select length(last_error) from postroom.inbox_messages where attempts = 1", &[]).await;
    assert_eq!(row.unwrap().get::<_, i32>(0), 16384);
}

#[tokio::test]
async fn renewing_waits_for_no_effect_that_is_being_committed() {
    let (database, client) = prepared().await;
    keep(&client, &["a", "b"]).await;
    let rows =
        client.query("select message_id, claim from postroom.inbox_take('billing', 2, 'me')", &[]).await.unwrap();
    let effect = database.connect().await;
    effect.batch_execute("begin").await.unwrap();
    let sql = "select postroom.inbox_done('billing', $1, $2)";
    effect.query(sql, &[&rows[0].get::<_, uuid::Uuid>(0), &rows[0].get::<_, i64>(1)]).await.unwrap();
    client.batch_execute("set statement_timeout = '5s'").await.unwrap();
    let renewed: i64 = client.query_one("select postroom.inbox_renew('billing', 'me')", &[]).await.unwrap().get(0);
    assert_eq!(renewed, 1);
    effect.batch_execute("commit").await.unwrap();
}

/// Operators and relays wait for each other's locks, and then must see what the other one did.
#[tokio::test]
async fn operators_and_relays_see_what_was_committed_before_each_statement() {
    let (database, client) = prepared().await;
    let setting = "do $$ begin
        execute format('alter database %I set default_transaction_isolation = %L', current_database(), 'repeatable read'); end $$";
    client.batch_execute(setting).await.unwrap();
    let guard = "create function public.guard() returns trigger language plpgsql as $$ begin
                     if current_setting('transaction_isolation') <> 'read committed' then raise exception 'an old state'; end if;
                     return new; end $$;
                 create trigger guard before insert or update on postroom.lanes for each row execute function public.guard();
                 create trigger guard before insert on postroom.audit for each row execute function public.guard()";
    client.batch_execute(guard).await.unwrap();
    let store = crate::setup::store(&database);
    let source = LogSource::open(&store, &Route::new("orders"), "relay").await.unwrap();
    source.renew(&Report::default()).await.unwrap();
    let deed = Deed { actor: "ann".to_owned(), reason: "ticket 7".to_owned() };
    assert!(store.act_on_key("orders", "a", KeyDeed::Park, &deed).await.unwrap());
}

/// Its payload is gone with its effect.
#[tokio::test]
async fn what_is_settled_is_not_buried() {
    let (_database, client) = prepared().await;
    keep(&client, &["a"]).await;
    let row = client.query_one("select message_id, claim from postroom.inbox_take('billing')", &[]).await.unwrap();
    let (id, claim): (uuid::Uuid, i64) = (row.get(0), row.get(1));
    client.query("select postroom.inbox_done('billing', $1, $2)", &[&id, &claim]).await.unwrap();
    client.query("select postroom.inbox_bury('billing', $1, 1, 'permanent', 'no')", &[&id]).await.unwrap();
    let dead: i64 = client.query_one("select count(*) from postroom.dead_consume", &[]).await.unwrap().get(0);
    assert_eq!(dead, 0);
}
