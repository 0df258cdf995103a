//! A private Kafka broker.

use std::env;
use std::fs;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use super::ports;
use super::process::ServerProcess;
use super::restart::{restartable, started};

/// Names the folder of Kafka's Java archives.
pub const KAFKA_JARS: &str = "POSTROOM_TEST_KAFKA_JARS";

const ANSWERS_WITHIN: Duration = Duration::from_secs(90);
/// An id of a cluster, which is a UUID in base 64.
const CLUSTER: &str = "AAAAAAAAAAAAAAAAAAAAAQ";
/// `ApiVersions` 0 from a client without a name, which is answered as soon as requests are.
/// <https://kafka.apache.org/protocol.html>
const ARE_YOU_THERE: [u8; 14] = [0, 0, 0, 10, 0, 18, 0, 0, 0, 0, 0, 1, 0xff, 0xff];

/// A Kafka broker of our own on 127.0.0.1, which is its own controller, without authentication. Dropping it kills it.
///
/// It does not create topics by itself. What it confirmed survives [`kill`](Self::kill) as long as the operating system goes on.
#[derive(Debug)]
pub struct KafkaServer {
    dir: PathBuf,
    port: u16,
    controller: u16,
    links: Vec<Link>,
    /// Name and port of further listeners.
    secure: Vec<(String, u16)>,
    process: Option<ServerProcess>,
}

/// Listeners with TLS, users and rights. The plain listener still allows everything, for the tests themselves.
#[derive(Debug, Clone, Copy)]
pub struct KafkaSecurity<'a> {
    /// Names of further listeners, each with its protocol, such as `SASL_SSL`.
    pub listeners: &'a [(&'a str, &'a str)],
    /// Further lines of configuration.
    pub lines: &'a str,
    /// Users and their passwords for SCRAM; only the first one has any rights.
    pub users: &'a [(&'a str, &'a str)],
}

/// A listener behind a proxy: clients that come by it are told to come by it again.
#[derive(Debug, Clone, Copy)]
struct Link {
    listens: u16,
    /// Where the proxy listens.
    advertised: u16,
}

restartable!(KafkaServer, "Kafka broker");

impl KafkaServer {
    /// Starts one in `dir`, absent or empty, with further listeners for so many proxies. Returns when it answers.
    ///
    /// # Errors
    /// When `POSTROOM_TEST_KAFKA_JARS` does not name its archives, or it does not answer within 90 s.
    pub fn start(dir: &Path, links: usize) -> io::Result<Self> {
        Self::start_with(dir, links, None)
    }

    /// The same with further listeners.
    ///
    /// # Errors
    /// As for `start`.
    pub fn start_secure(dir: &Path, security: KafkaSecurity<'_>) -> io::Result<Self> {
        Self::start_with(dir, 0, Some(security))
    }

    fn start_with(dir: &Path, links: usize, security: Option<KafkaSecurity<'_>>) -> io::Result<Self> {
        fs::create_dir_all(dir)?;
        let dir = fs::canonicalize(dir)?;
        let (port, controller) = (ports::free()?, ports::free()?);
        let links: Vec<Link> = (0..links)
            .map(|_| Ok(Link { listens: ports::free()?, advertised: ports::free()? }))
            .collect::<io::Result<_>>()?;
        let mut listeners = format!("PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}");
        let mut advertised = format!("PLAINTEXT://127.0.0.1:{port}");
        let mut protocols = "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT".to_owned();
        for (number, link) in links.iter().enumerate() {
            listeners.push_str(&format!(",LINK{number}://127.0.0.1:{}", link.listens));
            advertised.push_str(&format!(",LINK{number}://127.0.0.1:{}", link.advertised));
            protocols.push_str(&format!(",LINK{number}:PLAINTEXT"));
        }
        let mut secure = Vec::new();
        let mut further = String::new();
        let mut format = vec!["kafka.tools.StorageTool", "format", "-t", CLUSTER, "--standalone"];
        let mut users = Vec::new();
        if let Some(security) = security {
            for (name, protocol) in security.listeners {
                let port = ports::free()?;
                listeners.push_str(&format!(",{name}://127.0.0.1:{port}"));
                advertised.push_str(&format!(",{name}://127.0.0.1:{port}"));
                protocols.push_str(&format!(",{name}:{protocol}"));
                secure.push(((*name).to_owned(), port));
            }
            let first = security.users.first().map_or("admin", |(name, _)| name);
            further = format!(
                "authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer\nsuper.users=User:ANONYMOUS;User:{first}\n{}\n",
                security.lines
            );
            users.extend(
                security
                    .users
                    .iter()
                    .map(|(name, password)| format!("SCRAM-SHA-512=[name={name},password={password}]")),
            );
        }
        for user in &users {
            format.extend(["--add-scram", user]);
        }
        let properties = format!(
            "process.roles=broker,controller\nnode.id=1\ncontroller.quorum.bootstrap.servers=127.0.0.1:{controller}\n\
             listeners={listeners}\nadvertised.listeners={advertised}\nlistener.security.protocol.map={protocols}\n\
             controller.listener.names=CONTROLLER\nlog.dirs={}\noffsets.topic.replication.factor=1\n\
             transaction.state.log.replication.factor=1\ntransaction.state.log.min.isr=1\n\
             share.coordinator.state.topic.replication.factor=1\nshare.coordinator.state.topic.min.isr=1\n\
             group.initial.rebalance.delay.ms=0\nauto.create.topics.enable=true\nbroker.session.timeout.ms=1500\n\
             broker.heartbeat.interval.ms=300\nnum.network.threads=2\nnum.io.threads=2\nlog.cleaner.dedupe.buffer.size=4194304\n{further}",
            dir.join("data").display()
        );
        fs::write(dir.join("kafka.properties"), properties)?;
        let mut server = Self { dir, port, controller, links, secure, process: None };
        server.format(&format)?;
        server.start_again()?;
        Ok(server)
    }

