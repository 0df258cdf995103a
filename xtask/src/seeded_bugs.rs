//! `cargo xtask seeded-bugs`: proof that the tests can fail.
//!
//! A bug is code under `#[cfg(seeded_bug = "NAME")]`. Each is switched on alone, for the workspace's crates only, and
//! the test that is to catch it must then fail. A test that hangs or does not compile has caught nothing.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use crate::bugs::{BUGS, Bug};
use crate::failure::Failure;
use crate::held::Held;
use crate::packages;
use crate::services::Scratch;
use crate::sources;
use crate::steps::step;
use crate::test::start_services;
use crate::workspace::Workspace;

/// A bug must make its test fail; one that only hangs until this is over counts as not caught.
const RUN_WITHIN: Duration = Duration::from_secs(300);

#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Caught,
    Survived,
    /// The test says nothing about the bug, for this reason.
    Unproven(&'static str),
}

pub(crate) fn run(args: &[String]) -> Result<ExitCode, Failure> {
    let bugs = match args.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        [] => BUGS.iter().collect(),
        ["--list"] => {
            for bug in BUGS {
                println!("{:<46} {} ({} {})", bug.name, bug.breaks, bug.package, bug.test.join(" "));
            }
            return Ok(ExitCode::SUCCESS);
        }
        ["--only", name] => vec![find(name)?],
        other => {
            let said = other.join(" ");
            return Err(Failure::usage(format!("`{said}` is not understood; seeded-bugs takes --only NAME or --list")));
        }
    };
    let workspace = Workspace::find()?;
    require_seeds(&workspace, &bugs)?;
    let held = Held::until_interrupted()?;
    packages::ensure(&held)?;
    let scratch = Scratch::create(&workspace)?;
    let judged = start_services(&workspace, &held).and_then(|mut environment| {
        environment.push(("POSTROOM_TEST_DIR", scratch.0.clone().into()));
        judge_all(&Bench { workspace: &workspace, held: &held, environment }, &bugs)
    });
    held.let_go();
    let all_caught = judged.as_ref().is_ok_and(|verdicts| verdicts.iter().all(|verdict| *verdict == Verdict::Caught));
    scratch.close(all_caught);
    print_table(&bugs, &judged?);
    Ok(if all_caught { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn find(name: &str) -> Result<&'static Bug, Failure> {
    BUGS.iter().find(|bug| bug.name == name).ok_or_else(|| {
        let names: Vec<&str> = BUGS.iter().map(|bug| bug.name).collect();
        Failure::usage(format!("there is no bug `{name}`; there are: {}", names.join(", ")))
    })
}

/// A name that no file mentions would look like a bug that survived; one that is not listed is caught by nothing.
fn require_seeds(workspace: &Workspace, bugs: &[&Bug]) -> Result<(), Failure> {
    let mut text = String::new();
    for file in sources::rust_files(&workspace.root.join("crates"))? {
        text.push_str(&sources::read(&file)?);
    }
    for bug in bugs {
        if !text.contains(&format!("seeded_bug = \"{}\"", bug.name)) {
            return Err(Failure::work(format!(
                "no file in crates/ has `cfg(seeded_bug = \"{}\")`; seed the bug, or take it off the list in \
                 xtask/src/seeded_bugs.rs",
                bug.name
            )));
        }
    }
    let seeded = text.split("seeded_bug = \"").skip(1).filter_map(|rest| rest.split('"').next());
    match seeded.into_iter().find(|name| !BUGS.iter().any(|bug| bug.name == *name)) {
        None => Ok(()),
        Some(name) => Err(Failure::work(format!(
            "the bug {name} is seeded in crates/ and is not on the list in xtask/src/seeded_bugs.rs"
        ))),
    }
}

/// Where tests are built and run.
struct Bench<'a> {
    workspace: &'a Workspace,
    held: &'a Held,
    environment: Vec<(&'static str, OsString)>,
}

fn judge_all(bench: &Bench<'_>, bugs: &[&Bug]) -> Result<Vec<Verdict>, Failure> {
    let mut green: Vec<&Bug> = Vec::new();
    for bug in bugs {
        let known = |other: &&Bug| other.package == bug.package && other.test == bug.test;
        if !green.iter().any(known) {
            bench.require_green(bug)?;
            green.push(bug);
        }
    }
    bugs.iter().map(|bug| bench.judge(bug)).collect()
}

impl Bench<'_> {
    /// Without its bug the test must run and pass, or its failing would prove nothing.
    fn require_green(&self, bug: &Bug) -> Result<(), Failure> {
        step(&format!("{} without a bug", told(bug)), || {
            let run = Run { bug, folder: self.folder("none")?, wrapper: None };
            self.build(&run)?;
            let (ended, output) = self.test(&run)?;
            let log = run.log();
            match ended {
                Some(true) if passed(&output) > 0 => Ok(()),
                Some(true) => {
                    Err(Failure::work(format!("no test of {} is called like that; see {}", told(bug), log.display())))
                }
                _ => Err(Failure::work(format!("{} fails without a bug; see {}", told(bug), log.display()))),
            }
        })
    }

    fn judge(&self, bug: &Bug) -> Result<Verdict, Failure> {
        step(&format!("{} with the bug {}", told(bug), bug.name), || {
            let folder = self.folder(bug.name)?;
            let wrapper = write_wrapper(&folder, bug.name)?;
            let run = Run { bug, folder, wrapper: Some(wrapper) };
            self.build(&run)?;
            let (ended, output) = self.test(&run)?;
            let verdict = verdict(ended, &output);
            if verdict != Verdict::Caught {
                eprintln!("    what the test printed is in {}", run.log().display());
            }
            Ok(verdict)
        })
    }

    /// Compiles apart from running, so that a bug that does not compile is not taken for a failing test.
    fn build(&self, run: &Run<'_>) -> Result<(), Failure> {
        let mut commands = vec![self.cargo_test(run)];
        commands[0].arg("--no-run");
        if run.bug.needs_bin {
            let mut cargo = self.workspace.cargo();
            cargo.args(["build", "-p", "postroom-cli"]);
            commands.push(cargo);
        }
        for mut cargo in commands {
            cargo.arg("--quiet");
            run.wrap(&mut cargo);
            if !self.held.run(&mut cargo)?.success() {
                let with = if run.wrapper.is_some() { run.bug.name } else { "no bug" };
                return Err(Failure::work(format!("{} does not compile with {with}, see above", run.bug.package)));
            }
        }
        if run.bug.needs_bin {
            // A copy: the next build overwrites the one in the build output.
            fs::copy(self.workspace.built("debug", "postroom"), run.program())
                .map_err(|error| io::Error::new(error.kind(), format!("copy the program postroom: {error}")))?;
        }
        Ok(())
    }

    /// Whether the test passed (`None`: it did not end in time), and what it printed.
    fn test(&self, run: &Run<'_>) -> Result<(Option<bool>, String), Failure> {
        let log = File::create(run.log())?;
        let mut cargo = self.cargo_test(run);
        run.wrap(&mut cargo);
        cargo.envs(self.environment.iter().map(|(name, value)| (*name, value)));
        if run.bug.needs_bin {
            cargo.env("POSTROOM_BIN", run.program());
        }
        cargo.stdout(log.try_clone()?).stderr(log);
        let status = self.held.run_within(&mut cargo, Some(RUN_WITHIN))?;
        let output = String::from_utf8_lossy(&fs::read(run.log())?).into_owned();
        Ok((status.map(|status| status.success()), output))
    }

    fn cargo_test(&self, run: &Run<'_>) -> Command {
        let mut cargo = self.workspace.cargo();
        cargo.args(["test", "--all-features", "-p", run.bug.package]).args(run.bug.test);
        cargo
    }

    fn folder(&self, name: &str) -> io::Result<PathBuf> {
        let folder = self.workspace.target.join("seeded-bugs").join(name);
        fs::create_dir_all(&folder)
            .map_err(|error| io::Error::new(error.kind(), format!("create {}: {error}", folder.display())))?;
        Ok(folder)
    }
}

