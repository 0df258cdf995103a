//! A private PgBouncer in transaction mode.

use std::env;
use std::fs::{self, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::account::Account;
use super::postgres::{folder_for, takes_connections};
use super::process::{ServerProcess, Signal};
use super::{folder, ports, wait};

const ANSWERS_WITHIN: Duration = Duration::from_secs(30);
const PORTS_TRIED_MAX: usize = 3;
/// Few, so that clients share connections all the time.
const POOL_SIZE: u32 = 3;

/// A PgBouncer of our own on 127.0.0.1, in transaction mode with a pool of three connections a database.
///
/// Promise: as Debian ships it otherwise, so what a client sets for its session stays on the server's connection and
/// meets the next client. Only the user `postgres` gets in, without a password. Dropping it stops it and removes its folder;
/// the PostgreSQL behind it is not touched.
#[derive(Debug)]
pub struct PgBouncer {
    dir: PathBuf,
    port: u16,
    process: Option<ServerProcess>,
}

impl PgBouncer {
    /// Starts one in `dir`, absent or empty, in front of the PostgreSQL on this port of 127.0.0.1; returns when it lets
    /// clients through to the database `postgres`.
    ///
    /// A client that sends startup parameters other than the few that PgBouncer follows is refused, unless they are named
    /// in `ignored_startup_parameters`; then they are dropped without a word.
    ///
    /// # Errors
    /// When the package is not installed, the folder is in use, or it does not answer within 30 s; then the error holds
    /// the end of its log.
    pub fn start(dir: &Path, postgres_port: u16, ignored_startup_parameters: &[&str]) -> io::Result<Self> {
        let program = program().ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::NotFound,
                "find `pgbouncer` in /usr/sbin or on the PATH; `apt-get install pgbouncer` installs it",
            )
        })?;
        // It refuses to run as root, too.
        let account = Account::for_postgres()?;
        let mut pooler = Self { dir: folder_for(account, dir)?, port: 0, process: None };
        let mut tries = 0;
        loop {
            tries += 1;
            pooler.port = ports::free()?;
            pooler.configure(postgres_port, ignored_startup_parameters)?;
            match pooler.launch(&program, account) {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse && tries < PORTS_TRIED_MAX => {}
                other => return other.map(|()| pooler),
            }
        }
    }

    /// `postgres://postgres@127.0.0.1:PORT/database`, through the pooler.
    #[must_use]
    pub fn url(&self, database: &str) -> String {
        format!("postgres://postgres@127.0.0.1:{}/{database}", self.port)
    }

    /// The port on 127.0.0.1.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    fn configure(&self, postgres_port: u16, ignored: &[&str]) -> io::Result<()> {
        let users = self.dir.join("users");
        fs::write(&users, "\"postgres\" \"\"\n")?;
        fs::write(
            self.dir.join("pgbouncer.ini"),
            format!(
                "[databases]\n\
                 * = host=127.0.0.1 port={postgres_port}\n\
                 [pgbouncer]\n\
                 listen_addr = 127.0.0.1\n\
                 listen_port = {}\n\
                 unix_socket_dir =\n\
                 auth_type = trust\n\
                 auth_file = {}\n\
                 pool_mode = transaction\n\
                 default_pool_size = {POOL_SIZE}\n\
                 max_client_conn = 500\n\
                 ignore_startup_parameters = {}\n",
                self.port,
                users.display(),
                ignored.join(", "),
            ),
        )
    }

    fn launch(&mut self, program: &Path, account: Account) -> io::Result<()> {
        let log_from = folder::length(&self.log());
        let log = OpenOptions::new().create(true).append(true).open(self.log())?;
        let mut command = Command::new(program);
        command.arg(self.dir.join("pgbouncer.ini")).current_dir(&self.dir);
        command.stdout(log.try_clone()?).stderr(log);
        account.runs(&mut command);
        let mut process = ServerProcess::spawn(command, Signal::Terminate, &self.dir)?;
        let port = self.port;
        let answered = wait::until(ANSWERS_WITHIN, || match process.exit_status()? {
            Some(status) => Ok(Some(Err(status))),
            None => Ok(takes_connections(port).then_some(Ok(()))),
        })?;
        let what = match answered {
            Some(Ok(())) => {
                self.process = Some(process);
                return Ok(());
            }
            Some(Err(status)) => format!("it ended at once with {status}"),
            None => "it let nobody through within 30 s".to_owned(),
        };
        let log = folder::log_tail(&self.log(), log_from);
        let taken = log.contains("Address already in use") || log.contains("address in use");
        let kind = if taken { io::ErrorKind::AddrInUse } else { io::ErrorKind::Other };
        Err(io::Error::new(
            kind,
            format!("start PgBouncer on 127.0.0.1:{port}: {what}; its log {} ends with:\n{log}", self.log().display()),
        ))
    }

    fn log(&self) -> PathBuf {
        self.dir.join("log")
    }
}

impl Drop for PgBouncer {
    fn drop(&mut self) {
        // Dropping the process kills it; it has nothing to lose.
        self.process = None;
        let _ = fs::remove_dir_all(&self.dir);
    }
}

pub(super) fn program() -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let debian = PathBuf::from("/usr/sbin");
    [debian].into_iter().chain(env::split_paths(&path)).map(|bin| bin.join("pgbouncer")).find(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use std::process::Output;

    use super::*;
    use crate::services::PostgresServer;

    fn scratch(name: &str) -> PathBuf {
        env::temp_dir().join(format!("postroom-test-{}-pooler-{name}", std::process::id()))
    }

    fn psql(url: &str, statements: &[&str]) -> Output {
        let mut psql = Command::new("psql");
        psql.args(["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1"]);
        for statement in statements {
            psql.args(["-c", statement]);
        }
        psql.arg(url).output().unwrap()
    }

    fn ask(url: &str, statements: &[&str]) -> String {
        let output = psql(url, statements);
        assert!(output.status.success(), "{statements:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    #[test]
    fn clients_share_connections_and_what_one_sets_for_its_session_meets_the_next() {
        let server = PostgresServer::start(&scratch("postgres")).unwrap();
        let pooler = PgBouncer::start(&scratch("bouncer"), server.port(), &["options"]).unwrap();
        let url = pooler.url("postgres");
        assert_eq!(ask(&url, &["show synchronous_commit"]), "on");
        ask(&url, &["set synchronous_commit = off"]);
        // One after the other they all get the same connection.
        assert_eq!(ask(&url, &["show synchronous_commit"]), "off");
        assert_eq!(ask(&server.url("postgres"), &["show synchronous_commit"]), "on", "not a setting of the server");
        let backends: std::collections::BTreeSet<String> =
            (0..8).map(|_| ask(&url, &["select pg_backend_pid()"])).collect();
        assert_eq!(backends.len(), 1);

        // A startup parameter is ignored when told to, and refused otherwise.
        let with_options = format!("{url}?options=-c%20geqo%3Doff");
        assert_eq!(ask(&with_options, &["show geqo"]), "on");
        let strict = PgBouncer::start(&scratch("strict"), server.port(), &[]).unwrap();
        let refused = psql(&format!("{}?options=-c%20geqo%3Doff", strict.url("postgres")), &["select 1"]);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && said.contains("unsupported startup parameter"), "{said}");

        let (dir, port) = (pooler.dir.clone(), pooler.port());
        drop(pooler);
        assert!(!dir.exists() && !takes_connections(port));
        assert_eq!(ask(&server.url("postgres"), &["select 1"]), "1", "the server goes on");
    }
}
