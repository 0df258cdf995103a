//! A private PostgreSQL.

use std::cmp::Reverse;
use std::env;
use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{self, Command, Stdio};
use std::time::Duration;

use super::account::Account;
use super::process::{ServerProcess, Signal};
use super::{Tmpfs, folder, ports, wait};

mod encrypted;
mod faults;

pub(super) use faults::{Clock, clock_library};

const ANSWERS_WITHIN: Duration = Duration::from_secs(60);
const STOPS_WITHIN: Duration = Duration::from_secs(60);
/// The postmaster itself kills its children five seconds after an immediate shutdown began.
const ENDS_WITHIN: Duration = Duration::from_secs(10);
const PROBE_WITHIN: Duration = Duration::from_secs(1);
const PORTS_TRIED_MAX: usize = 3;

/// What differs from the defaults. Durability stays real: `fsync` and `synchronous_commit` are on.
const SETTINGS: &str = "
# what postroom's tests need
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
wal_level = logical
fsync = on
synchronous_commit = on
max_connections = 300
max_wal_senders = 50
max_replication_slots = 50
# Writers that commit in two phases.
max_prepared_transactions = 100
track_commit_timestamp = off
shared_buffers = 256MB
max_wal_size = 4GB
# A test lasts seconds: so its tables have the statistics, and its statements the plans, of a server that has run for minutes.
autovacuum_naptime = 1s
logging_collector = off
";

/// What can be done to a server besides killing it.
#[derive(Debug, Clone, Copy, Default)]
pub struct PostgresOptions {
    /// Its clock can be set while it runs, see [`PostgresServer::set_clock`]. Needs the package `libfaketime`.
    pub clock: bool,
    /// Its data lies on a disk of so many MiB, at least 128, see [`PostgresServer::fill_disk`]. Needs root.
    pub disk_mib: Option<u64>,
}

/// A PostgreSQL server of our own, on 127.0.0.1, superuser `postgres` without a password.
///
/// Promise: `wal_level = logical`, 300 connections, and real durability, so that [`kill`](Self::kill) followed by
/// [`start_again`](Self::start_again) shows what a crash of the server shows. Dropping it stops the server and
/// removes its folder.
///
/// Edge: nothing here can show what a power cut does; the operating system keeps its page cache.
#[derive(Debug)]
pub struct PostgresServer {
    programs: PathBuf,
    account: Account,
    dir: PathBuf,
    port: u16,
    /// Where in the log the present start begins.
    log_from: u64,
    process: Option<ServerProcess>,
    options: PostgresOptions,
    clock: Option<Clock>,
    disk: Option<Tmpfs>,
}

impl PostgresServer {
    /// Creates a cluster in `dir` and starts it; returns when it takes connections.
    ///
    /// `dir` must be absent or empty. When we are root, the server runs as user `postgres`; where that user cannot
    /// get to `dir` (as below `/root`), a folder under the system's temporary folder is taken instead, see
    /// [`dir`](Self::dir).
    ///
    /// # Errors
    /// When the package is not installed, the folder is in use, or the server does not answer within 60 s; then the
    /// error holds the end of its log.
    pub fn start(dir: &Path) -> io::Result<Self> {
        Self::start_with(dir, PostgresOptions::default())
    }

    /// Like [`start`](Self::start), with a clock or a disk that can be played with.
    ///
    /// # Errors
    /// As for `start`, and when the library for the clock is not installed or the disk cannot be mounted.
    pub fn start_with(dir: &Path, options: PostgresOptions) -> io::Result<Self> {
        let mut server = Self::prepare(dir, options)?;
        server.create_cluster()?;
        server.launch_on_a_free_port()?;
        Ok(server)
    }

