//! A private NATS server with JetStream.

use std::env;
use std::fs::{self, OpenOptions};
use std::io;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::process::{ServerProcess, Signal};
use super::{ports, wait};

/// Names the program `nats-server` that is used.
pub const NATS_PROGRAM: &str = "POSTROOM_TEST_NATS_SERVER";

const ANSWERS_WITHIN: Duration = Duration::from_secs(60);
const STOPS_WITHIN: Duration = Duration::from_secs(30);

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
        let log = OpenOptions::new().create(true).append(true).open(self.dir.join("nats.log"))?;
        let mut command = Command::new(program);
        command.arg("-c").arg(self.dir.join("nats.conf")).current_dir(&self.dir).stdout(log.try_clone()?).stderr(log);
        let mut process = ServerProcess::spawn(command, Signal::Kill, &self.dir)?;
        let port = self.port;
        let answered = wait::until(ANSWERS_WITHIN, || match process.exit_status()? {
            Some(status) => Ok(Some(Err(status))),
            None => Ok(TcpStream::connect(("127.0.0.1", port)).is_ok().then_some(Ok(()))),
        })?;
        match answered {
            Some(Ok(())) => {
                self.process = Some(process);
                Ok(())
            }
            other => {
                let log = fs::read_to_string(self.dir.join("nats.log")).unwrap_or_default();
                Err(io::Error::other(format!("start NATS: {other:?}; its log:\n{log}")))
            }
        }
    }

    /// `SIGKILL`.
    ///
    /// # Errors
    /// When the process survives.
    pub fn kill(&mut self) -> io::Result<()> {
        if let Some(process) = &mut self.process {
            process.kill()?;
        }
        self.process = None;
        Ok(())
    }

    /// Shuts it down cleanly.
    ///
    /// # Errors
    /// When it is still there after 30 s.
    pub fn stop(&mut self) -> io::Result<()> {
        if let Some(process) = &mut self.process {
            process.signal(Signal::Continue)?;
            if !process.ends_within(Signal::Terminate, STOPS_WITHIN)? {
                return Err(io::Error::other("stop NATS: it did not shut down within 30 s"));
            }
        }
        self.process = None;
        Ok(())
    }

    /// Freezes it: connections stay open, and nobody answers.
    ///
    /// # Errors
    /// When it does not run.
    pub fn pause(&self) -> io::Result<()> {
        self.running()?.pause()
    }

    /// Lets it go on.
    ///
    /// # Errors
    /// When it does not run.
    pub fn resume(&self) -> io::Result<()> {
        self.running()?.signal(Signal::Continue)
    }

    fn running(&self) -> io::Result<&ServerProcess> {
        self.process.as_ref().ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "this NATS server does not run"))
    }
}
