//! A private RabbitMQ.

use std::env;
use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{self, Command, Stdio};
use std::time::Duration;

use super::process::{ServerProcess, Signal};
use super::{folder, ports, wait};

const ANSWERS_WITHIN: Duration = Duration::from_secs(60);
const STOPS_WITHIN: Duration = Duration::from_secs(60);
const PROBE_WITHIN: Duration = Duration::from_secs(1);
const PORTS_TRIED_MAX: usize = 3;

/// Debian's own scripts; those in `/usr/sbin` insist on the user `rabbitmq` and the machine's one node.
const PROGRAMS: &str = "/usr/lib/rabbitmq/bin";

/// Where a newer RabbitMQ's packages were unpacked, with all that they need.
pub const RABBITMQ_ROOT: &str = "POSTROOM_TEST_RABBITMQ_ROOT";

/// Runs a program, which follows, in the folder `$1`, as if that were the whole machine, but for the folder `$2`. The mounts end with it.
const IN_ROOT: &str = r#"
mkdir -p "$1/proc" "$1/dev" "$1/tmp" "$1$2" && mount --rbind /dev "$1/dev" && mount --rbind /proc "$1/proc" &&
mount --bind "$2" "$1$2" && root=$1 && shift 2 && exec chroot "$root" "$@"
"#;

/// A RabbitMQ node of our own on 127.0.0.1, with the user `guest`, the virtual host `/` and no plugins.
///
/// Promise: its data, its cookie and its name service (`epmd`) are private, whatever stands in `/etc/rabbitmq`.
/// [`kill`](Self::kill) followed by [`start_again`](Self::start_again) keeps durable queues and the persistent
/// messages that were confirmed. Dropping it kills the node and removes its folder.
///
/// Edge: nothing here can show what a power cut does; the operating system keeps its page cache.
#[derive(Debug)]
pub struct RabbitServer {
    dir: PathBuf,
    port: u16,
    distribution_port: u16,
    /// Where in the log the present start begins.
    log_from: u64,
    process: Option<ServerProcess>,
    names: Option<ServerProcess>,
    names_port: u16,
    tls: Option<RabbitTls>,
    /// Where it is unpacked; none: it is installed.
    root: Option<PathBuf>,
}

/// What a node that speaks TLS beside plain AMQP shows, and asks for.
#[derive(Debug, Clone)]
pub struct RabbitTls {
    /// Certificates of clients are issued by this one.
    pub root: PathBuf,
    /// Its own certificate.
    pub certificate: PathBuf,
    /// The key of that.
    pub key: PathBuf,
    /// Clients without a certificate are turned away.
    pub clients_need_one: bool,
    port: u16,
}

impl RabbitTls {
    /// Files in PEM.
    #[must_use]
    pub fn new(root: &Path, certificate: &Path, key: &Path, clients_need_one: bool) -> Self {
        let of = Path::to_owned;
        Self { root: of(root), certificate: of(certificate), key: of(key), clients_need_one, port: 0 }
    }
}

impl RabbitServer {
    /// Starts a new node in `dir`; returns when it speaks AMQP, which takes some seconds.
    ///
    /// `dir` must be absent or empty.
    ///
    /// # Errors
    /// When the package is not installed, the folder is in use, or the node does not answer within 60 s; then the
    /// error holds the end of its log.
    pub fn start(dir: &Path) -> io::Result<Self> {
        Self::start_with(dir, None)
    }

    /// Like [`start`](Self::start), with a second listener that speaks TLS.
    ///
    /// # Errors
    /// As for `start`.
    pub fn start_with(dir: &Path, tls: Option<RabbitTls>) -> io::Result<Self> {
        if !is_installed() {
            return Err(io::Error::new(
                io::ErrorKind::NotFound,
                format!("find RabbitMQ in {PROGRAMS}; `apt-get install rabbitmq-server` installs it"),
            ));
        }
        Self::create(dir, tls, None)
    }

