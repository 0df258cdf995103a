//! What operators see and do with the binary, on both stores.

use std::process::{Command, Stdio};

use postroom_testkit::postgres::Database;
use postroom_testkit::services::ports;
use postroom_testkit::surroundings;
use serde_json::Value;

use crate::commands::{json, postroom, text};

/// A migrated store of each kind.
pub async fn stores() -> (Database, [String; 2]) {
    let database = Database::create().await;
    let file = surroundings::scratch("operators").join("shop.db");
    let stores = [database.url().to_owned(), format!("sqlite:{}", file.display())];
    for store in &stores {
        assert_eq!(postroom(&["migrate", "--store", store]).status.code(), Some(0));
    }
    (database, stores)
}

/// A relay of route `orders` with this sink, until it is dropped.
pub struct Running(pub std::process::Child);

impl Running {
    pub fn relay(store: &str, sink: &str) -> Self {
        let dir = surroundings::scratch("running");
        let config = dir.join("postroom.toml");
        let text = format!(
            "[store]\nurl = {store:?}\n[relay]\nname = \"relay-a\"\n[[routes]]\nname = \"orders\"\ntopics = [\"orders\"]\n[routes.sink]\n{sink}"
        );
        std::fs::write(&config, text).unwrap();
        Self::of(config.to_str().unwrap())
    }

    /// With this configuration.
    pub fn of(config: &str) -> Self {
        let log = std::fs::File::create(format!("{config}.log")).unwrap();
        let mut command = surroundings::postroom();
        let command = command.args(["run", "--config", config]).stdout(Stdio::null()).stderr(log);
        Self(command.spawn().unwrap())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // One that has ended may have left its number to another process.
        if let Ok(None) = self.0.try_wait() {
            let _ = Command::new("kill").args(["-TERM", &self.0.id().to_string()]).status();
        }
        let _ = self.0.wait();
    }
}

fn status(store: &str) -> Value {
    json(&postroom(&["status", "--json", "--store", store]))
}

/// Asks until it holds; a minute at most.
pub fn until(store: &str, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
    let began = std::time::Instant::now();
    loop {
        let status = status(store);
        if holds(&status) {
            return status;
        }
        assert!(began.elapsed() < std::time::Duration::from_secs(60), "waited in vain until {what}: {status}");
    }
}

