//! The bugs that `cargo xtask seeded-bugs` puts into a copy of the sources, each with the test that has to catch it. What a bug
//! changes is in `xtask/seeded-bugs/NAME.patch`.

mod ends;
mod programs;
mod stores;

pub(crate) struct Bug {
    pub(crate) name: &'static str,
    pub(crate) breaks: &'static str,
    pub(crate) package: &'static str,
    pub(crate) test: &'static [&'static str],
    /// The test starts the `postroom` program, which then has the bug too.
    pub(crate) needs_bin: bool,
}

/// All of them.
pub(crate) fn all() -> impl Iterator<Item = &'static Bug> {
    [stores::BUGS, ends::BUGS, programs::BUGS].into_iter().flatten()
}
