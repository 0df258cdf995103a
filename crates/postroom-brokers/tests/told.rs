//! What `postroom check` says when something is wrong with a broker, as docs/broker-errors.md lists it. All servers are real.

#![cfg(all(
    feature = "amqp10",
    feature = "http",
    feature = "kafka",
    feature = "mqtt",
    feature = "nats",
    feature = "rabbitmq",
    feature = "redis",
    feature = "smtp"
))]
#![allow(clippy::unwrap_used)]

use std::fmt::Write as _;
use std::process::Command;

use postroom_brokers::{CheckFailed, sink_section, subscription_section};
use postroom_testkit::services::{KafkaServer, MosquittoServer, NatsServer, RabbitServer, RedisServer, SmtpServer};
use postroom_testkit::surroundings;
use serde_json::{Value, json};

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/broker-errors.md");
const BEGIN: &str = "<!-- made by the test `told` of postroom-brokers; with POSTROOM_TEST_WRITE=1 it writes this -->\n";
const END: &str = "<!-- end -->";
/// Where nobody listens.
const NOBODY: &str = "127.0.0.1:1";

/// What is wrong with a section of a route (`to`) or of an inbox.
struct Wrong {
    what: &'static str,
    to: bool,
    section: Value,
}

fn to(what: &'static str, section: Value) -> Wrong {
    Wrong { what, to: true, section }
}

fn from(what: &'static str, section: Value) -> Wrong {
    Wrong { what, to: false, section }
}

/// What is said of it, and what to do.
async fn told(kind: &str, wrong: &Wrong) -> (String, String) {
    let section = wrong.section.clone();
    let checked = if wrong.to {
        sink_section(kind).unwrap().read(section).unwrap().check().await
    } else {
        subscription_section(kind).unwrap().read(section).unwrap().check(&[]).await
    };
    let CheckFailed { problem, advice } = checked.expect_err(wrong.what);
    (problem, advice)
}

/// A table; `servers` are shown by a name.
async fn table(kind: &str, servers: &[(&str, &str)], wrongs: Vec<Wrong>) -> String {
    let mut table = format!("\n## `{kind}`\n\n| what is wrong | what is said | and advised |\n|---|---|---|\n");
    for wrong in wrongs {
        let (problem, advice) = told(kind, &wrong).await;
        for said in [&problem, &advice] {
            assert!(!said.contains("s3cret"), "a secret: {said}");
            assert!(!said.contains('\n'), "one line: {said}");
        }
        assert!(!problem.is_empty() && !problem.contains("panic"), "{}", wrong.what);
        let cell = |said: &str| {
            let shown = servers.iter().fold(said.to_owned(), |said, (server, name)| said.replace(server, name));
            shown.replace('|', "\\|").replace('<', "&lt;")
        };
        let of = if wrong.to { "" } else { " (an inbox)" };
        writeln!(table, "| {}{of} | {} | {} |", wrong.what, cell(&problem), cell(&advice)).unwrap();
    }
    table
}

async fn rabbitmq() -> String {
    let url = surroundings::rabbitmq_url();
    let server = url.split_once('@').unwrap().1.split('/').next().unwrap().to_owned();
    let at = |login: &str, vhost: &str| format!("amqp://{login}@{server}/{vhost}");
    let wrongs = vec![
        to("nobody listens", json!({"url": format!("amqp://guest:s3cret@{NOBODY}")})),
        to("another scheme", json!({"url": "rabbit://h"})),
        to("the password", json!({"url": at("guest:s3cret", "%2f")})),
        to("no such virtual host", json!({"url": at("guest:guest", "elsewhere")})),
        to("no such exchange", json!({"url": url, "exchange": "missing", "declare": false})),
        to("an option is 0", json!({"url": url, "channels": 0})),
        from("no such queue", json!({"url": url, "queue": "missing"})),
    ];
    table("rabbitmq", &[(&server, "HOST:5672")], wrongs).await
}

