//! `postroom init`: writes a commented configuration file to start from.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use postroom::redact_url;

use crate::brokers;
use crate::exit::{self, Failure};
use crate::say::show;
use crate::store;

#[derive(Debug, Args)]
pub struct InitArgs {
    /// Store URL to write into the file, without a password; `sqlite:shop.db` to try postroom out
    #[arg(long, value_name = "URL", default_value = "postgres://postroom_relay@localhost/shop")]
    store: String,
    /// Kind of broker to send messages to
    #[arg(long, value_name = "KIND", default_value = "rabbitmq")]
    sink: String,
    /// Also copy messages from a queue to the inbox table, for an application that takes them with SQL
    #[arg(long)]
    inbox: bool,
    /// File to write; `-` for standard output
    #[arg(long, value_name = "FILE", default_value = "postroom.toml")]
    output: PathBuf,
}

pub fn init(args: &InitArgs, json: bool) -> Result<(), Failure> {
    store::open(&args.store)?;
    if redact_url(&args.store) != args.store {
        let text = "the URL in --store has a password or another secret, which does not belong in a file: leave it out, and set \
                    POSTROOM_STORE_URL, POSTROOM_STORE_URL_FILE or PGPASSFILE when you run postroom";
        return Err(Failure::new(exit::USAGE, text));
    }
    let text = text(args)?;
    if args.output.as_os_str() == "-" {
        if json {
            show!("{}", serde_json::json!({ "written": null, "text": text }));
        } else {
            crate::say::to_stdout_as_it_is(text.trim_end());
        }
        return Ok(());
    }
    let shown = args.output.display();
    // An existing file is somebody's work. Only the owner may read the new one: it may get passwords.
    use std::os::unix::fs::OpenOptionsExt;
    let file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&args.output);
    let mut file = file.map_err(|error| match error.kind() {
        std::io::ErrorKind::AlreadyExists => Failure::new(
            exit::FAILURE,
            format!("{shown} already exists and was not changed; name another file with --output"),
        ),
        _ => Failure::new(exit::FAILURE, format!("failed to create {shown}: {error}")),
    })?;
    file.write_all(text.as_bytes())
        .map_err(|error| Failure::new(exit::FAILURE, format!("failed to write {shown}: {error}")))?;
    if json {
        show!("{}", serde_json::json!({ "written": args.output }));
    } else {
        show!("{shown} has been written. Next:");
        show!("  postroom migrate --config {shown}    # creates the tables");
        show!("  postroom check --config {shown}      # reports what is missing");
        show!("  postroom run --config {shown}");
    }
    Ok(())
}

fn text(args: &InitArgs) -> Result<String, Failure> {
    let sink = brokers::sink_section(&args.sink).ok_or_else(|| {
        let kinds = brokers::sink_kinds().join(", ");
        Failure::new(exit::USAGE, format!("--sink {:?} is not known; use one of {kinds}", args.sink))
    })?;
    // A TOML string escapes what a JSON string escapes.
    let quoted = |text: &str| serde_json::Value::String(text.to_owned()).to_string();
    let mut text = format!(
        "# Configuration of `postroom run`. Every key: docs/configuration.md. A value that is commented out is the default.

[store]
# Keep the password out of this file: use a password file (PGPASSFILE), or set POSTROOM_STORE_URL or POSTROOM_STORE_URL_FILE.
url = {}

[relay]
# in_flight_max = 2000      # most messages of a route that a crash can repeat
# lease = \"15s\"           # how long another relay waits before it takes over from one that has died

[[routes]]
name = \"orders\"           # the route's position is stored under this name
topics = [\"*\"]            # names, or prefixes with *, such as [\"orders\", \"billing.*\"]
# order = \"key\"           # messages with the same key in order; or \"pipelined\", or \"none\"
# on_dead = \"skip\"        # or \"block\": a key with a dead message waits for an operator

[routes.sink]
{}",
        quoted(&args.store),
        sink.example
    );
    if args.inbox {
        // Some kinds can only send; then the first kind that can receive is used.
        let section = brokers::subscription_section(&args.sink)
            .or_else(|| brokers::all().find_map(|broker| broker.subscription.as_ref()));
        let section =
            section.ok_or_else(|| Failure::new(exit::USAGE, "this program has no broker that it can receive from"))?;
        text.push_str(&format!(
            "
[[inboxes]]
consumer = \"billing\"      # the name under which the application takes the messages

[inboxes.from]
{}",
            section.example
        ));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_can_be_read() {
        for sink in brokers::all().filter(|broker| broker.sink.is_some()) {
            for inbox in [false, true] {
                let args = InitArgs {
                    store: "sqlite:shop \"db".to_owned(),
                    sink: sink.kind.to_owned(),
                    inbox,
                    output: PathBuf::from("-"),
                };
                let config = crate::config::tests::parse(&text(&args).unwrap(), &[]).unwrap();
                assert_eq!((config.routes.len(), config.inboxes.len()), (1, usize::from(inbox)));
                assert_eq!(config.stores.one().unwrap(), "sqlite:shop \"db");
            }
        }
    }
}
