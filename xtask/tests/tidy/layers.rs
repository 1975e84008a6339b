//! The layers of crates, checked with `cargo metadata`. To change a rule, edit it here and give the
//! reason in the commit.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use serde_json::Value;

use crate::{none, root};

/// The workspace crates that a crate may use. Crates that are not listed may use none.
const ALLOWED: &[(&str, &[&str])] = &[
    ("postbox-core", &[]),
    ("postbox-config", &["postbox-core"]),
    ("postbox-memory", &["postbox-core"]),
    ("postbox-derive", &[]),
    ("postbox-webhook", &[]),
    // Runs relays and receivers with the adapters under test.
    ("postbox-testkit", &["postbox-config", "postbox-core", "postbox-engine", "postbox-memory", "postbox-receiver"]),
    ("postbox-postgres-sql", &["postbox-core"]),
    ("postbox-postgres", &["postbox-config", "postbox-core", "postbox-postgres-sql"]),
    ("postbox-sqlite", &["postbox-config", "postbox-core"]),
    ("postbox-sqlx", &["postbox-core", "postbox-postgres", "postbox-postgres-sql"]),
    ("postbox-sqlx08", &["postbox-core", "postbox-postgres-sql"]),
    ("postbox-diesel", &["postbox-core", "postbox-postgres-sql"]),
    // On top of `diesel` and of `sqlx`, because they bind values and fail in the same way.
    ("postbox-diesel-async", &["postbox-core", "postbox-diesel", "postbox-postgres", "postbox-postgres-sql"]),
    ("postbox-sea-orm", &["postbox-core", "postbox-postgres-sql", "postbox-sqlx"]),
    ("postbox-bus", &["postbox-core"]),
    ("postbox-http", &["postbox-config", "postbox-core", "postbox-webhook"]),
    ("postbox-kafka", &["postbox-config", "postbox-core"]),
    ("postbox-mqtt", &["postbox-config", "postbox-core"]),
    ("postbox-nats", &["postbox-config", "postbox-core"]),
    ("postbox-rabbitmq", &["postbox-config", "postbox-core"]),
    ("postbox-redis", &["postbox-config", "postbox-core"]),
    ("postbox-sqs", &["postbox-config", "postbox-core"]),
    ("postbox-router", &["postbox-core"]),
    // A relay takes a router as its destination.
    ("postbox-engine", &["postbox-core", "postbox-router"]),
    ("postbox-receiver", &["postbox-core"]),
    ("postbox-listen", &["postbox-core"]),
    ("postbox-otel", &["postbox-core"]),
    ("postbox-schema", &["postbox-core"]),
    ("postbox-ingress", &["postbox-config", "postbox-core", "postbox-receiver", "postbox-http", "postbox-webhook"]),
    ("postbox-simulator", &["postbox-core", "postbox-engine", "postbox-memory", "postbox-sqlite"]),
    (
        "postbox",
        &[
            "postbox-core",
            "postbox-derive",
            "postbox-diesel",
            "postbox-diesel-async",
            "postbox-engine",
            "postbox-http",
            "postbox-ingress",
            "postbox-listen",
            "postbox-memory",
            "postbox-otel",
            "postbox-postgres",
            "postbox-receiver",
            "postbox-router",
            "postbox-schema",
            "postbox-sea-orm",
            "postbox-sqlite",
            "postbox-sqlx",
            "postbox-sqlx08",
            "postbox-webhook",
        ],
    ),
    (
        "postbox-server",
        &[
            "postbox-bus",
            "postbox-config",
            "postbox-core",
            "postbox-engine",
            "postbox-http",
            "postbox-ingress",
            "postbox-kafka",
            "postbox-listen",
            "postbox-memory",
            "postbox-mqtt",
            "postbox-nats",
            "postbox-postgres",
            "postbox-rabbitmq",
            "postbox-receiver",
            "postbox-redis",
            "postbox-sqlite",
            "postbox-sqs",
        ],
    ),
    (
        "postbox-cli",
        &[
            "postbox-core",
            "postbox-engine",
            "postbox-http",
            "postbox-ingress",
            "postbox-otel",
            "postbox-postgres",
            "postbox-server",
            "postbox-sqlite",
            "postbox-webhook",
        ],
    ),
    (
        "postbox-bench",
        &[
            "postbox-config",
            "postbox-core",
            "postbox-engine",
            "postbox-http",
            "postbox-ingress",
            "postbox-kafka",
            "postbox-listen",
            "postbox-nats",
            "postbox-postgres",
            "postbox-rabbitmq",
            "postbox-receiver",
            "postbox-redis",
            "postbox-server",
            "postbox-sqlite",
            "postbox-sqs",
            "postbox-testkit",
            "postbox-webhook",
        ],
    ),
    (
        "postbox-crash",
        &["postbox-core", "postbox-crash-checker", "postbox-postgres", "postbox-sqlite", "postbox-testkit"],
    ),
    // It judges the product, so it uses nothing of it.
    ("postbox-crash-checker", &[]),
    ("xtask", &[]),
];

