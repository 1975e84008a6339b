//! From TOML text to a [`Config`], or to every fault in it.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::time::Duration;

use postbox_core::limits::{BATCH_EVENTS_MAX, LANES_MAX};
use postbox_core::{
    LogName, Ordering, RetryPolicy, SourceName, StartAt, Subscription, SubscriptionName, Tenant, TopicPattern,
};
use postbox_engine::OnDead;
use postbox_http::HttpSinkConfig;
use postbox_http::ingress::Origin;
use postbox_webhook::plain::{Encoding, Hash, Layout};
use postbox_webhook::{Scheme, Settings, Tolerance};
use toml::de::DeTable;

use super::faults::{Fault, suggestion};
use super::model::*;
use super::reader::{At, Lookup, Reader, Section};
use crate::secret::Secret;
use crate::store::StoreUrl;

/// Most deliveries at once to one destination: more than any endpoint answers faster for, and 1,024 sockets are the usual limit of a process.
const CONCURRENCY_MAX: u64 = 512;
/// Most attempts: at the 5 minute cap this is a week of trying.
const ATTEMPTS_MAX: u64 = 10_000;
/// Shortest lease: below it a pause of the program or the database already loses the lane.
const LEASE_MIN: Duration = Duration::from_secs(1);

pub(super) fn parse(text: &str, env: Lookup<'_>, secrets_needed: bool) -> Result<Config, Vec<Fault>> {
    let reader = Reader::new(text, env, secrets_needed);
    let (root, errors) = DeTable::parse_recoverable(text);
    for error in &errors {
        let line = error.span().map_or(0, |span| reader.line(&span));
        reader.fault(line, format!("this is not TOML: {}", one_line(error.message())));
    }
    let mut config = Config::default();
    // A tree with holes would only give faults that vanish once the syntax is right.
    if errors.is_empty() {
        read_root(&Section::new(&reader, String::new(), 1, root.get_ref()), &mut config);
        Section::finish_root(&reader, root.get_ref());
    }
    let faults = reader.into_faults();
    if faults.is_empty() { Ok(config) } else { Err(faults) }
}

const ROOT_KEYS: [&str; 6] = ["store", "subscriptions", "sources", "server", "retention", "log"];

impl Section<'_, '_> {
    fn finish_root(reader: &Reader<'_>, root: &DeTable<'_>) {
        for name in root.keys() {
            if !ROOT_KEYS.contains(&name.get_ref().as_ref()) {
                let text = format!("unknown section `{}`; {}", name.get_ref(), suggestion(name.get_ref(), &ROOT_KEYS));
                reader.fault(reader.line(&name.span()), text);
            }
        }
    }
}

fn read_root(root: &Section<'_, '_>, config: &mut Config) {
    if let Some(section) = root.section("store") {
        read_store(section, &mut config.store);
    }
    for (name, section) in root.section("subscriptions").map(|table| table.sections()).unwrap_or_default() {
        config.subscriptions.extend(read_subscription(&name, section));
    }
    for (name, section) in root.section("sources").map(|table| table.sections()).unwrap_or_default() {
        config.sources.extend(read_source(&name, section));
    }
    if let Some(section) = root.section("server") {
        read_server(section, &mut config.server);
    }
    if let Some(section) = root.section("retention") {
        read_retention(section, &mut config.retention);
    }
    if let Some(section) = root.section("log") {
        read_log(section, &mut config.log);
    }
}

fn set<T>(field: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *field = value;
    }
}

fn message<T>(result: postbox_core::Result<T>) -> Result<T, String> {
    result.map_err(|error| error.message().to_owned())
}

