//! The binary as a person or a script meets it: output, exit codes, redaction.

use std::io::BufRead;
use std::process::{Command, Output};

use postroom_testkit::postgres::Database;
use postroom_testkit::services::ports;
use postroom_testkit::surroundings;
use serde_json::Value;

/// Runs it to its end. What it prints with `--json` is held against the schema of that output.
pub fn postroom(arguments: &[&str]) -> Output {
    let output = surroundings::postroom()
        .args(arguments)
        .env_remove("POSTROOM_STORE_URL")
        .current_dir(surroundings::scratch("commands"))
        .output()
        .unwrap();
    if arguments.contains(&"--json") {
        let printed = text(&output.stdout);
        let schema = if output.status.code() == Some(0) { schema_of(arguments) } else { None };
        printed.lines().for_each(|line| holds_to(schema.unwrap_or("error"), line, arguments));
    }
    output
}

/// Which of docs/json; none: an error, or the demo.
fn schema_of(arguments: &[&str]) -> Option<&'static str> {
    let has = |argument: &str| arguments.contains(&argument);
    let of = |command: &str, verbs: &[&str]| has(command) && verbs.iter().any(|verb| has(verb));
    let act_on_many = has("--group") || has("--canary") || has("--rate") || has("--wait");
    let known: [(bool, &str); 45] = [
        (of("reconcile", &["run", "report"]), "reconcile"),
        (of("reconcile", &["show"]), "reconcile-show"),
        (of("reconcile", &["changes"]), "reconcile-changes"),
        (of("intake", &["list"]), "intake-list"),
        (of("intake", &["preview"]), "intake-preview"),
        (of("intake", &["again"]), "intake-again"),
        (of("intake", &["free"]), "intake-free"),
        (of("presets", &["list"]), "presets-list"),
        (of("presets", &["show"]), "presets-show"),
        (of("presets", &["detect"]), "presets-detect"),
        (of("archive", &["list"]), "archive-list"),
        (of("archive", &["verify"]), "archive-verify"),
        (of("archive", &["restore"]), "archive-restore"),
        (has("replay") || (of("dead", &["retry", "discard"]) && act_on_many), "operation"),
        (of("operations", &["list"]), "operations-list"),
        (of("operations", &["show", "pause", "resume", "cancel"]), "operation"),
        (of("dead", &["groups"]), "dead-groups"),
        (of("dead", &["note"]), "dead-note"),
        (of("dead", &["list", "retry", "discard"]), "dead-letters"),
        (of("dead", &["show"]), "dead-show"),
        (of("keys", &["list"]), "keys-list"),
        (of("keys", &["park", "unpark", "skip"]), "keys-act"),
        (of("messages", &["list"]), "messages-list"),
        (of("messages", &["show"]), "messages-show"),
        (of("routes", &["list"]), "routes-list"),
        (of("routes", &["set"]), "routes-set"),
        (of("routes", &["forget"]), "routes-forget"),
        (of("inbox", &["prune"]), "inbox-prune"),
        (has("prune"), "prune"),
        (of("migrate", &["--plan"]), "migrate-plan"),
        (of("migrate", &["--print-sql"]), "migrate-sql"),
        (has("migrate"), "migrate"),
        (has("stores"), "stores"),
        (has("status"), "status"),
        (has("sizes"), "sizes"),
        (has("doctor"), "doctor"),
        (has("explain"), "explain"),
        (has("health"), "health"),
        (has("token"), "token"),
        (has("check"), "check"),
        (has("send"), "send"),
        (has("init"), "init"),
        (has("why"), "why"),
        (has("run"), "run"),
        (has("demo"), "demo"),
    ];
    known.iter().find_map(|(is, name)| is.then_some(*name))
}

/// The text of `docs/json/NAME.schema.json` says what this line has to be.
pub fn holds_to(name: &str, line: &str, about: &[&str]) {
    // The demo's ledger is for people; a check that fails has its answer all the same.
    if name == "demo"
        || (name == "error"
            && ["check", "status", "stores", "migrate", "doctor", "health", "verify", "restore", "reconcile", "--wait"]
                .iter()
                .any(|command| about.contains(command)))
    {
        return;
    }
    let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../docs/json/{name}.schema.json"));
    let schema: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    let value: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{about:?}: {error}: {line}"));
    let validator = jsonschema::validator_for(&schema).unwrap();
    let wrong: Vec<String> =
        validator.iter_errors(&value).map(|error| format!("{}: {error}", error.instance_path())).collect();
    assert!(wrong.is_empty(), "{about:?} is not as {} says: {wrong:?}", file.display());
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

pub fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", text(&output.stdout)))
}

