//! Pure: what no store can keep among the messages that wait, and what is replaced in text so that it can be kept at all.

use postroom::{Headers, KEY_BYTES_MAX, Message, NAME_BYTES_MAX, Received, UNREADABLE_HEADER};

/// Why a delivery cannot be kept among the messages that wait. It is kept as a dead one.
pub(crate) fn problem(received: &Received) -> Option<String> {
    let message = &received.message;
    if let Some(why) = message.headers.get(UNREADABLE_HEADER) {
        return Some(format!("its properties could not be read: {why}"));
    }
    if received.id.is_none() {
        return Some(format!("it carries no message id of postroom's; kept under the new id {}", message.id));
    }
    too_long(message)
}

/// Why a message cannot be kept: a part of it is longer than the column.
pub(crate) fn too_long(message: &Message) -> Option<String> {
    let topic = Some(message.topic.clone());
    let limits = [
        ("topic", &topic, NAME_BYTES_MAX),
        ("key", &message.key, KEY_BYTES_MAX),
        ("aggregate id", &message.aggregate_id, KEY_BYTES_MAX),
        ("tenant id", &message.tenant_id, KEY_BYTES_MAX),
        ("aggregate type", &message.aggregate_type, NAME_BYTES_MAX),
    ];
    let over = limits.into_iter().find(|(_, text, max)| text.as_ref().is_some_and(|text| text.len() > *max));
    over.map(|(what, _, max)| format!("its {what} has more than {max} bytes"))
}

/// Text columns hold no NUL; a message of somebody else's may have one in its properties.
pub(crate) fn without_nul(message: &mut Message) {
    each_text(message, |text| {
        if text.contains('\0') {
            *text = text.replace('\0', "\u{fffd}");
        }
    });
}

/// The message with a question mark for every character that a database of another encoding may be unable to hold.
pub(crate) fn in_ascii(message: &Message) -> Message {
    let plain = |text: &str| text.chars().map(|c| if c.is_ascii() && c != '\0' { c } else { '?' }).collect::<String>();
    let mut message = message.clone();
    each_text(&mut message, |text| *text = plain(text));
    let headers = std::mem::take(&mut message.headers);
    message.headers = headers.iter().map(|(name, value)| (plain(name), plain(value))).collect::<Headers>();
    message
}

fn each_text(message: &mut Message, mut change: impl FnMut(&mut String)) {
    change(&mut message.topic);
    change(&mut message.kind);
    change(&mut message.content_type);
    let texts = [
        &mut message.key,
        &mut message.routing_key,
        &mut message.tenant_id,
        &mut message.aggregate_type,
        &mut message.aggregate_id,
    ];
    texts.into_iter().flatten().for_each(change);
}

#[cfg(test)]
mod tests {
    use postroom::{Partition, Receipt};

    use super::*;

    fn received(message: Message) -> Received {
        let (receipt, partition) = (Receipt::new(1, 1), Partition::default());
        Received { receipt, partition, redelivered: false, id: Some(message.id), message }
    }

    #[test]
    fn what_no_store_can_keep_says_why() {
        let base = || Message::new("orders", "order.placed", "");
        assert_eq!(problem(&received(base().key("k".repeat(KEY_BYTES_MAX)))), None);
        let said = |received: &Received| problem(received).unwrap();
        assert!(said(&received(base().key("k".repeat(KEY_BYTES_MAX + 1)))).contains("key has more than 512 bytes"));
        let unreadable = said(&received(base().header(UNREADABLE_HEADER, "tables nested too deep")));
        assert!(unreadable.contains("tables nested too deep"));
        let without = Received { id: None, ..received(base()) };
        assert!(said(&without).contains("no message id") && said(&without).contains(&without.message.id.to_string()));
    }

    #[test]
    fn text_is_replaced_and_the_payload_is_not() {
        let message = Message::new("to\0pic", "k", vec![0, 0xff]).key("schl\u{fc}ssel").header("h\u{e9}", "\u{6f22}");
        let plain = in_ascii(&message);
        assert_eq!((plain.topic.as_str(), plain.key.as_deref()), ("to?pic", Some("schl?ssel")));
        assert_eq!(plain.headers.iter().next().unwrap(), (&"h?".to_owned(), &"?".to_owned()));
        assert_eq!(plain.payload, message.payload);
        let mut message = message;
        without_nul(&mut message);
        assert_eq!(message.topic, "to\u{fffd}pic");
    }
}
