//! `postroom.toml`: read once into types that cannot be wrong. Unknown keys are errors with a suggestion.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use postroom::{
    AttemptLimit, Consumer, OnDead, Order, Part, Retention, RetryPolicy, Route, StartAt, TopicFilter, redact_text,
    redact_url,
};
use postroom_archive::{ArchiveOptions, Place, WITH_PARQUET};
use postroom_brokers::{Section, SinkOptions, SubscriptionOptions};
use toml::{Table, Value};

use crate::brokers;
use crate::environment::{self, Variable, overlay};
use crate::exit::{self, Failure};

mod admin;
mod intake;
mod reconcile;
mod retention;
mod stores;
mod values;

pub use admin::{Admin, listens_on};
pub use intake::{Mode, Taken, conditions};
pub use reconcile::{Reconcile, ReconciledConsumer};
pub use stores::{Discovery, Group, Stores, name_fits};
pub use values::parse_duration;
use values::{did_you_mean, duration, known, nearest, number, one_of, patterns, plain, section, text, truth};

const TOP_KEYS: &[&str] =
    &["store", "stores", "relay", "routes", "inboxes", "retention", "archive", "reconcile", "intake", "admin"];
const INBOX_KEYS: &[&str] = &["consumer", "from"];
const STORE_KEYS: &[&str] = &["url", "capacity_bytes"];
const ARCHIVE_KEYS: &[&str] = &["url", "parquet"];
const RELAY_KEYS: &[&str] = &[
    "name",
    "in_flight_max",
    "in_flight_bytes_max",
    "poll_idle",
    "lease",
    "stop_deadline",
    "listen",
    "connections_max",
    "look_every",
];
const ROUTE_KEYS: &[&str] =
    &["name", "stores", "topics", "start_at", "order", "on_dead", "rate", "breaker_after", "retry", "sink"];
const RETRY_KEYS: &[&str] = &["base", "cap", "jitter", "attempts_max", "limits"];
const LIMIT_KEYS: &[&str] = &["topics", "types", "attempts_max"];

/// The whole configuration.
pub struct Config {
    pub stores: Stores,
    /// How large the store may become, for those who watch it; nothing enforces it.
    pub capacity_bytes: Option<i64>,
    pub relay: Relay,
    pub routes: Vec<Routed>,
    pub inboxes: Vec<Inbox>,
    pub retention: Retention,
    /// Where messages go before they are removed; none: nowhere.
    pub archive: Option<ArchiveOptions>,
    /// What is compared from time to time.
    pub reconcile: Vec<Reconcile>,
    /// Tables that already exist.
    pub intakes: Vec<Taken>,
    /// None: nothing listens.
    pub admin: Option<Admin>,
}

impl std::fmt::Debug for Config {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { stores, capacity_bytes, relay, routes, inboxes, retention, archive, reconcile, intakes, admin } =
            self;
        f.debug_struct("Config")
            .field("store_url", &stores.one().ok().map(redact_url))
            .field("relay", relay)
            .field("routes", routes)
            .field("inboxes", inboxes)
            .field("retention", retention)
            .field("archive", archive)
            .field("reconcile", reconcile)
            .field("intakes", intakes)
            .field("capacity_bytes", capacity_bytes)
            .field("admin", admin)
            .finish()
    }
}

/// `[[inboxes]]`: messages of a queue are copied to the store for an application that takes them with SQL.
#[derive(Debug)]
pub struct Inbox {
    pub consumer: Consumer,
    pub from: Arc<dyn SubscriptionOptions>,
}

/// `[relay]`.
#[derive(Debug)]
pub struct Relay {
    /// Unique among all relays; made from the host and the process when absent.
    pub name: Option<String>,
    pub in_flight_max: usize,
    pub in_flight_bytes_max: usize,
    pub poll_idle: Duration,
    pub lease: Duration,
    pub stop_deadline: Duration,
    /// Also be woken by the notifications of writers, in addition to polling.
    pub listen: bool,
    /// Of many stores: connections to databases in all.
    pub connections_max: usize,
    /// Of many stores: how often one is looked at that has no relay.
    pub look_every: Duration,
}

/// `[[routes]]`.
#[derive(Debug)]
pub struct Routed {
    pub route: Route,
    /// Of many stores, those with this route.
    pub stores: TopicFilter,
    pub sink: Arc<dyn SinkOptions>,
}

