//! MySQL's server. Debian's stable releases have MariaDB alone, so it is unpacked from the unstable one into a folder, with everything that it
//! needs; nothing is installed.

use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::failure::Failure;
use crate::held::Held;
use crate::steps::step;
use crate::workspace::Workspace;

const SUITE: &str = "sid";
const PACKAGE: &str = "mysql-server-core";
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
const SERVER: &str = "usr/sbin/mysqld";

/// Unpacks it below `target/servers`, once; none: it is not to be had here, which was said.
pub(crate) fn ensure(workspace: &Workspace, held: &Held) -> Result<Option<PathBuf>, Failure> {
    let folder = workspace.target.join("servers").join("mysql");
    let root = folder.join("root");
    if !root.join(SERVER).is_file() {
        let unpacked = step(&format!("unpack MySQL into {}", folder.display()), || unpack(held, &folder));
        if let Err(failure) = unpacked {
            let _ = fs::remove_dir_all(&folder);
            eprintln!("xtask: SKIPPED: the tests on MySQL, because its server could not be fetched: {failure}");
            return Ok(None);
        }
    }
    Ok(Some(root))
}

fn unpack(held: &Held, folder: &Path) -> Result<(), Failure> {
    let mirror = mirror().ok_or_else(|| Failure::work("no mirror of Debian is in /etc/apt"))?;
    let _ = fs::remove_dir_all(folder);
    for part in ["lists/partial", "cache/archives/partial", "new"] {
        fs::create_dir_all(folder.join(part))?;
    }
    fs::write(folder.join("status"), "")?;
    fs::write(folder.join("sources.list"), format!("deb [signed-by={KEYRING}] {mirror} {SUITE} main\n"))?;
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
    apt_get(&["install", "-y", "-d", "--no-install-recommends", PACKAGE])?;
    let new = folder.join("new");
    for entry in fs::read_dir(folder.join("cache/archives"))? {
        let package = entry?.path();
        if package.extension().is_some_and(|extension| extension == "deb") {
            done(held, Command::new("dpkg-deb").arg("-x").args([&package, &new]))?;
        }
    }
    if !new.join(SERVER).is_file() {
        return Err(Failure::work(format!("the package {PACKAGE} has no {SERVER}")));
    }
    fs::remove_dir_all(folder.join("cache"))?;
    fs::remove_dir_all(folder.join("lists"))?;
    Ok(fs::rename(new, folder.join("root"))?)
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
