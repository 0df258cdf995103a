//! Pure: where one server is, and how a client proves itself, as a URL says it.

use std::net::IpAddr;

use percent_encoding::percent_decode_str;
use postroom::redact_url;

use crate::tls::TlsFiles;

/// How the URLs of a broker begin.
pub(crate) struct Scheme {
    pub plain: &'static str,
    /// Never without TLS.
    pub encrypted: &'static str,
    /// How URLs begin that may name certificates.
    pub certificates: &'static str,
    /// Where there is no port in the URL: that of either.
    pub ports: (u16, u16),
    /// Whether a login without a colon is a user; a password otherwise.
    pub login_is_user: bool,
    /// What may be in a URL, for people.
    pub form: &'static str,
}

/// One server, as a URL names it.
#[derive(Clone)]
pub(crate) struct ServerAddress {
    pub host: String,
    pub port: u16,
    pub tls: bool,
    pub files: TlsFiles,
    /// Both empty: a client that says nothing of itself.
    pub user: String,
    pub password: String,
    /// Behind the slash, if there is anything.
    pub path: String,
}

impl ServerAddress {
    /// The server of a URL; or what is wrong, without its password.
    pub fn parse(url: &str, scheme: &Scheme) -> Result<Self, String> {
        let shown = redact_url(url);
        let (rest, files) = TlsFiles::taken_out_of(url, scheme.certificates)?;
        let (tls, rest) = match (rest.strip_prefix(scheme.plain), rest.strip_prefix(scheme.encrypted)) {
            (Some(rest), _) => (false, rest),
            (_, Some(rest)) => (true, rest),
            _ => return Err(format!("url {shown} must begin with {} or {}", scheme.plain, scheme.encrypted)),
        };
        let unreadable = || {
            format!(
                "url {shown} cannot be parsed; write {}, of which only HOST is required, with special characters percent-encoded (/ as %2f, \
                 @ as %40, : as %3a)",
                scheme.form
            )
        };
        let decoded = |text: &str| percent_decode_str(text).decode_utf8().map(String::from).map_err(|_| unreadable());
        let (login, place) = rest.rsplit_once('@').unwrap_or(("", rest));
        let lone = if scheme.login_is_user { (login, "") } else { ("", login) };
        let (user, password) = login.split_once(':').unwrap_or(lone);
        let (place, path) = place.split_once('/').unwrap_or((place, ""));
        let (host, port) = match place.rsplit_once(':') {
            // An IPv6 address has colons of its own, and stands in brackets.
            Some((host, port)) if !port.contains(']') => (host, port.parse().map_err(|_| unreadable())?),
            _ => (place, if tls { scheme.ports.1 } else { scheme.ports.0 }),
        };
        let host = host.trim_start_matches('[').trim_end_matches(']');
        if host.is_empty() || host.contains(['/', '?', '#', ' ', ',']) || path.contains('/') {
            return Err(unreadable());
        }
        let (user, password) = (decoded(user)?, decoded(password)?);
        Ok(Self { host: host.to_owned(), port, tls, files, user, password, path: path.to_owned() })
    }

    /// Whether it is this machine.
    pub fn is_here(&self) -> bool {
        self.host == "localhost" || self.host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCHEME: Scheme = Scheme {
        plain: "redis://",
        encrypted: "rediss://",
        certificates: "rediss://",
        ports: (6379, 6380),
        login_is_user: false,
        form: "redis://USER:PASSWORD@HOST:PORT/DATABASE",
    };

    #[test]
    fn urls_are_read_and_wrong_ones_are_told_without_their_password() {
        let read = |url: &str| {
            let address = ServerAddress::parse(url, &SCHEME).unwrap();
            (address.host, address.port, address.user, address.password, address.path, address.tls)
        };
        let of = |host: &str, port, user: &str, password: &str, path: &str, tls| {
            (host.to_owned(), port, user.to_owned(), password.to_owned(), path.to_owned(), tls)
        };
        assert_eq!(read("redis://h"), of("h", 6379, "", "", "", false));
        assert_eq!(read("rediss://h"), of("h", 6380, "", "", "", true));
        assert_eq!(read("rediss://relay:p%2f%40@h:1/7"), of("h", 1, "relay", "p/@", "7", true));
        assert_eq!(read("redis://:secret@[::1]:2/"), of("::1", 2, "", "secret", "", false));
        assert_eq!(read("redis://secret@[::1]"), of("::1", 6379, "", "secret", "", false));
        let user = ServerAddress::parse("redis://relay@h", &Scheme { login_is_user: true, ..SCHEME }).unwrap();
        assert_eq!((user.user.as_str(), user.password.as_str()), ("relay", ""));
        for url in [
            "amqp://u:secret@h",
            "redis://u:secret@",
            "redis://u:secret@h:x",
            "redis://u:secret@h/x/y",
            "redis://u:secret@a,b",
        ] {
            let error = ServerAddress::parse(url, &SCHEME).err().unwrap();
            assert!(!error.contains("secret"), "{error}");
        }
    }
}
