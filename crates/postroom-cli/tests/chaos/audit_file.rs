//! The file to which the relays of a cell write everything a second time, on a small disk.

use std::path::{Path, PathBuf};

use postroom_testkit::judge::Line;
use postroom_testkit::services::Tmpfs;

/// More than the lines of any schedule need, and little enough to be filled in a moment.
const DISK_KIB: u64 = 256 * 1024;

pub struct AuditFile {
    disk: Tmpfs,
    /// How often it was rotated; each time another file is left behind.
    rotated: usize,
}

impl AuditFile {
    /// None where only root may mount a disk, and we are not root.
    pub fn on_a_small_disk(dir: &Path) -> Option<Self> {
        let disk = Tmpfs::mount(&dir.join("disk"), DISK_KIB).unwrap();
        if disk.is_none() {
            println!("SKIPPED: a small disk can only be mounted by root; nothing is shown about file sinks");
        }
        disk.map(|disk| Self { disk, rotated: 0 })
    }

    pub fn path(&self) -> PathBuf {
        self.disk.dir().join("audit.jsonl")
    }

    fn rotated(&self, number: usize) -> PathBuf {
        self.disk.dir().join(format!("audit-{number}.jsonl"))
    }

    pub fn fill_disk(&self) {
        self.disk.fill().unwrap();
    }

    pub fn free_disk(&self) {
        self.disk.free().unwrap();
    }

    /// Renames the file, whoever writes to it; false: there was none yet.
    pub fn rotate(&mut self) -> bool {
        let renamed = std::fs::rename(self.path(), self.rotated(self.rotated + 1)).is_ok();
        self.rotated += usize::from(renamed);
        renamed
    }

    /// Every file, oldest first; the newest may not have been begun.
    fn files(&self) -> Vec<PathBuf> {
        let rotated = (1..=self.rotated).map(|number| self.rotated(number));
        rotated.chain([self.path()].into_iter().filter(|path| path.exists())).collect()
    }

    /// Every line of every file, read by nobody's code but serde's.
    pub fn lines(&self) -> Vec<Vec<Line>> {
        self.files()
            .iter()
            .map(|file| std::fs::read(file).unwrap().split_inclusive(|byte| *byte == b'\n').map(read).collect())
            .collect()
    }

    /// For whoever looks into a violation: the disk is gone by then.
    pub fn keep_a_copy(&self, dir: &Path) {
        for file in self.files() {
            std::fs::copy(&file, dir.join(file.file_name().unwrap())).unwrap();
        }
    }
}

fn read(line: &[u8]) -> Line {
    let object = serde_json::from_slice::<serde_json::Value>(line).ok();
    let id = object.as_ref().and_then(|object| object.get("id")).and_then(|id| id.as_str());
    match id {
        Some(id) => Line::Message(id.to_owned()),
        None if line.ends_with(b"\n") => Line::Broken,
        None => Line::Torn,
    }
}
