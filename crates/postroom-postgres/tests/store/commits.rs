//! What a consumer has committed, and the broker is told to forget, outlives the server.

use postroom::{Admitted, Consumer, ConsumerStore, MessageId, Session, StoreError};
use postroom_postgres::{Connector, Postgres, PostgresSession, migrate};
use postroom_testkit::postgres::Database;
use postroom_testkit::services::PostgresServer;
use postroom_testkit::surroundings::scratch;
use tokio::task::JoinHandle;
use tokio_postgres::Client;

use crate::setup::connector;

/// Admits a message and commits.
fn committing(connector: Connector, id: MessageId) -> JoinHandle<(Option<Admitted>, Result<(), StoreError>)> {
    tokio::spawn(async move {
        let mut session = PostgresSession::new(connector);
        let mut tx = session.begin().await.unwrap();
        let admitted = Postgres::admit(&mut tx, &Consumer::new("billing").unwrap(), &[(id, None)]).await.unwrap();
        (admitted.first().copied(), Postgres::commit(tx).await)
    })
}

/// Waits until a commit has waited for the standby for a second.
async fn until_it_waits<T>(client: &Client, committing: &JoinHandle<T>) {
    let waits =
        "select exists (select from pg_stat_activity where datname = current_database() and wait_event = 'SyncRep'
                                   and clock_timestamp() - query_start > interval '1 second')";
    loop {
        assert!(!committing.is_finished(), "it was told to be committed, and the standby lacks it");
        if client.query_one(waits, &[]).await.unwrap().get(0) {
            return;
        }
    }
}

/// With `synchronous_commit = off` a commit waits for nothing, and a `statement_timeout` that ends the wait for a standby is told as a
/// success. Whoever gives up waiting ends it too; what was committed is visible then, and a duplicate of it must wait in its place.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_waits_for_the_standby_whatever_the_database_has_set_and_so_does_that_of_a_duplicate() {
    let server = PostgresServer::start(&scratch("primary").join("postgres")).unwrap();
    let database = Database::create_on(&server.url("postgres")).await;
    migrate(&connector(&database), 4).await.unwrap();
    let client = database.connect().await;
    let limits = "do $$ begin
                      execute format('alter database %I set statement_timeout = ''300ms''', current_database());
                      execute format('alter database %I set synchronous_commit = off', current_database());
                  end $$";
    client.batch_execute(limits).await.unwrap();
    let mut standby = server.standby(&scratch("standby").join("postgres")).unwrap();
    standby.stop().unwrap();
    let id = MessageId::new();
    let first = committing(connector(&database), id);
    until_it_waits(&client, &first).await;
    first.abort();
    while client.query_one("select count(*) from postroom.inbox", &[]).await.unwrap().get::<_, i64>(0) == 0 {}
    let again = committing(connector(&database), id);
    until_it_waits(&client, &again).await;
    server.forget_standby().unwrap();
    let (admitted, committed) = again.await.unwrap();
    assert_eq!(admitted, Some(Admitted::Duplicate));
    committed.unwrap();
    // From any language: its own commit waits for what it repeats.
    let wrote = "select pg_current_wal_insert_lsn() > $1::text::pg_lsn";
    let before: String = client.query_one("select pg_current_wal_insert_lsn()::text", &[]).await.unwrap().get(0);
    let admit = "select postroom.inbox_admit('billing', $1)";
    assert!(!client.query_one(admit, &[id.as_uuid()]).await.unwrap().get::<_, bool>(0));
    assert!(client.query_one(wrote, &[&before]).await.unwrap().get::<_, bool>(0));
}
