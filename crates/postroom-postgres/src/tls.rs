//! What a URL asks for of TLS, and the client's side of it.
//!
//! Names and values are libpq's, but for what would be unsafe: there is no `prefer` and no `allow`, and a certificate that does not
//! verify is never accepted.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use postroom::BoxError;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use tokio_postgres::Config;
use tokio_postgres::config::{Host, SslMode};

/// What is verified.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verify {
    /// No TLS at all.
    Nothing,
    /// The certificate's issuer.
    Issuer,
    /// The issuer, and that the certificate is for the host that we connect to.
    IssuerAndName,
}

/// The part of a URL that is about TLS.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct TlsOptions {
    mode: Option<String>,
    root: Option<PathBuf>,
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
}

impl TlsOptions {
    /// Takes what is about TLS out of a URL. Returns the rest of it.
    pub fn taken_out_of(url: &str) -> (String, Self) {
        let mut options = Self::default();
        // A password that nobody escaped may hold a question mark.
        let after_user = url.rfind('@').unwrap_or_default();
        let Some(at) = url.get(after_user..).and_then(|rest| rest.find('?')).map(|at| after_user + at) else {
            return (url.to_owned(), options);
        };
        let (base, query) = (&url[..at], &url[at + 1..]);
        let mut rest = Vec::new();
        for part in query.split('&') {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            let value = percent_encoding::percent_decode_str(value).decode_utf8_lossy().into_owned();
            match name {
                "sslmode" => options.mode = Some(value),
                "sslrootcert" => options.root = Some(value.into()),
                "sslcert" => options.certificate = Some(value.into()),
                "sslkey" => options.key = Some(value.into()),
                _ => rest.push(part),
            }
        }
        let rest = rest.join("&");
        (if rest.is_empty() { base.to_owned() } else { format!("{base}?{rest}") }, options)
    }

    /// What is to be verified: as the URL says, else everything, but on this machine nothing.
    pub fn verify(&self, config: &Config) -> Result<Verify, BoxError> {
        match self.mode.as_deref() {
            None if self.is_about_certificates() => Ok(Verify::IssuerAndName),
            None if stays_on_this_machine(config) => Ok(Verify::Nothing),
            None | Some("verify-full" | "require") => Ok(Verify::IssuerAndName),
            Some("verify-ca") => Ok(Verify::Issuer),
            Some("disable") => Ok(Verify::Nothing),
            Some(mode @ ("prefer" | "allow")) => Err(format!(
                "sslmode={mode} would send the password to any server that answers, even without TLS; use sslmode=verify-full, with \
                 sslrootcert=FILE for your own CA, or sslmode=disable if the network is trusted"
            )
            .into()),
            Some(other) => {
                Err(format!("sslmode={other:?} is not known; use verify-full, verify-ca, or disable").into())
            }
        }
    }

    fn is_about_certificates(&self) -> bool {
        self.root.is_some() || self.certificate.is_some() || self.key.is_some()
    }

    /// Sets the connection up for it.
    pub fn client(&self, config: &mut Config) -> Result<ClientConfig, BoxError> {
        let verify = self.verify(config)?;
        config.ssl_mode(if verify == Verify::Nothing { SslMode::Disable } else { SslMode::Require });
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut roots = RootCertStore::empty();
        match &self.root {
            None => {
                roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            }
            Some(file) => {
                for certificate in certificates(file, "sslrootcert")? {
                    roots.add(certificate).map_err(|error| format!("sslrootcert {}: {error}", file.display()))?;
                }
            }
        }
        let builder = ClientConfig::builder_with_provider(provider.clone()).with_safe_default_protocol_versions()?;
        let builder = match verify {
            Verify::Issuer => {
                let inner = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider.clone())
                    .build()
                    .map_err(|error| format!("sslmode=verify-ca: {error}; name the CA with sslrootcert=FILE"))?;
                let verifier = Arc::new(AnyName { inner, provider });
                builder.dangerous().with_custom_certificate_verifier(verifier)
            }
            Verify::Nothing | Verify::IssuerAndName => builder.with_root_certificates(roots),
        };
        match (&self.certificate, &self.key) {
            (None, None) => Ok(builder.with_no_client_auth()),
            (Some(certificate), Some(key)) => {
                let chain = certificates(certificate, "sslcert")?;
                let shown = key.display();
                let key = PrivateKeyDer::from_pem_file(key)
                    .map_err(|error| format!("sslkey {shown}: {}", told(&error.to_string())))?;
                Ok(builder.with_client_auth_cert(chain, key).map_err(|error| format!("sslcert and sslkey: {error}"))?)
            }
            _ => Err("sslcert and sslkey must be given together; one of them is missing".into()),
        }
    }
}

fn told(error: &str) -> String {
    if error.contains("no items") { "it has no such part in PEM format".to_owned() } else { error.to_owned() }
}

