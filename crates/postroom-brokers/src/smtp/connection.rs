//! A connection to a mail server, on which one mail goes after the other. <https://www.rfc-editor.org/rfc/rfc5321>

use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::BytesMut;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Instant, timeout};

use super::mail::{Letter, dotted};
use super::reply::{self, Extensions, Reply};
use crate::server_address::ServerAddress;
use crate::server_stream::{self, Stream};

/// By what a client calls itself that has no name of its own.
const NAME: &str = "[127.0.0.1]";
/// One that lay for longer is asked first whether it is still there.
const FRESH_FOR: Duration = Duration::from_secs(5);

/// An open connection, logged in.
pub(super) struct Connection {
    stream: Box<dyn Stream>,
    read: BytesMut,
    pub extensions: Extensions,
    pub is_encrypted: bool,
    used: Instant,
}

/// What became of a mail.
#[derive(Debug)]
pub(super) enum Sent {
    /// The server has it.
    Taken,
    /// The server does not take it; what it said, and of what.
    Refused(Of, Reply),
    /// There was no mail: the connection ended before.
    Unsent(String),
    /// All of it was sent, and nothing came back.
    Unknown(String),
}

/// What is refused of a mail.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Of {
    Sender(String),
    Recipient(String),
    Mail,
}

impl std::fmt::Display for Of {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Sender(address) => write!(f, "the sender {address}"),
            Self::Recipient(address) => write!(f, "the recipient {address}"),
            Self::Mail => f.write_str("the mail"),
        }
    }
}

impl Connection {
    /// Connects, encrypts, and logs in. `in_clear`: an unencrypted connection will do.
    pub async fn open(server: &ServerAddress, in_clear: bool) -> Result<Self, String> {
        server_stream::opened(server, Self::opening(server, in_clear)).await
    }

    async fn opening(server: &ServerAddress, in_clear: bool) -> Result<Self, String> {
        let mut connection = Self {
            stream: server_stream::connected(server).await?,
            read: BytesMut::new(),
            extensions: Extensions::default(),
            is_encrypted: server.tls,
            used: Instant::now(),
        };
        connection.expect(220).await?;
        connection.greet().await?;
        if !server.tls && connection.extensions.starttls {
            connection = connection.encrypted(server).await?;
        }
        if !connection.is_encrypted && !in_clear {
            return Err("the server has no STARTTLS, so mails and the password would go in clear: use smtps://, or write unencrypted = true".to_owned());
        }
        if !server.user.is_empty() {
            connection.log_in(server).await?;
        }
        Ok(connection)
    }

    async fn encrypted(mut self, server: &ServerAddress) -> Result<Self, String> {
        self.say("STARTTLS").await?;
        self.expect(220).await?;
        if !self.read.is_empty() {
            // Somebody between us and the server would have said it in the server's name.
            return Err("the server said something in clear behind its STARTTLS".to_owned());
        }
        let stream = server_stream::encrypted(server, self.stream).await?;
        let mut connection = Self { stream, is_encrypted: true, ..self };
        connection.greet().await?;
        Ok(connection)
    }

    async fn greet(&mut self) -> Result<(), String> {
        self.say(&format!("EHLO {NAME}")).await?;
        self.extensions = Extensions::of(&self.expect(250).await?);
        Ok(())
    }

    async fn log_in(&mut self, server: &ServerAddress) -> Result<(), String> {
        let has = |name: &str| self.extensions.logins.iter().any(|login| login == name);
        let reply = if has("PLAIN") {
            let proof = STANDARD.encode(format!("\0{}\0{}", server.user, server.password));
            self.ask(&format!("AUTH PLAIN {proof}")).await?
        } else if has("LOGIN") {
            let mut reply = self.ask("AUTH LOGIN").await?;
            for part in [&server.user, &server.password] {
                if reply.code == 334 {
                    reply = self.ask(&STANDARD.encode(part)).await?;
                }
            }
            reply
        } else {
            let offered = self.extensions.logins.join(", ");
            let offered = if offered.is_empty() { "and no other one".to_owned() } else { format!("only {offered}") };
            return Err(format!("{LOGIN}by user and password is not offered, {offered}"));
        };
        if reply.code == 235 { Ok(()) } else { Err(format!("{LOGIN}is refused: {reply}")) }
    }

    /// Whether it is still there, if it has not been used for a while.
    pub async fn is_there(&mut self) -> bool {
        self.used.elapsed() < FRESH_FOR
            || matches!(timeout(FRESH_FOR, self.ask("NOOP")).await, Ok(Ok(reply)) if reply.is_success())
    }

