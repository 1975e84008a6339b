//! `[sources.NAME]`.

use std::time::Duration;

use postbox_core::limits::PAYLOAD_BYTES_MAX;
use postbox_core::{Key, LogName, SourceName, Tenant, Topic};
use postbox_ingress::{Mapping, Origin, SourceLimits};
use postbox_webhook::plain::{Encoding, Hash, Layout};
use postbox_webhook::sns::{TOLERANCE, TopicArn};
use postbox_webhook::{Scheme, Settings, Tolerance};

use super::super::faults::suggestion;
use super::super::model::{LiveSecret, MappingConfig, SnsConfig, SourceConfig};
use super::super::reader::{At, Section};
use super::secrets::read_secrets;
use super::{BROKERS_PLANNED, choice, message, name_of, set};

pub(super) fn read_source(name: &At<String>, section: Section<'_, '_>) -> Option<SourceConfig> {
    let source_name = name_of(&section, name, SourceName::new)?;
    match section.string("type") {
        Some(kind) if kind.value == "webhook" => {}
        Some(kind) if BROKERS_PLANNED.contains(&kind.value.as_str()) => {
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
            section.reader.refuse(kind.line, &kind.value, text);
            return None;
        }
        None => section.fault("type", format!("[{}] has no type; write type = \"webhook\"", section.path)),
    }
    let faults_before = section.reader.count();
    let scheme = read_scheme(&section);
    let settings = read_settings(&section, scheme);
    let faults_before_secrets = section.reader.count();
    let is_sns = scheme == Some(Scheme::Sns);
    let secrets = if is_sns { Vec::new() } else { read_secrets(&section) };
    let sns = is_sns.then(|| read_sns(&section));
    if secrets.is_empty() && !is_sns && section.reader.count() == faults_before_secrets {
        let path = &section.path;
        let text = format!("[{path}] has no secrets; nothing unverified is accepted: write secrets = [\"env:NAME\"]");
        section.fault("secrets", text);
    }
    if let Some(scheme) = scheme.filter(|_| !is_sns)
        && section.reader.count() == faults_before
    {
        check_source(&section, scheme, &secrets, &settings);
    }
    let mapping = MappingConfig {
        id: read_origin(&section, "id", |_| {
            Err::<(), _>("every message would have the same id; write \"json:/POINTER\", or leave it out".into())
        }),
        topic: read_origin(&section, "topic", |text| message(Topic::new(text))),
        key: read_origin(&section, "key", |text| message(Key::new(text))),
        tenant: read_origin(&section, "tenant", |text| message(Tenant::new(text))),
    };
    if let Some(scheme) = scheme {
        check_mapping(&section, scheme, &mapping);
    }
    let source = SourceConfig {
        name: source_name,
        log: section.parsed("log", |text| message(LogName::new(text))).unwrap_or_else(LogName::inbox),
        scheme: scheme.unwrap_or(Scheme::StandardWebhooks),
        settings,
        secrets,
        sns,
        retry_horizon: section
            .duration("retry_horizon", Duration::ZERO)
            .unwrap_or(scheme.map_or(HORIZON_UNKNOWN, retry_horizon)),
        limits: read_limits(&section),
        allowed_origins: read_origins(&section),
        mapping,
    };
    section.finish();
    Some(source)
}

/// What SNS has instead of secrets.
fn read_sns(section: &Section<'_, '_>) -> SnsConfig {
    for key in ["secret", "secrets"] {
        if section.has(key) {
            let path = &section.path;
            let text =
                format!("[{path}] has {key}, but SNS signs with a certificate; leave it out and name your topics");
            section.fault(key, text);
        }
    }
    let mut topics = Vec::new();
    for at in section.strings("topics").unwrap_or_default() {
        match TopicArn::parse(&at.value) {
            Ok(topic) => topics.push(topic),
            Err(error) => {
                section.reader.refuse(at.line, &at.value, format!("{}: {error}", section.name("topics")));
            }
        }
    }
    if !section.has("topics") {
        let text = format!(
            "[{}] has no topics; SNS signs for everybody, so name yours: topics = [\"arn:aws:sns:REGION:ACCOUNT:NAME\"]",
            section.path
        );
        section.fault("topics", text);
    } else if topics.is_empty() {
        section.fault("topics", format!("{} is empty; name at least one", section.name("topics")));
    }
    SnsConfig { topics, confirm: section.boolean("confirm").unwrap_or(false) }
}

