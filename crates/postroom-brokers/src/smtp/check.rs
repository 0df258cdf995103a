//! Whether a mail server can be used, without sending anything.

use super::SmtpOptions;
use super::connection::{Connection, LOGIN};
use crate::{CheckFailed, Hazard};

pub(super) async fn of_sink(options: &SmtpOptions) -> Result<String, CheckFailed> {
    let unusable =
        |problem: String| CheckFailed { problem, advice: "correct the section in the configuration".to_owned() };
    let (server, _) = options.opened().map_err(unusable)?;
    let opened = Connection::open(&server, options.may_be_in_clear(&server)).await;
    let connection = opened.map_err(|problem| CheckFailed {
        advice: if problem.contains("is not offered") {
            "leave the user and the password out of the URL, or use a port with a login, such as 587"
        } else if problem.contains(LOGIN) {
            "correct the user and the password in the URL, with special characters percent-encoded"
        } else {
            "correct the URL or its options, or start the server"
        }
        .to_owned(),
        problem: format!("connect to the mail server at {problem}"),
    })?;
    let takes = match connection.extensions.size {
        Some(bytes) => format!("takes mails of up to {bytes} bytes"),
        None => "names no limit of a mail's size".to_owned(),
    };
    let encrypted = if connection.is_encrypted { "encrypted with TLS" } else { "not encrypted" };
    connection.leave().await;
    Ok(format!(
        "the server {takes}; whether it lets {} send, and to whom, shows with the first mail; the connection is {encrypted}",
        options.from
    ))
}

/// What no mail server tells.
pub(super) fn unseen() -> Hazard {
    Hazard {
        is_known: false,
        problem:
            "a mail server that has taken a mail may still fail to deliver it, and tells only the sender's address"
                .to_owned(),
        advice: "read the mails that come back to `from` (docs/smtp.md, \"What taken means\")".to_owned(),
    }
}
