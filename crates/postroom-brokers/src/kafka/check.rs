//! Whether topics are there, and what could lose what they have confirmed, without changing anything.

use std::time::{Duration, Instant};

use rdkafka::ClientContext;
use rdkafka::admin::{AdminClient, AdminOptions, ConfigResource, ResourceSpecifier};
use rdkafka::client::{Client, DefaultClientContext};
use rdkafka::error::RDKafkaErrorCode as Code;
use rdkafka::metadata::Metadata;
use rdkafka::producer::Producer as _;
use tokio::task::spawn_blocking;

use super::address::Address;
use super::client::{self, Watcher};
use super::{ExactlyOnce, KafkaOptions, KafkaSubscriptionOptions, transactions};
use crate::{CheckFailed, Hazard};

const ANSWERS_WITHIN: Duration = Duration::from_secs(10);
const LEADER_WITHIN: Duration = Duration::from_secs(5);
const AGAIN_AFTER: Duration = Duration::from_millis(200);
const ASKED_FOR: Duration = Duration::from_secs(1);
/// Topics that a template may name and that are looked at.
const TOPICS_MAX: usize = 200;

/// A topic, as the brokers describe it.
struct Topic {
    name: String,
    partitions: usize,
    /// Of the partition that has the fewest.
    replicas: usize,
}

struct Cluster {
    brokers: usize,
    /// The one that was asked for, or all.
    topics: Vec<Topic>,
}

/// What a sink publishes to.
pub(super) async fn of_sink(options: &KafkaOptions) -> Result<String, CheckFailed> {
    let opened = options.opened().map_err(unusable)?;
    let cluster = cluster(&opened.address, opened.topic.fixed()).await?;
    let mut brokers = counted(cluster.brokers, "broker");
    if let Some(exactly_once) = &opened.exactly_once {
        brokers = format!("{}; {brokers}", of_transactions(options, &opened.address, exactly_once).await?);
    }
    let encrypted = if opened.address.is_encrypted { "encrypted with TLS" } else { "not encrypted" };
    let Some(wanted) = opened.topic.fixed() else {
        let topics = counted(cluster.topics.len(), "topic");
        return Ok(format!(
            "{brokers} with {topics}; whether those of {:?} are among them shows with the first message of each; the connection is {encrypted}",
            options.topic
        ));
    };
    let topic = cluster.topics.iter().find(|topic| topic.name == wanted).ok_or_else(|| missing(wanted))?;
    let partitions = counted(topic.partitions, "partition");
    let replicas = counted(topic.replicas, "replica");
    Ok(format!("topic {wanted:?} has {partitions} with {replicas}; {brokers}, the connection is {encrypted}"))
}

/// Whether transactions can be begun, in the name of nobody else, and have a ledger.
async fn of_transactions(
    options: &KafkaOptions,
    address: &Address,
    exactly_once: &ExactlyOnce,
) -> Result<String, CheckFailed> {
    let ledger = &exactly_once.ledger;
    let cluster = cluster(address, Some(ledger)).await?;
    let found = cluster.topics.iter().find(|topic| topic.name == *ledger);
    let partitions = found.map(|topic| counted(topic.partitions, "partition")).ok_or_else(|| CheckFailed {
        problem: format!("the ledger, topic {ledger:?}, does not exist"),
        advice: transactions::create_ledger(ledger),
    })?;
    let admin: AdminClient<DefaultClientContext> =
        client::config(address).map_err(unusable)?.create().map_err(|error| failed(address, &error.to_string()))?;
    let within = AdminOptions::new().request_timeout(Some(ANSWERS_WITHIN));
    // Without the right to read its settings they are not looked at.
    let settings = admin.describe_configs(&[ResourceSpecifier::Topic(ledger)], &within).await.unwrap_or_default();
    let policy = settings.first().and_then(|found| found.as_ref().ok()?.get("cleanup.policy")?.value.clone());
    if policy.is_some_and(|policy| policy.contains("compact")) {
        return Err(CheckFailed {
            problem: format!("the ledger, topic {ledger:?}, is compacted, and takes no record without a key"),
            advice: format!(
                "kafka-configs.sh --alter --entity-type topics --entity-name {ledger} --add-config cleanup.policy=delete"
            ),
        });
    }
    let id = format!("{}-check", exactly_once.transactional_id);
    let producer = client::transactional(address, options, Watcher::default(), &id);
    let producer = producer.map_err(|problem| failed(address, &problem))?;
    let begun = spawn_blocking(move || {
        let begun = producer.init_transactions(ANSWERS_WITHIN);
        begun.map_err(|error| (format!("begin transactions as {id:?}: {error}"), transactions::advice(&error, &id)))
    });
    match begun.await {
        Ok(Ok(())) => Ok(format!("in transactions, with ledger {ledger:?} of {partitions}")),
        Ok(Err((problem, advice))) => Err(CheckFailed { problem, advice }),
        Err(error) => Err(failed(address, &error.to_string())),
    }
}

