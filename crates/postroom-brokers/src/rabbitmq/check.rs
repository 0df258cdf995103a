//! Whether a broker, an exchange or a queue is there and as it is needed, without changing anything.

use std::error::Error as _;

use lapin::options::{ExchangeDeclareOptions, QueueDeclareOptions};
use lapin::types::{FieldTable, ShortString};
use lapin::{Channel, Connection, ErrorKind, ExchangeKind};

use super::subscription::{IS_STREAM, is_stream};
use super::{RabbitmqOptions, RabbitmqSubscriptionOptions, connect};
use crate::CheckFailed;

const NOT_FOUND: u16 = 404;

/// The exchange of a sink.
pub(super) async fn exchange(options: &RabbitmqOptions) -> Result<String, CheckFailed> {
    options.check().map_err(|wrong| unusable(wrong.problem))?;
    let name = &options.exchange;
    let connection = opened(&options.url).await?;
    let looked = async {
        if name.is_empty() {
            return Ok("the default exchange always exists".to_owned());
        }
        let what = format!("exchange {name:?}");
        match look_for_exchange(&connection, name, true).await {
            // An active declaration of one that exists changes nothing and compares: `run` is going to make it.
            Ok(()) if options.declare => {
                let compared = look_for_exchange(&connection, name, false).await;
                compared.map(|()| format!("{what} exists")).map_err(|error| refused(&what, &error))
            }
            Ok(()) => Ok(format!("{what} exists")),
            Err(error) if is_missing(&error) && options.declare => {
                Ok(format!("{what} does not exist yet and will be declared, if the user may do that"))
            }
            Err(error) if is_missing(&error) => Err(CheckFailed {
                problem: format!("{what} does not exist"),
                advice: "create it as a durable topic exchange, or set declare = true".to_owned(),
            }),
            Err(error) => Err(refused(&what, &error)),
        }
    }
    .await;
    let _ = connection.close(200, "checked".into()).await;
    looked.map(|found| told(&options.url, &found))
}

/// The queue of a subscription, and the exchanges that it is to be bound to.
pub(super) async fn queue(options: &RabbitmqSubscriptionOptions) -> Result<String, CheckFailed> {
    options.check().map_err(unusable)?;
    let name = &options.queue;
    let connection = opened(&options.url).await?;
    let declares = !options.bind.is_empty();
    let looked = async {
        let what = format!("queue {name:?}");
        let found = match look_for_queue(&connection, name, true).await {
            Ok(()) if declares => {
                let compared = look_for_queue(&connection, name, false).await;
                compared.map_err(|error| refused(&what, &error))?;
                format!("{what} exists")
            }
            Ok(()) if is_stream(&connection, name).await.map_err(|error| refused(&what, &error))? => {
                let advice = "bind a classic or quorum queue to the same exchange, and name that one".to_owned();
                return Err(CheckFailed { problem: format!("{what}: {IS_STREAM}"), advice });
            }
            Ok(()) => format!("{what} exists"),
            Err(error) if is_missing(&error) && declares => {
                format!("{what} does not exist yet and will be declared and bound, if the user may do that")
            }
            Err(error) if is_missing(&error) => {
                return Err(CheckFailed {
                    problem: format!("{what} does not exist"),
                    advice: "create it as a durable queue, or set bind".to_owned(),
                });
            }
            Err(error) => return Err(refused(&what, &error)),
        };
        for binding in &options.bind {
            let what = format!("exchange {:?} of bind", binding.exchange);
            match look_for_exchange(&connection, &binding.exchange, true).await {
                Ok(()) => look_for_exchange(&connection, &binding.exchange, false)
                    .await
                    .map_err(|error| refused(&what, &error))?,
                Err(error) if is_missing(&error) => {}
                Err(error) => return Err(refused(&what, &error)),
            }
        }
        Ok(found)
    }
    .await;
    let _ = connection.close(200, "checked".into()).await;
    looked.map(|found| told(&options.url, &found))
}

fn unusable(problem: String) -> CheckFailed {
    CheckFailed { problem, advice: "correct it in the configuration".to_owned() }
}

async fn opened(url: &str) -> Result<Connection, CheckFailed> {
    connect(url, "postroom check", None).await.map_err(|error| {
        let why = error.source().map_or_else(String::new, |source| format!(": {source}"));
        let problem = format!("failed to {error}{why}");
        let advice = advice_for(&problem).to_owned();
        CheckFailed { problem, advice }
    })
}

fn refused(what: &str, error: &lapin::Error) -> CheckFailed {
    let problem = format!("{what}: {error}");
    let advice = advice_for(&problem).to_owned();
    CheckFailed { problem, advice }
}

/// What to do, by what the broker or the socket says. RabbitMQ begins its texts with the names of AMQP's reply codes, section 1.2 of the
/// generated specification: <https://www.rabbitmq.com/amqp-0-9-1-protocol>.
fn advice_for(problem: &str) -> &'static str {
    let said = |words: &str| problem.contains(words);
    if said("ACCESS_REFUSED") && said("Login was refused") {
        "correct the user and the password in the URL, with special characters percent-encoded"
    } else if said("ACCESS_REFUSED") {
        "give the user the permission that is named, with `rabbitmqctl set_permissions`"
    } else if said("NOT_ALLOWED") || (said("vhost") && said("not found")) {
        "correct the virtual host at the end of the URL (%2f is \"/\"), or create it with `rabbitmqctl add_vhost` and let the user in with \
         `rabbitmqctl set_permissions`"
    } else if said("PRECONDITION_FAILED") {
        "it exists with another type or other arguments than postroom declares: delete it, name another one, or create and bind it yourself \
         and set declare = false (of a sink) or leave bind out (of an inbox)"
    } else {
        "correct the URL or its options, or start the broker"
    }
}

fn told(url: &str, found: &str) -> String {
    let encrypted = if url.starts_with("amqps:") { "encrypted with TLS" } else { "not encrypted" };
    // AMQP has no way to ask for a permission without using it.
    format!("{found}; the connection is {encrypted}; whether the user may use it is not known before it does")
}

async fn look_for_exchange(connection: &Connection, name: &str, passive: bool) -> Result<(), lapin::Error> {
    let options = ExchangeDeclareOptions { passive, durable: true, ..Default::default() };
    let channel = connection.create_channel().await?;
    channel.exchange_declare(ShortString::from(name), ExchangeKind::Topic, options, FieldTable::default()).await?;
    closed(channel).await
}

async fn look_for_queue(connection: &Connection, name: &str, passive: bool) -> Result<(), lapin::Error> {
    let options = QueueDeclareOptions { passive, durable: true, ..Default::default() };
    let channel = connection.create_channel().await?;
    channel.queue_declare(ShortString::from(name), options, FieldTable::default()).await?;
    closed(channel).await
}

async fn closed(channel: Channel) -> Result<(), lapin::Error> {
    channel.close(200, "checked".into()).await
}

fn is_missing(error: &lapin::Error) -> bool {
    matches!(error.kind(), ErrorKind::ProtocolError(error) if error.get_id() == NOT_FOUND)
}
