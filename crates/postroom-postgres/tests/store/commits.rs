//! What a consumer has committed, and the broker is told to forget, outlives the server.

use postroom::{Consumer, ConsumerStore, MessageId, Session};
use postroom_postgres::{Postgres, PostgresSession, migrate};
use postroom_testkit::postgres::Database;
use postroom_testkit::services::PostgresServer;
use postroom_testkit::surroundings::scratch;

use crate::setup::connector;

/// With `synchronous_commit = off` a commit waits for nothing, and a `statement_timeout` that ends the wait for a standby is told as a
/// success.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_waits_for_the_standby_whatever_the_database_has_set() {
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
    let connector = connector(&database);
    let committing = tokio::spawn(async move {
        let mut session = PostgresSession::new(connector);
        let mut tx = session.begin().await.unwrap();
        let arrival = [(MessageId::new(), None)];
        Postgres::admit(&mut tx, &Consumer::new("billing").unwrap(), &arrival).await.unwrap();
        Postgres::commit(tx).await
    });
    let waits =
        "select exists (select from pg_stat_activity where datname = current_database() and wait_event = 'SyncRep'
                                   and clock_timestamp() - query_start > interval '1 second')";
    while !client.query_one(waits, &[]).await.unwrap().get::<_, bool>(0) {
        assert!(!committing.is_finished(), "it was told to be committed, and the standby lacks it");
    }
    assert!(!committing.is_finished(), "it was told to be committed, and the standby lacks it");
    server.forget_standby().unwrap();
    committing.await.unwrap().unwrap();
}
