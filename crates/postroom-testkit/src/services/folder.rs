//! A server's folder: created empty, and its log read when something went wrong.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

const TAIL_LINES_MAX: usize = 30;

/// Creates `dir` and its parents; an existing folder will do when it is empty.
pub(super) fn create_empty(dir: &Path) -> io::Result<()> {
    let told = |error: io::Error| io::Error::new(error.kind(), format!("create the folder {}: {error}", dir.display()));
    fs::create_dir_all(dir).map_err(told)?;
    if fs::read_dir(dir).map_err(told)?.next().is_some() {
        return Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            format!("put a server into {}: the folder is not empty; remove it or name another", dir.display()),
        ));
    }
    Ok(())
}

/// Length of a file; 0 for one that does not exist.
pub(super) fn length(file: &Path) -> u64 {
    fs::metadata(file).map_or(0, |about| about.len())
}

/// The last lines of `log` behind the byte `from`; says so when there are none.
pub(super) fn log_tail(log: &Path, from: u64) -> String {
    let mut bytes = Vec::new();
    let read = File::open(log).and_then(|mut file| {
        file.seek(SeekFrom::Start(from))?;
        file.read_to_end(&mut bytes)
    });
    if let Err(error) = read {
        return format!("    (no log: {error})");
    }
    let text = without_colours(&String::from_utf8_lossy(&bytes));
    let lines: Vec<&str> = text.lines().collect();
    let tail = lines.get(lines.len().saturating_sub(TAIL_LINES_MAX)..).unwrap_or_default();
    if tail.is_empty() { String::from("    (the log is empty)") } else { format!("    {}", tail.join("\n    ")) }
}

/// RabbitMQ colours its log even where no terminal is.
fn without_colours(text: &str) -> String {
    let mut pieces = text.split("\x1b[");
    let mut plain = String::from(pieces.next().unwrap_or_default());
    plain.extend(pieces.map(|piece| piece.split_once('m').map_or(piece, |(_, rest)| rest)));
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tail_leaves_out_what_an_earlier_start_wrote() {
        let dir = std::env::temp_dir().join(format!("postroom-log-tail-{}", std::process::id()));
        create_empty(&dir).unwrap();
        let log = dir.join("log");
        fs::write(&log, "old\nnew\n\x1b[38;5;2mnewer\x1b[0m\n").unwrap();
        assert_eq!(log_tail(&log, 4), "    new\n    newer");
        assert_eq!(log_tail(&log, length(&log)), "    (the log is empty)");
        assert_eq!(create_empty(&dir).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        fs::remove_dir_all(&dir).unwrap();
    }
}
