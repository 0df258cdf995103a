//! Whether a broker can be used, without changing anything at it.

use bytes::BytesMut;
use postroom::MessageId;
use tokio::io::AsyncWriteExt;
use tokio::time::timeout;

use super::connection::{KEEP_ALIVE_SECONDS, opened};
use super::packet::{self, Connack, Connect};
use super::{MqttOptions, MqttSubscriptionOptions};
use crate::server_address::ServerAddress;
use crate::server_stream::{CONNECT_WITHIN, Stream};
use crate::{CheckFailed, Hazard};

/// What a sink publishes to.
pub(super) async fn of_sink(options: &MqttOptions) -> Result<String, CheckFailed> {
    let (address, ..) = options.opened().map_err(unusable)?;
    let (stream, _, connack) = connect(&address, &options.client_id).await?;
    if connack.maximum_qos == 0 {
        return Err(CheckFailed {
            problem: "the broker confirms nothing: it has only QoS 0".to_owned(),
            advice: "use a broker with QoS 1".to_owned(),
        });
    }
    if options.retain && !connack.retain_available {
        return Err(CheckFailed {
            problem: "the broker keeps no retained messages".to_owned(),
            advice: "leave out retain".to_owned(),
        });
    }
    farewell(stream).await;
    let largest = match connack.packet_bytes_max {
        Some(bytes) => format!("takes messages of up to {bytes} bytes"),
        None => "names no limit of a message's size".to_owned(),
    };
    Ok(format!(
        "the broker {largest}, {} at a time; whether it lets this user publish to {:?} shows with the first message; the connection is {}",
        connack.receive_maximum,
        options.topic,
        encrypted(&address)
    ))
}

/// What a subscription receives from. It does not subscribe: a broker would hand out messages to it, and count it as somebody who gets them.
pub(super) async fn of_subscription(options: &MqttSubscriptionOptions) -> Result<String, CheckFailed> {
    let address = options.opened().map_err(unusable)?;
    let (stream, _, _) = connect(&address, "postroom").await?;
    farewell(stream).await;
    Ok(format!(
        "the broker lets this user in; whether it lets it subscribe to {} shows with the first session; the connection is {}",
        options.topics.join(", "),
        encrypted(&address)
    ))
}

/// What no broker tells.
pub(super) fn unseen() -> Hazard {
    Hazard {
        is_known: false,
        problem: "an MQTT broker does not say whether what it has acked survives its own death, nor how many messages it keeps for a session"
            .to_owned(),
        advice: "look into its configuration (docs/mqtt.md, \"What the broker must not lose\")".to_owned(),
    }
}

async fn connect(
    address: &ServerAddress,
    client_id: &str,
) -> Result<(Box<dyn Stream>, BytesMut, Connack), CheckFailed> {
    let client_id = format!("{client_id}-{}", MessageId::new().as_uuid().simple());
    let connect = Connect {
        client_id: &client_id,
        clean_start: true,
        keep_alive_seconds: KEEP_ALIVE_SECONDS,
        session_expiry_seconds: 0,
        receive_maximum: 1,
        user: &address.user,
        password: &address.password,
    };
    opened(address, &connect).await.map_err(|problem| CheckFailed {
        advice: if problem.contains("0x86") || problem.contains("0x87") {
            "correct the user and the password in the URL, with special characters percent-encoded; brokers may also give rights by client id"
        } else {
            "correct the URL or its options, or start the broker; it must speak MQTT 5"
        }
        .to_owned(),
        problem: format!("connect to MQTT at {problem}"),
    })
}

async fn farewell(mut stream: Box<dyn Stream>) {
    let mut bytes = BytesMut::new();
    packet::disconnect(&mut bytes);
    let _ = timeout(CONNECT_WITHIN, stream.write_all(&bytes)).await;
}

fn encrypted(address: &ServerAddress) -> &'static str {
    if address.tls { "encrypted with TLS" } else { "not encrypted" }
}

fn unusable(problem: String) -> CheckFailed {
    CheckFailed { problem, advice: "correct the section in the configuration".to_owned() }
}
