//! Whether streams can be used, and what could lose what they have confirmed, without changing anything.

use std::time::Duration;

use tokio::time::Instant;

use super::address::Address;
use super::connection::{Connection, Unanswered};
use super::note::Note;
use super::resp::Reply;
use super::sink::advice;
use super::{RedisOptions, RedisSink, RedisSubscriptionOptions};
use crate::{CheckFailed, Hazard};

const ANSWERS_WITHIN: Duration = Duration::from_secs(10);
/// `XINFO` says as much as is needed, and groups have a number of entries that were read, from here on.
const MAJOR_MIN: u32 = 7;

/// What a sink adds to.
pub(super) async fn of_sink(options: &RedisOptions) -> Result<String, CheckFailed> {
    let (address, stream) = options.opened().map_err(unusable)?;
    let server = Server::connect(&address).await?;
    let sink = RedisSink::new(options.clone()).map_err(|error| unusable(error.problem))?;
    sink.keeps(&server.connection).await.map_err(|problem| CheckFailed {
        problem: format!("the server cannot confirm as `replicas` and `synced` ask for: {problem}"),
        advice:
            "correct replicas and synced, allow the user WAIT or WAITAOF, or look whether the replicas are connected"
                .to_owned(),
    })?;
    let Some(stream) = stream.fixed() else {
        return Ok(format!(
            "{}; whether the streams of {:?} can be added to shows with the first message of each",
            server.shown(),
            options.stream
        ));
    };
    let length = server.length(stream).await?;
    // No entry can have this id, and whoever may not add any hears of that first.
    match server.ask(&["XADD", stream, "0-0", "payload", ""]).await {
        Err(Unanswered::Refused(said)) if said.contains("0-0") => {}
        Err(error) => return Err(failed(format!("add to stream {stream:?}"), error)),
        Ok(_) => return Err(unusable(format!("stream {stream:?}: the server takes an id that no entry can have"))),
    }
    Ok(format!("{}; {}", stream_shown(stream, length), server.shown()))
}

/// What a subscription receives from.
pub(super) async fn of_subscription(options: &RedisSubscriptionOptions) -> Result<String, CheckFailed> {
    let address = options.opened().map_err(unusable)?;
    let server = Server::connect(&address).await?;
    server.is_new_enough()?;
    let mut found = Vec::new();
    for stream in &options.streams {
        let length = server.length(stream).await?;
        let told = |error| failed(format!("read stream {stream:?}"), error);
        server.ask(&["EVAL", "return 1", "1", stream]).await.map_err(told)?;
        server.ask(&["XREAD", "COUNT", "1", "STREAMS", stream, "$"]).await.map_err(told)?;
        let group = match length {
            None => None,
            Some(_) => {
                let groups = server.ask(&["XINFO", "GROUPS", stream]).await.map_err(told)?;
                let is_ours =
                    |group: &&Reply| group.field("name").and_then(Reply::text).as_deref() == Some(&options.group);
                groups.array().unwrap_or_default().iter().find(is_ours).cloned()
            }
        };
        let group = match group {
            None => format!("group {:?} does not exist yet and will be created", options.group),
            Some(group) => {
                let consumers = server.ask(&["XINFO", "CONSUMERS", stream, &options.group]).await.map_err(told)?;
                let names = consumers.array().unwrap_or_default().iter().filter_map(|one| one.field("name")?.text());
                if let Some(name) = names.into_iter().find(|name| Note::read(name).is_none()) {
                    return Err(CheckFailed {
                        problem: format!(
                            "group {:?} of stream {stream:?} has the consumer {name:?}, which is not postroom's",
                            options.group
                        ),
                        advice: "name another group; if this one is postroom's, `postroom run` says how to put it back"
                            .to_owned(),
                    });
                }
                match group.field("lag").and_then(Reply::number) {
                    Some(lag) => format!("group {:?} has {lag} entries before it", options.group),
                    None => format!("how many entries are before group {:?} the server does not say", options.group),
                }
            }
        };
        found.push(format!("{}; {group}", stream_shown(stream, length)));
    }
    Ok(format!("{}; {}", found.join("; "), server.shown()))
}

