//! The contract for every language: the function and the plain insert, in the caller's transaction.

use postroom::{Consumer, Message, MessageId, Outbox as _, Store as _};
use postroom_postgres::Postgres;
use tokio_postgres::error::SqlState;

use crate::setup::{claim_all, prepared, source};

#[tokio::test]
async fn every_argument_arrives() {
    let database = prepared().await;
    let client = database.connect().await;
    let id = MessageId::new();
    let sql = r#"select postroom.enqueue('orders', 'order.placed', '{"a":1}'::jsonb, key => 'k',
        headers => '{"traceparent":"00-1-2-01"}', routing_key => 'r', tenant_id => 't', aggregate_type => 'order',
        aggregate_id => 'o-1', aggregate_version => 7, content_type => 'application/vnd.order+json', delay => '0 s',
        id => $1)"#;
    let returned: uuid::Uuid = client.query_one(sql, &[id.as_uuid()]).await.unwrap().get(0);
    assert_eq!(MessageId::from(returned), id);
    let source = source(&database, "relay").await;
    let message = claim_all(&source).await.remove(0).message;
    assert_eq!(message.id, id);
    assert_eq!(message.payload.as_ref(), br#"{"a": 1}"#);
    assert_eq!(message.headers["traceparent"], "00-1-2-01");
    assert_eq!((message.topic.as_str(), message.kind.as_str(), message.address()), ("orders", "order.placed", "r"));
    assert_eq!((message.key.as_deref(), message.tenant_id.as_deref()), (Some("k"), Some("t")));
    assert_eq!(message.aggregate_type.as_deref(), Some("order"));
    assert_eq!((message.aggregate_id.as_deref(), message.aggregate_version), (Some("o-1"), Some(7)));
    assert_eq!(message.content_type, "application/vnd.order+json");
}

#[tokio::test]
async fn only_three_arguments_are_needed_and_each_payload_type_has_its_content_type() {
    let database = prepared().await;
    let client = database.connect().await;
    for payload in ["'text'", "'\\x00ff'::bytea", "'{}'::jsonb"] {
        let sql = format!("select postroom.enqueue('orders', 'order.placed', {payload})");
        client.query_one(&sql, &[]).await.unwrap();
    }
    // A plain insert is the same contract.
    client
        .execute("insert into postroom.outbox (topic, type, payload) values ('orders', 'order.placed', 'plain')", &[])
        .await
        .unwrap();
    let source = source(&database, "relay").await;
    let mut found: Vec<(String, Vec<u8>)> = claim_all(&source)
        .await
        .into_iter()
        .map(|delivery| (delivery.message.content_type.clone(), delivery.message.payload.to_vec()))
        .collect();
    found.sort();
    let octets = || "application/octet-stream".to_owned();
    let expected = [
        ("application/json".to_owned(), b"{}".to_vec()),
        (octets(), vec![0, 0xff]),
        (octets(), b"plain".to_vec()),
        ("text/plain; charset=utf-8".to_owned(), b"text".to_vec()),
    ];
    assert_eq!(found, expected);
}

#[tokio::test]
async fn a_wrong_argument_is_refused_inside_the_callers_transaction() {
    let database = prepared().await;
    let client = database.connect().await;
    client.batch_execute("create table orders (id int)").await.unwrap();
    let cases = [
        ("postroom.enqueue('', 'k', 'x')", "topic is empty"),
        ("postroom.enqueue(null, 'k', 'x')", "topic is empty"),
        ("postroom.enqueue('t', repeat('x', 256), 'x')", "type has 256 bytes, the limit is 255"),
        ("postroom.enqueue('t', 'k', null::bytea)", "payload is null"),
        ("postroom.enqueue('t', 'k', repeat('x', 1048577))", "payload has 1048577 bytes, the limit is 1048576"),
        ("postroom.enqueue('t', 'k', 'x', key => '')", "key is empty"),
        ("postroom.enqueue('t', 'k', 'x', key => repeat('x', 513))", "key has 513 bytes, the limit is 512"),
        ("postroom.enqueue('t', 'k', 'x', headers => '[1]')", "headers must be an object of text values"),
        ("postroom.enqueue('t', 'k', 'x', headers => '{\"a\": 1}')", "headers must be an object of text values"),
        (
            "postroom.enqueue('t', 'k', 'x', headers => jsonb_build_object(repeat('h', 256), 'v'))",
            "a header's name must have 1 to 255 bytes",
        ),
        (
            "postroom.enqueue('t', 'k', 'x', headers => jsonb_build_object('h', repeat('v', 65530)))",
            "as text, the limit is 65536",
        ),
        ("postroom.enqueue('t', 'k', 'x', delay => '-1 s')", "delay is negative"),
        ("postroom.enqueue('t', 'k', 'x', content_type => '')", "content_type wants 1 to 255 bytes"),
    ];
    for (call, expected) in cases {
        client.batch_execute("begin; insert into orders values (1)").await.unwrap();
        let error = client.query_one(&format!("select {call}"), &[]).await.unwrap_err();
        let error = error.as_db_error().unwrap();
        assert!(error.message().contains(expected), "{call}: {error}");
        assert_eq!(error.code(), &SqlState::INVALID_PARAMETER_VALUE);
        assert_eq!(error.hint(), Some("nothing was enqueued; roll the transaction back"));
        // I16: the failure cannot be swallowed; the transaction is aborted with the business rows.
        assert!(client.query_one("select 1", &[]).await.is_err());
        client.batch_execute("commit").await.unwrap();
    }
    let orders: i64 = client.query_one("select count(*) from orders", &[]).await.unwrap().get(0);
    assert_eq!(orders, 0);
}

