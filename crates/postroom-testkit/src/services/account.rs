//! The account that PostgreSQL runs under: it refuses to run as root.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, chown};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

/// The user `postgres` when we are root; ourselves when we are not.
#[derive(Clone, Copy, Debug)]
pub(super) struct Account(Option<Ids>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ids {
    uid: u32,
    gid: u32,
}

impl Account {
    pub(super) fn for_postgres() -> io::Result<Self> {
        let we_are_root = fs::metadata("/proc/self")?.uid() == 0;
        if !we_are_root {
            return Ok(Self(None));
        }
        let ids = find(&fs::read_to_string("/etc/passwd")?, "postgres").ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::NotFound,
                "find the user `postgres` in /etc/passwd, and PostgreSQL does not run as root; \
                 `apt-get install postgresql` creates it, or run the tests as an ordinary user",
            )
        })?;
        Ok(Self(Some(ids)))
    }

    /// Lets `command` run under this account, without root's other groups.
    pub(super) fn runs(self, command: &mut Command) {
        if let Some(ids) = self.0 {
            // As root, std drops the supplementary groups together with the uid.
            command.gid(ids.gid).uid(ids.uid);
        }
    }

    pub(super) fn gives_folder(self, folder: &Path) -> io::Result<()> {
        self.0.map_or(Ok(()), |ids| chown(folder, Some(ids.uid), Some(ids.gid)))
    }

    /// Whether the account can run what lies in `folder`.
    pub(super) fn enters(self, folder: &Path) -> io::Result<bool> {
        self.does("cd -- \"$0\"", folder)
    }

    /// Whether the account gets to `folder` and may write there: some parent may be closed to it, like `/root`.
    pub(super) fn reaches(self, folder: &Path) -> io::Result<bool> {
        self.does("cd -- \"$0\" && test -w .", folder)
    }

    fn does(self, script: &str, folder: &Path) -> io::Result<bool> {
        let mut command = Command::new("sh");
        command.args(["-c", script]).arg(folder).current_dir("/");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        self.runs(&mut command);
        Ok(command.status()?.success())
    }
}

fn find(passwd: &str, name: &str) -> Option<Ids> {
    let mut fields = passwd.lines().map(|line| line.split(':')).find_map(|mut fields| {
        let found = fields.next() == Some(name);
        found.then_some(fields)
    })?;
    let uid = fields.nth(1)?.parse().ok()?;
    let gid = fields.next()?.parse().ok()?;
    Some(Ids { uid, gid })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_account_is_found_by_its_whole_name() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\npostgres2:x:7:8::/:\npostgres:x:105:113:,,,:/var/lib:/bin/sh\n";
        assert_eq!(find(passwd, "postgres"), Some(Ids { uid: 105, gid: 113 }));
        assert_eq!(find(passwd, "postgre"), None);
    }
}