/// Small, stable libraries that every crate may use.
const COMMON: &[&str] = &[
    "anyhow",
    "async-trait",
    "base64",
    "bytes",
    "futures",
    "http",
    "jiff",
    "rand",
    "serde",
    "serde_json",
    "tempfile",
    "thiserror",
    "tokio",
    "tokio-util",
    "tracing",
    "url",
    "uuid",
];

/// Every other external library, and the crates that may use it. A client of a server has one home
/// among the published crates; tools (`bench`, `crash`, the simulator) use their own client to
/// inspect a store or a broker.
const CLIENTS: &[(&str, &[&str])] = &[
    ("async-nats", &["postbox-nats", "postbox-bench"]),
    ("aws-config", &["postbox-sqs"]),
    ("aws-sdk-sns", &["postbox-sqs"]),
    ("aws-sdk-sqs", &["postbox-sqs", "postbox-bench"]),
    ("aws-smithy-http-client", &["postbox-sqs", "postbox-bench"]),
    ("axum", &["postbox-ingress", "postbox-listen", "postbox-server", "postbox-cli", "postbox-bench"]),
    ("clap", &["postbox-cli", "postbox-bench", "postbox-crash", "postbox-simulator", "xtask"]),
    ("clap_complete", &["postbox-cli"]),
    ("comfy-table", &["postbox-cli"]),
    ("croner", &["postbox-server"]),
    ("deadpool-postgres", &["postbox-bench", "postbox-postgres"]),
    ("diesel", &["postbox-diesel", "postbox-diesel-async"]),
    ("diesel-async", &["postbox-diesel-async"]),
    ("ed25519-dalek", &["postbox-webhook"]),
    ("hmac", &["postbox-webhook"]),
    ("http-body", &["postbox-ingress", "postbox-listen"]),
    ("http-body-util", &["postbox-ingress", "postbox-server"]),
    ("hyper", &["postbox-listen", "postbox-server"]),
    ("hyper-util", &["postbox-listen", "postbox-server", "postbox-sqs"]),
    ("ipnet", &["postbox-http"]),
    ("jsonschema", &["postbox-schema"]),
    ("krafka", &["postbox-kafka", "postbox-bench"]),
    ("lapin", &["postbox-rabbitmq", "postbox-bench"]),
    ("mimalloc", &["postbox-bench", "postbox-cli"]),
    ("opentelemetry", &["postbox-otel"]),
    ("opentelemetry-http", &["postbox-otel"]),
    ("opentelemetry-otlp", &["postbox-otel"]),
    ("opentelemetry-proto", &["postbox-testkit"]),
    ("opentelemetry_sdk", &["postbox-otel"]),
    ("postgres-types", &["postbox-postgres-sql"]),
    ("proc-macro2", &["postbox-derive"]),
    ("prometheus-client", &["postbox-server"]),
    ("prost", &["postbox-testkit"]),
    ("public-api", &["xtask"]),
    ("quote", &["postbox-derive"]),
    ("rcgen", &["postbox-testkit"]),
    ("rdkafka", &["postbox-kafka"]),
    ("redis", &["postbox-redis", "postbox-bench"]),
    ("reqwest", &["postbox-http", "postbox-otel"]),
    ("ring", &["postbox-webhook"]),
    ("rumqttc", &["postbox-mqtt"]),
    ("rusqlite", &["postbox-sqlite", "postbox-cli", "postbox-bench", "postbox-crash", "postbox-simulator"]),
    ("rustix", &["postbox-cli"]),
    (
        "rustls",
        &[
            "postbox-cli",
            "postbox-http",
            "postbox-mqtt",
            "postbox-otel",
            "postbox-postgres",
            "postbox-rabbitmq",
            "postbox-sqs",
        ],
    ),
    ("rustls-platform-verifier", &["postbox-http", "postbox-mqtt"]),
    ("schemars", &["postbox-schema"]),
    ("sea-orm", &["postbox-sea-orm"]),
    ("sha1", &["postbox-webhook"]),
    (
        "sha2",
        &[
            "postbox-bus",
            "postbox-core",
            "postbox-ingress",
            "postbox-kafka",
            "postbox-mqtt",
            "postbox-nats",
            "postbox-rabbitmq",
            "postbox-redis",
            "postbox-sqs",
            "postbox-webhook",
        ],
    ),
    // Both versions.
    ("sqlx", &["postbox-sqlite", "postbox-sqlx", "postbox-sqlx08"]),
    // Its counter of transactions, which the facade does not show.
    ("sqlx-core", &["postbox-sqlite"]),
    ("strsim", &["postbox-config"]),
    ("subtle", &["postbox-server", "postbox-webhook"]),
    ("syn", &["postbox-derive"]),
    ("tokio-postgres", &["postbox-postgres", "postbox-testkit", "postbox-bench", "postbox-crash"]),
    ("tokio-postgres-rustls", &["postbox-postgres"]),
    ("toml", &["postbox-config", "xtask"]),
    ("tower", &["postbox-listen"]),
    ("tracing-opentelemetry", &["postbox-otel"]),
    ("tracing-subscriber", &["postbox-cli", "postbox-otel"]),
    ("x509-cert", &["postbox-webhook"]),
    ("zeroize", &["postbox-webhook"]),
];

