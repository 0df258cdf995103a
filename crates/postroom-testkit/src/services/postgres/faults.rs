//! What can be done to a PostgreSQL besides killing it: its clock set, its disk filled, its standby promoted.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use super::{PostgresServer, Tmpfs, wait};

/// Folder of the small disk, in the server's folder.
pub(super) const DISK: &str = "disk";
const STREAMS_WITHIN: Duration = Duration::from_secs(60);

/// A clock that a running server reads from a file.
#[derive(Debug)]
pub(in crate::services) struct Clock {
    library: PathBuf,
    /// How far it is from the machine's clock, for example `-3600`.
    file: PathBuf,
}

impl Clock {
    pub(super) fn create(dir: &Path) -> io::Result<Self> {
        let library = clock_library().ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::NotFound,
                "find `faketime/libfaketimeMT.so.1` below /usr/lib; `apt-get install libfaketime` installs it",
            )
        })?;
        let clock = Self { library, file: dir.join("clock") };
        clock.set(0)?;
        Ok(clock)
    }

    /// Whole at every moment: the server reads the file at every look at its clock.
    fn set(&self, seconds: i64) -> io::Result<()> {
        let next = self.file.with_extension("next");
        fs::write(&next, format!("{seconds:+}\n"))?;
        fs::rename(next, &self.file)
    }

    /// Lets `command` and its children see this clock.
    pub(super) fn rules(&self, command: &mut Command) {
        command.env("LD_PRELOAD", &self.library).env("FAKETIME_TIMESTAMP_FILE", &self.file);
        for (name, value) in [
            // Otherwise a step is seen some seconds later.
            ("FAKETIME_NO_CACHE", "1"),
            // A real clock step does not touch the monotonic clock, nor the times of files.
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
            ("DONT_FAKE_MONOTONIC", "1"),
            ("NO_FAKE_STAT", "1"),
            // What is shared would stay behind when the server is killed.
            ("FAKETIME_DISABLE_SHM", "1"),
        ] {
            command.env(name, value);
        }
    }
}

/// Debian's libfaketime, the one for programs with threads: it alone holds back signals while it reads the file. In the other one
/// a timer's signal that comes then reads it too, and waits for ever for a lock of the C library that its own process holds:
/// a backend that keeps its row locks and never ends.
pub(in crate::services) fn clock_library() -> Option<PathBuf> {
    let folders = fs::read_dir("/usr/lib").into_iter().flatten().flatten();
    let libraries = folders.map(|folder| folder.path().join("faketime/libfaketimeMT.so.1"));
    libraries.into_iter().find(|library| library.is_file())
}

pub(super) fn disk(dir: &Path, mib: u64) -> io::Result<Tmpfs> {
    Tmpfs::mount(&dir.join(DISK), mib * 1024)?.ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::PermissionDenied,
            "mount a small disk for PostgreSQL: only root may; ask `Tmpfs::may_mount` first, and skip the test in so many words",
        )
    })
}

impl PostgresServer {
    /// Sets the server's clock to so many seconds after the machine's, or before it when negative; every statement from
    /// now on sees that, also of connections that are open. Its monotonic clock goes on as before.
    ///
    /// # Errors
    /// When the server was started without [`clock`](super::PostgresOptions::clock).
    pub fn set_clock(&self, seconds: i64) -> io::Result<()> {
        let clock = self.clock.as_ref().ok_or_else(|| {
            io::Error::new(io::ErrorKind::Unsupported, "set PostgreSQL's clock: it was started without `clock: true`")
        })?;
        clock.set(seconds)
    }

    /// Fills the server's disk to the last byte.
    ///
    /// A statement that needs more space then fails; when the log of changes cannot be extended, the server ends all
    /// connections and recovers, or ends itself.
    ///
    /// # Errors
    /// When the server was started without [`disk_mib`](super::PostgresOptions::disk_mib).
    pub fn fill_disk(&self) -> io::Result<()> {
        self.small_disk()?.fill()
    }

    /// Gives the space back, and starts the server again when it ended meanwhile, as a supervisor does. Returns when it
    /// takes connections.
    ///
    /// # Errors
    /// When the server was started without [`disk_mib`](super::PostgresOptions::disk_mib), or does not come back.
    pub fn free_disk(&mut self) -> io::Result<()> {
        self.small_disk()?.free()?;
        let port = self.port;
        let answers = wait::until(super::ANSWERS_WITHIN, || {
            let ended = match &mut self.process {
                Some(process) => process.exit_status()?.is_some(),
                None => true,
            };
            Ok((ended || super::takes_connections(port)).then_some(ended))
        })?;
        match answers {
            Some(false) => Ok(()),
            Some(true) => self.start_again(),
            None => Err(self.trouble("wait for", "it took no connection within 60 s of having space again")),
        }
    }

