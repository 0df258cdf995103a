//! Pure: a broker of AMQP 1.0.

use crate::server_address::{Scheme, ServerAddress};

const SCHEME: Scheme = Scheme {
    plain: "amqp://",
    encrypted: "amqps://",
    certificates: "amqps://",
    ports: (5672, 5671),
    login_is_user: true,
    form: "amqp://USER:PASSWORD@HOST:PORT/VHOST",
};

/// The broker of a URL; or what is wrong, without its password.
pub(super) fn parse(url: &str) -> Result<ServerAddress, String> {
    let server = ServerAddress::parse(url, &SCHEME)?;
    if server.user.is_empty() && !server.password.is_empty() {
        return Err("url has a password and no user: write USER:PASSWORD@ before the host".to_owned());
    }
    Ok(server)
}

/// What the server is told that it is called. RabbitMQ reads its virtual host out of it.
/// <https://www.rabbitmq.com/docs/amqp#virtual-hosts>
pub(super) fn hostname(server: &ServerAddress) -> String {
    match percent_encoding::percent_decode_str(&server.path).decode_utf8() {
        Ok(path) if !path.is_empty() => format!("vhost:{path}"),
        _ => server.host.clone(),
    }
}
