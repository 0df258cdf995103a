//! Saying what is done, and how long it took.

use std::time::Instant;

/// Announces `what`, does it, and tells the seconds.
pub(crate) fn step<T, E>(what: &str, work: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    eprintln!("==> {what}");
    let begun = Instant::now();
    let result = work();
    let verb = if result.is_ok() { "took" } else { "failed after" };
    eprintln!("==> {what}: {verb} {:.1} s", begun.elapsed().as_secs_f64());
    result
}
