//! What an HTTP endpoint gets, and what the sink makes of its answers.

#![cfg(feature = "http")]
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use postroom::{Batch, FailureKind, Message, Sink, Verdict};
use postroom_brokers::CloudEvents;
use postroom_brokers::SinkOptions;
use postroom_brokers::http::{HttpOptions, HttpSink};

/// A request as it came.
#[derive(Debug, Clone)]
struct Got {
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
}

impl Got {
    fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }
}

#[derive(Clone, Default)]
struct Endpoint {
    got: Arc<Mutex<Vec<Got>>>,
    address: String,
}

/// The path says what is answered: `/500/x` status 500.
async fn answer(
    State(endpoint): State<Endpoint>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let first = uri.path().split('/').nth(1).unwrap_or_default().to_owned();
    endpoint.got.lock().unwrap().push(Got { method, uri, headers, body });
    match first.as_str() {
        "pause" => (StatusCode::TOO_MANY_REQUESTS, [("retry-after", "1")]).into_response(),
        "away" => (StatusCode::FOUND, [("location", format!("http://{}/200/there", endpoint.address))]).into_response(),
        "never" => std::future::pending().await,
        "long" => (StatusCode::OK, "x".repeat(1_000_000)).into_response(),
        status => StatusCode::from_u16(status.parse().unwrap_or(200)).unwrap().into_response(),
    }
}

impl Endpoint {
    async fn start() -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = Self { address: listener.local_addr().unwrap().to_string(), ..Self::default() };
        let app = Router::new().fallback(answer).with_state(endpoint.clone());
        tokio::spawn(async move { axum::serve(listener, app).await });
        endpoint
    }

    fn options(&self, path: &str) -> HttpOptions {
        let mut options = HttpOptions::new(format!("http://{}{path}", self.address));
        (options.private_addresses, options.deadline_seconds) = (true, 2);
        options
    }

    /// What came, and is forgotten.
    fn posts(&self) -> Vec<Got> {
        let got = std::mem::take(&mut *self.got.lock().unwrap());
        got.into_iter().filter(|got| got.method == Method::POST).collect()
    }
}

