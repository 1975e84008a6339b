//! The address guard: which addresses a sink may connect to.
//!
//! Public addresses, and those of explicitly allowed networks. Every address that a name resolves
//! to is checked as a number, each time a connection is made. The connection goes to the very
//! address that was checked; the name is kept for TLS. There is no second lookup that could answer
//! differently, no redirect and no proxy. A name with one forbidden address among good ones is
//! refused altogether.
//!
//! The standard library's helpers miss mapped, translated and tunnelled forms, so the tables here
//! are our own.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::Arc;

use futures::future::BoxFuture;
use ipnet::IpNet;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use url::{Host, Url};

/// The addresses that one target may have.
#[derive(Debug, Clone, Default)]
pub(crate) struct Guard {
    /// Networks that may be called although they are not public.
    allow: Vec<IpNet>,
    ourselves: Ourselves,
}

impl Guard {
    pub(crate) fn new(allow: &[IpNet], ourselves: Ourselves) -> Self {
        Self { allow: allow.to_vec(), ourselves }
    }

    /// Checks what is known of a URL's host without a lookup. The URL parser has already turned
    /// `0x7f.1`, `2130706433` and the like into numbers. `localhost` can only be this machine (RFC
    /// 6761). Other names are checked when they are resolved.
    pub(crate) fn check_host(&self, url: &Url) -> Result<(), String> {
        let addresses = match url.host() {
            Some(Host::Ipv4(address)) => vec![IpAddr::V4(address)],
            Some(Host::Ipv6(address)) => vec![IpAddr::V6(address)],
            Some(Host::Domain(name)) if is_localhost(name) => {
                vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()]
            }
            _ => return Ok(()),
        };
        self.check(addresses).map_err(|forbidden| forbidden.to_string())
    }

    /// Checks all addresses of one name: one forbidden address refuses the name.
    pub(crate) fn check(&self, addresses: impl IntoIterator<Item = IpAddr>) -> Result<(), Forbidden> {
        // For the operating system `::ffff:10.0.0.1` *is* 10.0.0.1, so it is checked and allowed as
        // that.
        let addresses: Vec<IpAddr> = addresses.into_iter().map(|address| address.to_canonical()).collect();
        if let Some(own) = addresses.iter().find(|address| self.ourselves.listen_at(**address)) {
            return Err(Forbidden::Ourselves(*own));
        }
        let allowed = |address: &IpAddr| self.allow.iter().any(|net| net.contains(address));
        let forbidden: Vec<IpAddr> =
            addresses.into_iter().filter(|address| !is_public(*address) && !allowed(address)).collect();
        if forbidden.is_empty() { Ok(()) } else { Err(Forbidden::NotPublic(forbidden)) }
    }
}

fn is_localhost(name: &str) -> bool {
    let name = name.trim_end_matches('.');
    name.eq_ignore_ascii_case("localhost") || name.to_ascii_lowercase().ends_with(".localhost")
}

/// The addresses that this process listens on with one target's port. Allowing a network does not
/// allow these: otherwise a customer's URL could make us post to our own ingress, or request our
/// own metrics.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ourselves(Vec<IpAddr>);

impl Ourselves {
    pub(crate) fn behind(url: &Url, listening: &[SocketAddr]) -> Self {
        let same_port = listening.iter().filter(|own| Some(own.port()) == url.port_or_known_default());
        Self(same_port.map(|own| own.ip().to_canonical()).collect())
    }

    fn listen_at(&self, address: IpAddr) -> bool {
        // The unspecified address (`0.0.0.0`, `::`) means this machine as a target, and every
        // address of this machine as a listener. The listener `::` takes both IP versions.
        let takes = |own: &IpAddr| own.is_unspecified() && (own.is_ipv6() || address.is_ipv4());
        self.0
            .iter()
            .any(|own| *own == address || address.is_unspecified() || takes(own) && is_of_this_machine(address))
    }
}

/// Whether an address belongs to this machine: only then can a socket be bound to it. Nothing is
/// sent. Any error except "not my address" counts as yes.
fn is_of_this_machine(address: IpAddr) -> bool {
    match UdpSocket::bind((address, 0)) {
        Ok(_) => true,
        Err(error) => !matches!(error.kind(), io::ErrorKind::AddrNotAvailable | io::ErrorKind::InvalidInput),
    }
}

/// A name or URL led to an address that the guard does not permit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Forbidden {
    NotPublic(Vec<IpAddr>),
    Ourselves(IpAddr),
}

impl fmt::Display for Forbidden {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotPublic(addresses) => {
                let list = |quote: &str| {
                    let quoted = addresses.iter().map(|address| format!("{quote}{address}{quote}"));
                    quoted.collect::<Vec<_>>().join(", ")
                };
                let (spelt, quoted) = (list(""), list("\""));
                write!(
                    f,
                    "the target's address {spelt} is not public; if it is intended, allow it: allow = [{quoted}], or its network"
                )
            }
            Self::Ourselves(address) => {
                write!(
                    f,
                    "the target's address {address} with this port is Postbox's own [server] listen; a sink never calls it, whatever `allow` says"
                )
            }
        }
    }
}

