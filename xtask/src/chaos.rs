//! `cargo xtask chaos`: random schedules of faults on real servers; what they showed is kept in a ledger.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::process::{Command, ExitCode};

use crate::failure::Failure;
use crate::held::Held;
use crate::packages;
use crate::services::Scratch;
use crate::steps::step;
use crate::test::{build_programs, exit_code, start_services};
use crate::workspace::Workspace;

/// One line a run, oldest first.
const LEDGER: &str = "docs/chaos-ledger.jsonl";

pub(crate) fn run(args: &[String]) -> Result<ExitCode, Failure> {
    let (mut schedules, mut seed, mut test) = (30_u64, 1_u64, "chaos");
    let mut rest = args.iter();
    while let Some(name) = rest.next() {
        if name == "--mariadb" {
            test = "mariadb";
            continue;
        }
        let slot = match name.as_str() {
            "--schedules" => &mut schedules,
            "--seed" => &mut seed,
            other => {
                return Err(Failure::usage(format!(
                    "`{other}` is not understood; chaos takes --mariadb, --schedules N and --seed S"
                )));
            }
        };
        let value = rest.next().and_then(|text| text.parse().ok());
        *slot = value.ok_or_else(|| Failure::usage(format!("{name} must be followed by a whole number")))?;
    }
    let workspace = Workspace::find()?;
    let held = Held::until_interrupted()?;
    packages::ensure(&held)?;
    build_programs(&workspace, &held)?;
    let scratch = Scratch::create(&workspace)?;
    let summary = scratch.0.join("summary.json");
    // The schedules of PostgreSQL start their own servers, those of MariaDB their own MariaDB.
    let environment = if test == "mariadb" { start_services(&workspace, &held)? } else { Vec::new() };
    let ended = step("chaos", || {
        let mut cargo = workspace.cargo();
        cargo.args(["test", "--all-features", "-p", "postroom-cli", "--test", test, "random_schedules"]);
        cargo.envs(environment);
        cargo.args(["--", "--nocapture"]);
        cargo.env("POSTROOM_TEST_DIR", &scratch.0);
        cargo.env("POSTROOM_BIN", workspace.built("release", "postroom"));
        cargo.env("POSTROOM_CHAOS_SCHEDULES", schedules.to_string());
        cargo.env("POSTROOM_CHAOS_SEED", seed.to_string());
        cargo.env("POSTROOM_CHAOS_SUMMARY", &summary);
        Ok::<_, Failure>(held.run(&mut cargo)?)
    })?;
    let text = fs::read_to_string(&summary);
    held.end(scratch, ended.success());
    if let Ok(text) = text {
        note(&workspace, test, &text)?;
    }
    Ok(exit_code(ended))
}

/// Adds a run to the ledger, whatever it showed.
fn note(workspace: &Workspace, test: &str, summary: &str) -> Result<(), Failure> {
    let date = said_by(Command::new("date").args(["-u", "+%F"]));
    let commit = said_by(Command::new("git").current_dir(&workspace.root).args(["rev-parse", "--short", "HEAD"]));
    let rest = summary.trim().strip_prefix('{').ok_or_else(|| Failure::work("the summary is not an object"))?;
    let store = if test == "mariadb" { "\"store\":\"mariadb\"," } else { "" };
    let line = format!("{{\"date\":\"{date}\",\"commit\":\"{commit}\",{store}{rest}\n");
    let ledger = workspace.root.join(LEDGER);
    let mut file = OpenOptions::new().create(true).append(true).open(&ledger)?;
    file.write_all(line.as_bytes())?;
    eprintln!("==> noted in {LEDGER}");
    Ok(())
}

fn said_by(command: &mut Command) -> String {
    let said = command.output().map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    said.ok().filter(|said| !said.is_empty()).unwrap_or_else(|| "unknown".to_owned())
}
