//! Writing that knows how much was written, also when it fails.

use std::fs::File;
use std::io::{self, Write};
use std::thread;
use std::time::Duration;

/// Between two attempts to write to a pipe that is full and does not block.
const FULL_PIPE_PAUSE: Duration = Duration::from_millis(5);

/// Writes all of `text` without a buffer, and counts in `written`; after an error too, `written` is what the system took.
pub(super) fn counted(mut file: &File, text: &[u8], written: &mut u64, abandoned: &dyn Fn() -> bool) -> io::Result<()> {
    let mut rest = text;
    while !rest.is_empty() {
        match file.write(rest) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(length) => {
                *written += length as u64;
                rest = rest.get(length..).unwrap_or_default();
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // Somebody who shares the pipe has set it to not block. To end here would repeat the whole batch.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && !abandoned() => {
                thread::park_timeout(FULL_PIPE_PAUSE);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The same kind of error, saying what failed and what follows.
pub(super) fn told(error: &io::Error, what: impl std::fmt::Display) -> io::Error {
    io::Error::new(error.kind(), format!("{what}: {error}"))
}

/// Nobody waits for the result any more, so it must not be written.
pub(super) fn given_up() -> io::Error {
    io::Error::new(io::ErrorKind::Interrupted, "the caller no longer waits for this write; nothing was written")
}
