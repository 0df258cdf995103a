//! The TLS options of a URL, with the names that RabbitMQ's own URLs use: `cacertfile`, `certfile` and `keyfile`, files in PEM.
//! <https://www.rabbitmq.com/docs/uri-query-parameters>
//!
//! Certificates are always verified, and so is the server's name.

use std::path::{Path, PathBuf};

/// The files that a URL names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct TlsFiles {
    root: Option<PathBuf>,
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
}

impl TlsFiles {
    /// Takes them out of a URL, which needs the scheme `secure` (such as `amqps://`) to name any. Returns the rest of it.
    pub fn taken_out_of(url: &str, secure: &str) -> Result<(String, Self), String> {
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
        if !url.starts_with(secure) && files != Self::default() {
            return Err(format!("cacertfile, certfile and keyfile in url require {secure}, and this is not"));
        }
        let rest = rest.join("&");
        Ok((if rest.is_empty() { base.to_owned() } else { format!("{base}?{rest}") }, files))
    }

    /// Whether any is named.
    #[cfg(feature = "smtp")]
    pub fn has_any(&self) -> bool {
        *self != Self::default()
    }

    /// Whether a client certificate is named.
    #[cfg(feature = "amqp10")]
    pub fn has_certificate(&self) -> bool {
        self.certificate.is_some()
    }

    /// Reads the files, each time anew: certificates are replaced while a relay runs.
    pub fn read(&self) -> Result<TlsParts, String> {
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
        let root = self.root.as_deref().map(|file| pem("cacertfile", file, "CERTIFICATE")).transpose()?;
        let identity = match (&self.certificate, &self.key) {
            (Some(certificate), Some(key)) => {
                Some((pem("certfile", certificate, "CERTIFICATE")?, pem("keyfile", key, "PRIVATE KEY")?))
            }
            _ => None,
        };
        Ok(TlsParts { root, identity })
    }
}

/// What the files say, in PEM.
pub(crate) struct TlsParts {
    /// The CA of one's own.
    pub root: Option<String>,
    /// A client's certificate, and the key of it.
    pub identity: Option<(String, String)>,
}

/// For connections of our own.
#[cfg(any(
    feature = "amqp10",
    feature = "http",
    feature = "mqtt",
    feature = "nats",
    feature = "redis",
    feature = "smtp"
))]
mod client {
    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer};
    use rustls::{ClientConfig, RootCertStore};

    use super::TlsParts;

    impl TlsParts {
        /// A client that verifies the server against the system's roots, or against the CA of one's own.
        pub fn client(&self) -> Result<ClientConfig, String> {
            let certificates = |name: &str, pem: &str| -> Result<Vec<CertificateDer<'static>>, String> {
                let read: Result<_, _> = CertificateDer::pem_slice_iter(pem.as_bytes()).collect();
                read.map_err(|error| format!("{name}: {error}"))
            };
            let mut roots = RootCertStore::empty();
            match &self.root {
                None => {
                    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
                }
                Some(pem) => {
                    for certificate in certificates("cacertfile", pem)? {
                        roots.add(certificate).map_err(|error| format!("cacertfile: {error}"))?;
                    }
                }
            }
            let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
            let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
            let builder = builder.map_err(|error| error.to_string())?.with_root_certificates(roots);
            match &self.identity {
                None => Ok(builder.with_no_client_auth()),
                Some((certificate, key)) => {
                    let chain = certificates("certfile", certificate)?;
                    let key =
                        PrivateKeyDer::from_pem_slice(key.as_bytes()).map_err(|error| format!("keyfile: {error}"))?;
                    builder.with_client_auth_cert(chain, key).map_err(|error| format!("certfile and keyfile: {error}"))
                }
            }
        }
    }
}

/// What to do about an error of the handshake, where a person can do something.
#[cfg(any(
    feature = "amqp10",
    feature = "http",
    feature = "mqtt",
    feature = "nats",
    feature = "rabbitmq",
    feature = "redis",
    feature = "smtp"
))]
pub(crate) fn hint(error: &str) -> &'static str {
    if error.contains("UnknownIssuer") || error.contains("BadSignature") {
        " (no CA that this machine trusts issued the broker's certificate; for your own CA add cacertfile=/path/to/ca.pem to the url)"
    } else if error.contains("NotValidForName") || error.contains("not valid for name") {
        " (the broker's certificate is for another name; connect by one of its names)"
    } else if error.contains("CaUsedAsEndEntity") {
        " (the server uses the certificate of a CA as its own; issue one for the server)"
    } else if error.contains("AlertReceived") || error.contains("received fatal alert") {
        " (the broker may require a client certificate: add certfile=… and keyfile=… to the url)"
    } else if error.contains("InvalidContentType") || error.contains("corrupt message") {
        " (that port does not use TLS; a server may have another one for it, such as 5671 for amqps)"
    } else {
        ""
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_taken_out_of_the_url_and_the_rest_stays() {
        let (rest, files) = TlsFiles::taken_out_of(
            "amqps://u:p@mq/%2f?heartbeat=9&cacertfile=%2Fca%20x.pem&verify=verify_peer",
            "amqps://",
        )
        .unwrap();
        assert_eq!(rest, "amqps://u:p@mq/%2f?heartbeat=9");
        assert_eq!(files.root.as_deref(), Some(Path::new("/ca x.pem")));
        for (url, problem) in [
            ("amqps://mq/?verify=verify_none", "always verified"),
            ("amqps://mq/?certfile=x", "one of them is missing"),
            ("amqp://mq/?cacertfile=x", "require amqps://"),
        ] {
            let error = TlsFiles::taken_out_of(url, "amqps://").unwrap_err();
            assert!(error.contains(problem), "{error}");
        }
    }
}
