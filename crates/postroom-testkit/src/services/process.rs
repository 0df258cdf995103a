//! A server's process: signals, its whole family, and a watchdog that outlives us.

use std::fs;
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::time::Duration;

use super::wait;

/// How long a process may take to vanish after `SIGKILL`.
const GONE_WITHIN: Duration = Duration::from_secs(20);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Signal {
    Interrupt,
    Quit,
    Terminate,
    Stop,
    Continue,
    Kill,
}

impl Signal {
    fn name(self) -> &'static str {
        match self {
            Self::Interrupt => "INT",
            Self::Quit => "QUIT",
            Self::Terminate => "TERM",
            Self::Stop => "STOP",
            Self::Continue => "CONT",
            Self::Kill => "KILL",
        }
    }
}

/// A running child in a process group of its own, so that ctrl-C on the terminal does not reach it.
#[derive(Debug)]
pub(super) struct ServerProcess {
    child: Child,
    /// Dropped after the child is gone; until then it would end the server if we died.
    watchdog: Watchdog,
}

impl ServerProcess {
    /// Starts `command`. When our own process dies before [`end`](Self::end), the child gets `last`, and `folder` is
    /// removed once it is gone.
    pub(super) fn spawn(mut command: Command, last: Signal, folder: &Path) -> io::Result<Self> {
        let program = command.get_program().to_owned();
        let mut child = command
            .process_group(0)
            .stdin(Stdio::null())
            .spawn()
            .map_err(|error| io::Error::new(error.kind(), format!("start {}: {error}", program.display())))?;
        match Watchdog::over(child.id(), last, folder) {
            Ok(watchdog) => Ok(Self { child, watchdog }),
            Err(error) => {
                child.kill()?;
                child.wait()?;
                Err(error)
            }
        }
    }

    pub(super) fn exit_status(&mut self) -> io::Result<Option<ExitStatus>> {
        self.child.try_wait()
    }

    pub(super) fn signal(&self, signal: Signal) -> io::Result<()> {
        send(signal, &[self.child.id()])
    }

    /// Freezes the process; returns when it stands still, or has ended meanwhile.
    pub(super) fn pause(&self) -> io::Result<()> {
        let pid = self.child.id();
        self.signal(Signal::Stop)?;
        let still = wait::until(GONE_WITHIN, || Ok((is_gone(pid) || state(pid) == Some('T')).then_some(())))?;
        still.ok_or_else(|| io::Error::other(format!("pause process {pid}: it goes on; look at `ps -p {pid}`")))
    }

    /// Sends `signal` and waits until the process is gone. `false`: it is still there after `limit`.
    pub(super) fn ends_within(&mut self, signal: Signal, limit: Duration) -> io::Result<bool> {
        let family = family(self.child.id())?;
        self.signal(signal)?;
        let child = &mut self.child;
        if wait::until(limit, || child.try_wait())?.is_none() {
            return Ok(false);
        }
        // Descendants may finish a moment after the one that led them.
        Ok(wait::until(limit, || Ok(all_gone(&family).then_some(())))?.is_some())
    }

    /// `SIGKILL` to the process and all its descendants at the same moment; returns when none is left.
    ///
    /// The group alone would not do: PostgreSQL's children each lead a session of their own.
    pub(super) fn kill(&mut self) -> io::Result<()> {
        if self.child.try_wait()?.is_some() {
            return Ok(());
        }
        // Frozen, it can neither start another child nor notice that one died.
        self.pause()?;
        let family = family(self.child.id())?;
        send(Signal::Kill, &family)?;
        self.child.wait()?;
        let gone = wait::until(GONE_WITHIN, || Ok(all_gone(&family).then_some(())))?;
        gone.ok_or_else(|| {
            let left: Vec<String> = family.iter().filter(|pid| !is_gone(**pid)).map(u32::to_string).collect();
            io::Error::other(format!("kill the processes {}: look at `ps -p` for what holds them", left.join(" ")))
        })
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        // Nothing can be told from here; the watchdog is still armed if it failed.
        if self.kill().is_ok() {
            self.watchdog.stand_down();
        }
    }
}

/// A shell that holds the reading end of a pipe. End of file without a word means that we died.
#[derive(Debug)]
struct Watchdog {
    shell: Child,
    pipe: Option<ChildStdin>,
}

const WATCH: &str = r#"
read -r _ && exit 0
kill -s "$1" "$2"
turns=0
while kill -s 0 "$2" && [ "$turns" -lt 80 ]; do sleep 0.1; turns=$((turns + 1)); done
kill -s KILL "$2"
rm -rf -- "$3"
"#;