/// Reads and checks the file, overridden by `POSTROOM_…` variables.
pub fn load(path: &Path) -> Result<Config, Failure> {
    let wrong = |problem: String| Failure::new(exit::CONFIG, format!("{}: {problem}", path.display()));
    let mut text = std::fs::read_to_string(path).map_err(|error| {
        wrong(format!("failed to read the configuration: {error}; name the file with --config FILE"))
    })?;
    text.push('\n');
    let table: Table = text.parse().map_err(|error: toml::de::Error| {
        // The full error quotes the line, which may contain a password.
        wrong(format!("not valid TOML: {}", error.message()))
    })?;
    let variables = environment::variables().map_err(|problem| Failure::new(exit::CONFIG, problem))?;
    let config = read(table, &variables).map_err(wrong)?;
    warn_of_readers(path, &text);
    Ok(config)
}

/// Warns if others can read a file with a secret in it.
#[cfg(unix)]
fn warn_of_readers(path: &Path, text: &str) {
    use std::os::unix::fs::PermissionsExt;
    let mode = std::fs::metadata(path).map_or(0, |about| about.permissions().mode());
    // Passwords of URLs, secrets of webhooks, and headers that prove who sends.
    let has_secret =
        redact_text(text) != *text || text.contains("whsec_") || text.to_ascii_lowercase().contains("authorization");
    if mode & 0o004 != 0 && has_secret {
        tracing::warn!(
            "{} contains a password or another secret, and every user of this machine can read it; run `chmod o-r` on it, or put the value into a variable",
            path.display()
        );
    }
}

#[cfg(not(unix))]
fn warn_of_readers(_: &Path, _: &str) {}

