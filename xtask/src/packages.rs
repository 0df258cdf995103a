//! Installing the servers' packages without letting Debian start its own servers.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use postroom_testkit::services;

use crate::failure::Failure;
use crate::held::Held;
use crate::steps::step;

const APT_GET: &str = "/usr/bin/apt-get";
const POLICY: &str = "/usr/sbin/policy-rc.d";
/// Held by every apt and dpkg at work, on a new machine often by the one that looks for updates.
const LOCKS: [&str; 3] = ["/var/lib/apt/lists/lock", "/var/lib/dpkg/lock-frontend", "/var/cache/apt/archives/lock"];
const LOCKED_AT_MOST: Duration = Duration::from_secs(600);
/// 101: the action is forbidden.
const POLICY_TEXT: &str = "#!/bin/sh\n# put here by postroom's `cargo xtask`, which removes it again\nexit 101\n";

/// What the C library behind the feature `kafka` is compiled with, and OpenSSL itself, each with a file by which the package shows.
const TO_COMPILE: [(&str, &str); 5] = [
    ("libssl-dev", "/usr/include/openssl/ssl.h"),
    // Signatures of requests are compared with its own.
    ("openssl", "/usr/bin/openssl"),
    ("pkg-config", "/usr/bin/pkg-config"),
    ("g++", "/usr/bin/g++"),
    ("make", "/usr/bin/make"),
];

/// Debian packages that the tests need and that are not installed.
fn missing() -> Vec<&'static str> {
    let to_compile = TO_COMPILE.into_iter().filter(|(_, file)| !Path::new(file).exists());
    services::missing().into_iter().chain(to_compile.map(|(package, _)| package)).collect()
}

/// Makes sure that the servers of the tests can be started, and that everything can be compiled.
///
/// As root on Debian it installs what is missing; anybody else is told what to install, with exit code 2.
pub(crate) fn ensure(held: &Held) -> Result<(), Failure> {
    let missing = missing();
    if missing.is_empty() {
        return Ok(());
    }
    let wanted = missing.join(" ");
    let we_are_root = fs::metadata("/proc/self").is_ok_and(|about| about.uid() == 0);
    if !we_are_root || !Path::new(APT_GET).exists() {
        return Err(Failure::usage(format!(
            "the tests need the Debian packages {wanted}, to compile and for servers of their own; install them with\n    \
             sudo apt-get install --no-install-recommends {wanted}"
        )));
    }
    if let Some(policy) = NoServiceStarts::put()? {
        held.keep_policy(policy);
    }
    let installed = step(&format!("apt-get install {wanted}"), || {
        apt_get(held, &["update"])?;
        let mut args = vec!["install", "-y", "--no-install-recommends"];
        args.extend(&missing);
        apt_get(held, &args)
    });
    held.drop_policy();
    installed?;
    let still = self::missing();
    if still.is_empty() {
        Ok(())
    } else {
        Err(Failure::usage(format!("apt-get installed {wanted}, but what {} brings is missing", still.join(" "))))
    }
}

/// Waits until no other apt or dpkg works, as far as the kernel's list of locks tells; apt itself waits for some of its locks only.
#[expect(clippy::disallowed_methods, reason = "nothing tells that another process has ended")]
fn wait_for_locks() {
    let since = Instant::now();
    let inodes = || LOCKS.iter().filter_map(|lock| fs::metadata(lock).ok()).map(|about| format!(":{} ", about.ino()));
    let held = || fs::read_to_string("/proc/locks").is_ok_and(|locks| inodes().any(|inode| locks.contains(&inode)));
    let mut told = false;
    while held() && since.elapsed() < LOCKED_AT_MOST {
        if !std::mem::replace(&mut told, true) {
            eprintln!("    another apt or dpkg is at work; waiting for it");
        }
        std::thread::sleep(Duration::from_secs(1));
    }
}

fn apt_get(held: &Held, args: &[&str]) -> Result<(), Failure> {
    wait_for_locks();
    let mut command = Command::new(APT_GET);
    command.arg("-q").args(args).env("DEBIAN_FRONTEND", "noninteractive").env("RUNLEVEL", "1");
    let status = held.run(&mut command)?;
    if status.success() {
        return Ok(());
    }
    Err(Failure::work(format!("`apt-get {}` ended with {status}; what it printed says why", args.join(" "))))
}

/// The file that keeps packages from starting their servers; dropping it removes the file.
#[derive(Debug)]
pub(crate) struct NoServiceStarts(());

impl NoServiceStarts {
    /// `None` when the machine has a policy of its own, which stays.
    fn put() -> io::Result<Option<Self>> {
        match OpenOptions::new().write(true).create_new(true).mode(0o755).open(POLICY) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(None),
            Err(error) => Err(io::Error::new(error.kind(), format!("write {POLICY}: {error}"))),
            Ok(mut file) => {
                let policy = Self(());
                file.write_all(POLICY_TEXT.as_bytes())?;
                Ok(Some(policy))
            }
        }
    }
}

impl Drop for NoServiceStarts {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(POLICY) {
            eprintln!("xtask: failed to remove {POLICY}: {error}; remove it, or no package can start its service");
        }
    }
}