fn read_store(section: Section<'_, '_>, store: &mut StoreConfig) {
    if let Some(at) = section.string("url")
        && let Some(url) = section.reader.secret(&section.name("url"), &at, true)
    {
        match StoreUrl::parse(url.expose()) {
            Ok(_) => store.url = url,
            Err(text) => section.reader.fault(at.line, format!("{}: {text}", section.name("url"))),
        }
    }
    set(&mut store.schema, section.parsed("schema", |text| check_schema(text).map(|()| text.to_owned())));
    set(&mut store.notify, section.boolean("notify"));
    set(&mut store.pool, section.integer("pool", 1..=100).map(|pool| pool as usize));
    set(&mut store.statement_timeout, section.duration("statement_timeout", Duration::from_millis(100)));
    section.finish();
}

fn check_schema(text: &str) -> Result<(), String> {
    if text.is_empty() || text.len() > 63 || text.contains('\0') || text.starts_with("pg_") {
        return Err(format!("{text:?} cannot be a schema; 1 to 63 bytes, not beginning with pg_"));
    }
    Ok(())
}

fn read_subscription(name: &At<String>, section: Section<'_, '_>) -> Option<SubscriptionConfig> {
    let subscription_name = name_of(&section, name, SubscriptionName::new)?;
    let log = section.parsed("log", |text| message(LogName::new(text))).unwrap_or_else(LogName::outbox);
    let mut subscription = Subscription::new(subscription_name, log);
    for at in section.strings("topics").unwrap_or_default() {
        match TopicPattern::new(at.value.as_str()) {
            Ok(pattern) => subscription.filter.topics.push(pattern),
            Err(error) => section.reader.fault(at.line, format!("{}: {}", section.name("topics"), error.message())),
        }
    }
    subscription.filter.tenant = section.parsed("tenant", |text| message(Tenant::new(text)));
    set(&mut subscription.ordering, choice(&section, "ordering", &[("key", Ordering::Key), ("none", Ordering::None)]));
    set(
        &mut subscription.start,
        choice(&section, "start", &[("beginning", StartAt::Beginning), ("now", StartAt::Now)]),
    );
    set(&mut subscription.lanes, section.integer("lanes", 1..=u64::from(LANES_MAX)).map(|lanes| lanes as u16));

    let sink = read_sink(&section);
    let mut config = SubscriptionConfig::new(subscription, SinkConfig::None);
    let settings = &mut config.settings;
    set(&mut settings.batch.events, section.integer("batch", 1..=BATCH_EVENTS_MAX as u64).map(|batch| batch as usize));
    set(&mut settings.batch.payload_bytes, section.size("batch_bytes", 1..=1 << 30));
    if let Some(retry) = section.section("retry") {
        read_retry(retry, &mut settings.retry);
    }
    if let Some(breaker) = section.section("breaker") {
        set(&mut settings.breaker.base, breaker.duration("base", Duration::from_millis(1)));
        set(&mut settings.breaker.max, breaker.duration("max", Duration::from_millis(1)));
        breaker.finish();
    }
    set(&mut settings.on_dead, choice(&section, "on_dead", &[("continue", OnDead::Continue), ("halt", OnDead::Halt)]));
    set(&mut settings.deliver_timeout, section.duration("timeout", Duration::from_millis(1)));
    settings.concurrency = section.integer("concurrency", 1..=CONCURRENCY_MAX).map(|most| most as usize);
    set(&mut settings.poll_max, section.duration("poll_interval", Duration::from_millis(1)));
    settings.poll_min = settings.poll_min.min(settings.poll_max);
    set(&mut settings.lease_ttl, section.duration("lease", LEASE_MIN));
    config.schedule = section.parsed("schedule", str::parse);
    section.finish();
    config.sink = sink?;
    Some(config)
}

fn name_of<T>(
    section: &Section<'_, '_>,
    name: &At<String>,
    make: impl FnOnce(String) -> postbox_core::Result<T>,
) -> Option<T> {
    match make(name.value.clone()) {
        Ok(name) => Some(name),
        Err(error) => {
            section.reader.fault(name.line, format!("[{}]: {}", section.path, error.message()));
            None
        }
    }
}

