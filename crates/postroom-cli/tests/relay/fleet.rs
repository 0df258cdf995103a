//! Many databases under one process: few connections, one that is down, some that come later, a relay that dies, and the commands about them.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::{Duration, Instant};

use postroom_testkit::chance::Chance;
use postroom_testkit::postgres::{Database, connect};
use postroom_testkit::surroundings;
use serde_json::Value;
use tokio_postgres::Client;

use crate::commands::{json, postroom, text};
use crate::operators::Running;

/// Nothing here takes as long as this unless it is stuck.
const STUCK: Duration = Duration::from_secs(240);

/// Databases of tenants, the database that lists them, and one process for all.
struct Tenants {
    catalog: Database,
    /// Names of the databases.
    names: Vec<String>,
    base: String,
    /// How connections of the process are told from others.
    application: String,
    dir: PathBuf,
}

impl Tenants {
    async fn new(count: usize) -> Self {
        let (catalog, template) = (Database::create().await, Database::create().await);
        assert_eq!(postroom(&["migrate", "--store", template.url()]).status.code(), Some(0));
        let admin = catalog.connect().await;
        admin.batch_execute("create table tenants (name text primary key)").await.unwrap();
        let (base, of) = template.url().rsplit_once('/').unwrap();
        let unique = surroundings::unique();
        let mut names = Vec::new();
        for n in 0..count {
            let name = format!("t_{unique}_{n}");
            let sql = format!("create database {name} template {of} strategy file_copy");
            admin.batch_execute(&sql).await.unwrap();
            names.push(name);
        }
        let dir = surroundings::scratch("fleet");
        let application = format!("fleet-{unique}");
        Self { names, base: base.to_owned(), application, dir, catalog }
    }

    fn url(&self, name: &str) -> String {
        format!("{}/{name}", self.base)
    }

    async fn list(&self, names: &[String]) {
        let client = self.catalog.connect().await;
        client.execute("insert into tenants select unnest($1::text[])", &[&names]).await.unwrap();
    }

    fn out(&self) -> PathBuf {
        self.dir.join("out.jsonl")
    }

    fn config(&self, connections: usize) -> String {
        let config = self.dir.join("postroom.toml");
        let text = format!(
            "[relay]\nlease = \"2s\"\npoll_idle = \"50ms\"\nconnections_max = {connections}\nlook_every = \"1s\"\nin_flight_max = 200\n\
             [[stores]]\nname = \"tenants\"\nurl = \"{}/${{name}}?application_name={}\"\n[stores.discover]\nstore = \"{}?application_name={}\"\n\
             query = \"select name from tenants\"\nevery = \"1s\"\n\
             [[routes]]\nname = \"orders\"\n[routes.sink]\nkind = \"file\"\npath = {:?}\n",
            self.base,
            self.application,
            self.catalog.url(),
            self.application,
            self.out()
        );
        std::fs::write(&config, text).unwrap();
        config.to_str().unwrap().to_owned()
    }
}

/// Samples how many connections the process has, until dropped.
struct Watch {
    most: Arc<AtomicI64>,
    stop: Arc<AtomicBool>,
}