fn kinds(status: &Value) -> Vec<&str> {
    status["attention"].as_array().unwrap().iter().map(|found| found["kind"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn status_says_what_needs_attention_and_what_to_do() {
    let (_database, stores) = stores().await;
    for store in &stores {
        let nobody =
            format!("kind = \"rabbitmq\"\nurl = \"amqp://app:s3cret@127.0.0.1:{}/%2f\"\n", ports::free().unwrap());
        let send = |topic: &str| {
            json(&postroom(&["send", "--topic", topic, "--key", "k", "--json", "--store", store]))["id"]
                .as_str()
                .unwrap()
                .to_owned()
        };
        let (id, _) = (send("orders"), send("ordres"));
        {
            let _relay = Running::relay(store, &nobody);
            until(store, "the sink is known to be down", |status| kinds(status).contains(&"sink"));
            let people = text(&postroom(&["status", "--store", store]).stdout);
            for said in [
                "relay-a",
                "has been down for",
                "topic ordres: no route takes it",
                "2 things need attention",
                "BACKLOG",
            ] {
                assert!(people.contains(said), "{said} in {people}");
            }
            assert!(!people.contains("s3cret"), "{people}");
            let why = text(&postroom(&["why", &id, "--store", store]).stdout);
            assert!(why.contains("waiting") && why.contains("sink"), "{why}");
            for (conditions, code) in
                [("sink", 1), ("any", 1), ("dead,retry", 0), ("age=1h", 0), ("backlog=0", 1), ("bogus", 2)]
            {
                let output = postroom(&["status", "--store", store, "--fail-on", conditions]);
                assert_eq!(output.status.code(), Some(code), "{conditions}");
            }
        }
        let status = until(store, "the relay is gone", |status| kinds(status).contains(&"relay"));
        assert!(status["verdict"].as_str().unwrap().contains("need attention"), "{status}");
        let out = surroundings::scratch("out").join("out.jsonl");
        let _relay = Running::relay(store, &format!("kind = \"file\"\npath = {out:?}\n"));
        until(store, "all is sent", |status| status["routes"][0]["backlog"] == 0 && kinds(status) == ["unrouted"]);
        assert!(text(&postroom(&["why", &id, "--store", store]).stdout).contains("acked"));
    }
}

#[tokio::test]
async fn messages_are_sent_listed_and_shown() {
    let (_database, stores) = stores().await;
    for store in &stores {
        let run = |arguments: &[&str]| postroom(&[arguments, &["--json", "--store", store]].concat());
        let wrong: [&[&str]; 3] = [
            &["send", "--topic", ""],
            &["send", "--topic", "orders", "--header", "novalue"],
            &["send", "--topic", "orders", "--payload", "@/nowhere"],
        ];
        for wrong in wrong {
            assert_eq!(run(wrong).status.code(), Some(2), "{wrong:?}");
        }
        let sent =
            run(&["send", "--topic", "orders", "--key", "k\u{1b}[31m", "--payload", "{\"a\":1}", "--header", "h=v"]);
        let id = json(&sent)["id"].as_str().unwrap().to_owned();
        let listed = json(&run(&["messages", "list"]))["messages"].take();
        assert_eq!((listed[0]["id"].as_str(), listed[0]["state"].as_str()), (Some(id.as_str()), Some("unrouted")));
        assert_eq!(run(&["messages", "list", "--route", "ordres"]).status.code(), Some(1), "there is no such route");
        let out = surroundings::scratch("out").join("out.jsonl");
        {
            let _relay = Running::relay(store, &format!("kind = \"file\"\npath = {out:?}\n"));
            until(store, "it is sent", |status| {
                status["routes"][0]["lanes_held"].as_i64() > Some(0) && status["routes"][0]["backlog"] == 0
            });
        }
        let listed = json(&run(&["messages", "list", "--topic", "orders", "--state", "done"]));
        assert_eq!((listed["messages"][0]["id"].as_str(), &listed["next"]), (Some(id.as_str()), &Value::Null));
        let people = text(&postroom(&["messages", "list", "--store", store]).stdout);
        assert!(people.contains("\\u{1b}[31m") && !people.contains('\u{1b}'), "{people}");
        let shown = json(&run(&["messages", "show", &id, "--payload"]));
        assert_eq!((shown["payload"].as_str(), shown["headers"]["h"].as_str()), (Some("{\"a\":1}"), Some("v")));
        assert!(json(&run(&["messages", "show", &id]))["payload"].is_null(), "it may be personal");
    }
}

#[tokio::test]
async fn a_route_is_forgotten_when_nothing_of_it_is_left_or_it_is_said_so() {
    let (database, stores) = stores().await;
    for store in &stores {
        let run = |arguments: &[&str]| postroom(&[arguments, &["--json", "--store", store]].concat());
        let forget = |more: &[&str]| run(&[&["routes", "forget", "orders", "--reason", "it is gone"], more].concat());
        assert_eq!(forget(&[]).status.code(), Some(1), "there is no such route");
        let nobody = format!("kind = \"rabbitmq\"\nurl = \"amqp://127.0.0.1:{}/%2f\"\n", ports::free().unwrap());
        {
            let _relay = Running::relay(store, &nobody);
            until(store, "it runs", |status| status["routes"][0]["lanes_held"].as_i64() > Some(0));
            run(&["send", "--topic", "orders"]);
            let refused = forget(&["--discard"]);
            assert_eq!(refused.status.code(), Some(1));
            assert!(text(&refused.stderr).contains("may still be running"), "{}", text(&refused.stderr));
        }
        let refused = forget(&[]);
        assert_eq!(refused.status.code(), Some(1));
        assert!(text(&refused.stderr).contains("1 unsent message"), "{}", text(&refused.stderr));
        assert_eq!(json(&forget(&["--discard", "--actor", "ann"]))["forgotten"]["unread"], 1);
        assert!(status(store)["routes"].as_array().unwrap().is_empty());
    }
    let client = database.connect().await;
    let sql = "select actor, db_role from postroom.audit where action = 'route.forget'";
    let row = client.query_one(sql, &[]).await.unwrap();
    let (actor, role): (String, String) = (row.get(0), row.get(1));
    assert!(actor.starts_with("ann (system user "), "{actor}");
    assert_eq!(role, "postgres");
}

#[tokio::test]
async fn init_writes_what_check_and_run_can_work_with() {
    let database = Database::create().await;
    let dir = surroundings::scratch("init");
    let file = dir.join("postroom.toml");
    let file = file.to_str().unwrap();
    let init = |arguments: &[&str]| postroom(&[&["init", "--output", file], arguments].concat());
    assert_eq!(init(&["--sink", "kafkaesque"]).status.code(), Some(2));
    let written = init(&["--store", database.url(), "--sink", "stdout"]);
    assert_eq!(written.status.code(), Some(0), "{}", text(&written.stderr));
    assert_eq!(init(&[]).status.code(), Some(1), "it is not written over");
    let secret = init(&["--store", "postgres://app:s3cret@localhost/shop"]);
    assert_eq!(secret.status.code(), Some(2));
    assert!(!text(&secret.stderr).contains("s3cret") && text(&secret.stderr).contains("PGPASSFILE"));
    let printed = json(&postroom(&["init", "--output", "-", "--json"]));
    assert!(printed["text"].as_str().unwrap().contains("[[routes]]"), "{printed}");
    let check = || postroom(&["check", "--config", file, "--json"]);
    let before = check();
    assert_eq!(before.status.code(), Some(1));
    assert!(text(&before.stdout).contains("run `postroom migrate`"), "{}", text(&before.stdout));
    assert_eq!(postroom(&["migrate", "--config", file]).status.code(), Some(0));
    let after = json(&check());
    assert_eq!(after["ok"], true, "{after}");
}

#[tokio::test]
async fn check_says_which_grants_an_exchange_and_a_queue_are_missing_and_changes_nothing() {
    let database = Database::create().await;
    assert_eq!(postroom(&["migrate", "--store", database.url()]).status.code(), Some(0));
    let admin = database.connect().await;
    let role = format!("poor_{}", surroundings::unique());
    admin.batch_execute(&format!("create role {role} login")).await.unwrap();
    let poor = database.url().replace("postgres@", &format!("{role}@"));
    let broker = surroundings::rabbitmq_url();
    let file = surroundings::scratch("check").join("postroom.toml");
    let name = surroundings::unique();
    let text_of = |declare: bool| {
        format!(
            "[store]\nurl = {poor:?}\n[[routes]]\nname = \"orders\"\n[routes.sink]\nkind = \"rabbitmq\"\nurl = {broker:?}\n\
             exchange = \"{name}\"\ndeclare = {declare}\n[[inboxes]]\nconsumer = \"billing\"\n[inboxes.from]\nkind = \"rabbitmq\"\n\
             url = {broker:?}\nqueue = \"{name}\"\n"
        )
    };
    for declare in [false, true] {
        std::fs::write(&file, text_of(declare)).unwrap();
        let output = postroom(&["check", "--config", file.to_str().unwrap()]);
        assert_eq!(output.status.code(), Some(1));
        let said = text(&output.stdout);
        assert!(said.contains("grant select on") && said.contains(&role), "{said}");
        assert!(said.contains(&format!("queue \"{name}\"")) && said.contains("set bind"), "{said}");
        let exchange = if declare { "will be declared" } else { "set declare = true" };
        assert!(said.contains(exchange), "{said}");
    }
    // What it says is enough: a relay and a filler start with these grants.
    let output = postroom(&["check", "--config", file.to_str().unwrap(), "--json"]);
    let advice = json(&output)["checked"].as_array().unwrap().iter().find_map(|checked| {
        let advice = checked["advice"].as_str()?;
        advice.split_once("run as the owner of the schema: ").map(|(_, grants)| grants.to_owned())
    });
    let refused = postroom(&["run", "--config", file.to_str().unwrap()]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stderr).contains("grant select on"), "{}", text(&refused.stderr));
    admin.batch_execute(&advice.unwrap()).await.unwrap();
    let said = text(&postroom(&["check", "--config", file.to_str().unwrap()]).stdout);
    assert!(said.contains("has the rights that it needs"), "{said}");
    let _relay = Running::relay(&poor, "kind = \"stdout\"\n");
    until(database.url(), "it runs", |status| status["routes"][0]["lanes_held"].as_i64() > Some(0));
}

#[tokio::test]
async fn check_compares_an_exchange_and_a_queue_and_says_what_to_do() {
    let database = Database::create().await;
    assert_eq!(postroom(&["migrate", "--store", database.url()]).status.code(), Some(0));
    let broker = surroundings::rabbitmq_url();
    let dir = surroundings::scratch("check-broker");
    let name = surroundings::unique();
    postroom_testkit::rabbitmq::declare_otherwise(&broker, &name).await;
    let checked = |url: &str, exchange: &str, queue: &str| {
        let file = dir.join("postroom.toml");
        let text = format!(
            "[store]\nurl = {:?}\n[[routes]]\nname = \"orders\"\n[routes.sink]\nkind = \"rabbitmq\"\nurl = {url:?}\n\
             exchange = {exchange:?}\n[[inboxes]]\nconsumer = \"billing\"\n[inboxes.from]\nkind = \"rabbitmq\"\n\
             url = {url:?}\nqueue = {queue:?}\nbind = [{{ exchange = \"amq.topic\", routing_key = \"#\" }}]\n",
            database.url()
        );
        std::fs::write(&file, text).unwrap();
        postroom(&["check", "--config", file.to_str().unwrap()])
    };
    let said = text(&checked(&broker, &name, &name).stdout);
    assert_eq!(said.matches("it exists with another type or other arguments").count(), 2, "{said}");
    let nowhere = broker.replace("%2f", "nowhere");
    let said = text(&checked(&nowhere, "e", "q").stdout);
    assert!(said.contains("rabbitmqctl add_vhost"), "{said}");
    let said = text(&checked(&broker.replace("guest:guest", "guest:wrong"), "e", "q").stdout);
    assert!(said.contains("correct the user and the password") && !said.contains("wrong"), "{said}");
    let refused = checked(&broker, "e\r\n", "q");
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stdout).contains("control character"), "{}", text(&refused.stdout));
}

