//! `[admin]`: where a running postroom answers about itself.

use std::net::SocketAddr;
use std::path::Path;

use postroom_server::admin::{Role, Token};
use toml::{Table, Value};

use super::values::{did_you_mean, known, nearest, one_of, plain, text, truth};
use crate::exit::Failure;

const AT: &str = "admin.";
const ADMIN_KEYS: &[&str] = &["listen", "metrics_public", "tokens"];
const TOKEN_KEYS: &[&str] = &["name", "role", "sha256", "payloads"];
const ROLES: &[&str] = &["viewer", "operator", "admin"];
/// Where the listener is unless the configuration says otherwise.
const LISTEN: ([u8; 4], u16) = ([127, 0, 0, 1], 9470);

/// `[admin]`.
#[derive(Debug, Clone)]
pub struct Admin {
    pub listen: SocketAddr,
    /// Serve `/metrics` without a token.
    pub metrics_public: bool,
    pub tokens: Vec<Token>,
}

pub(super) fn read(table: &Table) -> Result<Admin, String> {
    known(table, ADMIN_KEYS, AT)?;
    let listen = match text(table, "listen", AT)? {
        None => SocketAddr::from(LISTEN),
        Some(listen) => listen.parse().map_err(|_| {
            format!("{AT}listen is {listen:?}; it must be an address and a port, such as \"127.0.0.1:9470\" or \"0.0.0.0:9470\"")
        })?,
    };
    let tokens = match table.get("tokens") {
        None => Vec::new(),
        Some(Value::Array(tokens)) => tokens
            .iter()
            .enumerate()
            .map(|(index, token)| read_token(token, &format!("{AT}tokens[{index}].")))
            .collect::<Result<Vec<_>, _>>()?,
        Some(_) => return Err(format!("{AT}tokens must be written as [[admin.tokens]]")),
    };
    for (index, token) in tokens.iter().enumerate() {
        if tokens[..index].iter().any(|other| other.name == token.name) {
            return Err(format!("two tokens are named {:?}; audit rows could not tell them apart", token.name));
        }
    }
    if tokens.is_empty() && !listen.ip().is_loopback() {
        return Err(format!(
            "{AT}listen is {listen}, which other machines can reach, and there are no [[admin.tokens]]; make one with \
             `postroom token NAME`, or listen on 127.0.0.1"
        ));
    }
    Ok(Admin { listen, metrics_public: truth(table, "metrics_public", AT)?.unwrap_or(false), tokens })
}

fn read_token(value: &Value, at: &str) -> Result<Token, String> {
    let token = value.as_table().ok_or_else(|| format!("{at} must be a table"))?;
    known(token, TOKEN_KEYS, at)?;
    let wanted = |key: &str| text(token, key, at)?.ok_or_else(|| format!("{at}{key} is missing"));
    let (name, role, sha256) = (wanted("name")?, wanted("role")?, wanted("sha256")?);
    plain(&name, &format!("{at}name"))?;
    if name.trim().is_empty() {
        return Err(format!("{at}name is empty; it is written to audit rows"));
    }
    let role = Role::of(&role).ok_or_else(|| {
        let hint = nearest(&role, ROLES).map_or_else(|| one_of(ROLES), did_you_mean);
        format!("{at}role is not known; {hint}")
    })?;
    // Not quoted: somebody may have written the token itself.
    let mut read = Token::new(name, role, &sha256).map_err(|error| format!("{at}{error}"))?;
    read.payloads = truth(token, "payloads", at)?.unwrap_or(false);
    if read.payloads && role == Role::Viewer {
        return Err(format!("{at}payloads requires the role operator or admin: seeing one leaves an audit row"));
    }
    Ok(read)
}

/// Where the process of this configuration listens; none: it does not.
pub fn listens_on(config: &Path) -> Result<Option<SocketAddr>, Failure> {
    Ok(super::load(config)?.admin.map(|admin| admin.listen))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use crate::config::tests::parse;

    fn admin(text: &str) -> Result<super::Admin, String> {
        let file = format!(
            "[store]\nurl = \"sqlite:x.db\"\n[[routes]]\nname = \"r\"\n[routes.sink]\nkind = \"stdout\"\n[admin]\n{text}"
        );
        parse(&file, &[]).map(|config| config.admin.unwrap())
    }

    #[test]
    fn a_listener_that_others_can_reach_requires_tokens() {
        assert_eq!(admin("").unwrap().listen.to_string(), "127.0.0.1:9470");
        for open in ["0.0.0.0:9470", "[::]:9470", "192.0.2.1:9470"] {
            let refused = admin(&format!("listen = {open:?}")).unwrap_err();
            assert!(refused.contains("other machines can reach"), "{refused}");
            let token = format!("[[admin.tokens]]\nname = \"a\"\nrole = \"viewer\"\nsha256 = \"{}\"", "0f".repeat(32));
            assert_eq!(admin(&format!("listen = {open:?}\n{token}")).unwrap().tokens.len(), 1);
        }
        assert!(admin("listen = \"9470\"").unwrap_err().contains("an address and a port"));
    }

    #[test]
    fn a_token_that_is_wrong_is_refused_and_not_quoted() {
        let token = |role: &str, sha256: &str| {
            format!("[[admin.tokens]]\nname = \"a\"\nrole = {role:?}\nsha256 = {sha256:?}\n")
        };
        let good = "0f".repeat(32);
        let refused = admin(&token("viewer", "postroom_secret")).unwrap_err();
        assert!(refused.contains("64 hexadecimal digits") && !refused.contains("secret"), "{refused}");
        assert!(admin(&token("veiwer", &good)).unwrap_err().contains("did you mean \"viewer\"?"));
        let twice = token("viewer", &good).repeat(2);
        assert!(admin(&twice).unwrap_err().contains("two tokens are named"));
        assert!(admin("listne = \"127.0.0.1:1\"").unwrap_err().contains("did you mean \"listen\"?"));
    }
}
