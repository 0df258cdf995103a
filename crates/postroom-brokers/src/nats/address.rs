//! Pure: where servers are, and how a client proves itself.

use std::path::Path;

use percent_encoding::percent_decode_str;
use postroom::redact_url;

use crate::tls::TlsFiles;

const PORT: u16 = 4222;

/// One server, as a URL names it.
#[derive(Clone)]
pub(super) struct Address {
    pub host: String,
    pub port: u16,
    /// `tls://`: never without.
    pub tls_required: bool,
    pub files: TlsFiles,
    pub login: Login,
}

/// How a client proves itself by what stands in a URL.
#[derive(Clone, Default, PartialEq, Eq)]
pub(super) enum Login {
    #[default]
    Nothing,
    Password(String, String),
    Token(String),
}

impl Address {
    /// The servers of a URL, which may be several with commas between them; or what is wrong, without its password.
    pub fn all(urls: &str) -> Result<Vec<Self>, String> {
        let all: Vec<Self> = urls.split(',').map(|url| Self::one(url.trim())).collect::<Result<_, _>>()?;
        Ok(all)
    }

    fn one(url: &str) -> Result<Self, String> {
        let shown = redact_url(url);
        let (rest, files) = TlsFiles::taken_out_of(url, "tls://")?;
        let (tls_required, rest) = match (rest.strip_prefix("nats://"), rest.strip_prefix("tls://")) {
            (Some(rest), _) => (false, rest),
            (_, Some(rest)) => (true, rest),
            _ => return Err(format!("url {shown} must begin with nats:// or tls://")),
        };
        let unreadable = || {
            format!(
                "url {shown} cannot be parsed; write nats://USER:PASSWORD@HOST:PORT or nats://TOKEN@HOST:PORT, with special characters \
                 percent-encoded (/ as %2f, @ as %40, : as %3a), and several with commas between them"
            )
        };
        let decoded = |text: &str| percent_decode_str(text).decode_utf8().map(String::from).map_err(|_| unreadable());
        let (login, place) = match rest.rsplit_once('@') {
            None => (Login::Nothing, rest),
            Some((login, place)) => match login.split_once(':') {
                Some((user, password)) => (Login::Password(decoded(user)?, decoded(password)?), place),
                None => (Login::Token(decoded(login)?), place),
            },
        };
        let place = place.strip_suffix('/').unwrap_or(place);
        let (host, port) = match place.rsplit_once(':') {
            // An IPv6 address has colons of its own, and stands in brackets.
            Some((host, port)) if !port.contains(']') => (host, port.parse().map_err(|_| unreadable())?),
            _ => (place, PORT),
        };
        let host = host.trim_start_matches('[').trim_end_matches(']');
        if host.is_empty() || host.contains(['/', '?', '#', ' ']) {
            return Err(unreadable());
        }
        Ok(Self { host: host.to_owned(), port, tls_required, files, login })
    }

    /// Whether it is this machine.
    pub fn is_here(&self) -> bool {
        self.host == "localhost" || self.host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
    }
}

/// All URLs without their passwords.
pub(super) fn shown(urls: &str) -> String {
    urls.split(',').map(|url| redact_url(url.trim())).collect::<Vec<_>>().join(",")
}

/// What a file of credentials holds: a token that names the user, and the key that proves it.
/// <https://docs.nats.io/using-nats/developer/connecting/creds>
pub(super) struct Credentials {
    pub jwt: String,
    seed: [u8; 32],
}

