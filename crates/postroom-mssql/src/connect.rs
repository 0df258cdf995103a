//! Opens a connection with the settings that this store needs, and sorts what the server says.

use std::time::Duration;

use percent_encoding::percent_decode_str;
use postroom::{BoxError, StoreError};
use tiberius::error::{Error, IoErrorKind};
use tiberius::{AuthMethod, Client, Config, EncryptionLevel};
use tokio::net::TcpStream;
use tokio_util::compat::TokioAsyncWriteCompatExt;

use crate::conn::Conn;

/// What the server's own settings may change otherwise. Indexes on computed columns ask for the `ansi` ones. Each statement sees what was
/// committed before it; an error ends the whole transaction.
const SETTINGS: &str = "set ansi_nulls, ansi_padding, ansi_warnings, arithabort, concat_null_yields_null, quoted_identifier on; \
                        set numeric_roundabort off; set nocount off; set implicit_transactions off; set xact_abort on; \
                        set lock_timeout 5000; set transaction isolation level read committed; \
                        exec sp_set_session_context N'postroom', N'1'";
/// A unique constraint or a unique index has the value already.
const DUPLICATES: [u32; 2] = [2627, 2601];
const PORT: u16 = 1433;
/// A server that accepts a connection and says nothing is as good as away.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);

/// How a database is reached.
#[derive(Clone)]
pub struct Settings {
    host: String,
    port: u16,
    database: String,
    user: String,
    password: String,
    encrypt: bool,
    trusts_any_certificate: bool,
}

impl std::fmt::Debug for Settings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Settings({}:{}/{})", self.host, self.port, self.database)
    }
}

/// What a `sqlserver://USER:PASSWORD@HOST:PORT/DATABASE` URL says; `mssql://` is the same. It is spoken to over TLS, and the server's certificate is verified
/// against the system's roots, unless the URL says `trust_server_certificate=true` (any certificate will do) or `encrypt=false` (nothing is
/// encrypted, the password neither).
pub fn settings_of(url: &str) -> Result<Settings, StoreError> {
    read(url).map_err(|problem| StoreError::Refused {
        what: "read the URL of the database",
        source: format!("{problem}; it is sqlserver://USER:PASSWORD@HOST:PORT/DATABASE").into(),
    })
}

fn read(url: &str) -> Result<Settings, &'static str> {
    let rest = url.strip_prefix("sqlserver://").or_else(|| url.strip_prefix("mssql://"));
    let rest = rest.ok_or("it begins with neither sqlserver:// nor mssql://")?;
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, database) = rest.split_once('/').unwrap_or((rest, ""));
    let (login, address) = authority.rsplit_once('@').unwrap_or(("", authority));
    let (user, password) = login.split_once(':').unwrap_or((login, ""));
    let (host, port) = match address.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, rest)) => (host, rest.strip_prefix(':')),
        None => address.split_once(':').map_or((address, None), |(host, port)| (host, Some(port))),
    };
    let decoded = |text: &str| percent_decode_str(text).decode_utf8().map(String::from).map_err(|_| "it is not UTF-8");
    let mut settings = Settings {
        host: decoded(host)?,
        port: port.map_or(Ok(PORT), |port| port.parse().map_err(|_| "its port is no number from 1 to 65535"))?,
        database: decoded(database)?,
        user: decoded(user)?,
        password: decoded(password)?,
        encrypt: true,
        trusts_any_certificate: false,
    };
    for option in query.split('&').filter(|option| !option.is_empty()) {
        match option {
            "encrypt=true" | "trust_server_certificate=false" => {}
            "encrypt=false" => settings.encrypt = false,
            "trust_server_certificate=true" => settings.trusts_any_certificate = true,
            _ => {
                return Err(
                    "it has an option that is not known: encrypt and trust_server_certificate are, true or false",
                );
            }
        }
    }
    match settings.host.is_empty() || settings.database.is_empty() {
        true => Err("it has no host, or no database"),
        false => Ok(settings),
    }
}