fn choice<T: Copy>(section: &Section<'_, '_>, key: &'static str, choices: &[(&str, T)]) -> Option<T> {
    section.parsed(key, |text| {
        let found = choices.iter().find(|(word, _)| *word == text);
        let words: Vec<&str> = choices.iter().map(|(word, _)| *word).collect();
        found.map(|(_, value)| *value).ok_or_else(|| format!("{text:?} is not one of {}", words.join(", ")))
    })
}

fn read_retry(section: Section<'_, '_>, retry: &mut RetryPolicy) {
    set(&mut retry.attempts_max, section.integer("max_attempts", 1..=ATTEMPTS_MAX).map(|most| most as u32));
    set(&mut retry.base, section.duration("base", Duration::from_millis(1)));
    set(&mut retry.delay_max, section.duration("max", Duration::from_millis(1)));
    for at in section.strings("delays").unwrap_or_default() {
        match super::values::parse_duration(&at.value) {
            Ok(delay) => retry.delays.push(delay),
            Err(text) => section.reader.fault(at.line, format!("{}: {text}", section.name("delays"))),
        }
    }
    if retry.base > retry.delay_max {
        let (base, max) = (retry.base, retry.delay_max);
        section.fault(
            "base",
            format!("{} is {base:?}, longer than max = {max:?}; raise max or lower base", section.name("base")),
        );
    }
    section.finish();
}

/// Sinks of the plan that this program does not have yet.
const SINKS_PLANNED: [&str; 5] = ["nats", "redis", "kafka", "amqp", "sqs"];
const SINKS: [&str; 4] = ["http", "file", "stdout", "none"];

