//! Waiting for a sign from another process that has no way to wake us.

use std::io;
use std::thread;
use std::time::{Duration, Instant};

const BETWEEN_LOOKS: Duration = Duration::from_millis(10);

/// Looks again and again until `look` finds something; `None` when `limit` has passed without.
///
/// It looks at least once. An error of `look` ends the wait.
pub(super) fn until<T>(limit: Duration, mut look: impl FnMut() -> io::Result<Option<T>>) -> io::Result<Option<T>> {
    let begun = Instant::now();
    loop {
        if let Some(found) = look()? {
            return Ok(Some(found));
        }
        if begun.elapsed() >= limit {
            return Ok(None);
        }
        nap();
    }
}

#[allow(clippy::disallowed_methods, reason = "a foreign process sends no signal that we could wait for")]
fn nap() {
    thread::sleep(BETWEEN_LOOKS);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_looks_once_even_without_any_time() {
        assert_eq!(until(Duration::ZERO, || Ok(Some(1))).unwrap(), Some(1));
        assert_eq!(until(Duration::ZERO, || Ok(None::<i32>)).unwrap(), None);
    }
}
