//! Proves that no forbidden address is ever connected to. The evidence is the kernel's own record
//! of every connection that this program tried, while it was given hundreds of spellings of
//! forbidden addresses, names that lead to them, and a resolver that changes its answer.
//!
//! It runs in a network namespace without any route, so that even a failing guard reaches nobody.
//! The test starts itself again under `strace` and reads the record.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use postbox_core::{Delivery, NewEvent, Outcome, Seq, Sink};

use super::{Looking, Lookup};
use crate::{HttpSink, HttpSinkConfig};

const THIS_TEST: &str = "guard::proof::no_forbidden_address_is_ever_connected_to";
/// Set for the run that is recorded.
const RECORDED: &str = "POSTBOX_SSRF_RECORDED";
/// How often the resolver flips.
const FLIPS: usize = 10_000;
/// The public address that the flipping resolver returns every other time. It cannot be reached,
/// because there is no route.
const PUBLIC: IpAddr = IpAddr::V4(Ipv4Addr::new(8, 8, 8, 8));
/// A forbidden address that is explicitly allowed: proves that the record would show a forbidden
/// connection.
const ALLOWED: Ipv4Addr = Ipv4Addr::new(10, 99, 99, 99);

/// One or two addresses of every forbidden network.
pub(super) const FORBIDDEN_V4: [[u8; 4]; 38] = [
    [0, 0, 0, 0],
    [0, 1, 2, 3],
    [10, 0, 0, 1],
    [10, 255, 255, 255],
    [100, 64, 0, 1],
    [100, 100, 100, 200],
    [100, 127, 255, 255],
    [127, 0, 0, 1],
    [127, 255, 255, 254],
    [127, 1, 2, 3],
    [168, 63, 129, 16],
    [169, 254, 0, 1],
    [169, 254, 169, 254],
    [169, 254, 170, 2],
    [172, 16, 0, 1],
    [172, 31, 255, 255],
    [192, 0, 0, 1],
    [192, 0, 0, 192],
    [192, 0, 2, 1],
    [192, 31, 196, 1],
    [192, 52, 193, 1],
    [192, 88, 99, 1],
    [192, 168, 0, 1],
    [192, 168, 255, 255],
    [198, 18, 0, 1],
    [198, 19, 255, 255],
    [198, 51, 100, 1],
    [203, 0, 113, 1],
    [203, 0, 113, 255],
    [224, 0, 0, 1],
    [224, 0, 0, 251],
    [239, 255, 255, 250],
    [239, 255, 255, 255],
    [240, 0, 0, 1],
    [250, 1, 1, 1],
    [255, 255, 255, 254],
    [255, 255, 255, 255],
    [172, 17, 0, 1],
];

pub(super) const FORBIDDEN_V6: [&str; 30] = [
    "::",
    "::1",
    "0:0:0:0:0:0:0:1",
    "0000:0000:0000:0000:0000:0000:0000:0001",
    "::2",
    "64:ff9b:1::1",
    "64:ff9b:1:ffff::10.0.0.1",
    "100::1",
    "1fff::1",
    "2001::1",
    "2001:2::1",
    "2001:10::1",
    "2001:20::1",
    "2001:db8::1",
    "2001:DB8:FFFF::1",
    "2620:4f:8000::1",
    "3ffe::1",
    "3fff::1",
    "3fff:fff::1",
    "4000::1",
    "5f00::1",
    "fc00::1",
    "fd00:ec2::254",
    "FD00:EC2::254",
    "fdff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
    "fe80::1",
    "febf::1",
    "fec0::1",
    "ff02::1",
    "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
];

