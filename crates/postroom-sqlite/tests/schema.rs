//! What the tables of the newest schema refuse, what older files become, and what writers with another SQLite need.

#![allow(clippy::unwrap_used)]

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;

use postroom::{MessageId, Operator, Retention, Route, Store, Sweep, Want};
use postroom_sqlite::{Database, connect, migrate, print_sql};

/// A folder of the test's own.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        let path = std::env::temp_dir().join(format!("postroom-schema-{}", MessageId::new()));
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn file(&self) -> PathBuf {
        self.0.join("shop.db")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

const INSERT: &str =
    "insert into postroom_outbox (id, topic, type, payload, key) values (?1, 'orders', 'order.placed', ?2, 'o-17')";

/// docs/sqlite.md
#[tokio::test]
async fn the_documented_insert_works_with_the_sqlite_of_python() {
    assert!(include_str!("../../../docs/sqlite.md").contains(INSERT), "docs/sqlite.md shows another insert");
    let folder = Folder::new();
    let store = Database::new(folder.file());
    store.migrate(None).await.unwrap();
    let mode = std::fs::metadata(folder.file()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "a file that we make is its owner's");
    let id = MessageId::new().to_string();
    let script = "import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute('begin immediate')
connection.execute(sys.argv[2], (sys.argv[3], b'{}'))
connection.execute('commit')
print(sqlite3.sqlite_version)";
    let written = Command::new("python3").args(["-c", script]).arg(folder.file()).args([INSERT, &id]).output().unwrap();
    assert!(written.status.success(), "{}", String::from_utf8_lossy(&written.stderr));
    println!("written by SQLite {}", String::from_utf8_lossy(&written.stdout).trim());
    let stored = store.message(id.parse().unwrap()).await.unwrap().unwrap();
    assert!((0.0..60.0).contains(&stored.age_seconds), "its default time is now: {}", stored.age_seconds);
}

#[test]
fn what_would_stop_a_route_is_refused_when_it_is_written() {
    let folder = Folder::new();
    let mut connection = connect(&folder.file()).unwrap();
    migrate(&mut connection).unwrap();
    let id = "0199c9a2-7d2e-7bd0-a8d2-0b6d9c1c9a01";
    let insert = |values: &str| {
        let sql = format!("insert into postroom_outbox (id, topic, type, payload, headers) values ({values})");
        connection.execute(&sql, []).map_err(|error| error.to_string())
    };
    for (values, why) in [
        (format!("'{id}', x'ff', 'k', 'x', null"), "cannot store BLOB value in TEXT column"),
        (format!("'{id}', 't', 'k', 7, null"), "CHECK constraint failed"),
        (format!("'{id}', 't', 'k', 'x', '[]'"), "CHECK constraint failed"),
        (format!("'{id}', 't', 'k', 'x', json_object('h', hex(zeroblob(40000)))"), "more than 65536 bytes"),
        ("'no-uuid', 't', 'k', 'x', null".to_owned(), "CHECK constraint failed"),
    ] {
        let refused = insert(&values).unwrap_err();
        assert!(refused.contains(why), "{values}: {refused}");
    }
    insert(&format!("'{id}', 't', 'k', 'x', null")).unwrap();
    for other_form in [id.to_uppercase(), id.replace('-', "")] {
        let refused = insert(&format!("'{other_form}', 't', 'k', 'x', null")).unwrap_err();
        assert!(refused.contains("postroom_outbox_id"), "the same id in another form: {refused}");
    }
}

#[tokio::test]
async fn an_older_file_keeps_every_message_its_order_and_the_next_seq() {
    let folder = Folder::new();
    let script = print_sql();
    let older = format!("{}commit;", script.split("-- What operators see of relays and fillers").next().unwrap());
    let mut connection = connect(&folder.file()).unwrap();
    connection.execute_batch(&older).unwrap();
    let id = "0199c9a2-7d2e-7bd0-a8d2-0b6d9c1c9a01";
    connection
        .execute_batch(&format!(
            "insert into postroom_outbox (id, topic, type, payload) values ('{id}', 'orders', 'k', 'a');
             insert into postroom_outbox (id, topic, type, payload) values ('{}', 'orders', 'k', 'b');
             insert into postroom_outbox (id, topic, type, payload) values ('0199c9a2-7d2e-7bd0-a8d2-0b6d9c1c9a02', x'6f7264657273', 'k', x'63');
             insert into postroom_outbox (id, topic, type, payload) values ('0199c9a2-7d2e-7bd0-a8d2-0b6d9c1c9a03', 'orders', 'k', 'pruned');
             delete from postroom_outbox where payload = 'pruned';
             insert into postroom_inbox (consumer, message_id) values ('billing', '{id}');",
            id.to_uppercase()
        ))
        .unwrap();
    let migrated = migrate(&mut connection).unwrap();
    assert_eq!(
        migrated.applied,
        [
            (8, "operators"),
            (9, "sizes"),
            (10, "operations"),
            (11, "archive"),
            (12, "reconcile"),
            (13, "waits"),
            (14, "intake"),
            (15, "queues")
        ]
    );
    connection.execute("insert into postroom_outbox (id, topic, type, payload) values ('0199c9a2-7d2e-7bd0-a8d2-0b6d9c1c9a04', 'orders', 'k', 'd')", []).unwrap();
    let seqs: Vec<i64> = connection
        .prepare("select seq from postroom_outbox order by seq")
        .unwrap()
        .query_map([], |row| row.get(0))
        .unwrap()
        .collect::<Result<_, _>>()
        .unwrap();
    assert_eq!(seqs, [1, 2, 3, 5], "what was pruned is not handed out again");
    let store = Database::new(folder.file());
    let source = store.source(&Route::new("orders"), "relay").await.unwrap();
    source.renew(&postroom::Report::default()).await.unwrap();
    let claimed = source.claim(Want::up_to(10)).await.unwrap().deliveries;
    let payloads: Vec<&[u8]> = claimed.iter().map(|delivery| delivery.message.payload.as_ref()).collect();
    assert_eq!(payloads, [b"a", b"b", b"c", b"d"]);
    assert_eq!(claimed[0].message.id.to_string(), id);
    assert_ne!(claimed[1].message.id, claimed[0].message.id, "the second of one id has one of its own");
    assert_eq!(store.receptions(id.parse().unwrap()).await.unwrap().len(), 1, "the inbox remembers");
}

/// The block of docs/sqlite.md that begins so.
fn documented(begin: &str) -> String {
    let docs = include_str!("../../../docs/sqlite.md");
    let at = docs.find(begin).unwrap();
    docs[at..].split("```").next().unwrap().to_owned()
}

#[tokio::test]
async fn retention_keeps_what_no_route_took_and_strict_topics_refuse_it() {
    let folder = Folder::new();
    let store = Database::new(folder.file());
    store.migrate(None).await.unwrap();
    let route = Route { topics: postroom::TopicFilter::new(["orders", "billing.*"]).unwrap(), ..Route::new("orders") };
    let source = store.source(&route, "relay").await.unwrap();
    source.renew(&postroom::Report::default()).await.unwrap();
    let connection = connect(&folder.file()).unwrap();
    let insert = |topic: &str| {
        let sql = "insert into postroom_outbox (id, topic, type, payload) values (?1, ?2, 'k', 'x')";
        connection.execute(sql, [MessageId::new().to_string(), topic.to_owned()])
    };
    for topic in ["orders", "billing.paid", "ordres", "orders"] {
        insert(topic).unwrap();
    }
    connection.execute("update postroom_lanes set position_seq = 4", []).unwrap();
    connection.execute("update postroom_outbox set occurred_ms = occurred_ms - 86400000", []).unwrap();
    // Before 1970.
    connection.execute("update postroom_outbox set occurred_ms = -5000 where seq = 2", []).unwrap();
    let retention = Retention { outbox: Some(std::time::Duration::from_secs(3600)), ..Retention::default() };
    let swept = async || {
        let mut sweep = Sweep::begin(&retention);
        while !sweep.is_over() {
            store.retain(&retention, &mut sweep).await.unwrap();
        }
    };
    swept().await;
    // A route that takes the topic later does not send what it passed before, so that is kept.
    let change = postroom::RouteChange {
        topics: Some(postroom::TopicFilter::new(["orders", "billing.*", "ordres"]).unwrap()),
        ..postroom::RouteChange::default()
    };
    let deed = postroom::Deed { actor: "ann".to_owned(), reason: "x".to_owned() };
    store.set_route("orders", &change, &deed).await.unwrap();
    swept().await;
    let left: Vec<String> = connection
        .prepare("select topic from postroom_outbox order by seq")
        .unwrap()
        .query_map([], |row| row.get(0))
        .unwrap()
        .collect::<Result<_, _>>()
        .unwrap();
    assert_eq!(left, ["ordres", "orders"], "and the message at the position");
    connection.execute_batch(&documented("create trigger strict_topics")).unwrap();
    let refused = insert("nobody.takes.it").unwrap_err().to_string();
    assert!(refused.contains("no route takes this topic"), "{refused}");
    insert("billing.refunded").unwrap();
}
