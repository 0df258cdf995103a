//! `postroom why ID`: one message's life.

use clap::Args;
use postroom::{FailedAttempt, MessageId};

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
    let store = args.store.open().await?;
    let found = store.whereabouts(args.id).await?;
    let received = store.receptions(args.id).await?;
    if found.is_empty() && received.is_empty() {
        let text = match store.message(args.id).await? {
            Some(stored) => format!(
                "message {} is in the {}, and there is no route that could send it: none has run yet, or it was forgotten. \
                 `postroom routes list` shows the routes; if one was forgotten, the audit table says when, and it may have sent the message",
                args.id,
                stored.found_in.replace('_', " ")
            ),
            None => format!(
                "no message {} is known: its transaction did not commit, or its row was deleted; of a message that was replayed with a new id, the header postroom-replay-of has the id to ask for",
                args.id
            ),
        };
        return Err(Failure::new(exit::FAILURE, text));
    }
    if json {
        show!("{}", serde_json::json!({ "id": args.id.to_string(), "routes": found, "consumers": received }));
        return Ok(());
    }
    for place in found {
        show!("route {}: {}, key {}", place.route, place.state, place.key.as_deref().unwrap_or("-"));
        reasons(&place.because, &place.history);
    }
    for place in received {
        show!("consumer {}: {}, key {}", place.consumer, place.state, place.key.as_deref().unwrap_or("-"));
        reasons(&place.because, &place.history);
    }
    Ok(())
}

fn reasons(because: &[String], history: &[FailedAttempt]) {
    because.iter().for_each(|line| show!("  {line}"));
    for failed in history {
        show!("  {}  attempt {}: {}", failed.at, failed.attempt, failed.error);
    }
}