    /// Like [`start`](Self::start), with the RabbitMQ that was unpacked where [`RABBITMQ_ROOT`] says: version 4, which speaks AMQP 1.0 beside
    /// 0-9-1. Only root can start it; [`ctl`](Self::ctl) with what needs no terminal works.
    ///
    /// # Errors
    /// When there is none, and as for `start`.
    pub fn start_newer(dir: &Path, tls: Option<RabbitTls>) -> io::Result<Self> {
        let root = env::var_os(RABBITMQ_ROOT).map(PathBuf::from).ok_or_else(|| {
            let text = "POSTROOM_TEST_RABBITMQ_ROOT names no folder with a RabbitMQ 4; `cargo xtask test` unpacks one";
            io::Error::new(io::ErrorKind::NotFound, text)
        })?;
        Self::create(dir, tls, Some(fs::canonicalize(root)?))
    }

    fn create(dir: &Path, tls: Option<RabbitTls>, root: Option<PathBuf>) -> io::Result<Self> {
        folder::create_empty(dir)?;
        let mut server = Self {
            dir: fs::canonicalize(dir)?,
            port: 0,
            distribution_port: 0,
            log_from: 0,
            process: None,
            names: None,
            names_port: 0,
            tls,
            root,
        };
        write_secret(&server.dir.join(".erlang.cookie"))?;
        fs::write(server.dir.join("enabled_plugins"), "[].\n")?;
        fs::write(server.dir.join("rabbitmq-env.conf"), "")?;
        for _ in 1..PORTS_TRIED_MAX {
            match server.launch_on_new_ports() {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                other => return other.map(|()| server),
            }
        }
        server.launch_on_new_ports().map(|()| server)
    }

    /// `amqp://guest:guest@127.0.0.1:PORT/%2f`
    #[must_use]
    pub fn url(&self) -> String {
        format!("amqp://guest:guest@127.0.0.1:{}/%2f", self.port)
    }

    /// `amqps://guest:guest@127.0.0.1:PORT/%2f`, where it was started so.
    #[must_use]
    pub fn tls_url(&self) -> Option<String> {
        self.tls.as_ref().map(|tls| format!("amqps://guest:guest@127.0.0.1:{}/%2f", tls.port))
    }

    /// The AMQP port on 127.0.0.1; the same for the whole life of this value.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The folder that holds `mnesia`, `logs` and `log`, the node's standard output.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Shuts the node down cleanly; returns when it is gone. A paused node goes on first. A node that does not run is
    /// left as it is.
    ///
    /// # Errors
    /// When it is still there after 60 s.
    pub fn stop(&mut self) -> io::Result<()> {
        let Some(process) = &mut self.process else { return Ok(()) };
        process.signal(Signal::Continue)?;
        if !process.ends_within(Signal::Terminate, STOPS_WITHIN)? {
            return Err(self.trouble("stop", "it did not shut down within 60 s; `kill` ends it at once"));
        }
        self.process = None;
        Ok(())
    }

    /// `SIGKILL` to the node and its helpers; returns when all are gone. Connections break without a goodbye.
    /// A node that does not run is left as it is.
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