fn read(mut table: Table, variables: &[Variable]) -> Result<Config, String> {
    overlay(&mut table, variables)?;
    known(&table, TOP_KEYS, "")?;
    let (stores, capacity_bytes) = match (section(&table, "store")?, table.get("stores")) {
        (Some(_), Some(_)) => return Err("there are both [store] and [[stores]]; use one of them".to_owned()),
        (None, Some(many)) => (stores::read(many)?, None),
        (store, None) => {
            let store = store.ok_or("[store] is missing; it must contain url = \"postgres://…\"")?;
            known(store, STORE_KEYS, "store.")?;
            let url = text(store, "url", "store.")?.ok_or("store.url is missing")?;
            (Stores::One(url), number(store, "capacity_bytes", "store.", 1, i64::MAX)?)
        }
    };
    let many = matches!(stores, Stores::Many(_));

    let empty = Table::new();
    let relay_section = section(&table, "relay")?.unwrap_or(&empty);
    let relay = relay_section;
    known(relay, RELAY_KEYS, "relay.")?;
    let relay_name = text(relay, "name", "relay.")?;
    relay_name.iter().try_for_each(|name| plain(name, "relay.name"))?;
    let relay = Relay {
        name: relay_name,
        in_flight_max: number(relay, "in_flight_max", "relay.", 1, 1_000_000)?.unwrap_or(2000) as usize,
        in_flight_bytes_max: number(relay, "in_flight_bytes_max", "relay.", 1, i64::MAX)?.unwrap_or(64 << 20) as usize,
        poll_idle: duration(relay, "poll_idle", "relay.")?.unwrap_or(Duration::from_millis(200)),
        lease: duration(relay, "lease", "relay.")?.unwrap_or(Duration::from_secs(15)),
        stop_deadline: duration(relay, "stop_deadline", "relay.")?.unwrap_or(Duration::from_secs(20)),
        listen: truth(relay, "listen", "relay.")?.unwrap_or(false),
        connections_max: number(relay, "connections_max", "relay.", 9, 100_000)?.unwrap_or(40) as usize,
        look_every: duration(relay, "look_every", "relay.")?.unwrap_or(Duration::from_secs(5)),
    };
    if let Some(key) = ["connections_max", "look_every"].iter().find(|key| relay_section.contains_key(**key))
        && !many
    {
        return Err(format!("relay.{key} requires [[stores]]; one [store] has as many connections as it needs"));
    }
    if relay.look_every.is_zero() {
        return Err("relay.look_every is zero: the databases would be looked at without a pause".to_owned());
    }
    if many && relay.listen {
        return Err(
            "relay.listen is not possible with [[stores]]: it would need a connection to each of them".to_owned()
        );
    }
    if relay.lease < Duration::from_secs(1) {
        return Err("relay.lease is shorter than 1s: a slow round trip would make the relay lose it".to_owned());
    }
    if relay.poll_idle.is_zero() {
        return Err("relay.poll_idle is zero: the database would be polled without a pause".to_owned());
    }

    let none = Vec::new();
    let tables = |key: &str| match table.get(key) {
        None => Ok(&none),
        Some(Value::Array(tables)) if !tables.is_empty() => Ok(tables),
        Some(_) => Err(format!("{key} must be written as [[{key}]]")),
    };
    let (routes, inboxes) = (tables("routes")?, tables("inboxes")?);
    let intakes = table.get("intake").map(|value| intake::read(value, many)).transpose()?.unwrap_or_default();
    if routes.is_empty() && inboxes.is_empty() && intakes.is_empty() {
        return Err(
            "there is neither [[routes]] nor [[inboxes]], so nothing would be sent or received; add one of them"
                .to_owned(),
        );
    }
    let inboxes: Vec<Inbox> =
        inboxes.iter().enumerate().map(|(index, inbox)| read_inbox(index, inbox)).collect::<Result<_, _>>()?;
    let routes: Vec<Routed> = routes
        .iter()
        .enumerate()
        .map(|(index, route)| read_route(index, route, &relay, many))
        .collect::<Result<_, _>>()?;
    for (index, Routed { route, .. }) in routes.iter().enumerate() {
        if routes[..index].iter().any(|other| other.route.name == route.name) {
            return Err(format!(
                "two routes are named {:?}; a route's position is stored under its name, so rename one of them",
                route.name
            ));
        }
    }
    for (index, Routed { route, sink, .. }) in routes.iter().enumerate() {
        let Some(alone_as) = sink.alone_as() else { continue };
        if many {
            return Err(format!(
                "route {:?} has {alone_as}, which no two databases may share; it cannot be a route of [[stores]]",
                route.name
            ));
        }
        if let Some(other) = routes[..index].iter().find(|other| other.sink.alone_as().as_ref() == Some(&alone_as)) {
            return Err(format!(
                "the routes {:?} and {:?} both have {alone_as}; give each of them one of its own",
                other.route.name, route.name
            ));
        }
    }
    for (index, inbox) in inboxes.iter().enumerate() {
        if inboxes[..index].iter().any(|other| other.consumer == inbox.consumer) {
            return Err(format!(
                "two inboxes have the consumer {:?}; the inbox of a consumer is filled from one queue: bind that queue to \
                 both sources, or give the second inbox a different consumer",
                inbox.consumer.as_str()
            ));
        }
    }
    for (index, inbox) in inboxes.iter().enumerate() {
        let taken = inbox.from.takes_from();
        if let Some(other) = inboxes[..index].iter().find(|other| other.from.takes_from() == taken) {
            return Err(format!(
                "the inboxes of {} and {} both receive from {taken}, and each would get a part of the messages; give each of them one of its own",
                other.consumer, inbox.consumer
            ));
        }
    }
    let retention = match section(&table, "retention")? {
        Some(retention) => retention::read(retention)?,
        None => Retention::default(),
    };
    let archive = match section(&table, "archive")? {
        None => None,
        Some(archive) => {
            known(archive, ARCHIVE_KEYS, "archive.")?;
            let url = text(archive, "url", "archive.")?.ok_or("archive.url is missing")?;
            let place = Place::of(&url).map_err(|error| format!("archive.url: {error}"))?;
            let parquet = truth(archive, "parquet", "archive.")?.unwrap_or(false);
            if parquet && !WITH_PARQUET {
                return Err("archive.parquet: this program was built without the feature `parquet`".to_owned());
            }
            Some(ArchiveOptions { place, parquet })
        }
    };
    if archive.is_some() && !retention.parts().contains(&Part::Outbox) {
        return Err("there is an [archive], and no message ever leaves for it: set retention.outbox".to_owned());
    }
    let reconcile = table.get("reconcile").map(reconcile::read).transpose()?.unwrap_or_default();
    let admin = section(&table, "admin")?.map(admin::read).transpose()?;
    if many {
        for (section, there) in [
            ("[[inboxes]] are", !inboxes.is_empty()),
            ("[archive] is", archive.is_some()),
            ("[[reconcile]] is", !reconcile.is_empty()),
        ] {
            if there {
                return Err(format!(
                    "{section} not possible with [[stores]]; use a configuration with one [store] for each of them"
                ));
            }
        }
    }
    if let Stores::Many(groups) = &stores
        && groups.iter().all(|group| matches!(group, Group::Named { .. }))
    {
        let none = |which: &TopicFilter| !groups.iter().any(|group| which.takes(group.name()));
        if let Some(Routed { route, .. }) = routes.iter().find(|routed| none(&routed.stores)) {
            return Err(format!("route {:?}: no named store matches its stores", route.name));
        }
    }
    Ok(Config { stores, capacity_bytes, relay, routes, inboxes, retention, archive, reconcile, intakes, admin })
}

