//! Tables that already exist, as people meet them: found, looked at, checked, taken, and given back. On both stores.

use postroom_testkit::surroundings;
use serde_json::Value;

use crate::commands::{json, postroom, text};
use crate::operators::{Running, stores, until};
use crate::reconcile::execute;

/// The table of the first article, with rows; `public.` is cut off for SQLite.
const TABLE: &str =
    "create table outbox_messages (id varchar(36) primary key, type varchar(255) not null, content text not null,
                         occurred_on_utc timestamp not null, processed_on_utc timestamp null, error text null);
                     create index unprocessed on outbox_messages (occurred_on_utc) where processed_on_utc is null";

fn row(n: u32, content: &str) -> String {
    format!(
        "insert into outbox_messages (id, type, content, occurred_on_utc)
         values ('01890a5d-ac96-774b-bcce-b302099a{n:04}', 'orders', '{content}', '2026-11-23 10:00:{n:02}')"
    )
}

async fn rows_with(store: &str, condition: &str) -> i64 {
    let sql = format!("select count(*) from outbox_messages where {condition}");
    match store.strip_prefix("sqlite:") {
        Some(file) => {
            postroom_sqlite::connect(std::path::Path::new(file)).unwrap().query_row(&sql, [], |row| row.get(0)).unwrap()
        }
        None => postroom_testkit::postgres::connect(store).await.query_one(&sql, &[]).await.unwrap().get(0),
    }
}

#[tokio::test]
async fn a_table_is_found_previewed_shadowed_taken_and_given_back() {
    let (_database, stores) = stores().await;
    for store in &stores {
        execute(store, TABLE).await;
        for n in 0..5 {
            execute(store, &row(n, &format!("{{\"Key\": \"k{}\"}}", n % 2))).await;
        }
        execute(store, &row(5, "no json")).await;
        let detected = json(&postroom(&["presets", "detect", "--store", store, "--json"]));
        let [table] = detected["tables"].as_array().unwrap().as_slice() else { panic!("{detected}") };
        assert_eq!((table["preset"].as_str(), table["pending"].as_i64()), (Some("processed-on"), Some(6)));
        let people = text(&postroom(&["presets", "detect", "--store", store]).stdout);
        assert!(people.contains("6 rows to be sent") && people.contains("mode = \"shadow\""), "{people}");

        let dir = surroundings::scratch("intake");
        let (config, out) = (dir.join("postroom.toml"), dir.join("out.jsonl"));
        let write = |mode: &str, message: &str| {
            let text = format!(
                "[store]\nurl = {store:?}\n[relay]\npoll_idle = \"50ms\"\n[[routes]]\nname = \"orders\"\n[routes.sink]\nkind = \"file\"\npath = {out:?}\n\
                 [[intake]]\nname = \"shop\"\npreset = \"processed-on\"\nmode = {mode:?}\nevery = \"50ms\"\n[intake.message]\n{message}\n"
            );
            std::fs::write(&config, text).unwrap();
            config.to_str().unwrap().to_owned()
        };
        // A mapping that does not fit is told before anything is taken.
        let file = write("active", "key = \"${customer}\"");
        let checked = postroom(&["check", "--config", &file]);
        assert_eq!(checked.status.code(), Some(1));
        assert!(
            text(&checked.stdout).contains("message.key: there is no column \"customer\""),
            "{}",
            text(&checked.stdout)
        );

        let file = write("shadow", "key = \"${content:/Key}\"");
        assert_eq!(postroom(&["check", "--config", &file]).status.code(), Some(0));
        let previewed = json(&postroom(&["intake", "preview", "shop", "--config", &file, "--json"]));
        let rows = previewed["rows"].as_array().unwrap();
        assert_eq!((rows.len(), rows[1]["key"].as_str()), (6, Some("k1")));
        assert!(rows[5]["refused"].as_str().unwrap().contains("column content is no JSON"), "{previewed}");
        assert!(rows[0].get("payload").is_none(), "only where it is asked for");
        let status = |file: &str| json(&postroom(&["intake", "list", "--config", file, "--json"]))["intakes"][0].take();
        {
            let _shadow = Running::of(&file);
            until(store, "the route is there", |status| status["routes"][0]["lanes_held"].as_i64() > Some(0));
            assert_eq!((status(&file)["pending"].as_i64(), status(&file)["taken"].as_i64()), (Some(6), Some(0)));
        }
        let file = write("active", "key = \"${content:/Key}\"");
        {
            let _run = Running::of(&file);
            let began = std::time::Instant::now();
            while rows_with(store, "processed_on_utc is not null").await < 5 {
                assert!(began.elapsed() < std::time::Duration::from_secs(60), "{}", status(&file));
            }
            let found = status(&file);
            let counted = ["pending", "taken", "refused"].map(|name| found[name].as_i64().unwrap());
            assert_eq!(counted, [0, 0, 1], "{found}");
            assert_eq!(rows_with(store, "error is not null").await, 1);
            let list = text(&postroom(&["intake", "list", "--config", &file]).stdout);
            assert!(list.contains("refused") && list.contains("column content is no JSON"), "{list}");
            // Mended, and taken again.
            execute(store, "update outbox_messages set content = '{}' where error is not null").await;
            let again = |reason: &[&str]| {
                postroom(&[&["intake", "again", "shop", "--config", &file, "--json"], reason].concat())
            };
            assert_eq!(again(&[]).status.code(), Some(2), "a reason is asked for");
            assert_eq!(json(&again(&["--reason", "mended"]))["rows"], 1);
            while rows_with(store, "processed_on_utc is not null").await < 6 {
                assert!(began.elapsed() < std::time::Duration::from_secs(60), "{}", status(&file));
            }
        }
        let sent = std::fs::read_to_string(&out).unwrap();
        let ids: Vec<Value> =
            sent.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["id"].take()).collect();
        assert_eq!(ids.len(), 6, "{sent}");
        let place = |n: u32| ids.iter().position(|id| id.as_str().unwrap().ends_with(&format!("{n:04}"))).unwrap();
        assert!(place(0) < place(2) && place(2) < place(4) && place(1) < place(3), "I4: {sent}");
    }
}

