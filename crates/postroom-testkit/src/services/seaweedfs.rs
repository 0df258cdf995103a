//! A private SeaweedFS, which speaks the S3 protocol.

use std::env;
use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::process::{ServerProcess, Signal};
use super::wait;

/// Names the program `weed` that is used.
pub const SEAWEEDFS_PROGRAM: &str = "POSTROOM_TEST_WEED";

const ANSWERS_WITHIN: Duration = Duration::from_secs(60);
/// It listens on five ports next to each other, and on each plus this.
const PORTS: u16 = 5;
const GRPC: u16 = 10_000;

/// A SeaweedFS of our own on 127.0.0.1 with one bucket, for whoever asks. Dropping it stops it.
#[derive(Debug)]
pub struct SeaweedFs {
    port: u16,
    _process: ServerProcess,
}

impl SeaweedFs {
    /// Starts one in `dir`, absent or empty, and makes this bucket (3 characters or more). Returns when it has it.
    ///
    /// # Errors
    /// When `POSTROOM_TEST_WEED` does not name the program, or it does not answer within 60 s.
    pub fn start(dir: &Path, bucket: &str) -> io::Result<Self> {
        let program = env::var_os(SEAWEEDFS_PROGRAM).ok_or_else(|| {
            let text = "POSTROOM_TEST_WEED names no SeaweedFS; `cargo xtask test` installs one";
            io::Error::new(io::ErrorKind::NotFound, text)
        })?;
        fs::create_dir_all(dir)?;
        let port = free_ports()?;
        let log = OpenOptions::new().create(true).append(true).open(dir.join("weed.log"))?;
        let mut command = Command::new(program);
        command.args(["mini", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-webdav=false", "-admin.ui=false"]);
        command.args(["-s3.port.iceberg=0", "-s3.port.lance=0"]).arg(format!("-dir={}", dir.join("data").display()));
        for (index, part) in ["s3", "master", "volume", "filer", "admin"].iter().enumerate() {
            command.arg(format!("-{part}.port={}", port + index as u16));
        }
        fs::create_dir_all(dir.join("data"))?;
        command.current_dir(dir).stdout(log.try_clone()?).stderr(log);
        // It takes its time over anything gentler, and everything in it is thrown away.
        let mut process = ServerProcess::spawn(command, Signal::Kill, dir)?;
        let answered = wait::until(ANSWERS_WITHIN, || match process.exit_status()? {
            Some(status) => Ok(Some(Err(status))),
            None => Ok(make_bucket(port, bucket).unwrap_or(false).then_some(Ok(()))),
        })?;
        match answered {
            Some(Ok(())) => Ok(Self { port, _process: process }),
            other => {
                let log = fs::read_to_string(dir.join("weed.log")).unwrap_or_default();
                Err(io::Error::other(format!("start SeaweedFS: {other:?}; its log:\n{log}")))
            }
        }
    }

    /// Where it listens.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }
}

/// The first of some ports next to each other that are free now, with those above them.
fn free_ports() -> io::Result<u16> {
    let free = |port: u16| TcpListener::bind(("127.0.0.1", port)).is_ok();
    for _ in 0..200 {
        let first = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port() % 20_000 + 10_000;
        if (first..first + PORTS).all(|port| free(port) && free(port + GRPC)) {
            return Ok(first);
        }
    }
    Err(io::Error::other("find free ports for SeaweedFS"))
}

fn make_bucket(port: u16, bucket: &str) -> io::Result<bool> {
    let mut socket = TcpStream::connect(("127.0.0.1", port))?;
    socket.set_read_timeout(Some(Duration::from_secs(5)))?;
    write!(
        socket,
        "PUT /{bucket} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    )?;
    let mut answer = String::new();
    socket.read_to_string(&mut answer)?;
    Ok(answer.starts_with("HTTP/1.1 200") || answer.starts_with("HTTP/1.1 409"))
}