impl Credentials {
    /// Reads the file, each time anew: credentials are replaced while a relay runs.
    pub fn read(file: &Path) -> Result<Self, String> {
        let told = |problem: &str| format!("credentials_file {}: {problem}", file.display());
        let text = std::fs::read_to_string(file).map_err(|error| told(&error.to_string()))?;
        let part = |name: &str| {
            let mut lines = text.lines().skip_while(|line| !(line.starts_with("-----BEGIN") && line.contains(name)));
            lines.nth(1).map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('-'))
        };
        let jwt = part("USER JWT").ok_or_else(|| told("it has no USER JWT"))?;
        let seed = part("NKEY SEED").ok_or_else(|| told("it has no NKEY SEED"))?;
        let seed = seed_of(seed).ok_or_else(|| told("its NKEY SEED is no seed of a user"))?;
        Ok(Self { jwt: jwt.to_owned(), seed })
    }

    /// Signs what the server asks for; in base64 as NATS has it.
    pub fn sign(&self, nonce: &str) -> Result<String, String> {
        let key = ring::signature::Ed25519KeyPair::from_seed_unchecked(&self.seed);
        let key = key.map_err(|_| "credentials_file: its NKEY SEED is no key".to_owned())?;
        use base64::Engine;
        Ok(base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(key.sign(nonce.as_bytes()).as_ref()))
    }
}

/// The 32 bytes of a seed: base32 of two bytes that say what it is (`SU`: a user's seed), the seed, and a checksum.
fn seed_of(text: &str) -> Option<[u8; 32]> {
    let (mut bits, mut held, mut bytes) = (0u32, 0, Vec::new());
    for c in text.bytes() {
        let value = match c {
            b'A'..=b'Z' => c - b'A',
            b'2'..=b'7' => c - b'2' + 26,
            _ => return None,
        };
        bits = (bits << 5 | u32::from(value)) & 0xffff;
        held += 5;
        if held >= 8 {
            held -= 8;
            bytes.push((bits >> held & 0xff) as u8);
        }
    }
    let (content, checksum) = bytes.split_at_checked(34)?;
    let is_sum = checksum == crc16(content).to_le_bytes();
    (text.starts_with("SU") && is_sum).then(|| content[2..].try_into().ok()).flatten()
}

/// CRC-16/XMODEM, as nkeys use it. <https://github.com/nats-io/nkeys>
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |sum, byte| {
        (0..8)
            .fold(sum ^ (u16::from(*byte) << 8), |sum, _| if sum & 0x8000 == 0 { sum << 1 } else { sum << 1 ^ 0x1021 })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_read_and_wrong_ones_are_told_without_their_password() {
        let all = Address::all("nats://u:p%40@mq:4333, tls://tok@[::1]?cacertfile=/ca.pem,nats://mq/").unwrap();
        let at: Vec<(&str, u16, bool)> = all.iter().map(|a| (a.host.as_str(), a.port, a.tls_required)).collect();
        assert_eq!(at, [("mq", 4333, false), ("::1", PORT, true), ("mq", PORT, false)]);
        assert!(all[0].login == Login::Password("u".to_owned(), "p@".to_owned()));
        assert_eq!(shown("nats://t0k@mq,tls://u:p@mq"), "nats://***@mq,tls://u:***@mq");
        assert!(all[1].login == Login::Token("tok".to_owned()) && all[1].is_here());
        for url in
            ["amqp://u:secret@mq", "nats://u:secret@mq:x", "nats://u:secret@", "nats://u:secret@mq/?a", "mq:4222"]
        {
            let error = Address::all(url).err().unwrap();
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn a_seed_is_one_of_a_user_and_whole() {
        // Made of a seed of zeros by the rules of nkeys.
        let mut content = vec![0x95, 0];
        content.extend_from_slice(&[0; 32]);
        let mut all = content.clone();
        all.extend_from_slice(&crc16(&content).to_le_bytes());
        let (mut text, mut bits, mut held) = (String::new(), 0u32, 0);
        for byte in all {
            bits = bits << 8 | u32::from(byte);
            held += 8;
            while held >= 5 {
                held -= 5;
                text.push(char::from(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"[(bits >> held & 31) as usize]));
            }
            bits &= 0xff;
        }
        if held > 0 {
            text.push(char::from(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"[(bits << (5 - held) & 31) as usize]));
        }
        assert!(text.starts_with("SU"), "{text}");
        assert_eq!(seed_of(&text), Some([0; 32]));
        assert_eq!(seed_of(&text.replacen("AAAA", "AABA", 1)), None);
        assert_eq!(seed_of("SUx"), None);
    }
}