    /// Everything but the data.
    fn prepare(dir: &Path, options: PostgresOptions) -> io::Result<Self> {
        let programs = programs().ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::NotFound,
                "find PostgreSQL's `initdb` and `postgres` in /usr/lib/postgresql/*/bin or on the PATH; \
                 `apt-get install postgresql` installs them",
            )
        })?;
        let account = Account::for_postgres()?;
        let dir = folder_for(account, dir)?;
        let (port, log_from) = (0, 0);
        let mut server =
            Self { programs, account, dir, port, log_from, process: None, options, clock: None, disk: None };
        if options.clock {
            server.clock = Some(Clock::create(&server.dir)?);
        }
        if let Some(mib) = options.disk_mib {
            server.disk = Some(faults::disk(&server.dir, mib)?);
            account.gives_folder(&server.dir.join(faults::DISK))?;
        }
        Ok(server)
    }

    fn launch_on_a_free_port(&mut self) -> io::Result<()> {
        for _ in 1..PORTS_TRIED_MAX {
            self.port = ports::free()?;
            match self.launch() {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                other => return other,
            }
        }
        self.port = ports::free()?;
        self.launch()
    }

    /// `postgres://postgres@127.0.0.1:PORT/database`
    #[must_use]
    pub fn url(&self, database: &str) -> String {
        format!("postgres://postgres@127.0.0.1:{}/{database}", self.port)
    }

    /// The port on 127.0.0.1; the same for the whole life of this value, unless it takes the place of another server.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The folder that holds `data` and `log`.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Shuts down cleanly: connections are cut, open transactions rolled back, a checkpoint written. Returns when it
    /// is gone. A server that does not run is left as it is.
    ///
    /// # Errors
    /// When it is still there after 60 s.
    pub fn stop(&mut self) -> io::Result<()> {
        let Some(process) = &mut self.process else { return Ok(()) };
        if !process.ends_within(Signal::Interrupt, STOPS_WITHIN)? {
            return Err(self.trouble("stop", "it did not shut down within 60 s; `kill` ends it without a checkpoint"));
        }
        self.process = None;
        Ok(())
    }

    /// `SIGKILL` to the postmaster and every backend at once: no checkpoint, no goodbye. Returns when all are gone.
    /// A server that does not run is left as it is.
    ///
    /// # Errors
    /// When a process survives, which only the kernel can explain.
    pub fn kill(&mut self) -> io::Result<()> {
        if let Some(process) = &mut self.process {
            process.kill()?;
        }
        self.process = None;
        Ok(())
    }

    /// Starts the server on the same port and data after [`stop`](Self::stop) or [`kill`](Self::kill); returns when
    /// recovery is through and it takes connections.
    ///
    /// # Errors
    /// When it is still running, or does not answer within 60 s.
    pub fn start_again(&mut self) -> io::Result<()> {
        if let Some(process) = &mut self.process
            && process.exit_status()?.is_none()
        {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                format!("start PostgreSQL on port {} again: it is running; stop or kill it first", self.port),
            ));
        }
        self.process = None;
        self.launch()
    }

    fn create_cluster(&self) -> io::Result<()> {
        let mut initdb = Command::new(self.programs.join("initdb"));
        initdb
            .args(["--no-sync", "--auth=trust", "--username=postgres", "--encoding=UTF8", "--locale=C", "--pgdata"])
            .arg(self.data())
            .current_dir(&self.dir)
            .stdin(Stdio::null());
        self.account.runs(&mut initdb);
        let output = initdb.output()?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            return Err(io::Error::other(format!(
                "create a PostgreSQL cluster in {}: initdb ended with {}; it said:\n{said}",
                self.dir.display(),
                output.status,
            )));
        }
        let mut file = OpenOptions::new().append(true).open(self.data().join("postgresql.conf"))?;
        file.write_all(SETTINGS.as_bytes())?;
        if let Some(mib) = self.options.disk_mib {
            // The log of changes must not need all of the disk.
            let (buffers, log) = (mib / 6, mib / 4);
            writeln!(file, "shared_buffers = {buffers}MB\nmin_wal_size = 32MB\nmax_wal_size = {log}MB")?;
        }
        Ok(())
    }

    fn launch(&mut self) -> io::Result<()> {
        // The folder is ours and its processes are gone, so the number in it can only be somebody else's by now.
        match fs::remove_file(self.data().join("postmaster.pid")) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        self.log_from = folder::length(&self.log());
        let log = OpenOptions::new().create(true).append(true).open(self.log())?;
        let mut command = Command::new(self.programs.join("postgres"));
        command.arg("-D").arg(self.data()).args(["-p", &self.port.to_string()]).current_dir(&self.dir);
        command.stdout(log.try_clone()?).stderr(log);
        command.env("LC_ALL", "C").env_remove("PGDATA").env_remove("PGPORT");
        if let Some(clock) = &self.clock {
            clock.rules(&mut command);
        }
        self.account.runs(&mut command);
        let mut process = ServerProcess::spawn(command, Signal::Quit, &self.dir)?;

        let port = self.port;
        let answered = wait::until(ANSWERS_WITHIN, || match process.exit_status()? {
            Some(status) => Ok(Some(Err(status))),
            None => Ok(takes_connections(port).then_some(Ok(()))),
        })?;
        match answered {
            Some(Ok(())) => {
                self.process = Some(process);
                Ok(())
            }
            Some(Err(status)) => Err(self.trouble("start", &format!("it ended at once with {status}"))),
            None => Err(self.trouble("start", "it took no connection within 60 s")),
        }
    }

    fn trouble(&self, verb: &str, what: &str) -> io::Error {
        let log = folder::log_tail(&self.log(), self.log_from);
        let kind = if log.contains("Address already in use") { io::ErrorKind::AddrInUse } else { io::ErrorKind::Other };
        io::Error::new(
            kind,
            format!(
                "{verb} PostgreSQL on 127.0.0.1:{}: {what}; the cause is usually in the end of its log {}:\n{log}",
                self.port,
                self.log().display(),
            ),
        )
    }

    fn data(&self) -> PathBuf {
        let parent = if self.disk.is_some() { self.dir.join(faults::DISK) } else { self.dir.clone() };
        parent.join("data")
    }

    fn log(&self) -> PathBuf {
        self.dir.join("log")
    }
}

