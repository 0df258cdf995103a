//! Free loopback ports, from below the range that the kernel hands to outgoing connections.

use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};

const FIRST: u32 = 15_000;
/// Linux hands out 32768 and above for outgoing connections.
const COUNT: u32 = 17_000;
const TRIES_MAX: u32 = 1_000;

static HANDED_OUT: AtomicU32 = AtomicU32::new(0);

/// A loopback port that nobody listens on at this moment.
///
/// Promise: one process does not get the same port twice before it asked some thousand times, and the port does not
/// lie where the kernel looks for the local end of outgoing connections. That matters when a server is killed and is
/// to come back on its port: otherwise a client that retries could take the port, or even connect to itself.
///
/// Edge: nothing reserves the port. Another process may take it before the caller binds it; try again with another.
///
/// # Errors
/// When a thousand ports in a row are in use.
pub fn free() -> io::Result<u16> {
    for _ in 0..TRIES_MAX {
        let turn = HANDED_OUT.fetch_add(1, Ordering::Relaxed);
        let port = candidate(process::id(), turn);
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return Ok(port);
        }
    }
    Err(io::Error::new(
        io::ErrorKind::AddrInUse,
        format!("find a free port on 127.0.0.1: {TRIES_MAX} ports in a row are in use; `ss -ltnp` shows by whom"),
    ))
}

/// Processes start at places far from each other, so that two test runs rarely meet.
fn candidate(process: u32, turn: u32) -> u16 {
    let offset = (process.wrapping_mul(211)).wrapping_add(turn) % COUNT;
    u16::try_from(FIRST + offset).unwrap_or(u16::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_not_handed_out_twice() {
        let ports: std::collections::BTreeSet<u16> = (0..50).map(|_| free().unwrap()).collect();
        assert_eq!(ports.len(), 50);
    }

    #[test]
    fn every_port_lies_below_the_range_of_outgoing_connections() {
        for (process, turn) in [(1, 0), (u32::MAX, u32::MAX), (4_194_304, 16_999)] {
            assert!((15_000..32_000).contains(&candidate(process, turn)));
        }
    }
}
