//! A role that may create functions and operators in `public` cannot run code as a relay, a writer, a consumer, an operator, or
//! whoever migrates. Each hostile overload fits a call of ours better than the one of `pg_catalog` does, and would leave a trace.

use std::time::Duration;

use postroom::{
    Cause, Consumer, ConsumerStore, DeadDeed, DeadFilter, Deed, KeyDeed, Message, Operator, Outbox, Outcome,
    RouteChange, Session, Settle, Side, Source,
};
use postroom_postgres::{LogSource, Postgres, PostgresSession, migrate};
use postroom_testkit::postgres::{Database, connect};
use tokio_postgres::error::SqlState;

use crate::setup::{claim_all, connector, drain, renew, route, settled, store};

/// Arguments and result of functions that fit better than ours, by name.
const FUNCTIONS: &[(&str, &str, &str)] = &[
    ("hashtextextended", "text, integer", "bigint"),
    ("jsonb_build_object", "text, timestamptz, text, integer, text, text", "jsonb"),
    ("jsonb_build_array", "jsonb", "jsonb"),
    ("json_build_object", "text, text", "json"),
    ("array_length", "text[], integer", "integer"),
    ("unnest", "text[]", "setof text"),
    ("unnest", "uuid[]", "setof uuid"),
    ("unnest", "bigint[]", "setof bigint"),
    ("unnest", "smallint[]", "setof smallint"),
    ("nextval", "text", "bigint"),
    ("setval", "text, bigint", "bigint"),
    ("currval", "text", "bigint"),
    ("set_config", "text, text, integer", "text"),
    ("to_timestamp", "numeric", "timestamptz"),
    ("octet_length", "json", "integer"),
    ("format", "text, integer", "text"),
    ("format", "text, text", "text"),
    ("format", "text, bigint", "text"),
    ("power", "integer, integer", "numeric"),
    ("abs", "smallint", "smallint"),
    ("pg_advisory_xact_lock", "numeric", "void"),
    ("to_regclass", "varchar", "regclass"),
    ("encode", "bytea, varchar", "text"),
    ("set_byte", "bytea, smallint, integer", "bytea"),
    ("starts_with", "varchar, text", "boolean"),
    ("left", "text, smallint", "text"),
    ("round", "double precision, integer", "numeric"),
    ("substring", "bytea, smallint", "bytea"),
    ("pg_visible_in_snapshot", "text, pg_snapshot", "boolean"),
    ("strpos", "varchar, varchar", "integer"),
    ("jsonb_array_length", "json", "integer"),
    ("convert_to", "varchar, varchar", "bytea"),
];
/// Left, operator, right, result.
const OPERATORS: &[(&str, &str, &str, &str)] = &[
    ("bigint", "*", "interval", "interval"),
    ("integer", "*", "interval", "interval"),
    ("numeric", "*", "interval", "interval"),
    ("numeric", "*", "integer", "numeric"),
    ("bigint", "/", "numeric", "numeric"),
    ("bigint", "||", "text", "text"),
    ("integer", "||", "text", "text"),
    ("oid", "||", "text", "text"),
    ("text", "||", "bigint", "text"),
    ("text", "||", "oid", "text"),
    ("text", "||", "integer", "text"),
    ("text", "=", "varchar", "boolean"),
    ("oid", "=", "regclass", "boolean"),
    ("bigint", "%", "smallint", "bigint"),
    ("text[]", "||", "text[]", "text[]"),
    ("integer", "+", "smallint", "integer"),
    ("pg_snapshot", "=", "text", "boolean"),
];

/// All of them in `public`, made by a role that may do that and nothing else; each notes that it ran, and as whom.
async fn hostile(database: &Database) {
    let admin = database.connect().await;
    let mallory = format!("mallory_{}", postroom_testkit::surroundings::unique());
    let mut sql = format!(
        "create role {mallory} login;
         grant create, usage on schema public to {mallory};
         create table traces (what text, ran_as text);
         grant insert on traces to public;
         create function public.trace(what text) returns void language plpgsql security invoker as
             $$ begin insert into public.traces values (what, current_user); raise exception 'mallory: %', what; end $$;
         set role {mallory};"
    );
    let body = |what: &str| {
        format!("language plpgsql as $$ begin perform public.trace('{}'); return; end $$", what.replace('\'', ""))
    };
    for (name, arguments, result) in FUNCTIONS {
        let what = format!("{name}({arguments})");
        let body = if result.starts_with("setof") || *result == "void" {
            body(&what)
        } else {
            body(&what).replace("return;", "return null;")
        };
        sql.push_str(&format!("create function public.\"{name}\"({arguments}) returns {result} {body};\n"));
    }
    for (n, (left, operator, right, result)) in OPERATORS.iter().enumerate() {
        let body = body(&format!("{left} {operator} {right}")).replace("return;", "return null;");
        sql.push_str(&format!(
            "create function public.op_{n}({left}, {right}) returns {result} {body};
             create operator public.{operator} (leftarg = {left}, rightarg = {right}, function = public.op_{n});\n"
        ));
    }
    sql.push_str("reset role;");
    admin.batch_execute(&sql).await.unwrap();
}

