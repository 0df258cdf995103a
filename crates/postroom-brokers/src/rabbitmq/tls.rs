//! The TLS options of a URL, with the names that RabbitMQ's own URLs use: `cacertfile`, `certfile` and `keyfile`, files in PEM.
//! <https://www.rabbitmq.com/docs/uri-query-parameters>
//!
//! Certificates are always verified, and so is the server's name.

use std::path::{Path, PathBuf};

use lapin::tcp::{OwnedIdentity, OwnedTLSConfig};

/// The files that a URL names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct TlsFiles {
    root: Option<PathBuf>,
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
}

impl TlsFiles {
    /// Takes them out of a URL. Returns the rest of it.
    pub fn taken_out_of(url: &str) -> Result<(String, Self), String> {
        let mut files = Self::default();
        let after_user = url.rfind('@').unwrap_or_default();
        let Some(at) = url.get(after_user..).and_then(|rest| rest.find('?')).map(|at| after_user + at) else {
            return Ok((url.to_owned(), files));
        };
        let (base, query) = (&url[..at], &url[at + 1..]);
        let mut rest = Vec::new();
        for part in query.split('&') {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            let value = percent_encoding::percent_decode_str(value).decode_utf8_lossy().into_owned();
            match name {
                "cacertfile" => files.root = Some(value.into()),
                "certfile" => files.certificate = Some(value.into()),
                "keyfile" => files.key = Some(value.into()),
                "verify" if value == "verify_peer" => {}
                "verify" => {
                    return Err(format!(
                        "verify={value} in url: certificates are always verified; for your own CA add \
                         cacertfile=/path/to/ca.pem"
                    ));
                }
                _ => rest.push(part),
            }
        }
        if files.certificate.is_some() != files.key.is_some() {
            return Err("certfile and keyfile in url must be given together; one of them is missing".to_owned());
        }
        if !url.starts_with("amqps://") && files != Self::default() {
            return Err("cacertfile, certfile and keyfile in url require amqps://, but this is amqp://".to_owned());
        }
        let rest = rest.join("&");
        Ok((if rest.is_empty() { base.to_owned() } else { format!("{base}?{rest}") }, files))
    }

    /// Reads the files, each time anew: certificates are replaced while a relay runs.
    pub fn read(&self) -> Result<OwnedTLSConfig, String> {
        let bytes = |name: &str, file: &Path| {
            std::fs::read(file).map_err(|error| format!("{name} {}: {error}", file.display()))
        };
        let pem = |name: &str, file: &Path, part: &str| {
            let text = String::from_utf8(bytes(name, file)?).unwrap_or_default();
            let there = text.contains("-----BEGIN ") && text.contains(part);
            if there {
                Ok(text)
            } else {
                Err(format!("{name} {}: the file has no {part} in PEM format", file.display()))
            }
        };
        let cert_chain = self.root.as_deref().map(|file| pem("cacertfile", file, "CERTIFICATE")).transpose()?;
        let identity = match (&self.certificate, &self.key) {
            (Some(certificate), Some(key)) => Some(OwnedIdentity::PKCS8 {
                pem: pem("certfile", certificate, "CERTIFICATE")?.into_bytes(),
                key: pem("keyfile", key, "PRIVATE KEY")?.into_bytes(),
            }),
            _ => None,
        };
        Ok(OwnedTLSConfig { identity, cert_chain })
    }
}

/// What to do about an error of the handshake, where a person can do something.
pub(super) fn hint(error: &str) -> &'static str {
    if error.contains("UnknownIssuer") || error.contains("BadSignature") {
        " (no CA that this machine trusts issued the broker's certificate; for your own CA add cacertfile=/path/to/ca.pem to the url)"
    } else if error.contains("NotValidForName") || error.contains("not valid for name") {
        " (the broker's certificate is for another name; connect by one of its names)"
    } else if error.contains("AlertReceived") || error.contains("received fatal alert") {
        " (the broker may require a client certificate: add certfile=… and keyfile=… to the url)"
    } else if error.contains("InvalidContentType") || error.contains("corrupt message") {
        " (that port does not use TLS; amqps is usually on port 5671)"
    } else {
        ""
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_taken_out_of_the_url_and_the_rest_stays() {
        let (rest, files) =
            TlsFiles::taken_out_of("amqps://u:p@mq/%2f?heartbeat=9&cacertfile=%2Fca%20x.pem&verify=verify_peer")
                .unwrap();
        assert_eq!(rest, "amqps://u:p@mq/%2f?heartbeat=9");
        assert_eq!(files.root.as_deref(), Some(Path::new("/ca x.pem")));
        for (url, problem) in [
            ("amqps://mq/?verify=verify_none", "always verified"),
            ("amqps://mq/?certfile=x", "one of them is missing"),
            ("amqp://mq/?cacertfile=x", "require amqps://"),
        ] {
            let error = TlsFiles::taken_out_of(url).unwrap_err();
            assert!(error.contains(problem), "{error}");
        }
    }
}
