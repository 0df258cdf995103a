//! The contract for every language: the plain insert, in the caller's transaction; and the schema.

use std::time::Duration;

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Error, TxOpts};
use postroom::{
    Admission, Consumer, ConsumerStore, Deed, EnqueueError, GuardError, Inbox, Keep, KeyDeed, LANES_DEFAULT, Message,
    MessageId, MigrateError, Operator, Outbox, Outcome, Report, Retention, Route, Session, Settle, Settlement, Store,
    Sweep, TopicFilter, Want,
};
use postroom_mysql::{Database, Mysql, MysqlSession, migrate, options_of, print_sql};
use postroom_testkit::conformance::Fixture;
use postroom_testkit::conformance::source::{Outbox as _, route};

use crate::fixture::{Shop, is_mariadb};

#[tokio::test]
async fn a_plain_insert_needs_three_columns_and_cannot_choose_the_rest() {
    let shop = Shop::create().await;
    let mut conn = shop.connect().await;
    conn.query_drop("insert into postroom_outbox (topic, type, payload) values ('orders', 'order.placed', 'plain')")
        .await
        .unwrap();
    conn.query_drop("insert into postroom_outbox (topic, type, payload, place, lane, bytes) values ('orders', 'order.placed', 'x', 7, 99, -1)")
        .await
        .unwrap();
    let sql = "select id, place, lane, bytes, content_type from postroom_outbox order by seq";
    let rows: Vec<(String, Option<i64>, i64, i64, String)> = conn.query(sql).await.unwrap();
    for (id, place, lane, bytes, content_type) in &rows {
        let id: MessageId = id.parse().unwrap();
        assert_eq!(id.as_uuid().get_version_num(), 7);
        assert_eq!((place, content_type.as_str()), (&None, "application/octet-stream"));
        assert!((0..4).contains(lane) && *bytes > 512, "{rows:?}");
    }
    let upper = "insert into postroom_outbox (id, topic, type, payload) values ('01A20985-C373-71E1-8A04-893E311AA5F5', 't', 'k', '')";
    conn.query_drop(upper).await.unwrap();
    assert!(conn.query_drop(upper.to_lowercase()).await.is_err(), "the same id in other letters");
    for (columns, values) in [
        ("id", "'nope'"),
        ("headers", "'[]'"),
        ("headers", "'{'"),
        ("`key`", "''"),
        ("routing_key", "repeat('x', 256)"),
        ("content_type", "''"),
    ] {
        let sql = format!(
            "insert into postroom_outbox (topic, type, payload, {columns}) values ('orders', 'x', '', {values})"
        );
        assert!(matches!(conn.query_drop(&sql).await, Err(Error::Server(_))), "{sql}");
    }
    // Whoever chooses a seq could use all of them up; and on MariaDB every session may switch the checks of tables off.
    let chosen =
        "insert into postroom_outbox (seq, topic, type, payload) values (9223372036854775807, 'orders', 'x', '')";
    assert!(matches!(conn.query_drop(chosen).await, Err(Error::Server(_))));
    let may_switch_off = is_mariadb(&mut conn).await;
    if may_switch_off {
        conn.query_drop("set session check_constraint_checks = 0").await.unwrap();
    }
    for (columns, values) in [("id", "'nope'"), ("headers", "'[]'"), ("`key`", "''"), ("tenant_id", "repeat('x', 513)")]
    {
        let sql = format!(
            "insert into postroom_outbox (topic, type, payload, {columns}) values ('orders', 'x', '', {values})"
        );
        assert!(matches!(conn.query_drop(&sql).await, Err(Error::Server(_))), "{sql}");
    }
    if may_switch_off {
        conn.query_drop("set session check_constraint_checks = 1").await.unwrap();
    }
    // Without a strict mode the server cuts texts off, and only warns.
    conn.query_drop("set session sql_mode = ''").await.unwrap();
    for (column, length) in
        [("`key`", 600), ("routing_key", 300), ("tenant_id", 600), ("aggregate_id", 600), ("aggregate_type", 300)]
    {
        let sql = format!(
            "insert into postroom_outbox (topic, type, payload, {column}) values ('orders', 'x', '', repeat('x', {length}))"
        );
        assert!(matches!(conn.query_drop(&sql).await, Err(Error::Server(_))), "{sql}");
    }
    let sql = "insert into postroom_outbox (topic, type, payload) values (repeat('x', 300), 'x', '')";
    assert!(matches!(conn.query_drop(sql).await, Err(Error::Server(_))));
    let sql = "insert into postroom_outbox (topic, type, payload) values ('orders', 'x', repeat('x', 1048577))";
    assert!(matches!(conn.query_drop(sql).await, Err(Error::Server(_))));
}