/// One `[[intake]]` alone.
pub fn intake_of(text: &str) -> Result<Taken, String> {
    let table: Table = text.parse().map_err(|error: toml::de::Error| error.message().to_owned())?;
    let all = table.get("intake").map(|value| intake::read(value, false)).transpose()?.unwrap_or_default();
    all.into_iter().next().ok_or_else(|| "there is no [[intake]]".to_owned())
}

fn read_inbox(index: usize, value: &Value) -> Result<Inbox, String> {
    let at = format!("inboxes[{index}].");
    let inbox = value.as_table().ok_or_else(|| format!("{at} must be a table"))?;
    known(inbox, INBOX_KEYS, &at)?;
    let consumer = text(inbox, "consumer", &at)?.ok_or_else(|| format!("{at}consumer is missing"))?;
    plain(&consumer, &format!("{at}consumer"))?;
    let consumer = Consumer::new(consumer).map_err(|error| format!("{at}consumer: failed to {error}"))?;
    let from = inbox.get("from").ok_or_else(|| format!("{at}from is missing; it says where messages come from"))?;
    let from = of_kind(from, &format!("{at}from."), &brokers::subscription_kinds(), brokers::subscription_section)?;
    Ok(Inbox { consumer, from })
}

/// A parser's error about a wrong value, without the value: it may be a password at the wrong key.
fn unquoted(error: &str) -> String {
    match (error.find("string \""), error.rfind('"')) {
        (Some(from), Some(to)) if from + 8 <= to => format!("{}a string{}", &error[..from], &error[to + 1..]),
        _ => error.to_owned(),
    }
}

/// The options of a table whose `kind` decides which keys it has.
fn of_kind<O: ?Sized + 'static>(
    value: &Value,
    at: &str,
    kinds: &[&'static str],
    section: fn(&str) -> Option<&'static Section<O>>,
) -> Result<Arc<O>, String> {
    let table = value.as_table().ok_or_else(|| format!("{at} must be a table"))?;
    let kind = text(table, "kind", at)?.ok_or_else(|| format!("{at}kind is missing; {}", one_of(kinds)))?;
    let section = section(&kind).ok_or_else(|| {
        let hint = nearest(&kind, kinds).map_or_else(|| one_of(kinds), did_you_mean);
        format!("{at}kind {kind:?} is not known; {hint}")
    })?;
    let keys: Vec<&str> = ["kind"].iter().chain(section.keys()).copied().collect();
    known(table, &keys, at)?;
    let mut options = table.clone();
    options.remove("kind");
    let read = |options: &Table| {
        let options = serde_json::to_value(options).map_err(|error| error.to_string())?;
        section.read(options).map_err(|error| unquoted(&error.to_string()))
    };
    read(&options).map_err(|error| {
        // The key without which there would not be this error.
        let to_blame = |key: &&String| {
            let mut others = options.clone();
            others.remove(key.as_str());
            read(&others).err().as_ref() != Some(&error)
        };
        let key = options.keys().find(to_blame);
        key.map_or_else(|| format!("{}: {error}", at.trim_end_matches('.')), |key| format!("{at}{key}: {error}"))
    })
}

