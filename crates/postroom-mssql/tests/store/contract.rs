//! What a writer is promised.

use postroom::{Admission, Consumer, EnqueueError, Inbox as _, Message, Outbox as _, StoreError};
use postroom_mssql::{Mssql, MssqlSession, migrate, print_sql, settings_of};
use postroom_testkit::conformance::Fixture as _;

use crate::fixture::{Shop, run};
use postroom_testkit::mssql::readable;

#[tokio::test]
async fn nothing_is_written_and_nothing_admitted_outside_a_transaction() {
    let shop = Shop::create().await;
    let mut conn = shop.connect().await;
    let message = Message::new("orders", "order.placed", "x");
    let error = Mssql.enqueue(conn.driver(), std::slice::from_ref(&message)).await.unwrap_err();
    assert!(format!("{error:?}").contains("transaction"), "{error:?}");
    let consumer = Consumer::new("totals").unwrap();
    let error = Mssql.admit(conn.driver(), &consumer, message.id).await.unwrap_err();
    assert!(matches!(error, StoreError::Refused { .. }), "{error:?}");
}

#[tokio::test]
async fn a_second_message_of_one_id_is_refused_and_a_second_claim_of_one_is_a_duplicate() {
    let shop = Shop::create().await;
    let message = Message::new("orders", "order.placed", "x");
    let mut conn = shop.connect().await;
    run(&mut conn, "begin transaction").await;
    Mssql.enqueue(&mut conn, std::slice::from_ref(&message)).await.unwrap();
    let error = Mssql.enqueue(&mut conn, std::slice::from_ref(&message)).await.unwrap_err();
    assert!(matches!(error, EnqueueError::AlreadyEnqueued { .. }), "{error:?}");
    let consumer = Consumer::new("totals").unwrap();
    let mut conn = shop.connect().await;
    run(&mut conn, "begin transaction").await;
    for expected in [Admission::New, Admission::Duplicate] {
        assert_eq!(Mssql.admit(conn.driver(), &consumer, message.id).await.unwrap(), expected);
    }
}

#[tokio::test]
async fn a_transaction_that_a_handler_ended_is_not_committed() {
    use postroom::{ConsumerStore as _, Session as _};

    let shop = Shop::create().await;
    let mut session = MssqlSession::new(&shop.settings);
    let mut tx = session.begin().await.unwrap();
    tx.simple_query("if @@trancount > 0 rollback transaction").await.unwrap().into_results().await.unwrap();
    let error = Mssql::commit(tx).await.unwrap_err();
    assert!(format!("{error:?}").contains("ended by a statement"), "{error:?}");
}

#[tokio::test]
async fn a_schema_is_migrated_once_with_the_lanes_that_it_has() {
    let shop = Shop::empty().await;
    let applied = migrate(&shop.settings, Some(8)).await.unwrap().applied.len();
    assert!(applied > 0);
    assert_eq!(migrate(&shop.settings, None).await.unwrap().applied.len(), 0);
    migrate(&shop.settings, Some(4)).await.unwrap_err();
}

/// The grammar does not know procedures of this kind, nor options of tables and indexes; the emulation leaves them out.
#[test]
fn statements_of_the_script_are_ones_of_a_grammar_that_is_not_ours() {
    let script = print_sql(Some(16)).unwrap();
    let mut read = 0;
    for statement in
        script.split("\ngo\n").filter(|statement| !statement.trim().is_empty() && !statement.starts_with(':'))
    {
        read += usize::from(readable(statement).unwrap_or_else(|problem| panic!("{problem}: {statement}")));
    }
    assert!(read > 25, "{read} statements were read");
}

/// To the server, 'totals ' is 'totals'.
#[tokio::test]
async fn a_consumer_that_the_server_takes_for_another_one_is_refused() {
    let shop = Shop::create().await;
    let mut conn = shop.connect().await;
    run(&mut conn, "begin transaction").await;
    let message = Message::new("orders", "order.placed", "x");
    let consumer = Consumer::new("totals ").unwrap();
    let error = Mssql.admit(conn.driver(), &consumer, message.id).await.unwrap_err();
    assert!(format!("{error:?}").contains("space"), "{error:?}");
}

#[test]
fn a_password_is_in_no_error() {
    for url in
        ["sqlserver://sa:s3cret@db:x/shop", "mssql://sa:s3cret@db/shop?encrypt=no", "sqlserver://sa:s3cret@/shop"]
    {
        let error = settings_of(url).unwrap_err();
        assert!(!format!("{error:?} {error}").contains("s3cret"), "{error:?}");
    }
}
