//! What logs may show of a payload: a keyed hash, by which two log lines about the same bytes are recognised.

use std::fmt;
use std::sync::OnceLock;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::message::{Message, MessageId};

static KEY: OnceLock<Vec<u8>> = OnceLock::new();

/// Sets the key of this process; the first call counts. Without one a random key is made, and hashes of different processes
/// cannot be compared. Returns whether it was set.
pub fn set_log_key(key: impl Into<Vec<u8>>) -> bool {
    KEY.set(key.into()).is_ok()
}

/// The first 8 bytes of HMAC-SHA-256 (RFC 2104) of the payload, in hexadecimal digits, and its length.
pub fn fingerprint(message: &Message) -> impl fmt::Display {
    let key = KEY.get_or_init(|| {
        let (one, other) = (MessageId::new(), MessageId::new());
        [one.as_uuid().as_bytes().as_slice(), other.as_uuid().as_bytes()].concat()
    });
    // HMAC takes a key of any length.
    let hash = Hmac::<Sha256>::new_from_slice(key).map(|mut hmac| {
        hmac.update(&message.payload);
        hmac.finalize().into_bytes()
    });
    let hash = hash.map_or_else(|_| String::new(), |hash| hash[..8].iter().map(|byte| format!("{byte:02x}")).collect());
    format!("{hash} ({} bytes)", message.payload.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_bytes_have_the_same_fingerprint_and_others_do_not() {
        let of = |payload: &str| fingerprint(&Message::new("t", "k", payload.to_owned())).to_string();
        assert_eq!(of("4111-1111"), of("4111-1111"));
        assert_ne!(of("4111-1111"), of("4111-1112"));
        assert!(!of("4111-1111").contains("4111-1111") && of("4111-1111").ends_with(" (9 bytes)"));
    }
}
