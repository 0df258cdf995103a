//! Whether a stream is there, and what could lose what it has confirmed, without changing anything.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

use super::address::Address;
use super::connection::Connection;
use super::jetstream::{ApiError, JetStream, StreamInfo, Unanswered};
use super::sessions::NotOurs;
use super::{NatsOptions, NatsSubscriptionOptions, Opened};
use crate::{CheckFailed, Hazard};

const ANSWERS_WITHIN: Duration = Duration::from_secs(10);
/// Most bytes of what a server's monitoring says.
const MONITORING_MAX: u64 = 4 << 20;

pub(super) const NO_ACK: &str = "the stream confirms nothing (no_ack); edit it, or nobody knows what it has";

pub(super) fn advice_to_create(stream: &str) -> String {
    format!(
        "create it with `nats stream add {stream} --subjects=... --storage=file --discard=new`, or set `subjects` of the sink"
    )
}

/// What a sink publishes to.
pub(super) async fn of_sink(options: &NatsOptions) -> Result<String, CheckFailed> {
    let opened = options.opened().map_err(unusable)?;
    let connection = connected(&opened).await?;
    let Some(found) = stream(&connection, &opened, &options.stream).await? else {
        if options.subjects.is_empty() {
            return Err(missing(&options.stream));
        }
        return Ok(told(&connection, &format!("stream {:?} does not exist yet and will be created", options.stream)));
    };
    confirms(&found, &options.stream)?;
    Ok(told(&connection, &shown(&found)))
}

/// For how long the stream stores no second message with an id that it has.
pub(super) async fn recognises_ids_for(options: &NatsOptions) -> Result<Duration, CheckFailed> {
    let opened = options.opened().map_err(unusable)?;
    let connection = connected(&opened).await?;
    let found = stream(&connection, &opened, &options.stream).await?;
    Ok(found.map_or(Duration::ZERO, |found| Duration::from_nanos(found.config.duplicate_window)))
}

/// Settings of the stream and the server that lose what was confirmed.
pub(super) async fn hazards(options: &NatsOptions) -> Result<Vec<Hazard>, CheckFailed> {
    let opened = options.opened().map_err(unusable)?;
    let connection = connected(&opened).await?;
    let Some(found) = stream(&connection, &opened, &options.stream).await? else { return Ok(Vec::new()) };
    let (config, name) = (&found.config, &options.stream);
    let mut hazards = Vec::new();
    let mut hazard = |is_known, problem: String, advice: &str| {
        hazards.push(Hazard { is_known, problem, advice: advice.to_owned() });
    };
    if config.storage == "memory" {
        let advice = "create the stream with --storage=file";
        hazard(true, format!("stream {name:?} is in memory: a restart of the server forgets it"), advice);
    }
    if config.discard != "new" && (config.max_msgs > 0 || config.max_bytes > 0) && config.retention == "limits" {
        let advice = "nats stream edit --discard=new, so that a full stream refuses what is new and postroom waits, or remove the limit";
        hazard(true, format!("stream {name:?} throws away its oldest messages when it is full, read or not"), advice);
    }
    if config.max_msgs_per_subject > 0 && !config.discard_new_per_subject && config.retention == "limits" {
        let advice = "remove max_msgs_per_subject, or set discard_new_per_subject with --discard=new";
        let most = config.max_msgs_per_subject;
        hazard(
            true,
            format!("stream {name:?} keeps only the newest {most} messages of each subject, read or not"),
            advice,
        );
    }
    if config.num_replicas <= 1 {
        let advice = "set `jetstream { sync_interval: always }`, or give the stream three replicas on machines that do not fail together";
        match &options.monitoring_url {
            None => hazard(
                false,
                format!(
                    "how often the server of stream {name:?} writes to its disk is not known without monitoring_url; unless it is told \
                     otherwise, it is every 2 minutes, and a power failure takes back what was confirmed since"
                ),
                advice,
            ),
            Some(url) => match sync_interval(url).await? {
                Sync::Always => {}
                Sync::Every(interval) => hazard(
                    true,
                    format!(
                        "the server writes to its disk every {} s only (sync_interval), and stream {name:?} has one replica: a power failure \
                         takes back what was confirmed since",
                        interval.as_secs()
                    ),
                    advice,
                ),
                Sync::Unsaid => {
                    hazard(
                        false,
                        format!("NATS at {url} does not say how often it writes to its disk"),
                        "use NATS 2.10 or newer",
                    );
                }
            },
        }
    }
    Ok(hazards)
}