#[tokio::test]
async fn a_plain_insert_is_held_to_the_same_limits() {
    let database = prepared().await;
    let client = database.connect().await;
    let insert = |columns: &str, values: &str| {
        format!("insert into postroom.outbox (topic, type, payload{columns}) values ('t', 'k', 'x'{values})")
    };
    let cases = [
        (insert(", key", ", ''"), "outbox_key_has_1_to_512_bytes"),
        (insert(", headers", ", '[]'"), "outbox_headers_are_an_object_of_at_most_65536_bytes"),
        (insert(", routing_key", ", repeat('x', 256)"), "outbox_routing_key_has_at_most_255_bytes"),
        (
            insert("", "").replace("'x'", "convert_to(repeat('x', 1048577), 'UTF8')"),
            "outbox_payload_has_at_most_1048576",
        ),
        (insert(", seq", ", 1"), "cannot insert a non-DEFAULT value into column \"seq\""),
        (insert(", lane", ", 1"), "cannot insert a non-DEFAULT value into column \"lane\""),
    ];
    for (sql, expected) in cases {
        let error = client.batch_execute(&sql).await.unwrap_err();
        let text = error.as_db_error().unwrap().message().to_owned();
        assert!(text.contains(expected), "{sql}: {text}");
    }
}

#[tokio::test]
async fn ids_made_in_sql_are_version_7_and_in_order() {
    let database = prepared().await;
    let client = database.connect().await;
    let rows = client.query("select postroom.uuid_v7() from generate_series(1, 1000)", &[]).await.unwrap();
    let ids: Vec<uuid::Uuid> = rows.iter().map(|row| row.get(0)).collect();
    assert!(ids.iter().all(|id| id.get_version_num() == 7 && id.get_variant() == uuid::Variant::RFC4122));
    let millis = |id: &uuid::Uuid| id.as_u128() >> 80;
    assert!(ids.is_sorted_by_key(millis));
    assert_eq!(millis(&MessageId::new().into()) / 60_000, millis(&ids[999]) / 60_000);
}

#[tokio::test]
async fn a_time_that_never_comes_is_refused() {
    let database = prepared().await;
    let client = database.connect().await;
    for (column, value) in [
        ("occurred_at", "infinity"),
        ("occurred_at", "-infinity"),
        ("occurred_at", "294276-12-31"),
        ("visible_at", "infinity"),
        ("visible_at", "10000-01-02"),
    ] {
        let sql = format!(
            "insert into postroom.outbox (topic, type, payload, {column}) values ('orders', 'x', '', '{value}')"
        );
        let error = client.batch_execute(&sql).await.unwrap_err();
        assert_eq!(error.code(), Some(&SqlState::CHECK_VIOLATION), "{column} = {value}: {error:?}");
    }
}

/// Then the business transaction fails too, and nothing is taken for kept.
#[tokio::test]
async fn a_row_that_a_trigger_leaves_out_is_an_error() {
    let database = prepared().await;
    let mut client = database.connect().await;
    client
        .batch_execute(
            "create function public.leave_out() returns trigger language plpgsql as 'begin return null; end';
             create trigger a before insert on postroom.outbox for each row execute function public.leave_out();
             create trigger b before insert on postroom.inbox_messages for each row execute function public.leave_out()",
        )
        .await
        .unwrap();
    let messages = [Message::new("orders", "k", "x"), Message::new("orders", "k", "x")];
    let mut tx = client.transaction().await.unwrap();
    let error = Postgres.enqueue(&mut tx, &messages).await.unwrap_err();
    let why = std::error::Error::source(&error).unwrap().to_string();
    assert!(why.contains("inserted 0 of 2") && why.contains("triggers of postroom.outbox"), "{why}");
    let keeper = crate::setup::store(&database).keeper(&Consumer::new("billing").unwrap());
    let error = keeper.admit(&messages).await.unwrap_err();
    let why = std::error::Error::source(&error).unwrap().to_string();
    assert!(why.contains("triggers of postroom.inbox_messages"), "{why}");
    assert!(!keeper.refuses_the_message(&error));
}
