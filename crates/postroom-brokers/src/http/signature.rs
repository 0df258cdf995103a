//! Pure: signatures by which a receiver knows who sent a request, as Standard Webhooks has them.
//! <https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md>

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::hmac::{HMAC_SHA256, Key, sign};

const PREFIX: &str = "whsec_";
/// What the specification asks for.
const SECRET_BYTES: std::ops::RangeInclusive<usize> = 24..=64;

/// Secrets; each request is signed with all of them, so that a receiver may still know the old one, or already the new one.
#[derive(Clone, Default)]
pub(super) struct Secrets(Vec<Key>);

impl Secrets {
    /// Reads secrets as they are handed out, `whsec_` and Base64. What is wrong is told without them.
    pub fn read(texts: &[String]) -> Result<Self, String> {
        let read = |(index, text): (usize, &String)| {
            let wrong = |what: &str| format!("secret {} in `secrets` {what}", index + 1);
            let encoded = text.strip_prefix(PREFIX).ok_or_else(|| wrong("does not begin with whsec_"))?;
            let bytes = STANDARD.decode(encoded).map_err(|_| wrong("is not Base64 behind whsec_"))?;
            if !SECRET_BYTES.contains(&bytes.len()) {
                return Err(wrong(
                    "must have 24 to 64 bytes before it is encoded; `echo whsec_$(openssl rand -base64 32)` makes one",
                ));
            }
            Ok(Key::new(HMAC_SHA256, &bytes))
        };
        texts.iter().enumerate().map(read).collect::<Result<_, _>>().map(Self)
    }

    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// The header `webhook-signature`; none without a secret.
    pub fn signature(&self, id: &str, timestamp: i64, body: &[u8]) -> Option<String> {
        let mut signed = format!("{id}.{timestamp}.").into_bytes();
        signed.extend_from_slice(body);
        let one = |key: &Key| format!("v1,{}", STANDARD.encode(sign(key, &signed)));
        let all: Vec<String> = self.0.iter().map(one).collect();
        (!all.is_empty()).then(|| all.join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of the specification's libraries.
    #[test]
    fn a_signature_is_that_of_the_specification() {
        let secrets = Secrets::read(&["whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw".to_owned()]).unwrap();
        let signature = secrets.signature("msg_p5jXN8AQM9LWM0D4loKWxJek", 1_614_265_330, br#"{"test": 2432232314}"#);
        assert_eq!(signature.unwrap(), "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
    }

    #[test]
    fn all_secrets_sign_and_what_is_wrong_is_told_without_them() {
        let secret = |byte: u8| format!("whsec_{}", STANDARD.encode([byte; 32]));
        let both = Secrets::read(&[secret(1), secret(2)]).unwrap().signature("a", 1, b"x").unwrap();
        let alone = Secrets::read(&[secret(2)]).unwrap().signature("a", 1, b"x").unwrap();
        assert!(both.ends_with(&alone) && both.split(' ').count() == 2);
        assert_eq!(Secrets::default().signature("a", 1, b"x"), None);
        for (text, told) in
            [("hunter2", "begin with whsec_"), ("whsec_hunter2!", "Base64"), ("whsec_aHVudGVyMg==", "24 to 64 bytes")]
        {
            let error = Secrets::read(&[text.to_owned()]).err().unwrap();
            assert!(error.contains(told) && !error.contains("hunter2") && !error.contains("aHVudGVyMg"), "{error}");
        }
    }
}
