//! `[store]`, or `[[stores]]` with the databases of many.

use std::time::Duration;

use postroom::TopicFilter;
use toml::{Table, Value};

use super::values::{duration, known, plain, text};
use crate::exit::{self, Failure};

const KEYS: &[&str] = &["name", "url", "discover"];
const DISCOVER_KEYS: &[&str] = &["store", "query", "every"];
/// Stands for the name that the query found, in `url`.
const NAME: &str = "${name}";

/// Where the messages are.
pub enum Stores {
    /// `[store]`: its URL.
    One(String),
    /// `[[stores]]`.
    Many(Vec<Group>),
}

/// One of `[[stores]]`.
pub enum Group {
    /// One database.
    Named { name: String, url: String },
    /// As many as a query finds.
    Discovered(Discovery),
}

/// Databases that a query finds.
pub struct Discovery {
    /// What they are called together.
    pub name: String,
    /// Which database is asked.
    pub store: String,
    /// Its rows have a name and, unless there is a pattern for URLs, a URL.
    pub query: String,
    pub every: Duration,
    /// A URL with [`NAME`] in it; none: the query says it.
    url: Option<String>,
}

impl Discovery {
    /// The URL of a database that was found. The error is for people, without any URL.
    pub fn url_of(&self, name: &str, found: Option<&str>) -> Result<String, String> {
        match (&self.url, found) {
            (Some(pattern), _) => Ok(pattern.replace(NAME, &encoded(name))),
            (None, Some(url)) => Ok(url.to_owned()),
            (None, None) => {
                Err("the query has no second column with its URL, and there is no url with ${name}".to_owned())
            }
        }
    }
}

/// As a part of a URL's path.
fn encoded(name: &str) -> String {
    use std::fmt::Write as _;
    let mut text = String::with_capacity(name.len());
    for byte in name.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            text.push(char::from(byte));
        } else {
            let _ = write!(text, "%{byte:02X}");
        }
    }
    text
}

impl Stores {
    /// The one that a command works with.
    pub fn one(&self) -> Result<&str, Failure> {
        match self {
            Self::One(url) => Ok(url),
            Self::Many(groups) => {
                let names: Vec<&str> = groups.iter().map(Group::name).collect();
                let text = format!(
                    "the configuration has several stores ({}); name one with --store NAME. `postroom stores` lists all",
                    names.join(", ")
                );
                Err(Failure::new(exit::USAGE, text))
            }
        }
    }
}

impl Group {
    pub fn name(&self) -> &str {
        match self {
            Self::Named { name, .. } => name,
            Self::Discovered(discovery) => &discovery.name,
        }
    }
}

/// Which of the stores; all of `[store]`.
pub(super) fn which(table: &Table, at: &str, many: bool) -> Result<TopicFilter, String> {
    match super::values::patterns(table, "stores", at)? {
        None => Ok(TopicFilter::all()),
        Some(_) if !many => Err(format!("{at}stores requires [[stores]]; there is one [store]")),
        Some(which) => Ok(which),
    }
}

pub(super) fn read(value: &Value) -> Result<Stores, String> {
    let entries =
        value.as_array().filter(|entries| !entries.is_empty()).ok_or("stores must be written as [[stores]]")?;
    let mut groups: Vec<Group> = Vec::new();
    for (index, entry) in entries.iter().enumerate() {
        let at = format!("stores[{index}].");
        let group = one(entry.as_table().ok_or_else(|| format!("{at} must be a table"))?, &at)?;
        if groups.iter().any(|other| other.name() == group.name()) {
            return Err(format!("two stores are named {:?}; rename one of them", group.name()));
        }
        groups.push(group);
    }
    Ok(Stores::Many(groups))
}

fn one(table: &Table, at: &str) -> Result<Group, String> {
    known(table, KEYS, at)?;
    let name = text(table, "name", at)?.ok_or_else(|| format!("{at}name is missing"))?;
    name_fits(&name).map_err(|wrong| format!("{at}name {wrong}"))?;
    let url = text(table, "url", at)?;
    let Some(discover) = table.get("discover") else {
        let url = url.ok_or_else(|| format!("{at}url is missing"))?;
        return Ok(Group::Named { name, url });
    };
    let at = format!("{at}discover.");
    let discover = discover.as_table().ok_or_else(|| format!("{at} must be a table"))?;
    known(discover, DISCOVER_KEYS, &at)?;
    if url.as_ref().is_some_and(|url| !url.contains(NAME)) {
        return Err(format!("{at} finds databases by name, and url has no {NAME} that stands for it"));
    }
    let every = duration(discover, "every", &at)?.unwrap_or(Duration::from_secs(60));
    if every < Duration::from_secs(1) {
        return Err(format!("{at}every is shorter than 1s"));
    }
    Ok(Group::Discovered(Discovery {
        name,
        store: text(discover, "store", &at)?
            .ok_or_else(|| format!("{at}store is missing; it is the URL of the database that is asked"))?,
        query: text(discover, "query", &at)?.ok_or_else(|| format!("{at}query is missing"))?,
        every,
        url,
    }))
}