/// What a subscription receives from.
pub(super) async fn of_subscription(options: &NatsSubscriptionOptions, made: &[String]) -> Result<String, CheckFailed> {
    let opened = options.opened().map_err(unusable)?;
    let connection = connected(&opened).await?;
    let Some(found) = stream(&connection, &opened, &options.stream).await? else {
        let name = &options.stream;
        return if made.contains(&name_of(&options.url, options.domain.as_deref(), name)) {
            Ok(told(&connection, &format!("stream {name:?} does not exist yet; a route is going to create it")))
        } else {
            Err(missing(name))
        };
    };
    confirms(&found, &options.stream)?;
    let jetstream = JetStream { connection: &connection, api: &opened.api, by: Instant::now() + ANSWERS_WITHIN };
    let sessions = options.sessions(&jetstream).await.map_err(|error| match error {
        NotOurs::Unanswered(error) => refused(error),
        NotOurs::Foreign(problem) => {
            CheckFailed { problem, advice: "name another consumer in the configuration".to_owned() }
        }
    })?;
    let consumer = match sessions.last() {
        None => format!("consumer {:?} does not exist yet and will be created", options.consumer),
        Some((_, consumer)) => format!(
            "consumer {:?} has {} messages before it and {} that are not acked",
            consumer.name, consumer.num_pending, consumer.num_ack_pending
        ),
    };
    Ok(told(&connection, &format!("{}; {consumer}", shown(&found))))
}

async fn connected(opened: &Opened) -> Result<Connection, CheckFailed> {
    opened.connect("postroom check").await.map_err(|problem| {
        let advice = advice_for(&problem).to_owned();
        CheckFailed { problem: format!("connect to NATS at {}: {problem}", opened.shown), advice }
    })
}

/// None: it does not exist.
async fn stream(connection: &Connection, opened: &Opened, name: &str) -> Result<Option<StreamInfo>, CheckFailed> {
    let jetstream = JetStream { connection, api: &opened.api, by: Instant::now() + ANSWERS_WITHIN };
    match jetstream.stream(name).await {
        Err(Unanswered::Refused(error)) if error.err_code == ApiError::STREAM_NOT_FOUND => Ok(None),
        other => other.map(Some).map_err(refused),
    }
}

/// What tells a stream from others.
pub(super) fn name_of(url: &str, domain: Option<&str>, stream: &str) -> String {
    let addresses = Address::all(url).unwrap_or_default();
    let at: Vec<String> = addresses.iter().map(|address| format!("{}:{}", address.host, address.port)).collect();
    format!("stream {stream:?} of domain {domain:?} at {}", at.join(","))
}

fn unusable(problem: String) -> CheckFailed {
    CheckFailed { problem, advice: "correct the section in the configuration".to_owned() }
}

fn missing(stream: &str) -> CheckFailed {
    CheckFailed { problem: format!("stream {stream:?} does not exist"), advice: advice_to_create(stream) }
}

fn refused(error: Unanswered) -> CheckFailed {
    let problem = error.to_string();
    let advice = match error {
        Unanswered::NoJetStream(_) => {
            "start the server with JetStream (`jetstream { store_dir: ... }`), and allow it for this account".to_owned()
        }
        Unanswered::Denied(_) => "give the user the permissions that docs/nats.md lists".to_owned(),
        _ => "look into the server's log".to_owned(),
    };
    CheckFailed { problem, advice }
}

