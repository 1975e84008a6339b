//! Tests which addresses are allowed, one by one.

use std::io::Write as _;

use super::proof::{FORBIDDEN_V4, FORBIDDEN_V6, spellings};
use super::*;

fn refused(host: &str) -> bool {
    let url = Url::parse(&format!("http://{host}/")).expect(host);
    assert!(!matches!(url.host(), Some(Host::Domain(_))), "{host} is a name");
    Guard::default().check_host(&url).is_err()
}

#[test]
fn every_form_of_a_forbidden_address_is_refused() {
    // A host with a zone is no URL.
    let v4 = FORBIDDEN_V4.into_iter().flat_map(spellings).filter(|host| !(host.starts_with('[') && host.contains('%')));
    let v6 = FORBIDDEN_V6.iter().map(|address| format!("[{address}]"));
    let more = ["0177.0.0.1", "①②⑦.0.0.1", "[2001:0:4136:e378:8000:63bf:3fff:fdd2]"].map(str::to_owned);
    for host in v4.chain(v6).chain(more) {
        assert!(refused(&host), "{host} got through");
    }
}

#[test]
fn public_addresses_pass() {
    for host in [
        "1.1.1.1",
        "8.8.8.8",
        "9.255.255.255",
        "11.0.0.1",
        "100.63.255.255",
        "100.128.0.1",
        "126.255.255.255",
        "128.0.0.1",
        "169.253.0.1",
        "172.15.0.1",
        "172.32.0.1",
        "192.0.1.1",
        "198.17.0.1",
        "198.20.0.1",
        "223.255.255.255",
        "[2606:4700::1111]",
        "[2a00:1450::1]",
        "[::ffff:8.8.8.8]",
        "[64:ff9b::808:808]",
    ] {
        assert!(!refused(host), "{host} is refused");
    }
}

fn allowing(networks: &[&str]) -> Guard {
    let allow: Vec<IpNet> = networks.iter().map(|net| net.parse().expect("a network")).collect();
    Guard::new(&allow, Ourselves::default())
}

fn ip(address: &str) -> IpAddr {
    address.parse().expect("an address")
}

#[test]
fn an_allowed_network_is_allowed_in_every_form() {
    let guard = allowing(&["127.0.0.0/8"]);
    for (address, expected) in
        [("127.0.0.1", true), ("::ffff:127.0.0.1", true), ("::1", false), ("10.0.0.1", false), ("8.8.8.8", true)]
    {
        assert_eq!(guard.check([ip(address)]).is_ok(), expected, "{address}");
    }
}

#[test]
fn one_forbidden_address_among_good_ones_spoils_the_name() {
    assert!(Guard::default().check([ip("8.8.8.8")]).is_ok());
    let forbidden = Guard::default().check([ip("8.8.8.8"), ip("10.0.0.1"), ip("::ffff:10.0.0.2")]).expect_err("two");
    assert_eq!(forbidden, Forbidden::NotPublic(vec![ip("10.0.0.1"), ip("10.0.0.2")]));
    assert!(forbidden.to_string().contains("allow = [\"10.0.0.1\", \"10.0.0.2\"]"), "{forbidden}");
}

#[test]
fn localhost_is_known_before_it_is_looked_up() {
    for host in ["localhost", "LOCALHOST.", "a.b.localhost"] {
        let url = Url::parse(&format!("http://{host}/")).expect(host);
        assert!(Guard::default().check_host(&url).is_err(), "{host}");
        assert!(allowing(&["127.0.0.1/32", "::1/128"]).check_host(&url).is_ok(), "{host}");
    }
    for host in ["localhost.example", "notlocalhost"] {
        let url = Url::parse(&format!("http://{host}/")).expect(host);
        assert!(Guard::default().check_host(&url).is_ok(), "{host} is anybody's");
    }
}

fn resolver(guard: Guard) -> GuardedResolver {
    GuardedResolver { guard, lookup: Arc::new(SystemLookup) }
}

#[tokio::test]
async fn names_are_checked_when_they_are_resolved() {
    for name in ["localhost", "localhost."] {
        assert!(resolver(Guard::default()).resolve(name.parse().expect("a name")).await.is_err(), "{name}");
    }
    let allowed = resolver(allowing(&["127.0.0.0/8", "::1/128"]));
    assert!(allowed.resolve("localhost".parse().expect("a name")).await.is_ok());
}

