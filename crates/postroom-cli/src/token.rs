//! `postroom token`: makes a token for the admin listener. The configuration gets its hash; the token is shown once.

use std::io::Read;

use clap::{Args, ValueEnum};
use postroom_server::admin::NewToken;

use crate::exit::{self, Failure};
use crate::say::{say, show};

#[derive(Debug, Args)]
pub struct TokenArgs {
    /// Who gets the token; written to audit rows
    name: String,
    /// What it may do
    #[arg(long, value_enum, default_value = "viewer")]
    role: RoleArg,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum RoleArg {
    /// Look at metrics and at the state
    Viewer,
    /// Also act on messages, keys and dead letters
    Operator,
    /// Also change and forget routes
    Admin,
}

impl RoleArg {
    fn as_str(self) -> &'static str {
        match self {
            Self::Viewer => "viewer",
            Self::Operator => "operator",
            Self::Admin => "admin",
        }
    }
}

pub fn token(args: &TokenArgs, json: bool) -> Result<(), Failure> {
    let mut random = [0; 32];
    std::fs::File::open("/dev/urandom").and_then(|mut source| source.read_exact(&mut random)).map_err(|error| {
        Failure::new(exit::FAILURE, format!("failed to read random bytes from /dev/urandom: {error}"))
    })?;
    let made = NewToken::from_random(random);
    let role = args.role.as_str();
    if json {
        show!(
            "{}",
            serde_json::json!({ "name": args.name, "role": role, "token": made.secret, "sha256": made.sha256 })
        );
        return Ok(());
    }
    say!("The token, which is not shown again:");
    show!("{}", made.secret);
    say!("Add this to the configuration of the relay, and start it again:");
    say!("[[admin.tokens]]");
    say!("name = {:?}", args.name);
    say!("role = {role:?}");
    say!("sha256 = {:?}", made.sha256);
    Ok(())
}
