//! `cargo xtask sim`: the engine in its simulated world, one seed or many.

use std::process::ExitCode;

use crate::failure::Failure;
use crate::held::Held;
use crate::test::exit_code;
use crate::workspace::Workspace;

pub(crate) fn run(args: &[String]) -> Result<ExitCode, Failure> {
    let seeds = match args.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        [] => "0..3000".to_owned(),
        ["--seed", seed] => {
            let seed: u64 = seed.parse().map_err(|_| Failure::usage("--seed must be followed by a whole number"))?;
            format!("{seed}..{}", seed + 1)
        }
        ["--seeds", range] if range.split_once("..").is_some() => (*range).to_owned(),
        _ => return Err(Failure::usage("sim takes --seed N or --seeds FROM..TO")),
    };
    let workspace = Workspace::find()?;
    let held = Held::until_interrupted()?;
    let mut cargo = workspace.cargo();
    cargo.args(["test", "-p", "postroom-relay", "--test", "sim", "--", "--nocapture"]);
    cargo.env("POSTROOM_SIM_SEEDS", seeds);
    Ok(exit_code(held.run(&mut cargo)?))
}