#[tokio::test]
async fn an_id_is_written_once() {
    let shop = Shop::create().await;
    let mut conn = shop.connect().await;
    let message = Message::new("orders", "order.placed", "x");
    let mut tx = conn.start_transaction(TxOpts::default()).await.unwrap();
    Mysql.enqueue(&mut tx, std::slice::from_ref(&message)).await.unwrap();
    tx.commit().await.unwrap();
    let mut tx = conn.start_transaction(TxOpts::default()).await.unwrap();
    let error = Mysql.enqueue(&mut tx, std::slice::from_ref(&message)).await.unwrap_err();
    assert!(matches!(error, EnqueueError::AlreadyEnqueued { .. }), "{error}");
}

/// The block of docs/mysql.md that begins so.
fn block_of_docs(beginning: &str) -> &'static str {
    let docs = include_str!("../../../../docs/mysql.md");
    let begin = docs.find(&format!("```sql\n{beginning}")).expect("a block") + 7;
    &docs[begin..begin + docs[begin..].find("\n```").expect("its end")]
}

/// Id, topic, key, headers, and whether it is due in more than 80 seconds.
type Written = (String, String, Option<String>, Option<String>, bool);

async fn written(conn: &mut Conn) -> Vec<Written> {
    let sql = "select id, topic, `key`, headers, coalesce(visible_at > utc_timestamp(6) + interval 80 second, 0) from postroom_outbox order by seq";
    conn.query(sql).await.unwrap()
}