/// What a subscription receives from.
pub(super) async fn of_subscription(options: &KafkaSubscriptionOptions) -> Result<String, CheckFailed> {
    let address = options.opened().map_err(unusable)?;
    let encrypted = if address.is_encrypted { "encrypted with TLS" } else { "not encrypted" };
    let mut found = Vec::new();
    for wanted in &options.topics {
        let cluster = cluster(&address, Some(wanted)).await?;
        let topic = cluster.topics.iter().find(|topic| topic.name == *wanted).ok_or_else(|| missing(wanted))?;
        found.push(format!("topic {wanted:?} has {}", counted(topic.partitions, "partition")));
    }
    let group = match members(&address, &options.group).await? {
        0 => format!("group {:?} has no members", options.group),
        some => format!("group {:?} has {}", options.group, counted(some, "member")),
    };
    Ok(format!("{}; {group}; the connection is {encrypted}", found.join(", ")))
}

/// How many members a group has now.
async fn members(address: &Address, group: &str) -> Result<usize, CheckFailed> {
    let since = Instant::now();
    loop {
        let (asked, named) = (address.clone(), group.to_owned());
        let members = spawn_blocking(move || {
            let asker = asker(&asked, Watcher::default()).map_err(|problem| (problem, None))?;
            let found = rdkafka::producer::Producer::client(&asker).fetch_group_list(Some(&named), ANSWERS_WITHIN);
            let found = found.map_err(|error| (error.to_string(), error.rdkafka_error_code()))?;
            let group = found.groups().iter().find(|group| group.name() == named);
            Ok(group.map_or(0, |group| group.members().len()))
        });
        match members.await {
            Ok(Ok(members)) => return Ok(members),
            // The broker that keeps the group is just beginning to.
            Ok(Err((
                _,
                Some(Code::CoordinatorLoadInProgress | Code::CoordinatorNotAvailable | Code::NotCoordinator),
            ))) if since.elapsed() < ANSWERS_WITHIN => tokio::time::sleep(AGAIN_AFTER).await,
            Ok(Err((_, Some(Code::GroupAuthorizationFailed)))) => {
                return Err(CheckFailed {
                    problem: format!("the user may not receive in group {group:?}"),
                    advice: format!(
                        "give it READ on the group: kafka-acls.sh --add --operation READ --group {group} --allow-principal User:NAME"
                    ),
                });
            }
            Ok(Err((problem, _))) => return Err(failed(address, &problem)),
            Err(error) => return Err(failed(address, &error.to_string())),
        }
    }
}

/// A producer that sends nothing: unlike an administrator, it hears what is wrong with a broker.
fn asker(address: &Address, watcher: Watcher) -> Result<client::Producer, String> {
    let mut config = client::config(address)?;
    config.set("allow.auto.create.topics", "false");
    config.create_with_context(watcher).map_err(|error| error.to_string())
}