impl Watchdog {
    fn over(pid: u32, last: Signal, folder: &Path) -> io::Result<Self> {
        let mut shell = Command::new("sh")
            .args(["-c", WATCH, "postroom-watchdog", last.name(), &pid.to_string()])
            .arg(folder)
            .current_dir("/")
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| io::Error::new(error.kind(), format!("start the watchdog `sh`: {error}")))?;
        let pipe = shell.stdin.take();
        Ok(Self { shell, pipe })
    }

    /// Ends the watchdog without its doing anything. A second call does nothing.
    fn stand_down(&mut self) {
        if let Some(mut pipe) = self.pipe.take() {
            // A watchdog that was itself killed has closed the pipe; then there is nothing to end.
            let _ = pipe.write_all(b"ended\n");
            drop(pipe);
            let _ = self.shell.wait();
        }
    }
}

/// The shell's own `kill` reaches all of them from one process, and needs no unsafe code.
///
/// A process that is already gone is no error: whoever sends a signal looks for its effect.
fn send(signal: Signal, pids: &[u32]) -> io::Result<()> {
    Command::new("sh")
        .args(["-c", "kill -s \"$0\" \"$@\"", signal.name()])
        .args(pids.iter().map(u32::to_string))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .map(drop)
}

/// `root` and everything that descends from it, now.
fn family(root: u32) -> io::Result<Vec<u32>> {
    let mut parents = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        if let Some((_, parent)) = stat(pid) {
            parents.push((pid, parent));
        }
    }
    Ok(closure(root, &parents))
}

fn closure(root: u32, parents: &[(u32, u32)]) -> Vec<u32> {
    let mut family = vec![root];
    let mut looked_at = 0;
    while let Some(&parent) = family.get(looked_at) {
        family.extend(parents.iter().filter(|(_, of)| *of == parent).map(|(pid, _)| *pid));
        looked_at += 1;
    }
    family
}

fn all_gone(pids: &[u32]) -> bool {
    pids.iter().all(|pid| is_gone(*pid))
}

/// A zombie holds neither memory nor sockets; in a container nobody may ever reap it.
fn is_gone(pid: u32) -> bool {
    matches!(state(pid), None | Some('Z' | 'X'))
}

fn state(pid: u32) -> Option<char> {
    stat(pid).map(|(state, _)| state)
}

fn stat(pid: u32) -> Option<(char, u32)> {
    parse_stat(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// State and parent. The command's name before them may hold blanks and brackets, so they count from its end.
fn parse_stat(line: &str) -> Option<(char, u32)> {
    let mut fields = line.rsplit_once(')')?.1.split_whitespace();
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_name_with_brackets_does_not_hide_the_parent() {
        assert_eq!(parse_stat("12 (a) b) c) S 7 12 12 0"), Some(('S', 7)));
    }

    #[test]
    fn a_family_includes_grandchildren_and_nobody_else() {
        assert_eq!(closure(5, &[(1, 0), (5, 1), (6, 5), (7, 6), (8, 1)]), [5, 6, 7]);
    }

    #[test]
    fn killing_takes_the_grandchildren_along() {
        let mut command = Command::new("sh");
        command.args(["-c", "sh -c 'sleep 600; true' & wait"]);
        let mut server =
            ServerProcess::spawn(command, Signal::Kill, Path::new("/nonexistent/postroom-no-folder")).unwrap();
        let pid = server.child.id();
        wait::until(GONE_WITHIN, || Ok((family(pid)?.len() == 3).then_some(()))).unwrap().unwrap();
        let everyone = family(pid).unwrap();
        server.kill().unwrap();
        assert!(all_gone(&everyone));
    }

    #[test]
    fn the_watchdog_ends_the_server_and_removes_its_folder_when_the_pipe_breaks() {
        let folder = std::env::temp_dir().join(format!("postroom-watchdog-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let mut command = Command::new("sleep");
        command.arg("600");
        let mut server = ServerProcess::spawn(command, Signal::Quit, &folder).unwrap();
        server.watchdog.pipe = None;
        wait::until(GONE_WITHIN, || server.exit_status()).unwrap().expect("the watchdog ended it");
        wait::until(GONE_WITHIN, || Ok((!folder.exists()).then_some(()))).unwrap().expect("the folder is gone");
        server.watchdog.shell.wait().unwrap();
    }
}
