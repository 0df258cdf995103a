//! Pure: URLs without their secrets.

/// What a query may say openly. Everything else in it may be a secret, whatever its name.
const OPEN: &[&str] = &[
    "application_name",
    "auth_mechanism",
    "cacertfile",
    "certfile",
    "channel_binding",
    "channel_max",
    "connect_timeout",
    "connection_timeout",
    "frame_max",
    "heartbeat",
    "hostaddr",
    "keyfile",
    "mode",
    "sslcert",
    "sslkey",
    "sslmode",
    "sslrootcert",
    "target_session_attrs",
];

/// Schemes of URLs in which what stands before the host without a password is a name. Elsewhere it may be a token.
const NAMES_USERS: &[&str] = &["amqp", "amqps", "mysql", "postgres", "postgresql"];

/// The URL without its password, and without what may be one: values of a query that are not known to be harmless, a port that is no
/// number, everything of a URL of which nobody can tell where the password ends.
pub fn redact_url(url: &str) -> String {
    // What our own advice says.
    const ADVICE: &[&str] = &[
        "USER:PASSWORD@HOST:PORT/DATABASE",
        "USER:PASSWORD@HOST:PORT/VHOST",
        "USER:PASSWORD@HOST:PORT",
        "TOKEN@HOST:PORT",
    ];
    if url.split_once("://").is_some_and(|(_, rest)| ADVICE.contains(&rest)) {
        return url.to_owned();
    }
    let Some((scheme, rest)) = url.split_once("://") else {
        // `sqlite:path` carries no credentials; `host=… password=…` strings, mistyped URLs and what was put in the wrong place may.
        let harmless = url.starts_with("sqlite:") && !url.contains('@') && !url.contains("//");
        return if harmless { url.to_owned() } else { "(redacted)".to_owned() };
    };
    if !scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c)) {
        return "(redacted)".to_owned();
    }
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let (authority, tail) = rest.split_at(end);
    // A password may hold `/`, `?`, `#` and `@` that nobody escaped: then it is not known where it ends.
    if tail.contains('@') || tail.contains('#') {
        return format!("{scheme}://(redacted)");
    }
    let (user_info, hosts) = match authority.rsplit_once('@') {
        Some((user_info, hosts)) => (Some(user_info), hosts),
        None => (None, authority),
    };
    let user_info = match user_info.map(|user_info| user_info.split_once(':').ok_or(user_info)) {
        Some(Ok((user, _))) => format!("{user}:***@"),
        // Without the colon a password would be a part of the name.
        Some(Err(user)) if !user.chars().all(|c| c.is_alphanumeric() || "_.-".contains(c)) => "***@".to_owned(),
        Some(Err(user)) if NAMES_USERS.contains(&scheme) => format!("{user}@"),
        Some(Err(_)) => "***@".to_owned(),
        None => String::new(),
    };
    let hosts: Vec<String> = hosts.split(',').map(redact_host).collect();
    let (path, query) = match tail.split_once('?') {
        Some((path, query)) => (path, Some(query)),
        None => (tail, None),
    };
    // A query whose question mark was forgotten.
    let path = if path.contains(['=', '&', ';']) { "/(redacted)" } else { path };
    let mut shown = format!("{scheme}://{user_info}{}{path}", hosts.join(","));
    if let Some(query) = query {
        let part = |part: &str| match part.split_once('=') {
            Some((name, _)) if OPEN.contains(&name) => part.to_owned(),
            Some((name, _)) if name.chars().all(|c| c.is_ascii_alphabetic() || c == '_') => format!("{name}=***"),
            _ => "***".to_owned(),
        };
        shown.push('?');
        shown.push_str(&query.split('&').map(part).collect::<Vec<_>>().join("&"));
    }
    shown
}

/// `user:password` without a host looks like a host and a port.
fn redact_host(host: &str) -> String {
    match host.split_once(':') {
        Some((name, port)) if !host.starts_with('[') && !port.chars().all(|c| c.is_ascii_digit()) => {
            format!("{name}:***")
        }
        _ => host.to_owned(),
    }
}

