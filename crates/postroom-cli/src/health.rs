//! `postroom health`: asks a running postroom whether it is ready, for containers without a shell and without curl.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use postroom_server::{AskFailed, ask};

use crate::config;
use crate::exit::{self, Failure};
use crate::say::show;

const WITHIN: Duration = Duration::from_secs(5);

#[derive(Debug, Args)]
pub struct HealthArgs {
    /// Address of the admin listener; by default, the one in the configuration
    #[arg(long, value_name = "ADDRESS:PORT")]
    at: Option<SocketAddr>,
    /// Configuration file to read the address from
    #[arg(long, default_value = "postroom.toml", value_name = "FILE")]
    config: PathBuf,
    /// Only ask whether the process answers, as a liveness probe does
    #[arg(long)]
    live: bool,
}

pub async fn health(args: &HealthArgs, json: bool) -> Result<(), Failure> {
    let address = match args.at {
        Some(address) => address,
        None => config::listens_on(&args.config)?.ok_or_else(|| {
            let text = "the configuration has no [admin], so nothing answers; add it, or name an address with --at";
            Failure::new(exit::CONFIG, text)
        })?,
    };
    let path = if args.live { "/livez" } else { "/readyz" };
    // The probe is local, wherever else the process listens.
    let token = std::env::var("POSTROOM_TOKEN").ok();
    let answer = ask(reachable(address), path, token.as_deref(), WITHIN).await.map_err(|error| {
        let code = match error {
            AskFailed::NotHttp(_) => exit::FAILURE,
            AskFailed::Connection(..) | AskFailed::Late(..) => exit::UNREACHABLE,
        };
        Failure::of(code, &error)
    })?;
    let ready = answer.status == 200;
    let told: serde_json::Value = serde_json::from_str(&answer.body).unwrap_or_default();
    let parts = told["parts"].as_array().cloned().unwrap_or_default();
    if json {
        let kind = if args.live { "live" } else { "ready" };
        show!("{}", serde_json::json!({ kind: ready, "parts": parts }));
    } else {
        show!("{}", if ready { "ok" } else { "not ready" });
        for part in &parts {
            let word = if part["ready"] == true { "ready" } else { "not ready" };
            let text = |key: &str| part[key].as_str().unwrap_or_default().to_owned();
            show!("{}: {word}: {}", text("part"), text("why"));
        }
    }
    if ready {
        return Ok(());
    }
    Err(Failure {
        answered: true,
        ..Failure::new(exit::FAILURE, format!("the postroom at {address} is not ready (status {})", answer.status))
    })
}

/// One that listens on every address is asked on this machine's own.
fn reachable(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}
