//! E-mail by SMTP: each message is one mail, and the server's last answer says whether it has it.
//!
//! - A message counts as stored when the server has answered the end of the mail with success. It is the server's duty then.
//! - No answer to the end of a mail is *unknown*, and the mail is sent again with the same `Message-ID`. Anything before that end is no mail.
//! - A mail goes to all of its recipients or to none.

mod check;
mod connection;
mod mail;
mod reply;
mod sink;

use std::sync::Arc;

use async_trait::async_trait;
use postroom::{Sink, redact_url};
use serde::Deserialize;

use crate::server_address::{Scheme, ServerAddress};
use crate::{Broker, CheckFailed, Hazard, OpenSinkError, Section, SinkOptions};

use mail::Sender;

pub use sink::SmtpSink;

/// `[routes.sink]` with `kind = "smtp"`.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SmtpOptions {
    /// `smtps://` URL, which is encrypted from the beginning, or `smtp://`, which becomes so by STARTTLS. Certificates are verified against
    /// the system's roots and what `cacertfile` in the URL names; `certfile` and `keyfile` are a client certificate.
    pub url: String,
    /// Whom mails are from, unless a message says otherwise: `Shop <shop@example.com>`.
    pub from: String,
    /// Whether mails go out unencrypted where the server has no STARTTLS; false, but for a server on this machine.
    #[serde(default)]
    pub unencrypted: bool,
    /// Most mails at a time, each over a connection of its own; 2 by default.
    #[serde(default = "default_mails")]
    pub mails_in_flight_max: usize,
    /// Seconds after which a server that does not answer is given up; 60 by default.
    #[serde(default = "default_deadline")]
    pub publish_deadline_seconds: u64,
}

impl std::fmt::Debug for SmtpOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SmtpOptions")
            .field("url", &redact_url(&self.url))
            .field("from", &self.from)
            .finish_non_exhaustive()
    }
}

fn default_mails() -> usize {
    2
}

fn default_deadline() -> u64 {
    60
}

const SCHEME: Scheme = Scheme {
    plain: "smtp://",
    encrypted: "smtps://",
    // It may become encrypted.
    certificates: "smtp",
    ports: (587, 465),
    login_is_user: true,
    form: "smtps://USER:PASSWORD@HOST:PORT",
};

/// E-mail.
pub const BROKER: Broker = Broker {
    kind: "smtp",
    about: "E-mail by SMTP: a mail for each message (sending only)",
    sink: Some(Section::sink::<SmtpOptions>(
        "kind = \"smtp\"\nurl = \"smtp://localhost:25\"\nfrom = \"Shop <shop@example.com>\"\n",
    )),
    subscription: None,
};

impl SmtpOptions {
    /// The defaults for a server.
    pub fn new(url: impl Into<String>, from: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            from: from.into(),
            unencrypted: false,
            mails_in_flight_max: default_mails(),
            publish_deadline_seconds: default_deadline(),
        }
    }

    fn opened(&self) -> Result<(ServerAddress, Sender), String> {
        if self.mails_in_flight_max == 0 || self.publish_deadline_seconds == 0 {
            let problem = "mails_in_flight_max and publish_deadline_seconds must be at least 1";
            return Err(problem.to_owned());
        }
        let server = ServerAddress::parse(&self.url, &SCHEME)?;
        if !server.path.is_empty() {
            return Err(format!("{:?} behind the server is not understood", server.path));
        }
        if server.user.is_empty() && !server.password.is_empty() {
            return Err("url has a password and no user: write USER:PASSWORD@ before the host".to_owned());
        }
        server.files.read()?;
        let sender = Sender::parse(&self.from).map_err(|problem| format!("from: {problem}"))?;
        Ok((server, sender))
    }

    /// Whether a connection that is not encrypted will do.
    fn may_be_in_clear(&self, server: &ServerAddress) -> bool {
        !server.files.has_any() && (self.unencrypted || server.is_here())
    }
}

#[async_trait]
impl SinkOptions for SmtpOptions {
    fn open(&self) -> Result<Arc<dyn Sink>, OpenSinkError> {
        Ok(Arc::new(SmtpSink::new(self.clone())?))
    }

    fn shown(&self) -> String {
        format!("smtp {}, from {:?}", redact_url(&self.url), self.from)
    }

    async fn check(&self) -> Result<String, CheckFailed> {
        check::of_sink(self).await
    }

    async fn hazards(&self) -> Result<Vec<Hazard>, CheckFailed> {
        Ok(vec![check::unseen()])
    }
}