/// A stream hands out only what is published while somebody is subscribed: an inbox on one would miss messages without a word.
#[tokio::test]
async fn an_inbox_on_a_stream_is_refused() {
    let database = Database::create().await;
    assert_eq!(postroom(&["migrate", "--store", database.url()]).status.code(), Some(0));
    let (broker, name) = (surroundings::rabbitmq_url(), format!("s-{}", surroundings::unique()));
    postroom_testkit::rabbitmq::declare_stream(&broker, &name).await;
    let config = surroundings::scratch("stream").join("postroom.toml");
    let text_of = format!(
        "[store]\nurl = {:?}\n[[inboxes]]\nconsumer = \"billing\"\n[inboxes.from]\nkind = \"rabbitmq\"\nurl = {broker:?}\nqueue = {name:?}\n",
        database.url()
    );
    std::fs::write(&config, text_of).unwrap();
    let checked = postroom(&["check", "--config", config.to_str().unwrap()]);
    assert_eq!(checked.status.code(), Some(1));
    assert!(text(&checked.stdout).contains("it is a stream"), "{}", text(&checked.stdout));
    let log = std::fs::File::create(config.with_file_name("run.log")).unwrap();
    let mut run = surroundings::postroom();
    run.args(["run", "--config"]).arg(&config).stdout(Stdio::null()).stderr(log);
    let _running = Running(run.spawn().unwrap());
    let told =
        until(database.url(), "status tells", |status| status["attention"].to_string().contains("it is a stream"));
    assert_eq!(told["attention"][0]["kind"], "sink", "{told}");
}

