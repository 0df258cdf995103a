//! The rules and the dashboard in `deploy/`, on a real Prometheus that reads a real relay.

use std::path::{Path, PathBuf};

use postroom_testkit::proxy::{Link, Proxy};
use postroom_testkit::services::{Prometheus, promtool};
use postroom_testkit::surroundings;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::metrics::listening;
use crate::rig::Rig;

fn deploy(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy").join(file).canonicalize().unwrap()
}

#[test]
fn the_rules_are_valid_and_each_alert_fires_when_it_should() {
    let tests = deploy("prometheus/postroom.rules.test.yml");
    for arguments in [
        ["check", "config", deploy("prometheus/prometheus.yml").to_str().unwrap()],
        ["test", "rules", tests.to_str().unwrap()],
    ] {
        let output = promtool(&arguments).unwrap();
        assert!(output.status.success(), "{arguments:?}: {output:?}");
    }
    // Each alert has its section in the runbook, where its annotation points.
    let rules = std::fs::read_to_string(deploy("prometheus/postroom.rules.yml")).unwrap();
    let docs = std::fs::read_to_string(deploy("../docs/operating.md")).unwrap();
    let tested = std::fs::read_to_string(&tests).unwrap();
    let alerts: Vec<&str> = rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    assert!(alerts.len() > 15, "{alerts:?}");
    for alert in alerts {
        assert!(docs.contains(&format!("\n### Alert: {alert}\n")), "{alert} has no section");
        let anchor = format!("docs/operating.md#alert-{}", alert.to_lowercase());
        assert!(rules.contains(&anchor), "{alert} does not point to its section");
        assert!(tested.contains(alert), "{alert} is not tested");
    }
}

/// A Prometheus that reads one relay and knows our rules.
pub struct Watch(Prometheus);

impl Watch {
    pub fn start(admin: &str) -> Self {
        // As they are, but for the time that they wait before they fire.
        let rules = std::fs::read_to_string(deploy("prometheus/postroom.rules.yml")).unwrap();
        let hasty: Vec<String> = rules
            .lines()
            .map(|line| match line.trim().strip_prefix("for: ") {
                Some(_) => format!("{}for: 1s", &line[..line.len() - line.trim_start().len()]),
                None => line.to_owned(),
            })
            .collect();
        let dir = surroundings::scratch("prometheus");
        let file = dir.join("rules.yml");
        std::fs::write(&file, hasty.join("\n")).unwrap();
        Self(Prometheus::start(&dir.join("server"), admin, &file).unwrap())
    }

    async fn ask(&self, path: &str) -> Value {
        let mut stream = tokio::net::TcpStream::connect(self.0.address()).await.unwrap();
        let request = format!("GET {path} HTTP/1.0\r\nhost: {}\r\n\r\n", self.0.address());
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        let (_, body) = answer.split_once("\r\n\r\n").unwrap();
        serde_json::from_str(body).unwrap_or_default()
    }

    /// The names of the alerts that fire.
    pub async fn firing(&self) -> Vec<String> {
        let told = self.ask("/api/v1/alerts").await;
        let alerts = told["data"]["alerts"].as_array().cloned().unwrap_or_default();
        let firing = alerts.iter().filter(|alert| alert["state"] == "firing");
        firing.map(|alert| alert["labels"]["alertname"].as_str().unwrap_or_default().to_owned()).collect()
    }

    pub async fn fires(&self, alert: &str) -> bool {
        self.firing().await.iter().any(|firing| firing == alert)
    }

    /// Whether a query has an answer.
    async fn answers(&self, query: &str) -> bool {
        let told = self.ask(&format!("/api/v1/query?query={}", encoded(query))).await;
        // Nothing: it is still starting.
        assert_ne!(told["status"], "error", "{query}: {told}");
        told["data"]["result"].as_array().is_some_and(|result| !result.is_empty())
    }
}

fn encoded(query: &str) -> String {
    query.bytes().map(|byte| format!("%{byte:02X}")).collect()
}

/// The queries of all panels, with everything for the variables.
fn queries(dashboard: &Value, found: &mut Vec<String>) {
    match dashboard {
        Value::Object(fields) => {
            if let Some(Value::String(query)) = fields.get("expr") {
                let query = query
                    .replace("$__rate_interval", "1m")
                    .replace("$__range", "5m")
                    .replace("$__interval", "15s")
                    .replace("$route", ".*")
                    .replace("$consumer", ".*")
                    .replace("$store", ".*");
                found.push(query);
            }
            fields.values().for_each(|value| queries(value, found));
        }
        Value::Array(values) => values.iter().for_each(|value| queries(value, found)),
        _ => {}
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_alert_fires_when_the_broker_goes_and_resolves_when_it_is_back() {
    let rig = Rig::shared().await;
    let broker = surroundings::rabbitmq_url();
    let (_, address) = broker.rsplit_once('@').unwrap();
    let address = address.split('/').next().unwrap();
    let link = Proxy::to(address).await;
    let broker = broker.replace(address, &link.address());
    let (relay, admin) = listening(&rig, rig.database.url(), &broker, "").await;
    rig.write_some(200).await;
    rig.drained().await;

    let watch = Watch::start(&admin);
    rig.until("Prometheus has read it", async || watch.answers("outbox_queue_lag_seconds").await).await;
    // Without the time that they usually wait, some fire until the relay has looked at its store.
    rig.until("nothing is wrong", async || watch.firing().await.is_empty()).await;

    link.set(Link::BlackHole);
    link.reset();
    rig.until("the alert fires", async || watch.fires("PostroomSinkDown").await).await;
    link.set(Link::Open);
    rig.until("the alert is over", async || !watch.fires("PostroomSinkDown").await).await;

    // The queries of the dashboard are understood, and those about what this relay has and does have an answer.
    let dashboard = std::fs::read_to_string(deploy("grafana/postroom.json")).unwrap();
    let mut all = Vec::new();
    queries(&serde_json::from_str(&dashboard).unwrap(), &mut all);
    assert!(all.len() > 15, "{all:?}");
    let mut answered = 0;
    for query in &all {
        answered += usize::from(watch.answers(query).await);
    }
    assert!(answered * 2 > all.len(), "{answered} of {} have an answer", all.len());
    for name in ["outbox_queue_lag_seconds", "outbox_attempt_rate", "outbox_dead_ratio"] {
        assert!(watch.answers(name).await, "{name}");
    }
    assert_eq!(relay.terminate().0, Some(0));
}
