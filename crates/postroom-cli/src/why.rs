//! `postroom why ID`: one message's life.

use clap::Args;
use postroom::MessageId;

use crate::StoreArgs;
use crate::exit::{self, Failure};
use crate::say::show;

#[derive(Debug, Args)]
pub struct WhyArgs {
    /// Message id
    id: MessageId,
    #[command(flatten)]
    store: StoreArgs,
}

pub async fn why(args: WhyArgs, json: bool) -> Result<(), Failure> {
    let found = args.store.open()?.whereabouts(args.id).await?;
    if found.is_empty() {
        let text = format!(
            "no message {} is known: its transaction did not commit, no relay has ever run, or retention removed it",
            args.id
        );
        return Err(Failure::new(exit::FAILURE, text));
    }
    if json {
        show!("{}", serde_json::json!({ "id": args.id.to_string(), "routes": found }));
        return Ok(());
    }
    for place in found {
        show!("route {}: {}, key {}", place.route, place.state, place.key.as_deref().unwrap_or("-"));
        for line in place.because {
            show!("  {line}");
        }
        for failed in place.history {
            show!("  {}  attempt {}: {}", failed.at, failed.attempt, failed.error);
        }
    }
    Ok(())
}
