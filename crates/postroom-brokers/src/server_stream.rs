//! A connection to one server, encrypted or not.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

#[cfg(any(feature = "amqp10", feature = "mqtt"))]
use tokio::io::AsyncWriteExt;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use crate::server_address::ServerAddress;
use crate::tls;

pub(crate) const CONNECT_WITHIN: Duration = Duration::from_secs(10);
/// Longest that a part of a buffer may take.
#[cfg(any(feature = "amqp10", feature = "mqtt"))]
pub(crate) const WRITTEN_WITHIN: Duration = Duration::from_secs(30);

/// What bytes go over.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// Waits for `opening`, which begins with [`connected`] and says the first words, for ten seconds.
pub(crate) async fn opened<T>(
    address: &ServerAddress,
    opening: impl Future<Output = Result<T, String>>,
) -> Result<T, String> {
    let at = format!("{}:{}", address.host, address.port);
    match timeout(CONNECT_WITHIN, opening).await {
        Ok(Ok(opened)) => Ok(opened),
        Ok(Err(problem)) => Err(format!("{at}: {problem}{}", tls::hint(&problem))),
        Err(_) => {
            let hint = if address.tls { " (does that port use TLS?)" } else { "" };
            Err(format!("{at}: no answer within {} s{hint}", CONNECT_WITHIN.as_secs()))
        }
    }
}

/// A connection on which nothing was said yet.
pub(crate) async fn connected(address: &ServerAddress) -> Result<Box<dyn Stream>, String> {
    let told = |error: std::io::Error| error.to_string();
    let tcp = TcpStream::connect((address.host.as_str(), address.port)).await.map_err(told)?;
    tcp.set_nodelay(true).map_err(told)?;
    if address.tls { encrypted(address, Box::new(tcp)).await } else { Ok(Box::new(tcp)) }
}

/// The same connection, encrypted from here on.
pub(crate) async fn encrypted(address: &ServerAddress, plain: Box<dyn Stream>) -> Result<Box<dyn Stream>, String> {
    let config = address.files.read()?.client()?;
    let server = rustls::pki_types::ServerName::try_from(address.host.clone()).map_err(|error| error.to_string())?;
    let encrypted = TlsConnector::from(Arc::new(config)).connect(server, plain).await;
    Ok(Box::new(encrypted.map_err(|error| error.to_string())?))
}

/// Writes all of it, within half a minute.
#[cfg(any(feature = "amqp10", feature = "mqtt"))]
pub(crate) async fn write(stream: &mut Box<dyn Stream>, bytes: &[u8]) -> Result<(), String> {
    if bytes.is_empty() {
        return Ok(());
    }
    let written = timeout(WRITTEN_WITHIN, async {
        stream.write_all(bytes).await?;
        stream.flush().await
    });
    let written =
        written.await.map_err(|_| format!("the server has taken nothing for {} s", WRITTEN_WITHIN.as_secs()))?;
    written.map_err(|error| error.to_string())
}
