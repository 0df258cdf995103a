//! Pure: what the version of an aggregate says about a message.

use std::ops::RangeInclusive;
use std::time::Duration;

use crate::handler::Stale;

/// How far the versions of an aggregate are looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Versions {
    /// Not at all.
    Any,
    /// A version is applied if it is newer than the last one; versions may be missing.
    Newer(Stale),
    /// Each version is applied after the one before it.
    InOrder {
        /// How long a version waits in the store for those before it; 1 to 5 minutes are usual.
        window: Duration,
        /// The version that an aggregate begins with; `None`: whichever comes first.
        first: Option<i64>,
        /// What happens to versions that arrive after the window.
        late: Stale,
    },
}

impl Versions {
    /// Each version after the one before it, from 1 on; those that arrive after `window` go to the compensation.
    pub fn in_order(window: Duration) -> Self {
        Self::InOrder { window, first: Some(1), late: Stale::Compensate }
    }
}

/// What is to be done about one version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Turn {
    /// It is handled, and noted.
    Now,
    /// It is not newer than the last one, which is this.
    Stale(Stale, i64),
    /// It waits for those before it.
    Early(Duration),
    /// It waited long enough; the first version that is not there is this.
    WindowOver {
        /// The version that should come next.
        expected: i64,
    },
}

/// Decides about `version`, when `last` was handled last.
pub(crate) fn turn(versions: Versions, last: Option<i64>, version: i64, window_over: bool) -> Turn {
    match versions {
        Versions::Any => Turn::Now,
        Versions::Newer(stale) => match last {
            Some(last) if version <= last => Turn::Stale(stale, last),
            _ => Turn::Now,
        },
        Versions::InOrder { window, first, late } => {
            let Some(expected) = last.map(|last| last.saturating_add(1)).or(first) else { return Turn::Now };
            if version == expected {
                Turn::Now
            } else if version < expected {
                Turn::Stale(late, expected.saturating_sub(1))
            } else if window_over {
                Turn::WindowOver { expected }
            } else {
                Turn::Early(window)
            }
        }
    }
}

/// What follows when the window of `version` is over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Gap {
    /// One before it waits in the store for something else, such as a retry: it is not missing.
    Waits,
    /// These are missing; the next version after them is handled now if it is this message's own, and is let go otherwise.
    Missing(RangeInclusive<i64>),
    /// None is missing: the next one is in the store and is let go.
    LetGo,
}

/// Looks at what waits in the store between `expected` and `version`: each version, and whether it is early too.
pub(crate) fn gap(expected: i64, version: i64, between: &[(i64, bool)]) -> Gap {
    if between.iter().any(|(_, early)| !early) {
        return Gap::Waits;
    }
    let next = between.first().map_or(version, |(next, _)| *next);
    if next <= expected { Gap::LetGo } else { Gap::Missing(expected..=next - 1) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: Duration = Duration::from_secs(60);

    #[test]
    fn newer_only_takes_gaps_and_no_older_version() {
        let newer = Versions::Newer(Stale::Ignore);
        assert_eq!(turn(newer, None, 7, false), Turn::Now);
        assert_eq!(turn(newer, Some(7), 9, false), Turn::Now);
        assert_eq!(turn(newer, Some(7), 7, false), Turn::Stale(Stale::Ignore, 7));
    }

    #[test]
    fn in_order_waits_for_the_one_before_and_only_as_long_as_the_window() {
        let order = Versions::in_order(WINDOW);
        assert_eq!(turn(order, None, 1, false), Turn::Now);
        assert_eq!(turn(order, None, 2, false), Turn::Early(WINDOW));
        assert_eq!(turn(order, Some(1), 3, true), Turn::WindowOver { expected: 2 });
        assert_eq!(turn(order, Some(3), 2, false), Turn::Stale(Stale::Compensate, 3));
        let from_any = Versions::InOrder { window: WINDOW, first: None, late: Stale::Ignore };
        assert_eq!(turn(from_any, None, 40, false), Turn::Now);
    }

    #[test]
    fn only_what_is_nowhere_is_missing() {
        assert_eq!(gap(2, 5, &[]), Gap::Missing(2..=4));
        assert_eq!(gap(2, 5, &[(4, true)]), Gap::Missing(2..=3));
        assert_eq!(gap(2, 5, &[(3, false)]), Gap::Waits);
        assert_eq!(gap(2, 5, &[(2, true), (4, true)]), Gap::LetGo);
    }
}