/// Libraries that the engine, the router and the receiver may use besides core: the runtime and
/// small utilities. No driver, no client.
const ENGINE: &[&str] = &[
    // The error type of handlers.
    "anyhow",
    "async-trait",
    "futures",
    "jiff",
    "postbox-core",
    "postbox-router",
    "rand",
    "serde",
    "tokio",
    "tokio-util",
    "tracing",
];

/// What core and webhook must not depend on, not even indirectly: runtimes, drivers, clients.
const NOT_BELOW: &[&str] = &[
    "axum",
    "async-std",
    "hyper",
    "libsqlite3-sys",
    "mio",
    "reqwest",
    "rusqlite",
    "smol",
    "sqlx",
    "tokio",
    "tokio-postgres",
];

struct Graph {
    /// For workspace crates: everything they use outside tests, by name.
    direct: BTreeMap<String, BTreeSet<String>>,
    /// For every package id: the ids it uses outside tests.
    edges: BTreeMap<String, Vec<String>>,
    names: BTreeMap<String, String>,
}

/// The cargo metadata of the workspace and all its possible dependencies.
pub(crate) fn metadata() -> Value {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--all-features", "--locked"])
        .current_dir(root())
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

fn graph() -> Graph {
    let metadata = metadata();
    let list = |value: &Value| value.as_array().expect("a list").clone();
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    let members: BTreeSet<String> = list(&metadata["workspace_members"]).iter().map(text).collect();
    let packages = list(&metadata["packages"]);
    let names = packages.iter().map(|package| (text(&package["id"]), text(&package["name"]))).collect();
    // An example uses what its reader would use.
    let example = |package: &Value| text(&package["manifest_path"]).contains("/examples/");
    let ours = |package: &&Value| members.contains(&text(&package["id"])) && !example(package);
    let direct = packages.iter().filter(ours).map(|package| {
        let used = list(&package["dependencies"]).into_iter().filter(|it| it["kind"].is_null());
        (text(&package["name"]), used.map(|it| text(&it["name"])).collect())
    });
    let in_production = |dependency: &Value| list(&dependency["dep_kinds"]).iter().any(|it| it["kind"].is_null());
    let edges = list(&metadata["resolve"]["nodes"]).into_iter().map(|node| {
        let used = list(&node["deps"]).into_iter().filter(in_production).map(|it| text(&it["pkg"]));
        (text(&node["id"]), used.collect())
    });
    Graph { direct: direct.collect(), edges: edges.collect(), names }
}

impl Graph {
    /// Names of everything that `name` depends on, directly or not.
    fn reach(&self, name: &str) -> BTreeSet<&str> {
        let start = self.names.iter().filter(|(_, its)| its.as_str() == name).map(|(id, _)| id.clone());
        let mut open: Vec<String> = start.collect();
        let mut seen = BTreeSet::new();
        while let Some(id) = open.pop() {
            if seen.insert(id.clone()) {
                open.extend(self.edges.get(&id).into_iter().flatten().cloned());
            }
        }
        seen.iter().filter_map(|id| self.names.get(id)).map(String::as_str).collect()
    }
}

#[test]
fn every_crate_uses_only_the_layers_below_it() {
    let allowed: BTreeMap<&str, &[&str]> = ALLOWED.iter().copied().collect();
    let graph = graph();
    let ours: BTreeSet<&String> = graph.direct.keys().collect();
    let mut faults = Vec::new();
    for (name, used) in &graph.direct {
        let allowed = allowed.get(name.as_str()).copied().unwrap_or_default();
        for other in used.iter().filter(|other| ours.contains(other) && !allowed.contains(&other.as_str())) {
            faults.push(format!(
                "{name} uses {other}: go through a contract in core, or allow it in xtask/tests/tidy/layers.rs"
            ));
        }
    }
    none(&faults);
}

/// A library that is neither common nor listed is a fault, too: adding one requires a decision
/// where it belongs.
#[test]
fn every_client_has_one_home() {
    let graph = graph();
    let homes: BTreeMap<&str, &[&str]> = CLIENTS.iter().copied().collect();
    let mut faults = Vec::new();
    for (name, used) in &graph.direct {
        let outside =
            used.iter().filter(|other| !graph.direct.contains_key(*other) && !COMMON.contains(&other.as_str()));
        for client in outside {
            match homes.get(client.as_str()) {
                Some(homes) if homes.contains(&name.as_str()) => {}
                Some(homes) => faults.push(format!("{name} uses {client}: only {} may", homes.join(", "))),
                None => faults
                    .push(format!("{name} uses {client}: give it a line in CLIENTS in xtask/tests/tidy/layers.rs")),
            }
        }
    }
    for (client, homes) in CLIENTS {
        let unused = homes.iter().filter(|home| !graph.direct.get(**home).is_some_and(|used| used.contains(*client)));
        faults.extend(unused.map(|home| format!("{home} does not use {client}: take it out of CLIENTS")));
    }
    none(&faults);
}

#[test]
fn the_engine_uses_only_core_and_the_runtime() {
    let graph = graph();
    let mut faults = Vec::new();
    for name in ["postbox-engine", "postbox-receiver", "postbox-router"] {
        let others = graph.direct[name].iter().filter(|other| !ENGINE.contains(&other.as_str()));
        faults.extend(others.map(|other| format!("{name} uses {other}: it must run whole in memory")));
    }
    none(&faults);
}

#[test]
fn the_lowest_layer_reaches_no_runtime_driver_or_client() {
    let graph = graph();
    let mut faults = Vec::new();
    for lowest in ["postbox-core", "postbox-webhook"] {
        let reached = graph.reach(lowest);
        assert!(reached.len() > 3, "{lowest} was looked through");
        faults.extend(
            NOT_BELOW
                .iter()
                .filter(|name| reached.contains(**name))
                .map(|name| format!("{lowest} reaches {name}: see `cargo tree -p {lowest} -e normal -i {name}`")),
        );
    }
    none(&faults);
}

#[test]
fn there_is_one_tls_provider() {
    let graph = graph();
    let forbidden = graph.names.values().filter(|name| name.starts_with("aws-lc") || *name == "openssl-sys");
    let faults: Vec<_> = forbidden
        .map(|name| format!("{name} is in the graph: rustls with ring only; see `cargo tree -i {name}`"))
        .collect();
    none(&faults);
}

#[test]
fn the_layers_name_crates_that_exist() {
    let graph = graph();
    let listed: BTreeSet<&str> = ALLOWED.iter().map(|(name, _)| *name).collect();
    let faults: Vec<_> = graph
        .direct
        .keys()
        .filter(|name| !listed.contains(name.as_str()))
        .map(|name| format!("{name} has no line in ALLOWED in xtask/tests/tidy/layers.rs: say what it may use"))
        .chain(
            listed
                .iter()
                .filter(|name| !graph.direct.contains_key(**name))
                .map(|name| format!("ALLOWED in xtask/tests/tidy/layers.rs names {name}, which is no crate of ours")),
        )
        .collect();
    none(&faults);
}
