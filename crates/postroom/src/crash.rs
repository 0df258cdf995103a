//! Named places at which a test lets the process die. Without the feature `crash-points` there is nothing here.

/// Dies here when the process was told to: `POSTROOM_CRASH_AT=NAME:N`, at the N-th time; `POSTROOM_CRASH_MARK=FILE` gets
/// the name, as the proof that it was here. Does nothing in a build without the feature `crash-points`.
#[inline]
pub fn crash_point(name: &'static str) {
    #[cfg(feature = "crash-points")]
    told::pass(name);
    #[cfg(not(feature = "crash-points"))]
    let _ = name;
}

/// The same over a message of a type: `POSTROOM_CRASH_AT=NAME=TYPE:N`.
#[inline]
pub fn crash_point_over(name: &'static str, kind: &str) {
    #[cfg(feature = "crash-points")]
    told::pass(&format!("{name}={kind}"));
    #[cfg(not(feature = "crash-points"))]
    let _ = (name, kind);
}

#[cfg(feature = "crash-points")]
mod told {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, Ordering};

    static TOLD: OnceLock<Option<(String, u64)>> = OnceLock::new();
    static PASSED: AtomicU64 = AtomicU64::new(0);

    pub(super) fn pass(name: &str) {
        let told = TOLD.get_or_init(|| {
            let text = std::env::var("POSTROOM_CRASH_AT").ok()?;
            let (name, times) = text.rsplit_once(':')?;
            Some((name.to_owned(), times.parse().ok()?))
        });
        let Some((place, times)) = told else { return };
        if place == name && PASSED.fetch_add(1, Ordering::Relaxed) + 1 == *times {
            if let Ok(mark) = std::env::var("POSTROOM_CRASH_MARK") {
                let _ = std::fs::write(mark, name);
            }
            // No unwinding, no destructors: as dead as by SIGKILL.
            std::process::abort();
        }
    }
}
