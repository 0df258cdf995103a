//! `postroom run` as a process of its own.

use std::path::PathBuf;
use std::process::Stdio;

use postroom::BoxError;
use tokio::process::{Child, Command};

use crate::Args;

/// Starts the relay with a configuration for this run.
pub fn start(args: &Args, run: &str) -> Result<Child, BoxError> {
    let binary = match &args.postroom {
        Some(binary) => binary.clone(),
        None => std::env::current_exe()?.with_file_name("postroom"),
    };
    if !binary.exists() {
        let binary = binary.display();
        return Err(
            format!("there is no {binary}: build it with `cargo build --release`, or name it with --postroom").into()
        );
    }
    let config = configuration(args, run)?;
    let relay = Command::new(binary)
        .args(["run", "--config"])
        .arg(&config)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(if args.json { Stdio::null() } else { Stdio::inherit() })
        .kill_on_drop(true)
        .spawn()?;
    Ok(relay)
}

/// SIGTERM, and a clean end.
pub async fn stop(relay: &mut Child) -> Result<(), BoxError> {
    if let Some(pid) = relay.id() {
        Command::new("kill").arg(pid.to_string()).status().await?;
    }
    let status = relay.wait().await?;
    if status.success() { Ok(()) } else { Err(format!("the relay ended with {status}").into()) }
}

/// A file that only we can read: it holds the URLs with their passwords.
fn configuration(args: &Args, run: &str) -> Result<PathBuf, BoxError> {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;
    let path = std::env::temp_dir().join(format!("{run}.toml"));
    let mut file = std::fs::File::options().write(true).create_new(true).mode(0o600).open(&path)?;
    writeln!(
        file,
        "[store]\nurl = {:?}\n\n[[routes]]\nname = {run:?}\ntopics = [{run:?}]\n\n\
         [routes.sink]\nkind = \"rabbitmq\"\nurl = {:?}\nexchange = {run:?}",
        args.store, args.rabbitmq
    )?;
    Ok(path)
}
