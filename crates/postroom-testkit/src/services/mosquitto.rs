//! A private MQTT broker.

use std::fs;
use std::io;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::ports;
use super::process::ServerProcess;
use super::restart::{restartable, started};

const ANSWERS_WITHIN: Duration = Duration::from_secs(60);

/// A Mosquitto of our own on 127.0.0.1. Dropping it kills it.
///
/// It writes what it has to its disk only when it ends in order ([`stop`](Self::stop)): a [`kill`](Self::kill) loses what it had acked.
#[derive(Debug)]
pub struct MosquittoServer {
    dir: PathBuf,
    port: u16,
    process: Option<ServerProcess>,
}

pub(super) fn program() -> Option<PathBuf> {
    Some(PathBuf::from("/usr/sbin/mosquitto")).filter(|program| program.exists())
}

restartable!(MosquittoServer, "Mosquitto");

impl MosquittoServer {
    /// Starts one in `dir`, absent or empty, with these further lines of configuration. Returns when it accepts connections.
    ///
    /// # Errors
    /// When the package `mosquitto` is not installed, or it does not answer within 60 s.
    pub fn start(dir: &Path, further: &str) -> io::Result<Self> {
        fs::create_dir_all(dir)?;
        let dir = fs::canonicalize(dir)?;
        let port = ports::free()?;
        // It would become another user, who may not write here. With the 0 that means any number of queued messages, version 2.0.11 ends a
        // connection with each message that it refuses.
        let config = format!(
            "user root\nallow_anonymous true\npersistence true\npersistence_location {}/\nmax_queued_messages 10000000\nmax_queued_bytes 0\n\
             listener {port} 127.0.0.1\n{further}\n",
            dir.display()
        );
        fs::write(dir.join("mosquitto.conf"), config)?;
        let mut server = Self { dir, port, process: None };
        server.start_again()?;
        Ok(server)
    }

    /// `mqtt://127.0.0.1:PORT`
    #[must_use]
    pub fn url(&self) -> String {
        format!("mqtt://{}", self.address())
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
            io::Error::new(io::ErrorKind::NotFound, "there is no mosquitto; install the package mosquitto")
        })?;
        let mut command = Command::new(program);
        command.arg("-c").arg(self.dir.join("mosquitto.conf"));
        let answers = || TcpStream::connect(self.address()).is_ok();
        self.process = Some(started("mosquitto", &self.dir, command, ANSWERS_WITHIN, answers)?);
        Ok(())
    }
}
