//! Pure: the subject that a message is published to. <https://docs.nats.io/nats-concepts/subjects>

use postroom::Message;

use crate::template::Template;

/// A server ends a connection over a line of more than 4 KiB, in which the subject is not alone.
const BYTES_MAX: usize = 2_000;

/// The subject of a message, or why it cannot have one.
pub(super) fn of(template: &Template, message: &Message) -> Result<String, String> {
    let subject = template.of(message).map_err(|field| format!("the subject needs its {field}, and it has none"))?;
    check(&subject)?;
    Ok(subject)
}

/// Whether a message of an application may be published to it.
fn check(subject: &str) -> Result<(), String> {
    let problem = if subject.len() > BYTES_MAX {
        format!("is {} bytes long, and {BYTES_MAX} are possible", subject.len())
    } else if subject.chars().any(|c| c.is_whitespace() || c.is_control()) {
        "has a space or a control character".to_owned()
    } else if subject.split('.').any(str::is_empty) {
        "has an empty part: two dots together, or one at an end".to_owned()
    } else if subject.split('.').any(|part| part == "*" || part == ">") {
        "has a wildcard, which only subscriptions can have".to_owned()
    } else if subject.starts_with('$') || subject.starts_with("_INBOX.") {
        // What is published to `$JS.API` is an order to the server.
        "belongs to the server itself".to_owned()
    } else {
        return Ok(());
    };
    let shown: String = subject.chars().take(100).collect();
    Err(format!("the subject {shown:?} {problem}"))
}

/// Whether a stream, or a consumer, can have this name.
pub(super) fn check_name(what: &str, name: &str) -> Result<(), String> {
    let wrong = |c: char| c.is_whitespace() || c.is_control() || ".*>/\\".contains(c);
    if name.is_empty() || name.len() > 200 || name.chars().any(wrong) {
        return Err(format!("{what} {name:?}: a name has 1 to 200 characters, and no space, dot, *, >, / or \\ in it"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_message_becomes_an_order_to_the_server() {
        let template = Template::parse("{routing_key}").unwrap();
        let of = |routing_key: &str| of(&template, &Message::new("t", "k", "x").routing_key(routing_key));
        assert_eq!(of("orders.placed-1.ä").unwrap(), "orders.placed-1.ä");
        for (subject, problem) in [
            ("$JS.API.STREAM.DELETE.ORDERS", "server itself"),
            ("_INBOX.x", "server itself"),
            ("a b", "space"),
            ("a\r\nPUB x 0\r\n\r\n", "control"),
            ("a..b", "empty part"),
            (".a", "empty part"),
            ("a.*", "wildcard"),
            (">", "wildcard"),
        ] {
            assert!(of(subject).unwrap_err().contains(problem), "{subject}");
        }
        assert!(of(&"x".repeat(3_000)).unwrap_err().contains("3000 bytes"));
    }
}
