//! Opens a connection with the settings that this store needs, and sorts what the server says.

use std::io::ErrorKind;
use std::net::IpAddr;
use std::time::Duration;

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Error, IoError, Opts, OptsBuilder, SslOpts};
use postroom::StoreError;

/// No locks on gaps, and each statement sees what was committed before it. The variable has another name on older servers.
const ISOLATION: &str = "set session transaction isolation level read committed";
/// What the server's own settings may change otherwise.
const SETTINGS: &str = "set session time_zone = '+00:00', innodb_lock_wait_timeout = 5, sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', \
                        autocommit = 1, completion_type = 'NO_CHAIN', sql_safe_updates = 0, sql_select_limit = 18446744073709551615";
/// A unique key has the value already.
pub(crate) const DUPLICATE_ENTRY: u16 = 1062;

/// What a `mysql://` or `mariadb://` URL says. A server that is not on this machine is spoken to over TLS, and its certificate is verified, unless the
/// URL says `require_ssl=false`.
pub fn options_of(url: &str) -> Result<Opts, StoreError> {
    let failed = |source: mysql_async::UrlError| StoreError::Refused {
        what: "read the URL of the database",
        source: source.into(),
    };
    // The driver knows one name for both.
    let driver_url = url.strip_prefix("mariadb://").map(|rest| format!("mysql://{rest}"));
    let opts = Opts::from_url(driver_url.as_deref().unwrap_or(url)).map_err(failed)?;
    let wants_plain =
        url.split_once('?').is_some_and(|(_, query)| query.split('&').any(|part| part == "require_ssl=false"));
    let builder = OptsBuilder::from_opts(opts.clone()).prefer_socket(false).tcp_nodelay(true);
    let host = opts.ip_or_hostname();
    let is_here = host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
    let secured = is_here || wants_plain || opts.ssl_opts().is_some();
    Ok(if secured { builder.into() } else { builder.ssl_opts(SslOpts::default()).into() })
}

/// A server that accepts a connection and says nothing is as good as away.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);

/// A connection with our settings.
pub(crate) async fn connect(opts: &Opts) -> Result<Conn, Error> {
    let connected = tokio::time::timeout(CONNECT_TIMEOUT, connected(opts)).await;
    connected.unwrap_or_else(|elapsed| Err(Error::Io(IoError::Io(std::io::Error::new(ErrorKind::TimedOut, elapsed)))))
}

async fn connected(opts: &Opts) -> Result<Conn, Error> {
    let mut conn = Conn::new(opts.clone()).await?;
    conn.query_drop(ISOLATION).await?;
    conn.query_drop(SETTINGS).await?;
    Ok(conn)
}

/// Sorts a driver error by what can be done about it. Numbers are those of the reference of server errors.
pub(crate) fn store_error(what: &'static str, error: Error) -> StoreError {
    let Error::Server(server) = &error else {
        // The connection, not the server, is at fault.
        return StoreError::Unavailable { what, source: error.into() };
    };
    match server.code {
        // No such table or column.
        1146 | 1054 => StoreError::Schema {
            problem: server.message.clone(),
            hint: "run `postroom migrate` on this database, unless a restore is running: then wait until it is complete",
        },
        // Shutting down, too many connections, killed, no such database, not writable now.
        1040 | 1049 | 1053 | 1077 | 1152 | 1158..=1161 | 1203 | 1226 | 1290 | 1792 | 1836 | 1927 | 3100 => {
            StoreError::Unavailable { what, source: error.into() }
        }
        // Locks, deadlocks, interrupted, disk full, statement took too long.
        1020 | 1021 | 1114 | 1205 | 1206 | 1213 | 1317 | 1637 | 1969 | 3024 | 3572 => {
            StoreError::Busy { what, source: error.into() }
        }
        _ => StoreError::Refused { what, source: error.into() },
    }
}
