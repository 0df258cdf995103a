//! A consumer's transaction on a file: it works on threads that may block.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use postroom::{Consumer, ConsumerStore, Keep, Message, Session};
use postroom_sqlite::{Sqlite, SqliteSession, connect, migrate};
use postroom_testkit::surroundings;

fn file() -> PathBuf {
    let path = surroundings::scratch("transaction").join("postroom.db");
    let mut connection = connect(&path).unwrap();
    migrate(&mut connection).unwrap();
    connection.execute_batch("create table effects (n integer)").unwrap();
    path
}

fn effects(path: &Path) -> i64 {
    connect(path).unwrap().query_row("select count(*) from effects", [], |row| row.get(0)).unwrap()
}

/// The runtime has one thread: if the statement were on it, nobody could send.
#[tokio::test]
async fn a_statement_leaves_the_runtime_its_threads() {
    let path = file();
    let mut session = SqliteSession::new(&path);
    let mut tx = session.begin().await.unwrap();
    let (sender, receiver) = mpsc::channel();
    let statement = tx.run(move |tx| {
        let came = receiver.recv_timeout(Duration::from_secs(30)).is_ok();
        tx.execute("insert into effects values (1)", [])?;
        Ok(came)
    });
    let (came, sent) = tokio::join!(statement, async { sender.send(()) });
    assert!(came.unwrap() && sent.is_ok());
    Sqlite::commit(tx).await.unwrap();
    assert_eq!(effects(&path), 1);
}

#[tokio::test]
async fn giving_up_interrupts_the_statement_and_ends_the_transaction() {
    let path = file();
    let mut session = SqliteSession::new(&path);
    let mut tx = session.begin().await.unwrap();
    tx.run(|tx| tx.execute("insert into effects values (1)", [])).await.unwrap();
    let (begun, begins) = tokio::sync::oneshot::channel();
    let (ended, ends) = tokio::sync::oneshot::channel();
    let endless = tx.run(move |tx| {
        let _ = begun.send(());
        let endless = "with recursive n (i) as (select 1 union all select i + 1 from n) select count(*) from n";
        let error = tx.query_row(endless, [], |_| Ok(())).unwrap_err();
        let _ = ended.send(error.sqlite_error_code());
        Ok(())
    });
    // Biased: the statement is asked for before anything else is waited for.
    tokio::select! {
        biased;
        _ = endless => panic!("it has no end"),
        begun = begins => begun.unwrap(),
    }
    assert_eq!(ends.await.unwrap(), Some(rusqlite::ErrorCode::OperationInterrupted));
    let refused = tx.run(|tx| tx.execute("insert into effects values (2)", [])).await.unwrap_err();
    assert!(refused.to_string().contains("was ended"), "{refused}");
    assert!(!Sqlite::is_open(&tx));
    let refused = Sqlite::commit(tx).await.unwrap_err();
    assert!(std::error::Error::source(&refused).unwrap().to_string().contains("was ended"), "{refused:?}");
    assert_eq!(effects(&path), 0);
    let tx = session.begin().await.unwrap();
    Sqlite::commit(tx).await.unwrap();
}

#[tokio::test]
async fn what_panics_in_a_statement_panics_outside_and_is_rolled_back() {
    let path = file();
    let mut session = SqliteSession::new(&path);
    let panicked = tokio::spawn(async move {
        let mut tx = session.begin().await.unwrap();
        let panics = |tx: &rusqlite::Connection| -> Result<(), rusqlite::Error> {
            tx.execute("insert into effects values (1)", [])?;
            panic!("told to panic")
        };
        tx.run(panics).await.unwrap();
    });
    let panic = panicked.await.unwrap_err().into_panic();
    assert_eq!(panic.downcast_ref::<&str>(), Some(&"told to panic"));
    assert_eq!(effects(&path), 0);
}

/// Puts another file in the place of this one, as somebody does who restores a backup.
fn replace(path: &Path) {
    let copy = path.with_extension("copy");
    connect(path).unwrap().execute("vacuum into ?1", [copy.to_str().unwrap()]).unwrap();
    std::fs::rename(&copy, path).unwrap();
    for suffix in ["-wal", "-shm"] {
        let _ = std::fs::remove_file(format!("{}{suffix}", path.display()));
    }
}

#[tokio::test]
async fn nothing_is_committed_to_a_file_that_was_replaced_or_removed() {
    let path = file();
    let mut session = SqliteSession::new(&path);
    let insert = |tx: &rusqlite::Connection| tx.execute("insert into effects values (1)", []);
    let mut tx = session.begin().await.unwrap();
    tx.run(insert).await.unwrap();
    Sqlite::commit(tx).await.unwrap();
    replace(&path);
    let mut tx = session.begin().await.unwrap();
    tx.run(insert).await.unwrap();
    Sqlite::commit(tx).await.unwrap();
    assert_eq!(effects(&path), 2, "it is in the new file");
    // In the middle of a transaction.
    let mut tx = session.begin().await.unwrap();
    tx.run(insert).await.unwrap();
    replace(&path);
    let error = Sqlite::commit(tx).await.unwrap_err();
    assert!(matches!(&error, postroom::StoreError::Unavailable { .. }), "{error:?}");
    let mut tx = session.begin().await.unwrap();
    tx.run(insert).await.unwrap();
    Sqlite::commit(tx).await.unwrap();
    assert_eq!(effects(&path), 3);
    // Gone, and not made anew.
    std::fs::rename(&path, path.with_extension("away")).unwrap();
    for _ in 0..2 {
        let error = session.begin().await.map(drop).unwrap_err();
        assert!(matches!(&error, postroom::StoreError::Unavailable { .. }), "{error:?}");
    }
    assert!(!path.exists());
    std::fs::rename(path.with_extension("away"), &path).unwrap();
    let mut tx = session.begin().await.unwrap();
    tx.run(insert).await.unwrap();
    Sqlite::commit(tx).await.unwrap();
    assert_eq!(effects(&path), 4);
}

#[tokio::test]
async fn a_row_that_a_trigger_leaves_out_is_an_error() {
    let path = file();
    connect(&path)
        .unwrap()
        .execute_batch(
            "create trigger a before insert on postroom_inbox_messages begin select raise(ignore); end;
             create trigger b before insert on postroom_outbox begin select raise(ignore); end",
        )
        .unwrap();
    let mut session = SqliteSession::new(&path);
    let message = [Message::new("orders", "k", "x")];
    let consumer = Consumer::new("billing").unwrap();
    let mut tx = session.begin().await.unwrap();
    let error = Sqlite::keep(&mut tx, &consumer, &message, Keep::Ready).await.unwrap_err();
    assert!(
        std::error::Error::source(&error).unwrap().to_string().contains("triggers of postroom_inbox_messages"),
        "{error:?}"
    );
    let error = tx.enqueue(&message).await.unwrap_err();
    assert!(
        std::error::Error::source(&error).unwrap().to_string().contains("triggers of postroom_outbox"),
        "{error:?}"
    );
}
