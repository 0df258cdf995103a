//! Messages leave for an archive and come back, on both stores, with processes that die at every step.

use std::path::{Path, PathBuf};
use std::process::Output;

use postroom_testkit::services::SeaweedFs;
use postroom_testkit::surroundings;
use serde_json::Value;

use crate::commands::{holds_to, json, postroom, text};
use crate::operators::{Running, stores, until};
use crate::reconcile::execute;

#[tokio::test]
async fn with_parquet_each_segment_has_such_a_file_and_verify_reads_it() {
    let (_database, stores) = stores().await;
    for store in &stores {
        let folder = surroundings::scratch("parquet");
        let shop = Shop::new(store, folder.display().to_string());
        shop.sell(30).await;
        let config = surroundings::scratch("parquet-config").join("postroom.toml");
        let text_of = |parquet: &str| {
            format!(
                "[store]\nurl = {store:?}\n[retention]\noutbox = \"7d\"\n[archive]\nurl = {:?}\nparquet = {parquet}\n\
                 [[routes]]\nname = \"orders\"\ntopics = [\"orders\"]\n[routes.sink]\nkind = \"stdout\"\n",
                shop.archive
            )
        };
        let path = config.to_string_lossy().into_owned();
        std::fs::write(&config, text_of("\"yes\"")).unwrap();
        let refused = postroom(&["prune", "--config", &path]);
        assert!(text(&refused.stderr).contains("archive.parquet must be true or false"), "{refused:?}");
        std::fs::write(&config, text_of("true")).unwrap();
        let pruned = postroom(&["prune", "--config", &path]);
        assert_eq!(pruned.status.code(), Some(0), "{pruned:?}");
        let list = shop.asked(&["archive", "list", "--json"], "archive-list");
        assert_eq!(list["segments"][0]["messages"], 30, "{list}");
        assert_eq!(list["unfinished"].as_array().unwrap().len(), 0, "{list}");
        let file = folder.join(list["segments"][0]["parquet"]["object"].as_str().unwrap());
        let bytes = std::fs::read(&file).unwrap();
        assert!(bytes.starts_with(b"PAR1") && bytes.ends_with(b"PAR1"));
        assert_eq!(shop.run(&["archive", "verify"], &[]).status.code(), Some(0));
        std::fs::write(&file, &bytes[..bytes.len() - 1]).unwrap();
        let verified = shop.run(&["archive", "verify"], &[]);
        assert_eq!(verified.status.code(), Some(1));
        assert!(text(&verified.stdout).contains(".parquet"), "{verified:?}");
        std::fs::remove_file(&file).unwrap();
        assert_eq!(shop.run(&["archive", "verify"], &[]).status.code(), Some(1));
        let restored = shop.run(&["archive", "restore", "--all", "--reason", "the lines are whole"], &[]);
        assert_eq!(restored.status.code(), Some(0), "{restored:?}");
    }
}

/// One store whose messages are archived.
struct Shop {
    store: String,
    archive: String,
    out: PathBuf,
    variables: Vec<(String, String)>,
}

impl Shop {
    fn new(store: &str, archive: String) -> Self {
        Self {
            store: store.to_owned(),
            archive,
            out: surroundings::scratch("archived").join("out.jsonl"),
            variables: Vec::new(),
        }
    }

    async fn sql(&self, postgres: &str, sqlite: &str) -> i64 {
        match self.store.strip_prefix("sqlite:") {
            Some(file) => {
                let connection = postroom_sqlite::connect(Path::new(file)).unwrap();
                connection.query_row(sqlite, [], |row| row.get(0)).unwrap()
            }
            None => {
                let client = postroom_testkit::postgres::connect(&self.store).await;
                client.query_one(postgres, &[]).await.unwrap().get(0)
            }
        }
    }

