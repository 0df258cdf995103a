//! What each role of `docs/grants-*.sql` can do, and what it cannot.

use std::collections::HashSet;
use std::time::Duration;

use postroom::{
    Cause, Consumer, ConsumerStore, DeadDeed, DeadFilter, Deed, KeyDeed, Message, Needs, Operator, Outcome,
    RouteChange, Session, Side, Source, Store, StoreError,
};
use postroom_postgres::{LogSource, Postgres, PostgresSession};
use postroom_testkit::postgres::Database;
use postroom_testkit::surroundings::unique;
use tokio_postgres::Client;
use tokio_postgres::error::SqlState;

use crate::setup::{claim_all, drain, prepared, renew, route, settled};

/// A role with these grants, and the URL with which it logs in.
async fn role(database: &Database, name: &str, grants: &str, options: &str) -> String {
    let role = format!("{name}_{}", unique());
    let admin = database.connect().await;
    let grants = grants.replace(name, &role);
    admin.batch_execute(&format!("create role {role} login {options}; {grants}")).await.unwrap();
    database.url().replace("postgres@", &format!("{role}@"))
}

/// None of these is allowed.
async fn cannot(client: &Client, forbidden: &[&str]) {
    for sql in forbidden {
        let error = client.batch_execute(sql).await.expect_err(sql);
        assert_eq!(error.code(), Some(&SqlState::INSUFFICIENT_PRIVILEGE), "{sql}: {error:?}");
    }
}

const EVERYBODY_ELSES: &[&str] = &[
    "select postroom.mend()",
    "select postroom.change_route('orders', '{*}', 'none', 'skip', 'me')",
    "select postroom.inbox_prune('100 days')",
    "update postroom.lanes set position_seq = 9",
    "update postroom.audit set actor = 'x'",
    "truncate postroom.outbox",
    "drop table postroom.outbox",
    "create table postroom.mine (n int)",
];

#[tokio::test]
async fn a_role_without_grants_can_do_nothing_here() {
    let database = prepared().await;
    let url = role(&database, "app_nobody", "", "").await;
    let nobody = postroom_testkit::postgres::connect(&url).await;
    cannot(&nobody, EVERYBODY_ELSES).await;
    // Not even when somebody lets it into the schema.
    let admin = database.connect().await;
    admin.batch_execute("grant usage on schema postroom to public").await.unwrap();
    cannot(&nobody, &["select postroom.enqueue('t', 'k', 'x')", "select postroom.uuid_v7()", "select postroom.mend()"])
        .await;
    let open: i64 = admin
        .query_one(
            "select count(*) from pg_proc p where p.pronamespace = 'postroom'::regnamespace
                and exists (select from aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a where a.grantee = 0)",
            &[],
        )
        .await
        .unwrap()
        .get(0);
    assert_eq!(open, 0, "functions that everybody may execute");

    // What several of its tasks need is named once.
    let needs = Needs {
        relay: true,
        filler: true,
        retention: true,
        metrics: true,
        operations: true,
        comparisons: true,
        intakes: true,
    };
    let findings = postroom_postgres::Database::new(&url).unwrap().check(needs).await.unwrap();
    let lacking = findings.iter().find(|finding| finding.found.contains("lacks")).unwrap();
    let grants: Vec<&str> = lacking.advice.as_deref().unwrap().split("; ").collect();
    let different: HashSet<&str> = grants.iter().copied().collect();
    assert!(grants.len() > 10 && different.len() == grants.len(), "{lacking:?}");
}

#[tokio::test]
async fn a_writer_needs_few_privileges_and_cannot_read_or_forge() {
    let database = prepared().await;
    let url = role(&database, "app_writer", include_str!("../../../../docs/grants-writer.sql"), "").await;
    let writer = postroom_testkit::postgres::connect(&url).await;
    for payload in ["'x'::bytea", "'x'::text", "'{}'::jsonb"] {
        let sql = format!("select postroom.enqueue('orders', 'order.placed', {payload})");
        writer.query_one(&sql, &[]).await.unwrap();
    }
    writer.batch_execute("insert into postroom.outbox (topic, type, payload) values ('t', 'k', 'x')").await.unwrap();
    cannot(&writer, EVERYBODY_ELSES).await;
    let forbidden = [
        "select * from postroom.outbox",
        "delete from postroom.outbox",
        "insert into postroom.outbox (xid, topic, type, payload) values ('3', 't', 'k', 'x')",
        "select postroom.inbox_admit('totals', postroom.uuid_v7())",
        "select postroom.checkpoint()",
        "select nextval('postroom.outbox_seq_seq')",
    ];
    cannot(&writer, &forbidden).await;
}