/// `None` after a fault.
fn read_sink(subscription: &Section<'_, '_>) -> Option<SinkConfig> {
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
        planned if SINKS_PLANNED.contains(&planned) => {
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
            section.reader.fault(kind.line, text);
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
    let secrets = read_secrets(section);
    let known = secrets.iter().all(|secret| !secret.expose().is_empty());
    if known && let Err(text) = crate::wiring::sign_keys(&secrets) {
        section.fault(if section.has("secret") { "secret" } else { "secrets" }, format!("{}: {text}", section.path));
    }
    let public_only = section.boolean("public_only").unwrap_or(false);
    let ca_file = section.string("ca_file").map(|at| at.value.into());
    let source = section.string("source").map(|at| at.value);
    let mut headers = Vec::new();
    for (name, at) in section.section("headers").map(|table| table.texts()).unwrap_or_default() {
        let path = format!("{}.headers.{name}", section.path);
        let Some(value) = section.reader.secret(&path, &at, false) else { continue };
        let probe = HttpSinkConfig {
            headers: vec![(name.clone(), value.expose().to_owned())],
            ..HttpSinkConfig::new("https://example.org/")
        };
        for fault in probe.faults() {
            section.reader.fault(at.line, format!("{path}: {fault}"));
        }
        headers.push((name, value));
    }
    if !section.has("url") {
        section.fault("url", format!("{} needs a url, e.g. url = \"https://example.org/hook\"", section.path));
    }
    let url = section.parsed("url", check_url)?;
    Some(SinkConfig::Http(HttpConfig { url, secrets, headers, public_only, ca_file, source }))
}

fn check_url(text: &str) -> Result<String, String> {
    match HttpSinkConfig::new(text).faults().into_iter().next() {
        Some(fault) => Err(fault),
        None => Ok(text.to_owned()),
    }
}

/// `secret = "…"` and `secrets = ["…"]`.
fn read_secrets(section: &Section<'_, '_>) -> Vec<Secret> {
    let single = section.string("secret").into_iter();
    let all = single.chain(section.strings("secrets").unwrap_or_default());
    all.filter_map(|at| section.reader.secret(&section.path, &at, false)).collect()
}

fn read_source(name: &At<String>, section: Section<'_, '_>) -> Option<SourceConfig> {
    let source_name = name_of(&section, name, SourceName::new)?;
    match section.string("type") {
        Some(kind) if kind.value == "webhook" => {}
        Some(kind) if SINKS_PLANNED.contains(&kind.value.as_str()) => {
            let text = format!(
                "{}: sources of type {:?} are not in this release; use webhook",
                section.name("type"),
                kind.value
            );
            section.reader.fault(kind.line, text);
            return None;
        }
        Some(kind) => {
            let text = format!(
                "{}: {:?} is no source; {}",
                section.name("type"),
                kind.value,
                suggestion(&kind.value, &["webhook"])
            );
            section.reader.fault(kind.line, text);
            return None;
        }
        None => section.fault("type", format!("[{}] has no type; write type = \"webhook\"", section.path)),
    }
    let faults_before = section.reader.count();
    let scheme = read_scheme(&section);
    let settings = read_settings(&section, scheme);
    let faults_before_secrets = section.reader.count();
    let secrets = read_secrets(&section);
    if secrets.is_empty() && section.reader.count() == faults_before_secrets {
        let path = &section.path;
        let text = format!("[{path}] has no secrets; nothing unverified is accepted: write secrets = [\"env:NAME\"]");
        section.fault("secrets", text);
    }
    if let Some(scheme) = scheme
        && section.reader.count() == faults_before
    {
        check_source(&section, scheme, &secrets, &settings);
    }
    let source = SourceConfig {
        name: source_name,
        log: section.parsed("log", |text| message(LogName::new(text))).unwrap_or_else(LogName::inbox),
        scheme: scheme.unwrap_or(Scheme::StandardWebhooks),
        settings,
        secrets,
        body_max: section.size("body_max", 1..=BODY_BYTES_MAX).unwrap_or(BODY_BYTES_DEFAULT),
        mapping: MappingConfig {
            id: section.parsed("id", parse_origin),
            topic: section.parsed("topic", parse_origin),
            key: section.parsed("key", parse_origin),
            tenant: section.parsed("tenant", parse_origin),
        },
    };
    section.finish();
    Some(source)
}

fn read_scheme(section: &Section<'_, '_>) -> Option<Scheme> {
    if !section.has("scheme") {
        section.fault("scheme", format!("[{}] has no scheme; write scheme = \"standard-webhooks\"", section.path));
    }
    section.parsed("scheme", |text| match text {
        "standard" => Ok(Scheme::StandardWebhooks),
        "sns" => Err("the scheme \"sns\" is not in this release".to_owned()),
        other => other
            .parse()
            .map_err(|_| format!("{other:?} is no scheme; {}", suggestion(other, &Scheme::ALL.map(Scheme::as_str)))),
    })
}

fn read_settings(section: &Section<'_, '_>, scheme: Option<Scheme>) -> Settings {
    let mut settings = Settings::default();
    if let Some(tolerance) = section.duration("tolerance", Duration::from_secs(1)) {
        let seconds = u32::try_from(tolerance.as_secs()).unwrap_or(u32::MAX);
        settings.tolerance = Tolerance { past_s: seconds, future_s: seconds };
    }
    // Without a scheme every key is allowed, so that one fault does not look like three.
    if scheme.is_none_or(|scheme| scheme == Scheme::Twilio) {
        settings.public_url = section.parsed("public_url", check_url);
    }
    if scheme.is_none_or(|scheme| scheme == Scheme::Hmac) {
        settings.layout = read_layout(section);
    }
    settings
}

fn read_layout(section: &Section<'_, '_>) -> Option<Layout> {
    let header = |text: &str| {
        http::HeaderName::try_from(text).map(|name| name.to_string()).map_err(|_| format!("{text:?} is no header name"))
    };
    let layout = section.parsed("signature_header", header).map(Layout::new);
    let prefix = section.string("signature_prefix");
    let hash = choice(section, "hash", &[("sha256", Hash::Sha256), ("sha512", Hash::Sha512)]);
    let encoding = choice(section, "encoding", &[("hex", Encoding::Hex), ("base64", Encoding::Base64)]);
    let timestamp_header = section.parsed("timestamp_header", header);
    let separator = section.string("separator");
    let mut layout = layout?;
    set(&mut layout.prefix, prefix.map(|at| at.value));
    set(&mut layout.hash, hash);
    set(&mut layout.encoding, encoding);
    layout.timestamp_header = timestamp_header;
    set(&mut layout.separator, separator.map(|at| at.value));
    Some(layout)
}

/// Whether scheme, secrets and settings make a verifier together.
fn check_source(section: &Section<'_, '_>, scheme: Scheme, secrets: &[Secret], settings: &Settings) {
    let path = &section.path;
    if scheme == Scheme::Twilio && settings.public_url.is_none() {
        section.fault(
            "scheme",
            format!("[{path}] needs public_url, the URL as given to Twilio: it is part of what is signed"),
        );
    } else if scheme == Scheme::Hmac && settings.layout.is_none() {
        section.fault("scheme", format!("[{path}] needs signature_header, e.g. \"x-signature\""));
    } else if secrets.iter().all(|secret| !secret.expose().is_empty())
        // What is unset for a command that does not need it is empty; only real keys are checked.
        && let Err(text) = crate::wiring::verifier(scheme, secrets, settings)
    {
        section.fault(if section.has("secrets") { "secrets" } else { "secret" }, format!("[{path}]: {text}"));
    }
}

fn parse_origin(text: &str) -> Result<Origin, String> {
    if let Some(header) = text.strip_prefix("header:") {
        let name = http::HeaderName::try_from(header).map_err(|_| format!("{header:?} is no header name"))?;
        return Ok(Origin::Header(name.as_str().to_owned()));
    }
    if let Some(pointer) = text.strip_prefix("json:") {
        if !pointer.starts_with('/') {
            return Err(format!("{pointer:?} is no JSON pointer; it begins with a slash, e.g. \"json:/data/id\""));
        }
        return Ok(Origin::Json(pointer.to_owned()));
    }
    if text.is_empty() {
        return Err("is empty; write a fixed text, \"header:NAME\" or \"json:/POINTER\"".into());
    }
    Ok(Origin::Literal(text.to_owned()))
}

fn read_server(section: Section<'_, '_>, server: &mut ServerConfig) {
    let listen = section.parsed("listen", |text| {
        text.parse::<SocketAddr>()
            .map_err(|_| format!("{text:?} is no address; write IP:PORT, e.g. \"127.0.0.1:8600\""))
    });
    set(&mut server.listen, listen);
    set(&mut server.stop_timeout, section.duration("stop_timeout", Duration::from_millis(100)));
    section.finish();
}

fn read_retention(section: Section<'_, '_>, retention: &mut RetentionConfig) {
    set(&mut retention.older_than, section.duration("older_than", Duration::ZERO));
    set(&mut retention.remember_ids, section.duration("remember_ids", Duration::from_secs(1)));
    set(&mut retention.schedule, section.parsed("schedule", str::parse));
    section.finish();
}

/// What a log filter may begin with.
const LEVELS: [&str; 6] = ["error", "warn", "info", "debug", "trace", "off"];

fn read_log(section: Section<'_, '_>, log: &mut LogConfig) {
    let level = section.parsed("level", |text| {
        // A whole filter (`info,postbox_engine=debug`) is checked by the subscriber that reads it; one word is checked here.
        let known: HashSet<&str> = LEVELS.into();
        if text.contains(['=', ',']) || known.contains(text) {
            return Ok(text.to_owned());
        }
        Err(format!("{text:?} is no level; {}", suggestion(text, &LEVELS)))
    });
    set(&mut log.level, level);
    set(&mut log.format, choice(&section, "format", &[("text", LogFormat::Text), ("json", LogFormat::Json)]));
    section.finish();
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