    /// Writes messages, sends them, and lets ten days pass. One more stays behind: SQLite keeps the last one as a mark.
    async fn sell(&self, messages: usize) {
        for n in 0..=messages {
            let key = format!("k{}", n % 3);
            let payload = format!("{{\"n\":{n}}}");
            let arguments =
                ["send", "--topic", "orders", "--type", "order.placed", "--key", &key, "--payload", &payload];
            let sent = postroom(&[&arguments[..], &["--store", &self.store]].concat());
            assert_eq!(sent.status.code(), Some(0), "{sent:?}");
        }
        {
            let _relay = Running::relay(&self.store, &format!("kind = \"file\"\npath = {:?}\n", self.out));
            until(&self.store, "it is sent", |status| {
                status["routes"][0]["backlog"] == 0 && status["routes"][0]["lanes_held"].as_i64() > Some(0)
            });
        }
        self.sql(
            "with old as (update postroom.outbox set occurred_at = now() - interval '10 days'
                           where seq < (select max(seq) from postroom.outbox) returning 1) select count(*) from old",
            "update postroom_outbox set occurred_ms = occurred_ms - 864000000
              where seq < (select max(seq) from postroom_outbox) and occurred_ms > 0 returning 0",
        )
        .await;
    }

    fn run(&self, arguments: &[&str], variables: &[(&str, &str)]) -> Output {
        let mut command = surroundings::postroom();
        command.args(arguments).args(["--store", &self.store]).env("POSTROOM_ARCHIVE_URL", &self.archive);
        command
            .envs(self.variables.iter().cloned())
            .envs(variables.iter().copied())
            .current_dir(surroundings::scratch("archive-run"));
        command.output().unwrap()
    }

    fn asked(&self, arguments: &[&str], schema: &str) -> Value {
        let output = self.run(&[&["--json"], arguments].concat(), &[]);
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {output:?}");
        text(&output.stdout).lines().for_each(|line| holds_to(schema, line, arguments));
        json(&output)
    }

    fn pruned(&self) -> i64 {
        self.asked(&["prune", "--outbox", "7d"], "prune")["outbox"].as_i64().unwrap()
    }

    async fn rows(&self) -> i64 {
        self.sql("select count(*) from postroom.outbox", "select count(*) from postroom_outbox").await
    }

    /// Nobody is at a segment any more.
    async fn a_minute_passes(&self) {
        self.sql(
            "with all_ as (update postroom.archive_segments set taken_until = now() - interval '1 minute' returning 1) select count(*) from all_",
            "select count(*) from postroom_archive_segments",
        )
        .await;
        if let Some(file) = self.store.strip_prefix("sqlite:") {
            let connection = postroom_sqlite::connect(Path::new(file)).unwrap();
            connection.execute("update postroom_archive_segments set taken_until_ms = 0", []).unwrap();
        }
    }

    fn archived(&self) -> i64 {
        let listed = self.asked(&["archive", "list"], "archive-list");
        listed["segments"].as_array().unwrap().iter().map(|segment| segment["messages"].as_i64().unwrap()).sum()
    }

    /// How often each message was sent.
    fn sent(&self) -> std::collections::HashMap<String, usize> {
        let mut sent = std::collections::HashMap::new();
        for line in std::fs::read_to_string(&self.out).unwrap().lines() {
            let message: Value = serde_json::from_str(line).unwrap();
            *sent.entry(message["id"].as_str().unwrap().to_owned()).or_default() += 1;
        }
        sent
    }
}