fn certificates(file: &Path, option: &str) -> Result<Vec<CertificateDer<'static>>, BoxError> {
    let wrong =
        |error: rustls::pki_types::pem::Error| format!("{option} {}: {}", file.display(), told(&error.to_string()));
    let certificates: Vec<_> =
        CertificateDer::pem_file_iter(file).map_err(wrong)?.collect::<Result<_, _>>().map_err(wrong)?;
    if certificates.is_empty() {
        return Err(format!("{option} {}: the file has no certificate in PEM format", file.display()).into());
    }
    Ok(certificates)
}

/// Whether what is sent never leaves this machine.
fn stays_on_this_machine(config: &Config) -> bool {
    let host_stays = |host: &Host| match host {
        Host::Tcp(name) => {
            name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
        }
        #[cfg(unix)]
        Host::Unix(_) => true,
    };
    let addresses = config.get_hostaddrs();
    if addresses.is_empty() {
        config.get_hosts().iter().all(host_stays)
    } else {
        addresses.iter().all(IpAddr::is_loopback)
    }
}

/// Verifies everything but the name.
#[derive(Debug)]
struct AnyName {
    inner: Arc<WebPkiServerVerifier>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for AnyName {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        match self.inner.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now) {
            // The name is looked at last: everything else is well.
            Err(rustls::Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => Ok(ServerCertVerified::assertion()),
            verified => verified,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls12_signature(
            message,
            certificate,
            signature,
            &self.provider.signature_verification_algorithms,
        )
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls13_signature(
            message,
            certificate,
            signature,
            &self.provider.signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// What to do about an error of the handshake, where a person can do something.
pub(crate) fn hint(error: &(dyn std::error::Error + 'static)) -> Option<&'static str> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        let io = error.downcast_ref::<std::io::Error>().and_then(|io| io.get_ref());
        let tls = error.downcast_ref::<rustls::Error>().or_else(|| io.and_then(|inner| inner.downcast_ref()));
        match tls {
            Some(rustls::Error::InvalidCertificate(
                CertificateError::UnknownIssuer | CertificateError::BadSignature,
            )) => {
                return Some(
                    "the server's certificate was not issued by a CA that this machine trusts; for your own CA add \
                     sslrootcert=/path/to/ca.pem to the URL",
                );
            }
            Some(rustls::Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => {
                return Some(
                    "the server's certificate is for another name; connect by one of its names, or add sslmode=verify-ca to \
                     the URL if any server with a certificate from that CA is acceptable",
                );
            }
            Some(rustls::Error::AlertReceived(_)) => {
                return Some("the server may require a client certificate: add sslcert=… and sslkey=… to the URL");
            }
            _ => {}
        }
        if error.to_string().contains("server does not support TLS") {
            return Some(
                "the server offers no TLS; turn it on there, or add sslmode=disable to the URL if the network is trusted: \
                 the password and all messages are then sent unencrypted",
            );
        }
        cause = error.source();
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verified(url: &str) -> Result<Verify, String> {
        let (rest, options) = TlsOptions::taken_out_of(url);
        let config: Config = rest.parse().map_err(|error| format!("{error}"))?;
        options.verify(&config).map_err(|error| error.to_string())
    }

    #[test]
    fn off_this_machine_everything_is_verified_unless_the_url_says_otherwise() {
        for here in ["localhost", "127.0.0.1:5433", "[::1]", "127.8.8.8", "%2Fvar%2Frun"] {
            assert_eq!(verified(&format!("postgres://a:b@{here}/shop")), Ok(Verify::Nothing), "{here}");
        }
        for there in ["db", "10.0.0.7", "localhost.example.com", "127.0.0.1,db", "localhost/shop?hostaddr=10.0.0.7"] {
            assert_eq!(verified(&format!("postgres://a:b@{there}")), Ok(Verify::IssuerAndName), "{there}");
        }
        let cases = [
            ("db/shop?sslmode=disable", Verify::Nothing),
            ("db/shop?sslmode=require", Verify::IssuerAndName),
            ("db/shop?connect_timeout=3&sslmode=verify-ca", Verify::Issuer),
            ("localhost/shop?sslmode=verify-full", Verify::IssuerAndName),
            ("localhost/shop?sslrootcert=%2Fca.pem", Verify::IssuerAndName),
        ];
        for (rest, verify) in cases {
            assert_eq!(verified(&format!("postgres://a:b@{rest}")), Ok(verify), "{rest}");
        }
        for unsafe_mode in ["prefer", "allow"] {
            let error = verified(&format!("postgres://db/shop?sslmode={unsafe_mode}")).unwrap_err();
            assert!(error.contains("sslmode=verify-full") && error.contains("sslrootcert"), "{error}");
        }
        assert!(verified("postgres://db/shop?sslmode=verify_full").unwrap_err().contains("not known"));
    }

    #[test]
    fn the_rest_of_the_url_stays_as_it_was() {
        let (rest, options) = TlsOptions::taken_out_of("postgres://u:p%3Fq@db/shop?a=1&sslrootcert=%2Fx%20y&b=2");
        assert_eq!(rest, "postgres://u:p%3Fq@db/shop?a=1&b=2");
        assert_eq!(options.root.as_deref(), Some(Path::new("/x y")));
        assert_eq!(TlsOptions::taken_out_of("postgres://u:p?x@db/shop").0, "postgres://u:p?x@db/shop");
    }
}
