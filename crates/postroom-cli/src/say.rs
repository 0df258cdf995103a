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

/// A line for people, with control characters spelled out: keys and errors come from others, and a terminal would obey them.
pub fn printable(line: &str) -> String {
    let is_obeyed = |c: char| {
        c.is_control() && c != '\t'
            || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    let mut text = String::with_capacity(line.len());
    for c in line.chars() {
        if is_obeyed(c) {
            text.extend(c.escape_default());
        } else {
            text.push(c);
        }
    }
    text
}

pub fn to_stderr(line: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{}", printable(line));
}

pub fn to_stdout(line: &str) {
    to_stdout_as_it_is(&printable(line));
}

/// What was asked for with all its bytes.
pub fn to_stdout_as_it_is(line: &str) {
    let mut stdout = std::io::stdout().lock();
    if let Err(error) = writeln!(stdout, "{line}").and_then(|()| stdout.flush()) {
        // Whoever read it has enough, as `head` does.
        if error.kind() == std::io::ErrorKind::BrokenPipe {
            std::process::exit(i32::from(crate::exit::OK));
        }
        to_stderr(&format!("postroom: failed to write the answer to standard output: {error}"));
        std::process::exit(i32::from(crate::exit::FAILURE));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_is_told_nothing_by_a_key() {
        let forged = printable("key \u{1b}[31mEVIL\nr0  key orders\u{202e}\u{9b}1m \u{fc}\t\u{6f22}");
        assert_eq!(forged, "key \\u{1b}[31mEVIL\\nr0  key orders\\u{202e}\\u{9b}1m \u{fc}\t\u{6f22}");
    }
}