    /// Starts the node on the same port and data after [`stop`](Self::stop) or [`kill`](Self::kill); returns when it
    /// speaks AMQP and its durable queues are there.
    ///
    /// # Errors
    /// When it is still running, or does not answer within 60 s.
    pub fn start_again(&mut self) -> io::Result<()> {
        if let Some(process) = &mut self.process
            && process.exit_status()?.is_none()
        {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                format!("start RabbitMQ on port {} again: it is running; stop or kill it first", self.port),
            ));
        }
        self.process = None;
        self.launch()
    }

    /// Freezes the node (`SIGSTOP`): connections stay open, the kernel still takes bytes, nobody answers. Returns
    /// when it stands still. A second call changes nothing.
    ///
    /// # Errors
    /// When the node does not run.
    pub fn pause(&self) -> io::Result<()> {
        self.running("pause")?.pause()
    }

    /// Lets a paused node go on (`SIGCONT`). A node that was not paused is left as it is.
    ///
    /// # Errors
    /// When the node does not run.
    pub fn resume(&self) -> io::Result<()> {
        self.running("resume")?.signal(Signal::Continue)
    }

    /// Runs `rabbitmqctl` against this node and returns what it printed, e.g. `&["list_queues", "--silent"]`.
    ///
    /// Edge: with a paused node it waits for rabbitmqctl's own time limit.
    ///
    /// # Errors
    /// When rabbitmqctl fails; the error holds what it said.
    pub fn ctl(&self, args: &[&str]) -> io::Result<String> {
        let output = self.program("rabbitmqctl").args(["--node", &self.node()]).args(args).output()?;
        if !output.status.success() {
            return Err(io::Error::other(format!(
                "run `rabbitmqctl {}`: it ended with {}; it said:\n{}{}",
                args.join(" "),
                output.status,
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr),
            )));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Raises the memory alarm, so that the node takes nothing from connections that publish, or ends it.
    ///
    /// # Errors
    /// When rabbitmqctl fails.
    pub fn memory_alarm(&self, on: bool) -> io::Result<()> {
        let limit: &[&str] = if on { &["absolute", "1MB"] } else { &["0.4"] };
        self.ctl(&[&["set_vm_memory_high_watermark"], limit].concat()).map(drop)
    }

    fn launch_on_new_ports(&mut self) -> io::Result<()> {
        self.port = ports::free()?;
        self.distribution_port = ports::free()?;
        self.names_port = ports::free()?;
        self.names = None;
        let mut settings = format!("listeners.tcp.1 = 127.0.0.1:{}\n", self.port);
        settings.push_str("disk_free_limit.absolute = 50MB\nlog.console = true\nlog.console.level = info\n");
        if let Some(tls) = &mut self.tls {
            tls.port = ports::free()?;
            let RabbitTls { root, certificate, key, clients_need_one, port } = tls;
            let (root, certificate, key) = (root.display(), certificate.display(), key.display());
            settings.push_str(&format!(
                "listeners.ssl.1 = 127.0.0.1:{port}\nssl_options.cacertfile = {root}\nssl_options.certfile = {certificate}\n\
                 ssl_options.keyfile = {key}\nssl_options.verify = verify_peer\n\
                 ssl_options.fail_if_no_peer_cert = {clients_need_one}\n"
            ));
        }
        fs::write(self.dir.join("rabbitmq.conf"), settings)?;
        self.launch()
    }

    fn launch(&mut self) -> io::Result<()> {
        self.log_from = folder::length(&self.log());
        self.answer_for_names()?;
        let mut command = self.program("rabbitmq-server");
        let log = OpenOptions::new().create(true).append(true).open(self.log())?;
        command.stdout(log.try_clone()?).stderr(log);
        let mut process = ServerProcess::spawn(command, Signal::Kill, &self.dir)?;

        let port = self.port;
        // It opens its listeners one after the other.
        let tls_port = self.tls.as_ref().map(|tls| tls.port);
        let answered = wait::until(ANSWERS_WITHIN, || match process.exit_status()? {
            Some(status) => Ok(Some(Err(status))),
            None => Ok((speaks_amqp(port) && tls_port.is_none_or(listens)).then_some(Ok(()))),
        })?;
        match answered {
            Some(Ok(())) => {
                self.process = Some(process);
                Ok(())
            }
            Some(Err(status)) => Err(self.trouble("start", &format!("it ended with {status}"))),
            None => Err(self.trouble("start", "it did not speak AMQP within 60 s")),
        }
    }

    /// Runs an `epmd` of our own; Erlang would otherwise start one that outlives everybody.
    fn answer_for_names(&mut self) -> io::Result<()> {
        if let Some(names) = &mut self.names
            && names.exit_status()?.is_none()
        {
            return Ok(());
        }
        let log = OpenOptions::new().create(true).append(true).open(self.log())?;
        let mut command = Command::new("epmd");
        command
            .args(["-port", &self.names_port.to_string(), "-address", "127.0.0.1"])
            .env("PATH", search_path())
            .current_dir(&self.dir)
            .stdout(log.try_clone()?)
            .stderr(log);
        let mut names = ServerProcess::spawn(command, Signal::Kill, &self.dir)?;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, self.names_port));
        let answered = wait::until(ANSWERS_WITHIN, || match names.exit_status()? {
            Some(status) => Ok(Some(Err(status))),
            None => Ok(TcpStream::connect_timeout(&address, PROBE_WITHIN).ok().map(|_| Ok(()))),
        })?;
        match answered {
            Some(Ok(())) => {
                self.names = Some(names);
                Ok(())
            }
            Some(Err(status)) => Err(self.trouble("start", &format!("its name service epmd ended with {status}"))),
            None => Err(self.trouble("start", "its name service epmd took no connection within 60 s")),
        }
    }

    /// One of RabbitMQ's programs in an environment that holds nothing but this node.
    fn program(&self, name: &str) -> Command {
        let at = |name: &str| self.dir.join(name).into_os_string();
        let program = Path::new(PROGRAMS).join(name);
        let mut command = match &self.root {
            None => Command::new(program),
            Some(root) => {
                let mut command = Command::new("unshare");
                command.args(["--mount", "--propagation", "private", "sh", "-c", IN_ROOT, "postroom"]);
                // With what lies beside it, such as certificates.
                command.arg(root).arg(self.dir.parent().unwrap_or(&self.dir)).arg(program);
                command
            }
        };
        command.current_dir(&self.dir).stdin(Stdio::null()).env_clear();
        command
            .env("PATH", search_path())
            .env("LANG", "C.UTF-8")
            .env("HOME", &self.dir)
            // The script then becomes the node itself instead of waiting for it, so that signals reach the node.
            .env("RUNNING_UNDER_SYSTEMD", "true")
            .env("RABBITMQ_NODENAME", self.node())
            .env("RABBITMQ_NODE_PORT", self.port.to_string())
            .env("RABBITMQ_DIST_PORT", self.distribution_port.to_string())
            .env("RABBITMQ_MNESIA_BASE", at("mnesia"))
            .env("RABBITMQ_LOG_BASE", at("logs"))
            .env("RABBITMQ_PID_FILE", at("pid"))
            // Every file that would otherwise be looked for in /etc/rabbitmq.
            .env("RABBITMQ_CONFIG_FILE", at("rabbitmq.conf"))
            .env("RABBITMQ_CONFIG_FILES", at("conf.d"))
            .env("RABBITMQ_ADVANCED_CONFIG_FILE", at("advanced.config"))
            .env("RABBITMQ_CONF_ENV_FILE", at("rabbitmq-env.conf"))
            .env("RABBITMQ_ENABLED_PLUGINS_FILE", at("enabled_plugins"))
            // Two schedulers start faster than one for each core, and a test needs no more.
            .env("RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS", "+S 2:2 -kernel inet_dist_use_interface {127,0,0,1}")
            // Any free port, so that several rabbitmqctl can run at a time.
            .env("RABBITMQ_CTL_DIST_PORT_MIN", "0")
            .env("RABBITMQ_CTL_DIST_PORT_MAX", "0")
            .env("ERL_EPMD_PORT", self.names_port.to_string())
            .env("ERL_EPMD_ADDRESS", "127.0.0.1");
        command
    }

    fn running(&self, verb: &str) -> io::Result<&ServerProcess> {
        self.process.as_ref().ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::NotConnected,
                format!("{verb} RabbitMQ on port {}: it does not run; start it again first", self.port),
            )
        })
    }

    fn trouble(&self, verb: &str, what: &str) -> io::Error {
        let log = folder::log_tail(&self.log(), self.log_from);
        let taken = ["eaddrinuse", "in use by another process", "Address already in use"];
        let kind =
            if taken.iter().any(|words| log.contains(words)) { io::ErrorKind::AddrInUse } else { io::ErrorKind::Other };
        io::Error::new(
            kind,
            format!(
                "{verb} RabbitMQ on 127.0.0.1:{}: {what}; the cause is usually in the end of its log {}:\n{log}",
                self.port,
                self.log().display(),
            ),
        )
    }

    fn node(&self) -> String {
        format!("postroom-{}-{}@localhost", process::id(), self.port)
    }

    fn log(&self) -> PathBuf {
        self.dir.join("log")
    }
}