#[tokio::test]
async fn the_procedure_writes_what_it_is_given_and_refuses_what_it_does_not_know() {
    let shop = Shop::create().await;
    let mut conn = shop.connect().await;
    conn.query_drop("create table orders (id varchar(32) primary key, status varchar(32))").await.unwrap();
    for statement in block_of_docs("start transaction").lines().chain(block_of_docs("insert into").lines()) {
        conn.query_drop(statement.trim_end_matches(';')).await.unwrap();
        let told: Option<Option<String>> = conn.query_first("select @postroom_id").await.unwrap();
        if statement.starts_with("call") || statement.starts_with("insert") {
            let rows = written(&mut conn).await;
            let (id, topic, key, ..) = rows.last().unwrap();
            assert_eq!((Some(id.clone()), topic.as_str(), key.as_deref()), (told.flatten(), "orders", Some("o-17")));
        }
    }
    let id = MessageId::new().to_string();
    let full = r#"{"id": ":id", "key": "ü'\"\\", "routing_key": "orders.eu", "content_type": "text/plain", "headers": {"a:b": "c"}, "tenant_id": null,
                   "aggregate_type": "order", "aggregate_id": "o-1", "aggregate_version": 7, "delay_seconds": 90.5}"#;
    let call = "call postroom_enqueue(?, ?, ?, ?)";
    conn.exec_drop(call, ("orders", "order.placed", vec![0_u8, 159, 146, 150], full.replace(":id", &id)))
        .await
        .unwrap();
    let rows = written(&mut conn).await;
    let (last, _, key, headers, late) = rows.last().unwrap();
    assert_eq!((last, key.as_deref(), *late), (&id, Some("ü'\"\\"), true));
    let headers: serde_json::Value = serde_json::from_str(headers.as_deref().unwrap()).unwrap();
    assert_eq!(headers, serde_json::json!({ "a:b": "c" }));
    let sql = "select payload, routing_key, content_type, tenant_id, aggregate_type, aggregate_id, aggregate_version
                 from postroom_outbox order by seq desc limit 1";
    type Rest = (Vec<u8>, String, String, Option<String>, String, String, i64);
    let rest: Rest = conn.query_first(sql).await.unwrap().unwrap();
    let text = str::to_owned;
    let expected = (vec![0, 159, 146, 150], text("orders.eu"), text("text/plain"), None, text("order"), text("o-1"), 7);
    assert_eq!(rest, expected);
    conn.exec_drop(call, ("orders", "order.placed", "x", None::<String>)).await.unwrap();
    let before = written(&mut conn).await.len();
    for wrong in [
        "[]",
        "{",
        r#"{"kye": "o-17"}"#,
        r#"{"Key": "o-17"}"#,
        r#"{"key": 17}"#,
        r#"{"key": ""}"#,
        r#"{"headers": {"a": 1}}"#,
        r#"{"headers": "a"}"#,
        r#"{"aggregate_version": "7"}"#,
        r#"{"delay_seconds": "soon"}"#,
        r#"{"id": "nope"}"#,
    ] {
        let refused = conn.exec_drop(call, ("orders", "order.placed", "x", wrong)).await;
        assert!(matches!(refused, Err(Error::Server(_))), "{wrong}");
    }
    // MySQL keeps JSON as values and sees the same name; MariaDB keeps the text.
    let refused = conn.exec_drop(call, ("orders", "order.placed", "x", r#"{"k\u0065y": "o-17"}"#)).await;
    let written = written(&mut conn).await;
    match is_mariadb(&mut conn).await {
        true => assert!(refused.is_err() && written.len() == before),
        false => assert_eq!((written.len(), written[before].2.as_deref()), (before + 1, Some("o-17"))),
    }
}

#[tokio::test]
async fn a_guard_names_what_was_taken_and_what_was_not_there() {
    let shop = Shop::create().await;
    let mut conn = shop.connect().await;
    conn.query_drop("create table orders (id varchar(32), status varchar(32), unique key orders_number (id))")
        .await
        .unwrap();
    let mut tx = conn.start_transaction(TxOpts::default()).await.unwrap();
    let insert = "insert into orders values (?, 'placed')";
    Mysql.execute_guarded(&mut tx, "place the order", 1, insert, ("o-17",)).await.unwrap();
    let taken = Mysql.execute_guarded(&mut tx, "place the order", 1, insert, ("o-17",)).await.unwrap_err();
    assert!(
        matches!(&taken, GuardError::Conflict { constraint, .. } if constraint.ends_with("orders_number")),
        "{taken}"
    );
    let update = "update orders set status = 'paid' where id = ?";
    let gone = Mysql.execute_guarded(&mut tx, "pay the order", 1, update, ("o-18",)).await.unwrap_err();
    assert!(matches!(gone, GuardError::RowCount { expected: 1, actual: 0, .. }), "{gone}");
}

#[tokio::test]
async fn a_message_is_admitted_once_whatever_driver_asks() {
    let shop = Shop::create().await;
    let (consumer, ids) = (Consumer::new("totals").unwrap(), [MessageId::new(), MessageId::new()]);
    let mut conn = shop.connect().await;
    let pool = sqlx::MySqlPool::connect(&shop.url).await.unwrap();
    for (round, expected) in [(0, Admission::New), (1, Admission::Duplicate)] {
        let mut tx = conn.start_transaction(TxOpts::default()).await.unwrap();
        assert_eq!(Inbox::admit(&Mysql, &mut tx, &consumer, ids[0]).await.unwrap(), expected, "{round}");
        tx.commit().await.unwrap();
        let mut tx = pool.begin().await.unwrap();
        assert_eq!(Inbox::admit(&Mysql, &mut tx, &consumer, ids[1]).await.unwrap(), expected, "{round}");
        tx.commit().await.unwrap();
    }
    let message = Message::new("orders", "order.placed", "x").key("o-17");
    let mut tx = pool.begin().await.unwrap();
    Mysql.enqueue(&mut tx, std::slice::from_ref(&message)).await.unwrap();
    tx.commit().await.unwrap();
    let mut tx = pool.begin().await.unwrap();
    let twice = Mysql.enqueue(&mut tx, std::slice::from_ref(&message)).await.unwrap_err();
    assert!(matches!(twice, EnqueueError::AlreadyEnqueued { .. }), "{twice}");
    drop(tx);
    let rows = written(&mut conn).await;
    assert_eq!((rows.len(), rows[0].0.as_str()), (1, message.id.to_string().as_str()));
    pool.close().await;
}

#[tokio::test]
async fn migrating_again_changes_nothing_and_a_run_that_ended_half_way_is_finished() {
    let shop = Shop::empty().await;
    assert_eq!(migrate(&shop.opts, Some(4)).await.unwrap().applied.len(), 6);
    assert_eq!(migrate(&shop.opts, None).await.unwrap().applied.len(), 0);
    let error = migrate(&shop.opts, Some(8)).await.unwrap_err();
    assert!(matches!(error, MigrateError::OtherLanes { schema: 4, asked: 8 }), "{error}");
    shop.run("delete from postroom_migrations").await;
    shop.run("drop table postroom_parked").await;
    assert_eq!(migrate(&shop.opts, None).await.unwrap().applied.len(), 6);
    shop.run("select * from postroom_parked").await;
    shop.run("update postroom_migrations set checksum = 'x'").await;
    assert!(matches!(migrate(&shop.opts, None).await, Err(MigrateError::Changed { number: 1, .. })));
    shop.run("insert into postroom_migrations (number, name, checksum) values (999, 'future', '')").await;
    shop.run("update postroom_migrations set checksum = 'x' where number = 1").await;
    assert!(migrate(&shop.opts, None).await.is_err());
    let script = print_sql(None).unwrap();
    assert!(script.contains(&format!("% {LANES_DEFAULT};")), "{script}");
}

#[tokio::test]
async fn processes_that_migrate_at_once_do_not_meet() {
    let shop = Shop::empty().await;
    let runs: Vec<_> = (0..4)
        .map(|_| {
            let opts = shop.opts.clone();
            tokio::spawn(async move { migrate(&opts, Some(4)).await })
        })
        .collect();
    let mut applied = 0;
    for run in runs {
        applied += run.await.unwrap().unwrap().applied.len();
    }
    assert_eq!(applied, 6, "one of them does all of it");
}

#[tokio::test]
async fn a_topic_that_another_relay_adds_is_taken_at_once_by_every_relay() {
    let shop = Shop::create().await;
    let topics = |topics: &[&str]| Route { topics: TopicFilter::new(topics.iter().copied()).unwrap(), ..route() };
    let before = shop.open(&topics(&["orders"]), "before").await;
    assert_eq!(before.renew(&Report::default()).await.unwrap().held, 4);
    // As in a rolling restart: the lanes are the older relay's yet.
    let _after = shop.open(&topics(&["orders", "billing"]), "after").await;
    let message = Message::new("billing", "invoice.sent", "x");
    shop.commit(std::slice::from_ref(&message)).await;
    let claimed = before.claim(Want::up_to(10)).await.unwrap();
    let ids: Vec<_> = claimed.deliveries.iter().map(|delivery| delivery.message.id).collect();
    assert_eq!(ids, [message.id], "I1: it was passed by");
}

/// docs/grants-mysql.sql: each role can do its work, and a writer nothing else.
#[tokio::test]
async fn roles_can_do_their_work_and_no_more() {
    let shop = Shop::create().await;
    let name = shop.opts.db_name().unwrap().to_owned();
    let mut admin = shop.connect().await;
    for statement in include_str!("../../../../docs/grants-mysql.sql").split(";\n") {
        let lines: Vec<&str> = statement.lines().filter(|line| !line.starts_with("--")).collect();
        let statement = lines.join("\n").replace("shop.", &format!("{name}."));
        if !statement.trim().is_empty() {
            admin.query_drop(statement).await.unwrap();
        }
    }
    // `set default role ROLE for USER` on MariaDB.
    let role_of = if is_mariadb(&mut admin).await { "for" } else { "to" };
    let user = async |role: &str| {
        let user = format!("{role}_{name}");
        let mut admin = shop.connect().await;
        for statement in [
            format!("create user '{user}'@'127.0.0.1' identified by 'secret'"),
            format!("grant postroom_{role} to '{user}'@'127.0.0.1'"),
            format!("set default role postroom_{role} {role_of} '{user}'@'127.0.0.1'"),
        ] {
            admin.query_drop(statement).await.unwrap();
        }
        shop.url.replace("root@", &format!("{user}:secret@"))
    };
    let mut writer = Conn::new(options_of(&user("writer").await).unwrap()).await.unwrap();
    let mut tx = writer.start_transaction(TxOpts::default()).await.unwrap();
    Mysql.enqueue(&mut tx, &[Message::new("orders", "order.placed", "x").key("a")]).await.unwrap();
    tx.commit().await.unwrap();
    writer.query_drop("call postroom_enqueue('orders', 'order.placed', 'x', null)").await.unwrap();
    for forbidden in
        ["select * from postroom_outbox", "delete from postroom_outbox", "update postroom_lanes set position = 9"]
    {
        assert!(matches!(writer.query_drop(forbidden).await, Err(Error::Server(_))), "{forbidden}");
    }
    let relay = Database::new(&user("relay").await).unwrap();
    let source = relay.source(&route(), "relay").await.unwrap();
    source.renew(&Report::default()).await.unwrap();
    let claimed = source.claim(Want::up_to(10)).await.unwrap();
    assert_eq!(claimed.deliveries.len(), 2);
    let settlements: Vec<_> = claimed
        .deliveries
        .iter()
        .map(|delivery| Settlement { token: delivery.token, outcome: Outcome::Done })
        .collect();
    source.settle(&settlements).await.unwrap();
    source.release().await.unwrap();
    let deed = Deed { actor: "ann".to_owned(), reason: "ticket 7".to_owned() };
    assert!(relay.act_on_key("orders", "a", KeyDeed::Park, &deed).await.unwrap());
    assert!(relay.act_on_key("orders", "a", KeyDeed::Unpark, &deed).await.unwrap());
    relay.status().await.unwrap();
    relay.note_sizes().await.unwrap();
    relay.step_operations().await.unwrap();
    let retention = Retention {
        outbox: Some(Duration::from_secs(3600)),
        inbox: Some(Duration::from_secs(30 * 24 * 3600)),
        ..Retention::default()
    };
    let mut sweep = Sweep::begin(&retention);
    while !sweep.is_over() {
        relay.retain(&retention, &mut sweep).await.unwrap();
    }
    let consumer = MysqlSession::new(&options_of(&user("consumer").await).unwrap());
    let mut consumer: Box<dyn Session<Mysql>> = Box::new(consumer);
    let mut tx = consumer.begin().await.unwrap();
    let totals = Consumer::new("totals").unwrap();
    let kept = Message::new("orders", "order.placed", "x");
    Mysql::keep(&mut tx, &totals, std::slice::from_ref(&kept), Keep::Ready).await.unwrap();
    let taken = Mysql::take(&mut tx, &totals, "worker", 10, Duration::from_secs(30), 3).await.unwrap();
    assert_eq!(taken.len(), 1);
    let settled = Mysql::settle(&mut tx, &totals, kept.id, taken[0].claim, &Settle::Done).await.unwrap();
    assert!(settled);
    <Mysql as ConsumerStore>::commit(tx).await.unwrap();
}