fn message(kind: &str, key: &str) -> Message {
    Message::new("orders", kind, r#"{"n":1}"#).key(key).content_type("application/json")
}

async fn published(sink: &HttpSink, messages: &[Message]) -> Vec<Verdict> {
    let mut verdicts = sink.publish(&Batch::new(messages.iter().cloned())).await.unwrap();
    (0..messages.len()).map(|place| verdicts.take(place)).collect()
}

fn kind(verdict: &Verdict) -> Option<FailureKind> {
    match verdict {
        Verdict::Failed(failure) => Some(failure.kind),
        _ => None,
    }
}

/// As receivers do it, with the command line's tools.
fn signed(secret: &str, id: &str, timestamp: &str, body: &[u8]) -> String {
    let decoded = run("base64", &["-d"], secret.trim_start_matches("whsec_").as_bytes());
    let key: String = decoded.iter().map(|byte| format!("{byte:02x}")).collect();
    let text = [format!("{id}.{timestamp}.").as_bytes(), body].concat();
    let mac =
        run("openssl", &["dgst", "-sha256", "-mac", "HMAC", "-macopt", &format!("hexkey:{key}"), "-binary"], &text);
    format!("v1,{}", String::from_utf8(run("base64", &["-w0"], &mac)).unwrap())
}

fn run(program: &str, arguments: &[&str], input: &[u8]) -> Vec<u8> {
    use std::io::Write;
    use std::process::{Command, Stdio};
    let mut process =
        Command::new(program).args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    process.stdin.take().unwrap().write_all(input).unwrap();
    process.wait_with_output().unwrap().stdout
}

#[tokio::test]
async fn a_request_has_the_message_and_signatures_that_a_receiver_can_verify() {
    let endpoint = Endpoint::start().await;
    let mut options = endpoint.options("/200/{topic}/{tenant_id}?kind={type}");
    let secrets = ["whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="];
    options.secrets = secrets.map(str::to_owned).to_vec();
    options.headers = BTreeMap::from([("authorization".to_owned(), "Bearer secret".to_owned())]);
    assert!(!format!("{options:?} {}", options.shown()).contains("secret"));
    let sink = HttpSink::new(options).unwrap();
    let message =
        message("order.placed", "k").tenant("a/b").header("traceparent", "00-1-2-01").header("Authorization", "forged");
    assert_eq!(published(&sink, std::slice::from_ref(&message)).await, [Verdict::Stored]);
    let got = endpoint.posts().remove(0);
    assert_eq!(got.uri.to_string(), "/200/orders/a%2Fb?kind=order.placed");
    assert_eq!(got.body.as_ref(), message.payload.as_ref());
    let (id, timestamp) = (message.id.to_string(), got.header("webhook-timestamp").unwrap());
    assert_eq!(got.header("webhook-id"), Some(id.as_str()));
    let expected = secrets.map(|secret| signed(secret, &id, timestamp, &got.body)).join(" ");
    assert_eq!(got.header("webhook-signature"), Some(expected.as_str()));
    assert_eq!(
        (got.header("authorization"), got.header("content-type")),
        (Some("Bearer secret"), Some("application/json"))
    );
    assert_eq!((got.header("traceparent"), got.header("postroom-type")), (Some("00-1-2-01"), Some("order.placed")));
    assert!(got.header("postroom-headers").unwrap().contains("forged"));
}

#[tokio::test]
async fn an_event_is_one_of_cloudevents() {
    let endpoint = Endpoint::start().await;
    for mode in [CloudEvents::Binary, CloudEvents::Structured] {
        let mut options = endpoint.options("/200");
        (options.cloudevents, options.source) = (Some(mode), Some("https://shop.example".to_owned()));
        let message = message("order.placed", "k").aggregate("order", "o-1", 3);
        assert_eq!(
            published(&HttpSink::new(options).unwrap(), std::slice::from_ref(&message)).await,
            [Verdict::Stored]
        );
        let got = endpoint.posts().remove(0);
        if mode == CloudEvents::Binary {
            assert_eq!((got.header("ce-type"), got.header("ce-subject")), (Some("order.placed"), Some("o-1")));
            assert_eq!((got.header("ce-specversion"), got.body.as_ref()), (Some("1.0"), message.payload.as_ref()));
        } else {
            assert_eq!(got.header("content-type"), Some("application/cloudevents+json; charset=UTF-8"));
            let event: serde_json::Value = serde_json::from_slice(&got.body).unwrap();
            assert_eq!((&event["id"], &event["data"]["n"]), (&message.id.to_string().into(), &1.into()));
        }
    }
}

/// I4: what fails holds up its key, and no other.
#[tokio::test]
async fn an_endpoint_that_fails_holds_up_its_own_keys_alone() {
    let endpoint = Endpoint::start().await;
    let sink = HttpSink::new(endpoint.options("/{type}")).unwrap();
    let messages = [("200", "a"), ("500", "b"), ("200", "b"), ("200", "c"), ("422", "a"), ("200", "a"), ("200", "c")];
    let messages = messages.map(|(kind, key)| message(kind, key));
    let verdicts = published(&sink, &messages).await;
    assert_eq!([0, 3, 6].map(|place| &verdicts[place]), [&Verdict::Stored; 3]);
    assert_eq!((kind(&verdicts[1]), kind(&verdicts[4])), (Some(FailureKind::Transient), Some(FailureKind::Permanent)));
    for place in [2, 5] {
        assert_eq!(verdicts[place], Verdict::NotSent);
    }
    assert_eq!(endpoint.posts().len(), 5, "what comes behind was not sent");
}

#[tokio::test]
async fn an_endpoint_that_wants_a_pause_gets_it_and_burns_no_attempt() {
    let endpoint = Endpoint::start().await;
    let sink = HttpSink::new(endpoint.options("/{type}/x")).unwrap();
    let pausing = message("pause", "a");
    assert_eq!(kind(&published(&sink, std::slice::from_ref(&pausing)).await[0]), Some(FailureKind::Busy));
    let again = published(&sink, &[pausing.clone(), message("200", "b")]).await;
    assert_eq!((kind(&again[0]), &again[1]), (Some(FailureKind::Busy), &Verdict::Stored));
    assert_eq!(endpoint.posts().iter().filter(|got| got.uri.path() == "/pause/x").count(), 1, "left alone meanwhile");
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    published(&sink, std::slice::from_ref(&pausing)).await;
    assert_eq!(endpoint.posts().len(), 1, "and asked again then");
}

#[tokio::test]
async fn redirects_lead_nowhere_and_private_addresses_are_refused_unless_they_are_meant() {
    let endpoint = Endpoint::start().await;
    let sink = HttpSink::new(endpoint.options("/away")).unwrap();
    let verdict = published(&sink, &[message("x", "a")]).await.remove(0);
    let Verdict::Failed(failure) = &verdict else { panic!("{verdict:?}") };
    assert!(
        failure.kind == FailureKind::Transient && failure.reason.contains("redirects are not followed"),
        "{failure:?}"
    );
    assert_eq!(endpoint.posts().len(), 1);
    // A name that leads to this machine.
    let port = endpoint.address.rsplit(':').next().unwrap();
    let sink = HttpSink::new(HttpOptions::new(format!("http://localhost:{port}/200"))).unwrap();
    let error = sink.publish(&Batch::new([message("x", "a")])).await.unwrap_err();
    let why = std::error::Error::source(&error).unwrap().to_string();
    assert!(why.contains("private_addresses"), "{why}");
    assert!(sink.probe().await.is_err() && endpoint.posts().is_empty());
    let checked = HttpOptions::new(format!("http://localhost:{port}/200")).check().await.unwrap_err();
    assert!(checked.advice.contains("private_addresses"), "{checked:?}");
    let checked = endpoint.options("/405/x").check().await.unwrap();
    assert!(
        checked.contains("405") && checked.contains("not signed") && checked.contains("not encrypted"),
        "{checked}"
    );
}

#[tokio::test]
async fn silence_and_an_endpoint_that_is_away_are_told_apart() {
    let endpoint = Endpoint::start().await;
    let sink = HttpSink::new(endpoint.options("/{type}")).unwrap();
    let verdicts = published(&sink, &[message("never", "a")]).await;
    assert!(matches!(&verdicts[0], Verdict::Unknown(why) if why.contains("no answer within 2 s")), "{verdicts:?}");
    let verdicts = published(&sink, &[message("never", "a"), message("long", "b")]).await;
    assert_eq!(verdicts[1], Verdict::Stored, "however long its answer is");
    // Alone too: the host is known to be up.
    for verdict in [&verdicts[0], &published(&sink, &[message("never", "a")]).await[0]] {
        let Verdict::Failed(failure) = verdict else { panic!("{verdict:?}") };
        assert!(
            failure.kind == FailureKind::Busy && failure.reason.contains("is not known"),
            "only its key waits: {failure:?}"
        );
    }
    let nobody = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let mut options = HttpOptions::new(format!("http://{nobody}/x?token=secret"));
    options.private_addresses = true;
    let sink = HttpSink::new(options).unwrap();
    let error = sink.publish(&Batch::new([message("x", "a"), message("x", "b")])).await.unwrap_err();
    let text = format!("{error}: {}", std::error::Error::source(&error).unwrap());
    assert!(text.contains(&nobody.to_string()) && text.contains("refused") && !text.contains("secret"), "{text}");
}

/// Answers requests with these bytes, in pieces with a pause between them, and then closes the connection if that is asked for. Returns its
/// address and how many requests of `POST` it has read.
async fn raw(pieces: &'static [&'static [u8]], closes: bool) -> (String, Arc<std::sync::atomic::AtomicUsize>) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let posts: Arc<std::sync::atomic::AtomicUsize> = Arc::default();
    let counted = posts.clone();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let counted = counted.clone();
            tokio::spawn(async move {
                let mut read = Vec::new();
                loop {
                    let whole = read.windows(4).position(|bytes| bytes == b"\r\n\r\n").and_then(|head| {
                        let text = String::from_utf8_lossy(&read[..head]).to_lowercase();
                        let length = text.split("content-length: ").nth(1).and_then(|rest| rest.lines().next());
                        let end = head + 4 + length.map_or(0, |length| length.trim().parse::<usize>().unwrap());
                        (read.len() >= end).then_some((text.starts_with("post"), end))
                    });
                    let Some((is_post, end)) = whole else {
                        if stream.read_buf(&mut read).await.unwrap_or(0) == 0 {
                            return;
                        }
                        continue;
                    };
                    read.drain(..end);
                    if !is_post {
                        // It serves nothing but `POST`.
                        return;
                    }
                    counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    for piece in pieces {
                        if stream.write_all(piece).await.is_err() {
                            return;
                        }
                        tokio::time::sleep(Duration::from_millis(2)).await;
                    }
                    if closes {
                        return;
                    }
                }
            });
        }
    });
    (address, posts)
}