#[test]
fn the_demo_ends_with_a_balanced_ledger() {
    let output = postroom(&["demo", "--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let ledger = json(&output);
    let number = |name: &str| ledger[name].as_i64().unwrap_or_else(|| panic!("{name} in {ledger}"));
    assert!(number("committed") > 1000 && number("rolled_back") > 50 && number("duplicates_suppressed") > 20);
    assert_eq!((number("acked"), number("effects")), (number("committed"), number("committed")));
    assert_eq!((number("lost"), number("ghosts")), (0, 0));
}

#[tokio::test]
async fn migrate_and_status_speak_json_and_can_be_repeated() {
    let database = Database::create().await;
    let before = postroom(&["status", "--store", database.url()]);
    assert_eq!(before.status.code(), Some(1));
    assert!(text(&before.stderr).contains("postroom migrate"), "{}", text(&before.stderr));
    let first = json(&postroom(&["migrate", "--json", "--store", database.url()]));
    assert_eq!(first["applied"][0], "0001 foundation");
    let second = json(&postroom(&["migrate", "--json", "--store", database.url()]));
    assert_eq!(second["applied"].as_array().unwrap().len(), 0);
    let status = json(&postroom(&["status", "--json", "--store", database.url()]));
    assert_eq!((status["store"].as_str(), status["outbox_rows"].as_i64()), (Some("postgres"), Some(0)));
    let people = postroom(&["status", "--store", database.url()]);
    assert!(text(&people.stdout).contains("no route has run yet"));
}

#[test]
fn sqlite_is_chosen_by_the_scheme() {
    let file = surroundings::scratch("sqlite").join("orders.db");
    let url = format!("sqlite:{}", file.display());
    assert_eq!(postroom(&["status", "--store", &url]).status.code(), Some(69));
    assert_eq!(postroom(&["migrate", "--store", &url]).status.code(), Some(0));
    assert_eq!(json(&postroom(&["status", "--json", "--store", &url]))["store"], "sqlite");
}

#[test]
fn exit_codes_tell_what_kind_of_failure_it_was() {
    let nobody = format!("postgres://app:s3cret@127.0.0.1:{}/shop", ports::free().unwrap());
    let unreachable = postroom(&["status", "--store", &nobody]);
    assert_eq!(unreachable.status.code(), Some(69));
    let said = text(&unreachable.stderr);
    assert!(!said.contains("s3cret"), "a secret was printed: {said}");
    assert_eq!(postroom(&["no-such-command"]).status.code(), Some(2));
    assert_eq!(postroom(&["status", "--store", "oracle://x"]).status.code(), Some(2));
    assert_eq!(postroom(&["run", "--config", "nowhere.toml"]).status.code(), Some(78));
    assert_eq!(postroom(&["--help"]).status.code(), Some(0));
}

#[test]
fn a_wrong_configuration_is_refused_with_a_suggestion_and_without_its_secrets() {
    let file = surroundings::scratch("config").join("postroom.toml");
    let run = |text: &str| {
        std::fs::write(&file, text).unwrap();
        let output = postroom(&["run", "--config", file.to_str().unwrap()]);
        (output.status.code(), self::text(&output.stderr))
    };
    let (code, said) = run("[store]\nurl = \"postgres://a:s3cret@h/d\"\n[relay]\npol_idle = \"1s\"\n");
    assert_eq!(code, Some(78));
    assert!(said.contains("relay.pol_idle is not a known key; did you mean \"poll_idle\"?"), "{said}");
    let (code, said) = run("[store]\nurl = \"postgres://a:s3cret@h/d\" oops\n");
    assert_eq!(code, Some(78));
    assert!(!said.contains("s3cret"), "{said}");
    let (code, said) =
        run("[store]\nurl = \"oracle://a:s3cret@h/d\"\n[[routes]]\nname = \"a\"\n[routes.sink]\nkind = \"stdout\"\n");
    assert_eq!(code, Some(78), "{said}");
    assert!(!said.contains("s3cret"), "{said}");
}

#[test]
fn the_schema_can_be_printed_without_a_store() {
    let output = postroom(&["migrate", "--print-sql", "--lanes", "4"]);
    let script = text(&output.stdout);
    assert!(script.contains("create table postroom.outbox") && script.contains("% 4)"));
    assert!(!script.contains("{{"));
}

#[tokio::test]
async fn dead_letters_are_listed_retried_and_discarded_with_an_audit_row() {
    let database = Database::create().await;
    let client = database.connect().await;
    let postgres = database.url().to_owned();
    let file = surroundings::scratch("dead").join("orders.db");
    let sqlite = format!("sqlite:{}", file.display());
    for store in [&postgres, &sqlite] {
        assert_eq!(postroom(&["migrate", "--store", store]).status.code(), Some(0));
    }
    client
        .batch_execute(
            "insert into postroom.dead_letters (route, seq, lane, attempts, cause, error, id, topic, type, payload, key,
                                                content_type, occurred_at)
             select 'orders', n, 0, 8, 'exhausted', case when n > 2 then 'no route' else 'too large' end,
                    ('00000000-0000-7000-8000-00000000000' || n)::uuid, 'orders', 'order.placed', 'secret', 'k', 'text/plain', now()
               from generate_series(1, 4) n",
        )
        .await
        .unwrap();
    four_dead_letters(&file);
    for store in [&postgres, &sqlite] {
        let run = |arguments: &[&str]| postroom(&[&["dead"], arguments, &["--json", "--store", store]].concat());
        let listed = |arguments: &[&str]| json(&run(arguments))["dead_letters"].as_array().unwrap().len();
        assert_eq!((listed(&["list"]), listed(&["list", "--error", "no route"])), (4, 2));
        assert_eq!(listed(&["list", "--older-than", "1h"]), 0);
        let refused = run(&["discard", "--reason", "x"]);
        assert_eq!(refused.status.code(), Some(2), "without a condition it wants --all");
        assert_eq!(run(&["retry", "--error", "no route"]).status.code(), Some(2), "without a reason it is refused");
        assert_eq!((listed(&["retry", "--all", "--dry-run"]), listed(&["list"])), (4, 4), "a preview changes nothing");
        assert_eq!(listed(&["retry", "--error", "no route", "--reason", "the queue is bound now"]), 2);
        assert_eq!((listed(&["discard", "--all", "--reason", "test data"]), listed(&["list"])), (2, 0));
        let unknown = run(&["show", "00000000-0000-7000-8000-000000000001"]);
        assert_eq!(unknown.status.code(), Some(1));
    }
    let rows = client
        .query("select state, attempts, seq from postroom.parked where due_at <= clock_timestamp() order by seq", &[])
        .await
        .unwrap();
    let parked: Vec<(String, i32, i64)> = rows.iter().map(|row| (row.get(0), row.get(1), row.get(2))).collect();
    assert_eq!(
        parked,
        [("retry".to_owned(), 0, 3), ("queued".to_owned(), 0, 4)],
        "in order behind the first of the key"
    );
    let rows = client
        .query("select action, reason, cardinality(message_ids) from postroom.audit order by id", &[])
        .await
        .unwrap();
    let audit: Vec<(String, String, i32)> = rows.iter().map(|row| (row.get(0), row.get(1), row.get(2))).collect();
    let expected = [("dead.retry", "the queue is bound now", 2), ("dead.discard", "test data", 2)];
    assert_eq!(audit, expected.map(|(action, reason, count)| (action.to_owned(), reason.to_owned(), count)));
}

/// Four dead letters in a SQLite file, like those in PostgreSQL.
fn four_dead_letters(file: &std::path::Path) {
    let connection = postroom_sqlite::connect(file).unwrap();
    for n in 1..=4 {
        let error = if n > 2 { "no route" } else { "too large" };
        connection
            .execute(
                "insert into postroom_dead_letters (route, seq, lane, attempts, cause, error, id, topic, type, payload, key,
                                                    content_type, occurred_ms)
                 values ('orders', ?1, 0, 8, 'exhausted', ?2, ?3, 'orders', 'order.placed', 'secret', 'k', 'text/plain', 0)",
                (n, error, format!("00000000-0000-7000-8000-00000000000{n}")),
            )
            .unwrap();
    }
}

