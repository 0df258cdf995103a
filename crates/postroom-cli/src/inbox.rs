//! `postroom inbox`: removes old rows of the inbox.

use std::time::Duration;

use clap::{Args, Subcommand};
use postroom::Deed;

use crate::StoreArgs;
use crate::actor::actor;
use crate::dead::duration;
use crate::exit::Failure;
use crate::progress::Progress;
use crate::say::show;
use crate::table::counted;

#[derive(Debug, Args)]
pub struct InboxArgs {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Delete the rows of messages that were processed long ago; an age below the redelivery horizon is rejected
    Prune(PruneArgs),
}

#[derive(Debug, Args)]
struct PruneArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// Delete the rows of messages that were processed at least this long ago, such as 30d
    #[arg(long, value_parser = duration, value_name = "AGE")]
    older_than: Duration,
    /// Why you do this; recorded in the audit row
    #[arg(long, default_value = "retention", value_name = "TEXT")]
    reason: String,
    /// Who does this, if not the current system user
    #[arg(long, value_name = "NAME")]
    actor: Option<String>,
}

pub async fn inbox(args: InboxArgs, json: bool) -> Result<(), Failure> {
    let Verb::Prune(args) = args.verb;
    let deed = Deed { actor: actor(args.actor.as_deref()), reason: args.reason };
    let mut progress = Progress::new("rows");
    let pruned =
        args.store.open().await?.prune_inbox(args.older_than, &deed, &mut |pruned| progress.at(pruned)).await?;
    progress.end();
    if json {
        show!("{}", serde_json::json!({ "pruned": pruned }));
    } else {
        show!("{} pruned", counted(i64::try_from(pruned).unwrap_or(i64::MAX), false, "row"));
    }
    Ok(())
}
