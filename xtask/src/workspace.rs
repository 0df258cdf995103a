//! Where the workspace and its build output are, and how cargo is called.

use std::env;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

#[derive(Debug)]
pub(crate) struct Workspace {
    pub(crate) root: PathBuf,
    pub(crate) target: PathBuf,
}

impl Workspace {
    /// Asks cargo, because `CARGO_TARGET_DIR` and configuration files may move the build output.
    pub(crate) fn find() -> io::Result<Self> {
        let root = root();
        let output = Command::new(program())
            .args(["metadata", "--format-version", "1", "--no-deps"])
            .current_dir(&root)
            .output()
            .map_err(|error| io::Error::new(error.kind(), format!("run `cargo metadata`: {error}")))?;
        let said = String::from_utf8_lossy(&output.stdout);
        let target = target_directory(&said).ok_or_else(|| {
            let error = String::from_utf8_lossy(&output.stderr);
            io::Error::other(format!("read `target_directory` from `cargo metadata`, which said:\n{error}"))
        })?;
        Ok(Self { root, target })
    }

    /// A cargo that works on this workspace, and builds into its build output.
    pub(crate) fn cargo(&self) -> Command {
        let mut command = Command::new(program());
        command.current_dir(&self.root).env("CARGO_TARGET_DIR", &self.target);
        command
    }

    /// The built program `name` of a profile, e.g. `debug`.
    pub(crate) fn built(&self, profile: &str, name: &str) -> PathBuf {
        self.target.join(profile).join(name)
    }
}

/// The folder that holds the workspace's `Cargo.toml`.
pub(crate) fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_owned()
}

fn program() -> OsString {
    env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo"))
}

/// One field of a document that cargo wrote does not earn a JSON parser.
fn target_directory(metadata: &str) -> Option<PathBuf> {
    let (_, rest) = metadata.split_once("\"target_directory\":\"")?;
    let (path, _) = rest.split_once('"')?;
    (!path.contains('\\')).then(|| PathBuf::from(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_target_directory_is_read_from_metadata() {
        let metadata = r#"{"packages":[],"target_directory":"/a/b c","version":1}"#;
        assert_eq!(target_directory(metadata), Some(PathBuf::from("/a/b c")));
        assert_eq!(target_directory("{}"), None);
    }
}
