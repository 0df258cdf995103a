//! A PostgreSQL that speaks TLS.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use super::PostgresServer;

impl PostgresServer {
    /// From now on it offers TLS with this certificate, and takes no connection over TCP without; a role named in `by_certificate`
    /// has to show a certificate of `root` with its name.
    ///
    /// # Errors
    /// When a file cannot be copied to where its account can read it, or it cannot be asked.
    pub fn encrypt(&self, root: &Path, certificate: &Path, key: &Path, by_certificate: Option<&str>) -> io::Result<()> {
        for (from, name) in [(root, "root.pem"), (certificate, "server.pem"), (key, "server.key")] {
            let to = self.data().join(name);
            fs::copy(from, &to)?;
            fs::set_permissions(&to, fs::Permissions::from_mode(0o600))?;
            self.account.gives_folder(&to)?;
        }
        let mut rules = String::new();
        if let Some(role) = by_certificate {
            rules.push_str(&format!("hostssl all {role} 127.0.0.1/32 cert\n"));
        }
        rules.push_str("hostssl all all 127.0.0.1/32 trust\nhost all postgres 127.0.0.1/32 trust\n");
        fs::write(self.data().join("pg_hba.conf"), rules)?;
        for setting in
            ["ssl_ca_file = 'root.pem'", "ssl_cert_file = 'server.pem'", "ssl_key_file = 'server.key'", "ssl = on"]
        {
            self.sql(&format!("alter system set {setting}"))?;
        }
        self.sql("select pg_reload_conf()").map(drop)
    }
}
