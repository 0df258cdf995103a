//! Who may ask for what.

use std::fmt;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use sha2::{Digest, Sha256};

/// What a token may do; each may do what those before it may.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Look.
    Viewer,
    /// Act on messages, keys and dead letters.
    Operator,
    /// Change and forget routes.
    Admin,
}

impl Role {
    /// Its name in the configuration.
    pub fn of(word: &str) -> Option<Self> {
        match word {
            "viewer" => Some(Self::Viewer),
            "operator" => Some(Self::Operator),
            "admin" => Some(Self::Admin),
            _ => None,
        }
    }

    /// Its name in the configuration.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Viewer => "viewer",
            Self::Operator => "operator",
            Self::Admin => "admin",
        }
    }
}

/// A token as the configuration has it: its hash. The token itself is random and long, so a plain hash cannot be guessed back.
#[derive(Debug, Clone)]
pub struct Token {
    /// Who has it, for the log and the audit rows.
    pub name: String,
    /// What it may do.
    pub role: Role,
    /// Its owner may see payloads.
    pub payloads: bool,
    digest: [u8; 32],
}

/// A hash that is not one.
#[derive(Debug, thiserror::Error)]
#[error("sha256 must be 64 hexadecimal digits, as `postroom token` prints them")]
pub struct InvalidToken;

impl Token {
    /// From the hash in hexadecimal digits.
    pub fn new(name: impl Into<String>, role: Role, sha256: &str) -> Result<Self, InvalidToken> {
        let mut digest = [0; 32];
        if sha256.len() != 64 || !sha256.is_ascii() {
            return Err(InvalidToken);
        }
        for (index, byte) in digest.iter_mut().enumerate() {
            let digits = sha256.get(index * 2..index * 2 + 2).ok_or(InvalidToken)?;
            *byte = u8::from_str_radix(digits, 16).map_err(|_| InvalidToken)?;
        }
        Ok(Self { name: name.into(), role, payloads: false, digest })
    }
}

/// A token that was just made.
pub struct NewToken {
    /// What its owner sends; shown once.
    pub secret: String,
    /// What the configuration gets.
    pub sha256: String,
}

impl fmt::Debug for NewToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NewToken").field("sha256", &self.sha256).finish_non_exhaustive()
    }
}

impl NewToken {
    /// From 32 random bytes.
    pub fn from_random(bytes: [u8; 32]) -> Self {
        let secret = format!("postroom_{}", hex(&bytes));
        let sha256 = hex(&Sha256::digest(secret.as_bytes()));
        Self { secret, sha256 }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Who asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Admitted {
    pub name: String,
    pub role: Role,
    pub payloads: bool,
}

/// Why somebody gets nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refused {
    /// No token, or one that nobody has.
    Unknown,
    /// A token that may not do this.
    Role(Role),
    /// Too many wrong tokens: none is looked at for a moment.
    TooMany,
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        match self {
            Self::Unknown => (
                StatusCode::UNAUTHORIZED,
                [(header::WWW_AUTHENTICATE, "Bearer")],
                "a token is required: Authorization: Bearer TOKEN\n",
            )
                .into_response(),
            Self::Role(role) => {
                (StatusCode::FORBIDDEN, format!("this requires a token with the role {}\n", role.as_str()))
                    .into_response()
            }
            Self::TooMany => (StatusCode::TOO_MANY_REQUESTS, [(header::RETRY_AFTER, "10")], "too many wrong tokens\n")
                .into_response(),
        }
    }
}

/// Wrong tokens in this time, after which none is looked at until the time is over.
const WRONG_MAX: u32 = 20;
const WRONG_WITHIN: Duration = Duration::from_secs(10);

/// Decides who gets what.
#[derive(Debug)]
pub(super) struct Guard {
    tokens: Vec<Token>,
    pub metrics_public: bool,
    wrong: Mutex<(Instant, u32)>,
}

impl Guard {
    pub fn new(tokens: Vec<Token>, metrics_public: bool) -> Self {
        Self { tokens, metrics_public, wrong: Mutex::new((Instant::now(), 0)) }
    }

