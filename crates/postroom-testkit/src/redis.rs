//! Streams of a test's own, read without any of postroom's code: one connection a question, over the bare protocol.

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

/// What a server says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Said {
    /// A status or a string.
    Text(Vec<u8>),
    /// An error.
    Error(String),
    /// A number.
    Number(i64),
    /// Nothing.
    Nothing,
    /// An array.
    Array(Vec<Said>),
}

impl Said {
    /// A string as text, a number as digits.
    ///
    /// # Panics
    /// If it is something else.
    #[must_use]
    pub fn text(&self) -> String {
        match self {
            Self::Text(text) => String::from_utf8_lossy(text).into_owned(),
            Self::Number(number) => number.to_string(),
            other => panic!("{other:?}"),
        }
    }

    /// The elements of an array; none of nothing.
    ///
    /// # Panics
    /// If it is something else.
    #[must_use]
    pub fn array(&self) -> &[Said] {
        match self {
            Self::Array(elements) => elements,
            Self::Nothing => &[],
            other => panic!("{other:?}"),
        }
    }
}

/// An entry of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredEntry {
    /// Its place.
    pub at: String,
    /// The message id; empty where it has none.
    pub id: String,
    /// The payload.
    pub payload: Vec<u8>,
}

/// Asks a server at `HOST:PORT`.
///
/// # Panics
/// If it cannot be reached.
pub async fn ask(address: &str, command: &[&str]) -> Said {
    let mut stream = BufReader::new(TcpStream::connect(address).await.expect("connect"));
    let mut written = format!("*{}\r\n", command.len());
    for argument in command {
        written.push_str(&format!("${}\r\n{argument}\r\n", argument.len()));
    }
    stream.write_all(written.as_bytes()).await.expect("write");
    said(&mut stream).await
}

async fn said(stream: &mut BufReader<TcpStream>) -> Said {
    let mut line = Vec::new();
    stream.read_until(b'\n', &mut line).await.expect("read");
    let text = String::from_utf8_lossy(&line).trim_end().to_owned();
    let value = text.get(1..).unwrap_or_default();
    let length = || value.parse::<i64>().expect("a number");
    match text.as_bytes().first() {
        Some(b'+') => Said::Text(value.as_bytes().to_vec()),
        Some(b'-') => Said::Error(value.to_owned()),
        Some(b':') => Said::Number(length()),
        Some(b'$') if length() < 0 => Said::Nothing,
        Some(b'$') => {
            let mut bytes = vec![0; length() as usize + 2];
            stream.read_exact(&mut bytes).await.expect("read");
            bytes.truncate(bytes.len() - 2);
            Said::Text(bytes)
        }
        Some(b'*') if length() < 0 => Said::Nothing,
        Some(b'*') => {
            let mut elements = Vec::new();
            for _ in 0..length() {
                elements.push(Box::pin(said(stream)).await);
            }
            Said::Array(elements)
        }
        other => panic!("{other:?}"),
    }
}

/// All entries of a stream, in its order.
///
/// # Panics
/// If the server cannot be reached, or refuses.
pub async fn entries(address: &str, stream: &str) -> Vec<StoredEntry> {
    let all = ask(address, &["XRANGE", stream, "-", "+"]).await;
    let entry = |entry: &Said| {
        let [at, fields] = entry.array() else { panic!("{entry:?}") };
        let field = |name: &str| {
            let mut pairs = fields.array().chunks_exact(2);
            pairs.find(|pair| pair[0].text() == name).map(|pair| match &pair[1] {
                Said::Text(bytes) => bytes.clone(),
                other => panic!("{other:?}"),
            })
        };
        let id = String::from_utf8(field("postroom-id").unwrap_or_default()).expect("text");
        StoredEntry { at: at.text(), id, payload: field("payload").unwrap_or_default() }
    };
    all.array().iter().map(entry).collect()
}
