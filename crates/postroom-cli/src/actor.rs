//! Who performs an action, for the audit rows.

use clap::Args;
use postroom::Deed;

use crate::exit::{self, Failure};

/// Why, and who.
#[derive(Debug, Args)]
pub struct DeedArgs {
    /// Why you do this; recorded in the audit row
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
    /// Who does this, if not the current system user; the audit row records both, and the database role
    #[arg(long, value_name = "NAME")]
    pub actor: Option<String>,
}

impl DeedArgs {
    /// What is written in the audit row.
    pub fn deed(&self) -> Result<Deed, Failure> {
        let reason = self.reason.clone().unwrap_or_default();
        if reason.trim().is_empty() {
            let text = "--reason TEXT is required and must not be empty; it is recorded in the audit row";
            return Err(Failure::new(exit::USAGE, text));
        }
        Ok(Deed { actor: actor(self.actor.as_deref()), reason })
    }
}

/// The given name together with the system user, or that user alone.
pub fn actor(given: Option<&str>) -> String {
    let user = user();
    match given.map(str::trim).filter(|given| !given.is_empty()) {
        Some(given) => format!("{given} (system user {user})"),
        None => user,
    }
}

/// The user that this process runs as. Not from a variable, which anybody can set.
fn user() -> String {
    use std::os::unix::fs::MetadataExt;
    let Ok(about) = std::fs::metadata("/proc/self") else {
        return std::env::var("USER").or_else(|_| std::env::var("LOGNAME")).unwrap_or_else(|_| "unknown".to_owned());
    };
    let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    name_of(about.uid(), &users).unwrap_or_else(|| format!("uid {}", about.uid()))
}

fn name_of(uid: u32, users: &str) -> Option<String> {
    users.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(uid)).then(|| name.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_is_found_by_its_number() {
        let users = "root:x:0:0:root:/root:/bin/sh\nbroken\nann:x:1000:1000::/home/ann:/bin/sh\n";
        assert_eq!(name_of(1000, users).as_deref(), Some("ann"));
        assert_eq!(name_of(7, users), None);
    }
}