/// Settings of topics that lose what was confirmed.
pub(super) async fn hazards(options: &KafkaOptions) -> Result<Vec<Hazard>, CheckFailed> {
    let opened = options.opened().map_err(unusable)?;
    let cluster = cluster(&opened.address, opened.topic.fixed()).await?;
    let ledger = match &opened.exactly_once {
        Some(exactly_once) => self::cluster(&opened.address, Some(&exactly_once.ledger)).await?.topics,
        None => Vec::new(),
    };
    let mut topics: Vec<&Topic> = match opened.topic.fixed() {
        Some(wanted) => cluster.topics.iter().filter(|topic| topic.name == wanted).collect(),
        None => cluster.topics.iter().filter(|topic| opened.topic.may_be(&topic.name)).take(TOPICS_MAX).collect(),
    };
    topics.extend(&ledger);
    if topics.is_empty() {
        return Ok(Vec::new());
    }
    let admin: AdminClient<DefaultClientContext> = client::config(&opened.address)
        .map_err(unusable)?
        .create()
        .map_err(|error| failed(&opened.address, &error.to_string()))?;
    let asked: Vec<ResourceSpecifier<'_>> = topics.iter().map(|topic| ResourceSpecifier::Topic(&topic.name)).collect();
    let within = AdminOptions::new().request_timeout(Some(ANSWERS_WITHIN));
    let described =
        admin.describe_configs(&asked, &within).await.map_err(|error| failed(&opened.address, &error.to_string()))?;
    Ok(topics
        .iter()
        .zip(described)
        .flat_map(|(topic, config)| of_topic(topic, config.as_ref().map_err(|code| *code)))
        .collect())
}

/// Pure.
fn of_topic(topic: &Topic, config: Result<&ConfigResource, Code>) -> Vec<Hazard> {
    let Topic { name, replicas, .. } = topic;
    let mut found = Vec::new();
    let mut hazard = |is_known, problem: String, advice: String| found.push(Hazard { is_known, problem, advice });
    if *replicas < 2 {
        hazard(
            true,
            format!(
                "topic {name:?} has one replica: what it has confirmed is lost with the disk of one broker, and the last of it with a power failure"
            ),
            "give it three replicas on machines that do not fail together (kafka-reassign-partitions.sh)".to_owned(),
        );
    }
    let config = match config {
        Ok(config) => config,
        Err(code) => {
            let advice = "give the user DESCRIBE_CONFIGS on the topic".to_owned();
            hazard(false, format!("the settings of topic {name:?} cannot be read: {code}"), advice);
            return found;
        }
    };
    let value = |setting: &str| config.get(setting).and_then(|entry| entry.value.clone());
    let set = |setting: &str| {
        format!("kafka-configs.sh --alter --entity-type topics --entity-name {name} --add-config {setting}")
    };
    match value("min.insync.replicas").as_deref().map(str::parse::<usize>) {
        Some(Ok(least)) if *replicas > 1 && least < 2 => hazard(
            true,
            format!(
                "topic {name:?} has min.insync.replicas = {least}: with the others behind, one broker alone confirms, and what only that one has is lost with it"
            ),
            set("min.insync.replicas=2"),
        ),
        // Nothing could be written while one of them is away; that waits, and loses nothing.
        Some(Ok(_)) => {}
        _ => hazard(
            false,
            format!("min.insync.replicas of topic {name:?} is not told"),
            "use Kafka 2.0 or newer".to_owned(),
        ),
    }
    if value("unclean.leader.election.enable").as_deref() == Some("true") {
        hazard(
            true,
            format!(
                "topic {name:?} may be led by a replica that is behind (unclean.leader.election.enable): what only the others have is thrown away"
            ),
            set("unclean.leader.election.enable=false"),
        );
    }
    if value("cleanup.policy").is_some_and(|policy| policy.contains("compact")) {
        hazard(
            true,
            format!("topic {name:?} is compacted: of each key it keeps the newest message only, read or not"),
            set("cleanup.policy=delete"),
        );
    }
    found
}

