//! The servers that one run of the tests shares.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process;
use std::thread;

use postroom_testkit::services::{PostgresServer, RabbitServer};

use crate::workspace::Workspace;

/// A private PostgreSQL and RabbitMQ below `target/services/PID/`. Dropping it stops them and removes the folder.
#[derive(Debug)]
pub(crate) struct Services {
    postgres: PostgresServer,
    rabbit: RabbitServer,
    /// Last, so that it is removed when both servers are gone.
    _folder: Folder,
}

impl Services {
    pub(crate) fn start(workspace: &Workspace) -> io::Result<Self> {
        let folder = Folder(workspace.target.join("services").join(process::id().to_string()));
        // Both at once: RabbitMQ mostly waits.
        let (postgres, rabbit) = thread::scope(|scope| {
            let rabbit = scope.spawn(|| RabbitServer::start(&folder.0.join("rabbitmq")));
            let postgres = PostgresServer::start(&folder.0.join("postgres"));
            let rabbit = rabbit.join().unwrap_or_else(|_| Err(io::Error::other("start RabbitMQ: the thread panicked")));
            (postgres, rabbit)
        });
        Ok(Self { postgres: postgres?, rabbit: rabbit?, _folder: folder })
    }

    /// What the tests read to find the servers.
    pub(crate) fn environment(&self) -> Vec<(&'static str, OsString)> {
        vec![
            ("POSTROOM_TEST_POSTGRES", self.postgres.url("postgres").into()),
            ("POSTROOM_TEST_RABBITMQ", self.rabbit.url().into()),
        ]
    }

    /// Copies PostgreSQL's log to `folder` and shows the lines in it that tell of a crash: one crash makes every test
    /// fail that connects in the next seconds, and none of them can say why.
    fn leave_log(&self, folder: &Path) -> io::Result<()> {
        let kept = folder.join("postgresql.log");
        fs::copy(self.postgres.dir().join("log"), &kept)?;
        eprintln!("==> the log of the tests' PostgreSQL is {}", kept.display());
        let log = String::from_utf8_lossy(&fs::read(&kept)?).into_owned();
        for line in crashes(&log).take(CRASHES_SHOWN_MAX) {
            eprintln!("    {line}");
        }
        Ok(())
    }
}

const CRASHES_SHOWN_MAX: usize = 20;

/// Each line that tells how a server process ended badly, with the statement that it ran.
fn crashes(log: &str) -> impl Iterator<Item = &str> {
    let mut statement_follows = false;
    log.lines().filter(move |line| {
        let crash = line.contains("was terminated by") || line.contains("PANIC:");
        let statement = statement_follows && line.contains("Failed process was running");
        statement_follows = crash;
        crash || statement
    })
}

#[derive(Debug)]
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        // The servers have removed theirs; one that failed to may keep it.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A folder for the tests' own files, `target/test-scratch/PID`.
#[derive(Debug)]
pub(crate) struct Scratch(pub(crate) PathBuf);

impl Scratch {
    pub(crate) fn create(workspace: &Workspace) -> io::Result<Self> {
        let folder = workspace.target.join("test-scratch").join(process::id().to_string());
        fs::create_dir_all(&folder)
            .map_err(|error| io::Error::new(error.kind(), format!("create {}: {error}", folder.display())))?;
        Ok(Self(folder))
    }

    /// Removes it when nobody will want to look into it; else it says where it is, and keeps the log of the servers too.
    pub(crate) fn close(self, all_is_well: bool, services: Option<Services>) {
        if all_is_well {
            let _ = fs::remove_dir_all(&self.0);
        } else {
            if let Some(Err(error)) = services.map(|services| services.leave_log(&self.0)) {
                eprintln!("==> keep the log of the tests' PostgreSQL: {error}");
            }
            eprintln!("==> the tests' own files are left in {}", self.0.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crash_is_shown_with_its_statement() {
        let log = "LOG:  database system is ready to accept connections\n\
                   LOG:  server process (PID 7) was terminated by signal 11: Segmentation fault\n\
                   DETAIL:  Failed process was running: select 1\n\
                   LOG:  terminating any other active server processes\n\
                   PANIC:  could not write to file: No space left on device\n\
                   ERROR:  canceling statement due to user request\n";
        let shown: Vec<&str> = crashes(log).collect();
        assert_eq!(shown.len(), 3, "{shown:?}");
        assert!(shown[1].contains("select 1") && shown[2].contains("PANIC"));
    }
}