    fn small_disk(&self) -> io::Result<&Tmpfs> {
        self.disk.as_ref().ok_or_else(|| {
            io::Error::new(io::ErrorKind::Unsupported, "fill PostgreSQL's disk: it was started without `disk_mib`")
        })
    }

    /// A streaming standby of this server, in `dir`, with the same options and a port of its own. Returns when it has caught up.
    ///
    /// From then on a commit of this server waits until the standby has it on its disk, unless the transaction set
    /// `synchronous_commit` otherwise. So every commit waits for ever when the standby goes first: call
    /// [`forget_standby`](Self::forget_standby) before that.
    ///
    /// # Errors
    /// When the copy fails, or the standby does not stream within 60 s.
    pub fn standby(&self, dir: &Path) -> io::Result<Self> {
        let mut standby = Self::prepare(dir, self.options)?;
        let port = self.port.to_string();
        let mut copy = Command::new(self.programs.join("pg_basebackup"));
        copy.args(["-h", "127.0.0.1", "-p", &port, "-U", "postgres"]);
        copy.args(["--write-recovery-conf", "--wal-method=stream", "--checkpoint=fast", "--no-sync", "--pgdata"]);
        copy.arg(standby.data()).current_dir(&standby.dir);
        standby.account.runs(&mut copy);
        succeeded(&mut copy, "copy the primary")?;
        standby.launch_on_a_free_port()?;
        self.sql("alter system set synchronous_standby_names = '*'")?;
        self.sql("select pg_reload_conf()")?;
        let in_step = "select count(*) from pg_stat_replication where sync_state = 'sync' and state = 'streaming'";
        match wait::until(STREAMS_WITHIN, || Ok((self.sql(in_step)? == "1").then_some(())))? {
            Some(()) => Ok(standby),
            None => Err(standby.trouble("wait for the standby", "it did not stream within 60 s")),
        }
    }

    /// Commits do not wait for a standby any more.
    ///
    /// # Errors
    /// When the server cannot be asked.
    pub fn forget_standby(&self) -> io::Result<()> {
        // Where nothing is changed, nothing waits for the standby either.
        self.sql("alter system reset synchronous_standby_names")?;
        self.sql("select pg_reload_conf()").map(drop)
    }

    /// Makes a standby the server that takes writes; returns when it does.
    ///
    /// # Errors
    /// When it is no standby, or not within a minute.
    pub fn promote(&self) -> io::Result<()> {
        if self.sql("select pg_promote(true, 60)")? == "t" {
            return Ok(());
        }
        Err(self.trouble("promote", "it did not take writes within 60 s"))
    }

    /// A failover: this standby gets the port of `primary`, which is killed, and is promoted there, so that clients of
    /// the old server find the new one under the same address. Meanwhile they are refused, or find a server that only reads.
    ///
    /// # Errors
    /// When one of them does not do what it is told.
    pub fn take_the_place_of(&mut self, mut primary: Self) -> io::Result<()> {
        primary.kill()?;
        self.stop()?;
        self.port = primary.port;
        self.launch()?;
        self.promote()
    }

    /// One statement as `postgres` in the database `postgres`; what it returns, as psql prints it unaligned.
    ///
    /// # Errors
    /// When the server cannot be reached or refuses the statement.
    pub fn sql(&self, sql: &str) -> io::Result<String> {
        self.sql_in("postgres", sql)
    }

    /// The same in another database.
    ///
    /// # Errors
    /// If `psql` fails; with what it said.
    pub fn sql_in(&self, database: &str, sql: &str) -> io::Result<String> {
        let mut psql = Command::new(self.programs.join("psql"));
        psql.args(["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-c", sql, &self.url(database)]);
        succeeded(&mut psql, sql)
    }
}