#[tokio::test]
async fn a_relay_can_do_its_work_and_read_no_business_table() {
    let database = prepared().await;
    let admin = database.connect().await;
    admin.batch_execute("create table secrets (x int)").await.unwrap();
    let grants = include_str!("../../../../docs/grants-relay.sql");
    let url = role(&database, "postroom_relay", grants, "connection limit 3").await;
    crate::setup::enqueue(&admin, Some("a"), 2).await;
    let store = postroom_postgres::Database::new(&url).unwrap();
    let relay = LogSource::open(&store, &route(), "relay").await.unwrap();
    renew(&relay).await;
    let claimed = claim_all(&relay).await;
    let retry = Outcome::Retry { after: Duration::ZERO, attempts: 1, error: "x".to_owned() };
    let dead = Outcome::Dead { attempts: 1, cause: Cause::Permanent, error: "x".to_owned(), blocks_key: false };
    relay.settle(&[settled(claimed[0].token, retry), settled(claimed[1].token, dead)]).await.unwrap();
    drain(&relay).await;
    // What it does after a restore takes one more connection.
    let role = url.split('@').next().unwrap().trim_start_matches("postgres://");
    admin.batch_execute(&format!("alter role {role} connection limit 5")).await.unwrap();
    admin.batch_execute("select setval('postroom.outbox_seq_seq', 1)").await.unwrap();
    let mended = relay.renew(&postroom::Report::default()).await.unwrap_err();
    assert!(matches!(mended, StoreError::Busy { .. }), "{mended:?}");
    renew(&relay).await;
    relay.release().await.unwrap();
    let client = postroom_testkit::postgres::connect(&url).await;
    let forbidden = [
        "select * from secrets",
        "insert into postroom.outbox (topic, type, payload) values ('t', 'k', 'x')",
        "delete from postroom.outbox",
        "delete from postroom.dead_letters",
        "select * from postroom.audit",
        "select postroom.inbox_prune('100 days')",
        "truncate postroom.outbox",
        "create table postroom.mine (n int)",
    ];
    cannot(&client, &forbidden).await;
}

#[tokio::test]
async fn a_consumer_can_receive_and_do_nothing_else() {
    let database = prepared().await;
    let url = role(&database, "app_consumer", include_str!("../../../../docs/grants-consumer.sql"), "").await;
    let mut session = PostgresSession::new(postroom_postgres::Connector::new(&url).unwrap());
    let consumer = Consumer::new("totals").unwrap();
    let message = Message::new("orders", "order.placed", "x").key("k").aggregate("order", "o", 1);
    {
        let mut tx = session.begin().await.unwrap();
        let admitted = Postgres::admit(&mut tx, &consumer, &[(message.id, Some("k".to_owned()))]).await.unwrap();
        assert_eq!(admitted.len(), 1);
        Postgres::keep(&mut tx, &consumer, std::slice::from_ref(&message), postroom::Keep::Ready).await.unwrap();
        let aggregate = postroom::Aggregate { kind: "order".to_owned(), id: "o".to_owned() };
        Postgres::version(&mut tx, &consumer, &aggregate).await.unwrap();
        Postgres::set_version(&mut tx, &consumer, &aggregate, 1).await.unwrap();
        Postgres::commit(tx).await.unwrap();
    }
    // As an application in another language does it.
    let client = postroom_testkit::postgres::connect(&url).await;
    let taken =
        client.query("select message_id, claim from postroom.inbox_take('totals', 10, 'me')", &[]).await.unwrap();
    let (id, claim): (uuid::Uuid, i64) = (taken[0].get(0), taken[0].get(1));
    client.execute("select postroom.inbox_renew('totals', 'me')", &[]).await.unwrap();
    client.execute("select postroom.inbox_fail('totals', $1, $2, 'no', '0 s')", &[&id, &claim]).await.unwrap();
    let taken =
        client.query("select message_id, claim from postroom.inbox_take('totals', 10, 'me')", &[]).await.unwrap();
    client
        .execute(
            "select postroom.inbox_fail('totals', $1, $2, 'no', give_up => true)",
            &[&id, &taken[0].get::<_, i64>(1)],
        )
        .await
        .unwrap();
    client.query_one("select postroom.inbox_admit('totals', gen_random_uuid())", &[]).await.unwrap();
    client.query("select postroom.inbox_admit_many('totals', array[gen_random_uuid()])", &[]).await.unwrap();
    client.query_one("select postroom.inbox_newer('totals', 'order', 'p', 2)", &[]).await.unwrap();
    cannot(&client, EVERYBODY_ELSES).await;
    let forbidden = [
        "select * from postroom.outbox",
        "select postroom.enqueue('t', 'k', 'x'::text)",
        "select * from postroom.parked",
        "delete from postroom.dead_consume",
        "delete from postroom.inbox",
    ];
    cannot(&client, &forbidden).await;
}

