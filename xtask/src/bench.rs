//! `cargo xtask bench`: the benchmarks, on private servers of their own.

use std::process::{Command, ExitCode, ExitStatus};

use crate::failure::Failure;
use crate::further_servers;
use crate::held::Held;
use crate::packages;
use crate::services::Scratch;
use crate::steps::step;
use crate::test::{exit_code, passed_on, start_services};
use crate::workspace::Workspace;

pub(crate) fn run(args: &[String]) -> Result<ExitCode, Failure> {
    let extra = passed_on("bench", args)?;
    let workspace = Workspace::find()?;
    let held = Held::until_interrupted()?;
    packages::ensure(&held)?;
    step("build the benchmarks", || {
        let mut cargo = workspace.cargo();
        let features = ["--features", "postroom-bench/kafka"];
        cargo.args(["build", "--release", "-p", "postroom-bench", "-p", "postroom-cli"]).args(features);
        if held.run(&mut cargo)?.success() { Ok(()) } else { Err(Failure::work("the build failed, see above")) }
    })?;
    let further = further_servers::ensure(&workspace, &held)?;
    let scratch = Scratch::create(&workspace)?;
    let measured = start_services(&workspace, &held).and_then(|environment| {
        step("bench", || {
            let mut bench = Command::new(workspace.built("release", "postroom-bench"));
            bench.envs(environment).envs(further).env("POSTROOM_TEST_DIR", &scratch.0).args(extra);
            Ok(held.run(&mut bench)?)
        })
    });
    let all_is_well = measured.as_ref().is_ok_and(ExitStatus::success);
    held.end(scratch, all_is_well);
    Ok(exit_code(measured?))
}