/// The messages of 20 batches, each to a url of its own; how many were not stored at once.
async fn not_stored(options: HttpOptions) -> usize {
    let sink = HttpSink::new(options).unwrap();
    sink.probe().await.unwrap();
    let mut others = 0;
    for _ in 0..20 {
        let messages: Vec<Message> = (0..8).map(|key| message("x", &format!("k{key}"))).collect();
        others += published(&sink, &messages).await.iter().filter(|verdict| **verdict != Verdict::Stored).count();
    }
    others
}

/// Neither is a fault of a message.
#[tokio::test]
async fn connections_that_end_between_requests_and_answers_with_a_rest_hold_up_nobody() {
    let with = |address: &str| {
        let mut options = HttpOptions::new(format!("http://{address}/{{key}}"));
        (options.private_addresses, options.deadline_seconds) = (true, 5);
        options
    };
    let (closing, posts) = raw(&[b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"], true).await;
    assert_eq!(not_stored(with(&closing)).await, 0);
    assert!(posts.load(std::sync::atomic::Ordering::Relaxed) <= 160 + 8, "{posts:?}");
    // `204` has no body, and servers made by hand send one nevertheless, a moment later.
    let (talking, posts) = raw(&[b"HTTP/1.1 204 No Content\r\n\r\n", b"{\"ok\":true}"], false).await;
    assert_eq!(not_stored(with(&talking)).await, 0);
    assert!(
        posts.load(std::sync::atomic::Ordering::Relaxed) <= 160 + 8,
        "only those of the first batches are repeated: {posts:?}"
    );
    // One answer too many, which passes for that of the next request of the connection.
    let twice: &[&[u8]] =
        &[b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"];
    let (lying, posts) = raw(twice, false).await;
    let mut options = with(&lying);
    options.reuse_connections = false;
    assert_eq!(not_stored(options).await, 0);
    assert_eq!(posts.load(std::sync::atomic::Ordering::Relaxed), 160, "each was read before it counted as stored");
}

/// A field of the message that would lead elsewhere.
#[tokio::test]
async fn a_message_whose_url_cannot_be_made_is_dead_at_once() {
    let endpoint = Endpoint::start().await;
    let sink = HttpSink::new(endpoint.options("/200/{tenant_id}/{type}")).unwrap();
    let verdicts =
        published(&sink, &[message("x", "a"), message("..", "b").tenant("t"), message("x", "c").tenant("t")]).await;
    assert_eq!([kind(&verdicts[0]), kind(&verdicts[1])], [Some(FailureKind::Permanent); 2], "{verdicts:?}");
    assert_eq!(verdicts[2], Verdict::Stored);
}

/// An HTTPS server that asks for a client certificate.
const SECURE: &str = "
import http.server, ssl, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    def answer(self):
        self.rfile.read(int(self.headers.get('content-length', 0)))
        self.send_response(204)
        self.end_headers()
    do_POST = do_HEAD = answer
    def log_message(self, *args): pass
server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(sys.argv[1], sys.argv[2])
if sys.argv[3] != '-':
    context.load_verify_locations(sys.argv[3])
    context.verify_mode = ssl.CERT_REQUIRED
server.socket = context.wrap_socket(server.socket, server_side=True)
print(server.server_address[1], flush=True)
server.serve_forever()
";

struct Secure {
    process: std::process::Child,
    port: String,
}

impl Secure {
    fn start(issued: &postroom_testkit::authority::Issued, ca: Option<&std::path::Path>) -> Self {
        use std::io::BufRead;
        let mut command = std::process::Command::new("python3");
        command.arg("-c").arg(SECURE).arg(&issued.certificate).arg(&issued.key).arg(ca.unwrap_or("-".as_ref()));
        let mut process = command.stdout(std::process::Stdio::piped()).spawn().unwrap();
        let mut port = String::new();
        std::io::BufReader::new(process.stdout.as_mut().unwrap()).read_line(&mut port).unwrap();
        Self { process, port: port.trim().to_owned() }
    }

    /// Why a request to it fails; none: it does not.
    async fn refuses(&self, query: &str) -> Option<String> {
        let mut options = HttpOptions::new(format!("https://localhost:{}/x{query}", self.port));
        options.private_addresses = true;
        let sink = HttpSink::new(options).unwrap();
        match sink.publish(&Batch::new([message("x", "a")])).await {
            Ok(mut verdicts) => match verdicts.take(0) {
                Verdict::Stored => None,
                // The server says no to a certificate after the handshake.
                other => Some(format!("{other:?}")),
            },
            Err(error) => Some(std::error::Error::source(&error).unwrap().to_string()),
        }
    }
}

impl Drop for Secure {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[tokio::test]
async fn certificates_are_verified_on_both_sides() {
    use postroom_testkit::authority::Authority;
    let ca = Authority::create(&postroom_testkit::surroundings::scratch("http-authority"), "relay");
    let (root, certificate, key) = (ca.root.display(), ca.client.certificate.display(), ca.client.key.display());
    let server = Secure::start(&ca.server, Some(&ca.root));
    let all = format!("?cacertfile={root}&certfile={certificate}&keyfile={key}");
    assert_eq!(server.refuses(&all).await, None);
    let unknown = server.refuses("").await.unwrap();
    assert!(unknown.contains("cacertfile="), "{unknown}");
    assert!(server.refuses(&format!("?cacertfile={root}")).await.is_some(), "without the client's certificate");
    let elsewhere = Secure::start(&ca.elsewhere, None);
    let other = elsewhere.refuses(&format!("?cacertfile={root}")).await.unwrap();
    assert!(other.contains("another name"), "{other}");
}
