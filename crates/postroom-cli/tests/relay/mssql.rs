//! The program with a SQL Server store. None can be had here: it is an emulation.

use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use postroom_testkit::postgres::Database;
use postroom_testkit::{mssql, surroundings};

use crate::commands::json as told;

/// The one of the tests, which has the feature.
fn program() -> Command {
    let mut command = Command::new(PathBuf::from(env!("CARGO_BIN_EXE_postroom")));
    surroundings::without_tests(&mut command);
    command
}

/// Nothing here takes as long as this unless it is stuck.
const STUCK: Duration = Duration::from_secs(60);

struct Store {
    url: String,
    /// Its tables are those of the emulation.
    database: Database,
}

impl Store {
    async fn prepared() -> Self {
        let database = Database::create().await;
        let port = mssql::start(database.url().to_owned()).await;
        let url = format!("sqlserver://sa:secret@127.0.0.1:{port}/shop?encrypt=false");
        let store = Self { url, database };
        store.run(&["migrate", "--lanes", "4"]).await;
        store
    }

    async fn asked(&self, arguments: &[&str]) -> Output {
        let mut command = program();
        command.env("POSTROOM_STORE_URL", &self.url).args(arguments);
        tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap()
    }

    /// What a command that succeeds says.
    async fn run(&self, arguments: &[&str]) -> Output {
        let output = self.asked(arguments).await;
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{arguments:?}: {errors}");
        assert!(!errors.contains("secret"), "a password is shown: {errors}");
        output
    }

    async fn json(&self, arguments: &[&str]) -> serde_json::Value {
        let mut arguments = arguments.to_vec();
        arguments.push("--json");
        told(&self.run(&arguments).await)
    }

    fn relay(&self, name: &str) -> Relay {
        let folder = surroundings::scratch(name);
        let (file, out) = (folder.join("postroom.toml"), folder.join("out.ndjson"));
        let text = format!(
            "[store]\nurl = {:?}\n[relay]\nlease = \"2s\"\npoll_idle = \"50ms\"\n[[routes]]\nname = \"orders\"\n[routes.sink]\nkind = \"file\"\npath = {out:?}\n",
            self.url
        );
        std::fs::write(&file, text).unwrap();
        let mut command = program();
        command.args(["run", "--config"]).arg(&file).stdout(Stdio::null()).stderr(Stdio::null());
        Relay { out, process: command.spawn().unwrap() }
    }
}

async fn until(what: &str, holds: impl AsyncFn() -> bool) {
    let began = Instant::now();
    while !holds().await {
        assert!(began.elapsed() < STUCK, "waited in vain until {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A relay that writes to a file; killed when dropped.
struct Relay {
    process: Child,
    out: PathBuf,
}

impl Relay {
    async fn lines(&self, count: usize) -> Vec<serde_json::Value> {
        let text = || std::fs::read_to_string(&self.out).unwrap_or_default();
        until("the relay has written its lines", async || text().lines().count() >= count).await;
        text().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_program_works_on_an_emulation_of_sql_server() {
    let store = Store::prepared().await;
    let again = store.json(&["migrate"]).await;
    assert_eq!(again["applied"].as_array().map(Vec::len), Some(0), "{again}");
    let mut ids = Vec::new();
    for number in 0..20 {
        let payload = format!("{{\"n\":{number}}}");
        let sent = store
            .json(&["send", "--topic", "orders", "--type", "order.placed", "--key", "a", "--payload", &payload])
            .await;
        ids.push(sent["id"].as_str().unwrap().to_owned());
    }
    let relay = store.relay("mssql-relay");
    let lines = relay.lines(20).await;
    let sent: Vec<&str> = lines.iter().map(|line| line["id"].as_str().unwrap()).collect();
    assert_eq!(sent, ids, "in their order, each once");
    // The position is written a moment after the line.
    let acked = async || store.json(&["why", &ids[19]]).await["routes"][0]["state"].as_str() == Some("acked");
    until("the last one is acked", acked).await;
    let status = store.json(&["status"]).await;
    assert_eq!((status["store"].as_str(), status["routes"][0]["backlog"].as_i64()), (Some("mssql"), Some(0)));
    let listed = store.json(&["messages", "list", "--limit", "5"]).await;
    assert_eq!(listed["messages"].as_array().map(Vec::len), Some(5), "{listed}");
    let found = store.json(&["doctor"]).await.to_string();
    assert!(found.contains("delayed-durability") && found.contains("row-versions"), "{found}");
    store.run(&["keys", "park", "--route", "orders", "a", "--reason", "a test"]).await;
    store.run(&["keys", "unpark", "--route", "orders", "a", "--reason", "a test"]).await;
    // What was sent is sent again, with its id.
    store.run(&["replay", "--route", "orders", "--id", &ids[3], "--reason", "a test"]).await;
    let lines = relay.lines(21).await;
    assert_eq!(lines[20]["id"].as_str(), Some(ids[3].as_str()));
    drop(relay);
    // The emulation's own database has them.
    let rows = store.database.connect().await.query_one("select count(*) from postroom_outbox", &[]).await.unwrap();
    assert_eq!(rows.get::<_, i64>(0), 20);
    let script = store.run(&["migrate", "--print-sql"]).await;
    assert!(String::from_utf8_lossy(&script.stdout).contains("create procedure postroom_enqueue"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_fourth_articles_table_ends_with_a_balanced_ledger_on_an_emulation_of_sql_server() {
    let database = Database::create().await;
    let port = mssql::start(database.url().to_owned()).await;
    let url = format!("sqlserver://sa:secret@127.0.0.1:{port}/shop?encrypt=false");
    let mut articles = Command::new(surroundings::articles_binary());
    surroundings::without_tests(&mut articles);
    articles.args(["--json", "--only", "status-codes, SQL Server", "--messages", "300", "--mssql", &url]).args([
        "--store",
        &surroundings::postgres_url(),
        "--rabbitmq",
        &surroundings::rabbitmq_url(),
    ]);
    let output = tokio::task::spawn_blocking(move || articles.output().unwrap()).await.unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    let shown = told(&output);
    let ledger = &shown["systems"][0];
    assert!(ledger["committed"].as_i64().unwrap() >= 300 && ledger["rolled_back"].as_i64().unwrap() > 10, "{ledger}");
    for name in ["lost", "ghosts", "repeated_effects", "out_of_order", "unmarked"] {
        assert_eq!(ledger[name], 0, "{name} in {ledger}");
    }
}
