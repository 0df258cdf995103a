//! Whether a broker can be used, without changing anything at it.

use super::peer::{LOGIN, Peer, Role};
use super::{Amqp10Options, Amqp10SubscriptionOptions};
use crate::server_address::ServerAddress;
use crate::{CheckFailed, Hazard};

/// What a sink publishes to.
pub(super) async fn of_sink(options: &Amqp10Options) -> Result<String, CheckFailed> {
    let (server, form) = options.opened().map_err(unusable)?;
    // Of an address with fields at least the exchange, if that is the same for all.
    let exchange =
        options.address.strip_prefix("/exchanges/").and_then(|rest| rest.split_once('/')).map(|(name, _)| name);
    if let Some(exchange) = exchange.filter(|name| !name.contains('{')) {
        attached(&server, Role::Sends, Some(&format!("/exchanges/{exchange}"))).await?;
    }
    let limit = attached(&server, Role::Sends, form.node()).await?;
    let takes = match limit {
        Some(bytes) => format!("takes messages of up to {bytes} bytes"),
        None => "names no limit of a message's size".to_owned(),
    };
    let encrypted = encrypted(&server);
    Ok(match form.node() {
        Some(node) => format!("{node:?} is there and {takes}; the connection is {encrypted}"),
        None => format!(
            "the broker {takes}; whether it has what {:?} names shows with the first message; the connection is {encrypted}",
            options.address
        ),
    })
}

/// What a subscription receives from. Without asking for messages.
pub(super) async fn of_subscription(options: &Amqp10SubscriptionOptions) -> Result<String, CheckFailed> {
    let server = options.opened().map_err(unusable)?;
    attached(&server, Role::Receives, Some(&options.address)).await?;
    Ok(format!(
        "{:?} is there, and this user may receive from it; the connection is {}",
        options.address,
        encrypted(&server)
    ))
}

/// What the protocol does not tell.
pub(super) fn unseen() -> Hazard {
    Hazard {
        is_known: false,
        problem: "a broker does not say over AMQP 1.0 whether what it has accepted survives its own death".to_owned(),
        advice: "look into its configuration (docs/amqp10.md, \"What the broker must not lose\")".to_owned(),
    }
}

async fn attached(server: &ServerAddress, role: Role, node: Option<&str>) -> Result<Option<u64>, CheckFailed> {
    let mut peer = Peer::open(server, "postroom-check").await.map_err(|problem| CheckFailed {
        advice: if problem.contains(LOGIN) {
            "correct the user and the password in the URL, with special characters percent-encoded"
        } else {
            "correct the URL or its options, or start the broker; it must speak AMQP 1.0"
        }
        .to_owned(),
        problem: format!("connect to AMQP 1.0 at {problem}"),
    })?;
    let attached = peer.attach(0, role, node).await;
    peer.leave().await;
    attached.map(|attached| attached.message_bytes_max).map_err(|problem| CheckFailed {
        problem,
        advice: "make the queue, exchange or topic at the broker, let this user use it, or correct the address (docs/amqp10.md, \"Addresses\")"
            .to_owned(),
    })
}

fn encrypted(server: &ServerAddress) -> &'static str {
    if server.tls { "encrypted with TLS" } else { "not encrypted" }
}

fn unusable(problem: String) -> CheckFailed {
    CheckFailed { problem, advice: "correct the section in the configuration".to_owned() }
}
