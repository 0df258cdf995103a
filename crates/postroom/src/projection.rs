//! Upserts of projections that keep the newer version.

/// An upsert of one row that changes nothing unless its version is newer: repeated and late events are harmless to it.
///
/// ```
/// use postroom::NewerUpsert;
///
/// let upsert = NewerUpsert::new("order_view", &["id"], &["state", "cents"], "version");
/// assert_eq!(
///     upsert.postgres(),
///     "insert into \"order_view\" as \"existing\" (\"id\", \"state\", \"cents\", \"version\") values ($1, $2, $3, $4) \
///      on conflict (\"id\") do update set \"state\" = excluded.\"state\", \"cents\" = excluded.\"cents\", \
///      \"version\" = excluded.\"version\" where \"existing\".\"version\" < excluded.\"version\""
/// );
/// ```
///
/// The parameters are the keys, the columns and the version, in this order. Names are quoted; `schema.table` is two names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewerUpsert {
    table: String,
    keys: Vec<String>,
    columns: Vec<String>,
    version: String,
}

impl NewerUpsert {
    /// Rows of `table`, told apart by `keys`, with these other columns and a column for the version.
    pub fn new(table: &str, keys: &[&str], columns: &[&str], version: &str) -> Self {
        let quoted = |names: &[&str]| names.iter().map(|name| quoted(name)).collect();
        let table: Vec<String> = table.split('.').map(self::quoted).collect();
        Self { table: table.join("."), keys: quoted(keys), columns: quoted(columns), version: self::quoted(version) }
    }

    /// For PostgreSQL, with `$1`, `$2`, …
    pub fn postgres(&self) -> String {
        self.statement('$')
    }

    /// For SQLite, with `?1`, `?2`, …
    pub fn sqlite(&self) -> String {
        self.statement('?')
    }

    fn statement(&self, mark: char) -> String {
        let all: Vec<&str> = self.keys.iter().chain(&self.columns).chain([&self.version]).map(String::as_str).collect();
        let marks: Vec<String> = (1..=all.len()).map(|n| format!("{mark}{n}")).collect();
        let set = self.columns.iter().chain([&self.version]).map(|name| format!("{name} = excluded.{name}"));
        format!(
            "insert into {} as \"existing\" ({}) values ({}) on conflict ({}) do update set {} where \"existing\".{version} < \
             excluded.{version}",
            self.table,
            all.join(", "),
            marks.join(", "),
            self.keys.join(", "),
            set.collect::<Vec<_>>().join(", "),
            version = self.version
        )
    }
}

/// An identifier as both dialects quote it.
fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_quoted() {
        let upsert = NewerUpsert::new("views.or\"der", &["tenant", "id"], &[], "v");
        assert_eq!(
            upsert.sqlite(),
            "insert into \"views\".\"or\"\"der\" as \"existing\" (\"tenant\", \"id\", \"v\") values (?1, ?2, ?3) on conflict \
             (\"tenant\", \"id\") do update set \"v\" = excluded.\"v\" where \"existing\".\"v\" < excluded.\"v\""
        );
    }
}
