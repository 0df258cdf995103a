//! `postroom messages`: lists messages by topic, key, state and age, and shows everything that is stored about one message.

use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use postroom::{ListedAfter, ListedPlace, MessageFilter, MessageId};

use crate::StoreArgs;
use crate::dead::{duration, known_route};
use crate::exit::{self, Failure};
use crate::say::{say, show, to_stdout_as_it_is};
use crate::table::{Table, duration as lasting};

#[derive(Debug, Args)]
pub struct MessagesArgs {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// List messages, newest first: one line for each route that takes them, or one with the state unrouted if none does
    List(Box<ListArgs>),
    /// Show one message with its headers, and with --payload also its payload
    Show(ShowArgs),
}

#[derive(Debug, Args)]
struct ListArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// Only on this route
    #[arg(long)]
    route: Option<String>,
    /// Only messages of this topic
    #[arg(long)]
    topic: Option<String>,
    /// Only messages with this key, or with this aggregate id if they have no key
    #[arg(long)]
    key: Option<String>,
    /// Only messages in this state: waiting (not yet read by the route), scheduled, retry, queued (behind another message with the same
    /// key), dead, done (sent, discarded or skipped; `postroom why ID` tells which), or unrouted (no route takes its topic)
    #[arg(long, value_parser = state, value_name = "STATE")]
    state: Option<ListedPlace>,
    /// Only messages written at most this long ago, such as 90m
    #[arg(long, value_parser = duration, value_name = "AGE")]
    newer_than: Option<Duration>,
    /// Only messages written at least this long ago
    #[arg(long, value_parser = duration, value_name = "AGE")]
    older_than: Option<Duration>,
    /// Only those behind this place: the `next` of the page before
    #[arg(long, value_name = "PLACE", allow_hyphen_values = true)]
    after: Option<ListedAfter>,
    /// Maximum number of messages, 1 to 100000
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(i64).range(1..=100_000), value_name = "N")]
    limit: i64,
}

#[derive(Debug, Args)]
struct ShowArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// Message id
    id: MessageId,
    /// Also show the payload, which may contain personal data
    #[arg(long)]
    payload: bool,
}

/// A list whose conditions few messages fulfil is searched for this long.
const SEARCH_MAX: Duration = Duration::from_secs(5);

fn state(word: &str) -> Result<ListedPlace, String> {
    let words: Vec<&str> = ListedPlace::ALL.iter().map(|place| place.as_str()).collect();
    ListedPlace::of(word).ok_or_else(|| format!("use {}", words.join(", ")))
}

pub async fn messages(args: MessagesArgs, json: bool) -> Result<(), Failure> {
    match args.verb {
        Verb::List(args) => list(*args, json).await,
        Verb::Show(args) => show(args, json).await,
    }
}

async fn list(args: ListArgs, json: bool) -> Result<(), Failure> {
    let ListArgs { store, route, topic, key, state, newer_than, older_than, after, limit } = args;
    let mut filter = MessageFilter { route, topic, key, place: state, newer_than, older_than, after };
    if let Some(why) = filter.contradiction() {
        return Err(Failure::new(exit::USAGE, format!("no message can match: {why}")));
    }
    let store = store.open().await?;
    known_route(store.as_ref(), filter.route.as_deref()).await?;
    let (began, mut listed) = (Instant::now(), store.messages(&filter, limit).await?);
    while let Some(next) = listed.next.as_deref().filter(|_| began.elapsed() < SEARCH_MAX) {
        let missing = limit - listed.messages.len() as i64;
        if missing <= 0 {
            break;
        }
        let unreadable =
            |why| Failure::new(exit::FAILURE, format!("the place `{next}` that the search has come to: {why}"));
        filter.after = Some(next.parse().map_err(unreadable)?);
        let page = store.messages(&filter, missing).await?;
        listed.messages.extend(page.messages);
        listed.next = page.next;
    }
    if json {
        show!("{}", serde_json::json!(listed));
        return Ok(());
    }
    if listed.messages.is_empty() {
        match listed.next {
            None => show!("no matching message"),
            Some(_) => show!("no matching message so far"),
        }
    } else {
        let mut table = Table::new(&["ID", "ROUTE", "STATE", "TOPIC", "TYPE", "KEY", ">AGE", ">ATTEMPTS"]);
        for message in &listed.messages {
            table.row([
                message.id.clone(),
                message.route.clone().unwrap_or_else(|| "-".to_owned()),
                message.state.to_string(),
                message.topic.clone(),
                message.kind.clone(),
                message.key.clone().unwrap_or_else(|| "-".to_owned()),
                lasting(message.age_seconds),
                message.attempts.to_string(),
            ]);
        }
        table.lines().iter().for_each(|line| show!("{line}"));
    }
    if let Some(next) = &listed.next {
        match listed.messages.len() as i64 >= limit {
            true => say!("postroom: more with --after {next}"),
            false => say!(
                "postroom: there may be more: the search ended after {} seconds, newest messages first; go on with --after {next}",
                SEARCH_MAX.as_secs()
            ),
        }
    }
    Ok(())
}

async fn show(args: ShowArgs, json: bool) -> Result<(), Failure> {
    let Some(message) = args.store.open().await?.message(args.id).await? else {
        let text = format!(
            "no message {} is stored: its transaction did not commit, or its row was deleted after it had been sent",
            args.id
        );
        return Err(Failure::new(exit::FAILURE, text));
    };
    let text = args.payload.then(|| match std::str::from_utf8(&message.payload) {
        Ok(text) => text.to_owned(),
        Err(_) => message.payload.iter().map(|byte| format!("{byte:02x}")).collect(),
    });
    if json {
        let mut object = serde_json::json!(message);
        object["payload_bytes"] = message.payload.len().into();
        if let Some(text) = text {
            object["payload"] = text.into();
            object["payload_is_hex"] = std::str::from_utf8(&message.payload).is_err().into();
        }
        show!("{object}");
        return Ok(());
    }
    let or_dash = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
    show!("{}, written {} ago, from {}", message.id, lasting(message.age_seconds), message.found_in);
    show!("  topic {}, type {}, key {}", message.topic, message.kind, or_dash(&message.key));
    show!("  routing key {}, content type {}", or_dash(&message.routing_key), message.content_type);
    let version = message.aggregate_version.map_or_else(|| "-".to_owned(), |version| version.to_string());
    show!(
        "  tenant {}, aggregate {} {} version {version}",
        or_dash(&message.tenant_id),
        or_dash(&message.aggregate_type),
        or_dash(&message.aggregate_id)
    );
    message.headers.iter().for_each(|(name, value)| show!("  {name}: {value}"));
    show!("  payload: {} bytes", message.payload.len());
    if let Some(text) = text {
        to_stdout_as_it_is(&text);
    }
    Ok(())
}
