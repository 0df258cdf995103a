//! Bytes in are bytes out.

use postroom::{EnqueueError, Message, Outbox, PAYLOAD_BYTES_MAX};
use postroom_postgres::Postgres;

use crate::setup::{claim_all, prepared, source};

#[tokio::test]
async fn payload_bytes_in_are_payload_bytes_out() {
    let database = prepared().await;
    let mut client = database.connect().await;
    let payloads: [Vec<u8>; 5] = [
        vec![],
        b"a\0b\0".to_vec(),
        vec![0xff, 0xfe, 0xc3, 0x28],
        br#"{"b": 1.0, "a": "\u0000", "a": 2}"#.to_vec(),
        (0..PAYLOAD_BYTES_MAX).map(|n| (n * 31 % 251) as u8).collect(),
    ];
    let messages: Vec<Message> = payloads
        .iter()
        .map(|payload| Message::new("orders", "bytes", payload.clone()).key("one key").header("nul", "a\0b"))
        .collect();
    let mut tx = client.transaction().await.unwrap();
    Postgres.enqueue(&mut tx, &messages).await.unwrap();
    tx.commit().await.unwrap();
    let source = source(&database, "relay").await;
    let found: Vec<std::sync::Arc<Message>> =
        claim_all(&source).await.into_iter().map(|delivery| delivery.message).collect();
    assert_eq!(found.len(), messages.len());
    for (found, message) in found.iter().zip(&messages) {
        assert!(found.payload == message.payload, "{} bytes came out differently", message.payload.len());
        assert_eq!(found.headers["nul"], "a\0b");
        assert_eq!(found.id, message.id);
    }
}

#[tokio::test]
async fn one_byte_more_is_refused_and_nothing_is_written() {
    let database = prepared().await;
    let mut client = database.connect().await;
    let mut tx = client.transaction().await.unwrap();
    let messages = [Message::new("t", "k", "fits"), Message::new("t", "k", vec![0; PAYLOAD_BYTES_MAX + 1])];
    let refused = Postgres.enqueue(&mut tx, &messages).await.unwrap_err();
    assert!(matches!(refused, EnqueueError::Limit(_)), "{refused}");
    tx.commit().await.unwrap();
    let rows: i64 = client.query_one("select count(*) from postroom.outbox", &[]).await.unwrap().get(0);
    assert_eq!(rows, 0);
}

#[tokio::test]
async fn headers_that_cannot_be_decoded_do_not_hold_up_their_message_or_any_other() {
    let database = prepared().await;
    let client = database.connect().await;
    for headers in [r#"{"n": 9007199254740993}"#, r#"{"a": "\ud800"}"#, r#"{"n": 1e999}"#] {
        let sql = "insert into postroom.outbox (topic, type, payload, headers) values ('t', 'k', 'x', $1::text::json)";
        client.execute(sql, &[&headers]).await.unwrap();
    }
    let source = source(&database, "relay").await;
    let mut found: Vec<_> =
        claim_all(&source).await.into_iter().map(|delivery| delivery.message.headers.clone()).collect();
    found.sort();
    assert_eq!(found.len(), 3);
    assert_eq!(found[0]["n"], "1e999");
    assert_eq!(found[1]["n"], "9007199254740993", "with all its digits");
    assert_eq!(found[2]["postroom-undecoded-headers"], r#"{"a": "\ud800"}"#);
}