/// For senders that nothing is known of.
const HORIZON_UNKNOWN: Duration = Duration::from_hours(7 * 24);

/// How long senders of a scheme go on by the documents named here, rounded up to whole days. `docs/guide/inbox.md` has the same table for users.
fn retry_horizon(scheme: Scheme) -> Duration {
    let days = |days: u64| Duration::from_hours(days * 24);
    match scheme {
        // The example schedule of the specification ends 75 h 35 min 5 s after the first attempt; Svix's own after 27 h 35 min.
        // https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md#deliverability-and-reliability
        // https://docs.svix.com/retries
        Scheme::StandardWebhooks => days(4),
        // By itself for up to three days. A person can have any event of the last 30 days sent again.
        // https://docs.stripe.com/webhooks#automatic-retries https://docs.stripe.com/webhooks/process-undelivered-events
        Scheme::Stripe => days(3),
        // Never by itself. By hand, among the deliveries of the last three days at github.com and of the last seven on Enterprise Server.
        // https://docs.github.com/en/webhooks/testing-and-troubleshooting-webhooks/redelivering-webhooks
        Scheme::GitHub => days(7),
        // Eight times within four hours since September 2024, and up to a day late; 19 times within 48 hours before.
        // https://shopify.dev/changelog/updates-to-webhook-retry-mechanism https://shopify.dev/docs/apps/build/webhooks/best-practices
        Scheme::Shopify => days(2),
        // Three times within minutes (at once, after one, after five). Where *delayed events* are on, for about a day more: said so elsewhere, not
        // found in the document itself, and allowed for.
        // https://docs.slack.dev/apis/events-api
        Scheme::Slack => days(2),
        // Once more by default, five times at most, all of it within 15 seconds (`rc` and `tt`).
        // https://www.twilio.com/docs/usage/webhooks/webhooks-connection-overrides
        Scheme::Twilio => days(1),
        // HTTP and HTTPS: 3,600 seconds in all, a hard limit. What went to a dead letter queue does not come from SNS any more.
        // https://docs.aws.amazon.com/sns/latest/dg/sns-message-delivery-retries.html
        Scheme::Sns => days(1),
        _ => HORIZON_UNKNOWN,
    }
}

/// Most verified messages on their way into the store at once that may be allowed: more than any store commits at a time.
const CONCURRENCY_MAX: u64 = 10_000;

fn read_limits(section: &Section<'_, '_>) -> SourceLimits {
    let mut limits = SourceLimits::default();
    set(&mut limits.body_bytes, section.size("body_max", 1..=PAYLOAD_BYTES_MAX));
    set(&mut limits.body_timeout, section.duration("body_timeout", Duration::from_millis(100)));
    set(&mut limits.concurrency, section.integer("concurrency", 1..=CONCURRENCY_MAX).map(|most| most as usize));
    limits.rate = section.parsed("rate", |text| message(text.parse()));
    limits
}

/// CloudEvents: who gets consent. A star is refused: it would consent to everybody's sending here.
fn read_origins(section: &Section<'_, '_>) -> Vec<String> {
    let names = section.strings("allowed_origins").unwrap_or_default();
    let names = names.into_iter().filter(|at| {
        let name = !at.value.is_empty() && at.value.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'*');
        if !name {
            let path = section.name("allowed_origins");
            let text = format!(
                "{path}: {:?} is no origin; write the name the sender gives, e.g. \"eventgrid.azure.net\"",
                at.value
            );
            section.reader.refuse(at.line, &at.value, text);
        }
        name
    });
    names.map(|at| at.value).collect()
}

fn read_scheme(section: &Section<'_, '_>) -> Option<Scheme> {
    if !section.has("scheme") {
        section.fault("scheme", format!("[{}] has no scheme; write scheme = \"standard-webhooks\"", section.path));
    }
    section.parsed("scheme", |text| match text {
        "standard" => Ok(Scheme::StandardWebhooks),
        other => other
            .parse()
            .map_err(|_| format!("{other:?} is no scheme; {}", suggestion(other, &Scheme::ALL.map(Scheme::as_str)))),
    })
}