/// The overloads are real: a statement without care runs them.
#[tokio::test]
async fn the_hostile_functions_are_found_by_a_careless_statement() {
    let database = Database::create().await;
    hostile(&database).await;
    let client = database.connect().await;
    for careless in [
        "select hashtextextended('x', 0)",
        "select * from unnest(array['x'])",
        "select nextval('nowhere')",
        "select 1::bigint * interval '1 second'",
        "select jsonb_build_object('at', clock_timestamp(), 'attempt', 1, 'error', 'x')",
    ] {
        let error = client.batch_execute(careless).await.expect_err(careless);
        assert!(error.as_db_error().unwrap().message().starts_with("mallory: "), "{careless}: {error}");
    }
}

#[tokio::test]
async fn nobody_runs_code_of_a_role_that_may_create_in_public() {
    let database = Database::create().await;
    hostile(&database).await;
    migrate(&connector(&database), 16).await.unwrap();
    let admin = database.connect().await;
    let lane: String = admin
        .query_one(
            "select pg_catalog.pg_get_expr(adbin, adrelid) from pg_catalog.pg_attrdef
              where adrelid operator(pg_catalog.=) 'postroom.outbox'::pg_catalog.regclass
                and pg_catalog.pg_get_expr(adbin, adrelid) ~ 'hashtext'",
            &[],
        )
        .await
        .unwrap()
        .get(0);
    assert!(!lane.contains("public"), "{lane}");

    // A writer, by the function and through the adapter; a relay.
    let mut writer = database.connect().await;
    for payload in ["'x'::bytea", "'x'::text", "'{}'::jsonb"] {
        let sql = format!(
            "select postroom.enqueue('orders', 'k', {payload}, key => 'a', headers => '{{\"a\":\"b\"}}', delay => '0 s')"
        );
        writer.query_one(&sql, &[]).await.unwrap();
    }
    let mut tx = writer.transaction().await.unwrap();
    let message = Message::new("orders", "k", "x").key("b").delay(Duration::from_millis(1)).header("a", "b");
    Postgres.enqueue(&mut tx, &[message]).await.unwrap();
    tx.commit().await.unwrap();
    let store = store(&database);
    let relay = LogSource::open(&store, &route(), "relay").await.unwrap();
    renew(&relay).await;
    let claimed = claim_all(&relay).await;
    let retry = Outcome::Retry { after: Duration::ZERO, attempts: 1, error: "x".to_owned() };
    let dead = Outcome::Dead { attempts: 1, cause: Cause::Permanent, error: "x".to_owned(), blocks_key: true };
    let outcomes = [retry, dead].into_iter().chain(std::iter::repeat(Outcome::Done));
    let settlements: Vec<_> =
        claimed.iter().zip(outcomes).map(|(delivery, outcome)| settled(delivery.token, outcome)).collect();
    relay.settle(&settlements).await.unwrap();
    drain(&relay).await;
    // What it does after a sequence that went back.
    admin
        .batch_execute("select pg_catalog.setval('postroom.outbox_seq_seq'::pg_catalog.regclass, 1::pg_catalog.int8)")
        .await
        .unwrap();
    relay.renew(&postroom::Report::default()).await.unwrap_err();
    renew(&relay).await;
    relay.release().await.unwrap();

    // An operator.
    let deed = Deed { actor: "somebody".to_owned(), reason: "a test".to_owned() };
    let all =
        DeadFilter { error: Some("x".to_owned()), newer_than: Some(Duration::from_secs(99)), ..DeadFilter::default() };
    store.status().await.unwrap();
    store.waiting_keys(postroom::Side::Out, None, 10).await.unwrap();
    let letters = store.dead_letters(Side::Out, &all, 10).await.unwrap();
    store.whereabouts(letters[0].id.parse().unwrap()).await.unwrap();
    store.set_route("orders", &RouteChange::default(), &deed).await.unwrap();
    store.act_on_key("orders", "c", KeyDeed::Park, &deed).await.unwrap();
    store.act_on_dead(DeadDeed::Retry, Side::Out, &all, 10, &deed, &mut |_| ()).await.unwrap();
    store.act_on_dead(DeadDeed::Discard, Side::In, &all, 10, &deed, &mut |_| ()).await.unwrap();
    store.prune_inbox(Duration::from_secs(30 * 86_400), &deed, &mut |_| {}).await.unwrap();

    // A consumer, whose handlers have the search_path of the application.
    let mut session = PostgresSession::new(connector(&database));
    let consumer = Consumer::new("totals").unwrap();
    let message = Message::new("orders", "k", "x").key("k").aggregate("order", "o", 2);
    let mut tx = session.begin().await.unwrap();
    Postgres::admit(&mut tx, &consumer, &[(message.id, Some("k".to_owned()))]).await.unwrap();
    Postgres::keep(&mut tx, &consumer, std::slice::from_ref(&message), postroom::Keep::Ready).await.unwrap();
    Postgres::keep_dead(&mut tx, &consumer, &Message::new("t", "k", "x"), "no").await.unwrap();
    let aggregate = postroom::Aggregate { kind: "order".to_owned(), id: "o".to_owned() };
    Postgres::version(&mut tx, &consumer, &aggregate).await.unwrap();
    Postgres::set_version(&mut tx, &consumer, &aggregate, 1).await.unwrap();
    Postgres::waiting_versions(&mut tx, &consumer, &aggregate, 0, 9).await.unwrap();
    Postgres::commit(tx).await.unwrap();
    let lease = Duration::from_secs(9);
    for settle in [
        Settle::GivenBack,
        Settle::Retry { after: Duration::ZERO, attempts: 1, error: "x".to_owned() },
        Settle::Dead { attempts: 2, cause: Cause::Permanent, error: "x".to_owned() },
    ] {
        let mut tx = session.begin().await.unwrap();
        let taken = Postgres::take(&mut tx, &consumer, "me", 1, lease, 5).await.unwrap();
        let claims = [(taken[0].message.id, taken[0].claim)];
        Postgres::renew(&mut tx, &consumer, &claims, lease).await.unwrap();
        assert!(Postgres::settle(&mut tx, &consumer, claims[0].0, claims[0].1, &settle).await.unwrap());
        Postgres::commit(tx).await.unwrap();
    }
    use postroom::FillerStore;
    let mut tx = session.begin().await.unwrap();
    let tenure = Postgres::take_inbox(&mut tx, &consumer, "me", lease, None).await.unwrap().unwrap();
    let seen = Postgres::filler(&mut tx, &consumer).await.unwrap().unwrap();
    let tenure = Postgres::take_inbox(&mut tx, &consumer, &tenure.owner, lease, Some(&seen)).await.unwrap().unwrap();
    assert!(Postgres::renew_inbox(&mut tx, &consumer, &tenure, lease, &Default::default()).await.unwrap());
    assert!(Postgres::fence_inbox(&mut tx, &consumer, &tenure).await.unwrap());
    Postgres::leave_inbox(&mut tx, &consumer, &tenure).await.unwrap();
    Postgres::commit(tx).await.unwrap();
    // The same from another language.
    for sql in [
        "select postroom.inbox_admit('totals', gen_random_uuid())",
        "select postroom.inbox_admit_many('totals', array[gen_random_uuid()])",
        "select postroom.inbox_newer('totals', 'order', 'p', 2)",
        "select postroom.inbox_take('totals', 9, 'me')",
        "select postroom.inbox_renew('totals', 'me')",
        "select * from postroom.outbox_json",
    ] {
        writer.batch_execute(sql).await.unwrap();
    }

    let traces: i64 = admin.query_one("select count(*) from public.traces", &[]).await.unwrap().get(0);
    assert_eq!(traces, 0);
    let unsafe_functions: Vec<String> = admin
        .query_one(
            "select coalesce(array_agg(p.proname::text), '{}') from pg_proc p
              where p.pronamespace = 'postroom'::regnamespace
                and not coalesce(p.proconfig @> array['search_path=pg_catalog, pg_temp'], false)",
            &[],
        )
        .await
        .unwrap()
        .get(0);
    assert_eq!(unsafe_functions, [""; 0], "functions that look for names in a caller's schemas");
}

#[tokio::test]
async fn a_schema_that_another_role_made_is_not_migrated_into() {
    let database = Database::create().await;
    let admin = database.connect().await;
    let mallory = format!("mallory_{}", postroom_testkit::surroundings::unique());
    admin
        .batch_execute(&format!(
            "create role {mallory} login; set role postgres; create schema postroom authorization {mallory}"
        ))
        .await
        .unwrap();
    let refused = migrate(&connector(&database), 4).await.unwrap_err();
    let said = refused.to_string();
    assert!(said.contains(&mallory) && said.contains("belongs to role"), "{said}");
    let tables: i64 = admin
        .query_one("select count(*) from pg_class where relnamespace = 'postroom'::regnamespace", &[])
        .await
        .unwrap()
        .get(0);
    assert_eq!(tables, 0);
    // Its owner may, if it may create schemas at all; the check is about who is asked to put tables there.
    let url = database.url().replace("postgres@", &format!("{mallory}@"));
    let owner = connect(&url).await;
    let error = owner.batch_execute("create schema another").await.unwrap_err();
    assert_eq!(error.code(), Some(&SqlState::INSUFFICIENT_PRIVILEGE));
    migrate(&postroom_postgres::Connector::new(&url).unwrap(), 4).await.unwrap();
}
