//! What servers that are killed and started again on the same data have in common.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::process::{ServerProcess, Signal};
use super::wait;

/// Starts it in its folder, with a log there that is called after it. Returns when it answers.
pub(super) fn started(
    name: &str,
    dir: &Path,
    mut command: Command,
    within: Duration,
    answers: impl Fn() -> bool,
) -> io::Result<ServerProcess> {
    let log = dir.join(format!("{name}.log"));
    let file = OpenOptions::new().create(true).append(true).open(&log)?;
    command.current_dir(dir).stdout(file.try_clone()?).stderr(file);
    let mut process = ServerProcess::spawn(command, Signal::Kill, dir)?;
    let answered = wait::until(within, || match process.exit_status()? {
        Some(status) => Ok(Some(Err(status))),
        None => Ok(answers().then_some(Ok(()))),
    })?;
    match answered {
        Some(Ok(())) => Ok(process),
        other => {
            let said = fs::read_to_string(&log).unwrap_or_default();
            Err(io::Error::other(format!("start {name}: {other:?}; its log:\n{said}")))
        }
    }
}

/// Gives a server what can be done to it, by its field `process`.
macro_rules! restartable {
    ($server:ty, $name:literal) => {
        impl $server {
            /// `SIGKILL`.
            ///
            /// # Errors
            /// When the process survives.
            pub fn kill(&mut self) -> std::io::Result<()> {
                if let Some(process) = &mut self.process {
                    process.kill()?;
                }
                self.process = None;
                Ok(())
            }

            /// Shuts it down in order.
            ///
            /// # Errors
            /// When it is still there after 30 s.
            pub fn stop(&mut self) -> std::io::Result<()> {
                use $crate::services::process::Signal;
                if let Some(process) = &mut self.process {
                    process.signal(Signal::Continue)?;
                    if !process.ends_within(Signal::Terminate, std::time::Duration::from_secs(30))? {
                        return Err(std::io::Error::other(concat!(
                            "stop ",
                            $name,
                            ": it did not shut down within 30 s"
                        )));
                    }
                }
                self.process = None;
                Ok(())
            }

            /// Freezes it: connections stay open, and nobody answers.
            ///
            /// # Errors
            /// When it does not run.
            pub fn pause(&self) -> std::io::Result<()> {
                self.running()?.pause()
            }

            /// Lets it go on.
            ///
            /// # Errors
            /// When it does not run.
            pub fn resume(&self) -> std::io::Result<()> {
                self.running()?.signal($crate::services::process::Signal::Continue)
            }

            fn running(&self) -> std::io::Result<&$crate::services::process::ServerProcess> {
                let gone =
                    || std::io::Error::new(std::io::ErrorKind::NotFound, concat!("this ", $name, " does not run"));
                self.process.as_ref().ok_or_else(gone)
            }
        }
    };
}
pub(super) use restartable;
