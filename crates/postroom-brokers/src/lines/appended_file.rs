//! A file that whole batches of lines are appended to: all of a batch, synced to the disk, or nothing of it.
//!
//! Blocking. Every write happens under an advisory lock on the file, so that several processes may share it, and to the
//! file that the path names at that moment, so that the file may be rotated or deleted at any time.

use std::fs::{self, File};
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::line;
use super::write::{counted, given_up, told};

/// Who rotates or deletes the file more often than this during one write is not a rotation.
const REOPENED_MAX: usize = 10;
/// How much is read at once when the beginning of the last line is looked for.
const STEP: u64 = 64 * 1024;

pub(super) struct AppendedFile {
    path: PathBuf,
    open: Option<File>,
}

impl AppendedFile {
    pub(super) fn new(path: PathBuf) -> Self {
        Self { path, open: None }
    }

    /// Opens the file if need be. Says nothing about the space on its disk: only a write shows that.
    pub(super) fn probe(&mut self) -> io::Result<()> {
        let file = self.named()?;
        self.open = Some(file);
        Ok(())
    }

    pub(super) fn close(&mut self) {
        self.open = None;
    }

    /// Appends all of `text`, which ends with a newline, and syncs it. After an error nothing of it is left in the file,
    /// unless even that failed; then the next write cuts off what is not a whole line.
    pub(super) fn append(&mut self, text: &[u8], abandoned: &dyn Fn() -> bool) -> io::Result<()> {
        for _ in 0..REOPENED_MAX {
            let file = self.locked()?;
            if abandoned() {
                return Err(given_up());
            }
            // After an error the file is closed, which unlocks it, and opened anew by whoever comes next.
            let end = write_whole(&file, text, abandoned)?;
            let about = file.metadata()?;
            let deleted = about.nlink() == 0;
            // A rotation that truncates instead of renaming may have taken the new lines along.
            let truncated = about.len() < end;
            // An error here does not undo what is on the disk; closing the file unlocks it as well.
            let unlocked = file.unlock();
            if !deleted && !truncated {
                self.open = unlocked.is_ok().then_some(file);
                return Ok(());
            }
        }
        Err(io::Error::other(format!("it was deleted or truncated {REOPENED_MAX} times while it was written to")))
    }

    /// The file that the path names now, locked.
    fn locked(&mut self) -> io::Result<File> {
        for _ in 0..REOPENED_MAX {
            let file = self.named()?;
            file.lock().map_err(|error| told(&error, "lock it"))?;
            // Whoever held the lock may have rotated it.
            if names(&self.path, &file)? {
                return Ok(file);
            }
        }
        Err(io::Error::other(format!("the path named another file {REOPENED_MAX} times in a row")))
    }

    /// The file that the path names now; the one that is open, if it still is that.
    fn named(&mut self) -> io::Result<File> {
        match self.open.take() {
            Some(file) if names(&self.path, &file)? => Ok(file),
            _ => open(&self.path),
        }
    }
}

fn open(path: &Path) -> io::Result<File> {
    let file = File::options().create(true).append(true).read(true).open(path).map_err(|error| {
        let hint = match error.kind() {
            io::ErrorKind::NotFound => " (its folder must exist)",
            io::ErrorKind::PermissionDenied => " (the relay must be allowed to read, write and create it)",
            _ => "",
        };
        told(&error, format!("open it to append{hint}"))
    })?;
    if !file.metadata()?.is_file() {
        let why = "it is not a regular file, so it may not keep what is written; name a file, or use kind = \"stdout\"";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    sync_folder(path)?;
    Ok(file)
}

/// The name of a new file is durable when its folder is synced. Which process created it is not known, so always.
fn sync_folder(path: &Path) -> io::Result<()> {
    let path = fs::canonicalize(path)?;
    let Some(folder) = path.parent() else { return Ok(()) };
    match File::open(folder).and_then(|folder| folder.sync_all()) {
        // A folder that may be entered but not listed, and file systems whose folders cannot be synced.
        Err(error) if matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::InvalidInput) => Ok(()),
        other => other.map_err(|error| told(&error, "sync its folder")),
    }
}