    /// Sends a mail. `within` is how long the server may take for each answer. Anything but `Taken` and `Refused` ends the connection.
    pub async fn send(&mut self, letter: &Letter, within: Duration) -> Sent {
        self.used = Instant::now();
        match self.begin(letter, within).await {
            Ok(None) => {}
            Ok(Some((of, reply))) => {
                // Whoever was accepted before gets nothing.
                return match timeout(within, self.ask("RSET")).await {
                    Ok(Ok(_)) => Sent::Refused(of, reply),
                    _ => Sent::Unsent(format!("{of}: {reply}")),
                };
            }
            Err(problem) => return Sent::Unsent(problem),
        }
        let bytes = dotted(&letter.bytes);
        // Without its end it is no mail. Whether the last bytes have arrived, nobody knows.
        let (body, end) = bytes.split_at(bytes.len() - 3);
        if let Err(problem) = self.write(body, within).await {
            return Sent::Unsent(problem);
        }
        // What it says before it has the mail is no answer to it.
        if let Err(problem) = self.nothing_unasked().await {
            return Sent::Unsent(problem);
        }
        let ended = async {
            self.write(end, within).await?;
            timeout(within, self.reply()).await.map_err(|_| late(within))?
        };
        match ended.await {
            Ok(reply) if reply.is_success() => Sent::Taken,
            Ok(reply) if reply.is_refusal() => Sent::Refused(Of::Mail, reply),
            Ok(reply) => Sent::Unknown(odd(&reply)),
            Err(problem) => Sent::Unknown(problem),
        }
    }

    /// Up to where the mail itself begins; or who is refused.
    async fn begin(&mut self, letter: &Letter, within: Duration) -> Result<Option<(Of, Reply)>, String> {
        let Letter { from, to, bytes } = letter;
        let mut options = String::new();
        if self.extensions.size.is_some() {
            options.push_str(&format!(" SIZE={}", bytes.len()));
        }
        if !bytes.is_ascii() && self.extensions.eight_bit {
            options.push_str(" BODY=8BITMIME");
        }
        if self.extensions.utf8_addresses && to.iter().chain([from]).any(|address| !address.to_string().is_ascii()) {
            options.push_str(" SMTPUTF8");
        }
        let mut commands = vec![(Of::Sender(from.to_string()), format!("MAIL FROM:<{from}>{options}"))];
        commands.extend(to.iter().map(|to| (Of::Recipient(to.to_string()), format!("RCPT TO:<{to}>"))));
        let in_time = async {
            for (of, command) in commands {
                match self.ask(&command).await? {
                    reply if reply.is_success() => {}
                    reply if reply.code == 421 => return Err(format!("the server ends the connection: {reply}")),
                    reply if reply.is_refusal() => return Ok(Some((of, reply))),
                    reply => return Err(odd(&reply)),
                }
            }
            match self.ask("DATA").await? {
                reply if reply.code == 354 => Ok(None),
                reply if reply.is_refusal() && reply.code != 421 => Ok(Some((Of::Mail, reply))),
                reply => Err(odd(&reply)),
            }
        };
        timeout(within, in_time).await.map_err(|_| late(within))?
    }

    /// Says farewell, without waiting for an answer.
    pub async fn leave(mut self) {
        let farewell = async {
            let _ = self.say("QUIT").await;
            let _ = self.stream.shutdown().await;
        };
        let _ = timeout(FRESH_FOR, farewell).await;
    }

    async fn ask(&mut self, command: &str) -> Result<Reply, String> {
        self.say(command).await?;
        self.reply().await
    }

    /// An answer that was not asked for would be taken for the next one.
    async fn nothing_unasked(&mut self) -> Result<(), String> {
        if self.read.is_empty() {
            tokio::select! {
                biased;
                came = self.stream.read_buf(&mut self.read) => match came {
                    Ok(0) => return Err("the server ended the connection".to_owned()),
                    Ok(_) => {}
                    Err(error) => return Err(error.to_string()),
                },
                () = std::future::ready(()) => {}
            }
        }
        match reply::next(&mut self.read) {
            Ok(None) if self.read.is_empty() => Ok(()),
            Ok(Some(reply)) if reply.code == 421 => Err(format!("the server ends the connection: {reply}")),
            _ => Err("the server answers what it was not asked".to_owned()),
        }
    }

