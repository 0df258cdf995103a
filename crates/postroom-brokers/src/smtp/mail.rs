//! Pure: a message as a mail.

use std::time::{Duration, SystemTime};

use lettre::message::header::{ContentTransferEncoding, ContentType};
use lettre::message::{Body, Mailbox, Mailboxes, MessageBuilder};
use lettre::{Address, Message as Mail};
use postroom::Message;

/// Headers of a message that say whom a mail is to, and so on. No other one is in the mail, which strangers read.
const TO: &str = "mail-to";
const CC: &str = "mail-cc";
const BCC: &str = "mail-bcc";
const FROM: &str = "mail-from";
const REPLY_TO: &str = "mail-reply-to";
const SUBJECT: &str = "mail-subject";
/// A payload that is a whole mail.
const WHOLE: &str = "message/rfc822";
const RECIPIENTS_MAX: usize = 100;
/// With a CR.
const LINE_BYTES_MAX: usize = 999;

/// Whom mails are from.
#[derive(Debug, Clone)]
pub(super) struct Sender(Mailbox);

impl Sender {
    pub fn parse(text: &str) -> Result<Self, String> {
        plain("it", text)?;
        text.parse().map(Self).map_err(|error| format!("{text:?} is no mail address: {error}"))
    }
}

impl Sender {
    /// Whether it is this one.
    pub fn is(&self, address: &Address) -> bool {
        self.0.email == *address
    }
}

/// A mail, and whom it goes from and to.
#[derive(Debug)]
pub(super) struct Letter {
    pub from: Address,
    pub to: Vec<Address>,
    pub bytes: Vec<u8>,
}

/// The mail of a message; or why there can be none.
pub(super) fn letter(sender: &Sender, message: &Message, now: SystemTime) -> Result<Letter, String> {
    let header = |name: &str| message.headers.get(name).filter(|text| !text.trim().is_empty());
    let boxes = |name: &str| -> Result<Vec<Mailbox>, String> {
        let Some(text) = header(name) else { return Ok(Vec::new()) };
        plain(&format!("its header {name}"), text)?;
        let boxes: Mailboxes =
            text.parse().map_err(|error| format!("its header {name} is no list of mail addresses: {error}"))?;
        Ok(boxes.into_iter().collect())
    };
    let (to, cc, bcc) = (boxes(TO)?, boxes(CC)?, boxes(BCC)?);
    let from = match boxes(FROM)?.as_slice() {
        [] => sender.0.clone(),
        [one] => one.clone(),
        _ => return Err(format!("its header {FROM} has several addresses")),
    };
    let recipients: Vec<Address> = [&to, &cc, &bcc].into_iter().flatten().map(|to| to.email.clone()).collect();
    if recipients.is_empty() || recipients.len() > RECIPIENTS_MAX {
        return Err(format!(
            "it has {} recipients in its headers {TO}, {CC} and {BCC}, and a mail needs 1 to {RECIPIENTS_MAX}",
            recipients.len()
        ));
    }
    let envelope = |bytes| Letter { from: from.email.clone(), to: recipients.clone(), bytes };
    if message.content_type.split(';').next().is_some_and(|kind| kind.trim().eq_ignore_ascii_case(WHOLE)) {
        let begins = message.payload.iter().position(|byte| *byte == b':').filter(|colon| *colon > 0);
        let name = message.payload.get(..begins.unwrap_or(0)).unwrap_or_default();
        if name.is_empty() || !name.iter().all(u8::is_ascii_graphic) || !has_lines(&message.payload) {
            return Err(
                "its payload is no mail: one begins with headers, and has no NUL and no CR by itself".to_owned()
            );
        }
        return lines_fit(envelope(message.payload.to_vec()));
    }
    let content_type = content_type(message)?;
    let subject = header(SUBJECT).unwrap_or(&message.kind);
    plain(&format!("its header {SUBJECT}"), subject)?;
    // By which a receiver knows a mail that comes twice.
    let id = format!("<{}@{}>", message.id, from.email.domain());
    let mut builder = MessageBuilder::new()
        .from(from.clone())
        .date(message.occurred_at.filter(is_date).unwrap_or(now))
        .subject(subject)
        .message_id(Some(id))
        .header(content_type);
    for to in to {
        builder = builder.to(to);
    }
    for cc in cc {
        builder = builder.cc(cc);
    }
    for bcc in bcc {
        builder = builder.bcc(bcc);
    }
    for reply_to in boxes(REPLY_TO)? {
        builder = builder.reply_to(reply_to);
    }
    let payload = message.payload.to_vec();
    // Line ends of a text are those of mails; of anything else, each byte counts.
    let is_text = message.content_type.get(..5).is_some_and(|start| start.eq_ignore_ascii_case("text/"));
    let body = match is_text && has_lines(&payload) {
        true => Ok(Body::new(payload)),
        false => Body::new_with_encoding(payload, ContentTransferEncoding::Base64),
    };
    let body = body.map_err(|_| "its payload cannot be encoded as base 64")?;
    let mail: Mail = builder.body(body).map_err(|error| format!("it makes no mail: {error}"))?;
    lines_fit(envelope(mail.formatted()))
}

