//! E-mail, through a link that loses, holds and slows down what it carries. Messages get a recipient by their routing key.

use std::sync::Arc;

use async_trait::async_trait;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use postroom::{Batch, Message, Sink, SinkLimits, Unavailable, Verdicts};
use postroom_brokers::smtp::{SmtpOptions, SmtpSink};
use postroom_testkit::conformance::Fixture;
use postroom_testkit::conformance::sink::{FarEnd, Fault, Stored};
use postroom_testkit::proxy::{Link, Proxy};
use postroom_testkit::services::SmtpServer;
use postroom_testkit::surroundings;
use serde_json::Value;

pub struct MailServer {
    server: SmtpServer,
    link: Proxy,
}

mod sink {
    postroom_testkit::sink_conforms!(super::MailServer);
}

/// Writes to `accepted@…` and `refused@…`.
struct Addressed(SmtpSink);

#[async_trait]
impl Sink for Addressed {
    fn limits(&self) -> SinkLimits {
        self.0.limits()
    }

    async fn publish(&self, batch: &Batch) -> Result<Verdicts, Unavailable> {
        let messages = batch.messages().iter().map(|message| {
            let to = format!("{}@example.org", message.address());
            Message::clone(message).header("mail-to", to)
        });
        self.0.publish(&Batch::new(messages)).await
    }

    async fn probe(&self) -> Result<(), Unavailable> {
        self.0.probe().await
    }

    async fn close(&self) {
        self.0.close().await;
    }
}

#[async_trait]
impl Fixture for MailServer {
    async fn create() -> Self {
        let server = SmtpServer::start(&surroundings::scratch("smtp"), "{}").unwrap();
        let link = Proxy::to(&server.address()).await;
        Self { server, link }
    }
}

#[async_trait]
impl FarEnd for MailServer {
    async fn sink(&self) -> Arc<dyn Sink> {
        let options = SmtpOptions::new(format!("smtp://{}", self.link.address()), "shop@example.com");
        let options = SmtpOptions { publish_deadline_seconds: 2, ..options };
        Arc::new(Addressed(SmtpSink::new(options).unwrap()))
    }

    async fn begin(&self, fault: Fault) -> bool {
        match fault {
            Fault::Reject => {}
            Fault::StoreAndFail => self.link.set(Link::RepliesLost),
            Fault::Hold => self.link.set(Link::BlackHole),
            Fault::Slow => self.link.set(Link::Throttled(2_000)),
        }
        true
    }

    async fn heal(&self) {
        self.link.set(Link::Open);
        // A connection that lost an answer stays without answers.
        self.link.reset();
    }

    async fn stored(&self) -> Vec<Stored> {
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let mails = self.server.mails().unwrap().into_iter().map(|mail| serde_json::from_str::<Value>(&mail).unwrap());
        mails
            .map(|mail| Stored { id: text(&mail["id"]), payload: STANDARD.decode(text(&mail["payload"])).unwrap() })
            .collect()
    }
}