#[tokio::test]
async fn keys_are_listed_parked_and_let_go_and_why_tells_where_a_message_is() {
    let database = Database::create().await;
    let client = database.connect().await;
    let postgres = database.url().to_owned();
    let file = surroundings::scratch("keys").join("orders.db");
    let sqlite = format!("sqlite:{}", file.display());
    let id = "00000000-0000-7000-8000-00000000000a";
    for store in [&postgres, &sqlite] {
        assert_eq!(postroom(&["migrate", "--store", store]).status.code(), Some(0));
    }
    let write = format!("select postroom.enqueue('orders', 'order.placed', 'x'::text, key => 'k', id => '{id}')");
    client.batch_execute(&write).await.unwrap();
    postroom_sqlite::connect(&file)
        .unwrap()
        .execute(
            "insert into postroom_outbox (id, topic, type, payload, key) values (?1, 'orders', 'order.placed', 'x', 'k')",
            [id],
        )
        .unwrap();
    for store in [&postgres, &sqlite] {
        let run = |arguments: &[&str]| postroom(&[arguments, &["--json", "--store", store]].concat());
        let keys = || json(&run(&["keys", "list"]))["keys"].as_array().unwrap().clone();
        assert_eq!(run(&["why", id]).status.code(), Some(1), "no relay has ever run");
        let park = ["keys", "park", "--route", "orders", "--reason", "to look at it", "k"];
        assert_eq!(run(&park).status.code(), Some(1), "there is no such route");
        once(store);
        assert_eq!(json(&run(&["why", id]))["routes"][0]["state"], "acked");
        assert_eq!(run(&["why", "00000000-0000-7000-8000-00000000000b"]).status.code(), Some(1));
        assert!(keys().is_empty());
        assert_eq!(
            (json(&run(&park))["changed"].clone(), json(&run(&park))["changed"].clone()),
            (true.into(), false.into())
        );
        assert_eq!((keys().len(), keys()[0]["waits_for"].clone()), (1, "parked".into()));
        assert_eq!(run(&["keys", "park", "--route", "orders", "--reason", " ", "k"]).status.code(), Some(2));
        let unpark = ["keys", "unpark", "--route", "orders", "--reason", "looked at", "k"];
        assert_eq!(json(&run(&unpark))["changed"], true);
        assert!(keys().is_empty());
    }
    let audits: i64 = client.query_one("select count(*) from postroom.audit", &[]).await.unwrap().get(0);
    assert_eq!(audits, 2, "I20: a deed that changed nothing leaves none");
}

