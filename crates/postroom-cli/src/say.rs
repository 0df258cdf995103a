//! Writing to the screen. `println!` and `eprintln!` panic when the disk behind them is full or the reader is gone; a relay must
//! not end over its own last word.

use std::io::Write;

/// A line for people, on standard error. One that cannot be written is lost, and nothing else.
macro_rules! say {
    ($($words:tt)*) => {{ $crate::say::to_stderr(&format!($($words)*)) }};
}

/// A line of the answer, on standard output. One that cannot be written ends the program with exit code 1: whoever reads the
/// answer must not take a part for the whole.
macro_rules! show {
    ($($words:tt)*) => {{ $crate::say::to_stdout(&format!($($words)*)) }};
}

pub(crate) use {say, show};

pub fn to_stderr(line: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}

pub fn to_stdout(line: &str) {
    let mut stdout = std::io::stdout().lock();
    if let Err(error) = writeln!(stdout, "{line}").and_then(|()| stdout.flush()) {
        to_stderr(&format!("postroom: failed to write the answer to standard output: {error}"));
        std::process::exit(i32::from(crate::exit::FAILURE));
    }
}