/// One test, with its bug or without.
struct Run<'a> {
    bug: &'a Bug,
    folder: PathBuf,
    wrapper: Option<PathBuf>,
}

impl Run<'_> {
    /// Cargo keeps what a workspace wrapper built apart by the wrapper's path, and uses it for our crates only.
    fn wrap(&self, cargo: &mut Command) {
        if let Some(wrapper) = &self.wrapper {
            cargo.env("RUSTC_WORKSPACE_WRAPPER", wrapper);
        }
    }

    fn log(&self) -> PathBuf {
        self.folder.join(format!("{}.log", self.bug.name))
    }

    fn program(&self) -> PathBuf {
        self.folder.join("postroom")
    }
}

/// A stand-in for rustc that adds the bug's `--cfg`.
fn write_wrapper(folder: &Path, bug: &str) -> io::Result<PathBuf> {
    let file = folder.join("rustc.sh");
    fs::write(&file, format!("#!/bin/sh\nexec \"$@\" --cfg 'seeded_bug=\"{bug}\"'\n"))?;
    fs::set_permissions(&file, fs::Permissions::from_mode(0o755))?;
    Ok(file)
}

fn verdict(ended: Option<bool>, output: &str) -> Verdict {
    match ended {
        None => Verdict::Unproven("hung; let the test fail by itself"),
        Some(true) => Verdict::Survived,
        Some(false) if output.contains("test result: FAILED") => Verdict::Caught,
        Some(false) => Verdict::Unproven("died without a failed test"),
    }
}

