//! Progress of long work, on standard error: on a terminal a line that changes, elsewhere a line every ten seconds.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use crate::say::say;
use crate::table::number;

const TERMINAL_EVERY: Duration = Duration::from_millis(100);
const LOG_EVERY: Duration = Duration::from_secs(10);

/// Counts what is done.
pub struct Progress {
    what: &'static str,
    terminal: bool,
    told: Instant,
    began: bool,
}

impl Progress {
    /// What is counted, in the plural.
    pub fn new(what: &'static str) -> Self {
        Self { what, terminal: std::io::stderr().is_terminal(), told: Instant::now(), began: false }
    }

    /// So many are done.
    pub fn at(&mut self, done: u64) {
        if self.told.elapsed() < if self.terminal { TERMINAL_EVERY } else { LOG_EVERY } {
            return;
        }
        (self.told, self.began) = (Instant::now(), true);
        let done = number(i64::try_from(done).unwrap_or(i64::MAX), false);
        if self.terminal {
            let _ = write!(std::io::stderr().lock(), "\rpostroom: {done} {} so far", self.what);
        } else {
            say!("postroom: {done} {} so far", self.what);
        }
    }

    /// The line that changes is left.
    pub fn end(&self) {
        if self.terminal && self.began {
            say!("");
        }
    }
}