    async fn say(&mut self, command: &str) -> Result<(), String> {
        self.nothing_unasked().await?;
        let written = async {
            self.stream.write_all(format!("{command}\r\n").as_bytes()).await?;
            self.stream.flush().await
        };
        written.await.map_err(|error| error.to_string())
    }

    async fn write(&mut self, bytes: &[u8], within: Duration) -> Result<(), String> {
        for some in bytes.chunks(64 << 10) {
            let written = timeout(within, async {
                self.stream.write_all(some).await?;
                self.stream.flush().await
            });
            written.await.map_err(|_| late(within))?.map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    async fn reply(&mut self) -> Result<Reply, String> {
        loop {
            if let Some(reply) = reply::next(&mut self.read)? {
                return Ok(reply);
            }
            match self.stream.read_buf(&mut self.read).await {
                Ok(0) => return Err("the server ended the connection".to_owned()),
                Ok(_) => {}
                Err(error) => return Err(error.to_string()),
            }
        }
    }

    async fn expect(&mut self, code: u16) -> Result<Reply, String> {
        match self.reply().await? {
            reply if reply.code == code => Ok(reply),
            reply => Err(format!("the server says: {reply}")),
        }
    }
}

fn odd(reply: &Reply) -> String {
    format!("the server answers as SMTP does not: {reply}")
}

fn late(within: Duration) -> String {
    format!("no answer within {} s", within.as_secs())
}

/// What `check` knows a problem with it by.
pub(super) const LOGIN: &str = "the login ";

#[cfg(test)]
mod tests {
    use postroom::Message;
    use tokio::io::{AsyncBufReadExt, BufReader};
    use tokio::net::TcpListener;

    use super::super::mail::{Sender, letter};
    use super::*;

    /// What becomes of a mail at a server that answers with these, one for each line, and `before` before the end of the mail.
    async fn sent(answers: &'static [&'static str]) -> Result<Sent, String> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("smtp://{}", listener.local_addr().unwrap());
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let (from, mut into) = stream.split();
            let mut lines = BufReader::new(from).lines();
            let mut in_mail = false;
            for (number, answer) in answers.iter().enumerate() {
                // The greeting is not asked for, and a mail has many lines.
                while number > 0
                    && let Ok(Some(line)) = lines.next_line().await
                {
                    if !in_mail || line == "." {
                        break;
                    }
                }
                in_mail = answer.contains("354");
                if into.write_all(answer.as_bytes()).await.is_err() {
                    return;
                }
            }
            while let Ok(Some(_)) = lines.next_line().await {}
        });
        let options = super::super::SmtpOptions::new(url, "shop@example.com");
        let (server, _) = options.opened().unwrap();
        let mut connection = Connection::open(&server, true).await?;
        let sender = Sender::parse("shop@example.com").unwrap();
        let message = Message::new("mails", "k", "x".repeat(300_000)).header("mail-to", "a@example.org");
        let letter = letter(&sender, &message, std::time::SystemTime::now()).unwrap();
        Ok(connection.send(&letter, Duration::from_secs(5)).await)
    }

    #[tokio::test]
    async fn an_answer_that_was_not_asked_for_is_no_answer_to_a_mail() {
        const OK: &str = "250 ok\r\n";
        let of = async |answers| sent(answers).await;
        assert!(matches!(of(&["220 hi\r\n", OK, OK, OK, "354 go\r\n", OK]).await, Ok(Sent::Taken)));
        let early = of(&["220 hi\r\n", OK, OK, OK, "354 go\r\n250 early\r\n", "554 spam\r\n"]).await;
        assert!(matches!(&early, Ok(Sent::Unsent(why)) if why.contains("not asked")), "{early:?}");
        let twice = of(&["220 hi\r\n250 x\r\n", OK, OK, OK, "354 go\r\n", OK]).await;
        assert!(twice.is_err() || matches!(twice, Ok(Sent::Unsent(_))), "{twice:?}");
        for odd in ["354 more\r\n", "999 x\r\n", "2500 ok\r\n", "250-x\r\n251 y\r\n", "503 order\r\n"] {
            let answers: &'static [&'static str] = vec!["220 hi\r\n", OK, OK, OK, "354 go\r\n", odd].leak();
            assert!(matches!(of(answers).await, Ok(Sent::Unknown(_))), "{odd}");
        }
        assert!(matches!(of(&["220 hi\r\n", OK, OK, OK, OK]).await, Ok(Sent::Unsent(_))), "250 to DATA");
    }
}
