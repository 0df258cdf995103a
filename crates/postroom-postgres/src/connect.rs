//! Connecting: the URL, TLS, and what every session of ours is set to.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use postroom::{BoxError, StoreError, Wake, redact_url};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinHandle;
use tokio_postgres::config::Host;
use tokio_postgres::tls::MakeTlsConnect;
use tokio_postgres::{AsyncMessage, CancelToken, Client, Config, Socket};
use tokio_postgres_rustls::MakeRustlsConnect;

use crate::link::store_error;
use crate::tls::{self, TlsOptions};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Until a connection is ready, with TLS and the password.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(20);
/// A peer that has not acknowledged data for so long is gone: a half-open link must not hang the relay.
const TCP_USER_TIMEOUT: Duration = Duration::from_secs(15);

/// A URL that does not name a PostgreSQL database, or that asks for something impossible.
#[derive(Debug, thiserror::Error)]
#[error("read database URL {shown}")]
pub struct InvalidUrl {
    shown: String,
    #[source]
    source: BoxError,
}

/// A connection that could not be opened: where to, and what can be done about it.
#[derive(Debug, thiserror::Error)]
#[error("{to}{hint}")]
struct NotConnected {
    to: String,
    hint: String,
    #[source]
    source: tokio_postgres::Error,
}

type Opened = tokio_postgres::Connection<Socket, <MakeRustlsConnect as MakeTlsConnect<Socket>>::Stream>;

/// Opens connections to one database. To other machines they are encrypted and the server's certificate is verified, unless the URL
/// says otherwise.
#[derive(Clone)]
pub struct Connector {
    config: Config,
    tls: MakeRustlsConnect,
    shown: String,
    /// Hosts and ports, for people.
    to: Arc<str>,
    /// One for each connection that may be open at the same time; none: as many as are asked for.
    places: Option<Arc<Semaphore>>,
}

impl std::fmt::Debug for Connector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Connector").field(&self.shown).finish()
    }
}

impl Connector {
    /// Reads a `postgres://` URL. Its TLS options are `sslmode` (`verify-full`, `verify-ca` or `disable`; `require` is
    /// `verify-full`), `sslrootcert`, `sslcert` and `sslkey`, files in PEM. Without any of these, `sslmode` is `disable` for a host on this
    /// machine, and `verify-full` with the system's roots for every other.
    pub fn new(url: &str) -> Result<Self, InvalidUrl> {
        let invalid = |source: BoxError| InvalidUrl { shown: redact_url(url), source };
        let (url_without_tls, options) = TlsOptions::taken_out_of(url);
        let mut config: Config =
            url_without_tls.parse().map_err(|_: tokio_postgres::Error| invalid(UNREADABLE.into()))?;
        if config.get_hosts().is_empty() {
            return Err(invalid("it names no host".into()));
        }
        config
            .connect_timeout(CONNECT_TIMEOUT)
            .tcp_user_timeout(TCP_USER_TIMEOUT)
            .keepalives_idle(Duration::from_secs(10))
            .keepalives_interval(Duration::from_secs(5))
            .keepalives_retries(2);
        if config.get_application_name().is_none() {
            config.application_name("postroom");
        }
        let tls = options.client(&mut config).map_err(invalid)?;
        let to = config.get_hosts().iter().enumerate().map(|(n, host)| {
            let ports = config.get_ports();
            let port = ports.get(n).or(ports.first()).copied().unwrap_or(5432);
            match host {
                Host::Tcp(name) => format!("{name}:{port}"),
                #[cfg(unix)]
                Host::Unix(path) => format!("{}, port {port}", path.display()),
            }
        });
        // With an @ too many, a part of the password may have been read as the host.
        let to = if url.matches('@').count() > 1 || url.split_once('?').is_some_and(|(_, query)| query.contains('@')) {
            "the host of that URL, in which an @ has to be written as %40".to_owned()
        } else {
            to.collect::<Vec<_>>().join(", ")
        };
        Ok(Self { config, tls: MakeRustlsConnect::new(tls), shown: redact_url(url), to: to.into(), places: None })
    }

