//! A new user's first hour, on servers of its own: README's five minutes as they stand there, one program in five languages over
//! verified TLS with the roles of `docs/grants-*.sql`, and incidents that the program's own words diagnose.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use postroom_testkit::authority::Authority;
use postroom_testkit::services::{PostgresServer, RabbitServer, RabbitTls};
use postroom_testkit::surroundings::{self, scratch, unique};

const LANGUAGES: [(&str, &str, &str); 5] = [
    ("python", "shop.py", "```python"),
    ("node", "shop.js", "```js"),
    ("go", "main.go", "```go"),
    ("java", "Shop.java", "```java"),
    ("csharp", "Shop.cs", "```csharp"),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The code block of README that begins after `mark`, without its fence.
fn block_of_readme(mark: &str) -> String {
    let readme = std::fs::read_to_string(root().join("README.md")).unwrap();
    let after = readme.split_once(mark).unwrap_or_else(|| panic!("{mark} is not in README.md")).1;
    let body = after.split_once('\n').unwrap().1;
    body.split_once("\n```").unwrap().0.to_owned()
}

#[test]
fn the_snippets_of_readme_are_those_of_the_programs() {
    for (language, file, fence) in LANGUAGES {
        let program = std::fs::read_to_string(root().join("examples/languages").join(language).join(file)).unwrap();
        let snippet = program.split_once("snippet: begin").unwrap().1.split_once('\n').unwrap().1;
        let snippet: Vec<&str> = snippet.lines().take_while(|line| !line.contains("snippet: end")).collect();
        let indent = snippet.iter().filter(|line| !line.trim().is_empty());
        let indent = indent.map(|line| line.len() - line.trim_start().len()).min().unwrap();
        let snippet: Vec<&str> = snippet.iter().map(|line| line.get(indent..).unwrap_or_default()).collect();
        assert_eq!(snippet.join("\n"), block_of_readme(fence), "{language}");
    }
}

/// The servers, and what the program needs to find them.
struct Hour {
    postgres: PostgresServer,
    rabbit: RabbitServer,
    ca: Authority,
    dir: PathBuf,
}

impl Hour {
    /// As the owner of the database.
    fn store(&self) -> String {
        self.postgres.url("shop")
    }

    fn postroom(&self, arguments: &[&str]) -> Output {
        surroundings::postroom().args(arguments).args(["--store", &self.store()]).output().unwrap()
    }

    fn status(&self) -> String {
        text(&self.postroom(&["status"]).stdout)
    }

    /// Waits until it prints this, and says how long that took.
    fn until(&self, incident: &str, prints: impl Fn() -> String, words: &[&str]) {
        let began = Instant::now();
        loop {
            let printed = prints();
            if words.iter().all(|word| printed.contains(word)) {
                println!("{incident}: told after {:.1} s", began.elapsed().as_secs_f64());
                return;
            }
            assert!(began.elapsed() < Duration::from_secs(60), "{incident}: {words:?} is not in\n{printed}");
        }
    }

    fn send(&self, arguments: &[&str]) -> String {
        let sent = self.postroom(&[&["send", "--json"], arguments].concat());
        let sent: serde_json::Value = serde_json::from_slice(&sent.stdout).unwrap();
        sent["id"].as_str().unwrap().to_owned()
    }

    fn asked(&self, sql: &str) -> String {
        self.postgres.sql_in("shop", sql).unwrap().trim().to_owned()
    }
}

/// README's block, with this program and these servers in the place of the user's.
fn five_minutes(hour: &Hour) {
    let block = block_of_readme("<!-- a test runs this block -->\n```sh");
    let (first, rest) = block.split_once('\n').unwrap();
    assert!(first.starts_with("export STORE="), "{first}");
    let script = rest
        .replace("cat > postroom.toml", "cd \"$WORK\"; cat > postroom.toml")
        .replace("docs/grants", "\"$ROOT\"/docs/grants");
    let bin = surroundings::postroom_binary();
    let path = format!("{}:{}", bin.parent().unwrap().display(), std::env::var("PATH").unwrap());
    let mut bash = Command::new("bash");
    bash.args(["-eu", "-c", &script]).current_dir(&hour.dir);
    surroundings::without_tests(&mut bash);
    bash.env("PATH", path).env("STORE", hour.store()).env("BROKER", hour.rabbit.url());
    let ended = bash.env("WORK", &hour.dir).env("ROOT", root()).output().unwrap();
    let (said, complained) = (text(&ended.stdout), text(&ended.stderr));
    assert!(ended.status.success(), "{said}\n{complained}");
    assert!(
        said.contains("has the rights that it needs") && said.contains("\"order\": \"o-17\""),
        "{said}\n{complained}"
    );
    assert!(said.contains("nothing needs attention"), "{said}");
}

/// A relay that reaches both servers over TLS, as its own role; it stops when it is dropped.
struct Relay(Child);

impl Relay {
    fn start(hour: &Hour) -> Self {
        let root = hour.ca.root.display();
        let store = format!(
            "postgres://postroom_relay@127.0.0.1:{}/shop?sslmode=verify-full&sslrootcert={root}",
            hour.postgres.port()
        );
        let broker = format!("{}?cacertfile={root}", hour.rabbit.tls_url().unwrap());
        let config = hour.dir.join("tls.toml");
        let written = format!(
            "[store]\nurl = {store:?}\n[[routes]]\nname = \"orders\"\ntopics = [\"orders\"]\n[routes.sink]\nkind = \"rabbitmq\"\n\
             url = {broker:?}\npublish_deadline_seconds = 5\n[[inboxes]]\nconsumer = \"billing\"\n[inboxes.from]\nkind = \"rabbitmq\"\n\
             url = {broker:?}\nqueue = \"billing\"\nbind = [{{ exchange = \"postroom\", routing_key = \"order.*\" }}]\n"
        );
        std::fs::write(&config, written).unwrap();
        let check =
            || text(&surroundings::postroom().args(["check", "--config"]).arg(&config).output().unwrap().stdout);
        // The server takes up its certificate a moment later.
        hour.until("TLS to both servers", check, &["the database answers; the connection is encrypted with TLS"]);
        let said = check();
        assert!(said.matches("encrypted with TLS").count() == 3 && !said.contains("FAIL"), "{said}");
        let log = std::fs::File::create(hour.dir.join("tls.log")).unwrap();
        let mut relay = surroundings::postroom();
        Self(relay.args(["run", "--config"]).arg(&config).stdout(Stdio::null()).stderr(log).spawn().unwrap())
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        let _ = Command::new("kill").args(["-TERM", &self.0.id().to_string()]).status();
        let _ = self.0.wait();
    }
}

/// The program in one language: a row and its message together or not at all, and the effect at the other end, once.
fn in_language(hour: &Hour, language: &str) {
    // Kept between runs: what it fetches and compiles is pinned.
    let folder = root().join("target/languages").join(language);
    std::fs::create_dir_all(folder.parent().unwrap()).unwrap();
    let began = Instant::now();
    let prepared =
        Command::new(root().join("examples/languages/prepare.sh")).arg(language).arg(&folder).output().unwrap();
    assert!(prepared.status.success(), "{language}: {}{}", text(&prepared.stdout), text(&prepared.stderr));
    println!("{language}: prepared in {:.0} s", began.elapsed().as_secs_f64());
    let run = |role: &str, arguments: &[&str]| {
        let mut program = Command::new(folder.join("run"));
        program.args(arguments).env("PGHOST", "localhost").env("PGPORT", hour.postgres.port().to_string());
        program.env("PGDATABASE", "shop").env("PGUSER", role).env("PGPASSWORD", "unused");
        program.env("PGSSLMODE", "verify-full").env("PGSSLROOTCERT", &hour.ca.root).output().unwrap()
    };
    let (kept, undone) = (format!("o-{language}"), format!("o-{language}-undone"));
    let placed = run("app_writer", &["place", &kept]);
    assert!(placed.status.success(), "{language}: {}", text(&placed.stderr));
    assert!(run("app_writer", &["place", &undone, "--fail"]).status.success());
    let of = |order: &str| {
        hour.asked(&format!(
            "select (select count(*) from orders where id = '{order}') || ' ' || (select count(*) from postroom.outbox where key = '{order}')"
        ))
    };
    assert_eq!((of(&kept), of(&undone)), ("1 1".to_owned(), "0 0".to_owned()), "{language}: both or neither");
    let billed = || hour.asked(&format!("select count(*) from bills where order_id = '{kept}'"));
    hour.until(
        &format!("{language}: the effect"),
        || {
            let took = run("app_consumer", &["take"]);
            assert!(took.status.success(), "{language}: {}", text(&took.stderr));
            billed()
        },
        &["1"],
    );
    assert_eq!(billed(), "1", "{language}: once");
}

fn incidents(hour: &mut Hour) {
    hour.send(&["--topic", "ordres", "--type", "order.placed"]);
    hour.until("a mistyped topic", || hour.status(), &["topic ordres: no route takes it", "postroom routes list"]);

    let unroutable = hour.send(&["--topic", "orders", "--type", "nobody.is.bound"]);
    hour.until("an unroutable message", || hour.status(), &["failed and will be tried again", "unroutable"]);
    let why = || text(&hour.postroom(&["why", &unroutable]).stdout);
    hour.until("why it is not there", why, &["retry", "returned as unroutable", "no queue is bound"]);

    let poison =
        hour.send(&["--topic", "orders", "--type", "order.placed", "--payload", "not json", "--key", "poison"]);
    let why = || text(&hour.postroom(&["why", &poison]).stdout);
    hour.until("it is received", why, &["consumer billing: waiting"]);
    hour.asked(&format!(
        "select postroom.inbox_fail('billing', t.message_id, t.claim, 'cannot read the order') from postroom.inbox_take('billing', 100) t
          where t.message_id = '{poison}'"
    ));
    hour.until("a handler that fails", || hour.status(), &["inbox billing: 1 message failed", "cannot read the order"]);
    hour.until("why it has no effect", why, &["consumer billing: retry", "cannot read the order"]);

    hour.rabbit.memory_alarm(true).unwrap();
    hour.send(&["--topic", "orders", "--type", "order.placed"]);
    hour.until(
        "an alarm of the broker",
        || hour.status(),
        &["has accepted nothing for", "memory or disk alarm", "blocked for"],
    );
    let log = |hour: &Hour| std::fs::read_to_string(hour.dir.join("tls.log")).unwrap();
    hour.until("the log tells of the alarm", || log(hour), &["the sink accepts nothing for now"]);
    hour.rabbit.memory_alarm(false).unwrap();
    hour.until("the log tells of its end", || log(hour), &["the sink accepts messages again"]);

    hour.rabbit.kill().unwrap();
    let waits = hour.send(&["--topic", "orders", "--type", "order.placed"]);
    hour.until(
        "a broker that is down",
        || hour.status(),
        &["has been down for", "no message of queue \"billing\" has come in"],
    );
    let why = |hour: &Hour| text(&hour.postroom(&["why", &waits]).stdout);
    hour.until("why it waits", || why(hour), &["waiting", "sink has been down"]);
    hour.rabbit.start_again().unwrap();
    hour.until("the broker is back", || why(hour), &["acked"]);
    hour.until("the log tells that it is back", || log(hour), &["the sink is back after"]);
}

#[test]
fn a_new_users_first_hour() {
    let certificates = scratch("first-hour-ca");
    let ca = Authority::create(&certificates, "nobody");
    let postgres = PostgresServer::start(&scratch("first-hour-postgres").join(unique())).unwrap();
    let tls = RabbitTls::new(&ca.root, &ca.server.certificate, &ca.server.key, false);
    let rabbit = RabbitServer::start_with(&scratch("first-hour").join("rabbitmq"), Some(tls)).unwrap();
    postgres.sql("create database shop").unwrap();
    let mut hour = Hour { postgres, rabbit, ca, dir: scratch("first-hour-work") };
    five_minutes(&hour);

    hour.asked("drop table orders");
    let tables = std::fs::read_to_string(root().join("examples/languages/tables.sql")).unwrap();
    hour.asked(&tables);
    hour.postgres.encrypt(&hour.ca.root, &hour.ca.server.certificate, &hour.ca.server.key, None).unwrap();
    let relay = Relay::start(&hour);
    for (language, ..) in LANGUAGES {
        in_language(&hour, language);
    }
    incidents(&mut hour);
    drop(relay);
}
