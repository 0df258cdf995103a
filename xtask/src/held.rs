//! What has to be let go when the run ends, also by ctrl-C.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{self, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::packages::NoServiceStarts;
use crate::services::{Scratch, Services};

const INTERRUPTED: i32 = 130;

/// The servers, the running command and the temporary policy file of this run.
///
/// Promise: on SIGINT or SIGTERM the command is ended, the servers are stopped, the file is removed, and we exit
/// with 130. Edge: `SIGKILL` leaves the running command and the file; the servers' watchdogs still end the servers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Held(Arc<Mutex<Things>>);

#[derive(Debug, Default)]
struct Things {
    /// The process group of the command that runs now.
    command: Option<u32>,
    policy: Option<NoServiceStarts>,
    services: Option<Services>,
}

impl Held {
    /// From now on a signal lets go of what is held, then ends the process.
    pub(crate) fn until_interrupted() -> io::Result<Self> {
        let held = Self::default();
        let mut signals = Signals::new([SIGINT, SIGTERM])?;
        let things = held.clone();
        thread::spawn(move || {
            if signals.forever().next().is_some() {
                // The lock is never given back: whoever waits for it must not get ahead of the exit.
                let mut things = things.lock();
                eprintln!("==> interrupted; stopping the servers");
                things.let_go();
                process::exit(INTERRUPTED);
            }
        });
        Ok(held)
    }

    pub(crate) fn keep_services(&self, services: Services) {
        self.lock().services = Some(services);
    }

    pub(crate) fn keep_policy(&self, policy: NoServiceStarts) {
        self.lock().policy = Some(policy);
    }

    pub(crate) fn drop_policy(&self) {
        self.lock().policy = None;
    }

    /// Ends the servers and whatever else is held.
    pub(crate) fn let_go(&self) {
        self.lock().let_go();
    }

    /// The same at the end of tests, whose folder it closes; when not all is well, what the servers said stays there.
    pub(crate) fn end(&self, scratch: Scratch, all_is_well: bool) {
        let mut things = self.lock();
        scratch.close(all_is_well, things.services.take());
        things.let_go();
    }

    /// Runs `command` without standard input and waits for it.
    pub(crate) fn run(&self, command: &mut Command) -> io::Result<ExitStatus> {
        self.run_within(command, None)?.ok_or_else(|| io::Error::other("wait for a command without a time limit"))
    }

    /// Runs `command`, and ends it with everything it started when it takes longer than `limit`; then `None`.
    pub(crate) fn run_within(&self, command: &mut Command, limit: Option<Duration>) -> io::Result<Option<ExitStatus>> {
        let program = command.get_program().to_owned();
        let mut child = {
            let mut things = self.lock();
            // A group of its own, so that the tests behind cargo end with it.
            let child = command
                .process_group(0)
                .stdin(Stdio::null())
                .spawn()
                .map_err(|error| io::Error::new(error.kind(), format!("run {}: {error}", program.display())))?;
            things.command = Some(child.id());
            child
        };
        let group = child.id();
        let (ended, end) = mpsc::sync_channel(1);
        let waiter = thread::spawn(move || {
            let status = child.wait();
            // Nobody listens any more after the time limit.
            let _ = ended.send(());
            status
        });
        let in_time = limit.is_none_or(|limit| end.recv_timeout(limit).is_ok());
        if !in_time {
            signal_group("KILL", group);
        }
        let status = waiter.join().unwrap_or_else(|_| Err(io::Error::other("wait for a command: the thread panicked")));
        self.lock().command = None;
        status.map(|status| in_time.then_some(status))
    }

    fn lock(&self) -> MutexGuard<'_, Things> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Things {
    fn let_go(&mut self) {
        if let Some(group) = self.command.take() {
            signal_group("TERM", group);
        }
        self.services = None;
        self.policy = None;
    }
}

/// The shell's `kill` needs no unsafe code. A group that is gone is no error.
fn signal_group(signal: &str, group: u32) {
    let _ = Command::new("sh")
        .args(["-c", "kill -s \"$0\" -- \"-$1\"", signal, &group.to_string()])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .status();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_past_its_limit_is_ended_with_its_children() {
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 600 & wait"]);
        let status = Held::default().run_within(&mut command, Some(Duration::from_millis(50))).unwrap();
        assert!(status.is_none());
    }

    #[test]
    fn a_command_within_its_limit_hands_on_its_status() {
        let mut command = Command::new("sh");
        command.args(["-c", "exit 7"]);
        let status = Held::default().run_within(&mut command, Some(Duration::from_secs(60))).unwrap();
        assert_eq!(status.and_then(|status| status.code()), Some(7));
    }
}
