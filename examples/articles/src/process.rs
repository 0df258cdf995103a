//! `postroom` as a process of its own, and its commands.

use std::path::PathBuf;
use std::process::Stdio;

use postroom::BoxError;
use tokio::process::{Child, Command};

use crate::Args;

/// The program, and where it finds its configuration.
pub struct Postroom {
    binary: PathBuf,
    dir: PathBuf,
}

impl Postroom {
    /// With this configuration, in a file that only we can read: it holds URLs with their passwords.
    pub fn new(args: &Args, run: &str, configuration: &str) -> Result<Self, BoxError> {
        use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
        let binary = match &args.postroom {
            Some(binary) => binary.clone(),
            None => std::env::current_exe()?.with_file_name("postroom"),
        };
        if !binary.exists() {
            let binary = binary.display();
            return Err(format!(
                "there is no {binary}: build it with `cargo build --release`, or name it with --postroom"
            )
            .into());
        }
        let dir = std::env::temp_dir().join(run);
        std::fs::DirBuilder::new().mode(0o700).create(&dir)?;
        std::fs::DirBuilder::new().mode(0o700).create(dir.join("archive"))?;
        let mut file =
            std::fs::File::options().write(true).create_new(true).mode(0o600).open(dir.join("postroom.toml"))?;
        let configuration = configuration.replace("ARCHIVE", &dir.join("archive").display().to_string());
        std::io::Write::write_all(&mut file, configuration.as_bytes())?;
        Ok(Self { binary, dir })
    }

    fn configuration(&self) -> PathBuf {
        self.dir.join("postroom.toml")
    }

    /// A relay. What it says is in a file.
    pub fn relay(&self) -> Result<Child, BoxError> {
        let log = std::fs::File::options().create(true).append(true).open(self.dir.join("log"))?;
        let mut relay = Command::new(&self.binary);
        let relay = relay.args(["run", "--config"]).arg(self.configuration());
        Ok(relay.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).kill_on_drop(true).spawn()?)
    }

    /// A command that has to succeed; what it prints.
    pub async fn command(&self, arguments: &[&str]) -> Result<String, BoxError> {
        let output =
            Command::new(&self.binary).args(arguments).arg("--config").arg(self.configuration()).output().await?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            return Err(format!("postroom {}: {said}", arguments.join(" ")).into());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// The newest lines of what relays said.
    pub fn last_words(&self) -> String {
        let log = std::fs::read_to_string(self.dir.join("log")).unwrap_or_default();
        let lines: Vec<&str> = log.lines().rev().take(10).collect();
        lines.into_iter().rev().collect::<Vec<_>>().join("\n")
    }

    /// Removes what belongs to it.
    pub fn remove(&self) -> Result<(), BoxError> {
        Ok(std::fs::remove_dir_all(&self.dir)?)
    }
}

/// SIGTERM, and a clean end.
pub async fn stop(mut relay: Child) -> Result<(), BoxError> {
    if let Some(pid) = relay.id() {
        Command::new("kill").arg(pid.to_string()).status().await?;
    }
    let status = relay.wait().await?;
    if status.success() { Ok(()) } else { Err(format!("a relay ended with {status}").into()) }
}
