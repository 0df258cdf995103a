//! Pure: a broker of MQTT.

use crate::server_address::{Scheme, ServerAddress};

const SCHEME: Scheme = Scheme {
    plain: "mqtt://",
    encrypted: "mqtts://",
    certificates: "mqtts://",
    ports: (1883, 8883),
    login_is_user: true,
    form: "mqtt://USER:PASSWORD@HOST:PORT",
};

/// The broker of a URL; or what is wrong, without its password.
pub(super) fn parse(url: &str) -> Result<ServerAddress, String> {
    let server = ServerAddress::parse(url, &SCHEME)?;
    if !server.path.is_empty() {
        return Err(format!("{:?} behind the server is not understood: topics have keys of their own", server.path));
    }
    Ok(server)
}
