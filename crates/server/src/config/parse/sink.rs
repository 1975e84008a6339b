//! `sink = { … }` of a subscription.

use std::net::IpAddr;
use std::path::PathBuf;

use postbox_http::{ClientCert, HttpSinkConfig, IpNet};

use super::super::faults::{may_be_secret, suggestion};
use super::super::model::{HttpConfig, SinkConfig};
use super::super::reader::Section;
use super::BROKERS_PLANNED;
use super::secrets::read_secrets;

const SINKS: [&str; 4] = ["http", "file", "stdout", "none"];

/// `None` after a fault.
pub(super) fn read_sink(subscription: &Section<'_, '_>) -> Option<SinkConfig> {
    if !subscription.has("sink") {
        return Some(SinkConfig::None);
    }
    let section = subscription.section("sink")?;
    let Some(kind) = section.string("type") else {
        section.fault("type", format!("{} has no type; write sink = {{ type = \"http\", … }}", section.path));
        return None;
    };
    let sink = match kind.value.as_str() {
        "none" => Some(SinkConfig::None),
        "stdout" => Some(SinkConfig::Stdout),
        "file" => read_file_sink(&section),
        "http" => read_http_sink(&section),
        planned if BROKERS_PLANNED.contains(&planned) => {
            let text = format!(
                "{}: sinks of type {planned:?} are not in this release; use {}",
                section.name("type"),
                SINKS.join(", ")
            );
            section.reader.fault(kind.line, text);
            return None;
        }
        other => {
            let text = format!("{}: {other:?} is no sink; {}", section.name("type"), suggestion(other, &SINKS));
            section.reader.refuse(kind.line, other, text);
            return None;
        }
    };
    section.finish();
    sink
}

fn read_file_sink(section: &Section<'_, '_>) -> Option<SinkConfig> {
    match section.string("path") {
        Some(path) if !path.value.is_empty() => Some(SinkConfig::File { path: path.value.into() }),
        _ => {
            section.fault("path", format!("{} needs a path, e.g. path = \"events.jsonl\"", section.path));
            None
        }
    }
}

fn read_http_sink(section: &Section<'_, '_>) -> Option<SinkConfig> {
    let faults_before = section.reader.count();
    let secrets = read_secrets(section);
    if section.has("secrets") && secrets.is_empty() && section.reader.count() == faults_before {
        let text =
            format!("{} has no key in secrets; name one, or leave it out to send without a signature", section.path);
        section.fault("secrets", text);
    }
    // What is unset for a command that does not need it is empty; only real keys are checked, and only if all are here.
    let known = secrets.iter().all(|live| !live.secret.expose().is_empty()) && section.reader.count() == faults_before;
    if known && let Err(text) = crate::wiring::check_sign_keys(&secrets) {
        section.fault(if section.has("secrets") { "secrets" } else { "secret" }, format!("{}: {text}", section.path));
    }
    let allow = read_allow(section);
    let ca_file = section.string("ca_file").map(|at| at.value.into());
    let client_cert = read_client_cert(section);
    let source = section.string("source").map(|at| at.value);
    let mut headers = Vec::new();
    for (name, at) in section.section("headers").map(|table| table.texts()).unwrap_or_default() {
        let shown = if may_be_secret(&name) { "…" } else { &name };
        let path = format!("{}.headers.{shown}", section.path);
        let Some(value) = section.reader.secret(&path, &at, false) else { continue };
        let probe = HttpSinkConfig {
            headers: vec![(name.clone(), value.expose().to_owned())],
            ..HttpSinkConfig::new("https://example.org/")
        };
        for fault in probe.faults() {
            section.reader.refuse(at.line, &name, format!("{path}: {fault}"));
        }
        headers.push((name, value));
    }
    if !section.has("url") {
        section.fault("url", format!("{} needs a url, e.g. url = \"https://example.org/hook\"", section.path));
    }
    let url = section.parsed("url", |text| {
        let probe = HttpSinkConfig { allow: allow.clone(), ..HttpSinkConfig::new(text) };
        probe.faults().into_iter().next().map_or_else(|| Ok(text.to_owned()), Err)
    })?;
    if section.reader.files && section.reader.count() == faults_before {
        let probe = HttpSinkConfig {
            allow: allow.clone(),
            ca_file: ca_file.clone(),
            client_cert: client_cert.clone(),
            ..HttpSinkConfig::new(url.as_str())
        };
        check_files(section, &probe);
    }
    Some(SinkConfig::Http(HttpConfig { url, secrets, headers, allow, ca_file, client_cert, source }))
}

/// What the files hold, at the line that names them.
fn check_files(section: &Section<'_, '_>, probe: &HttpSinkConfig) {
    if probe.ca_file.is_none() && probe.client_cert.is_none() {
        return;
    }
    if let Err(error) = probe.check_files() {
        let key = if error.code() == "ca_file_invalid" { "ca_file" } else { "client_cert" };
        section.fault(key, format!("{}: {}", section.path, error.message()));
    }
}

/// `allow`: networks, or single addresses.
fn read_allow(section: &Section<'_, '_>) -> Vec<IpNet> {
    let mut allow = Vec::new();
    for at in section.strings("allow").unwrap_or_default() {
        let net = at.value.parse::<IpNet>().or_else(|_| at.value.parse::<IpAddr>().map(IpNet::from));
        match net {
            Ok(net) => allow.push(net),
            Err(_) => {
                let path = section.name("allow");
                let text = format!("{path}: {:?} is no network; write e.g. \"10.20.0.0/16\"", at.value);
                section.reader.refuse(at.line, &at.value, text);
            }
        }
    }
    allow
}

/// `client_cert` and `client_key`: both or none.
fn read_client_cert(section: &Section<'_, '_>) -> Option<ClientCert> {
    let [cert, key] = ["client_cert", "client_key"].map(|name| section.string(name).map(|at| PathBuf::from(at.value)));
    match (cert, key) {
        (Some(cert_file), Some(key_file)) => Some(ClientCert { cert_file, key_file }),
        (None, None) => None,
        (cert, _) => {
            let (there, missing) =
                if cert.is_some() { ("client_cert", "client_key") } else { ("client_key", "client_cert") };
            let path = &section.path;
            section.fault(there, format!("{path} has {there} and no {missing}; a client certificate needs both files"));
            None
        }
    }
}
