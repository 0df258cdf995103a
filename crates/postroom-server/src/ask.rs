//! One question to the listener of another process on this machine, such as `postroom health` asks.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// An answer that is longer is cut.
const ANSWER_BYTES_MAX: u64 = 1 << 20;

/// What the listener answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The status code.
    pub status: u16,
    /// The body.
    pub body: String,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum AskFailed {
    /// Nobody listens there, or the connection broke.
    #[error("ask the admin listener at {0}")]
    Connection(SocketAddr, #[source] io::Error),
    /// Not in time.
    #[error("ask the admin listener at {0}: there was no answer within {1:?}")]
    Late(SocketAddr, Duration),
    /// Somebody else listens there.
    #[error("ask the admin listener at {0}: what answered does not speak HTTP")]
    NotHttp(SocketAddr),
}

/// Asks for a path, with this token if there is one.
pub async fn ask(address: SocketAddr, path: &str, token: Option<&str>, within: Duration) -> Result<Answer, AskFailed> {
    let asked = async {
        let mut stream = TcpStream::connect(address).await?;
        let authorization = token.map(|token| format!("authorization: Bearer {token}\r\n")).unwrap_or_default();
        let request = format!("GET {path} HTTP/1.0\r\nhost: {address}\r\n{authorization}\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = Vec::new();
        stream.take(ANSWER_BYTES_MAX).read_to_end(&mut answer).await?;
        Ok(answer)
    };
    let answer = tokio::time::timeout(within, asked).await.map_err(|_| AskFailed::Late(address, within))?;
    let answer = answer.map_err(|error| AskFailed::Connection(address, error))?;
    read(&answer).ok_or(AskFailed::NotHttp(address))
}

/// With HTTP/1.0 the body ends where the connection ends.
fn read(answer: &[u8]) -> Option<Answer> {
    let text = String::from_utf8_lossy(answer);
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.strip_prefix("HTTP/1.")?.split(' ').nth(1)?.parse().ok()?;
    Some(Answer { status, body: body.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_a_status_and_a_body() {
        let ok = read(b"HTTP/1.0 200 OK\r\ncontent-length: 3\r\n\r\nok\n");
        assert_eq!(ok, Some(Answer { status: 200, body: "ok\n".to_owned() }));
        for bad in [&b""[..], b"HTTP/1.1 200 OK\r\n", b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 OK\r\n\r\n"] {
            assert_eq!(read(bad), None);
        }
    }
}