fn read_route(index: usize, value: &Value, relay: &Relay, many: bool) -> Result<Routed, String> {
    let at = format!("routes[{index}].");
    let route = value.as_table().ok_or_else(|| format!("{at} must be a table"))?;
    let route_table = route;
    known(route, ROUTE_KEYS, &at)?;
    let name = text(route, "name", &at)?.ok_or_else(|| format!("{at}name is missing"))?;
    if name.is_empty() || name.len() > 255 {
        return Err(format!("{at}name must have 1 to 255 bytes"));
    }
    plain(&name, &format!("{at}name"))?;
    let topics = patterns(route, "topics", &at)?.unwrap_or_else(TopicFilter::all);
    let start_at = match text(route, "start_at", &at)?.as_deref() {
        None | Some("oldest") => StartAt::Oldest,
        Some("now") => StartAt::Now,
        Some(other) => return Err(format!("{at}start_at is {other:?}; it must be \"oldest\" or \"now\"")),
    };
    let order = match text(route, "order", &at)?.as_deref() {
        None | Some("key") => Order::Key,
        Some("pipelined") => Order::Pipelined,
        Some("none") => Order::None,
        Some(other) => return Err(format!("{at}order is {other:?}; it must be \"key\", \"pipelined\" or \"none\"")),
    };
    let on_dead = match text(route, "on_dead", &at)?.as_deref() {
        None | Some("skip") => OnDead::Skip,
        Some("block") if order == Order::None => {
            return Err(format!("{at}on_dead = \"block\" requires an order: without an order no key is blocked"));
        }
        Some("block") => OnDead::Block,
        Some(other) => return Err(format!("{at}on_dead is {other:?}; it must be \"skip\" or \"block\"")),
    };
    let rate = number(route, "rate", &at, 1, 10_000_000)?.map(|rate| rate as u32);
    let breaker_after = number(route, "breaker_after", &at, 0, 1_000_000)?.unwrap_or(0) as u32;
    let retry = match route.get("retry") {
        None => RetryPolicy::default(),
        Some(retry) => read_retry(retry, &format!("{at}retry."))?,
    };
    let sink = route.get("sink").ok_or_else(|| format!("{at}sink is missing; it says where the messages go"))?;
    let sink = read_sink(sink, &format!("{at}sink."))?;
    if let Some(most) = sink.in_flight_max()
        && relay.in_flight_max > most
    {
        return Err(format!(
            "{at}sink recognises what it has stored as long as at most {most} messages are on their way: relay.in_flight_max is {}",
            relay.in_flight_max
        ));
    }
    let route = Route { name, topics, order, on_dead, start_at, lease: relay.lease, rate, breaker_after, retry };
    let stores = stores::which(route_table, &at, many)?;
    Ok(Routed { route, stores, sink })
}

fn read_retry(value: &Value, at: &str) -> Result<RetryPolicy, String> {
    let retry = value.as_table().ok_or_else(|| format!("{at} must be a table"))?;
    known(retry, RETRY_KEYS, at)?;
    let default = RetryPolicy::default();
    let base = match retry.get("base") {
        None => default.base,
        Some(value) => value
            .as_float()
            .or(value.as_integer().map(|base| base as f64))
            .filter(|base| (1.0..=100.0).contains(base))
            .ok_or_else(|| format!("{at}base must be a number from 1 to 100"))?,
    };
    Ok(RetryPolicy {
        base,
        cap: duration(retry, "cap", at)?.unwrap_or(default.cap),
        jitter: duration(retry, "jitter", at)?.unwrap_or(default.jitter),
        attempts_max: number(retry, "attempts_max", at, 1, 1_000_000)?.map_or(default.attempts_max, |max| max as u32),
        limits: match retry.get("limits") {
            None => Vec::new(),
            Some(Value::Array(limits)) => {
                let read = |(index, limit)| read_limit(limit, &format!("{at}limits[{index}]."));
                limits.iter().enumerate().map(read).collect::<Result<_, _>>()?
            }
            Some(_) => return Err(format!("{at}limits must be written as [[routes.retry.limits]]")),
        },
    })
}

fn read_limit(value: &Value, at: &str) -> Result<AttemptLimit, String> {
    let limit = value.as_table().ok_or_else(|| format!("{at} must be a table"))?;
    known(limit, LIMIT_KEYS, at)?;
    let (topics, types) = (patterns(limit, "topics", at)?, patterns(limit, "types", at)?);
    if topics.is_none() && types.is_none() {
        return Err(format!(
            "{at} has neither topics nor types; add one of them, or use retry.attempts_max, the general limit"
        ));
    }
    let attempts_max = number(limit, "attempts_max", at, 1, 1_000_000)?;
    let attempts_max = attempts_max.ok_or_else(|| format!("{at}attempts_max is missing"))? as u32;
    Ok(AttemptLimit { topics, types, attempts_max })
}

