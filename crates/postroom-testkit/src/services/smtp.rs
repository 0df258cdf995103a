//! A private mail server.

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
const PYTHON: &str = "/usr/bin/python3";
const LIBRARY: &str = "/usr/lib/python3/dist-packages/aiosmtpd";
const SCRIPT: &str = include_str!("smtp_server.py");

/// A mail server of our own on 127.0.0.1: the library `aiosmtpd`, which keeps each mail in a file. Dropping it kills it.
///
/// It refuses recipients `nobody@…` (550), `greylisted@…` (450), `full@…` (452) and `refused@…` (550), senders `forbidden@…` (553), and mails
/// whose first recipient is `spam@…` (554). A mail whose first recipient is `silent@…` is kept and never answered, one to `slow@…` after 0.1 s.
#[derive(Debug)]
pub struct SmtpServer {
    dir: PathBuf,
    port: u16,
    asked: String,
    process: Option<ServerProcess>,
}

pub(super) fn is_installed() -> bool {
    Path::new(PYTHON).exists() && Path::new(LIBRARY).exists()
}

restartable!(SmtpServer, "mail server");

impl SmtpServer {
    /// Starts one in `dir`, absent or empty; `asked` is JSON: `login` (user and password), `size`, `utf8`, `certificate`, `key`, and
    /// `tls = "implicit"` in place of STARTTLS. Returns when it accepts connections.
    ///
    /// # Errors
    /// When the package `python3-aiosmtpd` is not installed, or it does not answer within 60 s.
    pub fn start(dir: &Path, asked: &str) -> io::Result<Self> {
        fs::create_dir_all(dir.join("mails"))?;
        let dir = fs::canonicalize(dir)?;
        fs::write(dir.join("server.py"), SCRIPT)?;
        let mut server = Self { dir, port: ports::free()?, asked: asked.to_owned(), process: None };
        server.start_again()?;
        Ok(server)
    }

    /// `127.0.0.1:PORT`
    #[must_use]
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// The port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// What it has taken, in its order: for each mail JSON with `from`, `to`, `id`, `subject`, `names` of headers, `payload` in base 64, and
    /// `encrypted`.
    ///
    /// # Errors
    /// When its folder cannot be read.
    pub fn mails(&self) -> io::Result<Vec<String>> {
        let mut names: Vec<PathBuf> = fs::read_dir(self.dir.join("mails"))?
            .map(|entry| entry.map(|entry| entry.path()))
            .collect::<io::Result<_>>()?;
        names.retain(|name| name.extension().is_none());
        names.sort();
        names.iter().map(fs::read_to_string).collect()
    }

    /// Starts it on the same port and data; one that runs is left as it is.
    ///
    /// # Errors
    /// When it does not answer within 60 s.
    pub fn start_again(&mut self) -> io::Result<()> {
        if self.process.is_some() {
            return Ok(());
        }
        if !is_installed() {
            let text = "there is no aiosmtpd; install the package python3-aiosmtpd";
            return Err(io::Error::new(io::ErrorKind::NotFound, text));
        }
        let mut command = Command::new(PYTHON);
        command.arg("-E").arg(self.dir.join("server.py")).arg(self.port.to_string());
        command.arg(self.dir.join("mails")).arg(&self.asked);
        let answers = || TcpStream::connect(self.address()).is_ok();
        self.process = Some(started("smtp", &self.dir, command, ANSWERS_WITHIN, answers)?);
        Ok(())
    }
}
