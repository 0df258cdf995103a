//! The files of the workspace.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The files below `folder` with one of these endings, sorted; build output and hidden folders are left out.
pub(crate) fn files(folder: &Path, endings: &[&str]) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        let told = |error: io::Error| io::Error::new(error.kind(), format!("read {}: {error}", folder.display()));
        for entry in fs::read_dir(&folder).map_err(told)? {
            let path = entry.map_err(told)?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if path.is_dir() {
                if name != "target" && !name.starts_with('.') {
                    folders.push(path);
                }
            } else if endings.iter().any(|ending| name.ends_with(ending)) {
                found.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}

pub(crate) fn read(file: &Path) -> io::Result<String> {
    fs::read_to_string(file).map_err(|error| io::Error::new(error.kind(), format!("read {}: {error}", file.display())))
}