fn read_sink(value: &Value, at: &str) -> Result<Arc<dyn SinkOptions>, String> {
    of_kind(value, at, &brokers::sink_kinds(), brokers::sink_section)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    const GOOD: &str = r#"
        [store]
        url = "postgres://localhost/shop"
        [relay]
        poll_idle = "50ms"
        [[routes]]
        name = "orders"
        topics = ["orders", "billing.*"]
        [routes.retry]
        attempts_max = 20
        [[routes.retry.limits]]
        types = ["payment.*"]
        attempts_max = 40
        [routes.sink]
        kind = "rabbitmq"
        url = "amqp://localhost"
    "#;

    pub(crate) fn parse(text: &str, variables: &[(&str, &str)]) -> Result<Config, String> {
        let variables = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        read(text.parse().unwrap(), &variables.collect::<Vec<_>>())
    }

    #[test]
    fn a_name_holds_nothing_that_a_terminal_would_obey() {
        for (from, to) in
            [("name = \"orders\"", "name = \"or\\u001b[31mders\""), ("[relay]", "[relay]\nname = \"a\\nb\"")]
        {
            let refused = parse(&GOOD.replace(from, to), &[]).unwrap_err();
            assert!(refused.contains("contains a control character"), "{refused}");
        }
    }

    #[test]
    fn a_good_file_is_read() {
        let config = parse(GOOD, &[]).unwrap();
        assert_eq!(config.relay.poll_idle, Duration::from_millis(50));
        assert_eq!(config.routes[0].route.retry.attempts_max, 20);
        assert_eq!(config.routes[0].route.retry.attempts_max_of("billing", "payment.taken"), 40);
        assert_eq!(config.routes[0].route.retry.cap, Duration::from_secs(300));
    }

    /// However a file is mistyped: nothing that is said of it contains the password, and nothing panics.
    #[test]
    fn a_mistyped_file_never_shows_its_passwords() {
        const SECRET: &str = "Zq7";
        const PIECES: &[&str] = &[
            "\"",
            "'",
            "\n",
            "=",
            ":",
            "/",
            "@",
            "?",
            "#",
            "%",
            " ",
            "[",
            "]",
            "{",
            "}",
            ",",
            ".",
            "url",
            "kind",
            "\\",
            "\u{e9}",
            "//",
            "5",
            "\"\"\"",
            "sqlite:",
            "password=",
            "&",
            "host=",
        ];
        let whole = format!(
            "[store]\nurl = \"postgres://app:{SECRET}@db:5432/shop?sslmode=disable\"\n[relay]\nlease = \"5s\"\n[[routes]]\n\
             name = \"orders\"\n[routes.sink]\nkind = \"rabbitmq\"\nurl = \"amqps://u:{SECRET}@mq/%2f?heartbeat=1\"\n[[inboxes]]\n\
             consumer = \"b\"\nfrom = {{ kind = \"rabbitmq\", url = \"amqp://u:{SECRET}@mq/v\", queue = \"q\" }}\n"
        );
        let mut chance = postroom_testkit::chance::Chance::new(7);
        let (mut read_well, mut refused) = (0, 0);
        for round in 0..4000 {
            let mut text = whole.clone();
            for _ in 0..=chance.below(3) {
                let mut at = chance.below(text.len() as u64 + 1) as usize;
                while !text.is_char_boundary(at) {
                    at -= 1;
                }
                let kind = chance.below(3);
                if kind > 0
                    && let Some(gone) = text[at..].chars().next()
                {
                    text.replace_range(at..at + gone.len_utf8(), "");
                }
                if kind < 2 {
                    text.insert_str(at, PIECES[chance.below(PIECES.len() as u64) as usize]);
                }
            }
            let said = match text.parse::<Table>() {
                Err(error) => error.message().to_owned(),
                Ok(table) => match read(table, &[]) {
                    Err(problem) => problem,
                    Ok(config) => {
                        read_well += 1;
                        told_of(&config)
                    }
                },
            };
            refused += usize::from(!said.is_empty());
            // A password that is written as a part of the name of a user cannot be told from one.
            let is_named = |at: usize| text[..at].ends_with(|c: char| c.is_alphanumeric() || "_.-".contains(c));
            if text.match_indices(SECRET).any(|(at, _)| is_named(at)) {
                continue;
            }
            assert!(!said.contains(SECRET), "round {round}: {said}\n{text}");
        }
        assert!(read_well > 400 && refused > 400, "{read_well} {refused}");
    }

    /// What commands may print of it.
    fn told_of(config: &Config) -> String {
        let store = match crate::store::open(config.stores.one().unwrap()) {
            Ok(store) => store.shown(),
            Err(failure) => failure.text,
        };
        let sink = |routed: &Routed| format!("{} {:?}", routed.sink.shown(), routed.sink.open().err());
        let sinks: Vec<String> = config.routes.iter().map(sink).collect();
        let from = |inbox: &Inbox| format!("{} {:?}", inbox.from.shown(), inbox.from.open("x").err());
        let inboxes: Vec<String> = config.inboxes.iter().map(from).collect();
        format!("{store} {sinks:?} {inboxes:?} {config:?}")
    }

    #[test]
    fn an_unknown_key_is_an_error_with_a_suggestion() {
        let cases = [
            (GOOD.replace("poll_idle", "poll_idel"), "relay.poll_idel is not a known key; did you mean \"poll_idle\"?"),
            (GOOD.replace("attempts_max", "max_attempts"), "routes[0].retry.max_attempts is not a known key"),
            (
                GOOD.replace("url = \"amqp", "uri = \"amqp"),
                "routes[0].sink.uri is not a known key; did you mean \"url\"?",
            ),
            (GOOD.replace("\"rabbitmq\"", "\"rabitmq\""), "did you mean \"rabbitmq\"?"),
            (
                GOOD.replace("url = \"amqp", "channels = \"nope\"\nurl = \"amqp"),
                "routes[0].sink.channels: invalid type: a string, expected usize",
            ),
            (GOOD.replace("url = \"amqp://localhost\"", ""), "routes[0].sink: missing field `url`"),
            (GOOD.replace("50ms", "50 parsecs"), "it must be a duration such as"),
            (GOOD.replace("topics = ", "order = \"strict\"\ntopics = "), "order is \"strict\"; it must be \"key\""),
            (GOOD.replace("topics = ", "order = \"none\"\non_dead = \"block\"\ntopics = "), "requires an order"),
            (GOOD.replace("billing.*", "b*g"), "topics: failed to read topic pattern"),
            (format!("{GOOD}\n[[inboxes]]\nconsumer = \"b\"\n"), "inboxes[0].from is missing"),
            (
                format!("{GOOD}\n[[inboxes]]\nconsumer = \"b\"\nfrom = {{ kind = \"rabbitmq\", quee = \"q\" }}\n"),
                "inboxes[0].from.quee is not a known key; did you mean \"queue\"?",
            ),
        ];
        for (text, expected) in cases {
            let error = parse(&text, &[]).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn variables_stand_over_the_file() {
        let config = parse(
            GOOD,
            &[("STORE_URL", "sqlite:x.db"), ("RELAY_IN_FLIGHT_MAX", "17"), ("ROUTES_ORDERS_SINK_EXCHANGE", "other")],
        )
        .unwrap();
        assert_eq!(config.stores.one().unwrap(), "sqlite:x.db");
        assert_eq!(config.relay.in_flight_max, 17);
        let sink = format!("{:?}", config.routes[0].sink);
        assert!(sink.contains("exchange: \"other\""), "{sink}");
        assert!(parse(GOOD, &[("RELAY_LEESE", "1s")]).unwrap_err().contains("did you mean \"lease\"?"));
    }

    /// Each broker's example works, and the documentation has a section about the broker.
    #[test]
    fn the_example_of_every_broker_is_read_and_its_kind_is_documented() {
        let docs = include_str!("../../../../docs/configuration.md");
        let store = "[store]\nurl = \"sqlite:shop.db\"\n";
        for broker in brokers::all() {
            if let Some(sink) = &broker.sink {
                let text = format!("{store}[[routes]]\nname = \"r\"\n[routes.sink]\n{}", sink.example);
                let config = parse(&text, &[]).unwrap();
                assert!(config.routes[0].sink.shown().starts_with(broker.kind), "{}", broker.kind);
                config.routes[0].sink.open().unwrap();
            }
            if let Some(from) = &broker.subscription {
                let text = format!("{store}[[inboxes]]\nconsumer = \"c\"\n[inboxes.from]\n{}", from.example);
                let config = parse(&text, &[]).unwrap();
                assert!(config.inboxes[0].from.shown().contains(broker.kind), "{}", broker.kind);
                config.inboxes[0].from.open("x").unwrap();
            }
            assert!(docs.contains(&format!("| `\"{}\"` |", broker.kind)), "{} is not documented", broker.kind);
        }
    }
}
