//! Which addresses a request may go to. A name is resolved once, and the connection goes to an address that was looked at: an answer that
//! changes in between leads nowhere else.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use reqwest::dns::{Addrs, Name, Resolve, Resolving};

/// Resolves names, to public addresses alone unless others are allowed.
pub(super) struct Guard {
    pub private_too: bool,
}

impl Resolve for Guard {
    fn resolve(&self, name: Name) -> Resolving {
        let private_too = self.private_too;
        Box::pin(async move {
            let found: Vec<SocketAddr> = tokio::net::lookup_host((name.as_str(), 0)).await?.collect();
            let allowed: Vec<SocketAddr> =
                found.iter().copied().filter(|at| private_too || is_public(at.ip())).collect();
            if allowed.is_empty() && !found.is_empty() {
                return Err(refusal(name.as_str()).into());
            }
            Ok(Box::new(allowed.into_iter()) as Addrs)
        })
    }
}

/// Why nothing is sent to a host.
pub(super) fn refusal(host: &str) -> String {
    format!("{host} is in a private network or this machine; set private_addresses = true if that is meant")
}

/// Whether an address is one of the internet. <https://www.iana.org/assignments/iana-ipv4-special-registry>,
/// <https://www.iana.org/assignments/iana-ipv6-special-registry>
pub(super) fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => is_public_v4(v4),
        IpAddr::V6(v6) => is_public_v6(v6),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    let shared = a == 100 && (64..128).contains(&b);
    let protocols = (a, b, c) == (192, 0, 0);
    let anycast_relay = (a, b, c) == (192, 88, 99);
    let benchmarks = a == 198 && (18..20).contains(&b);
    !(a == 0
        || address.is_private()
        || address.is_loopback()
        || address.is_link_local()
        || address.is_documentation()
        || shared
        || protocols
        || anycast_relay
        || benchmarks
        // Multicast, reserved, broadcast.
        || a >= 224)
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let segments = address.segments();
    let last_four = |high: u16, low: u16| {
        let ([a, b], [c, d]) = (high.to_be_bytes(), low.to_be_bytes());
        is_public_v4(Ipv4Addr::new(a, b, c, d))
    };
    match segments {
        // An address of IPv4 in one of IPv6: mapped, translated (RFC 6052), 6to4.
        [0, 0, 0, 0, 0, 0xffff, high, low] | [0x64, 0xff9b, 0, 0, 0, 0, high, low] => last_four(high, low),
        [0x2002, high, low, ..] => last_four(high, low),
        // Documentation, Teredo and others of 2001::/23.
        [0x2001, 0xdb8, ..] | [0x3fff, ..] => false,
        [0x2001, second, ..] => second >= 0x200,
        // Only 2000::/3 is given out.
        [first, ..] => first & 0xe000 == 0x2000,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_the_internet_are_told_from_others() {
        for public in [
            "1.1.1.1",
            "172.15.0.1",
            "172.32.0.1",
            "100.63.0.1",
            "2606:4700::1111",
            "64:ff9b::101:101",
            "::ffff:8.8.8.8",
        ] {
            assert!(is_public(public.parse().unwrap()), "{public}");
        }
        for other in [
            "127.0.0.1",
            "0.0.0.0",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "100.64.0.1",
            "192.0.0.8",
            "198.18.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "203.0.113.1",
            "::1",
            "::",
            "fe80::1",
            "fc00::1",
            "fd12::1",
            "ff02::1",
            "::ffff:127.0.0.1",
            "::ffff:169.254.169.254",
            "64:ff9b::a00:1",
            "2002:7f00:1::",
            "2001:db8::1",
            "::127.0.0.1",
            "2001::1",
        ] {
            assert!(!is_public(other.parse().unwrap()), "{other}");
        }
    }

    #[tokio::test]
    async fn a_name_that_leads_to_this_machine_is_refused_unless_that_is_meant() {
        let name = || "localhost".parse::<Name>().unwrap();
        let refused = Guard { private_too: false }.resolve(name()).await;
        assert!(refused.err().unwrap().to_string().contains("private_addresses"));
        assert!(Guard { private_too: true }.resolve(name()).await.unwrap().count() > 0);
    }
}
