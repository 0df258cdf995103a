//! `postroom send`: writes one test message, as an application would.

use std::time::Duration;

use clap::Args;
use postroom::Message;

use crate::StoreArgs;
use crate::exit::{self, Failure};
use crate::say::show;

#[derive(Debug, Args)]
pub struct SendArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// Topic
    #[arg(long)]
    topic: String,
    /// Type
    #[arg(long = "type", value_name = "TYPE", default_value = "postroom.test")]
    kind: String,
    /// Payload as text, or @FILE for the bytes of a file
    #[arg(long, default_value = "{}", value_name = "TEXT")]
    payload: String,
    /// Key: messages with the same key are sent in order
    #[arg(long)]
    key: Option<String>,
    /// Routing key; the type by default
    #[arg(long)]
    routing_key: Option<String>,
    /// Content type
    #[arg(long, default_value = "application/json")]
    content_type: String,
    /// A header; may be given several times
    #[arg(long = "header", value_name = "NAME=VALUE", value_parser = header)]
    headers: Vec<(String, String)>,
    /// Send it after this delay, such as 30s
    #[arg(long, value_parser = crate::dead::duration, value_name = "TIME")]
    delay: Option<Duration>,
}

fn header(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("write it as NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}

pub async fn send(args: SendArgs, json: bool) -> Result<(), Failure> {
    let payload = match args.payload.strip_prefix('@') {
        None => args.payload.clone().into_bytes(),
        Some(file) => std::fs::read(file)
            .map_err(|error| Failure::new(exit::USAGE, format!("failed to read the payload from {file}: {error}")))?,
    };
    let mut message = Message::new(&args.topic, &args.kind, payload);
    message.content_type.clone_from(&args.content_type);
    message.key.clone_from(&args.key);
    message.routing_key.clone_from(&args.routing_key);
    message.delay = args.delay.unwrap_or_default();
    for (name, value) in args.headers {
        message = message.header(name, value);
    }
    let id = message.id;
    message.check().map_err(|error| Failure::new(exit::USAGE, format!("the message was not written: {error}")))?;
    args.store.open().await?.send(&message).await?;
    if json {
        show!("{}", serde_json::json!({ "id": id.to_string() }));
    } else {
        show!("{id} has been written; `postroom why {id}` shows what happens to it");
    }
    Ok(())
}
