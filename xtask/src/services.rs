//! The servers that one run of the tests shares.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::PathBuf;
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

    /// Removes it when nobody will want to look into it.
    pub(crate) fn close(self, all_is_well: bool) {
        if all_is_well {
            let _ = fs::remove_dir_all(&self.0);
        } else {
            eprintln!("==> the tests' own files are left in {}", self.0.display());
        }
    }
}
