//! Servers of other releases of Debian than the one that is installed. They are unpacked into a folder, with everything that they need; nothing
//! is installed.

use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::failure::Failure;
use crate::held::Held;
use crate::steps::step;
use crate::workspace::Workspace;

const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// A server, where it comes from, and what has to be there when it is unpacked.
pub(crate) struct Unpacked {
    name: &'static str,
    suite: &'static str,
    packages: &'static [&'static str],
    server: &'static str,
}

/// Debian's stable releases have MariaDB alone.
const MYSQL: Unpacked =
    Unpacked { name: "mysql", suite: "sid", packages: &["mysql-server-core"], server: "usr/sbin/mysqld" };

/// The first that speaks AMQP 1.0 without a plugin. Its programs are scripts, whose shell and tools no package asks for.
pub(crate) const RABBITMQ: Unpacked = Unpacked {
    name: "rabbitmq4",
    suite: "trixie",
    packages: &["rabbitmq-server", "dash", "coreutils", "sed", "grep", "bash", "gawk", "util-linux"],
    server: "usr/lib/rabbitmq/bin/rabbitmq-server",
};

/// MySQL's server; none: it is not to be had here, which was said.
pub(crate) fn mysql(workspace: &Workspace, held: &Held) -> Option<PathBuf> {
    MYSQL
        .ensure(workspace, held)
        .inspect_err(|failure| {
            eprintln!("xtask: SKIPPED: the tests on MySQL, because its server could not be fetched: {failure}");
        })
        .ok()
}

impl Unpacked {
    /// Unpacks it below `target/servers`, once. Returns the folder that is like the root of its machine.
    pub(crate) fn ensure(&self, workspace: &Workspace, held: &Held) -> Result<PathBuf, Failure> {
        let folder = workspace.target.join("servers").join(self.name);
        let root = folder.join("root");
        if !root.join(self.server).is_file() {
            let unpacked =
                step(&format!("unpack {} into {}", self.name, folder.display()), || self.unpack(held, &folder));
            if let Err(failure) = unpacked {
                let _ = fs::remove_dir_all(&folder);
                return Err(failure);
            }
        }
        Ok(root)
    }

    fn unpack(&self, held: &Held, folder: &Path) -> Result<(), Failure> {
        let mirror = mirror().ok_or_else(|| Failure::work("no mirror of Debian is in /etc/apt"))?;
        let _ = fs::remove_dir_all(folder);
        for part in ["lists/partial", "cache/archives/partial", "new"] {
            fs::create_dir_all(folder.join(part))?;
        }
        fs::write(folder.join("status"), "")?;
        fs::write(folder.join("sources.list"), format!("deb [signed-by={KEYRING}] {mirror} {} main\n", self.suite))?;
        let settings: Vec<String> = [
            ("Dir::State::lists", "lists"),
            ("Dir::State::status", "status"),
            ("Dir::Etc::sourcelist", "sources.list"),
            ("Dir::Cache", "cache"),
        ]
        .iter()
        .map(|(name, file)| format!("{name}={}", folder.join(file).display()))
        .chain(
            [
                "Dir::Etc::sourceparts=/dev/null",
                "Dir::Etc::preferencesparts=/dev/null",
                "APT::Sandbox::User=root",
                "Acquire::Languages=none",
                "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false",
            ]
            .map(String::from),
        )
        .collect();
        let apt_get = |args: &[&str]| {
            let mut command = Command::new("/usr/bin/apt-get");
            command.arg("-qq").env("DEBIAN_FRONTEND", "noninteractive");
            settings.iter().for_each(|setting| {
                command.args(["-o", setting]);
            });
            done(held, command.args(args).stdout(Stdio::null()))
        };
        apt_get(&["update"])?;
        let mut install = vec!["install", "-y", "-d", "--no-install-recommends"];
        install.extend(self.packages);
        apt_get(&install)?;
        let new = folder.join("new");
        for entry in fs::read_dir(folder.join("cache/archives"))? {
            let package = entry?.path();
            if package.extension().is_some_and(|extension| extension == "deb") {
                done(held, Command::new("dpkg-deb").arg("-x").args([&package, &new]))?;
            }
        }
        if !new.join(self.server).is_file() {
            return Err(Failure::work(format!("the packages of {} have no {}", self.name, self.server)));
        }
        // What its scripts expect of a machine.
        for link in ["bin", "sbin", "lib", "lib64"] {
            if !new.join(link).exists() && new.join("usr").join(link).exists() {
                std::os::unix::fs::symlink(Path::new("usr").join(link), new.join(link))?;
            }
        }
        fs::create_dir_all(new.join("etc"))?;
        for file in ["passwd", "group", "hosts", "nsswitch.conf"] {
            let from = Path::new("/etc").join(file);
            if from.exists() {
                fs::copy(from, new.join("etc").join(file))?;
            }
        }
        fs::remove_dir_all(folder.join("cache"))?;
        fs::remove_dir_all(folder.join("lists"))?;
        Ok(fs::rename(new, folder.join("root"))?)
    }
}

fn done(held: &Held, command: &mut Command) -> Result<(), Failure> {
    let name = command.get_program().to_string_lossy().into_owned();
    let status = held.run(command).map_err(|error| io::Error::new(error.kind(), format!("{name}: {error}")))?;
    if status.success() { Ok(()) } else { Err(Failure::work(format!("{name} ended with {status}"))) }
}

/// Where this machine has its packages from.
fn mirror() -> Option<String> {
    let new = fs::read_to_string("/etc/apt/sources.list.d/debian.sources").unwrap_or_default();
    let of_new =
        new.lines().find_map(|line| line.strip_prefix("URIs:")).and_then(|uris| uris.split_whitespace().next());
    let old = fs::read_to_string("/etc/apt/sources.list").unwrap_or_default();
    let of_old = old
        .lines()
        .filter(|line| line.starts_with("deb "))
        .find_map(|line| line.split_whitespace().find(|word| word.starts_with("http")));
    let mirror = of_new.or(of_old).map(str::to_owned);
    mirror.filter(|_| env::consts::OS == "linux")
}