    /// Takes the password from a file in PostgreSQL's own format (`host:port:database:user:password`, `*` matches anything), unless the
    /// URL has one. <https://www.postgresql.org/docs/current/libpq-pgpass.html>
    pub fn password_from(mut self, file: &Path) -> Result<Self, InvalidUrl> {
        if self.config.get_password().is_some() {
            return Ok(self);
        }
        let text = std::fs::read_to_string(file).map_err(|error| InvalidUrl {
            shown: self.shown.clone(),
            source: format!("failed to read the password file {}: {error}", file.display()).into(),
        })?;
        let user = self.config.get_user().unwrap_or_default();
        let database = self.config.get_dbname().unwrap_or(user);
        let host = match self.config.get_hosts().first() {
            Some(Host::Tcp(name)) => name.as_str(),
            _ => "localhost",
        };
        let port = self.config.get_ports().first().copied().unwrap_or(5432).to_string();
        let wanted = [host, &port, database, user];
        if let Some(password) = text.lines().find_map(|line| password_in(line, &wanted)) {
            self.config.password(password);
        }
        Ok(self)
    }

    /// With so many connections open at the same time, at most; who asks for more waits for one to be closed.
    pub(crate) fn at_most(&self, connections: usize) -> Self {
        Self { places: Some(Arc::new(Semaphore::new(connections))), ..self.clone() }
    }

    /// The URL without its password.
    pub fn shown(&self) -> &str {
        &self.shown
    }

    /// Opens a connection whose notifications wake `wake`. The task ends when the connection does.
    pub(crate) async fn connect_listening(&self, wake: Wake) -> Result<(Client, JoinHandle<()>), StoreError> {
        let (client, mut connection) = self.handshake(&self.config).await?;
        let broken = tokio::spawn(async move {
            while let Some(Ok(message)) = std::future::poll_fn(|context| connection.poll_message(context)).await {
                if matches!(message, AsyncMessage::Notification(_)) {
                    wake.notify();
                }
            }
        });
        Ok((client, broken))
    }

    /// Asks the server to give up what the connection of `token` is doing.
    pub(crate) async fn cancel(&self, token: CancelToken) {
        if let Err(error) = token.cancel_query(self.tls.clone()).await {
            tracing::debug!(%error, "a query could not be cancelled");
        }
    }

    /// Opens a connection; a task drives it until the client is dropped.
    pub async fn connect(&self) -> Result<Client, StoreError> {
        let place = match &self.places {
            None => None,
            Some(places) => {
                let acquired = tokio::time::timeout(PLACE_WITHIN, places.clone().acquire_owned()).await;
                let unavailable = |source: BoxError| StoreError::Unavailable { what: "wait for a connection", source };
                Some(
                    acquired
                        .map_err(|_| unavailable(ALL_IN_USE.into()))?
                        .map_err(|closed| unavailable(closed.into()))?,
                )
            }
        };
        self.open(&self.config, place).await
    }

    /// One more than there may be, to see whether the server is there while the others are busy.
    pub(crate) async fn connect_beyond(&self) -> Result<Client, StoreError> {
        self.open(&self.config, None).await
    }

    /// Opens a connection whose session begins with these settings, written as `-c name=value`. They are part of the start-up
    /// message and never a `set`: behind a pooler a `set` would stay on a connection that others use next.
    pub(crate) async fn connect_set(&self, settings: &str) -> Result<Client, StoreError> {
        let mut config = self.config.clone();
        let given = config.get_options().unwrap_or_default().to_owned();
        config.options(format!("{given} {settings}").trim());
        match self.open(&config, None).await {
            Err(StoreError::Unavailable { source, .. }) if refuses_settings(source.as_ref()) => Err(behind_a_pooler()),
            opened => opened,
        }
    }