    /// Who sends these headers, if they may do what this role may. Without tokens everybody who reaches the listener may look.
    pub fn admit(&self, headers: &HeaderMap, needed: Role) -> Result<Admitted, Refused> {
        if self.tokens.is_empty() {
            let local = Admitted { name: "local".to_owned(), role: Role::Viewer, payloads: false };
            return if needed <= local.role { Ok(local) } else { Err(Refused::Role(needed)) };
        }
        let given = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        // The scheme's name is the same in upper and lower case (RFC 9110, section 11.1).
        let given = given.and_then(|value| value.split_once(' '));
        let Some((_, given)) = given.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("Bearer")) else {
            return Err(Refused::Unknown);
        };
        if self.too_many(false) {
            return Err(Refused::TooMany);
        }
        let digest: [u8; 32] = Sha256::digest(given.trim().as_bytes()).into();
        let Some(token) = self.tokens.iter().find(|token| same(&token.digest, &digest)) else {
            self.too_many(true);
            return Err(Refused::Unknown);
        };
        if token.role < needed {
            return Err(Refused::Role(needed));
        }
        Ok(Admitted { name: token.name.clone(), role: token.role, payloads: token.payloads })
    }

    /// Whether too many wrong tokens came; `one_more` counts one.
    fn too_many(&self, one_more: bool) -> bool {
        let mut wrong = self.wrong.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if wrong.0.elapsed() > WRONG_WITHIN {
            *wrong = (Instant::now(), 0);
        }
        wrong.1 = wrong.1.saturating_add(u32::from(one_more));
        wrong.1 >= WRONG_MAX
    }

    /// Without tokens the listener trusts this machine; a page of the web whose name was made to point here is not of this machine.
    pub fn refuses_host(&self, headers: &HeaderMap) -> bool {
        if !self.tokens.is_empty() {
            return false;
        }
        if headers.get_all(header::HOST).iter().count() != 1 {
            return true;
        }
        let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
        !is_local(host)
    }

    /// The same of a request with a whole URI, whose host counts.
    pub fn refuses_authority(&self, uri: &axum::http::Uri) -> bool {
        self.tokens.is_empty() && uri.authority().is_some_and(|authority| !is_local(authority.as_str()))
    }
}

/// A host, with or without a port, that can only be this machine.
fn is_local(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    };
    let loopback = name.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback());
    loopback || name.eq_ignore_ascii_case("localhost")
}

/// Compares without telling by its time where they differ.
fn same(one: &[u8; 32], other: &[u8; 32]) -> bool {
    one.iter().zip(other).fold(0, |differences, (a, b)| differences | (a ^ b)) == 0
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn asking(name: header::HeaderName, value: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(name, value.parse().unwrap());
        headers
    }

    fn token(role: Role, random: u8) -> (Token, HeaderMap) {
        let new = NewToken::from_random([random; 32]);
        let headers = asking(header::AUTHORIZATION, &format!("bearer {}", new.secret));
        (Token::new("grafana", role, &new.sha256).unwrap(), headers)
    }

    #[test]
    fn a_token_may_do_what_its_role_may() {
        let (viewer, as_viewer) = token(Role::Viewer, 1);
        let (admin, as_admin) = token(Role::Admin, 2);
        let guard = Guard::new(vec![viewer, admin], false);
        assert!(guard.admit(&as_viewer, Role::Viewer).is_ok_and(|who| who.name == "grafana"));
        assert_eq!(guard.admit(&as_viewer, Role::Operator), Err(Refused::Role(Role::Operator)));
        assert!(guard.admit(&as_admin, Role::Operator).is_ok());
        assert_eq!(guard.admit(&HeaderMap::new(), Role::Viewer), Err(Refused::Unknown));
        let (_, of_nobody) = token(Role::Admin, 3);
        assert_eq!(guard.admit(&of_nobody, Role::Viewer), Err(Refused::Unknown));
    }

    #[test]
    fn after_many_wrong_tokens_none_is_looked_at() {
        let (viewer, as_viewer) = token(Role::Viewer, 1);
        let (_, of_nobody) = token(Role::Viewer, 2);
        let guard = Guard::new(vec![viewer], false);
        for _ in 0..WRONG_MAX {
            assert_eq!(guard.admit(&of_nobody, Role::Viewer), Err(Refused::Unknown));
        }
        assert_eq!(guard.admit(&as_viewer, Role::Viewer), Err(Refused::TooMany));
        *guard.wrong.lock().unwrap() = (Instant::now() - WRONG_WITHIN * 2, WRONG_MAX);
        assert!(guard.admit(&as_viewer, Role::Viewer).is_ok());
    }

    #[test]
    fn without_tokens_this_machine_may_look_and_nothing_else() {
        let guard = Guard::new(Vec::new(), false);
        assert!(guard.admit(&HeaderMap::new(), Role::Viewer).is_ok());
        assert_eq!(guard.admit(&HeaderMap::new(), Role::Operator), Err(Refused::Role(Role::Operator)));
        for (host, refused) in [
            ("127.0.0.1:9470", false),
            ("localhost:9470", false),
            ("[::1]:9470", false),
            ("attacker.example:9470", true),
            ("127.0.0.1.attacker.example", true),
        ] {
            assert_eq!(guard.refuses_host(&asking(header::HOST, host)), refused, "{host}");
        }
        assert!(guard.refuses_host(&HeaderMap::new()));
    }

    #[test]
    fn a_hash_is_64_digits() {
        assert!(Token::new("x", Role::Viewer, "abc").is_err());
        assert!(Token::new("x", Role::Viewer, &"g".repeat(64)).is_err());
        assert!(Token::new("x", Role::Viewer, &"é".repeat(32)).is_err());
        assert!(Token::new("x", Role::Viewer, &"0f".repeat(32)).is_ok());
    }
}
