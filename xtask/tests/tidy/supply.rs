//! The dependencies: their licences, their origin, and duplicates. `docs/decisions/supply-chain.md`
//! explains why this is our own test.

use std::collections::{BTreeMap, BTreeSet};

use crate::layers::metadata;
use crate::none;

/// Accepted licences, as packages write them. Another spelling or licence must be read by a person
/// and then added here.
const LICENCES: &[&str] = &[
    "(MIT OR Apache-2.0) AND Apache-2.0",
    "(MIT OR Apache-2.0) AND Unicode-3.0",
    "0BSD OR MIT OR Apache-2.0",
    "Apache-2.0",
    "Apache-2.0 / MIT",
    "Apache-2.0 AND ISC",
    "Apache-2.0 OR BSL-1.0",
    "Apache-2.0 OR BSL-1.0 OR MIT",
    "Apache-2.0 OR ISC OR MIT",
    "Apache-2.0 OR MIT",
    "Apache-2.0 OR MIT OR Zlib",
    "Apache-2.0 WITH LLVM-exception OR Apache-2.0 OR MIT",
    "Apache-2.0/MIT",
    "BSD-2-Clause OR Apache-2.0 OR MIT",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSD-3-Clause AND BSD-2-Clause",
    "BSD-3-Clause OR MIT OR Apache-2.0",
    "BSL-1.0",
    // A list of certificates, which is data.
    "CDLA-Permissive-2.0",
    "ISC",
    "MIT",
    // MIT without the duty to include a notice.
    "MIT-0",
    "MIT AND BSD-3-Clause",
    "MIT OR Apache-2.0",
    "MIT OR Apache-2.0 OR BSD-1-Clause",
    "MIT OR Apache-2.0 OR LGPL-2.1-or-later",
    "MIT OR Zlib OR Apache-2.0",
    "MIT/Apache-2.0",
    "Unicode-3.0",
    "Unlicense OR MIT",
    "Unlicense/MIT",
    "Zlib",
    "Zlib OR Apache-2.0 OR MIT",
];

/// Crates with more than one version, and their number. The list may only shrink. Appending in
/// transactions of both `sqlx` 0.9 and 0.8 requires all of `sqlx` and its dependencies twice.
const TWICE: &[(&str, usize)] = &[
    ("base64", 3),
    // JSON Schema uses the previous version, the random tests the next one.
    ("bit-vec", 2),
    ("block-buffer", 2),
    ("const-oid", 2),
    ("core-foundation", 2),
    ("cpufeatures", 2),
    ("crypto-common", 2),
    // The NATS client signs with the previous versions.
    ("curve25519-dalek", 2),
    ("darling", 2),
    ("darling_core", 2),
    ("darling_macro", 2),
    ("der", 2),
    ("digest", 2),
    ("ed25519", 2),
    ("ed25519-dalek", 2),
    ("etcetera", 2),
    ("fallible-iterator", 2),
    ("fiat-crypto", 2),
    // The MQTT client uses the previous versions of these and of `rustls-webpki`.
    ("flume", 2),
    ("foldhash", 2),
    ("getrandom", 3),
    ("hashbrown", 3),
    ("hashlink", 2),
    ("heck", 2),
    ("hkdf", 2),
    // The Kafka client uses the previous version. The TLS of the RabbitMQ client reads PKCS 12,
    // which we do not use, with the previous versions.
    ("hmac", 2),
    ("md-5", 2),
    ("nom", 2),
    ("pkcs8", 2),
    ("r-efi", 2),
    ("rand", 3),
    ("rand_chacha", 2),
    ("rand_core", 3),
    ("redox_syscall", 2),
    ("rustls-webpki", 2),
    ("sha1", 2),
    ("sha2", 2),
    ("signature", 2),
    ("socket2", 2),
    ("spki", 2),
    ("sqlx", 2),
    ("sqlx-core", 2),
    ("sqlx-macros", 2),
    ("sqlx-macros-core", 2),
    ("sqlx-postgres", 2),
    // Cron expressions use the versions before those of JSON Schema.
    ("strum", 2),
    ("strum_macros", 2),
    ("syn", 2),
    ("synstructure", 2),
    ("thiserror", 2),
    ("thiserror-impl", 2),
    ("wasi", 2),
    ("wasite", 2),
    ("whoami", 2),
    ("windows-sys", 3),
    ("windows-targets", 2),
    ("windows_aarch64_gnullvm", 2),
    ("windows_aarch64_msvc", 2),
    ("windows_i686_gnu", 2),
    ("windows_i686_msvc", 2),
    ("windows_x86_64_gnu", 2),
    ("windows_x86_64_gnullvm", 2),
    ("windows_x86_64_msvc", 2),
];

struct Package {
    name: String,
    version: String,
    licence: String,
    /// `None`: it is in this workspace.
    source: Option<String>,
}

fn packages() -> Vec<Package> {
    let metadata = metadata();
    let packages = metadata["packages"].as_array().expect("a list");
    let text = |value: &serde_json::Value| value.as_str().map(str::to_owned);
    let read = packages.iter().map(|package| Package {
        name: text(&package["name"]).expect("a name"),
        version: text(&package["version"]).expect("a version"),
        licence: text(&package["license"]).unwrap_or_else(|| "none".into()),
        source: text(&package["source"]),
    });
    read.collect()
}

#[test]
fn every_licence_was_read_by_a_person() {
    let mut used = BTreeSet::new();
    let mut faults = Vec::new();
    // The output of `postbox new service` belongs to its owner, and so has no licence of ours.
    for Package { name, version, licence, .. } in packages().into_iter().filter(|it| it.name != "shop-service") {
        if !LICENCES.contains(&licence.as_str()) {
            faults.push(format!("{name} {version} has the licence {licence:?}: read it; if it is fine, name it in xtask/tests/tidy/supply.rs"));
        }
        used.insert(licence);
    }
    let unused = LICENCES.iter().filter(|licence| !used.contains(**licence));
    faults
        .extend(unused.map(|licence| format!("nothing has the licence {licence:?} any more: strike it from LICENCES")));
    none(&faults);
}

#[test]
fn everything_comes_from_one_registry_or_from_here() {
    let known = concat!("registry+https://github.com/rust-lang/", "crates.io-index");
    let elsewhere = packages().into_iter().filter(|package| package.source.as_deref().is_some_and(|it| it != known));
    let faults: Vec<_> = elsewhere
        .map(|it| {
            format!("{} {} comes from {}: use a published version", it.name, it.version, it.source.unwrap_or_default())
        })
        .collect();
    none(&faults);
}

#[test]
fn what_is_there_twice_only_becomes_less() {
    let mut versions: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for package in packages() {
        versions.entry(package.name).or_default().insert(package.version);
    }
    let allowed = |name: &str| TWICE.iter().find(|(its, _)| *its == name).map_or(1, |(_, count)| *count);
    let more = versions.iter().filter(|(name, its)| its.len() > allowed(name));
    let less = TWICE.iter().filter(|(name, count)| versions.get(*name).map_or(0, BTreeSet::len) < *count);
    let faults: Vec<_> = more
        .map(|(name, its)| {
            format!(
                "{name} is there as {its:?}: find who asks for which with `cargo tree -i {name}@VERSION`, and take one"
            )
        })
        .chain(less.map(|(name, _)| {
            format!("{name} is there less often than TWICE in xtask/tests/tidy/supply.rs says: lower it")
        }))
        .collect();
    none(&faults);
}