/// Runs a relay to its standard output until the first message is there.
fn once(store: &str) {
    let config = surroundings::scratch("once").join("postroom.toml");
    let text = format!("[store]\nurl = {store:?}\n[[routes]]\nname = \"orders\"\n[routes.sink]\nkind = \"stdout\"\n");
    std::fs::write(&config, text).unwrap();
    let mut relay = surroundings::postroom()
        .args(["run", "--config"])
        .arg(&config)
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    std::io::BufReader::new(relay.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("order.placed"), "{line}");
    let pid = relay.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    assert_eq!(relay.wait().unwrap().code(), Some(0));
}

#[test]
fn a_signal_shows_how_each_route_stands_and_ends_nothing() {
    let dir = surroundings::scratch("shown");
    let store = format!("sqlite:{}", dir.join("shop.db").display());
    assert_eq!(postroom(&["migrate", "--store", &store]).status.code(), Some(0));
    let config = dir.join("postroom.toml");
    let sink = dir.join("out.jsonl");
    let text = format!(
        "[store]\nurl = {store:?}\n[[routes]]\nname = \"orders\"\n[routes.sink]\nkind = \"file\"\npath = {sink:?}\n"
    );
    std::fs::write(&config, text).unwrap();
    let mut relay = surroundings::postroom()
        .args(["run", "--config"])
        .arg(&config)
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = std::io::BufReader::new(relay.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.by_ref().any(|line| line.contains("running 1 route")));
    let pid = relay.id().to_string();
    let signal = |name: &str| assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
    // Until the first renewal has shown itself.
    loop {
        signal("-USR1");
        let shown = lines.by_ref().find(|line| line.starts_with('{')).unwrap();
        let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
        let route = &shown["routes"][0];
        assert_eq!((route["route"].as_str(), route["acked"].as_u64()), (Some("orders"), Some(0)));
        if route["lanes"] == 1 {
            break;
        }
    }
    signal("-TERM");
    assert_eq!(relay.wait().unwrap().code(), Some(0));
}

#[test]
fn wrong_arguments_have_a_json_object_too() {
    let wrong: [&[&str]; 3] =
        [&["--json", "bogus"], &["--json", "why", "no-id"], &["--json", "dead", "list", "--limit", "0"]];
    for arguments in wrong {
        let output = postroom(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        let told: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(told["exit_code"], 2, "{arguments:?}");
    }
}
