//! Writing to the screen. `println!` and `eprintln!` panic when the disk behind them is full or the reader is gone; a relay must
//! not end over its own last word.

use std::io::Write;

use postroom::is_unseen;

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

/// A line for people, with control characters and what nobody sees spelled out: keys and errors come from others, and a terminal would
/// obey them.
pub fn printable(line: &str) -> String {
    let mut text = String::with_capacity(line.len());
    for c in line.chars() {
        if c != '\t' && is_unseen(c) {
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
    // An object of JSON has escapes of its own.
    to_stdout_as_it_is(&if line.starts_with('{') { printable_json(line) } else { printable(line) });
}

/// JSON says nothing of what a terminal obeys beyond the ASCII control characters, which it never has as they are.
fn printable_json(line: &str) -> String {
    let mut text = String::with_capacity(line.len());
    for c in line.chars() {
        if printable(c.encode_utf8(&mut [0; 4])).chars().ne(std::iter::once(c)) {
            c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| text.push_str(&format!("\\u{unit:04x}")));
        } else {
            text.push(c);
        }
    }
    text
}

/// How the program ends when whoever read its answer has gone away.
static WITHOUT_A_READER: std::sync::atomic::AtomicU8 = std::sync::atomic::AtomicU8::new(crate::exit::OK);

/// An answer that is a verdict keeps its exit code, whoever reads it.
pub fn ends_with(code: u8) {
    WITHOUT_A_READER.store(code, std::sync::atomic::Ordering::Relaxed);
}

/// What was asked for with all its bytes.
pub fn to_stdout_as_it_is(line: &str) {
    let mut stdout = std::io::stdout().lock();
    if let Err(error) = writeln!(stdout, "{line}").and_then(|()| stdout.flush()) {
        // Whoever read it has enough, as `head` does.
        if error.kind() == std::io::ErrorKind::BrokenPipe {
            std::process::exit(i32::from(WITHOUT_A_READER.load(std::sync::atomic::Ordering::Relaxed)));
        }
        to_stderr(&format!("postroom: failed to write the answer to standard output: {error}"));
        std::process::exit(i32::from(crate::exit::FAILURE));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_would_obey_is_valid_json() {
        let line = serde_json::json!({ "key": "caf\u{85}e\u{202e}X\u{7f}\u{e0041}" }).to_string();
        let read: serde_json::Value = serde_json::from_str(&printable_json(&line)).unwrap();
        assert_eq!(read["key"], "caf\u{85}e\u{202e}X\u{7f}\u{e0041}");
        assert!(printable_json(&line).is_ascii());
    }

    #[test]
    fn a_terminal_is_told_nothing_by_a_key() {
        assert_eq!(printable("a\u{2028}b\u{200b}c"), "a\\u{2028}b\\u{200b}c");
        let forged = printable("key \u{1b}[31mEVIL\nr0  key orders\u{202e}\u{9b}1m \u{fc}\t\u{6f22}");
        assert_eq!(forged, "key \\u{1b}[31mEVIL\\nr0  key orders\\u{202e}\\u{9b}1m \u{fc}\t\u{6f22}");
    }
}
