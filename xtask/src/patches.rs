//! The seeded bugs as patches: one file per bug in `xtask/seeded-bugs/`, against the root of the repository.
//!
//! A patch changes files of the product; it adds none and removes none.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::failure::Failure;
use crate::sources;

/// Where patches are, seen from the root.
pub(crate) const FOLDER: &str = "xtask/seeded-bugs";

/// The patch of one bug.
#[derive(Debug)]
pub(crate) struct Patch {
    name: String,
    file: PathBuf,
}

impl Patch {
    pub(crate) fn of(root: &Path, name: &str) -> Self {
        Self { name: name.to_owned(), file: root.join(FOLDER).join(format!("{name}.patch")) }
    }

    pub(crate) fn file(&self) -> &Path {
        &self.file
    }

    /// What is wrong when the patch does not apply to the sources below `root`, and what to do; `None`: it applies.
    pub(crate) fn stale(&self, root: &Path) -> io::Result<Option<String>> {
        let refused = git_apply(root, &["--check"], &self.file)?;
        Ok(refused.map(|why| {
            let name = &self.name;
            format!(
                "the patch does not apply to the present sources and has to be brought up to date: stage your change, put \
                 the bug into the sources, run `git diff -- crates > {FOLDER}/{name}.patch`, then `git restore crates` ({why})"
            )
        }))
    }

    /// Runs `work` while the sources below `root` have the bug.
    ///
    /// Edge: a process that is killed meanwhile leaves the bug there. So `root` must be a copy, made anew for each run.
    pub(crate) fn while_applied<T>(
        &self,
        root: &Path,
        work: impl FnOnce() -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let patch = sources::read(&self.file)?;
        let clean = changed_files(&patch)
            .map(|name| Ok((root.join(name), fs::read(root.join(name)).map_err(told("read", root.join(name)))?)))
            .collect::<io::Result<Vec<(PathBuf, Vec<u8>)>>>()?;
        if let Some(why) = git_apply(root, &[], &self.file)? {
            return Err(Failure::work(format!("{}: {why}", self.file.display())));
        }
        let worked = self.require_changes(&clean).and_then(|()| work());
        for (file, bytes) in &clean {
            // A new time of change, or cargo would take what it built with the bug for up to date.
            fs::write(file, bytes).map_err(told("write", file.clone()))?;
        }
        worked
    }

    /// A patch that git silently skipped would look like a bug that no test finds.
    fn require_changes(&self, clean: &[(PathBuf, Vec<u8>)]) -> Result<(), Failure> {
        for (file, bytes) in clean {
            if fs::read(file).map_err(told("read", file.clone()))? == *bytes {
                let (patch, file) = (self.file.display(), file.display());
                return Err(Failure::work(format!("{patch} was applied and changed nothing in {file}")));
            }
        }
        if clean.is_empty() {
            return Err(Failure::work(format!("{} names no file; make it with `git diff`", self.file.display())));
        }
        Ok(())
    }
}

/// Bugs without a patch and files without a bug: each with its path and what is wrong.
pub(crate) fn unpaired(root: &Path, bugs: &[&str]) -> io::Result<Vec<(PathBuf, String)>> {
    let folder = root.join(FOLDER);
    let mut unpaired = Vec::new();
    for name in bugs {
        let file = Patch::of(root, name).file;
        if !file.exists() {
            unpaired.push((
                file,
                format!("the patch of the bug {name}, which is on the list in xtask/src/bugs, is missing"),
            ));
        }
    }
    for entry in fs::read_dir(&folder).map_err(told("read", folder.clone()))? {
        let file = entry?.path();
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        if !name.strip_suffix(".patch").is_some_and(|name| bugs.contains(&name)) {
            unpaired.push((file, "no bug on the list in xtask/src/bugs has this patch".to_owned()));
        }
    }
    unpaired.sort();
    Ok(unpaired)
}

/// The files that a patch as `git diff` writes it changes.
fn changed_files(patch: &str) -> impl Iterator<Item = &str> {
    patch.lines().filter_map(|line| Some(line.strip_prefix("diff --git a/")?.split_once(" b/")?.1))
}