/// M72: nothing is lost, and nothing archived twice, wherever a process dies. What was archived can be replayed.
#[tokio::test]
async fn a_death_at_any_step_loses_nothing_and_archives_nothing_twice() {
    const MESSAGES: usize = 12;
    let (_database, stores) = stores().await;
    for store in &stores {
        let folder = surroundings::scratch("archive");
        let shop = Shop::new(store, folder.display().to_string());
        let mut archived = 0;
        for step in ["archive-begun", "archive-object", "archive-manifest", "archive-stored", "archive-ended"] {
            shop.sell(MESSAGES).await;
            let before = shop.rows().await;
            let mark = surroundings::scratch("mark").join("mark");
            let place = format!("{step}:1");
            let dies = [("POSTROOM_CRASH_AT", place.as_str()), ("POSTROOM_CRASH_MARK", mark.to_str().unwrap())];
            let died = shop.run(&["prune", "--outbox", "7d"], &dies);
            assert!(!died.status.success() && mark.is_file(), "{step}: {died:?}");
            if step != "archive-ended" {
                assert_eq!(shop.rows().await, before, "{step}: nothing goes before the archive has it");
                let too_early = shop.run(&["prune", "--outbox", "7d"], &[]);
                assert!(text(&too_early.stderr).contains("a segment is in other hands"), "{too_early:?}");
                assert_eq!(shop.rows().await, before);
            }
            shop.a_minute_passes().await;
            shop.pruned();
            let removed = before - shop.rows().await;
            assert_eq!(removed as usize, if archived == 0 { MESSAGES } else { MESSAGES + 1 }, "{step}");
            archived += removed;
            assert_eq!(shop.archived(), archived, "{step}: each once");
            let verified = shop.asked(&["archive", "verify"], "archive-verify");
            assert_eq!(
                (&verified["messages"], verified["damaged"].as_array().map(Vec::len)),
                (&archived.into(), Some(0))
            );
        }
        // Without the archive nothing goes any more.
        shop.sell(1).await;
        let refused = postroom(&["prune", "--outbox", "7d", "--store", store]);
        assert_eq!(refused.status.code(), Some(1));
        assert!(text(&refused.stderr).contains("no archive is given"), "{}", text(&refused.stderr));

        let sent = shop.sent();
        assert!(sent.values().all(|times| *times == 1));
        let preview = shop.run(&["replay", "--from-archive", "--until", "7d", "--dry-run"], &[]);
        let said = text(&preview.stderr);
        assert!(said.contains(&format!("{archived} messages match in the archive")), "{said}");
        let restored = shop.run(
            &[
                "--json",
                "archive",
                "restore",
                "--from",
                "2000-01-01T00:00:00Z",
                "--to",
                "7d",
                "--type",
                "order.paid",
                "--reason",
                "x",
            ],
            &[],
        );
        assert_eq!(json(&restored)["restored"], 0, "no such type");
        let _relay = Running::relay(store, &format!("kind = \"file\"\npath = {:?}\n", shop.out));
        let replay =
            ["--json", "replay", "--from-archive", "--until", "7d", "--wait", "--reason", "the consumer lost a week"];
        let replayed = shop.run(&replay, &[]);
        assert_eq!(replayed.status.code(), Some(0), "{replayed:?}");
        let report = json(&replayed);
        assert!(report["done"].as_i64() >= Some(archived), "{report}");
        let twice = shop.sent().values().filter(|times| **times == 2).count() as i64;
        assert!(twice >= archived && shop.sent().values().all(|times| *times <= 2), "{twice} of {archived}");
        assert_eq!(shop.archived(), archived, "what came back is not archived again");
    }
}

