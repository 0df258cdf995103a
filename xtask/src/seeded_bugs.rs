//! `cargo xtask seeded-bugs`: proof that the tests can fail.
//!
//! A bug is a patch in `xtask/seeded-bugs/`. Each is applied alone to a copy of the sources, and the test that is to catch it
//! must then fail there. A test that hangs or does not compile has caught nothing.

use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use crate::bugs::{self, Bug};
use crate::failure::Failure;
use crate::further_servers;
use crate::held::Held;
use crate::packages;
use crate::patches::{self, Patch};
use crate::services::Scratch;
use crate::source_copy;
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
        [] => bugs::all().collect(),
        ["--list"] => {
            for bug in bugs::all() {
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
    require_pairs(&workspace.root)?;
    let place = Place::take(&workspace)?;
    source_copy::bring_into_step(&workspace.root, &place.copy.root)?;
    for bug in &bugs {
        let patch = Patch::of(&workspace.root, bug.name);
        if let Some(why) = patch.stale(&place.copy.root)? {
            return Err(Failure::work(format!("{}: {why}", patch.file().display())));
        }
    }
    let held = Held::until_interrupted()?;
    packages::ensure(&held)?;
    let scratch = Scratch::create(&workspace)?;
    let further = further_servers::ensure(&workspace, &held)?;
    let judged = start_services(&workspace, &held).and_then(|mut environment| {
        environment.push(("POSTROOM_TEST_DIR", scratch.0.clone().into()));
        environment.extend(further);
        judge_all(&Bench { place: &place, held: &held, environment }, &bugs)
    });
    let all_caught = judged.as_ref().is_ok_and(|verdicts| verdicts.iter().all(|verdict| *verdict == Verdict::Caught));
    held.end(scratch, all_caught);
    print_table(&bugs, &judged?);
    Ok(if all_caught { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn find(name: &str) -> Result<&'static Bug, Failure> {
    bugs::all()
        .find(|bug| bug.name == name)
        .ok_or_else(|| Failure::usage(format!("there is no bug `{name}`; there are: {}", names().join(", "))))
}

fn require_pairs(root: &Path) -> Result<(), Failure> {
    match patches::unpaired(root, &names())?.first() {
        None => Ok(()),
        Some((file, why)) => Err(Failure::work(format!("{}: {why}", file.display()))),
    }
}

/// The bugs on the list.
pub(crate) fn names() -> Vec<&'static str> {
    bugs::all().map(|bug| bug.name).collect()
}

/// The copy of the sources with its build output, for one run at a time.
struct Place {
    copy: Workspace,
    /// The program of a bug whose test starts it.
    program: PathBuf,
    logs: PathBuf,
    /// Locked until it is closed.
    _lock: File,
}

impl Place {
    fn take(workspace: &Workspace) -> Result<Self, Failure> {
        let folder = workspace.target.join("seeded-bugs");
        let logs = folder.join("logs");
        fs::create_dir_all(&logs)
            .map_err(|error| io::Error::new(error.kind(), format!("create {}: {error}", logs.display())))?;
        let lock = File::create(folder.join("lock"))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let told = format!("another `cargo xtask seeded-bugs` is at work in {}; wait for it", folder.display());
                return Err(Failure::usage(told));
            }
            Err(TryLockError::Error(error)) => return Err(error.into()),
        }
        let copy = Workspace { root: folder.join("source"), target: folder.join("build") };
        Ok(Self { copy, program: folder.join("postroom"), logs, _lock: lock })
    }
}

/// Where tests are built and run.
struct Bench<'a> {
    place: &'a Place,
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
            let log = self.place.logs.join(format!("{}.without.log", bug.name));
            self.build(bug, "no bug", &log)?;
            let (ended, output) = self.test(bug, &log)?;
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
            let log = self.place.logs.join(format!("{}.log", bug.name));
            // The copy's patch: what is edited during the run counts in the next one.
            let patch = Patch::of(&self.place.copy.root, bug.name);
            let (ended, output) = patch.while_applied(&self.place.copy.root, || {
                self.build(bug, bug.name, &log)?;
                self.test(bug, &log)
            })?;
            let verdict = verdict(ended, &output);
            if verdict != Verdict::Caught {
                eprintln!("    what the test printed is in {}", log.display());
            }
            Ok(verdict)
        })
    }

    /// Compiles apart from running, so that a bug that does not compile is not taken for a failing test.
    fn build(&self, bug: &Bug, with: &str, log: &Path) -> Result<(), Failure> {
        let mut commands = vec![self.cargo_test(bug)];
        commands[0].arg("--no-run");
        if bug.needs_bin {
            let mut cargo = self.place.copy.cargo();
            cargo.args(["build", "-p", "postroom-cli"]);
            commands.push(cargo);
        }
        for mut cargo in commands {
            // Into the log: code that a bug leaves unused is warned about.
            let out = create(log)?;
            cargo.stdout(out.try_clone()?).stderr(out);
            if !self.held.run(&mut cargo)?.success() {
                let told = format!("{} does not compile with {with}; see {}", bug.package, log.display());
                return Err(Failure::work(told));
            }
        }
        if bug.needs_bin {
            // A copy: the next build overwrites the one in the build output.
            fs::copy(self.place.copy.built("debug", "postroom"), &self.place.program)
                .map_err(|error| io::Error::new(error.kind(), format!("copy the program postroom: {error}")))?;
        }
        Ok(())
    }

    /// Whether the test passed (`None`: it did not end in time), and what it printed.
    fn test(&self, bug: &Bug, log: &Path) -> Result<(Option<bool>, String), Failure> {
        let out = create(log)?;
        let mut cargo = self.cargo_test(bug);
        cargo.envs(self.environment.iter().map(|(name, value)| (*name, value)));
        if bug.needs_bin {
            cargo.env("POSTROOM_BIN", &self.place.program);
        }
        cargo.stdout(out.try_clone()?).stderr(out);
        let status = self.held.run_within(&mut cargo, Some(RUN_WITHIN))?;
        let output = String::from_utf8_lossy(&fs::read(log)?).into_owned();
        Ok((status.map(|status| status.success()), output))
    }

    fn cargo_test(&self, bug: &Bug) -> Command {
        let mut cargo = self.place.copy.cargo();
        cargo.args(["test", "--all-features", "-p", bug.package]).args(bug.test);
        cargo
    }
}

fn create(log: &Path) -> io::Result<File> {
    File::create(log).map_err(|error| io::Error::new(error.kind(), format!("create {}: {error}", log.display())))
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
        let different: std::collections::BTreeSet<&str> = names().into_iter().collect();
        assert_eq!(different.len(), bugs::all().count());
    }
}