impl Drop for PostgresServer {
    fn drop(&mut self) {
        if let Some(process) = &mut self.process {
            // An immediate shutdown lets the postmaster give its shared memory back; what is left then is killed.
            let _ = process.ends_within(Signal::Quit, ENDS_WITHIN);
        }
        self.process = None;
        self.disk = None;
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// Names the folder of the PostgreSQL that is used, with `initdb` and `postgres` in it.
pub const POSTGRES_PROGRAMS: &str = "POSTROOM_POSTGRES_PROGRAMS";

/// The folder with `initdb` and `postgres`: the one of [`POSTGRES_PROGRAMS`], else Debian's of the highest version, else the one on
/// the `PATH`.
pub(super) fn programs() -> Option<PathBuf> {
    let chosen = env::var_os(POSTGRES_PROGRAMS).map(PathBuf::from);
    if chosen.is_some() {
        return chosen;
    }
    let mut debian: Vec<(u32, PathBuf)> = fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, entry.path().join("bin"))))
        .collect();
    debian.sort_by_key(|(version, _)| Reverse(*version));
    let path = env::var_os("PATH").unwrap_or_default();
    debian
        .into_iter()
        .map(|(_, bin)| bin)
        .chain(env::split_paths(&path))
        .find(|bin| bin.join("initdb").is_file() && bin.join("postgres").is_file())
}

/// Creates `wanted`, or a folder that the account can get to.
pub(super) fn folder_for(account: Account, wanted: &Path) -> io::Result<PathBuf> {
    folder::create_empty(wanted)?;
    account.gives_folder(wanted)?;
    let wanted = fs::canonicalize(wanted)?;
    if account.reaches(&wanted)? {
        return Ok(wanted);
    }
    fs::remove_dir(&wanted)?;
    let instead = env::temp_dir().join(format!("postroom-postgres-{}-{}", process::id(), ports::free()?));
    folder::create_empty(&instead)?;
    account.gives_folder(&instead)?;
    if account.reaches(&instead)? {
        return Ok(instead);
    }
    fs::remove_dir(&instead)?;
    Err(io::Error::new(
        io::ErrorKind::PermissionDenied,
        format!(
            "find a folder for PostgreSQL: its user gets neither to {} nor to {}; set TMPDIR to a folder whose \
             parents anybody may enter (`chmod a+x`)",
            wanted.display(),
            instead.display()
        ),
    ))
}

