//! A copy of the sources, in which bugs are seeded: the work tree never has one.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::failure::Failure;

/// Makes `copy` the same as the sources below `root`: what git tracks, and what it neither tracks nor ignores. Whatever an
/// interrupted run left in it is gone afterwards.
///
/// Only what differs is written, because cargo builds again whatever is newer than its output.
pub(crate) fn bring_into_step(root: &Path, copy: &Path) -> Result<(), Failure> {
    let files = listed(root)?;
    fs::create_dir_all(copy).map_err(told("create", copy))?;
    remove_others(copy, &files, Path::new(""))?;
    for file in &files {
        copy_if_different(&root.join(file), &copy.join(file))?;
    }
    Ok(())
}

/// The sources, seen from `root`. What was deleted in the work tree is left out, and so are repositories within.
fn listed(root: &Path) -> Result<BTreeSet<PathBuf>, Failure> {
    let output = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root)
        // A hook of git that runs us has set these; they need not be about `root`.
        .env_remove("GIT_DIR")
        .env_remove("GIT_WORK_TREE")
        .env_remove("GIT_INDEX_FILE")
        .output()
        .map_err(|error| io::Error::new(error.kind(), format!("run git: {error}")))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(Failure::work(format!("git cannot list the sources in {}: {said}", root.display())));
    }
    let names = output.stdout.split(|byte| *byte == 0).filter(|name| !name.is_empty());
    let files = names.map(|name| PathBuf::from(OsStr::from_bytes(name)));
    Ok(files.filter(|file| root.join(file).is_file()).collect())
}

/// Removes from `folder` in the copy whatever is no source any more. An empty folder that is left would be one more member for
/// the workspace's `crates/*`.
fn remove_others(copy: &Path, files: &BTreeSet<PathBuf>, folder: &Path) -> io::Result<()> {
    let here = copy.join(folder);
    for entry in fs::read_dir(&here).map_err(told("read", &here))? {
        let entry = entry?;
        let (name, path) = (folder.join(entry.file_name()), entry.path());
        if !entry.file_type()?.is_dir() {
            if !files.contains(&name) {
                fs::remove_file(&path).map_err(told("remove", &path))?;
            }
        } else if files.iter().any(|file| file.starts_with(&name) && *file != name) {
            remove_others(copy, files, &name)?;
        } else {
            fs::remove_dir_all(&path).map_err(told("remove", &path))?;
        }
    }
    Ok(())
}

fn copy_if_different(from: &Path, to: &Path) -> io::Result<()> {
    let source = fs::read(from).map_err(told("read", from))?;
    if fs::read(to).is_ok_and(|present| present == source) {
        return Ok(());
    }
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder).map_err(told("create", folder))?;
    }
    fs::write(to, source).map_err(told("write", to))
}

fn told(deed: &'static str, path: &Path) -> impl Fn(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{deed} {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_folder::TestFolder;

    fn git(folder: &Path, args: &[&str]) {
        assert!(Command::new("git").args(args).current_dir(folder).status().unwrap().success());
    }

    #[test]
    fn the_copy_follows_the_work_tree_and_keeps_what_is_the_same() {
        let folder = TestFolder::new("copy");
        let (root, copy) = (folder.0.join("root"), folder.0.join("root/target/copy"));
        folder.write("root/.gitignore", "/target\n");
        folder.write("root/crates/a/lib.rs", "a");
        folder.write("root/crates/b/lib.rs", "b");
        folder.write("root/deleted.rs", "");
        git(&root, &["init", "--quiet"]);
        git(&root, &["add", "."]);
        folder.write("root/crates/c/untracked.rs", "c");
        fs::remove_file(root.join("deleted.rs")).unwrap();
        bring_into_step(&root, &copy).unwrap();
        let names = [".gitignore", "crates/a/lib.rs", "crates/b/lib.rs", "crates/c/untracked.rs"];
        assert_eq!(all(&copy), names.map(PathBuf::from).into());

        let changed_at = |name: &str| fs::metadata(copy.join(name)).unwrap().modified().unwrap();
        let before = changed_at("crates/a/lib.rs");
        // A run that was interrupted left a bug, and a test left a file.
        folder.write("root/target/copy/crates/b/lib.rs", "a bug");
        folder.write("root/target/copy/crates/a/left/over.rs", "");
        fs::remove_dir_all(root.join("crates/c")).unwrap();
        bring_into_step(&root, &copy).unwrap();
        assert_eq!(all(&copy), [".gitignore", "crates/a/lib.rs", "crates/b/lib.rs"].map(PathBuf::from).into());
        assert!(!copy.join("crates/c").exists() && !copy.join("crates/a/left").exists());
        assert_eq!(fs::read(copy.join("crates/b/lib.rs")).unwrap(), b"b");
        assert_eq!(changed_at("crates/a/lib.rs"), before, "what is the same is not written");
    }

    #[test]
    fn a_folder_in_the_place_of_a_file_gives_way_and_the_other_way_round() {
        let folder = TestFolder::new("places");
        let (root, copy) = (folder.0.join("root"), folder.0.join("copy"));
        folder.write("root/one", "");
        folder.write("root/two/file", "");
        folder.write("copy/one/file", "");
        folder.write("copy/two", "");
        git(&root, &["init", "--quiet"]);
        bring_into_step(&root, &copy).unwrap();
        assert_eq!(all(&copy), ["one", "two/file"].map(PathBuf::from).into());
    }

    fn all(copy: &Path) -> BTreeSet<PathBuf> {
        let mut found = BTreeSet::new();
        let mut folders = vec![copy.to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                } else {
                    found.insert(path.strip_prefix(copy).unwrap().to_owned());
                }
            }
        }
        found
    }
}
