//! A relay behind Debian's PgBouncer in transaction mode: it leaves nothing in the sessions of others, and says what is wrong.

use postroom::Source;
use postroom_postgres::{Connector, Database as Store, LogSource, migrate};
use postroom_testkit::postgres::Database;
use postroom_testkit::services::{PgBouncer, PostgresServer};
use postroom_testkit::surroundings;

use crate::setup::{claim_all, enqueue, open, route, source};

/// What the sessions of other clients of the pooler are set to.
async fn settings_behind(pooler: &PgBouncer, database: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for _ in 0..60 {
        let client = postroom_testkit::postgres::connect(&pooler.url(database)).await;
        for name in ["synchronous_commit", "enable_seqscan", "statement_timeout", "lock_timeout", "search_path"] {
            let rows = client.simple_query(&format!("show {name}")).await.unwrap();
            let value = rows.iter().find_map(|message| match message {
                tokio_postgres::SimpleQueryMessage::Row(row) => row.get(0),
                _ => None,
            });
            found.push((name.to_owned(), value.unwrap().to_owned()));
        }
    }
    found.sort();
    found.dedup();
    found
}

#[tokio::test]
async fn a_relay_behind_a_pooler_is_refused_in_words_and_leaves_no_setting_in_sessions_of_others() {
    let server = PostgresServer::start(&surroundings::scratch("pooled").join("postgres")).unwrap();
    let database = Database::create_on(&server.url("postgres")).await;
    let name = database.url().rsplit('/').next().unwrap().to_owned();
    for ignored in [&["extra_float_digits"][..], &["extra_float_digits", "options"][..]] {
        let pooler =
            PgBouncer::start(&surroundings::scratch("pooler").join("pgbouncer"), server.port(), ignored).unwrap();
        let before = settings_behind(&pooler, &name).await;
        assert_eq!(before.len(), 5, "{before:?}");
        // Migrations, which lock, work through it and leave no lock behind.
        let through = Connector::new(&pooler.url(&name)).unwrap();
        if ignored.len() == 1 {
            migrate(&through, 4).await.unwrap();
        }
        let Err(error) = LogSource::open(&Store::of(through), &route(), "relay").await else { panic!("it opened") };
        let shown = format!("{error}: {}", std::error::Error::source(&error).unwrap());
        assert!(shown.contains("pooler") && shown.contains("connects to PostgreSQL directly"), "{shown}");
        assert!(!error.is_transient());
        assert_eq!(settings_behind(&pooler, &name).await, before);
    }
    let locks = "select count(*) from pg_locks where locktype = 'advisory'";
    let client = database.connect().await;
    assert_eq!(client.query_one(locks, &[]).await.unwrap().get::<_, i64>(0), 0);
    // Writers may go through it while the relay does not.
    let relay = source(&database, "relay").await;
    let ids = enqueue(&client, Some("a"), 3).await;
    assert_eq!(claim_all(&relay).await.len(), ids.len());
    relay.release().await.unwrap();
    open(&database, &route(), "relay").await.unwrap();
}