/// How many tests passed, over all the test programs that ran.
fn passed(output: &str) -> u64 {
    let results = output.lines().filter_map(|line| line.strip_prefix("test result: ok. "));
    results.filter_map(|rest| rest.split_whitespace().next()?.parse::<u64>().ok()).sum()
}

/// The test as a reader would name it: package and function.
fn told(bug: &Bug) -> String {
    format!("{}::{}", bug.package, bug.test.last().copied().unwrap_or_default())
}

fn print_table(bugs: &[&Bug], verdicts: &[Verdict]) {
    let caught_by: Vec<String> = bugs.iter().map(|bug| told(bug)).collect();
    let widest = |lengths: &mut dyn Iterator<Item = usize>| lengths.max().unwrap_or(0).max(12);
    let first = widest(&mut bugs.iter().map(|bug| bug.name.len()));
    let second = widest(&mut caught_by.iter().map(String::len));
    println!("{:<first$}  {:<second$}  verdict", "bug", "caught by");
    for ((bug, by), verdict) in bugs.iter().zip(&caught_by).zip(verdicts) {
        let (by, verdict) = match verdict {
            Verdict::Caught => (by.as_str(), String::from("caught")),
            Verdict::Survived => ("-", format!("SURVIVED: {by} passes although it {}", bug.breaks)),
            Verdict::Unproven(why) => ("-", format!("UNPROVEN: {by} {why}")),
        };
        println!("{:<first$}  {by:<second$}  {verdict}", bug.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_failed_test_catches_a_bug() {
        assert_eq!(verdict(Some(false), "test result: FAILED. 0 passed; 1 failed"), Verdict::Caught);
        assert_eq!(verdict(Some(true), "test result: ok. 1 passed"), Verdict::Survived);
        assert!(matches!(verdict(Some(false), "error: could not compile"), Verdict::Unproven(_)));
        assert!(matches!(verdict(None, "test result: FAILED"), Verdict::Unproven(_)));
    }

    #[test]
    fn a_run_without_any_test_is_not_green() {
        assert_eq!(passed("test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 3 filtered out"), 0);
        assert_eq!(passed("test result: ok. 2 passed; 0 failed\n\ntest result: ok. 1 passed; 0 failed"), 3);
    }

    #[test]
    fn no_two_bugs_share_a_name() {
        let names: std::collections::BTreeSet<&str> = BUGS.iter().map(|bug| bug.name).collect();
        assert_eq!(names.len(), BUGS.len());
    }
}
