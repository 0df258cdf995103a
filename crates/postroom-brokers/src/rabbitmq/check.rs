//! Whether a broker, an exchange or a queue is there, without changing anything.

use lapin::options::{ExchangeDeclareOptions, QueueDeclareOptions};
use lapin::types::{FieldTable, ShortString};
use lapin::{Connection, ErrorKind, ExchangeKind};
use postroom::{Unavailable, redact_url};

use super::{RabbitmqOptions, RabbitmqSubscriptionOptions, connect};

const NOT_FOUND: u16 = 404;

/// The exchange of a sink.
pub(super) async fn exchange(options: &RabbitmqOptions) -> Result<String, Unavailable> {
    let name = &options.exchange;
    let shown = format!("exchange {name:?} of RabbitMQ at {}", redact_url(&options.url));
    let connection = connect(&options.url, "postroom check").await?;
    if name.is_empty() {
        return Ok(told(&options.url, "the default exchange always exists"));
    }
    let looked = look_for_exchange(&connection, name).await;
    let _ = connection.close(200, "checked".into()).await;
    match looked {
        Ok(()) => Ok(told(&options.url, &format!("exchange {name:?} exists"))),
        Err(error) if is_missing(&error) && options.declare => {
            Ok(told(&options.url, &format!("exchange {name:?} does not exist yet and will be declared")))
        }
        Err(error) if is_missing(&error) => {
            let problem = "it does not exist; create it as a durable topic exchange, or set declare = true";
            Err(Unavailable::new(shown, problem))
        }
        Err(error) => Err(Unavailable::new(shown, error)),
    }
}

/// The queue of a subscription.
pub(super) async fn queue(options: &RabbitmqSubscriptionOptions) -> Result<String, Unavailable> {
    let name = &options.queue;
    let shown = format!("queue {name:?} of RabbitMQ at {}", redact_url(&options.url));
    let connection = connect(&options.url, "postroom check").await?;
    let looked = look_for_queue(&connection, name).await;
    let _ = connection.close(200, "checked".into()).await;
    match looked {
        Ok(()) => Ok(told(&options.url, &format!("queue {name:?} exists"))),
        Err(error) if is_missing(&error) && !options.bind.is_empty() => {
            Ok(told(&options.url, &format!("queue {name:?} does not exist yet and will be declared and bound")))
        }
        Err(error) if is_missing(&error) => {
            Err(Unavailable::new(shown, "it does not exist; create it as a durable queue, or set bind"))
        }
        Err(error) => Err(Unavailable::new(shown, error)),
    }
}

fn told(url: &str, found: &str) -> String {
    let encrypted = if url.starts_with("amqps:") { "encrypted with TLS" } else { "not encrypted" };
    format!("{found}; the connection is {encrypted}")
}

async fn look_for_exchange(connection: &Connection, name: &str) -> Result<(), lapin::Error> {
    let passive = ExchangeDeclareOptions { passive: true, ..Default::default() };
    let channel = connection.create_channel().await?;
    channel.exchange_declare(ShortString::from(name), ExchangeKind::Topic, passive, FieldTable::default()).await
}

async fn look_for_queue(connection: &Connection, name: &str) -> Result<(), lapin::Error> {
    let passive = QueueDeclareOptions { passive: true, ..Default::default() };
    let channel = connection.create_channel().await?;
    channel.queue_declare(ShortString::from(name), passive, FieldTable::default()).await.map(drop)
}

fn is_missing(error: &lapin::Error) -> bool {
    matches!(error.kind(), ErrorKind::ProtocolError(error) if error.get_id() == NOT_FOUND)
}