/// A name is told apart from a URL, and shown in logs and on terminals.
pub fn name_fits(name: &str) -> Result<(), String> {
    if name.is_empty() || name.len() > 255 || name.contains([':', '*']) {
        return Err("must have 1 to 255 bytes, without : and *".to_owned());
    }
    plain(name, "").map_err(|error| error.trim_start().to_owned())
}

#[cfg(test)]
mod tests {
    use super::super::tests::parse;
    use super::*;

    const GOOD: &str = r#"
        [relay]
        connections_max = 12
        [[stores]]
        name = "exec_db01"
        url = "postgres://localhost/exec_db01"
        [[stores]]
        name = "tenants"
        url = "postgres://localhost/${name}"
        [stores.discover]
        store = "postgres://localhost/postgres"
        query = "select datname from pg_database"
        [[routes]]
        name = "awards"
        stores = ["exec_*"]
        [routes.sink]
        kind = "stdout"
    "#;

    #[test]
    fn many_stores_are_named_or_found() {
        let config = parse(GOOD, &[("STORES_EXEC_DB01_URL", "sqlite:x")]).unwrap();
        assert_eq!(config.relay.connections_max, 12);
        let Stores::Many(groups) = &config.stores else { panic!("one store") };
        assert!(matches!(&groups[0], Group::Named { name, url } if name == "exec_db01" && url == "sqlite:x"));
        let Group::Discovered(found) = &groups[1] else { panic!("a named one") };
        assert_eq!(found.url_of("a/b c", None).unwrap(), "postgres://localhost/a%2Fb%20c");
        assert!(config.routes[0].stores.takes("exec_db02") && !config.routes[0].stores.takes("tenant_1"));
        assert!(config.stores.one().unwrap_err().text.contains("exec_db01, tenants"));
    }

    #[test]
    fn the_configurations_of_the_documentation_are_read() {
        let docs = include_str!("../../../../docs/many-databases.md");
        let blocks: Vec<&str> = docs.split("```toml").skip(1).filter_map(|block| block.split("```").next()).collect();
        assert!(!blocks.is_empty());
        for block in blocks {
            parse(block, &[]).unwrap();
        }
    }

    #[test]
    fn what_is_wrong_with_stores_is_told() {
        let cases = [
            (GOOD.replace("[relay]", "[store]\nurl = \"sqlite:x\"\n[relay]"), "both [store] and [[stores]]"),
            (GOOD.replace("name = \"tenants\"", "name = \"exec_db01\""), "two stores are named \"exec_db01\""),
            (GOOD.replace("name = \"tenants\"", "name = \"a:b\""), "without : and *"),
            (GOOD.replace("/${name}", "/x"), "no ${name}"),
            (GOOD.replace("query =", "quary ="), "did you mean \"query\"?"),
            (GOOD.replace("connections_max = 12", "connections_max = 3"), "from 9 to"),
            (GOOD.replace("connections_max = 12", "listen = true"), "relay.listen"),
            (
                format!("{GOOD}\n[archive]\nurl = \"/tmp\"\n[retention]\noutbox = \"7d\""),
                "[archive] is not possible with [[stores]]",
            ),
            (
                format!(
                    "{GOOD}\n[[inboxes]]\nconsumer = \"b\"\nfrom = {{ kind = \"rabbitmq\", url = \"amqp://localhost\", queue = \"q\" }}"
                ),
                "[[inboxes]] are not possible with [[stores]]",
            ),
        ];
        for (text, expected) in cases {
            let error = parse(&text, &[]).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
        let named = "[[stores]]\nname = \"a\"\nurl = \"sqlite:x\"\n[[routes]]\nname = \"r\"\nstores = [\"b*\"]\nsink = { kind = \"stdout\" }";
        assert!(parse(named, &[]).unwrap_err().contains("no named store matches"));
        let one = "[store]\nurl = \"sqlite:x\"\n[relay]\nconnections_max = 12\n[[routes]]\nname = \"r\"\nsink = { kind = \"stdout\" }";
        assert!(parse(one, &[]).unwrap_err().contains("relay.connections_max requires [[stores]]"));
    }
}
