//! `cargo xtask test`: every test, against real servers of our own.

use std::env;
use std::ffi::OsString;
use std::num::NonZero;
use std::process::{Command, ExitCode, ExitStatus};

use postroom_testkit::services;

use crate::failure::Failure;
use crate::held::Held;
use crate::services::{Scratch, Services};
use crate::steps::step;
use crate::workspace::Workspace;
use crate::{further_servers, newest_postgres, packages, unpacked};

pub(crate) fn run(args: &[String]) -> Result<ExitCode, Failure> {
    let on = args.iter().take_while(|arg| ["--all", "--newest", "--mysql"].contains(&arg.as_str())).count();
    let (on, args) = args.split_at(on);
    let on = |server: &str| on.iter().any(|arg| arg == server);
    let extra = passed_on("test", args)?;
    let workspace = Workspace::find()?;
    let held = Held::until_interrupted()?;
    packages::ensure(&held)?;
    if on("--newest") || on("--mysql") {
        let mut environment = Vec::new();
        if on("--newest") {
            environment.extend(newest_postgres::environment(&newest_postgres::ensure(&workspace, &held)?)?);
        }
        if on("--mysql") {
            let Some(root) = unpacked::mysql(&workspace, &held) else { return Ok(ExitCode::SUCCESS) };
            environment.push((services::MYSQL_ROOT, root.into()));
        }
        return run_again(&held, environment, extra).map(exit_code);
    }
    let mut tested = run_on_installed(&workspace, &held, extra)?;
    if tested.success() && extra.is_empty() && !services::postgres_is_chosen() && !services::mysql_is_chosen() {
        let mut environment = newest_postgres::environment(&newest_postgres::ensure(&workspace, &held)?)?;
        let mysql = unpacked::mysql(&workspace, &held);
        // Chosen by their names, and not by packages: those have fewer features by themselves, and everything would be compiled again.
        let mut tests = vec!["--test", "store"];
        match (on("--all"), &mysql) {
            (true, Some(_)) => tests.extend(["--test", "mariadb", "--test", "intake"]),
            (true, None) => {}
            (false, _) => tests.extend(["--", "conformance::"]),
        }
        environment.extend(mysql.map(|root| (services::MYSQL_ROOT, root.into())));
        let tests: Vec<String> = tests.into_iter().map(String::from).collect();
        tested = run_again(&held, environment, &tests)?;
        if on("--all") && tested.success() {
            let long: Vec<String> = ["--test", "relay", "--", "--ignored", "200_000"].map(String::from).to_vec();
            tested = run_again(&held, Vec::new(), &long)?;
        }
        if !on("--all") {
            eprintln!(
                "==> left out: all but the suites of stores on the newest PostgreSQL and on MySQL, and kills under 200,000 messages \
                 (cargo xtask test --all), random schedules of faults (cargo xtask chaos), seeded bugs (cargo xtask seeded-bugs)"
            );
        }
    }
    Ok(exit_code(tested))
}

/// This program once more, told where other servers are.
fn run_again(held: &Held, environment: Vec<(&'static str, OsString)>, extra: &[String]) -> Result<ExitStatus, Failure> {
    step("the tests on other servers", || {
        let mut again = Command::new(env::current_exe()?);
        again.args(["test", "--"]).args(extra).envs(environment);
        Ok(held.run(&mut again)?)
    })
}

fn run_on_installed(workspace: &Workspace, held: &Held, extra: &[String]) -> Result<ExitStatus, Failure> {
    let further = further_servers::ensure(workspace, held)?;
    build_programs(workspace, held)?;
    let scratch = Scratch::create(workspace)?;
    let tested = start_services(workspace, held).and_then(|environment| {
        step("cargo test", || {
            let mut cargo = workspace.cargo();
            cargo.args(["test", "--all-features"]);
            // With `--workspace` cargo would silently ignore a package that was named.
            if !names_package(extra) {
                cargo.arg("--workspace");
            }
            cargo.args(extra);
            cargo.envs(environment).envs(further).env("POSTROOM_TEST_DIR", &scratch.0);
            if env::var_os(THREADS).is_none() {
                cargo.env(THREADS, threads().to_string());
            }
            cargo.env("POSTROOM_BIN", workspace.built("release", "postroom"));
            cargo.env("POSTROOM_ORDERS_BIN", workspace.built("release", "orders"));
            cargo.env("POSTROOM_CHECKOUT_BIN", workspace.built("release", "checkout"));
            cargo.env("POSTROOM_ARTICLES_BIN", workspace.built("release", "articles"));
            Ok(held.run(&mut cargo)?)
        })
    });
    let all_is_well = tested.as_ref().is_ok_and(ExitStatus::success);
    held.end(scratch, all_is_well);
    tested
}

/// How many tests of one program run at a time.
const THREADS: &str = "RUST_TEST_THREADS";

/// One more than cores: tests wait for servers more than they compute.
fn threads() -> usize {
    std::thread::available_parallelism().map_or(2, NonZero::get) + 1
}

/// Arguments for somebody else stand behind `--`.
pub(crate) fn passed_on<'a>(command: &str, args: &'a [String]) -> Result<&'a [String], Failure> {
    match args.split_first() {
        None => Ok(&[]),
        Some((first, rest)) if first == "--" => Ok(rest),
        Some((first, _)) => Err(Failure::usage(format!(
            "`{first}` is not understood here; what is to be passed on stands behind `--`: cargo xtask {command} -- {first}"
        ))),
    }
}

/// The programs that fault tests start and kill.
pub(crate) fn build_programs(workspace: &Workspace, held: &Held) -> Result<(), Failure> {
    step("build the programs that the tests kill", || {
        let mut cargo = workspace.cargo();
        // As they ship, but for the crash points. In the dev profile, the tests that use them take more than twice as long, which is more
        // than this build.
        cargo.args(["build", "--release", "-p", "postroom-cli", "-p", "orders", "-p", "checkout", "-p", "articles"]);
        cargo.args([
            "--features",
            "postroom-cli/crash-points,postroom-cli/mssql,postroom-cli/otlp,postroom-cli/parquet,postroom-cli/s3",
        ]);
        if held.run(&mut cargo)?.success() { Ok(()) } else { Err(Failure::work("the build failed, see above")) }
    })
}

/// Starts the servers, hands them to `held`, and returns what tests need to find them.
pub(crate) fn start_services(workspace: &Workspace, held: &Held) -> Result<Vec<(&'static str, OsString)>, Failure> {
    step("start PostgreSQL and RabbitMQ", || {
        let services = Services::start(workspace)?;
        let environment = services.environment();
        held.keep_services(services);
        Ok(environment)
    })
}

fn names_package(extra: &[String]) -> bool {
    let for_cargo = extra.iter().take_while(|arg| *arg != "--");
    for_cargo.into_iter().any(|arg| arg.starts_with("-p") || arg == "--package" || arg.starts_with("--package="))
}

/// A cargo that was killed has no code of its own.
pub(crate) fn exit_code(status: ExitStatus) -> ExitCode {
    let code = status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
    ExitCode::from(code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_named_package_narrows_the_workspace() {
        let given = |text: &str| names_package(&text.split(' ').map(String::from).collect::<Vec<_>>());
        assert!(given("-p postroom") && given("-ppostroom") && given("--test x --package=postroom"));
        assert!(!given("--test engine") && !given("-- -p"));
    }
}
