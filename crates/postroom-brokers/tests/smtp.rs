//! What a mail server does with what the sink sends, and what the sink makes of its answers.

#![cfg(feature = "smtp")]
#![allow(clippy::unwrap_used)]

use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use postroom::{Batch, FailureKind, Message, Sink, Verdict};
use postroom_brokers::SinkOptions;
use postroom_brokers::smtp::{SmtpOptions, SmtpSink};
use postroom_testkit::authority::Authority;
use postroom_testkit::services::SmtpServer;
use postroom_testkit::surroundings;
use serde_json::{Value, json};

fn server(asked: &Value) -> SmtpServer {
    SmtpServer::start(&surroundings::scratch("smtp"), &asked.to_string()).unwrap()
}

fn options(server: &SmtpServer) -> SmtpOptions {
    let options = SmtpOptions::new(format!("smtp://{}", server.address()), "Shop <shop@example.com>");
    SmtpOptions { publish_deadline_seconds: 10, ..options }
}

fn to(recipients: &str) -> Message {
    Message::new("orders", "order.placed", "Grüße\n.\nvon uns\n")
        .content_type("text/plain")
        .header("mail-to", recipients)
}

fn mails(server: &SmtpServer) -> Vec<Value> {
    server.mails().unwrap().iter().map(|mail| serde_json::from_str(mail).unwrap()).collect()
}

async fn published(options: &SmtpOptions, messages: &[Message]) -> Vec<Verdict> {
    let sink = SmtpSink::new(options.clone()).unwrap();
    let mut verdicts = sink.publish(&Batch::new(messages.iter().cloned())).await.unwrap();
    sink.close().await;
    (0..messages.len()).map(|place| verdicts.take(place)).collect()
}

fn failed(verdict: &Verdict) -> (FailureKind, &str) {
    match verdict {
        Verdict::Failed(failure) => (failure.kind, &failure.reason),
        other => panic!("{other:?}"),
    }
}

fn why(error: &postroom::Unavailable) -> String {
    std::error::Error::source(error).unwrap().to_string()
}

#[tokio::test]
async fn a_mail_is_what_its_message_says_and_has_nothing_else() {
    let server = server(&json!({}));
    let sent = to("Ann <ann@example.org>, bob@example.org")
        .header("mail-bcc", "eve@example.org")
        .header("mail-subject", "Ihre Bestellung für Ä")
        .header("traceparent", "secret")
        .tenant("t");
    let bytes = Message { payload: (0..=255).collect::<Vec<u8>>().into(), ..to("ann@example.org") };
    let bytes = bytes.content_type("application/pdf");
    let verdicts = published(&options(&server), &[sent.clone(), bytes.clone()]).await;
    assert_eq!(verdicts, [Verdict::Stored, Verdict::Stored]);
    let mails = mails(&server);
    let (first, second) = (&mails[0], &mails[1]);
    assert_eq!(first["to"], json!(["ann@example.org", "bob@example.org", "eve@example.org"]));
    assert_eq!((&first["from"], &first["id"]), (&json!("shop@example.com"), &json!(sent.id.to_string())));
    assert_eq!(first["subject"], json!("Ihre Bestellung für Ä"));
    let payload = |mail: &Value| STANDARD.decode(mail["payload"].as_str().unwrap()).unwrap();
    let text = String::from_utf8(payload(first)).unwrap();
    assert_eq!(text.replace("\r\n", "\n").trim_end(), "Grüße\n.\nvon uns");
    let names = first["names"].to_string().to_lowercase();
    assert!(!names.contains("bcc") && !names.contains("trace") && !names.contains("postroom"), "{names}");
    assert_eq!((payload(second), &second["subject"]), (bytes.payload.to_vec(), &json!("order.placed")));
}

#[tokio::test]
async fn what_is_refused_is_judged_by_its_answer_and_goes_to_nobody() {
    let server = server(&json!({"size": 3000, "utf8": false}));
    let batch = [
        to("ann@example.org"),
        to("ann@example.org, nobody@example.org"),
        to("greylisted@example.org"),
        to("full@example.org"),
        to("spam@example.org"),
        Message { payload: "x".repeat(4_000).into(), ..to("ann@example.org") },
        to("änn@example.org"),
        to("nonsense"),
        to("ann@example.org").header("mail-from", "forbidden@example.org"),
        to("bob@example.org"),
    ];
    let verdicts = published(&options(&server), &batch).await;
    assert_eq!((&verdicts[0], &verdicts[9]), (&Verdict::Stored, &Verdict::Stored));
    let told = |place: usize, kind, text: &str| {
        let (found, reason) = failed(&verdicts[place]);
        assert!(found == kind && reason.contains(text), "{place}: {found:?} {reason}");
    };
    told(1, FailureKind::Permanent, "the recipient nobody@example.org is refused: 550");
    told(2, FailureKind::Transient, "450");
    told(3, FailureKind::Busy, "452");
    told(4, FailureKind::Permanent, "the mail is refused: 554");
    told(5, FailureKind::Permanent, "takes 3000 (SIZE)");
    told(6, FailureKind::Permanent, "SMTPUTF8");
    told(7, FailureKind::Permanent, "no list of mail addresses");
    told(8, FailureKind::Permanent, "the sender forbidden@example.org is refused: 553");
    let recipients: Vec<Value> = mails(&server).iter().map(|mail| mail["to"].clone()).collect();
    assert_eq!(recipients, [json!(["ann@example.org"]), json!(["bob@example.org"])]);
    // Of one key, nothing goes past what failed.
    let keyed = [to("greylisted@example.org").key("k"), to("ann@example.org").key("k"), to("bob@example.org").key("l")];
    let verdicts = published(&options(&server), &keyed).await;
    assert_eq!((&verdicts[1], &verdicts[2]), (&Verdict::NotSent, &Verdict::Stored));
    // A sender that is never allowed is the route's fault, and costs no message anything.
    let forbidden = SmtpOptions { from: "forbidden@example.com".to_owned(), ..options(&server) };
    let sink = SmtpSink::new(forbidden).unwrap();
    let error = sink.publish(&Batch::new([to("ann@example.org")])).await.unwrap_err();
    assert!(why(&error).contains("forbidden@example.com is refused: 553"), "{error:?}");
}

