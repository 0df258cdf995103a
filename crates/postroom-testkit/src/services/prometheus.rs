//! A private Prometheus.

use std::env;
use std::fs::{self, OpenOptions};
use std::io;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use super::process::{ServerProcess, Signal};
use super::{ports, wait};

const ANSWERS_WITHIN: Duration = Duration::from_secs(60);

/// A Prometheus of our own on 127.0.0.1. Dropping it stops it.
#[derive(Debug)]
pub struct Prometheus {
    port: u16,
    _process: ServerProcess,
}

impl Prometheus {
    /// Starts one in `dir`, absent or empty, that reads `target` (`HOST:PORT`) every second as job `postroom`, and evaluates this file
    /// of rules every second. Returns when it answers.
    ///
    /// # Errors
    /// When the package is not installed, the rules are refused, or it does not answer within 60 s.
    pub fn start(dir: &Path, target: &str, rules: &Path) -> io::Result<Self> {
        let program = program("prometheus").ok_or_else(not_installed)?;
        fs::create_dir_all(dir)?;
        let port = ports::free()?;
        let config = dir.join("prometheus.yml");
        fs::write(
            &config,
            format!(
                "global: {{ scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s }}\n\
                 rule_files: [ {:?} ]\n\
                 scrape_configs: [ {{ job_name: postroom, static_configs: [ {{ targets: [ {target:?} ] }} ] }} ]\n",
                rules.display().to_string()
            ),
        )?;
        let log = OpenOptions::new().create(true).append(true).open(dir.join("prometheus.log"))?;
        let mut command = Command::new(program);
        command
            .arg(format!("--config.file={}", config.display()))
            .arg(format!("--storage.tsdb.path={}", dir.join("data").display()))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .current_dir(dir)
            .stdout(log.try_clone()?)
            .stderr(log);
        let mut process = ServerProcess::spawn(command, Signal::Terminate, dir)?;
        let answered = wait::until(ANSWERS_WITHIN, || match process.exit_status()? {
            Some(status) => Ok(Some(Err(status))),
            None => Ok(TcpStream::connect(("127.0.0.1", port)).is_ok().then_some(Ok(()))),
        })?;
        match answered {
            Some(Ok(())) => Ok(Self { port, _process: process }),
            other => {
                let log = fs::read_to_string(dir.join("prometheus.log")).unwrap_or_default();
                Err(io::Error::other(format!("start Prometheus: {other:?}; its log:\n{log}")))
            }
        }
    }

    /// Where it listens, as `HOST:PORT`.
    #[must_use]
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }
}

fn not_installed() -> io::Error {
    io::Error::new(
        io::ErrorKind::NotFound,
        "find `prometheus` and `promtool` on the PATH; `apt-get install --no-install-recommends prometheus` installs them",
    )
}

/// Runs `promtool` to its end.
///
/// # Errors
/// When it is not installed.
pub fn promtool(arguments: &[&str]) -> io::Result<Output> {
    Command::new(program("promtool").ok_or_else(not_installed)?).args(arguments).output()
}

/// Where a program of the package is.
pub(super) fn program(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).chain([PathBuf::from("/usr/bin")]).map(|bin| bin.join(name)).find(|file| file.is_file())
}