/// What cannot be stored is told where people look, and that it can be again.
#[tokio::test]
async fn an_inbox_that_cannot_be_written_is_not_shown_as_up() {
    let database = Database::create().await;
    assert_eq!(postroom(&["migrate", "--store", database.url()]).status.code(), Some(0));
    let client = database.connect().await;
    let (broker, name) = (surroundings::rabbitmq_url(), surroundings::unique());
    let role = format!("filler_{name}");
    client.batch_execute(&format!("create role {role} login")).await.unwrap();
    let dir = surroundings::scratch("unwritable");
    let config = dir.join("postroom.toml");
    let text_of = format!(
        "[store]\nurl = {:?}\n[[routes]]\nname = \"orders\"\n[routes.sink]\nkind = \"rabbitmq\"\nurl = {broker:?}\nexchange = {name:?}\n\
         [[inboxes]]\nconsumer = \"billing\"\n[inboxes.from]\nkind = \"rabbitmq\"\nurl = {broker:?}\nqueue = {name:?}\n\
         bind = [{{ exchange = {name:?}, routing_key = \"#\" }}]\n",
        database.url().replace("postgres@", &format!("{role}@"))
    );
    std::fs::write(&config, text_of).unwrap();
    let advice = json(&postroom(&["check", "--config", config.to_str().unwrap(), "--json"]));
    let advice = advice["checked"].as_array().unwrap().iter().find_map(|checked| {
        checked["advice"].as_str()?.split_once("run as the owner of the schema: ").map(|(_, grants)| grants.to_owned())
    });
    client.batch_execute(&advice.unwrap()).await.unwrap();
    let log = std::fs::File::create(dir.join("run.log")).unwrap();
    let mut run = surroundings::postroom();
    run.args(["run", "--config"]).arg(&config).stdout(Stdio::null()).stderr(log);
    let _running = Running(run.spawn().unwrap());
    let link = |status: &Value| status["inboxes"][0]["filler"]["link"].clone();
    let up = |status: &Value| link(status)["name"].is_string() && link(status)["trouble"].is_null();
    until(database.url(), "it fills", up);
    client.batch_execute(&format!("revoke insert on postroom.inbox_messages from {role}")).await.unwrap();
    client.batch_execute("select postroom.enqueue('orders', 'order.placed', 'x'::text, key => 'k')").await.unwrap();
    until(database.url(), "status tells", |status| {
        let told = status["attention"].to_string();
        told.contains("inbox billing") && told.contains("permission denied for table inbox_messages")
    });
    client.batch_execute(&format!("grant insert on postroom.inbox_messages to {role}")).await.unwrap();
    until(database.url(), "it is up again", up);
    let told = std::fs::read_to_string(dir.join("run.log")).unwrap();
    assert!(told.contains("consumer=billing") && told.contains("received messages can be stored again"), "{told}");
    // It tries again several times a second, and says so every half a minute.
    assert!(told.matches("permission denied").count() <= 2, "{told}");
}