impl Drop for RabbitServer {
    fn drop(&mut self) {
        // The node first, or it would look for a new epmd. Dropping a process kills it.
        self.process = None;
        self.names = None;
        let _ = fs::remove_dir_all(&self.dir);
    }
}

pub(super) fn is_installed() -> bool {
    ["rabbitmq-server", "rabbitmqctl"].iter().all(|name| Path::new(PROGRAMS).join(name).is_file())
}

/// Ours, and where Debian keeps `erl` and `epmd`, should a trimmed `PATH` lack it.
fn search_path() -> OsString {
    let mut path = env::var_os("PATH").unwrap_or_default();
    path.push(":/usr/sbin:/usr/bin:/sbin:/bin");
    path
}

/// The cookie guards a loopback port that only lives as long as a test; it need not be hard to guess.
fn write_secret(file: &Path) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o400).open(file)?;
    write!(file, "POSTROOM{}", process::id())
}

/// Whether the node greets us. Its listener opens last, after the queues have been recovered.
fn listens(port: u16) -> bool {
    TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok()
}

fn speaks_amqp(port: u16) -> bool {
    const HEADER: &[u8] = b"AMQP\x00\x00\x09\x01";
    const METHOD_FRAME: u8 = 1;
    let greeted = |mut stream: TcpStream| -> io::Result<bool> {
        stream.set_read_timeout(Some(PROBE_WITHIN))?;
        stream.write_all(HEADER)?;
        let mut kind = [0];
        stream.read_exact(&mut kind)?;
        Ok(kind == [METHOD_FRAME])
    };
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    TcpStream::connect_timeout(&address, PROBE_WITHIN).and_then(greeted).unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DECLARE: &str = "Q = rabbit_misc:r(<<\"/\">>, queue, <<\"kept\">>), \
        {new, _} = rabbit_amqqueue:declare(Q, true, false, [], none, <<\"test\">>), mnesia:sync_log().";

    fn scratch(name: &str) -> PathBuf {
        env::temp_dir().join(format!("postroom-test-{}-rabbit-{name}", process::id()))
    }

    /// rabbitmqctl cannot declare a queue, but it can run Erlang in the node.
    fn declare(server: &RabbitServer) {
        server.ctl(&["eval", DECLARE]).unwrap();
    }

    /// The listener opens a moment before the node counts itself among those that run, and rabbitmqctl lists the queues of
    /// running nodes only.
    fn queues(server: &RabbitServer) -> String {
        server.ctl(&["await_startup"]).unwrap();
        server.ctl(&["list_queues", "--silent", "--no-table-headers", "name", "durable"]).unwrap().trim().to_owned()
    }

    #[test]
    fn a_killed_server_comes_back_with_its_durable_queues() {
        let mut server = RabbitServer::start(&scratch("killed")).unwrap();
        declare(&server);
        let url = server.url();
        server.kill().unwrap();
        server.kill().unwrap();
        assert!(!speaks_amqp(server.port()));
        server.start_again().unwrap();
        assert_eq!(server.url(), url);
        assert_eq!(queues(&server), "kept\ttrue", "{}", fs::read_to_string(server.log()).unwrap());

        server.stop().unwrap();
        server.stop().unwrap();
        assert!(!speaks_amqp(server.port()));
        server.start_again().unwrap();
        assert_eq!(queues(&server), "kept\ttrue");
        assert_eq!(server.start_again().unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    }

    #[test]
    fn a_paused_server_is_silent_until_it_is_resumed() {
        let mut server = RabbitServer::start(&scratch("paused")).unwrap();
        server.pause().unwrap();
        server.pause().unwrap();
        assert!(!speaks_amqp(server.port()));
        server.resume().unwrap();
        assert!(speaks_amqp(server.port()));

        server.pause().unwrap();
        server.kill().unwrap();
        assert_eq!(server.pause().unwrap_err().kind(), io::ErrorKind::NotConnected);

        let (dir, names_port) = (server.dir().to_owned(), server.names_port);
        drop(server);
        assert!(!dir.exists());
        assert!(TcpStream::connect((Ipv4Addr::LOCALHOST, names_port)).is_err());
    }
}
