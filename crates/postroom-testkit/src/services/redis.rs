//! A private Redis, or another server of its protocol.

use std::env;
use std::fs;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::ports;
use super::process::ServerProcess;
use super::restart::{restartable, started};

/// Names a program that is used in place of Debian's `redis-server`, such as one of Valkey.
pub const REDIS_PROGRAM: &str = "POSTROOM_TEST_REDIS_SERVER";

const ANSWERS_WITHIN: Duration = Duration::from_secs(60);

/// A Redis of our own on 127.0.0.1 that writes everything to its append-only file before it answers. Dropping it kills it.
///
/// [`kill`](Self::kill) followed by [`start_again`](Self::start_again) keeps what it had confirmed.
#[derive(Debug)]
pub struct RedisServer {
    dir: PathBuf,
    port: u16,
    process: Option<ServerProcess>,
}

pub(super) fn program() -> Option<PathBuf> {
    let chosen = env::var_os(REDIS_PROGRAM).map(PathBuf::from);
    chosen.or_else(|| Some(PathBuf::from("/usr/bin/redis-server"))).filter(|program| program.exists())
}

restartable!(RedisServer, "Redis");

impl RedisServer {
    /// Starts one in `dir`, absent or empty, with these further lines of configuration, which may take back the ones before. Returns when
    /// it answers.
    ///
    /// # Errors
    /// When the package `redis-server` is not installed, or it does not answer within 60 s.
    pub fn start(dir: &Path, further: &str) -> io::Result<Self> {
        fs::create_dir_all(dir)?;
        let dir = fs::canonicalize(dir)?;
        let port = ports::free()?;
        let config = format!(
            "bind 127.0.0.1\nport {port}\ndir {:?}\nappendonly yes\nappendfsync always\nsave \"\"\ndaemonize no\n{further}\n",
            dir.display().to_string()
        );
        fs::write(dir.join("redis.conf"), config)?;
        let mut server = Self { dir, port, process: None };
        server.start_again()?;
        Ok(server)
    }

    /// `redis://127.0.0.1:PORT`
    #[must_use]
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// `127.0.0.1:PORT`
    #[must_use]
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Starts it on the same port and data; one that runs is left as it is.
    ///
    /// # Errors
    /// When it does not answer within 60 s.
    pub fn start_again(&mut self) -> io::Result<()> {
        if self.process.is_some() {
            return Ok(());
        }
        let program = program().ok_or_else(|| {
            io::Error::new(io::ErrorKind::NotFound, "there is no redis-server; install the package redis-server")
        })?;
        let mut command = Command::new(program);
        command.arg(self.dir.join("redis.conf"));
        let answers = || serves(&self.address());
        self.process = Some(started("redis", &self.dir, command, ANSWERS_WITHIN, answers)?);
        Ok(())
    }
}

/// Whether it answers, and has loaded its data. One that asks for TLS or a password answers too.
fn serves(address: &str) -> bool {
    let asked = || -> io::Result<Vec<u8>> {
        let mut stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(Duration::from_secs(1)))?;
        stream.write_all(b"PING\r\n")?;
        let mut answer = vec![0; 64];
        let read = stream.read(&mut answer)?;
        answer.truncate(read);
        Ok(answer)
    };
    asked().is_ok_and(|answer| !answer.starts_with(b"-LOADING"))
}
