//! From TOML text to a [`Config`], or to every fault in it.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::time::Duration;

use postbox_core::limits::{BATCH_EVENTS_MAX, LANES_MAX};
use postbox_core::{LogName, Ordering, SourceName, StartAt, Subscription, SubscriptionName, Tenant, TopicPattern};
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
    set(&mut config.batch.events, section.integer("batch", 1..=BATCH_EVENTS_MAX as u64).map(|batch| batch as usize));
    set(&mut config.batch.payload_bytes, section.size("batch_bytes", 1..=1 << 30));
    if let Some(retry) = section.section("retry") {
        read_retry(retry, &mut config);
    }
    set(&mut config.on_dead, choice(&section, "on_dead", &[("continue", OnDead::Continue), ("halt", OnDead::Halt)]));
    set(&mut config.timeout, section.duration("timeout", Duration::from_millis(1)));
    config.concurrency = section.integer("concurrency", 1..=CONCURRENCY_MAX).map(|most| most as usize);
    set(&mut config.poll_interval, section.duration("poll_interval", Duration::from_millis(1)));
    set(&mut config.lease, section.duration("lease", LEASE_MIN));
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

fn read_retry(section: Section<'_, '_>, config: &mut SubscriptionConfig) {
    let retry = &mut config.retry;
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
    let allow_private = section.boolean("allow_private").unwrap_or(false);
    let mut headers = Vec::new();
    for (name, at) in section.section("headers").map(|table| table.texts()).unwrap_or_default() {
        if http::HeaderName::try_from(name.as_str()).is_err() {
            section.reader.fault(at.line, format!("{}.headers: {name:?} is no header name", section.path));
            continue;
        }
        if let Some(value) = section.reader.secret(&format!("{}.headers.{name}", section.path), &at, false) {
            if http::HeaderValue::try_from(value.expose()).is_err() {
                section
                    .reader
                    .fault(at.line, format!("{}.headers.{name}: a header's value has no line breaks", section.path));
            }
            headers.push((name, value));
        }
    }
    if !section.has("url") {
        section.fault("url", format!("{} needs a url, e.g. url = \"https://example.org/hook\"", section.path));
    }
    let url = section.parsed("url", check_url)?;
    Some(SinkConfig::Http(HttpConfig { url, secrets, headers, allow_private }))
}

fn check_url(text: &str) -> Result<String, String> {
    let url =
        url::Url::parse(text).map_err(|error| format!("{text:?} is no URL ({error}); write https://host/path"))?;
    if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none() {
        return Err(format!("{text:?} must begin with https:// or http:// and name a host"));
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err("a URL holds no user or password; send an authorization header instead: headers = { authorization = \"env:HOOK_AUTH\" }".into());
    }
    Ok(text.to_owned())
}

/// `secret = "…"` and `secrets = ["…"]`, checked to be usable keys.
fn read_secrets(section: &Section<'_, '_>) -> Vec<Secret> {
    let single = section.string("secret").into_iter();
    let all = single.chain(section.strings("secrets").unwrap_or_default());
    let resolved =
        all.filter_map(|at| section.reader.secret(&section.path, &at, false).map(|secret| (at.line, secret)));
    let usable = resolved.filter(|(line, secret)| {
        let fault = (!secret.expose().is_empty()).then(|| crate::wiring::check_key(secret)).and_then(Result::err);
        if let Some(text) = &fault {
            section.reader.fault(*line, format!("{}: {text}", section.path));
        }
        fault.is_none()
    });
    usable.map(|(_, secret)| secret).collect()
}

/// Schemes of the plan that this program does not have yet.
const SCHEMES_PLANNED: [&str; 7] = ["stripe", "github", "shopify", "slack", "twilio", "sns", "hmac"];
const SCHEMES: [&str; 1] = ["standard"];

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
    let scheme = read_scheme(&section);
    let fault_count = section.reader.count();
    let secrets = read_secrets(&section);
    if secrets.is_empty() && section.reader.count() == fault_count {
        let text = format!(
            "[{}] has no secrets; nothing unverified is accepted: write secrets = [\"env:NAME\"]",
            section.path
        );
        section.fault("secrets", text);
    }
    let source = SourceConfig {
        name: source_name,
        log: section.parsed("log", |text| message(LogName::new(text))).unwrap_or_else(LogName::inbox),
        scheme: scheme.unwrap_or(Scheme::Standard),
        secrets,
        tolerance: section.duration("tolerance", Duration::from_secs(1)).unwrap_or(Duration::from_secs(300)),
        body_max: section.size("body_max", 1..=BODY_BYTES_MAX).unwrap_or(BODY_BYTES_DEFAULT),
        mapping: Mapping {
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
        section.fault("scheme", format!("[{}] has no scheme; write scheme = \"standard\"", section.path));
        return None;
    }
    section.parsed("scheme", |text| match text {
        "standard" | "standard-webhooks" => Ok(Scheme::Standard),
        planned if SCHEMES_PLANNED.contains(&planned) => {
            Err(format!("the scheme {planned:?} is not in this release; use {}", SCHEMES.join(", ")))
        }
        other => Err(format!("{other:?} is no scheme; {}", suggestion(other, &SCHEMES))),
    })
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
