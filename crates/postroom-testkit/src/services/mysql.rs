//! A private MariaDB, or a private MySQL.

use std::env;
use std::fs::{self, OpenOptions};
use std::io::{self, Read};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use super::process::{ServerProcess, Signal};
use super::{folder, ports, wait};

const ANSWERS_WITHIN: Duration = Duration::from_secs(60);
const STOPS_WITHIN: Duration = Duration::from_secs(60);
const PROBE_WITHIN: Duration = Duration::from_secs(1);
const PORTS_TRIED_MAX: usize = 3;

/// Where a MySQL server's packages were unpacked, with all that they need: that server is used in place of the installed MariaDB.
pub const MYSQL_ROOT: &str = "POSTROOM_TEST_MYSQL_ROOT";

/// A MariaDB (or, where [`MYSQL_ROOT`] says so, a MySQL) of our own, on 127.0.0.1, user `root` without a password.
///
/// Promise: each commit is flushed, so that [`kill`](Self::kill) followed by [`start_again`](Self::start_again) shows what a crash of the server
/// shows. Dropping it stops the server and removes its folder.
#[derive(Debug)]
pub struct MysqlServer {
    programs: Programs,
    dir: PathBuf,
    port: u16,
    log_from: u64,
    process: Option<ServerProcess>,
}

impl MysqlServer {
    /// Creates a server in `dir`, absent or empty, and starts it; returns when it takes connections.
    ///
    /// # Errors
    /// When the packages are not installed, the folder is in use, or the server does not answer within 60 s; then the error holds the end of
    /// its log.
    pub fn start(dir: &Path) -> io::Result<Self> {
        let programs = Programs::find().ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::NotFound,
                "find `mariadbd`, `mariadb-install-db` and `my_print_defaults` on the PATH or in /usr/sbin; \
                 `apt-get install --no-install-recommends mariadb-server-core mariadb-client-core` installs them",
            )
        })?;
        folder::create_empty(dir)?;
        let mut server = Self { programs, dir: fs::canonicalize(dir)?, port: 0, log_from: 0, process: None };
        server.install()?;
        for _ in 1..PORTS_TRIED_MAX {
            server.port = ports::free()?;
            match server.launch() {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                other => return other.map(|()| server),
            }
        }
        server.port = ports::free()?;
        server.launch().map(|()| server)
    }

    /// `mysql://root@127.0.0.1:PORT/database`
    #[must_use]
    pub fn url(&self, database: &str) -> String {
        format!("mysql://root@127.0.0.1:{}/{database}", self.port)
    }

    /// `SIGKILL`: no goodbye. Returns when it is gone. A server that does not run is left as it is.
    ///
    /// # Errors
    /// When the process survives, which only the kernel can explain.
    pub fn kill(&mut self) -> io::Result<()> {
        if let Some(process) = &mut self.process {
            process.kill()?;
        }
        self.process = None;
        Ok(())
    }

    /// Starts the server on the same port and data after [`kill`](Self::kill); returns when recovery is through and it takes connections.
    ///
    /// # Errors
    /// When it does not answer within 60 s.
    pub fn start_again(&mut self) -> io::Result<()> {
        self.kill()?;
        self.launch()
    }

    fn install(&self) -> io::Result<()> {
        let mut install = match &self.programs {
            Programs::MariaDb { install, .. } => {
                let mut command = Command::new(install);
                command.args(["--no-defaults", "--auth-root-authentication-method=normal", "--skip-test-db"]);
                command
            }
            Programs::Mysql { root } => {
                let mut command = mysqld(root);
                command.arg("--initialize-insecure");
                command
            }
        };
        install.arg(format!("--datadir={}", self.data().display())).args(as_root());
        let output = install.current_dir(&self.dir).stdin(Stdio::null()).output()?;
        if output.status.success() {
            return Ok(());
        }
        let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        Err(io::Error::other(format!(
            "create a database server in {}: {}; it said:\n{said}",
            self.dir.display(),
            output.status
        )))
    }

    fn launch(&mut self) -> io::Result<()> {
        self.log_from = folder::length(&self.log());
        let log = OpenOptions::new().create(true).append(true).open(self.log())?;
        let mut command = match &self.programs {
            Programs::MariaDb { server, .. } => {
                let mut command = Command::new(server);
                command.args(["--no-defaults", "--log-bin=binlog", "--binlog-format=ROW", "--skip-name-resolve"]);
                command
            }
            Programs::Mysql { root } => {
                // Its account is root@localhost, which is 127.0.0.1 only where names are resolved.
                let mut command = mysqld(root);
                command.args(["--mysqlx=OFF", "--performance-schema=OFF"]);
                command
            }
        };
        command.args([
            "--bind-address=127.0.0.1",
            "--server-id=7",
            "--innodb-buffer-pool-size=128M",
            "--max-connections=300",
        ]);
        command.args(as_root()).arg(format!("--port={}", self.port));
        command.arg(format!("--datadir={}", self.data().display()));
        // A server that starts deletes what others have in a common one.
        let temporary = self.dir.join("tmp");
        fs::create_dir_all(&temporary)?;
        command.arg(format!("--tmpdir={}", temporary.display()));
        // A path of a socket has less than 108 bytes.
        command.arg(format!("--socket={}", env::temp_dir().join(format!("postroom-{}.sock", self.port)).display()));
        command.arg(format!("--pid-file={}", self.dir.join("pid").display()));
        command.current_dir(&self.dir).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let mut process = ServerProcess::spawn(command, Signal::Terminate, &self.dir)?;
        let port = self.port;
        let answered = wait::until(ANSWERS_WITHIN, || match process.exit_status()? {
            Some(status) => Ok(Some(Err(status))),
            None => Ok(greets(port).then_some(Ok(()))),
        })?;
        let what = match answered {
            Some(Ok(())) => {
                self.process = Some(process);
                return Ok(());
            }
            Some(Err(status)) => format!("it ended at once with {status}"),
            None => "it took no connection within 60 s".to_owned(),
        };
        let log = folder::log_tail(&self.log(), self.log_from);
        let taken = log.contains("Address already in use");
        let kind = if taken { io::ErrorKind::AddrInUse } else { io::ErrorKind::Other };
        Err(io::Error::new(
            kind,
            format!("start a database server on 127.0.0.1:{port}: {what}; the end of its log:\n{log}"),
        ))
    }

    fn data(&self) -> PathBuf {
        self.dir.join("data")
    }

    fn log(&self) -> PathBuf {
        self.dir.join("log")
    }
}

