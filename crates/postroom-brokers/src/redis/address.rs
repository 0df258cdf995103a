//! Pure: a server of Redis, and which of its databases.

use crate::server_address::{Scheme, ServerAddress};

const SCHEME: Scheme = Scheme {
    plain: "redis://",
    encrypted: "rediss://",
    certificates: "rediss://",
    ports: (6379, 6379),
    login_is_user: false,
    form: "redis://USER:PASSWORD@HOST:PORT/DATABASE",
};

/// The `default` user is meant where none is named.
#[derive(Clone)]
pub(super) struct Address {
    pub server: ServerAddress,
    pub database: u32,
}

impl Address {
    /// The server of a URL; or what is wrong, without its password.
    pub fn parse(url: &str) -> Result<Self, String> {
        let server = ServerAddress::parse(url, &SCHEME)?;
        let database = if server.path.is_empty() { Ok(0) } else { server.path.parse() };
        let database =
            database.map_err(|_| format!("{:?} can be no database of Redis: they are numbers", server.path))?;
        Ok(Self { server, database })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_database_is_a_number() {
        let of = |url: &str| Address::parse(url).map(|address| address.database);
        assert_eq!((of("redis://h"), of("redis://h/"), of("redis://u:secret@h/7")), (Ok(0), Ok(0), Ok(7)));
        assert!(!of("redis://u:secret@h/x").unwrap_err().contains("secret"));
    }
}