/// Returns the ways to write one IPv4 address as the host of a URL.
pub(super) fn spellings(octets: [u8; 4]) -> Vec<String> {
    let [a, b, c, d] = octets;
    let whole = u32::from_be_bytes(octets);
    let (low24, low16) = (whole & 0x00ff_ffff, whole & 0xffff);
    let [high, low] = [whole >> 16, low16];
    let dotted = format!("{a}.{b}.{c}.{d}");
    let digits = |from: u32| -> String {
        let other = |c: char| c.to_digit(10).and_then(|digit| char::from_u32(from + digit)).unwrap_or(c);
        dotted.chars().map(other).collect()
    };
    let percent: String = dotted.bytes().map(|byte| format!("%{byte:02x}")).collect();
    let teredo = Ipv6Addr::new(0x2001, 0, 0x4136, 0xe378, 0x8000, 0x63bf, !(high as u16), !(low as u16));
    vec![
        dotted.clone(),
        format!("{dotted}."),
        whole.to_string(),
        format!("{whole:#x}"),
        format!("0X{whole:X}"),
        format!("0x00000000{whole:08x}"),
        format!("0{whole:o}"),
        format!("{a}.{low24}"),
        format!("{a}.{b}.{low16}"),
        format!("{a:#x}.{b:#x}.{c:#x}.{d:#x}"),
        format!("0{a:o}.0{b:o}.0{c:o}.0{d:o}"),
        format!("00{a:o}.0x{b:x}.{c}.{d}"),
        format!("{a:#x}.{low24}"),
        digits(0xff10),
        digits(0x1d7ce),
        dotted.replace('.', "。"),
        dotted.replace('.', "．"),
        percent,
        format!("user@{dotted}"),
        format!("8.8.8.8@{dotted}"),
        format!("8.8.8.8:80@{dotted}"),
        format!("8.8.8.8%23@{dotted}"),
        format!("[::ffff:{dotted}]"),
        format!("[::FFFF:{high:x}:{low:x}]"),
        format!("[0:0:0:0:0:ffff:{dotted}]"),
        format!("[::{dotted}]"),
        format!("[::{high:x}:{low:x}]"),
        format!("[::ffff:0:{dotted}]"),
        format!("[64:ff9b::{dotted}]"),
        format!("[64:ff9b::{high:x}:{low:x}]"),
        format!("[2002:{high:x}:{low:x}::]"),
        format!("[2002:{high:x}:{low:x}::1]"),
        format!("[{teredo}]"),
        format!("[::ffff:{dotted}%25eth0]"),
        format!("[fe80::{dotted}%eth0]"),
    ]
}

/// Returns every spelling of a forbidden address, as a host.
fn hosts() -> Vec<String> {
    let mut hosts: Vec<String> = FORBIDDEN_V4.into_iter().flat_map(spellings).collect();
    hosts.extend(FORBIDDEN_V6.iter().map(|address| format!("[{address}]")));
    hosts.extend(["[::1%25lo]", "[fe80::1%25eth0]", "[::1%lo]"].map(str::to_owned));
    // Names; `Leading` decides what they lead to.
    hosts.extend(
        ["localhost", "LOCALHOST", "localhost.", "a.localhost", "ⓛocalhost", "metadata.google.internal"]
            .map(str::to_owned),
    );
    hosts.extend((0..places().len()).flat_map(|number| {
        [
            format!("n{number}.example"),
            format!("N{number}.EXAMPLE."),
            format!("first{number}.example"),
            format!("last{number}.example"),
        ]
    }));
    hosts
}

/// Forbidden addresses of both IP versions, for names to lead to.
fn places() -> Vec<IpAddr> {
    let v4 = FORBIDDEN_V4.into_iter().map(|octets| IpAddr::V4(octets.into()));
    let mapped = FORBIDDEN_V4.into_iter().map(|octets| IpAddr::V6(Ipv4Addr::from(octets).to_ipv6_mapped()));
    let v6 = FORBIDDEN_V6.iter().map(|address| address.parse().expect("an address"));
    v4.chain(mapped).chain(v6).collect()
}

/// Resolves names to forbidden addresses: alone, before and after a public one.
struct Leading;

impl Lookup for Leading {
    fn look_up(&self, name: &str) -> Looking {
        let label = name.split('.').next().unwrap_or_default();
        let number = label.trim_start_matches(|c: char| c.is_ascii_alphabetic()).parse::<usize>().ok();
        let place = number.and_then(|number| places().get(number).copied()).unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST));
        let addresses = match label.trim_end_matches(|c: char| c.is_ascii_digit()) {
            "first" => vec![place, PUBLIC],
            "last" => vec![PUBLIC, place],
            _ => vec![place],
        };
        Box::pin(async move { Ok(addresses.into_iter().map(|address| SocketAddr::new(address, 0)).collect()) })
    }
}

/// Returns a public and a forbidden address in turns.
#[derive(Default)]
struct Flipping(AtomicUsize);

impl Lookup for Flipping {
    fn look_up(&self, _name: &str) -> Looking {
        let turn = self.0.fetch_add(1, Ordering::SeqCst);
        let places = places();
        let address = if turn.is_multiple_of(2) { PUBLIC } else { places[turn / 2 % places.len()] };
        Box::pin(async move { Ok(vec![SocketAddr::new(address, 0)]) })
    }
}

/// Fails to resolve.
struct Failing;

impl Lookup for Failing {
    fn look_up(&self, _name: &str) -> Looking {
        Box::pin(async { Err(std::io::Error::other("no answer")) })
    }
}

struct Clock;

#[async_trait::async_trait]
impl postbox_core::Clock for Clock {
    fn now(&self) -> jiff::Timestamp {
        jiff::Timestamp::UNIX_EPOCH
    }

    fn monotonic(&self) -> std::time::Duration {
        std::time::Duration::ZERO
    }

    async fn sleep(&self, duration: std::time::Duration) {
        tokio::time::sleep(duration).await;
    }
}

