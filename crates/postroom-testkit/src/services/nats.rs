//! A private NATS server with JetStream.

use std::env;
use std::fs;
use std::io;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::ports;
use super::process::ServerProcess;
use super::restart::{restartable, started};

/// Names the program `nats-server` that is used.
pub const NATS_PROGRAM: &str = "POSTROOM_TEST_NATS_SERVER";

const ANSWERS_WITHIN: Duration = Duration::from_secs(60);

/// A NATS server of our own on 127.0.0.1, with JetStream, without a cluster. Dropping it kills it.
///
/// [`kill`](Self::kill) followed by [`start_again`](Self::start_again) keeps what its streams had confirmed, as long as the operating system
/// goes on.
#[derive(Debug)]
pub struct NatsServer {
    dir: PathBuf,
    port: u16,
    monitoring_port: u16,
    process: Option<ServerProcess>,
}

restartable!(NatsServer, "NATS server");

impl NatsServer {
    /// Starts one in `dir`, absent or empty, with these further lines of configuration. Returns when it answers.
    ///
    /// # Errors
    /// When `POSTROOM_TEST_NATS_SERVER` does not name the program, or it does not answer within 60 s.
    pub fn start(dir: &Path, further: &str) -> io::Result<Self> {
        Self::start_with_storage(dir, "", further)
    }

    /// The same, with further lines about the storage of JetStream.
    ///
    /// # Errors
    /// As for `start`.
    pub fn start_with_storage(dir: &Path, storage: &str, further: &str) -> io::Result<Self> {
        fs::create_dir_all(dir)?;
        let dir = fs::canonicalize(dir)?;
        let (port, monitoring_port) = (ports::free()?, ports::free()?);
        let config = format!(
            "listen: 127.0.0.1:{port}\nhttp: 127.0.0.1:{monitoring_port}\njetstream {{ store_dir: {:?}, max_file: 4G\n{storage} }}\n{further}\n",
            dir.join("data").display().to_string()
        );
        fs::write(dir.join("nats.conf"), config)?;
        let mut server = Self { dir, port, monitoring_port, process: None };
        server.start_again()?;
        Ok(server)
    }

    /// `nats://127.0.0.1:PORT`
    #[must_use]
    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// `127.0.0.1:PORT`
    #[must_use]
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// `http://127.0.0.1:PORT` of its monitoring.
    #[must_use]
    pub fn monitoring_url(&self) -> String {
        format!("http://127.0.0.1:{}", self.monitoring_port)
    }

    /// Starts it on the same ports and data; one that runs is left as it is.
    ///
    /// # Errors
    /// When it does not answer within 60 s.
    pub fn start_again(&mut self) -> io::Result<()> {
        if self.process.is_some() {
            return Ok(());
        }
        let program = env::var_os(NATS_PROGRAM).ok_or_else(|| {
            let text = "POSTROOM_TEST_NATS_SERVER names no NATS server; `cargo xtask test` installs one";
            io::Error::new(io::ErrorKind::NotFound, text)
        })?;
        let mut command = Command::new(program);
        command.arg("-c").arg(self.dir.join("nats.conf"));
        let answers = || TcpStream::connect(self.address()).is_ok();
        self.process = Some(started("nats", &self.dir, command, ANSWERS_WITHIN, answers)?);
        Ok(())
    }
}