/// A text, such as an error of somebody else's, in which every URL is redacted.
pub fn redact_text(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("://") {
        let is_of_scheme = |c: char| c.is_ascii_alphanumeric() || "+-.".contains(c);
        let begin = rest[..at]
            .rfind(|c| !is_of_scheme(c))
            .map_or(0, |last| last + rest[last..].chars().next().map_or(1, char::len_utf8));
        let end =
            rest[at..].find(|c: char| c.is_whitespace() || "\"'`<>".contains(c)).map_or(rest.len(), |end| at + end);
        // The punctuation of the sentence.
        let end = begin + rest[begin..end].trim_end_matches([':', ',', ';', '.', ')']).len();
        shown.push_str(&rest[..begin]);
        shown.push_str(&redact_url(&rest[begin..end]));
        rest = &rest[end..];
    }
    shown.push_str(rest);
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_are_not_shown() {
        let cases = [
            ("postgres://app:s3cret@db:5432/shop?sslmode=require", "postgres://app:***@db:5432/shop?sslmode=require"),
            ("amqp://guest:p@ss@mq/%2f", "amqp://guest:***@mq/%2f"),
            ("postgres://db/shop?password=x&sslmode=b", "postgres://db/shop?password=***&sslmode=b"),
            ("postgres://db/shop?password=a@b", "postgres://(redacted)"),
            ("postgres://db/shop?options=-c%20x%3Ds3cret", "postgres://db/shop?options=***"),
            ("postgres://app:s3cret/shop", "postgres://app:***/shop"),
            ("postgres://app:x@a:1,b:2/shop", "postgres://app:***@a:1,b:2/shop"),
            ("postgres://app:x@[::1]:5432/shop", "postgres://app:***@[::1]:5432/shop"),
            ("sqlite:orders.db", "sqlite:orders.db"),
            ("sqlite:///var/lib/orders.db", "sqlite:///var/lib/orders.db"),
            ("host=db password=x", "(redacted)"),
            ("s3cret", "(redacted)"),
            ("postgres://h/x&password=s3cret", "postgres://h/(redacted)"),
            ("postgres://h/password=s3cret", "postgres://h/(redacted)"),
            ("postgres://app;s3cret@db/shop", "postgres://***@db/shop"),
            ("amqp//guest:s3cret@mq/x", "(redacted)"),
            ("guest:s3@cret@mq:5672", "(redacted)"),
            ("postgres://app@db/shop", "postgres://app@db/shop"),
            ("other://t0ken@host:1", "other://***@host:1"),
            ("postgres://app:s3/cr?et@db/shop?a=b", "postgres://(redacted)"),
        ];
        for (url, shown) in cases {
            assert_eq!(redact_url(url), shown);
        }
    }

    #[test]
    fn urls_in_a_text_are_redacted() {
        let text =
            "failed to reach amqp://u:s3cret@mq/x: \u{fc}postgres://a:s3/cret@b 'https://t:s3cret@h/?k=s3cret' end";
        let shown = redact_text(text);
        assert!(!shown.contains("s3") && shown.contains("amqp://u:***@mq/x") && shown.ends_with("' end"), "{shown}");
        assert_eq!(redact_text("nothing: // in here"), "nothing: // in here");
        let advice = "database URL pg://h/x?password=s3cret: write pg://USER:PASSWORD@HOST:PORT/DATABASE, with";
        let shown = "database URL pg://h/x?password=***: write pg://USER:PASSWORD@HOST:PORT/DATABASE, with";
        assert_eq!(redact_text(advice), shown);
    }

    /// Wherever a secret stands in a URL, and however that is mistyped, it is not shown.
    #[test]
    fn no_secret_is_shown_of_any_url() {
        const SECRET: &str = "Zq7";
        let wrapped = [
            "Zq7", "a@Zq7", "Zq7/b", "x?Zq7", "x#Zq7@y", "Zq7:9", "a&Zq7", "Zq7@", "%40Zq7", "a b Zq7", "[Zq7", "Zq7\n",
        ];
        let shapes = [
            "postgres://u:{}@h:5432/db",
            "postgres://u:{}@h/db?sslmode=disable",
            "postgres://u:{}@h1:1,h2:2/db",
            "postgres://u:{}@/db?host=h",
            "postgres://h/db?password={}",
            "postgres://h/db?user=u&passwd={}&sslmode=disable",
            "postgres://h/db?options={}",
            "postgres://u:{}/db",
            "postgres://u:{}",
            "postgres:/u:{}@h/db",
            "postgres//u:{}@h/db",
            "://u:{}@h/db",
            "u:{}@h/db",
            "amqps://u:{}@h/%2f?heartbeat=1",
            "host=h password={}",
            "PASSWORD={} host=h",
            "{}",
        ];
        for shape in shapes {
            // Without a host of its own, what follows an `@` is one.
            for secret in wrapped.into_iter().filter(|secret| shape.contains('@') || !secret.contains("@Zq7")) {
                let url = shape.replace("{}", secret);
                assert!(!redact_url(&url).contains(SECRET), "{url} is shown as {}", redact_url(&url));
            }
        }
    }
}
