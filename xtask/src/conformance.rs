//! `cargo xtask conformance`: the suites that every store and every broker passes, run on the servers that can be had here, as one table.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Command, ExitCode, Stdio};

use crate::failure::Failure;
use crate::workspace::Workspace;

/// Where the table is kept, and between which lines.
const FILE: &str = "docs/support.md";
const BEGIN: &str = "<!-- made by `cargo xtask conformance --write` -->";
const END: &str = "<!-- end -->";

/// One run of tests, on one kind of server.
struct Target {
    /// What it runs on; for brokers the module says which.
    on: &'static str,
    /// Arguments of `cargo xtask test`.
    server: &'static [&'static str],
    package: &'static str,
    /// The test program, and which of its tests; none: all.
    test: (&'static str, Option<&'static str>),
}

/// Beside a store's own tests.
const OF_STORE: Option<&str> = Some("conformance::");
/// None can be had here. With POSTROOM_TEST_MSSQL_URL the same tests run on that server, and the table still says what it says.
const MSSQL: &str = "SQL Server, emulated: not run on one";

const TARGETS: &[Target] = &[
    Target { on: "PostgreSQL 15", server: &[], package: "postroom-postgres", test: ("store", OF_STORE) },
    Target { on: "PostgreSQL 18", server: &["--newest"], package: "postroom-postgres", test: ("store", OF_STORE) },
    Target { on: "MariaDB 10.11", server: &[], package: "postroom-mysql", test: ("store", OF_STORE) },
    Target { on: "MySQL 9.7", server: &["--mysql"], package: "postroom-mysql", test: ("store", OF_STORE) },
    Target { on: "SQLite", server: &[], package: "postroom-sqlite", test: ("conformance", None) },
    Target {
        on: MSSQL,
        server: &[],
        package: "postroom-mssql",
        test: ("store", Some("conformance_on_an_emulation_unless_a_server_is_given::")),
    },
    Target {
        on: "inbox in another PostgreSQL",
        server: &[],
        package: "postroom-consumer",
        test: ("receiving", Some("straight::postgres_inbox")),
    },
    Target {
        on: "inbox in a SQLite file",
        server: &[],
        package: "postroom-consumer",
        test: ("receiving", Some("straight::sqlite_inbox")),
    },
    Target { on: "brokers", server: &[], package: "postroom-brokers", test: ("conformance", None) },
];

/// Modules of tests, and what each of them is for people: the suite, and the driver or part that it runs through.
const SUITES: &[(&str, &str, &str)] = &[
    ("source", "relay's end", "relay"),
    ("operator", "operators' end", "commands, admin API"),
    ("intake", "existing tables", "relay"),
    ("consumer_store", "receiving end", "the store's own driver"),
    ("consumer_store_sqlx", "receiving end", "sqlx 0.9"),
    ("consumer_store_sqlx_08", "receiving end", "sqlx 0.8"),
    ("sink", "publishing", "relay"),
    ("transactions", "publishing", "the same, in transactions"),
    ("subscription", "receiving", "inboxes, consumers"),
    ("work_queue", "receiving", "the same, of a work queue"),
    ("quorum", "receiving", "the same, of a quorum queue"),
];

const BROKERS: &[(&str, &str)] = &[
    ("rabbitmq", "RabbitMQ 3.10"),
    ("nats", "NATS 2.15"),
    ("kafka", "Kafka 4.3"),
    ("redis", "Redis 7.0"),
    ("mqtt", "Mosquitto 2.0"),
    ("amqp10", "RabbitMQ 4.0 (AMQP 1.0)"),
    ("smtp", "SMTP (aiosmtpd 1.4)"),
    ("http", "HTTP"),
    ("lines", "file, standard output"),
    ("in_process", "in-process broker"),
];

/// What cannot be run at all, because it does not exist.
const MISSING: &[(&str, &str, &str)] = &[
    ("SQS", "", "there is no sink and no subscription for it"),
    ("SMTP", "receiving", "it has no subscription"),
    ("HTTP", "receiving", "it has no subscription"),
];

/// Cases of one suite on one server.
#[derive(Debug, Default, PartialEq, Eq)]
struct Cases {
    passed: usize,
    failed: usize,
    ignored: usize,
}

/// By what they ran on, and the number of the suite.
type Results = BTreeMap<(String, usize), Cases>;

