//! TLS to a real RabbitMQ whose certificates a CA of the test's own has issued.

#![allow(clippy::unwrap_used)]

use postroom::{Batch, Message, Sink, Verdict};
use postroom_brokers::rabbitmq::{RabbitmqOptions, RabbitmqSink};
use postroom_testkit::authority::Authority;
use postroom_testkit::services::{RabbitServer, RabbitTls};
use postroom_testkit::surroundings::{scratch, unique};

/// An unroutable message: whoever judges it has connected.
async fn connects(url: &str) -> Result<(), String> {
    let sink = RabbitmqSink::new(RabbitmqOptions::new(url)).map_err(|error| error.to_string())?;
    let told = |error: postroom::Unavailable| {
        let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
        format!("{error}: {cause}")
    };
    let verdicts = sink.publish(&Batch::new(vec![Message::new("nobody", "k", "x")])).await.map_err(told)?;
    match verdicts.of(0) {
        Some(Verdict::Failed(..)) => Ok(()),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificates_of_a_private_authority_are_verified_both_ways() {
    let certificates = scratch("authority");
    let ca = Authority::create(&certificates, "relay");
    let tls = RabbitTls::new(&ca.root, &ca.server.certificate, &ca.server.key, true);
    let server = RabbitServer::start_with(&scratch("encrypted").join(unique()), Some(tls)).unwrap();
    let url = server.tls_url().unwrap();
    let (root, certificate, key) = (ca.root.display(), ca.client.certificate.display(), ca.client.key.display());
    connects(&format!("{url}?cacertfile={root}&certfile={certificate}&keyfile={key}")).await.unwrap();

    let unknown = connects(&url).await.unwrap_err();
    assert!(unknown.contains("cacertfile="), "{unknown}");
    let unasked = connects(&format!("{url}?cacertfile={root}")).await.unwrap_err();
    assert!(unasked.contains("guest:***@"), "{unasked}");
    let missing = connects(&format!("{url}?cacertfile=/nowhere.pem")).await.unwrap_err();
    assert!(missing.contains("cacertfile /nowhere.pem"), "{missing}");
    let no_tls_there = url.replace(
        &format!(":{}/", url.rsplit_once(':').unwrap().1.split('/').next().unwrap()),
        &format!(":{}/", server.port()),
    );
    let plain = connects(&format!("{no_tls_there}?cacertfile={root}")).await.unwrap_err();
    assert!(plain.contains("5671"), "{plain}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_certificate_for_another_name_is_refused() {
    let ca = Authority::create(&scratch("authority"), "relay");
    let tls = RabbitTls::new(&ca.root, &ca.elsewhere.certificate, &ca.elsewhere.key, false);
    let server = RabbitServer::start_with(&scratch("encrypted").join(unique()), Some(tls)).unwrap();
    let refused =
        connects(&format!("{}?cacertfile={}", server.tls_url().unwrap(), ca.root.display())).await.unwrap_err();
    assert!(refused.contains("another name"), "{refused}");
}