/// One message of route `orders` that died, one that waits for a retry, and a dead one of a consumer.
async fn incident(database: &Database) {
    let admin = database.connect().await;
    crate::setup::enqueue(&admin, Some("a"), 1).await;
    crate::setup::enqueue(&admin, Some("b"), 1).await;
    let store = crate::setup::store(database);
    let relay = LogSource::open(&store, &route(), "relay").await.unwrap();
    renew(&relay).await;
    let claimed = claim_all(&relay).await;
    let retry = Outcome::Retry { after: Duration::from_secs(60), attempts: 1, error: "x".to_owned() };
    let dead = Outcome::Dead { attempts: 1, cause: Cause::Permanent, error: "x".to_owned(), blocks_key: true };
    relay.settle(&[settled(claimed[0].token, retry), settled(claimed[1].token, dead)]).await.unwrap();
    relay.release().await.unwrap();
    admin
        .batch_execute(
            "insert into postroom.dead_consume (consumer, message_id, seq, attempts, cause, error, topic, type, payload, content_type)
             values ('totals', gen_random_uuid(), 1, 1, 'permanent', 'x', 't', 'k', 'x', 'y')",
        )
        .await
        .unwrap();
}

#[tokio::test]
async fn an_operator_can_do_what_the_commands_do_and_cannot_hide_it() {
    let database = prepared().await;
    incident(&database).await;
    let url = role(&database, "app_operator", include_str!("../../../../docs/grants-operator.sql"), "").await;
    let store = postroom_postgres::Database::new(&url).unwrap();
    let deed = Deed { actor: "somebody".to_owned(), reason: "a test".to_owned() };
    let all = DeadFilter::default();
    store.status().await.unwrap();
    store.waiting_keys(postroom::Side::Out, None, 10).await.unwrap();
    let letters = store.dead_letters(Side::Out, &all, 10).await.unwrap();
    store.dead_payload(Side::Out, &letters[0].route, letters[0].seq).await.unwrap();
    store.whereabouts(letters[0].id.parse().unwrap()).await.unwrap();
    let name = store.routes().await.unwrap()[0].route.clone();
    assert!(store.act_on_key(&name, "c", KeyDeed::Park, &deed).await.unwrap());
    assert!(store.act_on_key(&name, "c", KeyDeed::Unpark, &deed).await.unwrap());
    store.set_route(&name, &RouteChange::default(), &deed).await.unwrap().unwrap();
    for side in [Side::Out, Side::In] {
        let acted = store.act_on_dead(DeadDeed::Retry, side, &all, 10, &deed, &mut |_| ()).await.unwrap();
        assert_eq!(acted.len(), 1, "{side:?}");
        store.act_on_dead(DeadDeed::Discard, side, &all, 10, &deed, &mut |_| ()).await.unwrap();
    }
    store.prune_inbox(Duration::from_secs(30 * 86_400), &deed, &mut |_| {}).await.unwrap();
    let client = postroom_testkit::postgres::connect(&url).await;
    let forbidden = [
        "update postroom.audit set actor = 'x'",
        "delete from postroom.audit",
        "truncate postroom.audit",
        "delete from postroom.outbox",
        "delete from postroom.parked",
        "insert into postroom.outbox (topic, type, payload) values ('t', 'k', 'x')",
        "select postroom.mend()",
        "create table postroom.mine (n int)",
    ];
    cannot(&client, &forbidden).await;
}

