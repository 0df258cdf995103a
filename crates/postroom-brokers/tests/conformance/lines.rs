//! JSON lines appended to a file. Its far end is a disk: it refuses no message, and answers while the call lasts.

use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use postroom::Sink;
use postroom_brokers::lines::{FileOptions, LinesSink};
use postroom_testkit::conformance::Fixture;
use postroom_testkit::conformance::sink::{FarEnd, Fault, Stored};
use postroom_testkit::surroundings;

postroom_testkit::sink_conforms!(File);

pub struct File(PathBuf);

#[async_trait]
impl Fixture for File {
    async fn create() -> Self {
        Self(surroundings::scratch("lines").join("audit.jsonl"))
    }
}

#[async_trait]
impl FarEnd for File {
    async fn sink(&self) -> Arc<dyn Sink> {
        Arc::new(LinesSink::file(&FileOptions { path: self.0.clone() }))
    }

    async fn begin(&self, _: Fault) -> bool {
        false
    }

    async fn heal(&self) {}

    async fn stored(&self) -> Vec<Stored> {
        let text = std::fs::read_to_string(&self.0).unwrap();
        let stored = |line: &str| {
            let line: serde_json::Value = serde_json::from_str(line).unwrap();
            let payload = match line.get("payload") {
                Some(payload) => payload.as_str().unwrap().as_bytes().to_vec(),
                None => serde_json::from_value(line["payload_bytes"].clone()).unwrap(),
            };
            Stored { id: line["id"].as_str().unwrap().to_owned(), payload }
        };
        text.lines().map(stored).collect()
    }
}