/// What is damaged is found, and is never a reason to remove anything.
#[tokio::test]
async fn a_damaged_archive_is_found_and_nothing_is_removed_for_it() {
    let (_database, stores) = stores().await;
    for store in &stores {
        let folder = surroundings::scratch("damaged");
        let shop = Shop::new(store, format!("file://{}", folder.display()));
        shop.sell(5).await;
        assert_eq!(shop.pruned(), 5);
        let listed = shop.asked(&["archive", "list"], "archive-list");
        let object = folder.join(listed["segments"][0]["object"].as_str().unwrap());
        let whole = std::fs::read(&object).unwrap();
        let mut flipped = whole.clone();
        flipped[whole.len() / 2] ^= 1;
        let damages: [(&str, Option<&[u8]>); 3] =
            [("flipped", Some(&flipped)), ("cut", Some(&whole[..9])), ("gone", None)];
        for (damage, bytes) in damages {
            match bytes {
                Some(bytes) => std::fs::write(&object, bytes).unwrap(),
                None => std::fs::remove_file(&object).unwrap(),
            }
            let output = shop.run(&["--json", "archive", "verify"], &[]);
            assert_eq!(output.status.code(), Some(1), "{damage}: {output:?}");
            assert_eq!(json(&output)["damaged"].as_array().map(Vec::len), Some(1), "{damage}");
            let restore = shop.run(&["archive", "restore", "--all", "--reason", "x"], &[]);
            assert!(!restore.status.success(), "{damage}: {restore:?}");
        }
        std::fs::write(&object, &whole).unwrap();
        assert_eq!(shop.asked(&["archive", "verify"], "archive-verify")["messages"], 5);

        // A folder that is away may be a volume that is not mounted.
        shop.sell(5).await;
        let (away, before) = (folder.with_extension("away"), shop.rows().await);
        std::fs::rename(&folder, &away).unwrap();
        let refused = shop.run(&["prune", "--outbox", "7d"], &[]);
        assert!(!refused.status.success() && !folder.exists(), "{refused:?}");
        assert!(text(&refused.stderr).contains("must exist"), "{}", text(&refused.stderr));
        assert_eq!(shop.rows().await, before);
        std::fs::rename(&away, &folder).unwrap();
        // A disk that takes nothing.
        std::fs::write(folder.join("outbox.new"), "").unwrap();
        std::fs::rename(folder.join("outbox"), &away).unwrap();
        std::fs::rename(folder.join("outbox.new"), folder.join("outbox")).unwrap();
        let refused = shop.run(&["prune", "--outbox", "7d"], &[]);
        assert!(!refused.status.success(), "{refused:?}");
        assert_eq!(shop.rows().await, before);
        std::fs::remove_file(folder.join("outbox")).unwrap();
        std::fs::rename(&away, folder.join("outbox")).unwrap();
        shop.a_minute_passes().await;
        assert_eq!(shop.pruned(), 6);
        assert_eq!(shop.asked(&["archive", "verify"], "archive-verify")["messages"], 11);
    }
}

/// What an application may write comes back as it was, or not at all; and one outbox never gets the messages of another.
#[tokio::test]
async fn odd_messages_and_other_outboxes_do_no_harm() {
    let (_database, stores) = stores().await;
    let folder = surroundings::scratch("shared-archive");
    for store in &stores {
        let shop = Shop::new(store, folder.display().to_string());
        let lite = store.starts_with("sqlite");
        let odd = ["{\n  \"a\": \"b\"\n}", " {\"a\":1.000} ", "{\"a\":\"b\"}\r\n"];
        for headers in odd {
            let id = postroom::MessageId::new();
            let insert = format!(
                "insert into postroom.outbox (id, topic, type, payload, headers) values ('{id}', 'orders', 'odd', 'x', '{headers}')"
            );
            execute(store, &insert).await;
        }
        if lite {
            let id = postroom::MessageId::new();
            let insert = format!(
                "insert into postroom.outbox (id, topic, type, payload, aggregate_type, tenant_id)
                 values ('{id}', 'orders', 'odd', 'x', cast(x'fe' as text), cast(x'ff' as text))"
            );
            execute(store, &insert).await;
        }
        let written = 3 + i64::from(lite);
        shop.sell(2).await;
        let headers = "select count(distinct headers::text) from postroom.outbox where type = 'odd'";
        let headers_lite = "select count(distinct headers) from postroom_outbox where type = 'odd'";
        assert_eq!(shop.sql(headers, headers_lite).await, 3);
        assert_eq!(shop.pruned(), written + 2);
        let back = shop.run(&["--json", "archive", "restore", "--all", "--reason", "x"], &[]);
        let counted = json(&back);
        assert_eq!(back.status.code(), Some(i32::from(lite)), "{counted}");
        assert_eq!((&counted["restored"], &counted["unreadable"]), (&5.into(), &i64::from(lite).into()), "{counted}");
        let exactly =
            format!("select count(*) from postroom.outbox where headers::text = E'{}'", odd[0].replace('\n', "\\n"));
        let exactly_lite = "select count(*) from postroom_outbox where headers = '{' || char(10) || '  \"a\": \"b\"' || char(10) || '}'";
        assert_eq!(shop.sql(&exactly, exactly_lite).await, 1, "as it was written");
        assert_eq!(counted["of_other_outboxes"], i64::from(lite), "the first store's segment is left alone");
    }
    // A volume that is not mounted looks like an empty folder.
    let shop = Shop::new(&stores[0], surroundings::scratch("empty-archive").display().to_string());
    let verified = shop.run(&["--json", "archive", "verify"], &[]);
    assert_eq!((verified.status.code(), &json(&verified)["lacking"]), (Some(1), &1.into()), "{verified:?}");
}