/// Runs a program to its end: what it printed, or an error with what it complained of.
fn succeeded(command: &mut Command, what: &str) -> io::Result<String> {
    let program: OsString = command.get_program().to_owned();
    let output = command.stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(format!("{what}: {} ended with {}; it said:\n{said}", program.display(), output.status)))
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::time::SystemTime;

    use super::super::PostgresOptions;
    use super::super::tests::{ask, scratch};
    use super::*;

    /// How many seconds the server's clock is ahead of ours.
    fn ahead(epoch: &str) -> f64 {
        let ours = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs_f64();
        epoch.trim().parse::<f64>().unwrap() - ours
    }

    const CLOCK: &str = "select extract(epoch from clock_timestamp())";

    #[test]
    fn the_clock_goes_back_and_forth_in_open_and_in_new_connections() {
        let options = PostgresOptions { clock: true, ..PostgresOptions::default() };
        let mut server = PostgresServer::start_with(&scratch("clock"), options).unwrap();
        let mut psql = Command::new("psql")
            .args(["-X", "-q", "-A", "-t", &server.url("postgres")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (mut input, mut output) = (psql.stdin.take().unwrap(), BufReader::new(psql.stdout.take().unwrap()));
        let mut open_sees = move || {
            writeln!(input, "{CLOCK};").unwrap();
            let mut line = String::new();
            output.read_line(&mut line).unwrap();
            ahead(&line)
        };
        for hours in [0, -1, 1, 0] {
            let seconds = hours * 3600;
            server.set_clock(seconds).unwrap();
            for seen in [open_sees(), ahead(&ask(&server, CLOCK))] {
                assert!((seen - seconds as f64).abs() < 60.0, "{seen} s ahead, and set to {seconds}");
            }
        }
        server.set_clock(-3600).unwrap();
        server.kill().unwrap();
        server.start_again().unwrap();
        assert!((ahead(&ask(&server, CLOCK)) + 3600.0).abs() < 60.0, "also after a restart");
        drop(open_sees);
        psql.wait().unwrap();
    }

    #[test]
    fn a_server_with_an_ordinary_clock_and_disk_says_that_they_cannot_be_changed() {
        let mut server = PostgresServer::start(&scratch("ordinary")).unwrap();
        for refused in [server.set_clock(1), server.fill_disk(), server.free_disk()] {
            assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::Unsupported);
        }
    }

    #[test]
    fn a_full_disk_refuses_writes_and_keeps_what_was_committed() {
        if !Tmpfs::may_mount().unwrap() {
            eprintln!("SKIPPED: a tmpfs can only be mounted by root; nothing was shown about a full disk");
            return;
        }
        let options = PostgresOptions { disk_mib: Some(192), ..PostgresOptions::default() };
        let mut server = PostgresServer::start_with(&scratch("disk"), options).unwrap();
        ask(&server, "create table kept (n int, filler text)");
        ask(&server, "insert into kept select n, repeat('x', 100) from generate_series(1, 1000) n");
        let more = "insert into kept select n, repeat('x', 1000) from generate_series(1, 100000) n";
        for _ in 0..2 {
            server.fill_disk().unwrap();
            assert!(server.sql(more).is_err());
            server.free_disk().unwrap();
            let count = "select count(*) from kept";
            assert_eq!(ask(&server, count), "1000");
            ask(&server, "vacuum kept");
        }
        ask(&server, "insert into kept values (0)");
        let dir = server.dir().to_owned();
        drop(server);
        assert!(!dir.exists());
    }

    #[test]
    fn a_promoted_standby_takes_the_place_of_its_primary_with_everything_that_was_committed() {
        let primary = PostgresServer::start(&scratch("primary")).unwrap();
        ask(&primary, "create table kept as select generate_series(1, 1000) as n");
        let mut standby = primary.standby(&scratch("standby")).unwrap();
        let (url, system) = (primary.url("postgres"), "select system_identifier from pg_control_system()");
        let timeline = "select timeline_id from pg_control_checkpoint()";
        let (system_before, timeline_before) = (ask(&primary, system), ask(&primary, timeline));
        assert!(standby.sql("insert into kept values (0)").is_err(), "it only reads");
        for n in 1001..=1020 {
            ask(&primary, &format!("insert into kept values ({n})"));
        }
        let dir = primary.dir().to_owned();
        standby.take_the_place_of(primary).unwrap();
        assert!(!dir.exists());
        assert_eq!(standby.url("postgres"), url);
        assert_eq!(ask(&standby, "select count(*) from kept"), "1020");
        ask(&standby, "insert into kept values (0)");
        ask(&standby, "checkpoint");
        assert_eq!(ask(&standby, system), system_before);
        assert_ne!(ask(&standby, timeline), timeline_before);
        // And it can have a standby of its own.
        let next = standby.standby(&scratch("next")).unwrap();
        ask(&standby, "insert into kept values (-1)");
        standby.forget_standby().unwrap();
        drop(next);
        ask(&standby, "insert into kept values (-2)");
    }
}