impl Settings {
    fn config(&self) -> Config {
        let mut config = Config::new();
        config.host(&self.host);
        config.port(self.port);
        config.database(&self.database);
        config.application_name("postroom");
        config.authentication(AuthMethod::sql_server(&self.user, &self.password));
        config.encryption(if self.encrypt { EncryptionLevel::Required } else { EncryptionLevel::NotSupported });
        // How long to wait is known by whoever asks.
        config.command_timeout(None);
        if self.trusts_any_certificate {
            config.trust_cert();
        }
        config
    }
}

/// A connection with our settings.
pub async fn connect(settings: &Settings) -> Result<Conn, Error> {
    let connected = tokio::time::timeout(CONNECT_TIMEOUT, connected(settings)).await;
    connected.unwrap_or_else(|elapsed| Err(Error::Io { kind: IoErrorKind::TimedOut, message: elapsed.to_string() }))
}

async fn connected(settings: &Settings) -> Result<Conn, Error> {
    let mut settings = settings.clone();
    // A cluster may send us on to another server, once.
    for _ in 0..2 {
        let tcp = TcpStream::connect((settings.host.as_str(), settings.port)).await?;
        tcp.set_nodelay(true)?;
        match Client::connect(settings.config(), tcp.compat_write()).await {
            Err(Error::Routing { host, port }) => (settings.host, settings.port) = (host, port),
            driver => {
                let mut conn = Conn { driver: driver?, doubtful: false };
                conn.batch(SETTINGS).await?;
                return Ok(conn);
            }
        }
    }
    Err(Error::Protocol("the server sends its clients round in a circle".into()))
}

pub(crate) fn is_duplicate(error: &Error) -> bool {
    error.code().is_some_and(|code| DUPLICATES.contains(&code))
}

/// Sorts a driver error by what can be done about it. Numbers are those of the reference of database engine errors.
pub(crate) fn store_error(what: &'static str, error: Error) -> StoreError {
    let Error::Server(server) = &error else {
        return match error {
            // Something that is stored is not what it should be.
            Error::Conversion(_) => StoreError::Refused { what, source: BoxError::from(error) },
            // The connection, not the server, is at fault.
            error => StoreError::Unavailable { what, source: error.into() },
        };
    };
    match server.code() {
        // No such object or column.
        207 | 208 | 2812 => StoreError::Schema {
            problem: server.message().to_owned(),
            hint: "run `postroom migrate` on this database, unless a restore is running: then wait until it is complete",
        },
        // Shutting down, no such database or not open now, login refused for now, read only, moved, busy service (Azure).
        233
        | 596
        | 904
        | 922
        | 927
        | 942
        | 945
        | 952
        | 976
        | 978
        | 983
        | 3906
        | 4060
        | 4221
        | 6005
        | 10053
        | 10054
        | 10060
        | 10928
        | 10929
        | 17142
        | 17197
        | 18401
        | 40143
        | 40197
        | 40501
        | 40613
        | 49918..=49920 => StoreError::Unavailable { what, source: error.into() },
        // Deadlocks, locks, log or disk full, memory, resources.
        701 | 802 | 8628 | 40544 | 1101 | 1105 | 1204 | 1205 | 1222 | 3960 | 5169 | 8645 | 8651 | 9002 => {
            StoreError::Busy { what, source: error.into() }
        }
        _ => StoreError::Refused { what, source: error.into() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_read() {
        let settings = settings_of("sqlserver://sa:p%40ss@db.example:1444/shop?trust_server_certificate=true").unwrap();
        assert_eq!(format!("{settings:?}"), "Settings(db.example:1444/shop)");
        assert_eq!((settings.user.as_str(), settings.password.as_str()), ("sa", "p@ss"));
        assert!(settings.encrypt && settings.trusts_any_certificate);
        let settings = settings_of("mssql://u@[::1]/shop?encrypt=false").unwrap();
        assert_eq!((settings.host.as_str(), settings.port, settings.encrypt), ("::1", 1433, false));
        for wrong in
            ["postgres://x/y", "sqlserver://host", "sqlserver:///db", "sqlserver://h:0x/db", "mssql://h/db?encrypt=no"]
        {
            settings_of(wrong).unwrap_err();
        }
    }
}