/// What was sent before its route stopped taking the topic, or was forgotten, is not called unsent, and not unknown.
#[tokio::test]
async fn a_message_of_a_topic_or_route_that_is_gone_is_not_denied() {
    let (_database, stores) = stores().await;
    for store in &stores {
        let run = |arguments: &[&str]| postroom(&[arguments, &["--store", store]].concat());
        let sent = json(&run(&["send", "--topic", "orders", "--json"]));
        let id = sent["id"].as_str().unwrap();
        let out = surroundings::scratch("gone").join("out.jsonl");
        {
            let _relay = Running::relay(store, &format!("kind = \"file\"\npath = {out:?}\n"));
            until(store, "it is sent", |status| {
                status["routes"][0]["backlog"] == 0 && status["routes"][0]["lanes_held"].as_i64() > Some(0)
            });
        }
        assert_eq!(std::fs::read_to_string(&out).unwrap().lines().count(), 1);
        assert_eq!(run(&["routes", "set", "orders", "--topics", "billing", "--reason", "x"]).status.code(), Some(0));
        let why = json(&run(&["why", id, "--json"]));
        assert_eq!(why["routes"][0]["state"], "passed", "{why}");
        let said = text(&run(&["status"]).stdout);
        assert!(said.contains("topic orders: no route takes it now") && !said.contains("will not be sent"), "{said}");
        let forgotten = run(&["routes", "forget", "orders", "--reason", "x"]);
        assert_eq!(forgotten.status.code(), Some(0), "{}", text(&forgotten.stderr));
        let said = text(&run(&["why", id]).stderr);
        assert!(said.contains("is in the outbox") && said.contains("it may have sent the message"), "{said}");
    }
}