/// Whether line ends are those of texts: no CR by itself, which servers take for one or not, and no NUL.
fn has_lines(text: &[u8]) -> bool {
    let lone = text.iter().enumerate().any(|(at, byte)| *byte == b'\r' && text.get(at + 1) != Some(&b'\n'));
    !lone && !text.contains(&0)
}

/// <https://www.rfc-editor.org/rfc/rfc5322#section-2.1.1>
fn lines_fit(letter: Letter) -> Result<Letter, String> {
    let longest = letter.bytes.split(|byte| *byte == b'\n').map(<[u8]>::len).max().unwrap_or_default();
    if longest > LINE_BYTES_MAX {
        return Err(format!(
            "as a mail it has a line of {longest} bytes, and {LINE_BYTES_MAX} are the most: shorten its subject, or the list of its recipients (mail-bcc has room for more)"
        ));
    }
    Ok(letter)
}

/// Whether a mail can be of that time: from 1970 to 9999.
fn is_date(at: &SystemTime) -> bool {
    const END: Duration = Duration::from_secs(253_402_300_800);
    at.duration_since(SystemTime::UNIX_EPOCH).is_ok_and(|since| since < END)
}

/// A text without its character set is UTF-8, if it can be.
fn content_type(message: &Message) -> Result<ContentType, String> {
    let text = message.content_type.as_str();
    plain("its content type", text)?;
    let lower = text.to_ascii_lowercase();
    let said =
        if lower.starts_with("text/") && !lower.contains("charset") && std::str::from_utf8(&message.payload).is_ok() {
            format!("{text}; charset=utf-8")
        } else {
            text.to_owned()
        };
    ContentType::parse(&said).map_err(|_| format!("its content type {text:?} is none of a mail"))
}

/// A line break would begin a header of somebody else's.
fn plain(what: &str, text: &str) -> Result<(), String> {
    match text.chars().find(|c| c.is_control()) {
        Some(c) => Err(format!("{what} has the control character {:?}, which no mail may have", c.to_string())),
        None => Ok(()),
    }
}