async fn nats() -> String {
    let users = "authorization { users: [ { user: relay, password: \"p\" } ] }";
    let server = NatsServer::start(&surroundings::scratch("told-nats"), users).unwrap();
    let url = server.url().replace("://", "://relay:p@");
    let at = server.url().split_once("://").unwrap().1.to_owned();
    let wrongs = vec![
        to("nobody listens", json!({"url": format!("nats://{NOBODY}"), "stream": "ORDERS"})),
        to("another scheme", json!({"url": "http://h", "stream": "ORDERS"})),
        to("the password", json!({"url": url.replace(":p@", ":s3cret@"), "stream": "ORDERS"})),
        to("no such stream", json!({"url": url, "stream": "ORDERS"})),
        to("a subject of no field", json!({"url": url, "stream": "ORDERS", "subject": "orders.{order}"})),
        from("no such stream", json!({"url": url, "stream": "ORDERS", "consumer": "billing"})),
    ];
    table("nats", &[(&at, "HOST:4222")], wrongs).await
}

async fn kafka() -> String {
    let start = || KafkaServer::start(&surroundings::scratch("told-kafka"), 0).unwrap();
    let server = tokio::task::spawn_blocking(start).await.unwrap();
    let at = server.address();
    let url = format!("kafka://{at}");
    let wrongs = vec![
        to("nobody listens", json!({"url": format!("kafka://{NOBODY}"), "publish_deadline_seconds": 2})),
        to("another scheme", json!({"url": "http://h"})),
        to("no such topic", json!({"url": url, "topic": "missing"})),
        to("a topic that cannot be one", json!({"url": url, "topic": "a b"})),
        to("no such ledger", json!({"url": url, "transactional_id": "shop", "ledger": "missing"})),
        from("no such topic", json!({"url": url, "topics": ["missing"], "group": "billing"})),
        from("no topic at all", json!({"url": url, "topics": [], "group": "billing"})),
    ];
    table("kafka", &[(&at, "HOST:9092")], wrongs).await
}

async fn redis() -> String {
    let users = "user relay on >p ~orders +@all -config -info\nuser default on nopass ~* +@all";
    let server = RedisServer::start(&surroundings::scratch("told-redis"), users).unwrap();
    let (at, url) = (server.address(), server.url().replace("://", "://relay:p@"));
    let wrongs = vec![
        to("nobody listens", json!({"url": format!("redis://{NOBODY}"), "stream": "orders"})),
        to("another scheme", json!({"url": "http://h", "stream": "orders"})),
        to("the password", json!({"url": url.replace(":p@", ":s3cret@"), "stream": "orders"})),
        to("a key that the user may not touch", json!({"url": url, "stream": "payments"})),
        to("no such database", json!({"url": format!("{}/99", server.url()), "stream": "orders"})),
        to("more replicas than there are", json!({"url": server.url(), "stream": "orders", "replicas": 2})),
        from("no stream at all", json!({"url": url, "streams": [], "group": "billing"})),
    ];
    table("redis", &[(&at, "HOST:6379")], wrongs).await
}

async fn amqp10() -> String {
    let start = || RabbitServer::start_newer(&surroundings::scratch("told-rabbitmq4"), None).unwrap();
    let server = tokio::task::spawn_blocking(start).await.unwrap();
    let at = format!("127.0.0.1:{}", server.port());
    let url = format!("amqp://guest:guest@{at}");
    let old = surroundings::rabbitmq_url();
    let old = old.split_once('@').unwrap().1.split('/').next().unwrap();
    let wrongs = vec![
        to("nobody listens", json!({"url": format!("amqp://{NOBODY}"), "address": "/queues/q"})),
        to("another scheme", json!({"url": "http://h", "address": "/queues/q"})),
        to("the password", json!({"url": url.replace(":guest@", ":s3cret@"), "address": "/queues/q"})),
        to("no such queue", json!({"url": url, "address": "/queues/missing"})),
        to("no such exchange", json!({"url": url, "address": "/exchanges/missing/{type}"})),
        to("an address of no field", json!({"url": url, "address": "/queues/{order}"})),
        to("a broker before RabbitMQ 4", json!({"url": format!("amqp://guest:guest@{old}"), "address": "/queues/q"})),
        from("no such queue", json!({"url": url, "address": "/queues/missing"})),
    ];
    table("amqp10", &[(&at, "HOST:5672"), (old, "HOST:5672")], wrongs).await
}

