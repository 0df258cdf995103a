//! Named places at which a test lets the process die, or a task panic. Without the feature `crash-points` there is nothing here.

/// Dies here when the process was told to: `POSTROOM_CRASH_AT=NAME:N`, at the N-th time; `POSTROOM_CRASH_MARK=FILE` gets
/// the name, as the proof that it was here. Panics here when told so by `POSTROOM_PANIC_AT=NAME:N[,NAME:N]`. Does nothing in a
/// build without the feature `crash-points`.
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
    static PANICS: OnceLock<Vec<Panic>> = OnceLock::new();

    struct Panic {
        place: String,
        at: u64,
        passed: AtomicU64,
    }

    fn panics() -> Vec<Panic> {
        let text = std::env::var("POSTROOM_PANIC_AT").unwrap_or_default();
        let panic = |part: &str| {
            let (place, at) = part.rsplit_once(':')?;
            Some(Panic { place: place.to_owned(), at: at.parse().ok()?, passed: AtomicU64::new(0) })
        };
        text.split(',').filter_map(panic).collect()
    }

    pub(super) fn pass(name: &str) {
        for panic in PANICS.get_or_init(panics) {
            if panic.place == name && panic.passed.fetch_add(1, Ordering::Relaxed) + 1 == panic.at {
                std::panic::panic_any(format!("told to panic at {name}"));
            }
        }
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