/// Somebody writes to the file for longer than a statement waits.
#[tokio::test]
async fn a_file_that_is_locked_at_the_start_is_waited_for() {
    let (_database, [_, store]) = stores().await;
    let path = store.strip_prefix("sqlite:").unwrap();
    let hold = "import sqlite3, sys\nc = sqlite3.connect(sys.argv[1], isolation_level=None)\nc.execute('begin immediate')\n\
                print('locked', flush=True)\nsys.stdin.readline()\nc.execute('rollback')\n";
    let mut holder =
        Command::new("python3").args(["-c", hold, path]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut told = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(holder.stdout.take().unwrap()), &mut told).unwrap();
    assert_eq!(told.trim(), "locked");
    let config = surroundings::scratch("locked").join("postroom.toml");
    let text_of =
        format!("[store]\nurl = {store:?}\n[[routes]]\nname = \"orders\"\n[routes.sink]\nkind = \"stdout\"\n");
    std::fs::write(&config, text_of).unwrap();
    let log = config.with_file_name("run.log");
    let mut run = surroundings::postroom();
    run.args(["run", "--config"]).arg(&config).stdout(Stdio::null()).stderr(std::fs::File::create(&log).unwrap());
    let _running = Running(run.spawn().unwrap());
    let began = std::time::Instant::now();
    while !std::fs::read_to_string(&log).unwrap().contains("the route begins later, trying again") {
        assert!(began.elapsed().as_secs() < 60, "{}", std::fs::read_to_string(&log).unwrap());
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    drop(holder.stdin.take());
    holder.wait().unwrap();
    until(&store, "it runs", |status| status["routes"][0]["lanes_held"].as_i64() > Some(0));
}

/// A URL at the wrong place of the command line is quoted by the parser of arguments.
#[test]
fn an_error_about_arguments_shows_no_password() {
    for wrong in [
        &["status", "postgres://u:Tops3cret@db/shop"][..],
        &["--json", "status", "postgres://u:Tops3cret@db/shop"],
        &["why", "postgres://u:Tops3cret@db/shop"],
        &["dead", "retry", "--reason", "x", "--limit", "postgres://u:Tops3cret@db/shop"],
        &["status", "--fail-on", "postgres://u:Tops3cret@db/shop"],
        &["postgres://u:Tops3cret@db/shop"],
    ] {
        let output = postroom(wrong);
        assert_eq!(output.status.code(), Some(2), "{wrong:?}");
        let said = format!("{}{}", text(&output.stdout), text(&output.stderr));
        assert!(!said.contains("Tops3cret") && said.contains("--help"), "{said}");
    }
}

/// A server that takes connections and says nothing, as one that hangs does.
#[tokio::test]
async fn every_command_ends_when_the_server_never_answers() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("postgres://u@{}/x", silent.local_addr().unwrap());
    let commands: &[&[&str]] = &[
        &["migrate"],
        &["migrate", "--plan"],
        &["status"],
        &["why", "0199c9a2-7d2e-7bd0-a8d2-0b6d9c1c9a01"],
        &["dead", "list"],
        &["keys", "list"],
        &["routes", "list"],
        &["messages", "list"],
        &["inbox", "prune", "--older-than", "90d", "--reason", "x"],
        &["send", "--topic", "orders", "--type", "test", "--payload", "x"],
    ];
    let started: Vec<_> = commands
        .iter()
        .map(|command| {
            let mut child = surroundings::postroom();
            child.args(*command).args(["--store", &url]).stdout(Stdio::null()).stderr(Stdio::piped());
            child.spawn().unwrap()
        })
        .collect();
    for (command, child) in commands.iter().zip(started) {
        let ended = child.wait_with_output().unwrap();
        let said = text(&ended.stderr);
        assert_eq!(ended.status.code(), Some(69), "{command:?}: {said}");
        assert!(said.contains("did not answer within 20 s"), "{command:?}: {said}");
    }
}