/// Resolves every name to this machine.
struct Here;

impl Lookup for Here {
    fn look_up(&self, _name: &str) -> Looking {
        Box::pin(async { Ok(vec![SocketAddr::from(([127, 0, 0, 1], 0))]) })
    }
}

#[tokio::test]
async fn a_name_that_leads_to_ourselves_is_refused_when_it_is_resolved() {
    let url = Url::parse("http://customer.example:8600/").expect("a URL");
    let refused = async |listening: &str| {
        let ourselves = Ourselves::behind(&url, &[listening.parse().expect(listening)]);
        let guard = Guard::new(&["127.0.0.0/8".parse().expect("a network")], ourselves);
        assert!(guard.check_host(&url).is_ok(), "nobody knows yet");
        let resolver = GuardedResolver { guard, lookup: Arc::new(Here) };
        resolver.resolve("customer.example".parse().expect("a name")).await.err()
    };
    for listening in ["127.0.0.1:8600", "0.0.0.0:8600", "[::]:8600"] {
        let reported = refused(listening).await.expect(listening).to_string();
        assert!(reported.contains("Postbox's own [server] listen"), "{reported}");
    }
    assert!(refused("127.0.0.1:8601").await.is_none(), "another port is somebody else");
}

#[test]
fn our_own_addresses_are_refused_whatever_is_allowed() {
    let everything = ["0.0.0.0/0", "::/0"].map(|net| net.parse().expect("a network"));
    let reported = |url: &str, listening: &str| {
        let url = Url::parse(url).expect(url);
        let ourselves = Ourselves::behind(&url, &[listening.parse().expect(listening)]);
        Guard::new(&everything, ourselves).check_host(&url).err()
    };
    for (url, listening) in [
        ("http://127.0.0.1:8600/in/x", "127.0.0.1:8600"),
        ("http://0x7f.1:8600/", "127.0.0.1:8600"),
        ("http://[::ffff:127.0.0.1]:8600/", "127.0.0.1:8600"),
        ("http://127.0.0.1:8600/", "[::ffff:127.0.0.1]:8600"),
        ("http://0.0.0.0:8600/", "127.0.0.1:8600"),
        ("http://[::]:8600/", "127.0.0.1:8600"),
        ("http://127.0.0.1:8600/", "0.0.0.0:8600"),
        ("http://127.9.9.9:8600/", "0.0.0.0:8600"),
        ("http://127.0.0.1:8600/", "[::]:8600"),
        ("http://8.8.8.8/", "8.8.8.8:80"),
        ("https://8.8.8.8/", "8.8.8.8:443"),
    ] {
        let reported = reported(url, listening).unwrap_or_else(|| panic!("{url} leads to {listening}"));
        assert!(reported.contains("Postbox's own [server] listen"), "{reported}");
    }
    for (url, listening) in [
        ("http://127.0.0.1:8601/", "127.0.0.1:8600"),
        ("http://127.0.0.2:8600/", "127.0.0.1:8600"),
        ("http://8.8.8.8:8600/", "0.0.0.0:8600"),
        ("http://8.8.8.8:8600/", "[::]:8600"),
        ("http://[::1]:8600/", "0.0.0.0:8600"),
        ("https://8.8.8.8/", "8.8.8.8:80"),
    ] {
        assert_eq!(reported(url, listening), None, "{url} is not {listening}");
    }
    // Only a kernel with IPv6 can tell that these are not its own addresses. On any other they
    // might be.
    let foreign = [("http://[2606:4700::1]:8600/", "[::]:8600"), ("http://[fe80::1]:8600/", "[::]:8600")];
    let has_v6 = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0)).is_ok();
    for (url, listening) in foreign {
        assert_eq!(reported(url, listening).is_none(), has_v6, "{url} and {listening}, IPv6: {has_v6}");
    }
    if !has_v6 {
        unproven(foreign.len());
    }
}

/// Fails once all else is proven, or on a developer's machine may skip visibly.
fn unproven(count: usize) {
    let allowed = std::env::var_os("POSTBOX_ALLOW_SKIP").is_some_and(|value| value == "1");
    let what =
        format!("{count} addresses of version 6 could not be compared with ours: this machine makes no IPv6 socket");
    assert!(allowed && std::env::var_os("CI").is_none(), "all else holds, but {what}");
    let _ = writeln!(io::stderr(), "SKIPPED: {what}");
}
