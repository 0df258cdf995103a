//! Statements with a known bug in them, to prove that the tests catch it (`cargo xtask seeded-bugs`).

/// `sql`; with the bug on, `from` in it is `to`. The changed text is leaked, which only a build with a bug does.
pub(crate) fn unless(bug: bool, sql: &'static str, from: &str, to: &str) -> &'static str {
    if !bug {
        return sql;
    }
    debug_assert!(sql.contains(from), "the bug has nothing to change");
    Box::leak(sql.replace(from, to).into_boxed_str())
}