/// Whether the server lets us in. It answers the start-up message with an error while it recovers.
pub(super) fn takes_connections(port: u16) -> bool {
    const START_UP: &[u8] = b"\x00\x00\x00\x29\x00\x03\x00\x00user\x00postgres\x00database\x00postgres\x00\x00";
    const TERMINATE: &[u8] = b"X\x00\x00\x00\x04";
    let authenticated = |mut stream: TcpStream| -> io::Result<bool> {
        stream.set_read_timeout(Some(PROBE_WITHIN))?;
        stream.write_all(START_UP)?;
        let mut kind = [0];
        stream.read_exact(&mut kind)?;
        if kind != *b"R" {
            return Ok(false);
        }
        // A farewell and reading to the end keep the probe out of the server's log.
        stream.write_all(TERMINATE)?;
        stream.shutdown(Shutdown::Write)?;
        io::copy(&mut stream, &mut io::sink())?;
        Ok(true)
    };
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    TcpStream::connect_timeout(&address, PROBE_WITHIN).and_then(authenticated).unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn scratch(name: &str) -> PathBuf {
        env::temp_dir().join(format!("postroom-test-{}-{name}", process::id()))
    }

    pub(super) fn ask(server: &PostgresServer, sql: &str) -> String {
        server.sql(sql).unwrap()
    }

    #[test]
    fn a_killed_server_comes_back_with_its_data() {
        let mut server = PostgresServer::start(&scratch("killed")).unwrap();
        ask(&server, "create table kept (n int)");
        ask(&server, "insert into kept select generate_series(1, 1000)");
        let url = server.url("postgres");
        server.kill().unwrap();
        server.kill().unwrap();
        assert!(!takes_connections(server.port()));
        server.start_again().unwrap();
        assert_eq!(server.url("postgres"), url);
        assert_eq!(ask(&server, "select count(*) from kept"), "1000");
        let log = fs::read_to_string(server.log()).unwrap();
        assert!(log.contains("was not properly shut down"), "{log}");
    }

    #[test]
    fn a_kill_ends_a_statement_that_is_running() {
        let mut server = PostgresServer::start(&scratch("running")).unwrap();
        let mut psql = Command::new("psql")
            .args(["-X", "-q", "-c", "select 1 from generate_series(1, 1e12)", &server.url("postgres")])
            .stderr(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let busy = "select count(*) from pg_stat_activity where state = 'active' and pid <> pg_backend_pid() \
                    and backend_type = 'client backend'";
        wait::until(ANSWERS_WITHIN, || Ok((ask(&server, busy) == "1").then_some(()))).unwrap().unwrap();
        server.kill().unwrap();
        assert!(!psql.wait().unwrap().success());
        server.start_again().unwrap();
        assert_eq!(ask(&server, busy), "0");
    }

    #[test]
    fn a_stopped_server_comes_back_with_its_data_and_settings() {
        let mut server = PostgresServer::start(&scratch("stopped")).unwrap();
        ask(&server, "create table kept as select 7 as n");
        server.stop().unwrap();
        server.stop().unwrap();
        assert!(!takes_connections(server.port()));
        server.start_again().unwrap();
        assert_eq!(ask(&server, "select n from kept"), "7");
        for (name, value) in [("wal_level", "logical"), ("fsync", "on"), ("max_connections", "300")] {
            assert_eq!(ask(&server, &format!("show {name}")), value, "{name}");
        }
    }

    #[test]
    fn a_running_server_is_not_started_twice() {
        let mut server = PostgresServer::start(&scratch("twice")).unwrap();
        assert_eq!(server.start_again().unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(ask(&server, "select 1"), "1");
    }

    #[test]
    fn a_dropped_server_leaves_nothing_behind() {
        let server = PostgresServer::start(&scratch("dropped")).unwrap();
        let (dir, port) = (server.dir().to_owned(), server.port());
        drop(server);
        assert!(!dir.exists());
        assert!(!takes_connections(port));
    }

    #[test]
    fn a_folder_that_its_user_cannot_reach_is_replaced() {
        let closed = scratch("closed");
        fs::create_dir_all(&closed).unwrap();
        fs::set_permissions(&closed, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
        let server = PostgresServer::start(&closed.join("server")).unwrap();
        assert_eq!(ask(&server, "select 1"), "1");
        drop(server);
        fs::remove_dir_all(&closed).unwrap();
    }

    #[test]
    fn a_server_that_does_not_start_says_why() {
        let mut server = PostgresServer::start(&scratch("broken")).unwrap();
        server.stop().unwrap();
        fs::write(server.data().join("postgresql.conf"), "wal_level = nonsense\n").unwrap();
        let error = server.start_again().unwrap_err().to_string();
        assert!(error.contains("nonsense"), "{error}");
    }
}