impl Drop for MysqlServer {
    fn drop(&mut self) {
        if let Some(process) = &mut self.process {
            let _ = process.ends_within(Signal::Terminate, STOPS_WITHIN);
        }
        self.process = None;
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// It refuses to run as root unless it is told to.
fn as_root() -> Option<&'static str> {
    fs::metadata("/proc/self").is_ok_and(|about| about.uid() == 0).then_some("--user=root")
}

/// What is started.
#[derive(Debug)]
enum Programs {
    MariaDb {
        server: PathBuf,
        install: PathBuf,
    },
    /// Unpacked here.
    Mysql {
        root: PathBuf,
    },
}

impl Programs {
    fn find() -> Option<Self> {
        match env::var_os(MYSQL_ROOT) {
            Some(root) => Some(Self::Mysql { root: root.into() }),
            None => mariadb_programs().map(|(server, install)| Self::MariaDb { server, install }),
        }
    }
}

/// The server and the program that creates its tables.
pub(super) fn mariadb_programs() -> Option<(PathBuf, PathBuf)> {
    let path = env::var_os("PATH").unwrap_or_default();
    let folders: Vec<PathBuf> = env::split_paths(&path).chain(["/usr/sbin".into(), "/usr/bin".into()]).collect();
    let find = |name: &str| folders.iter().map(|folder| folder.join(name)).find(|file| file.is_file());
    find("my_print_defaults")?;
    Some((find("mariadbd")?, find("mariadb-install-db")?))
}

/// MySQL's server, started by the loader that was unpacked with it: its libraries may be newer than this machine's.
fn mysqld(root: &Path) -> Command {
    let usr = root.join("usr");
    let libraries = |folder: &Path| folder.join(format!("lib/{}-linux-gnu", env::consts::ARCH));
    let loader = ["usr/lib64", "lib64", "usr/lib", "lib"]
        .iter()
        .map(|folder| root.join(folder))
        .chain([libraries(&usr), libraries(root)])
        .find_map(|folder| {
            let entries = fs::read_dir(folder).ok()?;
            let names = entries.flatten().map(|entry| entry.path());
            names.into_iter().find(|path| {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                name.starts_with("ld-linux") && path.is_file()
            })
        });
    // Without a loader the start fails and says why.
    let mut command = Command::new(loader.unwrap_or_else(|| root.join("ld-linux")));
    command.arg("--library-path").arg(env::join_paths([libraries(root), libraries(&usr)]).unwrap_or_default());
    command.arg(usr.join("sbin/mysqld")).arg("--no-defaults").arg(format!("--basedir={}", usr.display()));
    for (option, folder) in [
        ("lc-messages-dir", "share/mysql"),
        ("character-sets-dir", "share/mysql/charsets"),
        ("plugin-dir", "lib/mysql/plugin"),
    ] {
        command.arg(format!("--{option}={}", usr.join(folder).display()));
    }
    // It looks for a folder of Debian's otherwise.
    command.args(["--secure-file-priv=", "--innodb-redo-log-capacity=16M"]);
    command
}

/// Whether the server sends its greeting, whose first byte behind the head of the packet is 10.
fn greets(port: u16) -> bool {
    let greeting = |mut stream: TcpStream| -> io::Result<bool> {
        stream.set_read_timeout(Some(PROBE_WITHIN))?;
        let mut head = [0; 5];
        stream.read_exact(&mut head)?;
        Ok(head[4] == 10)
    };
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    TcpStream::connect_timeout(&address, PROBE_WITHIN).and_then(greeting).unwrap_or(false)
}