/// A sink for the URL, unless it is refused at once.
fn sink(url: &str, allow: &[&str], lookup: impl Lookup) -> Option<HttpSink> {
    let allow = allow.iter().map(|net| net.parse().expect("a network")).collect();
    let config = HttpSinkConfig { allow, ..HttpSinkConfig::new(url) };
    HttpSink::with_lookup(config, Arc::new(Clock), Arc::new(lookup)).ok()
}

async fn deliver(sink: &HttpSink) -> String {
    let id = "00000000-0000-7000-8000-000000000001".parse().expect("an id");
    let event = NewEvent::json("t", "{}").into_event(id, jiff::Timestamp::UNIX_EPOCH);
    let delivery = Delivery { event, seq: Seq(1), attempt: 1, replay: 0, trace: None };
    match sink.deliver(&[&delivery]).await.remove(0) {
        Outcome::Unavailable { code, .. } | Outcome::Ambiguous { code, .. } => code.into_owned(),
        other => panic!("{other:?} without a route"),
    }
}

/// The recorded run: tries everything that must not work, and two things that may.
async fn try_everything() {
    let hosts = hosts();
    let distinct: BTreeSet<&String> = hosts.iter().collect();
    assert!(distinct.len() >= 500, "{} spellings", distinct.len());
    let mut by_name = 0;
    for host in &distinct {
        if let Some(sink) = sink(&format!("http://{host}:7777/hook"), &[], Leading) {
            assert_eq!(deliver(&sink).await, "address_forbidden", "{host}");
            by_name += 1;
        }
    }
    let failing = sink("http://nobody.example/", &[], Failing).expect("a name");
    assert_eq!(deliver(&failing).await, "dns_failed");

    let flipping = sink("http://flips.example:7777/", &[], Flipping::default()).expect("a name");
    let mut forbidden = 0;
    for turn in 0..FLIPS {
        match deliver(&flipping).await.as_str() {
            "address_forbidden" if turn % 2 == 1 => forbidden += 1,
            "connect_failed" if turn % 2 == 0 => {}
            other => panic!("{other} at turn {turn}"),
        }
    }
    assert_eq!(forbidden, FLIPS / 2);

    let allowed = sink(&format!("http://{ALLOWED}:7777/"), &["10.99.0.0/16"], Failing).expect("allowed");
    assert_eq!(deliver(&allowed).await, "connect_failed");
    let figures = format!("spellings={} of them names={by_name} flips={FLIPS}", distinct.len());
    writeln!(std::io::stdout(), "{figures}").expect("whoever started this reads it");
}

/// The IPv4 and IPv6 addresses in a record of system calls.
fn addresses(record: &str) -> BTreeSet<IpAddr> {
    let quoted = |text: &str| text.split('"').next().and_then(|address| address.parse().ok());
    let v4 = record.split("inet_addr(\"").skip(1).filter_map(quoted);
    let v6 = record.split("inet_pton(AF_INET6, \"").skip(1).filter_map(quoted);
    v4.chain(v6).collect()
}

#[test]
fn no_forbidden_address_is_ever_connected_to() {
    if std::env::var_os(RECORDED).is_some() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        return runtime.block_on(try_everything());
    }
    let record = tempfile::NamedTempFile::new().expect("a file");
    let mut command = Command::new("strace");
    command.args(["-f", "-qq", "--seccomp-bpf", "-e", "trace=connect,sendto,sendmsg,sendmmsg", "-o"]);
    command.arg(record.path()).args(["unshare", "--map-root-user", "--net"]);
    command.arg(std::env::current_exe().expect("this test")).args(["--exact", THIS_TEST, "--nocapture"]);
    let output = match command.env(RECORDED, "1").output() {
        Ok(output) => output,
        Err(error) => return missing(&error),
    };
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("spellings="),
        "the recorded run failed: the guard let something through, or strace and unshare do not work here (a container may forbid both):\n{text}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let record = std::fs::read_to_string(record.path()).expect("the record");
    // Exactly these two: the public address of the flipping resolver, and the allowed one.
    assert_eq!(addresses(&record), BTreeSet::from([PUBLIC, IpAddr::V4(ALLOWED)]), "{text}");
    assert!(record.matches("8.8.8.8").count() >= FLIPS / 2, "the record is not whole");
}

/// Fails, or on a developer's machine may skip visibly.
fn missing(error: &std::io::Error) {
    let allowed = std::env::var_os("POSTBOX_ALLOW_SKIP").is_some_and(|value| value == "1");
    assert!(allowed && std::env::var_os("CI").is_none(), "strace: {error}; install it with `cargo xtask servers`");
    let _ = writeln!(std::io::stderr(), "SKIPPED: strace: {error}");
}
