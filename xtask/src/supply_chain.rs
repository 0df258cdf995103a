//! `cargo xtask supply-chain`: licences and sources of every dependency, each Cargo feature by itself, and the documentation of the library
//! without a warning. Dependencies that were looked at before are not looked at again. With `--all`, they are, and so is each feature of the
//! program by itself. With `--bill`, a bill of materials, which is for a release: it finds nothing, and its tool takes minutes to compile.

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use crate::failure::Failure;
use crate::held::Held;
use crate::steps::step;
use crate::workspace::Workspace;

/// Tools, at exact versions, so that a new one finds nothing new by itself.
const DENY: (&str, &str) = ("cargo-deny", "0.20.2");
/// What `Cargo.lock` and `deny.toml` were when the dependencies were found allowed, as git names contents.
const ALLOWED: &str = ".ci/allowed-dependencies";
const CYCLONEDX: (&str, &str) = ("cargo-cyclonedx", "0.5.9");

/// What applications embed, and its features: none, each, all.
const FEATURES: [(&str, &[&str]); 6] = [
    ("postroom", &["", "trace", "crash-points", "trace,crash-points"]),
    ("postroom-postgres", &["", "tokio-postgres", "sqlx", "sqlx-08", "sqlx,sqlx-08", "tokio-postgres,sqlx,sqlx-08"]),
    ("postroom-sqlite", &["", "rusqlite", "sqlx", "rusqlite,sqlx"]),
    ("postroom-brokers", &["", "amqp10", "http", "kafka", "mqtt", "nats", "rabbitmq", "redis", "smtp"]),
    ("postroom-archive", &["", "parquet", "s3"]),
    ("postroom-cli", &["", "amqp10,kafka,mqtt,smtp"]),
];

/// Further ones, for `--all`: what they add is compiled by itself above, or is one dependency more.
const FURTHER: (&str, &[&str]) =
    ("postroom-cli", &["amqp10", "kafka", "mqtt", "mssql", "otlp", "parquet", "s3", "smtp"]);

pub(crate) fn run(args: &[String]) -> Result<ExitCode, Failure> {
    let unknown = args.iter().find(|arg| !["--all", "--bill"].contains(&arg.as_str()));
    if let Some(unknown) = unknown {
        return Err(Failure::usage(format!(
            "`{unknown}` is not understood; supply-chain takes --all, --bill, or nothing"
        )));
    }
    let asked = |what: &str| args.iter().any(|arg| arg == what);
    let (with_all, with_bill) = (asked("--all"), asked("--bill"));
    let workspace = Workspace::find()?;
    let held = Held::until_interrupted()?;
    allow_dependencies(&workspace, &held, with_all)?;
    if with_bill {
        write_bill(&workspace, &held)?;
    } else {
        eprintln!("==> left out: the bill of materials (cargo xtask supply-chain --bill)");
    }
    if !with_all {
        eprintln!("==> left out: each feature of the program by itself (cargo xtask supply-chain --all)");
    }
    for (package, features) in FEATURES.into_iter().chain(with_all.then_some(FURTHER)) {
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

/// Licences, sources and banned crates. What was found before is known by the files that it follows from: the tool takes minutes to compile.
fn allow_dependencies(workspace: &Workspace, held: &Held, anyway: bool) -> Result<(), Failure> {
    let record = workspace.root.join(ALLOWED);
    let mut git = Command::new("git");
    let now = git.current_dir(&workspace.root).args(["hash-object", "Cargo.lock", "deny.toml"]).output()?;
    let now = String::from_utf8_lossy(&now.stdout).into_owned();
    if !anyway && !now.is_empty() && std::fs::read_to_string(&record).is_ok_and(|before| before == now) {
        eprintln!(
            "==> left out: licences and sources of the dependencies, which are the ones that {ALLOWED} says were allowed"
        );
        return Ok(());
    }
    let deny = installed(workspace, held, DENY)?;
    step("licences, sources and banned crates", || {
        let mut deny = Command::new(deny);
        deny.current_dir(&workspace.root).args([
            "--all-features",
            "--log-level",
            "error",
            "check",
            "licenses",
            "bans",
            "sources",
        ]);
        ended_well(held, &mut deny, "find every dependency allowed by deny.toml")
    })?;
    // Without git nobody knows what they are.
    if !now.is_empty() {
        std::fs::write(record, now)?;
    }
    Ok(())
}

/// Where a tool is; it is compiled where it is missing.
fn installed(workspace: &Workspace, held: &Held, (tool, version): (&str, &str)) -> Result<PathBuf, Failure> {
    let folder = workspace.target.join("tools").join(format!("{tool}-{version}"));
    let program = folder.join("bin").join(tool);
    if !program.is_file() {
        step(&format!("install {tool} {version} into {}", folder.display()), || {
            let mut cargo = workspace.cargo();
            // They run once; optimising them takes longer than they do.
            cargo.args(["install", "--quiet", "--locked", "--debug", "--root"]).arg(&folder);
            cargo.arg(format!("{tool}@{version}"));
            ended_well(held, &mut cargo, "install a tool")
        })?;
    }
    Ok(program)
}

fn write_bill(workspace: &Workspace, held: &Held) -> Result<(), Failure> {
    let cyclonedx = installed(workspace, held, CYCLONEDX)?;
    step("a bill of materials of the program", || {
        let mut bill = Command::new(cyclonedx);
        bill.current_dir(&workspace.root).arg("cyclonedx").args(["--format", "json", "--all-features"]);
        bill.args(["--manifest-path", "crates/postroom-cli/Cargo.toml", "--override-filename", "postroom.cdx"]);
        ended_well(held, &mut bill, "write the bill of materials")?;
        let from = workspace.root.join("crates/postroom-cli/postroom.cdx.json");
        let to = workspace.target.join("postroom.cdx.json");
        std::fs::copy(&from, &to)?;
        // It writes one for each member of the workspace.
        remove_bills(workspace)?;
        eprintln!("==> {}", to.display());
        Ok(())
    })
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
