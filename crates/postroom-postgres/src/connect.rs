//! Connecting: the URL, TLS, and what every session of ours is set to.

use std::sync::Arc;
use std::time::Duration;

use postroom::{BoxError, StoreError, Wake, redact_url};
use tokio::task::JoinHandle;
use tokio_postgres::config::SslMode;
use tokio_postgres::{AsyncMessage, CancelToken, Client, Config};
use tokio_postgres_rustls::MakeRustlsConnect;

use crate::link::store_error;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A peer that has not acknowledged data for so long is gone: a half-open link must not hang the relay.
const TCP_USER_TIMEOUT: Duration = Duration::from_secs(15);

/// A URL that does not name a PostgreSQL database.
#[derive(Debug, thiserror::Error)]
#[error("read database URL {shown}")]
pub struct InvalidUrl {
    shown: String,
    #[source]
    source: BoxError,
}

/// Opens connections to one database. Certificates are verified against the system's roots wherever TLS is used.
#[derive(Clone)]
pub struct Connector {
    config: Config,
    tls: MakeRustlsConnect,
    shown: String,
}

impl std::fmt::Debug for Connector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Connector").field(&self.shown).finish()
    }
}

impl Connector {
    /// Reads a `postgres://` URL. `sslmode` is `disable`, `prefer` (the default), `require` or `verify-full`; the last two
    /// are the same here, since a certificate that does not verify is never accepted.
    pub fn new(url: &str) -> Result<Self, InvalidUrl> {
        let invalid = |source: BoxError| InvalidUrl { shown: redact_url(url), source };
        let verify_full = url.contains("sslmode=verify-full");
        let mut config: Config = url
            .replace("sslmode=verify-full", "sslmode=require")
            .parse()
            .map_err(|error: tokio_postgres::Error| invalid(error.into()))?;
        if verify_full {
            config.ssl_mode(SslMode::Require);
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
        let mut roots = rustls::RootCertStore::empty();
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        let tls = rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| invalid(error.into()))?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Self { config, tls: MakeRustlsConnect::new(tls), shown: redact_url(url) })
    }

    /// The URL without its password.
    pub fn shown(&self) -> &str {
        &self.shown
    }

    /// Opens a connection whose notifications wake `wake`. The task ends when the connection does.
    pub(crate) async fn connect_listening(&self, wake: Wake) -> Result<(Client, JoinHandle<()>), StoreError> {
        let (client, mut connection) =
            self.config.connect(self.tls.clone()).await.map_err(|error| store_error("connect", error))?;
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
        self.open(&self.config).await
    }

    /// Opens a connection whose session begins with these settings, written as `-c name=value`. They are part of the start-up
    /// message and never a `set`: behind a pooler a `set` would stay on a connection that others use next.
    pub(crate) async fn connect_set(&self, settings: &str) -> Result<Client, StoreError> {
        let mut config = self.config.clone();
        let given = config.get_options().unwrap_or_default().to_owned();
        config.options(format!("{given} {settings}").trim());
        match self.open(&config).await {
            Err(StoreError::Unavailable { source, .. }) if refuses_settings(source.as_ref()) => Err(behind_a_pooler()),
            opened => opened,
        }
    }

    async fn open(&self, config: &Config) -> Result<Client, StoreError> {
        let failed = |error| store_error("connect", error);
        let (client, connection) = config.connect(self.tls.clone()).await.map_err(failed)?;
        // Such a database checks nothing, but would refuse to show us a row with bytes that are no UTF-8.
        let unchecked = connection.parameter("server_encoding") == Some("SQL_ASCII");
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a database connection ended");
            }
        });
        if unchecked {
            client.batch_execute("set client_encoding to 'SQL_ASCII'").await.map_err(failed)?;
        }
        Ok(client)
    }
}

/// PgBouncer answers so to a start-up message with settings that it does not know.
fn refuses_settings(error: &(dyn std::error::Error + 'static)) -> bool {
    let db = error.downcast_ref::<tokio_postgres::Error>().and_then(tokio_postgres::Error::as_db_error);
    db.is_some_and(|error| error.message().contains("startup parameter"))
}

/// Not PostgreSQL itself answers.
pub(crate) fn behind_a_pooler() -> StoreError {
    StoreError::Refused {
        what: "use this connection for a relay",
        source:
            "a connection pooler answers: the session's settings did not arrive, or its transactions run on several \
                 backends. Give the relay a URL that leads to PostgreSQL itself; writers may keep the pooler"
                .into(),
    }
}