impl Watch {
    async fn of(tenants: &Tenants) -> Self {
        let client = tenants.catalog.connect().await;
        let (most, stop) = (Arc::new(AtomicI64::new(0)), Arc::new(AtomicBool::new(false)));
        let (seen, stopped, application) = (most.clone(), stop.clone(), tenants.application.clone());
        tokio::spawn(async move {
            let sql = "select count(*) from pg_stat_activity where application_name = $1";
            while !stopped.load(Ordering::Relaxed) {
                let count: i64 = client.query_one(sql, &[&application]).await.unwrap().get(0);
                seen.fetch_max(count, Ordering::Relaxed);
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        Self { most, stop }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// What was committed, by database and key, in order.
#[derive(Default)]
struct Ledger {
    committed: BTreeMap<(String, String), Vec<String>>,
    count: usize,
    rolled_back: usize,
}

impl Ledger {
    async fn write(&mut self, name: &str, client: &mut Client, chance: &mut Chance) {
        let tx = client.transaction().await.unwrap();
        let key = format!("key-{}", chance.below(3));
        let mut ids = Vec::new();
        for _ in 0..1 + chance.below(3) {
            let sql = "select postroom.enqueue('orders', 'order.placed', '\\x01', key => $1)::text";
            ids.push(tx.query_one(sql, &[&key]).await.unwrap().get::<_, String>(0));
        }
        if chance.percent(15) {
            tx.rollback().await.unwrap();
            self.rolled_back += ids.len();
        } else {
            tx.commit().await.unwrap();
            self.count += ids.len();
            self.committed.entry((name.to_owned(), key)).or_default().extend(ids);
        }
    }

    /// Waits until all of it is in the file.
    async fn is_sent(&self, out: &Path, but: &str) {
        let wanted: HashSet<&String> =
            self.committed.iter().filter(|((name, _), _)| name != but).flat_map(|(_, ids)| ids).collect();
        let began = Instant::now();
        loop {
            let sent: HashSet<String> = sent(out).into_iter().collect();
            let missing = wanted.iter().filter(|id| !sent.contains(**id)).count();
            if missing == 0 {
                return;
            }
            assert!(began.elapsed() < STUCK, "{missing} of {} messages do not come", wanted.len());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Nothing else was sent, keys are in order, and there are at most so many duplicates.
    fn judge(&self, out: &Path, duplicates_max: usize) {
        let sent = sent(out);
        let mut first: HashMap<&String, usize> = HashMap::new();
        for (at, id) in sent.iter().enumerate() {
            first.entry(id).or_insert(at);
        }
        assert_eq!(first.len(), self.count, "all that was committed, and nothing else");
        assert!(sent.len() - first.len() <= duplicates_max, "{} duplicates", sent.len() - first.len());
        for ((name, key), ids) in &self.committed {
            let places: Vec<usize> = ids.iter().map(|id| first[id]).collect();
            assert!(places.is_sorted(), "{name} {key}: {places:?}");
        }
    }
}

/// Waits until the process has said this.
async fn says(config: &str, what: &str) {
    let began = Instant::now();
    loop {
        let log = std::fs::read_to_string(format!("{config}.log")).unwrap();
        if log.contains(what) {
            return;
        }
        assert!(began.elapsed() < STUCK, "it never says {what:?}: {log}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn sent(out: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(out).unwrap_or_default();
    // The last line may be half of one: its relay was killed.
    let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.map(|line| line["id"].as_str().unwrap().to_owned()).collect()
}

/// With `POSTROOM_TEST_STORES` other numbers of databases can be tried.
#[tokio::test]
async fn many_databases_share_few_connections_and_one_that_is_down_stops_nobody() {
    let count = std::env::var("POSTROOM_TEST_STORES").map_or(40, |count| count.parse().unwrap());
    let connections = std::env::var("POSTROOM_TEST_CONNECTIONS").map_or(12, |count| count.parse().unwrap());
    let tenants = Tenants::new(count).await;
    let (later, first) = tenants.names.split_at(count / 10);
    tenants.list(first).await;
    let config = tenants.config(connections);
    let watch = Watch::of(&tenants).await;
    let (mut ledger, mut chance) = (Ledger::default(), Chance::new(11));
    let admin = tenants.catalog.connect().await;
    let down = &first[0];

    let began = Instant::now();
    let mut running = Running::of(&config);
    for round in 0..6 {
        for name in &tenants.names {
            let new = later.contains(name);
            let left_out = round > 0 && chance.percent(50);
            if left_out || (new && round < 4) || (name == down && round == 2) {
                continue;
            }
            let mut client = connect(&tenants.url(name)).await;
            ledger.write(name, &mut client, &mut chance).await;
        }
        match round {
            1 => {
                // Messages wait in it, and it cannot be reached.
                let sql = format!(
                    "alter database {down} allow_connections false;
                     select pg_terminate_backend(pid) from pg_stat_activity where datname = '{down}'"
                );
                admin.batch_execute(&sql).await.unwrap();
                ledger.is_sent(&tenants.out(), down).await;
                let listed = json(&postroom(&["stores", "--json", "--config", &config]));
                let stores = listed["stores"].as_array().unwrap();
                let of = |name: &str| stores.iter().find(|store| store["store"] == name).unwrap();
                assert_eq!(stores.len(), first.len());
                assert!(
                    of(down)["problem"].as_str().unwrap().contains("not currently accepting connections"),
                    "{listed}"
                );
                assert_eq!(of(&first[1])["up"], true);
                let failing = postroom(&["stores", "--fail-on-age", "1h", "--config", &config]);
                assert_eq!(failing.status.code(), Some(1));
                assert!(text(&failing.stdout).contains(&format!("{down} is down")));
            }
            2 => {
                says(&config, "the store is left alone and tried again later").await;
                admin.batch_execute(&format!("alter database {down} allow_connections true")).await.unwrap();
                says(&config, "the store is back").await;
            }
            3 => {
                running.0.kill().unwrap();
                running.0.wait().unwrap();
                running = Running::of(&config);
                tenants.list(later).await;
            }
            _ => {}
        }
    }
    ledger.is_sent(&tenants.out(), "").await;
    println!("{} messages in {} databases after {:.1} s", ledger.count, count, began.elapsed().as_secs_f64());
    drop(running);
    // The window of each place that had something in flight when the process was killed.
    ledger.judge(&tenants.out(), 200 * connections / 5);
    assert!(ledger.rolled_back > 0);
    let most = watch.most.load(Ordering::Relaxed);
    println!("at most {most} connections");
    assert!(most > 1 && most <= connections as i64, "{most} connections");
    // Each is one of the configuration's own, by name.
    let status = json(&postroom(&["status", "--json", "--store", down, "--config", &config]));
    assert_eq!(status["routes"][0]["backlog"], 0);
    let unnamed = postroom(&["status", "--config", &config]);
    assert!(text(&unnamed.stderr).contains("name one with --store NAME"), "{}", text(&unnamed.stderr));
}

#[tokio::test]
async fn two_databases_keep_their_relays_and_send_at_once() {
    let tenants = Tenants::new(2).await;
    tenants.list(&tenants.names).await;
    let config = tenants.config(40);
    let checked = json(&postroom(&["check", "--json", "--config", &config]));
    assert_eq!(checked["ok"], true, "{checked}");
    let migrated = json(&postroom(&["migrate", "--json", "--config", &config]));
    assert_eq!(migrated["stores"].as_array().unwrap().len(), 2, "{migrated}");
    let running = Running::of(&config);
    let (mut ledger, mut chance) = (Ledger::default(), Chance::new(3));
    for _ in 0..50 {
        for name in &tenants.names {
            let mut client = connect(&tenants.url(name)).await;
            ledger.write(name, &mut client, &mut chance).await;
        }
    }
    ledger.is_sent(&tenants.out(), "").await;
    let log = std::fs::read_to_string(format!("{config}.log")).unwrap();
    drop(running);
    ledger.judge(&tenants.out(), 0);
    assert!(!log.contains("stopping"), "with places for all, none is stopped: {log}");
}

#[tokio::test]
async fn what_is_wrong_with_many_stores_is_told() {
    let tenants = Tenants::new(1).await;
    tenants.list(&[tenants.names[0].clone(), "t_is_not_there".to_owned()]).await;
    let config = tenants.config(12);
    let checked = postroom(&["check", "--config", &config]);
    assert_eq!(checked.status.code(), Some(1));
    let said = text(&checked.stdout);
    assert!(said.contains("FAIL store t_is_not_there") && said.contains("1 of 2 have everything"), "{said}");
    let migrated = postroom(&["migrate", "--config", &config]);
    assert_eq!(migrated.status.code(), Some(1), "{}", text(&migrated.stdout));
    assert!(text(&migrated.stdout).contains("t_is_not_there: failed"), "{}", text(&migrated.stdout));
    // Too few connections for one store are an error at the start.
    let text_of = std::fs::read_to_string(&config).unwrap();
    let second =
        "\n[[intake]]\nname = \"a\"\npreset = \"processed-on\"\n[[intake]]\nname = \"b\"\npreset = \"processed-on\"\n";
    std::fs::write(&config, text_of.replace("connections_max = 12", "connections_max = 9") + second).unwrap();
    let refused = postroom(&["run", "--config", &config]);
    assert_eq!(refused.status.code(), Some(78));
    assert!(text(&refused.stderr).contains("set it to"), "{}", text(&refused.stderr));
}
