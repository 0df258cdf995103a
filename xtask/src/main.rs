//! The project's own chores: `cargo xtask <command>`.

mod bench;
mod bugs;
mod chaos;
mod conformance;
mod examples;
mod failure;
mod further_servers;
mod held;
mod kafka;
mod newest_postgres;
mod packages;
mod patches;
mod python_package;
mod seeded_bugs;
mod services;
mod sim;
mod source_copy;
mod sources;
mod steps;
mod supply_chain;
mod test;
#[cfg(test)]
mod test_folder;
mod tidy;
mod unpacked;
mod workspace;

use std::env;
use std::process::ExitCode;

use failure::Failure;

const HELP: &str = "\
cargo xtask <command>

  test [--all] [--newest] [--mysql] [-- ARGS]
                                    install what is missing, start a private PostgreSQL and RabbitMQ, run all tests;
                                    ARGS go to `cargo test`. --newest: on the newest PostgreSQL that can be installed;
                                    --mysql: on MySQL in place of MariaDB. Without ARGS, the suites that every store passes
                                    are also run on those two; --all: with all other tests of the stores, and kills
                                    under 200,000 messages on Kafka and JetStream
  packages                          install the Debian packages that compiling everything and the tests need; `test` does so too
  orders, checkout, articles [-- ARGS]
                                    run that example on a private PostgreSQL and RabbitMQ (articles: and MariaDB);
                                    ARGS go to it
  bench [-- ARGS]                   measure beside a bare client and the articles' algorithms; ARGS go to the benchmark
  conformance [--write]             run the suites that every store and broker passes, on every server that can be had
                                    here, and print a table; --write also puts it into docs/support.md
  sim [--seed N | --seeds FROM..TO] run the engine in its simulated world; one seed prints its last events
  chaos [--mariadb] [--schedules N] [--seed S]
                                    run random schedules of faults on real servers, and note them in
                                    docs/chaos-ledger.jsonl
  seeded-bugs [--only NAME] [--list]
                                    seed one known bug (xtask/seeded-bugs/NAME.patch) after the other in a copy of the
                                    sources and require that a test fails
  supply-chain [--all] [--bill]     check licences and sources of dependencies, compile each Cargo feature of the libraries by
                                    itself, and the documentation without a warning; --all: those of the program, too;
                                    --bill also writes a bill of materials to target/
  tidy                              check crate directions, broker names, file sizes, pure files, and that the
                                    patches of seeded bugs apply

Exit codes: 0 done, 1 something was found or failed, 2 wrong use or a missing package, 130 interrupted;
`test` hands on the exit code of cargo.";

fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).collect();
    match run(&args) {
        Ok(code) => code,
        Err(failure) => {
            eprintln!("xtask: {failure}");
            ExitCode::from(failure.code)
        }
    }
}

fn run(args: &[String]) -> Result<ExitCode, Failure> {
    let Some((command, rest)) = args.split_first() else {
        return Err(Failure::usage(format!("name a command\n\n{HELP}")));
    };
    match command.as_str() {
        "packages" => {
            packages::ensure(&held::Held::until_interrupted()?)?;
            Ok(ExitCode::SUCCESS)
        }
        "test" => test::run(rest),
        "orders" | "checkout" | "articles" => examples::run(command, rest),
        "bench" => bench::run(rest),
        "conformance" => conformance::run(rest),
        "sim" => sim::run(rest),
        "chaos" => chaos::run(rest),
        "seeded-bugs" => seeded_bugs::run(rest),
        "supply-chain" => supply_chain::run(rest),
        "tidy" => tidy::run(rest),
        "help" | "--help" | "-h" => {
            println!("{HELP}");
            Ok(ExitCode::SUCCESS)
        }
        other => Err(Failure::usage(format!("there is no command `{other}`\n\n{HELP}"))),
    }
}
