//! Pure: what a server answers. <https://www.rfc-editor.org/rfc/rfc5321#section-4.2>

use bytes::BytesMut;

/// Longer ones, and more lines, are no answer.
const LINE_BYTES_MAX: usize = 2_048;
const LINES_MAX: usize = 100;

/// An answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Reply {
    pub code: u16,
    pub lines: Vec<String>,
}

impl Reply {
    /// The command was done.
    pub fn is_success(&self) -> bool {
        matches!(self.code, 250..=252)
    }

    /// It was not, by the rules of the protocol: an answer of another kind, or that commands come in the wrong order, is no refusal.
    pub fn is_refusal(&self) -> bool {
        (400..600).contains(&self.code) && self.code != 503
    }
}

impl std::fmt::Display for Reply {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.code, self.lines.join(" "))
    }
}

/// Takes the next answer out of what was read; none: it has not come whole.
pub(super) fn next(read: &mut BytesMut) -> Result<Option<Reply>, String> {
    let mut lines = Vec::new();
    let (mut at, mut first) = (0, None);
    loop {
        let rest = &read[at..];
        let Some(end) = rest.iter().position(|byte| *byte == b'\n') else {
            return if rest.len() > LINE_BYTES_MAX {
                Err("it answers with a line without an end".to_owned())
            } else {
                Ok(None)
            };
        };
        let line = String::from_utf8_lossy(&rest[..end]);
        let line = line.trim_end_matches('\r');
        let code = line.get(..3).filter(|code| code.bytes().all(|byte| byte.is_ascii_digit()));
        let code: Option<u16> = code.and_then(|code| code.parse().ok());
        let separated = matches!(line.as_bytes().get(3), None | Some(b' ' | b'-'));
        let code = code.filter(|code| separated && *first.get_or_insert(*code) == *code);
        let code = code.ok_or("it does not answer as SMTP does")?;
        if end > LINE_BYTES_MAX || lines.len() >= LINES_MAX {
            return Err("its answer is too long".to_owned());
        }
        lines.push(line.get(4..).unwrap_or_default().chars().map(|c| if c.is_control() { ' ' } else { c }).collect());
        at += end + 1;
        if line.as_bytes().get(3) != Some(&b'-') {
            let _ = read.split_to(at);
            return Ok(Some(Reply { code, lines }));
        }
    }
}

/// What a server can do.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Extensions {
    pub starttls: bool,
    pub eight_bit: bool,
    pub utf8_addresses: bool,
    /// Most bytes of a mail; none: it names no limit.
    pub size: Option<u64>,
    /// Ways to log in.
    pub logins: Vec<String>,
}

impl Extensions {
    pub fn of(reply: &Reply) -> Self {
        let mut found = Self::default();
        for line in reply.lines.iter().skip(1) {
            let upper = line.to_ascii_uppercase();
            let mut words = upper.split_whitespace();
            match words.next() {
                Some("STARTTLS") => found.starttls = true,
                Some("8BITMIME") => found.eight_bit = true,
                Some("SMTPUTF8") => found.utf8_addresses = true,
                Some("SIZE") => found.size = words.next().and_then(|size| size.parse().ok()).filter(|size| *size > 0),
                Some("AUTH") => found.logins = words.map(str::to_owned).collect(),
                _ => {}
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn answers_have_one_line_or_several() {
        let mut read = BytesMut::from(
            &b"250-mail.example.com\r\n250-SIZE 1000\r\n250-auth plain login\r\n250 STARTTLS\r\n354 go"[..],
        );
        let reply = next(&mut read).unwrap().unwrap();
        assert_eq!((reply.code, reply.lines.len()), (250, 4));
        let extensions = Extensions::of(&reply);
        assert_eq!((extensions.size, extensions.starttls, extensions.logins.len()), (Some(1000), true, 2));
        assert_eq!(next(&mut read), Ok(None));
        read.extend_from_slice(b" on\n");
        assert_eq!(next(&mut read).unwrap().unwrap().to_string(), "354 go on");
        assert_eq!(next(&mut BytesMut::from(&b"250\r\n"[..])).unwrap().unwrap().lines, [""]);
        for wrong in ["hello\r\n", "25\r\n", "2\u{e4}0 x\r\n", "2500 ok\r\n", "250-x\r\n251 y\r\n"] {
            assert!(next(&mut BytesMut::from(wrong)).is_err(), "{wrong:?}");
        }
        assert!(next(&mut BytesMut::from(&[b'2'; 3_000][..])).is_err());
    }

    proptest! {
        #[test]
        fn no_answer_is_too_strange(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut read = BytesMut::from(&bytes[..]);
            while let Ok(Some(reply)) = next(&mut read) {
                let _ = Extensions::of(&reply);
            }
        }
    }
}