/// Applies `patch` to the files below `folder`; returns why git refused, if it did.
///
/// Git must not look for a repository: in a folder inside of one it silently skips every file of the patch that is not below
/// that folder, and our patches name files from the root. Nor may the user's settings loosen what counts as a match.
fn git_apply(folder: &Path, options: &[&str], patch: &Path) -> io::Result<Option<String>> {
    let output = Command::new("git")
        .args(["apply", "--whitespace=nowarn"])
        .args(options)
        .arg(patch)
        .current_dir(folder)
        .env("GIT_DIR", "/dev/null")
        .env_remove("GIT_WORK_TREE")
        .env_remove("GIT_INDEX_FILE")
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .output()
        .map_err(|error| io::Error::new(error.kind(), format!("run git: {error}")))?;
    let said = String::from_utf8_lossy(&output.stderr);
    Ok((!output.status.success()).then(|| said.trim().replace('\n', "; ")))
}

fn told(deed: &'static str, path: PathBuf) -> impl Fn(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{deed} {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_folder::TestFolder;

    const PATCH: &str = "diff --git a/crates/a/src/lib.rs b/crates/a/src/lib.rs\n--- a/crates/a/src/lib.rs\n\
                         +++ b/crates/a/src/lib.rs\n@@ -1,3 +1,3 @@\n one\n-two\n+three\n four\n";

    fn file() -> PathBuf {
        PathBuf::from("crates/a/src/lib.rs")
    }

    #[test]
    fn a_patch_is_applied_inside_of_another_repository_and_undone() {
        let folder = TestFolder::new("patch");
        assert!(Command::new("git").args(["init", "--quiet"]).current_dir(&folder.0).status().unwrap().success());
        let copy = folder.0.join("target/source");
        folder.write("seeded.patch", PATCH);
        folder.write("target/source/crates/a/src/lib.rs", "one\ntwo\nfour\n");
        let patch = Patch { name: "seeded".to_owned(), file: folder.0.join("seeded.patch") };
        assert_eq!(patch.stale(&copy).unwrap(), None);
        let read = || fs::read_to_string(copy.join(file())).unwrap();
        assert_eq!(patch.while_applied(&copy, || Ok(read())).unwrap(), "one\nthree\nfour\n");
        assert_eq!(read(), "one\ntwo\nfour\n");
        let failed: Result<(), Failure> = patch.while_applied(&copy, || Err(Failure::work("no")));
        assert!(failed.is_err());
        assert_eq!(read(), "one\ntwo\nfour\n", "also after a failure");
    }

    #[test]
    fn a_stale_patch_is_told_with_its_name_and_changes_nothing() {
        let folder = TestFolder::new("stale");
        folder.write(&format!("{FOLDER}/seeded.patch"), PATCH);
        folder.write("crates/a/src/lib.rs", "one\nsomething else\nfour\n");
        let patch = Patch::of(&folder.0, "seeded");
        let why = patch.stale(&folder.0).unwrap().unwrap();
        assert!(why.contains("xtask/seeded-bugs/seeded.patch") && why.contains("brought up to date"), "{why}");
        let failure = patch.while_applied(&folder.0, || Ok(())).unwrap_err().to_string();
        assert!(failure.contains("seeded.patch"), "{failure}");
        assert_eq!(fs::read_to_string(folder.0.join(file())).unwrap(), "one\nsomething else\nfour\n");
    }

    #[test]
    fn bugs_and_patches_are_the_same_set() {
        let folder = TestFolder::new("unpaired");
        folder.write(&format!("{FOLDER}/both.patch"), PATCH);
        folder.write(&format!("{FOLDER}/patch_only.patch"), PATCH);
        folder.write(&format!("{FOLDER}/notes.md"), "");
        let found = unpaired(&folder.0, &["both", "bug_only"]).unwrap();
        let names: Vec<_> = found.iter().map(|(file, _)| file.file_name().unwrap().to_str().unwrap()).collect();
        assert_eq!(names, ["bug_only.patch", "notes.md", "patch_only.patch"]);
    }

    #[test]
    fn a_patch_says_which_files_it_changes() {
        let two = format!("{PATCH}diff --git a/Cargo.toml b/Cargo.toml\n--- a/Cargo.toml\n+++ b/Cargo.toml\n");
        assert_eq!(changed_files(&two).collect::<Vec<_>>(), ["crates/a/src/lib.rs", "Cargo.toml"]);
    }
}
