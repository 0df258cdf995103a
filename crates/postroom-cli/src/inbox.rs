//! `postroom inbox`: what becomes of the inbox in time.

use std::io::IsTerminal;
use std::time::Duration;

use clap::{Args, Subcommand};
use postroom::Deed;

use crate::StoreArgs;
use crate::dead::{actor, duration};
use crate::exit::Failure;
use crate::say::{say, show};

#[derive(Debug, Args)]
pub struct InboxArgs {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Forget messages that were processed long ago; refused below the redelivery horizon
    Prune(PruneArgs),
}

#[derive(Debug, Args)]
struct PruneArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// Forget what was processed at least this long ago, such as 30d
    #[arg(long, value_parser = duration, value_name = "AGE")]
    older_than: Duration,
    /// Why; it is kept in the audit row
    #[arg(long, default_value = "retention", value_name = "TEXT")]
    reason: String,
}

pub async fn inbox(args: InboxArgs, json: bool) -> Result<(), Failure> {
    let Verb::Prune(args) = args.verb;
    let deed = Deed { actor: actor(), reason: args.reason };
    let watched = std::io::stderr().is_terminal();
    let mut progress = |pruned: u64| {
        if watched {
            eprint!("\rpostroom: {pruned} rows pruned");
        }
    };
    let pruned = args.store.open()?.prune_inbox(args.older_than, &deed, &mut progress).await?;
    if watched {
        say!("");
    }
    if json {
        show!("{}", serde_json::json!({ "pruned": pruned }));
    } else {
        show!("{pruned} rows pruned");
    }
    Ok(())
}