async fn cluster(address: &Address, wanted: Option<&str>) -> Result<Cluster, CheckFailed> {
    let watcher = Watcher::default();
    let asking = watcher.clone();
    let (at, wanted) = (address.clone(), wanted.map(str::to_owned));
    let asked = spawn_blocking(move || {
        let asker = asker(&at, watcher)?;
        let client = rdkafka::producer::Producer::client(&asker);
        let since = Instant::now();
        let metadata = loop {
            match client.fetch_metadata(wanted.as_deref(), ASKED_FOR) {
                Ok(metadata) => break metadata,
                // The client would retry for longer, although the reason is known.
                Err(error) if asking.down().is_some() || since.elapsed() >= ANSWERS_WITHIN => {
                    return Err(asking.down().unwrap_or_else(|| error.to_string()));
                }
                Err(_) => {}
            }
        };
        if let Some(wanted) = &wanted {
            reach_leader(client, &metadata, wanted, &asking)?;
        }
        let topics = metadata.topics().iter().filter(|topic| topic.error().is_none() && !topic.partitions().is_empty());
        let topics = topics.map(|topic| Topic {
            name: topic.name().to_owned(),
            partitions: topic.partitions().len(),
            replicas: topic.partitions().iter().map(|partition| partition.replicas().len()).min().unwrap_or_default(),
        });
        Ok::<_, String>(Cluster { brokers: metadata.brokers().len(), topics: topics.collect() })
    });
    match asked.await {
        Ok(Ok(cluster)) => Ok(cluster),
        Ok(Err(problem)) => Err(failed(address, &problem)),
        Err(error) => Err(failed(address, &error.to_string())),
    }
}

/// A client learns from any broker how the others are called (`advertised.listeners`), and publishes to the one that leads the topic.
fn reach_leader<C: ClientContext>(
    client: &Client<C>,
    metadata: &Metadata,
    topic: &str,
    watcher: &Watcher,
) -> Result<(), String> {
    let found = metadata.topics().iter().find(|found| found.name() == topic);
    let Some(partition) = found.and_then(|found| found.partitions().first()) else { return Ok(()) };
    let leader = metadata.brokers().iter().find(|broker| broker.id() == partition.leader());
    let called = leader.map_or_else(|| "no broker".to_owned(), |leader| format!("{}:{}", leader.host(), leader.port()));
    match client.fetch_watermarks(topic, partition.id(), LEADER_WITHIN) {
        Err(error)
            if matches!(
                error.rdkafka_error_code(),
                Some(Code::OperationTimedOut | Code::BrokerTransportFailure | Code::AllBrokersDown)
            ) =>
        {
            let why = watcher.last().unwrap_or_else(|| error.to_string());
            Err(format!(
                "the broker that leads topic {topic:?} calls itself {called}, and cannot be reached there: {why}"
            ))
        }
        _ => Ok(()),
    }
}

fn failed(address: &Address, problem: &str) -> CheckFailed {
    let lower = problem.to_lowercase();
    let advice = if lower.contains("sasl state") || lower.contains("supported mechanisms") {
        "this listener has no SASL, or not this mechanism: use another listener, or take the user or the mechanism out of the URL"
    } else if lower.contains("invalid response") {
        "what listens there is no Kafka broker, or its listener has TLS: correct the URL"
    } else if lower.contains("authentication") {
        "correct the user, the password and the mechanism in the URL, with special characters percent-encoded"
    } else if lower.contains("ssl") || lower.contains("certificate") {
        "use kafkas:// where the broker's listener has TLS and kafka:// where it has not; for a CA of your own add cacertfile=/path/to/ca.pem"
    } else {
        "correct the URL, or start the broker; what it calls itself (advertised.listeners) must be reachable from here too"
    };
    CheckFailed { problem: format!("ask Kafka at {}: {problem}", address.brokers), advice: advice.to_owned() }
}

fn missing(topic: &str) -> CheckFailed {
    CheckFailed {
        problem: format!("topic {topic:?} does not exist"),
        advice: format!(
            "create it with `kafka-topics.sh --create --topic {topic} --partitions 12 --replication-factor 3`"
        ),
    }
}

fn unusable(problem: String) -> CheckFailed {
    CheckFailed { problem, advice: "correct the section in the configuration".to_owned() }
}

fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}