pub(crate) fn run(args: &[String]) -> Result<ExitCode, Failure> {
    let write = match args {
        [] => false,
        [one] if one == "--write" => true,
        _ => return Err(Failure::usage("conformance takes --write, or nothing")),
    };
    let workspace = Workspace::find()?;
    let (mut results, mut failed, mut not_run) = (Results::new(), false, Vec::new());
    for target in TARGETS {
        eprintln!("==> {} on {}", target.package, target.on);
        let mut tests = Command::new(env::current_exe()?);
        let (test, only) = target.test;
        tests.arg("test").args(target.server).args(["--", "-p", target.package, "--test", test]);
        tests.args(only.iter().flat_map(|only| ["--", only]));
        let mut tests = tests.stdout(Stdio::piped()).spawn()?;
        let out = tests.stdout.take().ok_or_else(|| Failure::work("the tests have no output"))?;
        let before = results.len();
        for line in BufReader::new(out).lines() {
            enter(&mut results, target.on, &line?);
        }
        let status = tests.wait()?;
        failed |= !status.success();
        if results.len() == before {
            not_run.push(target.on);
        }
    }
    let table = table(&results, &not_run);
    println!("{table}");
    if write {
        let file = workspace.root.join(FILE);
        let text = fs::read_to_string(&file)?;
        fs::write(&file, replaced(&text, &table).ok_or_else(|| Failure::work(format!("{FILE} lacks its two marks")))?)?;
    }
    failed |= results.values().any(|cases| cases.failed > 0);
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Reads a line of the test runner, such as `test operator::what_waits ... ok`.
fn enter(results: &mut Results, on: &str, line: &str) {
    let Some((path, outcome)) = line.strip_prefix("test ").and_then(|rest| rest.split_once(" ... ")) else { return };
    let parts: Vec<&str> = path.trim().split("::").collect();
    let Some(suite) = SUITES.iter().position(|(name, _, _)| parts.contains(name)) else { return };
    let broker = BROKERS.iter().find(|(module, _)| parts.first() == Some(module)).map(|(_, name)| *name);
    // Tests of one store's own may be in a module of the same name.
    if on == "brokers" && broker.is_none() {
        return;
    }
    let cases = results.entry((broker.unwrap_or(on).to_owned(), suite)).or_default();
    match outcome.split_whitespace().next() {
        Some("ok") => cases.passed += 1,
        Some("ignored,") | Some("ignored") => cases.ignored += 1,
        _ => cases.failed += 1,
    }
}

fn table(results: &Results, not_run: &[&str]) -> String {
    let mut lines = vec!["| runs on | suite | through | cases |".to_owned(), "|---|---|---|---|".to_owned()];
    for ((on, suite), Cases { passed, failed, ignored }) in results {
        let (_, suite, through) = SUITES[*suite];
        let mut cases = format!("{passed} passed");
        for (count, what) in [(failed, "FAILED"), (ignored, "ignored")] {
            if *count > 0 {
                cases.push_str(&format!(", {count} {what}"));
            }
        }
        lines.push(format!("| {on} | {suite} | {through} | {cases} |"));
    }
    lines.extend(not_run.iter().map(|on| format!("| {on} | all | | not run: its server could not be had |")));
    lines.extend(
        MISSING.iter().map(|(what, suite, why)| format!("| {what} | {suite} | | {why} |").replace("|  |", "| |")),
    );
    lines.join("\n")
}

fn replaced(text: &str, table: &str) -> Option<String> {
    let (before, rest) = text.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!("{before}{BEGIN}\n{table}\n{END}{after}"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_runner_become_a_table() {
        let mut results = Results::new();
        for line in [
            "test source::what_is_committed ... ok",
            "test source::what_is_not ... FAILED",
            "test conformance::operator::x ... ok",
            "test contract::something_else ... ok",
            "running 4 tests",
        ] {
            enter(&mut results, "SQLite", line);
        }
        enter(&mut results, "brokers", "test rabbitmq::sink::x ... ok");
        enter(&mut results, "brokers", "test sink::x ... ok");
        let table = table(&results, &["MySQL 9.7"]);
        assert!(table.contains("| SQLite | relay's end | relay | 1 passed, 1 FAILED |"), "{table}");
        assert!(table.contains("| RabbitMQ 3.10 | publishing | relay | 1 passed |"), "{table}");
        assert!(table.contains("| MySQL 9.7 | all | | not run"), "{table}");
        assert_eq!(results.len(), 3);
    }

    #[test]
    fn the_document_has_a_place_for_the_table() {
        let docs = include_str!("../../docs/support.md");
        assert!(replaced(docs, "x").unwrap().contains("\nx\n"));
    }
}