fn advice_for(problem: &str) -> &'static str {
    if problem.contains("Authorization Violation") || problem.contains("authentication") {
        "correct the user and the password in the URL, with special characters percent-encoded, or the credentials_file"
    } else {
        "correct the URL or its options, or start the server"
    }
}

/// Without confirmations nobody knows what a stream has.
fn confirms(found: &StreamInfo, name: &str) -> Result<(), CheckFailed> {
    if found.config.no_ack {
        let advice = "create the stream without `no_ack`".to_owned();
        return Err(CheckFailed { problem: format!("stream {name:?}: {NO_ACK}"), advice });
    }
    Ok(())
}

fn shown(found: &StreamInfo) -> String {
    let config = &found.config;
    let window = Duration::from_nanos(config.duplicate_window);
    let age = match config.max_age {
        0 => String::new(),
        nanos => format!(", which forgets messages after {} s, read or not", nanos / 1_000_000_000),
    };
    format!(
        "stream {:?} has {} messages, takes {}, has {} {}{age}; it recognises an id for {} s",
        config.name,
        found.state.messages,
        config.subjects.join(", "),
        config.num_replicas,
        if config.num_replicas == 1 { "replica" } else { "replicas" },
        window.as_secs(),
    )
}

fn told(connection: &Connection, found: &str) -> String {
    let encrypted = if connection.is_encrypted { "encrypted with TLS" } else { "not encrypted" };
    format!("{found}; server {}, the connection is {encrypted}", connection.info.version)
}

/// Host and port of a monitoring URL.
pub(super) fn monitoring_address(url: &str) -> Result<(String, String), String> {
    let wrong =
        || format!("monitoring_url {url:?} must be like http://HOST:8222, without a password; it is asked for /varz");
    let rest = url.strip_prefix("http://").ok_or_else(wrong)?;
    let host = rest.strip_suffix('/').unwrap_or(rest);
    if host.is_empty()
        || host.contains(['/', '@', '?', '#'])
        || host.chars().any(|c| c.is_whitespace() || c.is_control())
    {
        return Err(wrong());
    }
    let has_port = host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    Ok((host.to_owned(), if has_port { host.to_owned() } else { format!("{host}:8222") }))
}

/// How often a server writes to its disk.
enum Sync {
    /// Before it confirms a message.
    Always,
    Every(Duration),
    Unsaid,
}

/// By the server's own account.
async fn sync_interval(url: &str) -> Result<Sync, CheckFailed> {
    let failed = |problem: String| CheckFailed {
        problem: format!("ask the monitoring of NATS at {url}: {problem}"),
        advice: "correct monitoring_url, or start the server with `http: 127.0.0.1:8222`".to_owned(),
    };
    let asked = async {
        let (host, address) = monitoring_address(url)?;
        let mut stream = TcpStream::connect(address.as_str()).await.map_err(|error| error.to_string())?;
        let request = format!("GET /varz HTTP/1.0\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.map_err(|error| error.to_string())?;
        let mut answer = Vec::new();
        stream.take(MONITORING_MAX).read_to_end(&mut answer).await.map_err(|error| error.to_string())?;
        let body = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n").map(|at| &answer[at + 4..]);
        let body = body.ok_or("its answer is no HTTP")?;
        serde_json::from_slice::<serde_json::Value>(body).map_err(|error| format!("its answer is no JSON: {error}"))
    };
    let asked = timeout(ANSWERS_WITHIN, asked).await.unwrap_or_else(|_| Err("no answer".to_owned()));
    let varz = asked.map_err(failed)?;
    let config = &varz["jetstream"]["config"];
    if config["sync_always"].as_bool() == Some(true) {
        return Ok(Sync::Always);
    }
    Ok(config["sync_interval"].as_u64().map_or(Sync::Unsaid, |nanos| Sync::Every(Duration::from_nanos(nanos))))
}