    async fn open(&self, config: &Config, place: Option<OwnedSemaphorePermit>) -> Result<Client, StoreError> {
        let (client, connection) = self.handshake(config).await?;
        // Such a database checks nothing, but would refuse to show us a row with bytes that are no UTF-8.
        let unchecked = connection.parameter("server_encoding") == Some("SQL_ASCII");
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a database connection ended");
            }
            drop(place);
        });
        if unchecked {
            client
                .batch_execute("set client_encoding to 'SQL_ASCII'")
                .await
                .map_err(|error| store_error("connect", error))?;
        }
        Ok(client)
    }

    /// The client's own limit counts until the connection is accepted; a server that hangs accepts it and says nothing.
    async fn handshake(&self, config: &Config) -> Result<(Client, Opened), StoreError> {
        match tokio::time::timeout(HANDSHAKE_TIMEOUT, config.connect(self.tls.clone())).await {
            Ok(connected) => connected.map_err(|error| self.not_connected(error)),
            Err(_) => {
                let seconds = HANDSHAKE_TIMEOUT.as_secs();
                let source = format!("the server at {} did not answer within {seconds} s", self.to).into();
                Err(StoreError::Unavailable { what: "connect", source })
            }
        }
    }

    /// Sorted as any error, told with where to and what can be done.
    fn not_connected(&self, error: tokio_postgres::Error) -> StoreError {
        let hint = tls::hint(&error).map_or_else(String::new, |hint| format!(" ({hint})"));
        let to = format!("to {}", self.to);
        let with = |source: BoxError| -> BoxError {
            match source.downcast::<tokio_postgres::Error>() {
                Ok(source) => NotConnected { to, hint, source: *source }.into(),
                Err(other) => other,
            }
        };
        match store_error("connect", error) {
            StoreError::Unavailable { what, source } => StoreError::Unavailable { what, source: with(source) },
            StoreError::Busy { what, source } => StoreError::Busy { what, source: with(source) },
            StoreError::Refused { what, source } => StoreError::Refused { what, source: with(source) },
            schema => schema,
        }
    }
}

/// Whoever holds a connection needs it for one thing, which takes no longer.
const PLACE_WITHIN: Duration = Duration::from_secs(60);
const ALL_IN_USE: &str = "all connections that this database may have are in use";
const UNREADABLE: &str = "it cannot be parsed; write postgres://USER:PASSWORD@HOST:PORT/DATABASE, with special characters of user and \
                          password percent-encoded (@ as %40, : as %3A, / as %2F, ? as %3F, # as %23, % as %25)";

/// The password of a line of a password file, if the line is about this host, port, database and user.
fn password_in(line: &str, wanted: &[&str; 4]) -> Option<String> {
    if line.starts_with('#') {
        return None;
    }
    let mut fields = vec![String::new()];
    let mut characters = line.chars();
    while let Some(c) = characters.next() {
        match (c, fields.len()) {
            ('\\', _) => fields.last_mut()?.extend(characters.next()),
            // The password is the rest.
            (':', 1..=4) => fields.push(String::new()),
            (other, _) => fields.last_mut()?.push(other),
        }
    }
    let fits = fields.len() == 5 && fields.iter().zip(wanted).all(|(field, wanted)| field == "*" || field == wanted);
    fits.then(|| fields.pop()).flatten()
}

/// PgBouncer answers so to a start-up message with settings that it does not know.
fn refuses_settings(error: &(dyn std::error::Error + 'static)) -> bool {
    let error = error.downcast_ref::<NotConnected>().map(|error| &error.source);
    let db = error.and_then(tokio_postgres::Error::as_db_error);
    db.is_some_and(|error| error.message().contains("startup parameter"))
}

/// Not PostgreSQL itself answers.
pub(crate) fn behind_a_pooler() -> StoreError {
    StoreError::Refused {
        what: "use this connection for a relay",
        source:
            "a connection pooler answered: the session's settings did not arrive, or its transactions run on several \
                 backends. Give the relay a URL that connects to PostgreSQL directly; writers may still use the pooler"
                .into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_file_is_read_as_postgresql_reads_it() {
        let wanted = ["db", "5432", "shop", "app"];
        let cases = [
            ("db:5432:shop:app:s3cret", Some("s3cret")),
            ("*:*:*:app:a:b", Some("a:b")),
            ("*:*:*:*:a\\:b\\\\", Some("a:b\\")),
            ("# db:5432:shop:app:x", None),
            ("other:5432:shop:app:x", None),
            ("db:5432:shop:app", None),
            ("", None),
        ];
        for (line, password) in cases {
            assert_eq!(password_in(line, &wanted).as_deref(), password, "{line}");
        }
    }
}
