//! Pure: URLs without their secrets.

/// The URL without its password, and without query values whose name tells of a secret. What does not look like a URL is not shown at all beyond its
/// scheme, since nobody knows where the secret stands in it.
pub fn redact_url(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else {
        // `sqlite:path` and plain paths carry no credentials; `host=… password=…` strings do.
        // In a URL that is mistyped nobody knows where the secret begins, only that it ends at an `@`.
        return match url.rsplit_once('@') {
            _ if url.contains("password") => "(redacted)".to_owned(),
            Some((_, rest)) => format!("***@{rest}"),
            None => url.to_owned(),
        };
    };
    // The user-info ends at the last `@` of all: a password may hold `/`, `?` and `@` that nobody escaped.
    let (user_info, rest) = match rest.rsplit_once('@') {
        Some((user_info, rest)) => (Some(user_info), rest),
        None => (None, rest),
    };
    let (before_query, query) = match rest.split_once('?') {
        Some((before, query)) => (before, Some(query)),
        None => (rest, None),
    };
    let user_info = match user_info.map(|user_info| user_info.split_once(':').ok_or(user_info)) {
        Some(Ok((user, _))) => format!("{user}:***@"),
        Some(Err(user)) => format!("{user}@"),
        None => String::new(),
    };
    let mut shown = format!("{scheme}://{user_info}{before_query}");
    if let Some(query) = query {
        let parts: Vec<String> = query
            .split('&')
            .map(|part| match part.split_once('=') {
                Some((name, _)) if is_secret(name) => format!("{name}=***"),
                _ => part.to_owned(),
            })
            .collect();
        shown.push('?');
        shown.push_str(&parts.join("&"));
    }
    shown
}

fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    ["pass", "secret", "token", "key"].iter().any(|word| name.contains(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_are_not_shown() {
        let cases = [
            ("postgres://app:s3cret@db:5432/shop?sslmode=require", "postgres://app:***@db:5432/shop?sslmode=require"),
            ("amqp://guest:p@ss@mq/%2f", "amqp://guest:***@mq/%2f"),
            ("postgres://db/shop?password=x&a=b", "postgres://db/shop?password=***&a=b"),
            ("sqlite:orders.db", "sqlite:orders.db"),
            ("host=db password=x", "(redacted)"),
            ("amqp//guest:s3cret@mq/x", "***@mq/x"),
            ("guest:s3@cret@mq:5672", "***@mq:5672"),
            ("postgres://app@db/shop", "postgres://app@db/shop"),
            ("postgres://app:s3/cr?et@db/shop?a=b", "postgres://app:***@db/shop?a=b"),
        ];
        for (url, shown) in cases {
            assert_eq!(redact_url(url), shown);
        }
    }
}
