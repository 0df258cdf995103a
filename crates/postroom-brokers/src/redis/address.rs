//! Pure: where a server is, and how a client proves itself.

use percent_encoding::percent_decode_str;
use postroom::redact_url;

use crate::tls::TlsFiles;

const PORT: u16 = 6379;

/// One server, as a URL names it.
#[derive(Clone)]
pub(super) struct Address {
    pub host: String,
    pub port: u16,
    /// `rediss://`: never without.
    pub tls: bool,
    pub files: TlsFiles,
    /// Both empty: a client that says nothing of itself. No user: the `default` one.
    pub user: String,
    pub password: String,
    pub database: u32,
}

impl Address {
    /// The server of a URL; or what is wrong, without its password.
    pub fn parse(url: &str) -> Result<Self, String> {
        let shown = redact_url(url);
        let (rest, files) = TlsFiles::taken_out_of(url, "rediss://")?;
        let (tls, rest) = match (rest.strip_prefix("redis://"), rest.strip_prefix("rediss://")) {
            (Some(rest), _) => (false, rest),
            (_, Some(rest)) => (true, rest),
            _ => return Err(format!("url {shown} must begin with redis:// or rediss://")),
        };
        let unreadable = || {
            format!(
                "url {shown} cannot be parsed; write redis://USER:PASSWORD@HOST:PORT/DATABASE, of which only HOST is required, with special \
                 characters percent-encoded (/ as %2f, @ as %40, : as %3a)"
            )
        };
        let decoded = |text: &str| percent_decode_str(text).decode_utf8().map(String::from).map_err(|_| unreadable());
        let (login, place) = rest.rsplit_once('@').unwrap_or(("", rest));
        let (user, password) = login.split_once(':').unwrap_or(("", login));
        let (place, database) = place.split_once('/').unwrap_or((place, ""));
        let database = if database.is_empty() { 0 } else { database.parse().map_err(|_| unreadable())? };
        let (host, port) = match place.rsplit_once(':') {
            // An IPv6 address has colons of its own, and stands in brackets.
            Some((host, port)) if !port.contains(']') => (host, port.parse().map_err(|_| unreadable())?),
            _ => (place, PORT),
        };
        let host = host.trim_start_matches('[').trim_end_matches(']');
        if host.is_empty() || host.contains(['/', '?', '#', ' ', ',']) {
            return Err(unreadable());
        }
        let (user, password) = (decoded(user)?, decoded(password)?);
        Ok(Self { host: host.to_owned(), port, tls, files, user, password, database })
    }

    /// Whether it is this machine.
    pub fn is_here(&self) -> bool {
        self.host == "localhost" || self.host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_read_and_wrong_ones_are_told_without_their_password() {
        let read = |url: &str| {
            let address = Address::parse(url).unwrap();
            (address.host, address.port, address.user, address.password, address.database, address.tls)
        };
        let of = |host: &str, port, user: &str, password: &str, database, tls| {
            (host.to_owned(), port, user.to_owned(), password.to_owned(), database, tls)
        };
        assert_eq!(read("redis://h"), of("h", 6379, "", "", 0, false));
        assert_eq!(read("rediss://relay:p%2f%40@h:1/7"), of("h", 1, "relay", "p/@", 7, true));
        assert_eq!(read("redis://:secret@[::1]:2/"), of("::1", 2, "", "secret", 0, false));
        assert_eq!(read("redis://secret@[::1]"), of("::1", 6379, "", "secret", 0, false));
        for url in [
            "amqp://u:secret@h",
            "redis://u:secret@",
            "redis://u:secret@h:x",
            "redis://u:secret@h/x",
            "redis://u:secret@a,b",
        ] {
            let error = Address::parse(url).err().unwrap();
            assert!(!error.contains("secret"), "{error}");
        }
    }
}