/// The bytes behind `DATA`: lines end with CR LF, one that begins with a dot gets another, and a lone dot ends all.
/// <https://www.rfc-editor.org/rfc/rfc5321#section-4.5.2>
pub(super) fn dotted(mail: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(mail.len() + mail.len() / 50 + 8);
    for line in mail.split_inclusive(|byte| *byte == b'\n') {
        let text = line.strip_suffix(b"\n").unwrap_or(line);
        let text = text.strip_suffix(b"\r").unwrap_or(text);
        if text.first() == Some(&b'.') {
            out.push(b'.');
        }
        // A CR by itself would end a line at some servers.
        out.extend(text.iter().filter(|byte| **byte != b'\r'));
        out.extend_from_slice(b"\r\n");
    }
    out.extend_from_slice(b".\r\n");
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(message: &Message) -> Result<Letter, String> {
        let sender = Sender::parse("Shop <shop@example.com>").unwrap();
        letter(&sender, message, SystemTime::UNIX_EPOCH + Duration::from_secs(86_400))
    }

    fn message() -> Message {
        Message::new("orders", "order.placed", "Grüße\n.\n")
            .content_type("text/plain")
            .header("mail-to", "Ann <ann@example.org>")
    }

    #[test]
    fn a_mail_has_what_its_message_says_and_nothing_else() {
        let message = message()
            .tenant("secret")
            .header("traceparent", "secret")
            .header("mail-subject", "Bestellung Ä")
            .header("mail-cc", "b@example.org, C <c@example.org>")
            .header("mail-bcc", "hidden@example.org")
            .header("mail-reply-to", "help@example.com");
        let letter = of(&message).unwrap();
        let text = String::from_utf8(letter.bytes).unwrap();
        let to: Vec<String> = letter.to.iter().map(ToString::to_string).collect();
        assert_eq!(to, ["ann@example.org", "b@example.org", "c@example.org", "hidden@example.org"]);
        assert_eq!(letter.from.to_string(), "shop@example.com");
        assert!(text.contains(&format!("Message-ID: <{}@example.com>", message.id)), "{text}");
        for part in [
            "From: Shop <shop@example.com>",
            "Cc: b@example.org",
            "Reply-To: help@example.com",
            "charset=utf-8",
            "1970",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(text.is_ascii() && !text.contains("secret") && !text.contains("hidden"), "{text}");
        let plain = Message { headers: [("mail-to".to_owned(), "a@b.c".to_owned())].into(), ..message };
        assert!(String::from_utf8(of(&plain).unwrap().bytes).unwrap().contains("Subject: order.placed"));
    }

    #[test]
    fn what_makes_no_mail_is_told() {
        let with = |name: &str, value: &str| of(&message().header(name, value)).unwrap_err();
        assert!(with("mail-to", "nobody").contains("no list of mail addresses"));
        assert!(with("mail-to", " ").contains("0 recipients"));
        assert!(with("mail-to", "a@b.c\r\nBcc: x@y.z").contains("control character"));
        assert!(with("mail-subject", "a\r\nBcc: x@y.z").contains("control character"));
        assert!(with("mail-from", "a@b.c, d@e.f").contains("several"));
        assert!(with("mail-cc", &vec!["a@b.c"; 100].join(",")).contains("101 recipients"));
        assert!(of(&message().content_type("nonsense")).unwrap_err().contains("content type"));
        assert!(Sender::parse("shop").is_err());
    }

    #[test]
    fn a_whole_mail_goes_as_it_is() {
        let whole = Message { payload: "From: x\r\n\r\n..y".into(), ..message().content_type("message/rfc822") };
        assert_eq!(of(&whole).unwrap().bytes, b"From: x\r\n\r\n..y");
        for wrong in ["", "just text", "From: x\r\n\r\na\r.\rb", "From: x\r\n\r\n\0"] {
            let wrong = Message { payload: wrong.into(), ..whole.clone() };
            assert!(of(&wrong).unwrap_err().contains("is no mail"), "{wrong:?}");
        }
        let long = whole.content_type("message/RFC822; x=y");
        let long = Message { payload: format!("From: x\r\n\r\n{}", "x".repeat(1_000)).into(), ..long };
        assert!(of(&long).unwrap_err().contains("a line of 1000 bytes"));
        assert!(of(&message().header("mail-subject", "x".repeat(1_000))).unwrap_err().contains("shorten its subject"));
        // A text whose lines are not those of a mail arrives byte for byte.
        let odd = Message { payload: "amount 100\r200".into(), ..message() };
        assert!(String::from_utf8(of(&odd).unwrap().bytes).unwrap().contains("base64"));
        assert_eq!(dotted(b"a\n.b\r\n.\rc"), b"a\r\n..b\r\n..c\r\n.\r\n");
        assert_eq!(dotted(b""), b".\r\n");
    }

    proptest! {
        #[test]
        fn no_message_is_too_strange(
            to in any::<String>(), subject in any::<String>(), content_type in any::<String>(), payload in any::<Vec<u8>>(),
            seconds in any::<i64>()
        ) {
            let whole = seconds.unsigned_abs() / 2;
            let at = if seconds < 0 {
                SystemTime::UNIX_EPOCH.checked_sub(Duration::from_secs(whole))
            } else {
                SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(whole))
            };
            let message = Message { occurred_at: at, payload: payload.into(), ..message() };
            let strange = message.clone().header("mail-subject", subject);
            let _ = of(&strange);
            let _ = of(&strange.header("mail-to", to));
            let _ = of(&message.content_type(content_type));
        }
    }
}