/// What may lose entries that were confirmed.
pub(super) async fn hazards(options: &RedisOptions) -> Result<Vec<Hazard>, CheckFailed> {
    let (address, stream) = options.opened().map_err(unusable)?;
    let server = Server::connect(&address).await?;
    let mut hazards = Vec::new();
    let mut hazard = |is_known, problem: String, advice: &str| {
        hazards.push(Hazard { is_known, problem, advice: advice.to_owned() });
    };
    let keeps = "set `appendonly yes` and `appendfsync always`, or synced = true in the route (Redis 7.2)";
    let info = match server.ask(&["INFO"]).await {
        Ok(info) => info.text().unwrap_or_default(),
        Err(_) => {
            let problem = "the server does not say how it keeps what it has confirmed (INFO)".to_owned();
            hazard(false, problem, "allow the user the command INFO");
            return Ok(hazards);
        }
    };
    let said = |name: &str| line(&info, name);
    match (said("aof_enabled"), server.setting("appendfsync").await) {
        (Some("0"), _) => {
            let problem = "the server writes no append-only file: a restart takes back what was confirmed since its last snapshot";
            hazard(true, problem.to_owned(), keeps);
        }
        (_, Some(policy)) if policy != "always" && !options.synced => hazard(
            true,
            format!(
                "the server writes to its disk later (appendfsync {policy}): a power failure takes back what was confirmed since"
            ),
            keeps,
        ),
        (_, None) if !options.synced => hazard(
            false,
            "the server does not say when it writes to its disk (CONFIG GET appendfsync)".to_owned(),
            "allow the user `config|get`, or set synced = true in the route (Redis 7.2)",
        ),
        _ => {}
    }
    let replicas = said("connected_slaves").and_then(|count| count.parse::<u32>().ok()).unwrap_or_default();
    if replicas > 0 && options.replicas == 0 {
        hazard(
            true,
            format!(
                "the server has replicas ({replicas}) and confirms before they have a message: a failover takes back what they did not have"
            ),
            "set replicas in the route to as many as must have a message before it counts as stored",
        );
    }
    if let Some(policy) = said("maxmemory_policy").filter(|policy| policy.starts_with("allkeys"))
        && said("maxmemory") != Some("0")
    {
        hazard(
            true,
            format!("the server throws away whole streams when its memory is full (maxmemory-policy {policy})"),
            "set `maxmemory-policy noeviction`",
        );
    }
    if let Some(stream) = stream.fixed()
        && let Ok(Reply::Number(left)) = server.ask(&["TTL", stream]).await
        && left >= 0
    {
        hazard(
            true,
            format!("stream {stream:?} expires in {left} s, with everything in it"),
            "take that back with `PERSIST`, and look who has set it",
        );
    }
    Ok(hazards)
}

/// A server that has said what it is.
struct Server {
    connection: Connection,
    is_encrypted: bool,
    /// None: it does not say.
    version: Option<String>,
    /// `valkey` or `redis`.
    name: &'static str,
}

impl Server {
    async fn connect(address: &Address) -> Result<Self, CheckFailed> {
        let connection = Connection::open(address, "postroom-check").await.map_err(|problem| CheckFailed {
            advice: if problem.contains("WRONGPASS") || problem.contains("NOAUTH") {
                "correct the user and the password in the URL, with special characters percent-encoded"
            } else if problem.contains("DB index") {
                "correct the number of the database at the end of the URL"
            } else {
                "correct the URL or its options, or start the server"
            }
            .to_owned(),
            problem: format!("connect to Redis at {problem}"),
        })?;
        let asked = connection.ask(["INFO", "server"], Instant::now() + ANSWERS_WITHIN).await;
        let info = asked.ok().and_then(|info| info.text()).unwrap_or_default();
        let valkey = line(&info, "valkey_version");
        let version = valkey.or_else(|| line(&info, "redis_version")).map(str::to_owned);
        let name = if valkey.is_some() { "Valkey" } else { "Redis" };
        Ok(Self { connection, is_encrypted: address.server.tls, version, name })
    }

    fn shown(&self) -> String {
        let encrypted = if self.is_encrypted { "encrypted with TLS" } else { "not encrypted" };
        let version = self.version.as_deref().unwrap_or("of a version that it does not say");
        format!("{} {version}, the connection is {encrypted}", self.name)
    }

    fn is_new_enough(&self) -> Result<(), CheckFailed> {
        let major = self.version.as_deref().and_then(|version| version.split('.').next()?.parse::<u32>().ok());
        if self.name == "Redis" && major.is_some_and(|major| major < MAJOR_MIN) {
            return Err(CheckFailed {
                problem: format!("{} receives nothing", self.shown()),
                advice: format!("receive from Redis {MAJOR_MIN} or newer, or from Valkey"),
            });
        }
        Ok(())
    }

    async fn ask(&self, arguments: &[&str]) -> Result<Reply, Unanswered> {
        self.connection.ask(arguments.to_vec(), Instant::now() + ANSWERS_WITHIN).await
    }

    /// How many entries a stream has; none: it does not exist.
    async fn length(&self, stream: &str) -> Result<Option<i64>, CheckFailed> {
        let told = |error| failed(format!("look at stream {stream:?}"), error);
        match self.ask(&["TYPE", stream]).await.map_err(told)?.text().as_deref() {
            Some("none") => Ok(None),
            Some("stream") => Ok(self.ask(&["XLEN", stream]).await.map_err(told)?.number()),
            other => Err(CheckFailed {
                problem: format!("{stream:?} is no stream: it is a {}", other.unwrap_or("thing without a type")),
                advice: "name another stream, or delete that key when nobody uses it".to_owned(),
            }),
        }
    }

    /// None: the user may not ask, or there is no such setting.
    async fn setting(&self, name: &str) -> Option<String> {
        self.ask(&["CONFIG", "GET", name]).await.ok()?.field(name)?.text()
    }
}

fn stream_shown(stream: &str, length: Option<i64>) -> String {
    match length {
        None => format!("stream {stream:?} does not exist yet and will be created"),
        Some(length) => format!("stream {stream:?} has {length} entries"),
    }
}

/// The value of a line such as `redis_version:7.0.15`.
fn line<'i>(info: &'i str, name: &str) -> Option<&'i str> {
    info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

fn unusable(problem: String) -> CheckFailed {
    CheckFailed { problem, advice: "correct the section in the configuration".to_owned() }
}

fn failed(what: String, error: Unanswered) -> CheckFailed {
    let advice = match &error {
        Unanswered::Refused(said) => advice(said).trim_start_matches("; "),
        Unanswered::Silent(_) => "look whether the server is up, and into its log",
    };
    let advice = if advice.is_empty() { "look into the server's log" } else { advice };
    CheckFailed { problem: format!("{what}: {error}"), advice: advice.to_owned() }
}
