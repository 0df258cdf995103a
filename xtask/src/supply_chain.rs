//! `cargo xtask supply-chain`: licences and sources of every dependency, a bill of materials, each Cargo feature by itself, and the
//! documentation of the library without a warning.

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use crate::failure::Failure;
use crate::held::Held;
use crate::steps::step;
use crate::workspace::Workspace;

/// Tools, at exact versions, so that a new one finds nothing new by itself.
const TOOLS: [(&str, &str); 2] = [("cargo-deny", "0.20.2"), ("cargo-cyclonedx", "0.5.9")];

/// What applications embed, and its features: none, each, all.
const FEATURES: [(&str, &[&str]); 6] = [
    ("postroom", &["", "trace", "crash-points", "trace,crash-points"]),
    ("postroom-postgres", &["", "tokio-postgres", "sqlx", "sqlx-08", "sqlx,sqlx-08", "tokio-postgres,sqlx,sqlx-08"]),
    ("postroom-sqlite", &["", "rusqlite", "sqlx", "rusqlite,sqlx"]),
    ("postroom-brokers", &["", "kafka", "nats", "rabbitmq"]),
    ("postroom-archive", &["", "parquet", "s3"]),
    ("postroom-cli", &["", "kafka", "otlp", "parquet", "s3"]),
];

pub(crate) fn run(args: &[String]) -> Result<ExitCode, Failure> {
    if let Some(unknown) = args.first() {
        return Err(Failure::usage(format!("`{unknown}` is not understood; supply-chain takes no arguments")));
    }
    let workspace = Workspace::find()?;
    let held = Held::until_interrupted()?;
    let tools = workspace.target.join("tools");
    for (tool, version) in TOOLS {
        let installed = tools.join(format!("{tool}-{version}"));
        if !installed.join("bin").join(tool).is_file() {
            step(&format!("install {tool} {version} into {}", installed.display()), || {
                let mut cargo = workspace.cargo();
                // They run once; optimising them takes longer than they do.
                cargo.args(["install", "--quiet", "--locked", "--debug", "--root"]).arg(&installed);
                cargo.arg(format!("{tool}@{version}"));
                ended_well(&held, &mut cargo, "install a tool")
            })?;
        }
    }
    let tool = |index: usize| -> PathBuf {
        let (name, version) = TOOLS[index];
        tools.join(format!("{name}-{version}")).join("bin").join(name)
    };
    step("licences, sources and banned crates", || {
        let mut deny = Command::new(tool(0));
        deny.current_dir(&workspace.root).args([
            "--all-features",
            "--log-level",
            "error",
            "check",
            "licenses",
            "bans",
            "sources",
        ]);
        ended_well(&held, &mut deny, "find every dependency allowed by deny.toml")
    })?;
    step("a bill of materials of the program", || {
        let mut bill = Command::new(tool(1));
        bill.current_dir(&workspace.root).arg("cyclonedx").args(["--format", "json", "--all-features"]);
        bill.args(["--manifest-path", "crates/postroom-cli/Cargo.toml", "--override-filename", "postroom.cdx"]);
        ended_well(&held, &mut bill, "write the bill of materials")?;
        let from = workspace.root.join("crates/postroom-cli/postroom.cdx.json");
        let to = workspace.target.join("postroom.cdx.json");
        std::fs::copy(&from, &to)?;
        // It writes one for each member of the workspace.
        remove_bills(&workspace)?;
        eprintln!("==> {}", to.display());
        Ok::<(), Failure>(())
    })?;
    for (package, features) in FEATURES {
        for features in features {
            step(&format!("{package} with features [{features}]"), || {
                let mut cargo = workspace.cargo();
                cargo.args(["clippy", "--quiet", "-p", package, "--no-default-features", "--features", features]);
                cargo.args(["--", "-D", "warnings"]);
                ended_well(&held, &mut cargo, "compile it without a warning")
            })?;
        }
    }
    step("documentation", || {
        let mut cargo = workspace.cargo();
        cargo.args(["doc", "--quiet", "--workspace", "--no-deps", "--all-features"]).env("RUSTDOCFLAGS", "-D warnings");
        ended_well(&held, &mut cargo, "document it without a warning")
    })?;
    held.let_go();
    Ok(ExitCode::SUCCESS)
}

fn ended_well(held: &Held, command: &mut Command, what: &str) -> Result<(), Failure> {
    if held.run(command)?.success() { Ok(()) } else { Err(Failure::work(format!("failed to {what}, see above"))) }
}

fn remove_bills(workspace: &Workspace) -> Result<(), Failure> {
    for parent in ["bench", "xtask", "crates", "examples"] {
        let parent = workspace.root.join(parent);
        let members = std::fs::read_dir(&parent)?.filter_map(Result::ok).map(|member| member.path());
        for folder in members.chain([parent.clone()]) {
            let bill = folder.join("postroom.cdx.json");
            if bill.is_file() {
                std::fs::remove_file(bill)?;
            }
        }
    }
    Ok(())
}