#[tokio::test]
async fn presets_are_listed_and_shown_with_their_limits() {
    let listed = json(&postroom(&["presets", "list", "--json"]));
    assert!(listed["presets"].as_array().unwrap().len() > 9, "{listed}");
    for preset in listed["presets"].as_array().unwrap() {
        let name = preset["name"].as_str().unwrap();
        let shown = json(&postroom(&["presets", "show", name, "--json"]));
        assert_eq!(shown["about"], preset["about"]);
        let people = text(&postroom(&["presets", "show", name]).stdout);
        assert!(people.contains("[intake]") && people.contains("- "), "{people}");
    }
    let unknown = postroom(&["presets", "show", "nobody"]);
    assert_eq!(unknown.status.code(), Some(2));
}

/// The tables of the first and the fourth article as their relays leave them behind.
#[tokio::test]
async fn the_doctor_finds_what_former_relays_have_done_to_tables_and_says_what_mends_it() {
    let (_database, stores) = stores().await;
    for store in &stores {
        let codes = |told: &Value| -> Vec<(String, String, String)> {
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let examined = told["examined"].as_array().unwrap().iter();
            let tables = examined.filter(|one| text(&one["part"]).starts_with("table "));
            tables.map(|one| (text(&one["code"]), text(&one["severity"]), text(&one["advice"]))).collect()
        };
        let doctor = || json(&postroom(&["doctor", "--store", store, "--json"]));
        assert!(codes(&doctor()).is_empty(), "no table is there");
        let is_postgres = !store.starts_with("sqlite:");
        let first = TABLE.split(';').next().unwrap();
        execute(store, first).await;
        // SQLite's indexes include nothing; a column of the index is the same to it.
        let index = if is_postgres { "(occurred_on_utc) include (content)" } else { "(occurred_on_utc, content)" };
        execute(store, &format!("create index covering on outbox_messages {index}")).await;
        for n in 0..3 {
            execute(store, &row(n, "{}").replace("'orders'", "'Shop.Orders.OrderPlaced, Shop, Version=1.0.0.0'")).await;
        }
        execute(store, "update outbox_messages set processed_on_utc = occurred_on_utc, error = 'connection refused' where id like '%0000'").await;
        let found = codes(&doctor());
        let of =
            |code: &str| found.iter().find(|(found, ..)| found == code).unwrap_or_else(|| panic!("{code}: {found:?}"));
        assert_eq!(of("rows-marked-unsent").1, "danger");
        assert_eq!(of("payload-in-index").1, "danger");
        assert_eq!(of("rows-without-index").1, "warning");
        assert_eq!(of("type-names").1, "note");
        // What it says mends it.
        for (_, _, advice) in &found {
            if ["update", "create index"].iter().any(|word| advice.starts_with(word)) {
                execute(store, advice).await;
            }
        }
        execute(store, "drop index covering").await;
        let found = codes(&doctor());
        let bad: Vec<_> =
            found.iter().filter(|(_, severity, _)| !["fine", "note"].contains(&severity.as_str())).collect();
        assert!(bad.is_empty(), "{bad:?}");
        assert_eq!(rows_with(store, "processed_on_utc is null").await, 3, "it is sent now");

        // Rows at 9, and rows that eight attempts within 16 minutes were not enough for.
        execute(store, "drop table outbox_messages").await;
        let (id, time, json_type) =
            if is_postgres { ("uuid", "timestamptz", "jsonb") } else { ("text", "datetime", "text") };
        let fourth = format!(
            "create table outbox_messages (id {id} primary key, aggregate_id text not null, aggregate_type text not null, aggregate_version int not null,
                 type text not null, payload {json_type} not null, headers {json_type}, tenant_id text, occurred_at {time} not null, visible_at {time} not null,
                 attempts int not null default 0, status smallint not null default 0, last_error text, routing_key text, partition_key text)"
        );
        execute(store, &fourth).await;
        execute(store, "create index ready on outbox_messages (status, visible_at)").await;
        for (n, status, year) in [(1, 9, 2001), (2, 9, 2999), (3, 3, 2001), (4, 0, 2001)] {
            let sql = format!(
                "insert into outbox_messages (id, aggregate_id, aggregate_type, aggregate_version, type, payload, occurred_at, visible_at, status)
                 values ('01890a5d-ac96-774b-bcce-b302099a000{n}', 'o-{n}', 'orders', 1, 'placed', '{{}}', '{year}-01-01 00:00:00', '{year}-01-01 00:00:00', {status})"
            );
            execute(store, &sql).await;
        }
        let found = codes(&doctor());
        let of =
            |code: &str| found.iter().find(|(found, ..)| found == code).unwrap_or_else(|| panic!("{code}: {found:?}"));
        assert_eq!(of("rows-given-up").1, "warning");
        let (_, severity, advice) = of("rows-stuck");
        assert_eq!(
            (severity.as_str(), advice.starts_with("postroom intake free outbox_messages --older-than 1h")),
            ("danger", true),
            "{advice}"
        );
        let dir = surroundings::scratch("stuck");
        let file = dir.join("postroom.toml");
        let text_of = format!(
            "[store]\nurl = {store:?}\n[[routes]]\nname = \"orders\"\n[routes.sink]\nkind = \"file\"\npath = {:?}\n\
             [[intake]]\nname = \"outbox_messages\"\npreset = \"status-codes\"\nmode = \"shadow\"\n",
            dir.join("out.jsonl")
        );
        std::fs::write(&file, text_of).unwrap();
        let file = file.to_str().unwrap();
        let free =
            ["intake", "free", "outbox_messages", "--older-than", "1h", "--config", file, "--reason", "its relay died"];
        assert!(text(&postroom(&free).stdout).contains("1 rows were given back"));
        let again = json(&postroom(&[free.as_slice(), &["--json"]].concat()));
        assert_eq!(again["rows"], 0);
        assert_eq!(rows_with(store, "status = 9").await, 1, "the one that is not due");
        execute(store, "drop table outbox_messages").await;
    }
}
