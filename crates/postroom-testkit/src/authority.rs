//! A certificate authority of the test's own, and what it issues.

use std::fs;
use std::path::{Path, PathBuf};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair};

/// A certificate and its key, as files in PEM.
#[derive(Debug, Clone)]
pub struct Issued {
    /// The certificate.
    pub certificate: PathBuf,
    /// Its key.
    pub key: PathBuf,
}

/// An authority whose files lie in one folder.
#[derive(Debug, Clone)]
pub struct Authority {
    /// Its own certificate, in PEM.
    pub root: PathBuf,
    /// For 127.0.0.1 and localhost.
    pub server: Issued,
    /// For a host of another name.
    pub elsewhere: Issued,
    /// For a client whose common name is given.
    pub client: Issued,
}

impl Authority {
    /// Issues everything into `dir`, which has to be there.
    ///
    /// # Panics
    /// If that fails.
    pub fn create(dir: &Path, client: &str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).expect("name an authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "postroom's tests");
        let key = KeyPair::generate().expect("make a key");
        let issuer = CertifiedIssuer::self_signed(params, key).expect("make an authority");
        let root = dir.join("root.pem");
        fs::write(&root, issuer.pem()).expect("write a certificate");
        let issue = |name: &str, names: &[&str], usage| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            let mut params = CertificateParams::new(names).expect("name a certificate");
            params.distinguished_name.push(DnType::CommonName, name);
            params.extended_key_usages = vec![usage];
            let key = KeyPair::generate().expect("make a key");
            let certificate = params.signed_by(&key, &issuer).expect("issue a certificate");
            let file = name.replace(|c: char| !c.is_ascii_alphanumeric(), "_");
            let issued = Issued { certificate: dir.join(format!("{file}.pem")), key: dir.join(format!("{file}.key")) };
            fs::write(&issued.certificate, certificate.pem()).expect("write a certificate");
            fs::write(&issued.key, key.serialize_pem()).expect("write a key");
            issued
        };
        let server = ExtendedKeyUsagePurpose::ServerAuth;
        Self {
            server: issue("server", &["127.0.0.1", "localhost"], server.clone()),
            elsewhere: issue("elsewhere", &["elsewhere.example"], server),
            client: issue(client, &[], ExtendedKeyUsagePurpose::ClientAuth),
            root,
        }
    }
}