/// Whoever ends archiving gets rid of what a process left behind.
#[tokio::test]
async fn archiving_can_be_ended_for_good() {
    let (_database, stores) = stores().await;
    for store in &stores {
        let shop = Shop::new(store, surroundings::scratch("ended").display().to_string());
        shop.sell(4).await;
        let dies = [("POSTROOM_CRASH_AT", "archive-begun:1")];
        assert!(!shop.run(&["prune", "--outbox", "7d"], &dies).status.success());
        let removes = || postroom(&["--json", "prune", "--outbox", "7d", "--store", store]);
        assert_eq!(removes().status.code(), Some(1), "the store is archived");
        let statement = if store.starts_with("sqlite") {
            "update postroom.settings set archives = 0"
        } else {
            "update postroom.settings set archives = false"
        };
        execute(store, statement).await;
        assert_eq!(json(&removes())["outbox"], 4);
    }
}

/// The same with a bucket of a server that speaks the S3 protocol.
#[tokio::test]
async fn a_bucket_holds_an_archive_too() {
    let server = SeaweedFs::start(&surroundings::scratch("seaweedfs"), "cold").unwrap();
    let (_database, [store, _]) = stores().await;
    let mut shop = Shop::new(&store, "s3://cold/orders".to_owned());
    shop.variables = [
        ("AWS_ENDPOINT_URL", server.url()),
        ("AWS_ALLOW_HTTP", "true".to_owned()),
        ("AWS_REGION", "us-east-1".to_owned()),
        ("AWS_ACCESS_KEY_ID", "somebody".to_owned()),
        ("AWS_SECRET_ACCESS_KEY", "Tops3cret".to_owned()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .to_vec();
    shop.sell(9).await;
    let place = "archive-object:1";
    assert!(!shop.run(&["prune", "--outbox", "7d"], &[("POSTROOM_CRASH_AT", place)]).status.success());
    shop.a_minute_passes().await;
    assert_eq!(shop.pruned(), 9);
    assert_eq!(shop.archived(), 9);
    assert_eq!(shop.asked(&["archive", "verify"], "archive-verify")["messages"], 9);
    let restored = shop.asked(&["archive", "restore", "--all", "--reason", "x"], "archive-restore");
    assert_eq!(restored["restored"], 9);

    // Without the server nothing goes, and nobody learns the secret.
    shop.sell(3).await;
    let before = shop.rows().await;
    drop(server);
    let refused = shop.run(&["prune", "--outbox", "7d"], &[]);
    assert_eq!(refused.status.code(), Some(69), "{refused:?}");
    assert!(!text(&refused.stderr).contains("Tops3cret"), "{}", text(&refused.stderr));
    assert_eq!(shop.rows().await, before);
}