fn read_settings(section: &Section<'_, '_>, scheme: Option<Scheme>) -> Settings {
    let mut settings = Settings::default();
    if scheme == Some(Scheme::Sns) {
        settings.tolerance = TOLERANCE;
    }
    if let Some(tolerance) = section.duration("tolerance", Duration::from_secs(1)) {
        let seconds = u32::try_from(tolerance.as_secs()).unwrap_or(u32::MAX);
        settings.tolerance = Tolerance { past_s: seconds, future_s: seconds };
    }
    // Without a scheme every key is allowed, so that one fault does not look like three.
    if scheme.is_none_or(|scheme| scheme == Scheme::Twilio) {
        settings.public_url =
            section.parsed("public_url", |text| postbox_http::check_url(text).map(|()| text.to_owned()));
    }
    if scheme.is_none_or(|scheme| scheme == Scheme::Hmac) {
        settings.layout = read_layout(section);
    }
    if let Some(scheme) = scheme.filter(|scheme| section.has("tolerance") && !signs_time(*scheme, &settings)) {
        let path = &section.path;
        let cure = match scheme {
            Scheme::Hmac => "leave it out, or name the sender's timestamp_header if its time is signed",
            _ => "leave it out; what is sent again is known by its id, for retention.remember_ids",
        };
        let text = format!("[{path}] has a tolerance, but nothing in {scheme} signs a time that could be off; {cure}");
        section.fault("tolerance", text);
    }
    settings
}

fn signs_time(scheme: Scheme, settings: &Settings) -> bool {
    match scheme {
        Scheme::GitHub | Scheme::Shopify | Scheme::Twilio => false,
        Scheme::Hmac => settings.layout.as_ref().is_none_or(|layout| layout.timestamp_header.is_some()),
        _ => true,
    }
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
    if timestamp_header.as_ref() == Some(&layout.signature_header) {
        let text = format!(
            "[{}]: {:?} cannot hold both the signature and the time; name the header that holds the time, or leave timestamp_header out",
            section.path, layout.signature_header
        );
        section.fault("timestamp_header", text);
    }
    set(&mut layout.prefix, prefix.map(|at| at.value));
    set(&mut layout.hash, hash);
    set(&mut layout.encoding, encoding);
    layout.timestamp_header = timestamp_header;
    set(&mut layout.separator, separator.map(|at| at.value));
    Some(layout)
}

/// Whether scheme, secrets and settings make a verifier together.
fn check_source(section: &Section<'_, '_>, scheme: Scheme, secrets: &[LiveSecret], settings: &Settings) {
    let path = &section.path;
    if scheme == Scheme::Twilio && settings.public_url.is_none() {
        section.fault(
            "scheme",
            format!("[{path}] needs public_url, the URL as given to Twilio: it is part of what is signed"),
        );
    } else if scheme == Scheme::Hmac && settings.layout.is_none() {
        section.fault("scheme", format!("[{path}] needs signature_header, e.g. \"x-signature\""));
    } else if secrets.iter().all(|live| !live.secret.expose().is_empty())
        // What is unset for a command that does not need it is empty; only real keys are checked.
        && let Err(text) = crate::wiring::verifier(scheme, secrets, settings)
    {
        section.fault(if section.has("secrets") { "secrets" } else { "secret" }, format!("[{path}]: {text}"));
    }
}

/// What of a message its sender's signature must cover: all that it is known by.
fn check_mapping(section: &Section<'_, '_>, scheme: Scheme, mapping: &MappingConfig) {
    let list = |origin: &Option<Origin>| origin.iter().cloned().collect();
    let known_by = Mapping { id: list(&mapping.id), tenant: list(&mapping.tenant), ..Mapping::default() };
    if let Some(fault) = known_by.fault(scheme) {
        section.fault("tenant", format!("[{}]: {fault}", section.path));
    }
    if let Some(risk) = known_by.risk(scheme) {
        section.warning("id", format!("[{}]: {risk}", section.path));
    }
}

/// A place, or a text that an event can have there.
fn read_origin<T>(
    section: &Section<'_, '_>,
    key: &'static str,
    fixed: impl FnOnce(&str) -> Result<T, String>,
) -> Option<Origin> {
    section.parsed(key, |text| match parse_origin(text)? {
        Origin::Literal(text) => fixed(&text).map(|_| Origin::Literal(text)),
        place => Ok(place),
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