#[tokio::test]
async fn a_reader_sees_how_things_stand_and_no_payload() {
    let database = prepared().await;
    incident(&database).await;
    let url = role(&database, "app_reader", include_str!("../../../../docs/grants-reader.sql"), "").await;
    let store = postroom_postgres::Database::new(&url).unwrap();
    let status = store.status().await.unwrap();
    assert_eq!((status.routes[0].dead, status.routes[0].parked), (1, 1));
    assert_eq!(store.waiting_keys(postroom::Side::Out, None, 10).await.unwrap().len(), 2);
    let id: uuid::Uuid =
        database.connect().await.query_one("select id from postroom.outbox limit 1", &[]).await.unwrap().get(0);
    assert_eq!(store.whereabouts(id.into()).await.unwrap().len(), 1);
    let name = store.routes().await.unwrap()[0].route.clone();
    let deed = Deed { actor: "somebody".to_owned(), reason: "a test".to_owned() };
    let refused = store.act_on_key(&name, "a", KeyDeed::Park, &deed).await.unwrap_err();
    assert!(matches!(refused, StoreError::Refused { .. }), "{refused:?}");
    let client = postroom_testkit::postgres::connect(&url).await;
    cannot(&client, EVERYBODY_ELSES).await;
    let forbidden = [
        "select payload from postroom.outbox",
        "select headers from postroom.outbox",
        "select payload from postroom.parked",
        "select payload from postroom.dead_letters",
        "select payload from postroom.inbox_messages",
        "select payload from postroom.dead_consume",
        "select * from postroom.outbox_json",
    ];
    cannot(&client, &forbidden).await;
}

/// The policy of docs/postgres.md.
#[tokio::test]
async fn a_reader_of_one_tenant_sees_its_messages_only_and_the_relay_sees_all() {
    let database = prepared().await;
    let grants = include_str!("../../../../docs/grants-reader.sql");
    let url = role(&database, "app_reader", grants, "").await;
    let role_name = url.split('@').next().unwrap().trim_start_matches("postgres://");
    let docs = include_str!("../../../../docs/postgres.md");
    let policy = docs.split("```sql").find(|part| part.contains("row level security")).unwrap();
    let policy = policy.split("```").next().unwrap().replace("app_reader", role_name);
    let admin = database.connect().await;
    admin.batch_execute(&policy).await.unwrap();
    for tenant in ["one", "two", "two"] {
        let sql = "select postroom.enqueue('orders', 'k', 'x'::text, tenant_id => $1)";
        admin.query_one(sql, &[&tenant]).await.unwrap();
    }
    let reader = postroom_testkit::postgres::connect(&url).await;
    let seen = "select count(id) from postroom.outbox";
    let nothing: i64 = reader.query_one(seen, &[]).await.unwrap().get(0);
    reader.batch_execute("set app.tenant_id = 'two'").await.unwrap();
    let two: i64 = reader.query_one(seen, &[]).await.unwrap().get(0);
    assert_eq!((nothing, two), (0, 2));
    let grants = include_str!("../../../../docs/grants-relay.sql");
    let relay = postroom_postgres::Database::new(&role(&database, "postroom_relay", grants, "").await).unwrap();
    let relay = LogSource::open(&relay, &route(), "relay").await.unwrap();
    renew(&relay).await;
    assert_eq!(drain(&relay).await.len(), 3);
}

#[tokio::test]
async fn a_deed_that_waits_for_a_lock_says_who_holds_it() {
    let database = prepared().await;
    incident(&database).await;
    let mut somebody = database.connect().await;
    let tx = somebody.transaction().await.unwrap();
    tx.batch_execute("set local application_name = 'night job'; lock table postroom.lanes in access exclusive mode")
        .await
        .unwrap();
    let store = crate::setup::store(&database);
    let deed = Deed { actor: "somebody".to_owned(), reason: "a test".to_owned() };
    let busy = store.act_on_key("orders", "a", KeyDeed::Park, &deed).await.unwrap_err();
    let StoreError::Busy { source, .. } = busy else { panic!("{busy:?}") };
    let told = source.to_string();
    assert!(told.contains("night job") && told.contains("postroom.lanes") && told.contains("role postgres"), "{told}");
    let busy = postroom::Store::migrate(&store, None).await;
    assert!(busy.is_ok(), "nothing to do needs no lock");
}