    /// Another broker of the same cluster, in a folder of its own; `node` is 2 or more.
    ///
    /// # Errors
    /// As for `start`.
    pub fn join(&self, dir: &Path, node: u32) -> io::Result<Self> {
        fs::create_dir_all(dir)?;
        let dir = fs::canonicalize(dir)?;
        let (port, controller) = (ports::free()?, self.controller);
        let properties = format!(
            "process.roles=broker\nnode.id={node}\ncontroller.quorum.bootstrap.servers=127.0.0.1:{controller}\n\
             listeners=PLAINTEXT://127.0.0.1:{port}\nlistener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT\n\
             controller.listener.names=CONTROLLER\nlog.dirs={}\nbroker.session.timeout.ms=1500\nbroker.heartbeat.interval.ms=300\n\
             num.network.threads=2\nnum.io.threads=2\nlog.cleaner.dedupe.buffer.size=4194304\n",
            dir.join("data").display()
        );
        fs::write(dir.join("kafka.properties"), properties)?;
        let mut server = Self { dir, port, controller, links: Vec::new(), secure: Vec::new(), process: None };
        server.format(&["kafka.tools.StorageTool", "format", "-t", CLUSTER, "--no-initial-controllers"])?;
        server.start_again()?;
        Ok(server)
    }

    fn format(&self, arguments: &[&str]) -> io::Result<()> {
        let properties = self.dir.join("kafka.properties");
        let output = self.java()?.args(arguments).arg("-c").arg(properties).stdin(Stdio::null()).output()?;
        if output.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
        Err(io::Error::other(format!("format the folder of a Kafka broker: {}; it said:\n{said}", output.status)))
    }

    /// `127.0.0.1:PORT`
    #[must_use]
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Of a link: where a proxy must listen, and where it hands connections on to.
    ///
    /// # Panics
    /// If it was started with fewer links.
    #[must_use]
    pub fn link(&self, number: usize) -> (String, String) {
        let Link { listens, advertised } = self.links[number];
        (format!("127.0.0.1:{advertised}"), format!("127.0.0.1:{listens}"))
    }

    /// `127.0.0.1:PORT` of a further listener.
    ///
    /// # Panics
    /// If there is none of this name.
    #[must_use]
    pub fn listener(&self, name: &str) -> String {
        let (_, port) = self.secure.iter().find(|(found, _)| found == name).expect("a listener of this name");
        format!("127.0.0.1:{port}")
    }

    /// Starts it on the same ports and data; one that runs is left as it is.
    ///
    /// # Errors
    /// When it does not answer within 90 s.
    pub fn start_again(&mut self) -> io::Result<()> {
        if self.process.is_some() {
            return Ok(());
        }
        let mut command = self.java()?;
        command.arg("kafka.Kafka").arg(self.dir.join("kafka.properties"));
        self.process = Some(started("kafka", &self.dir, command, ANSWERS_WITHIN, || answers(self.port))?);
        Ok(())
    }

    fn java(&self) -> io::Result<Command> {
        let jars = env::var_os(KAFKA_JARS).ok_or_else(|| {
            let text = "POSTROOM_TEST_KAFKA_JARS names no folder of Kafka's archives; `cargo xtask test` fetches them";
            io::Error::new(io::ErrorKind::NotFound, text)
        })?;
        let mut java = Command::new("java");
        java.args(["-Xms128m", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]);
        java.args(["-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-cp"]).arg(Path::new(&jars).join("*"));
        Ok(java)
    }
}

fn answers(port: u16) -> bool {
    let asked = || {
        let mut stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_read_timeout(Some(Duration::from_secs(2)))?;
        stream.write_all(&ARE_YOU_THERE)?;
        stream.read_exact(&mut [0; 8])
    };
    asked().is_ok()
}