impl std::error::Error for Forbidden {}

/// A lookup in progress.
pub(crate) type Looking = BoxFuture<'static, io::Result<Vec<SocketAddr>>>;

/// Resolves names. The answer is never trusted.
pub(crate) trait Lookup: Send + Sync + 'static {
    /// Returns the addresses of `name`, with any port.
    fn look_up(&self, name: &str) -> Looking;
}

/// The operating system's resolver.
pub(crate) struct SystemLookup;

impl Lookup for SystemLookup {
    fn look_up(&self, name: &str) -> Looking {
        let name = name.to_owned();
        // Port 0, because the client sets the URL's port.
        Box::pin(async move { Ok(tokio::net::lookup_host((name.as_str(), 0)).await?.collect()) })
    }
}

/// Resolves names for the client and refuses forbidden addresses.
pub(crate) struct GuardedResolver {
    pub(crate) guard: Guard,
    pub(crate) lookup: Arc<dyn Lookup>,
}

impl Resolve for GuardedResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let guard = self.guard.clone();
        let looking = self.lookup.look_up(name.as_str());
        Box::pin(async move {
            let addresses = looking.await?;
            guard.check(addresses.iter().map(SocketAddr::ip))?;
            Ok(Box::new(addresses.into_iter()) as Addrs)
        })
    }
}

/// IPv4 networks that are not public, as (network, prefix length).
const FORBIDDEN_V4: [(Ipv4Addr, u32); 18] = [
    (Ipv4Addr::new(0, 0, 0, 0), 8),        // this network
    (Ipv4Addr::new(10, 0, 0, 0), 8),       // private
    (Ipv4Addr::new(100, 64, 0, 0), 10),    // carrier-grade NAT, and a cloud's metadata
    (Ipv4Addr::new(127, 0, 0, 0), 8),      // loopback
    (Ipv4Addr::new(168, 63, 129, 16), 32), // a cloud's host agent
    (Ipv4Addr::new(169, 254, 0, 0), 16),   // link-local, and most clouds' metadata
    (Ipv4Addr::new(172, 16, 0, 0), 12),    // private
    (Ipv4Addr::new(192, 0, 0, 0), 24),     // protocol assignments
    (Ipv4Addr::new(192, 0, 2, 0), 24),     // documentation
    (Ipv4Addr::new(192, 31, 196, 0), 24),  // AS112
    (Ipv4Addr::new(192, 52, 193, 0), 24),  // AMT
    (Ipv4Addr::new(192, 88, 99, 0), 24),   // 6to4 relays
    (Ipv4Addr::new(192, 168, 0, 0), 16),   // private
    (Ipv4Addr::new(198, 18, 0, 0), 15),    // benchmarks
    (Ipv4Addr::new(198, 51, 100, 0), 24),  // documentation
    (Ipv4Addr::new(203, 0, 113, 0), 24),   // documentation
    (Ipv4Addr::new(224, 0, 0, 0), 4),      // multicast
    (Ipv4Addr::new(240, 0, 0, 0), 4),      // reserved, broadcast
];

/// Networks inside 2000::/3 that are not public. Everything outside of 2000::/3 is forbidden
/// anyway.
const FORBIDDEN_V6: [(Ipv6Addr, u32); 6] = [
    (Ipv6Addr::new(0x2001, 0, 0, 0, 0, 0, 0, 0), 23), // protocol assignments: Teredo, ORCHID, benchmarks
    (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0), 32), // documentation
    (Ipv6Addr::new(0x2002, 0, 0, 0, 0, 0, 0, 0), 16), // 6to4: carries any address of version 4
    (Ipv6Addr::new(0x2620, 0x4f, 0x8000, 0, 0, 0, 0, 0), 48), // AS112
    (Ipv6Addr::new(0x3ffe, 0, 0, 0, 0, 0, 0, 0), 16), // given back
    (Ipv6Addr::new(0x3fff, 0, 0, 0, 0, 0, 0, 0), 20), // documentation
];

/// NAT64's well-known prefix: an IPv4 address in the last 32 bits.
const NAT64: (Ipv6Addr, u32) = (Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, 0, 0), 96);
/// Global unicast.
const GLOBAL_V6: (Ipv6Addr, u32) = (Ipv6Addr::new(0x2000, 0, 0, 0, 0, 0, 0, 0), 3);

fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let inside = |(net, length): &(Ipv4Addr, u32)| (u32::from(address) ^ u32::from(*net)) >> (32 - length) == 0;
    !FORBIDDEN_V4.iter().any(inside)
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let inside = |(net, length): &(Ipv6Addr, u32)| (u128::from(address) ^ u128::from(*net)) >> (128 - length) == 0;
    if inside(&NAT64) {
        let [.., a, b, c, d] = address.octets();
        return is_public_v4(Ipv4Addr::new(a, b, c, d));
    }
    inside(&GLOBAL_V6) && !FORBIDDEN_V6.iter().any(inside)
}

#[cfg(test)]
mod proof;
#[cfg(test)]
mod tests;