fn names(path: &Path, file: &File) -> io::Result<bool> {
    match fs::metadata(path) {
        Ok(named) => {
            let open = file.metadata()?;
            Ok((named.dev(), named.ino()) == (open.dev(), open.ino()))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(told(&error, "find it")),
    }
}

/// Appends and syncs, or cuts the file back. Returns where the text ends.
fn write_whole(file: &File, text: &[u8], abandoned: &dyn Fn() -> bool) -> io::Result<u64> {
    let newline_first = end_last_line(file).map_err(|error| told(&error, "read its last line"))?;
    let begin = file.metadata()?.len();
    let mut written = 0;
    let newline: &[u8] = if newline_first { b"\n" } else { b"" };
    let outcome = counted(file, newline, &mut written, abandoned)
        .and_then(|()| counted(file, text, &mut written, abandoned))
        .and_then(|()| file.sync_data());
    match outcome {
        Ok(()) => Ok(begin + written),
        Err(error) => {
            let what = format!("append {} bytes", text.len());
            // More than we wrote: somebody without the lock has written too, and that must stay.
            let only_ours = file.metadata()?.len() == begin + written;
            if only_ours {
                file.set_len(begin).map_err(|cut| told(&cut, format!("{what}: {error}; truncate it")))?;
            }
            Err(told(&error, what))
        }
    }
}

/// What follows must not be glued to half a line. A last line that is a torn one of ours is cut off: its message does not
/// count as stored, so it is written again. Any other, which may be somebody else's, gets a newline: true.
fn end_last_line(file: &File) -> io::Result<bool> {
    let length = file.metadata()?.len();
    let Some(last) = length.checked_sub(1) else { return Ok(false) };
    let mut byte = [0];
    file.read_exact_at(&mut byte, last)?;
    if byte == *b"\n" {
        return Ok(false);
    }
    let begin = last_line(file, length)?;
    let torn = is_torn(file, begin, length)?;
    if torn {
        tracing::warn!(bytes = length - begin, "the file's last line is incomplete because of a crash; removing it");
        file.set_len(begin)?;
    }
    Ok(!torn)
}

/// Where the last line begins.
fn last_line(file: &File, length: u64) -> io::Result<u64> {
    let mut end = length;
    while end > 0 {
        let begin = end.saturating_sub(STEP);
        let mut bytes = vec![0; usize::try_from(end - begin).map_err(io::Error::other)?];
        file.read_exact_at(&mut bytes, begin)?;
        if let Some(newline) = bytes.iter().rposition(|byte| *byte == b'\n') {
            return Ok(begin + newline as u64 + 1);
        }
        end = begin;
    }
    Ok(0)
}

/// Whether this is the beginning of a line of ours, but not a whole one.
fn is_torn(mut file: &File, begin: u64, end: u64) -> io::Result<bool> {
    let mut first = [0; line::BEGINNING.len()];
    let length = first.len().min(usize::try_from(end - begin).unwrap_or(usize::MAX));
    let first = &mut first[..length];
    file.read_exact_at(first, begin)?;
    if !line::may_be_ours(first) {
        return Ok(false);
    }
    // The file is open to append, so where it is read from does not matter to any write.
    file.seek(SeekFrom::Start(begin))?;
    match serde_json::from_reader::<_, serde::de::IgnoredAny>(BufReader::new(file.take(end - begin))) {
        Ok(_) => Ok(false),
        Err(error) if error.is_io() => Err(error.into()),
        Err(_) => Ok(true),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    const NEVER: &dyn Fn() -> bool = &|| false;

    /// A folder that is removed at the end.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let dir = std::env::temp_dir().join(format!("postroom-lines-{}-{name}", std::process::id()));
            fs::create_dir_all(&dir).unwrap();
            Self(dir)
        }

        fn file(&self) -> PathBuf {
            self.0.join("out.jsonl")
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn ours(n: u32) -> String {
        let message = postroom::Message::new("orders", "order.placed", format!("payload {n}"));
        String::from_utf8(line::of(&message).unwrap()).unwrap()
    }

    #[test]
    fn a_torn_line_of_ours_is_cut_off_wherever_it_was_torn() {
        let scratch = Scratch::new("torn");
        let (first, second) = (ours(1), ours(2));
        for length in 1..second.len() {
            fs::write(scratch.file(), format!("{first}\n{}", &second[..length])).unwrap();
            AppendedFile::new(scratch.file()).append(b"next\n", NEVER).unwrap();
            assert_eq!(fs::read_to_string(scratch.file()).unwrap(), format!("{first}\nnext\n"));
        }
    }

    #[test]
    fn a_last_line_that_is_whole_or_not_ours_gets_its_newline() {
        let scratch = Scratch::new("foreign");
        let long = "x".repeat(3 * STEP as usize);
        for last in [ours(1), "a log line".to_owned(), "{\"id\":1}".to_owned(), "{\"id\":".to_owned(), long] {
            for before in ["", "before\n"] {
                fs::write(scratch.file(), format!("{before}{last}")).unwrap();
                AppendedFile::new(scratch.file()).append(b"next\n", NEVER).unwrap();
                assert_eq!(fs::read_to_string(scratch.file()).unwrap(), format!("{before}{last}\nnext\n"));
            }
        }
    }

    #[test]
    fn a_line_that_another_process_left_torn_is_cut_off_although_the_file_was_open_all_the_time() {
        let scratch = Scratch::new("neighbour");
        let mut file = AppendedFile::new(scratch.file());
        file.append(b"one\n", NEVER).unwrap();
        fs::write(scratch.file(), format!("one\n{}", &ours(2)[..40])).unwrap();
        file.append(b"two\n", NEVER).unwrap();
        assert_eq!(fs::read_to_string(scratch.file()).unwrap(), "one\ntwo\n");
    }

    #[test]
    fn a_write_that_the_disk_has_no_space_for_fails_and_leaves_nothing_of_it() {
        let dir = std::env::temp_dir().join(format!("postroom-lines-{}-disk", std::process::id()));
        let Some(disk) = postroom_testkit::services::Tmpfs::mount(&dir, 64).unwrap() else {
            eprintln!("SKIPPED: a tmpfs can only be mounted by root; nothing was shown about a full disk");
            return;
        };
        let path = disk.dir().join("out.jsonl");
        let mut file = AppendedFile::new(path.clone());
        file.append(b"one\n", NEVER).unwrap();
        let large = "x".repeat(100_000);
        for _ in 0..2 {
            let error = file.append(format!("{large}\n").as_bytes(), NEVER).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::StorageFull);
            assert_eq!(fs::read_to_string(&path).unwrap(), "one\n");
        }
        file.append(b"two\n", NEVER).unwrap();
        disk.resize(1024).unwrap();
        file.append(format!("{large}\n").as_bytes(), NEVER).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), format!("one\ntwo\n{large}\n"));
    }

    #[test]
    fn a_file_that_is_deleted_during_the_write_keeps_nothing_and_the_write_goes_to_a_new_one() {
        let scratch = Scratch::new("deleted");
        let mut file = AppendedFile::new(scratch.file());
        let deletions = Cell::new(2);
        // Asked when the file is open and locked, just before the write.
        let delete = || {
            if deletions.get() > 0 {
                deletions.set(deletions.get() - 1);
                fs::remove_file(scratch.file()).unwrap();
            }
            false
        };
        file.append(b"one\n", &delete).unwrap();
        assert_eq!(fs::read_to_string(scratch.file()).unwrap(), "one\n");

        let always = || {
            fs::remove_file(scratch.file()).unwrap();
            false
        };
        assert!(file.append(b"two\n", &always).is_err());
    }

    #[test]
    fn a_file_that_was_rotated_before_or_during_the_write_loses_nothing() {
        let scratch = Scratch::new("rotated");
        let mut file = AppendedFile::new(scratch.file());
        file.append(b"one\n", NEVER).unwrap();
        fs::rename(scratch.file(), scratch.0.join("old")).unwrap();
        file.append(b"two\n", NEVER).unwrap();
        let rotate = || {
            fs::rename(scratch.file(), scratch.0.join("older")).unwrap();
            false
        };
        file.append(b"three\n", &rotate).unwrap();
        file.append(b"four\n", NEVER).unwrap();
        let read = |name: &str| fs::read_to_string(scratch.0.join(name)).unwrap();
        assert_eq!([read("old"), read("older"), read("out.jsonl")], ["one\n", "two\nthree\n", "four\n"]);
    }

    #[test]
    fn a_write_that_nobody_waits_for_any_more_is_not_begun() {
        let scratch = Scratch::new("abandoned");
        assert!(AppendedFile::new(scratch.file()).append(b"one\n", &|| true).is_err());
        assert_eq!(fs::read_to_string(scratch.file()).unwrap(), "");
    }

    #[test]
    fn what_cannot_be_kept_is_refused_in_words() {
        let scratch = Scratch::new("refused");
        let refused = |path: &Path| AppendedFile::new(path.to_owned()).probe().unwrap_err().to_string();
        assert!(refused(Path::new("/dev/null")).contains("not a regular file"));
        assert!(refused(&scratch.0.join("nowhere/out")).contains("folder must exist"));
        AppendedFile::new(scratch.file()).probe().unwrap();
    }
}
