//! A small file system in memory, whose disk can really be full.

use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};

use super::{folder, ports};

/// Unmounts when its pipe closes, which also happens when we die.
const WATCH: &str = r#"
cat > /dev/null
umount -l -- "$1"
rmdir -- "$1"
"#;

/// A tmpfs of its own. Dropping it unmounts it and removes its folder, and so does a shell when the whole process dies.
#[derive(Debug)]
pub struct Tmpfs {
    dir: PathBuf,
    watchdog: Child,
    pipe: Option<ChildStdin>,
}

impl Tmpfs {
    /// Mounts a tmpfs of so many KiB over `dir`, which must be absent or empty.
    ///
    /// `None` where mounting is not allowed: we are not root, or root in a container without that right. A test then has
    /// to say that it showed nothing.
    ///
    /// # Errors
    /// When the folder cannot be created, or `mount` fails for another reason than a missing right.
    pub fn mount(dir: &Path, kib: u64) -> io::Result<Option<Self>> {
        if fs::metadata("/proc/self")?.uid() != 0 {
            return Ok(None);
        }
        folder::create_empty(dir)?;
        let dir = fs::canonicalize(dir)?;
        let output = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={kib}k,mode=0755"), "postroom-test"])
            .arg(&dir)
            .stdin(Stdio::null())
            .output()?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            fs::remove_dir(&dir)?;
            if said.contains("permission denied") {
                return Ok(None);
            }
            return Err(io::Error::other(format!("mount a tmpfs on {}: {said}", dir.display())));
        }
        let watchdog = Command::new("sh")
            .args(["-c", WATCH, "postroom-tmpfs-watchdog"])
            .arg(&dir)
            .current_dir("/")
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        match watchdog {
            Ok(mut watchdog) => {
                let pipe = watchdog.stdin.take();
                Ok(Some(Self { dir, watchdog, pipe }))
            }
            Err(error) => {
                Command::new("umount").arg(&dir).status()?;
                Err(io::Error::new(error.kind(), format!("start the watchdog `sh`: {error}")))
            }
        }
    }

    /// Whether [`mount`](Self::mount) would be allowed; tried out.
    ///
    /// # Errors
    /// As for `mount`.
    pub fn may_mount() -> io::Result<bool> {
        let dir = std::env::temp_dir().join(format!("postroom-tmpfs-{}-{}", std::process::id(), ports::free()?));
        Self::mount(&dir, 64).map(|mounted| mounted.is_some())
    }

    /// Its folder.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Gives it another size while it is in use.
    ///
    /// # Errors
    /// When the kernel refuses, for example because more than that is in use.
    pub fn resize(&self, kib: u64) -> io::Result<()> {
        let status = Command::new("mount").args(["-o", &format!("remount,size={kib}k")]).arg(&self.dir).status()?;
        if status.success() {
            return Ok(());
        }
        Err(io::Error::other(format!(
            "give the tmpfs {} a size of {kib} KiB: mount ended with {status}",
            self.dir.display()
        )))
    }

    /// Writes a file until nothing more fits.
    ///
    /// # Errors
    /// When writing fails for another reason than a full disk.
    pub fn fill(&self) -> io::Result<()> {
        let mut ballast = fs::OpenOptions::new().create(true).append(true).open(self.ballast())?;
        match io::copy(&mut io::repeat(b'.').take(u64::MAX), &mut ballast) {
            Err(error) if error.kind() == io::ErrorKind::StorageFull => Ok(()),
            Err(error) => Err(error),
            Ok(_) => Err(io::Error::other("fill the tmpfs: it has no end")),
        }
    }

    /// Removes what [`fill`](Self::fill) wrote; does nothing when there is none.
    ///
    /// # Errors
    /// When the file cannot be removed.
    pub fn free(&self) -> io::Result<()> {
        match fs::remove_file(self.ballast()) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    fn ballast(&self) -> PathBuf {
        self.dir.join("ballast")
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        self.pipe = None;
        let _ = self.watchdog.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_full_until_it_is_freed_or_larger_and_leaves_nothing_behind() {
        let dir = std::env::temp_dir().join(format!("postroom-tmpfs-{}", std::process::id()));
        let Some(tmpfs) = Tmpfs::mount(&dir, 64).unwrap() else {
            eprintln!("SKIPPED: a tmpfs can only be mounted by root; nothing was shown");
            return;
        };
        let file = tmpfs.dir().join("file");
        let write = || fs::write(&file, [b'x'; 10_000]);
        write().unwrap();
        fs::remove_file(&file).unwrap();
        tmpfs.fill().unwrap();
        assert_eq!(write().unwrap_err().kind(), io::ErrorKind::StorageFull);
        tmpfs.resize(128).unwrap();
        write().unwrap();
        fs::remove_file(&file).unwrap();
        tmpfs.fill().unwrap();
        assert_eq!(write().unwrap_err().kind(), io::ErrorKind::StorageFull);
        tmpfs.free().unwrap();
        tmpfs.free().unwrap();
        write().unwrap();
        drop(tmpfs);
        assert!(!dir.exists());
    }
}