async fn mqtt() -> String {
    let dir = surroundings::scratch("told-mqtt");
    let users = dir.join("users");
    assert!(
        Command::new("mosquitto_passwd")
            .args(["-b", "-c"])
            .arg(&users)
            .args(["relay", "p"])
            .status()
            .unwrap()
            .success()
    );
    let further = format!("allow_anonymous false\npassword_file {}", users.display());
    let server = MosquittoServer::start(&dir, &further).unwrap();
    let (at, url) = (server.address(), format!("mqtt://relay:p@{}", server.address()));
    let wrongs = vec![
        to("nobody listens", json!({"url": format!("mqtt://{NOBODY}"), "topic": "shop"})),
        to("another scheme", json!({"url": "http://h", "topic": "shop"})),
        to("the password", json!({"url": url.replace(":p@", ":s3cret@"), "topic": "shop"})),
        to("a topic with a wildcard", json!({"url": url, "topic": "shop/#"})),
        to("a topic of no field", json!({"url": url, "topic": "shop/{order}"})),
        from("a filter that cannot be one", json!({"url": url, "topics": ["shop#"], "client_id": "billing"})),
        from("no client id", json!({"url": url, "topics": ["shop/#"], "client_id": ""})),
    ];
    table("mqtt", &[(&at, "HOST:1883")], wrongs).await
}

async fn http() -> String {
    let wrongs = vec![
        to("nobody listens", json!({"url": format!("http://{NOBODY}/hook"), "private_addresses": true})),
        to("another scheme", json!({"url": "ftp://h/hook"})),
        to("an address of this machine", json!({"url": "http://localhost/hook"})),
        to("a field in the host", json!({"url": "https://{topic}.example.com/"})),
        to("a path of no field", json!({"url": "https://example.com/{order}"})),
        to("a secret that is none", json!({"url": "https://example.com/", "secrets": ["s3cret"]})),
        to("events without a source", json!({"url": "https://example.com/", "cloudevents": "binary"})),
    ];
    table("http", &[], wrongs).await
}

async fn smtp() -> String {
    let server = SmtpServer::start(&surroundings::scratch("told-smtp"), "{}").unwrap();
    let (at, us) = (server.address(), "Shop <shop@example.com>");
    let wrongs = vec![
        to("nobody listens", json!({"url": format!("smtp://{NOBODY}"), "from": us})),
        to("another scheme", json!({"url": "mail://h", "from": us})),
        to("a server without a login", json!({"url": format!("smtp://relay:s3cret@{at}"), "from": us})),
        to("a server that is to be encrypted at once", json!({"url": format!("smtps://{at}"), "from": us})),
        to("a sender that is none", json!({"url": format!("smtp://{at}"), "from": "shop"})),
    ];
    table("smtp", &[(&at, "HOST:25")], wrongs).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_said_is_what_the_document_lists() {
    let tables = [
        rabbitmq().await,
        nats().await,
        kafka().await,
        redis().await,
        amqp10().await,
        mqtt().await,
        http().await,
        smtp().await,
    ];
    let made = tables.concat();
    let document = std::fs::read_to_string(FILE).unwrap();
    let (before, rest) = document.split_once(BEGIN).expect("where the tables begin");
    let (listed, after) = rest.split_once(END).expect("where they end");
    if std::env::var_os("POSTROOM_TEST_WRITE").is_some() {
        std::fs::write(FILE, [before, BEGIN, &made, "\n", END, after].concat()).unwrap();
        return;
    }
    for (listed, made) in listed.trim().lines().zip(made.trim().lines()) {
        assert_eq!(listed, made, "docs/broker-errors.md does not list what is said; POSTROOM_TEST_WRITE=1 writes it");
    }
    assert_eq!(listed.trim(), made.trim());
}
