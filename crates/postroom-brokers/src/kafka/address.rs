//! Pure: the URL of a cluster, as in `kafkas://user:password@one:9093,two:9093?mechanism=SCRAM-SHA-512`.

use percent_encoding::percent_decode_str;

use crate::tls::TlsFiles;

const PLAIN: &str = "kafka://";
const ENCRYPTED: &str = "kafkas://";
const PORT: u16 = 9092;
/// OAUTHBEARER and GSSAPI are not supported.
const MECHANISMS: [&str; 3] = ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"];

/// Brokers to begin with, and who we are.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Address {
    /// `HOST:PORT`, with commas between them.
    pub brokers: String,
    pub is_encrypted: bool,
    pub user: Option<User>,
    pub files: TlsFiles,
}

/// Who we are, by SASL.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct User {
    pub name: String,
    pub password: String,
    pub mechanism: &'static str,
}

impl Address {
    /// Reads it. What is wrong is told without the password.
    pub fn parse(url: &str) -> Result<Self, String> {
        let (url, files) = TlsFiles::taken_out_of(url, ENCRYPTED)?;
        let (is_encrypted, rest) = match (url.strip_prefix(PLAIN), url.strip_prefix(ENCRYPTED)) {
            (Some(rest), _) => (false, rest),
            (_, Some(rest)) => (true, rest),
            _ => return Err(format!("url must begin with {PLAIN} or, for TLS, with {ENCRYPTED}")),
        };
        let (user, hosts) = match rest.rsplit_once('@') {
            Some((user, hosts)) => (Some(user), hosts),
            None => (None, rest),
        };
        let (hosts, query) = hosts.split_once('?').unwrap_or((hosts, ""));
        let mut asked = None;
        for part in query.split('&').filter(|part| !part.is_empty()) {
            match part.split_once('=') {
                Some(("mechanism", name)) => asked = Some(name),
                _ => {
                    let name = part.split('=').next().unwrap_or_default();
                    return Err(format!(
                        "{name:?} in url is not known; there are mechanism, cacertfile, certfile and keyfile"
                    ));
                }
            }
        }
        let mechanism =
            MECHANISMS.into_iter().find(|known| asked.is_none_or(|asked| asked.eq_ignore_ascii_case(known)));
        let mechanism =
            mechanism.ok_or_else(|| format!("mechanism in url must be one of {}", MECHANISMS.join(", ")))?;
        let user = match user {
            None if asked.is_some() => return Err("mechanism in url needs a user and a password".to_owned()),
            None => None,
            Some(user) => {
                let (name, password) = user.split_once(':').ok_or("url has a user without a password")?;
                let decoded = |text| {
                    percent_decode_str(text).decode_utf8().map(|text| text.into_owned()).map_err(|_| {
                        "user and password in url must be UTF-8, with special characters percent-encoded".to_owned()
                    })
                };
                Some(User { name: decoded(name)?, password: decoded(password)?, mechanism })
            }
        };
        let brokers: Vec<String> = hosts.trim_end_matches('/').split(',').map(broker).collect::<Result<_, _>>()?;
        Ok(Self { brokers: brokers.join(","), is_encrypted, user, files })
    }

    /// Whether all brokers named are on this machine.
    pub fn is_here(&self) -> bool {
        let here = |broker: &str| {
            let host = broker.rsplit_once(':').map_or(broker, |(host, _)| host);
            host == "localhost"
                || host.trim_matches(['[', ']']).parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
        };
        self.brokers.split(',').all(here)
    }
}

fn broker(text: &str) -> Result<String, String> {
    let wrong = || format!("{text:?} in url is no HOST:PORT");
    let is_odd = |c: char| c.is_whitespace() || c.is_control() || "/@?#,".contains(c);
    // The colons of an IPv6 address stand in brackets.
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, port.parse().map_err(|_| wrong())?),
        _ => (text, PORT),
    };
    if host.is_empty() || host.contains(is_odd) || (host.contains(':') && !host.starts_with('[')) {
        return Err(wrong());
    }
    Ok(format!("{host}:{port}"))
}

/// The brokers of a URL, without user and password.
pub(super) fn shown(url: &str) -> String {
    Address::parse(url).map_or_else(|_| "(an url that cannot be read)".to_owned(), |address| address.brokers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_read() {
        let address = Address::parse("kafka://one,two:9093/").unwrap();
        assert_eq!((address.brokers.as_str(), address.is_encrypted), ("one:9092,two:9093", false));
        assert!(address.user.is_none() && !address.is_here());
        let address = Address::parse("kafkas://me:p%40ss%3a@[::1]:9093?mechanism=scram-sha-512").unwrap();
        let user = address.user.clone().unwrap();
        assert_eq!((user.name.as_str(), user.password.as_str(), user.mechanism), ("me", "p@ss:", "SCRAM-SHA-512"));
        assert!(address.is_encrypted && address.is_here() && address.brokers == "[::1]:9093");
    }

    #[test]
    fn what_is_wrong_is_told_without_the_password() {
        for (url, problem) in [
            ("amqp://x", "must begin with kafka://"),
            ("kafka://u:secret@h:x", "no HOST:PORT"),
            ("kafka://u:secret@h?mechanism=GSSAPI", "must be one of PLAIN"),
            ("kafka://h?mechanism=PLAIN", "needs a user"),
            ("kafka://secret@h", "without a password"),
            ("kafka://u:secret@h?ssl=1", "\"ssl\" in url is not known"),
            ("kafka://u:%ff@h", "must be UTF-8"),
            ("kafka://h?cacertfile=x", "require kafkas://"),
            ("kafka://", "no HOST:PORT"),
            ("kafka://::1:9092", "no HOST:PORT"),
        ] {
            let error = Address::parse(url).err().unwrap();
            assert!(error.contains(problem) && !error.contains("secret"), "{url}: {error}");
        }
        assert!(!shown("kafka://u:secret@h:x").contains("secret"));
        assert_eq!(shown("kafka://u:secret@h"), "h:9092");
    }
}