#[tokio::test]
async fn a_deed_on_many_dead_letters_prints_a_summary_and_a_reader_that_goes_away_is_no_error() {
    let database = Database::create().await;
    assert_eq!(postroom(&["migrate", "--store", database.url()]).status.code(), Some(0));
    let client = database.connect().await;
    let rows = "insert into postroom.dead_letters (route, seq, lane, attempts, cause, error, id, topic, type, payload, content_type, occurred_at)
                select 'orders', n, 0, 8, 'exhausted', 'no route', gen_random_uuid(), 'orders', 'order.placed', 'x', 'text/plain', now()
                  from generate_series(1, 5000) n";
    client.batch_execute(rows).await.unwrap();
    // `head` closes the pipe after a line.
    let mut child = surroundings::postroom()
        .args(["dead", "list", "--limit", "5000", "--store", database.url()])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let ended = child.wait_with_output().unwrap();
    assert_eq!((ended.status.code(), text(&ended.stderr).as_str()), (Some(0), ""));
    let preview = postroom(&["dead", "retry", "--all", "--dry-run", "--limit", "5000", "--store", database.url()]);
    assert!(text(&preview.stdout).contains("5,000 messages would be given back to their relay"));
    let done = postroom(&["dead", "retry", "--all", "--limit", "4000", "--reason", "x", "--store", database.url()]);
    let said = text(&done.stdout);
    assert!(said.contains("and 3,980 more") && said.contains("4,000 messages given back to their relay"), "{said}");
    assert!(said.lines().count() < 30, "{said}");
    assert!(text(&done.stderr).contains("that was the limit of 4,000"), "{}", text(&done.stderr));
}

/// A condition that an operation did not know would make it delete more than was asked for.
#[tokio::test]
async fn an_operation_on_dead_letters_keeps_to_every_condition() {
    let database = Database::create().await;
    assert_eq!(postroom(&["migrate", "--store", database.url()]).status.code(), Some(0));
    let client = database.connect().await;
    // One a day, the oldest 20 days old; of two tenants.
    let rows = "insert into postroom.dead_letters (route, seq, lane, attempts, cause, error, id, topic, type, payload, content_type, occurred_at,
                                                   died_at, tenant_id, aggregate_id)
                select 'orders', n, 0, 8, 'exhausted', 'no route ' || n, gen_random_uuid(), 'topic-' || n % 4, 'type-' || n % 5, 'x', 'text/plain',
                       now(), now() - (21 - n) * interval '1 day', 'tenant-' || n % 2, 'a-' || n
                  from generate_series(1, 20) n";
    client.batch_execute(rows).await.unwrap();
    let looked = |conditions: &[&str], paced: &[&str]| {
        let always = ["--json", "dead", "discard", "--route", "orders", "--dry-run", "--store", database.url()];
        let output = postroom(&[&always, conditions, paced].concat());
        assert_eq!(output.status.code(), Some(0), "{conditions:?}: {output:?}");
        json(&output)
    };
    let conditions: [(&[&str], u64); 9] = [
        (&[], 20),
        (&["--older-than", "252h"], 10),
        (&["--newer-than", "60h"], 2),
        (&["--older-than", "60h", "--newer-than", "252h"], 8),
        (&["--topic", "topic-3"], 5),
        (&["--type", "type-2"], 4),
        (&["--tenant", "tenant-1"], 10),
        (&["--aggregate", "a-7"], 1),
        (&["--error", "no route 1"], 11),
    ];
    for (conditions, matching) in conditions {
        let at_once = looked(conditions, &[]);
        assert_eq!(
            at_once["dead_letters"].as_array().map(|found| found.len() as u64),
            Some(matching),
            "{conditions:?}"
        );
        for paced in [&["--canary", "1"][..], &["--rate", "5"], &["--wait"]] {
            let preview = looked(conditions, paced);
            assert_eq!(preview["preview"]["matching"], matching, "{conditions:?} {paced:?}: {preview}");
        }
    }
    let id: String =
        client.query_one("select id::text from postroom.dead_letters where seq = 3", &[]).await.unwrap().get(0);
    assert_eq!(looked(&["--id", &id], &["--canary", "1"])["preview"]["matching"], 1);
    let limited =
        ["dead", "discard", "--all", "--route", "orders", "--limit", "5", "--canary", "1", "--store", database.url()];
    let refused = postroom(&limited);
    assert_eq!(refused.status.code(), Some(2));
    assert!(text(&refused.stderr).contains("--limit does not go with"), "{}", text(&refused.stderr));
    let left: i64 = client.query_one("select count(*) from postroom.dead_letters", &[]).await.unwrap().get(0);
    assert_eq!(left, 20, "nothing was changed");
}