#[tokio::test]
async fn silence_behind_a_whole_mail_is_unknown_and_a_server_that_comes_back_goes_on() {
    let mut server = server(&json!({}));
    let sink = SmtpSink::new(SmtpOptions { publish_deadline_seconds: 2, ..options(&server) }).unwrap();
    let publish = async |messages: &[Message]| sink.publish(&Batch::new(messages.iter().cloned())).await;
    let batch = [to("ann@example.org"), to("silent@example.org"), to("bob@example.org")];
    let mut verdicts = publish(&batch).await.unwrap();
    assert_eq!(verdicts.take(0), Verdict::Stored);
    assert!(matches!(verdicts.take(1), Verdict::Unknown(_)));
    assert_eq!(verdicts.take(2), Verdict::NotSent);
    assert_eq!(mails(&server).len(), 2, "it has the one that it did not answer for");
    assert_eq!(publish(&batch[2..]).await.unwrap().take(0), Verdict::Stored);
    server.kill().unwrap();
    assert!(publish(&batch[..1]).await.is_err() && sink.probe().await.is_err());
    server.start_again().unwrap();
    sink.probe().await.unwrap();
    assert_eq!(publish(&batch[..1]).await.unwrap().take(0), Verdict::Stored);
}

#[tokio::test]
async fn mails_are_encrypted_and_certificates_verified() {
    let dir = surroundings::scratch("smtp-tls");
    let authority = Authority::create(&dir, "relay");
    let path = |path: &Path| path.display().to_string();
    let (root, issued) = (path(&authority.root), &authority.server);
    for tls in ["starttls", "implicit"] {
        let server = server(&json!({
            "tls": tls, "certificate": path(&issued.certificate), "key": path(&issued.key), "login": ["relay", "p@ss"]
        }));
        let scheme = if tls == "implicit" { "smtps" } else { "smtp" };
        let of = |login: &str, query: &str| SmtpOptions {
            url: format!("{scheme}://{login}localhost:{}{query}", server.port()),
            ..options(&server)
        };
        let trusted = of("relay:p%40ss@", &format!("?cacertfile={root}"));
        let found = trusted.check().await.unwrap();
        assert!(found.contains("encrypted with TLS"), "{found}");
        assert_eq!(published(&trusted, &[to("ann@example.org")]).await, [Verdict::Stored]);
        assert_eq!(mails(&server)[0]["encrypted"], json!(true));
        assert!(of("relay:p%40ss@", "").check().await.unwrap_err().problem.contains("certificate"));
        let error = of("relay:s3cret@", &format!("?cacertfile={root}")).check().await.unwrap_err();
        assert!(error.problem.contains("the login is refused: 535") && error.advice.contains("password"), "{error:?}");
        assert!(!format!("{error:?}").contains("s3cret"), "{error:?}");
        let sink = SmtpSink::new(of("", &format!("?cacertfile={root}"))).unwrap();
        let error = sink.publish(&Batch::new([to("ann@example.org")])).await.unwrap_err();
        assert!(why(&error).contains("530"), "{error:?}");
    }
}

#[tokio::test]
async fn what_is_wrong_with_a_server_or_an_option_is_told() {
    let server = server(&json!({}));
    let found = options(&server).check().await.unwrap();
    assert!(found.contains("up to 33554432 bytes") && found.contains("not encrypted"), "{found}");
    for (url, from) in [
        ("smtp://h/path", "shop@example.com"),
        ("smtp://:secret@h", "shop@example.com"),
        ("mail://h", "shop@example.com"),
        ("smtp://h", "shop"),
        ("smtp://h", "shop@example.com\n"),
    ] {
        assert!(SmtpSink::new(SmtpOptions::new(url, from)).is_err(), "{url} {from}");
    }
    let nobody = SmtpOptions::new("smtp://127.0.0.1:1", "a@b.c").check().await.unwrap_err();
    assert!(nobody.problem.contains("127.0.0.1:1") && nobody.advice.contains("start the server"), "{nobody:?}");
    let with_login = SmtpOptions::new(format!("smtp://relay:s3cret@{}", server.address()), "a@b.c");
    let error = with_login.check().await.unwrap_err();
    assert!(error.problem.contains("is not offered") && !format!("{error:?}").contains("s3cret"), "{error:?}");
    // Whoever names a CA is never in clear.
    let root = Authority::create(&surroundings::scratch("smtp-root"), "relay").root;
    let url = format!("smtp://{}?cacertfile={}", server.address(), root.display());
    let error = SmtpOptions::new(url, "a@b.c").check().await.unwrap_err();
    assert!(error.problem.contains("no STARTTLS"), "{error:?}");
}
