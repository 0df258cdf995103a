//! A stream of a test's own, read without any of postroom's code: one connection a question, over the bare protocol.

use base64::Engine;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

/// A message as the stream has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    /// Its id; empty where it has none.
    pub id: String,
    /// Its subject.
    pub subject: String,
    /// The block of headers, as text.
    pub headers: String,
    /// Its payload.
    pub payload: Vec<u8>,
}

/// A stream.
#[derive(Debug, Clone)]
pub struct AuditStream {
    address: String,
    name: String,
}

impl AuditStream {
    /// Creates it, on the server at `HOST:PORT`, with these further settings.
    ///
    /// # Panics
    /// If the server cannot be reached, or refuses.
    pub async fn create(address: &str, name: &str, subjects: &[&str], further: Value) -> Self {
        let stream = Self { address: address.to_owned(), name: name.to_owned() };
        let mut config = json!({ "name": name, "subjects": subjects, "storage": "file" });
        for (key, value) in further.as_object().into_iter().flatten() {
            config[key] = value.clone();
        }
        stream.asked(&format!("STREAM.CREATE.{name}"), config).await;
        stream
    }

    /// What the server says of it.
    ///
    /// # Panics
    /// If the server cannot be reached, or refuses.
    pub async fn info(&self) -> Value {
        self.asked(&format!("STREAM.INFO.{}", self.name), Value::Null).await
    }

    /// Asks the API of JetStream.
    ///
    /// # Panics
    /// If the server cannot be reached, or refuses.
    pub async fn asked(&self, what: &str, body: Value) -> Value {
        let answer = ask(&self.address, &[(what.to_owned(), body)]).await.remove(0);
        assert!(answer["error"].is_null(), "{what}: {answer}");
        answer
    }

    /// Everything that it has, in its order.
    ///
    /// # Panics
    /// If the server cannot be reached, or refuses.
    pub async fn all(&self) -> Vec<Stored> {
        let state = &self.info().await["state"];
        let (first, last) = (state["first_seq"].as_u64().unwrap_or(1), state["last_seq"].as_u64().unwrap_or(0));
        let what = format!("STREAM.MSG.GET.{}", self.name);
        let questions: Vec<(String, Value)> = (first..=last).map(|seq| (what.clone(), json!({ "seq": seq }))).collect();
        let mut all = Vec::new();
        for some in questions.chunks(500) {
            for answer in ask(&self.address, some).await {
                let message = &answer["message"];
                if message.is_null() {
                    continue;
                }
                let bytes = |part: &str| {
                    let text = message[part].as_str().unwrap_or_default();
                    base64::engine::general_purpose::STANDARD.decode(text).expect("base64")
                };
                let headers = String::from_utf8_lossy(&bytes("hdrs")).into_owned();
                let id = headers.lines().find_map(|line| line.strip_prefix("Nats-Msg-Id: ")).unwrap_or_default();
                let subject = message["subject"].as_str().unwrap_or_default().to_owned();
                all.push(Stored { id: id.to_owned(), subject, headers: headers.clone(), payload: bytes("data") });
            }
        }
        all
    }

    /// The same, and takes it out.
    ///
    /// # Panics
    /// If the server cannot be reached, or refuses.
    pub async fn drain(&self) -> Vec<Stored> {
        let all = self.all().await;
        self.asked(&format!("STREAM.PURGE.{}", self.name), Value::Null).await;
        all
    }
}

/// Publishes bytes as they are, headers included, as a client does that knows nothing of postroom.
///
/// # Panics
/// If the server cannot be reached.
pub async fn publish_raw(address: &str, subject: &str, headers: &[u8], payload: &[u8]) {
    let mut stream = hello(address).await;
    let line = format!("HPUB {subject} {} {}\r\n", headers.len(), headers.len() + payload.len());
    let all = [line.as_bytes(), headers, payload, b"\r\nPING\r\n"].concat();
    stream.write_all(&all).await.expect("publish");
    until_pong(&mut stream).await;
}

async fn hello(address: &str) -> BufReader<TcpStream> {
    let mut stream = BufReader::new(TcpStream::connect(address).await.expect("connect to NATS"));
    let hello = b"CONNECT {\"verbose\":false,\"headers\":true,\"no_responders\":true}\r\nSUB a.* 1\r\nPING\r\n";
    stream.write_all(hello).await.expect("say hello");
    until_pong(&mut stream).await;
    stream
}

async fn until_pong(stream: &mut BufReader<TcpStream>) {
    let mut line = String::new();
    while line.trim() != "PONG" {
        assert!(!line.starts_with("-ERR"), "{line}");
        line.clear();
        assert!(stream.read_line(&mut line).await.expect("a line") > 0, "the server ended the connection");
    }
}

/// Answers in the order of the questions.
async fn ask(address: &str, questions: &[(String, Value)]) -> Vec<Value> {
    let mut stream = hello(address).await;
    let mut all = Vec::new();
    for (number, (what, body)) in questions.iter().enumerate() {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        all.extend_from_slice(format!("PUB $JS.API.{what} a.{number} {}\r\n{body}\r\n", body.len()).as_bytes());
    }
    stream.write_all(&all).await.expect("ask");
    let mut answers = vec![Value::Null; questions.len()];
    let mut left = questions.len();
    while left > 0 {
        let mut line = String::new();
        assert!(stream.read_line(&mut line).await.expect("a line") > 0, "the server ended the connection");
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        match words.as_slice() {
            ["PING"] => stream.write_all(b"PONG\r\n").await.expect("pong"),
            ["MSG", subject, _, size] => {
                let mut payload = vec![0; size.parse::<usize>().expect("a size") + 2];
                stream.read_exact(&mut payload).await.expect("a payload");
                let number: usize = subject["a.".len()..].parse().expect("our number");
                answers[number] = serde_json::from_slice(&payload).expect("JSON");
                left -= 1;
            }
            _ => panic!("{line}"),
        }
    }
    answers
}
