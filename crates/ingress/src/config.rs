//! `[sources.NAME]` with `type = "webhook"`: its keys, and how a source is built from them.

use std::time::Duration;

use postbox_config::{
    LiveSecret, Section, all_secrets, boolean, duration, from_core, integer, list, signing_secret, size, suggestion,
    table, text, words,
};
use postbox_core::limits::PAYLOAD_BYTES_MAX;
use postbox_core::{Error, Key, LogName, Rate, Result, SourceName, Tenant, Topic};
use postbox_webhook::plain::{Encoding, Hash, Layout};
use postbox_webhook::sns::{TOLERANCE, TopicArn, Verifier};
use postbox_webhook::{Scheme, Settings, Tolerance, UnixSeconds, Verify};

use crate::{Mapping, Origin, SnsClient, SourceLimits, WebhookSource};

/// Upper limit of `concurrency`: more verified messages than any store commits at a time.
const CONCURRENCY_MAX: usize = 10_000;
/// Retry horizon of senders whose schedule is unknown.
const HORIZON_UNKNOWN: Duration = Duration::from_hours(7 * 24);

table! {
    /// Webhooks received at `POST /in/NAME`.
    #[check(check)]
    pub struct WebhookTable {
        /// The log where messages are stored.
        log: LogName = text(from_core::<LogName>), default("inbox");
        /// How messages are signed: standard-webhooks, stripe, github, shopify, slack, twilio (with
        /// `public_url`), hmac (with `signature_header`) or sns (with `topics`).
        scheme: Option<Scheme> = text(scheme), required(r#""standard-webhooks""#);
        /// The key that the sender signs with.
        secret: Option<LiveSecret> = signing_secret(), unset("", "");
        /// The keys that the sender signs with: at least one, several during a rotation.
        ///
        /// An old key may have an end: `["env:NEW", { secret = "env:OLD", until =
        /// "2026-12-01T00:00:00Z" }]`.
        secrets: Vec<LiveSecret> = list(signing_secret()), unset("", r#"["env:PARTNER_SECRET"]"#);
        /// The id under which a message is stored once: `"json:/pointer"` into the body, or
        /// `"header:NAME"`.
        ///
        /// An unsigned header gives a warning: with it, a captured message can be applied again.
        id: Option<Origin> = text(id), unset("depends on the scheme", "");
        /// The event's topic: a fixed text, `"header:NAME"` or `"json:/pointer"`.
        ///
        /// The default is a place that depends on the scheme, else the source's name. A place that
        /// you set has no such fallback: a message with nothing there is refused (422).
        topic: Option<Origin> = text(|text| origin(text, from_core::<Topic>)), unset("depends on the scheme", r#""partner.event""#);
        /// The event's key, written as `topic`. Events of one key are applied in order.
        key: Option<Origin> = text(|text| origin(text, from_core::<Key>)), unset("depends on the scheme", r#""json:/data/id""#);
        /// The event's tenant: a fixed text, or a signed part of the message (`"json:/pointer"`).
        ///
        /// A message is identified by source, tenant and id, so an unsigned header is refused. Use
        /// a source for each tenant instead.
        tenant: Option<Origin> = text(|text| origin(text, from_core::<Tenant>)), unset("none", r#""json:/tenant""#);
        /// How long the sender repeats a message that was not answered.
        ///
        /// `retention.remember_ids` must be at least as long
        /// ([table](inbox.md#how-long-ids-are-remembered)).
        retry_horizon: Option<Duration> = duration(Duration::ZERO), unset("depends on the scheme", r#""4d""#);
        /// How far the sender's clock may be off.
        ///
        /// Only for schemes that sign a time. Twice the tolerance must be less than
        /// `retention.remember_ids`: otherwise a replay could be accepted after its id is
        /// forgotten.
        tolerance: Option<Duration> = duration(Duration::from_secs(1)), unset("`\"5m\"`; sns: 65 minutes back, for its retries", r#""5m""#);
        /// Largest body, at most 16 MiB; a larger one gets 413.
        ///
        /// All bodies of the source share 12 MiB, or three times this if that is more. When that is
        /// full, [the oldest unverified body is dropped with
        /// 503](../decisions/bodies-that-do-not-end.md). Each source has its own share, in each
        /// store.
        body_max: usize = size(1..=PAYLOAD_BYTES_MAX), default("1MiB");
        /// The longest a body may take to arrive; then 503.
        body_timeout: Duration = duration(Duration::from_millis(100)), default("10s");
        /// Most verified messages being stored at once; others get 503 with `Retry-After`.
        ///
        /// The sources of a store share the places that `server.connections` leaves them.
        concurrency: usize = integer(1..=CONCURRENCY_MAX), default(256);
        /// Most verified messages per second (`s`), minute (`m`) or hour (`h`); others get 429 with
        /// `Retry-After`.
        ///
        /// Unverified messages and repetitions do not count.
        rate: Option<Rate> = text(from_core::<Rate>), unset("no limit", r#""600/m""#);
        /// CloudEvents: origins that get consent in the `OPTIONS` handshake.
        ///
        /// As sent in `WebHook-Request-Origin`. Consent is not authentication.
        allowed_origins: Vec<String> = list(text(sender)), unset("nobody", r#"["events.example.org"]"#);
        /// `sns`: the ARNs of your topics. SNS signs the messages of every AWS account; those of
        /// other topics are refused.
        topics: Vec<TopicArn> = list(text(|text| TopicArn::parse(text).map_err(|error| error.to_string()))), unset("", "");
        /// `sns`: confirm subscriptions to these topics by calling the URL in a verified request.
        ///
        /// If false, such a request is logged and answered with 200, and you confirm the
        /// subscription in AWS.
        confirm: Option<bool> = boolean(), unset("`false`", "");
        /// `twilio`: the URL as configured at Twilio, without its query.
        public_url: Option<String> = text(public_url), unset("", "");
        /// `hmac`: the header with the signature.
        signature_header: Option<String> = text(header), unset("", "");
        /// `hmac`: the text before the signature in that header, e.g. `"sha256="`.
        signature_prefix: Option<String> = text(plain), unset("nothing", "");
        /// `hmac`: `"sha256"` or `"sha512"`.
        hash: Option<Hash> = words([("sha256", Hash::Sha256), ("sha512", Hash::Sha512)]), unset("`\"sha256\"`", "");
        /// `hmac`: `"hex"` or `"base64"`.
        encoding: Option<Encoding> = words([("hex", Encoding::Hex), ("base64", Encoding::Base64)]), unset("`\"hex\"`", "");
        /// `hmac`: the header with the signed time, in seconds since 1970.
        timestamp_header: Option<String> = text(header), unset("no time is signed", "");
        /// `hmac`: the text between time and body in the signed text.
        separator: Option<String> = text(plain), unset("`\".\"`", "");
    }
}

/// Keys that only one scheme has.
const OF_ONE_SCHEME: [(Scheme, &[&str]); 3] = [
    (Scheme::Sns, &["topics", "confirm"]),
    (Scheme::Twilio, &["public_url"]),
    (Scheme::Hmac, &["signature_header", "signature_prefix", "hash", "encoding", "timestamp_header", "separator"]),
];

impl WebhookTable {
    fn check(&self, section: &Section<'_>) {
        // Without a scheme every key is accepted, so that one missing key is one fault and not
        // three.
        if let Some(scheme) = self.scheme {
            let others = OF_ONE_SCHEME.iter().filter(|(its, _)| *its != scheme);
            let others: Vec<&str> = others.flat_map(|(_, keys)| keys.iter().copied()).collect();
            section.forbid(&others);
            self.check_tolerance(section, scheme);
            self.check_mapping(section, scheme);
        }
        match self.scheme {
            Some(Scheme::Sns) => self.check_sns(section),
            _ => self.check_keys(section),
        }
    }

    fn check_tolerance(&self, section: &Section<'_>, scheme: Scheme) {
        let signs_time = match scheme {
            Scheme::GitHub | Scheme::Shopify | Scheme::Twilio => false,
            Scheme::Hmac => self.signature_header.is_none() || self.timestamp_header.is_some(),
            _ => true,
        };
        if !section.has("tolerance") || signs_time {
            return;
        }
        let cure = match scheme {
            Scheme::Hmac => "leave it out, or name the sender's timestamp_header if its time is signed",
            _ => "leave it out; repetitions are recognised by their id for retention.remember_ids",
        };
        let path = &section.path;
        let text = format!("[{path}] has a tolerance, but {scheme} signs no time; {cure}");
        section.fault("tolerance", text);
    }

    /// Checks that the signature covers what a message is identified by: its id and its tenant.
    fn check_mapping(&self, section: &Section<'_>, scheme: Scheme) {
        let list = |origin: &Option<Origin>| origin.iter().cloned().collect();
        let known_by = Mapping { id: list(&self.id), tenant: list(&self.tenant), ..Mapping::default() };
        let time_header = self.timestamp_header.as_deref();
        if let Some(fault) = known_by.fault(scheme, time_header) {
            section.fault("tenant", format!("[{}]: {fault}", section.path));
        }
        if let Some(risk) = known_by.risk(scheme, time_header) {
            section.warning("id", format!("[{}]: {risk}", section.path));
        }
    }

    /// SNS has topics instead of secrets.
    fn check_sns(&self, section: &Section<'_>) {
        let path = &section.path;
        for key in ["secret", "secrets"].into_iter().filter(|key| section.has(key)) {
            let text =
                format!("[{path}] has {key}, but SNS signs with a certificate; leave it out and name your topics");
            section.fault(key, text);
        }
        if !section.has("topics") {
            let text = format!(
                "[{path}] has no topics, and SNS signs for every AWS account; name yours: \
                 topics = [\"arn:aws:sns:REGION:ACCOUNT:NAME\"]"
            );
            section.fault("topics", text);
        } else if self.topics.is_empty() && section.is_right(&["topics"]) {
            section.fault("topics", format!("{path}.topics is empty; name at least one"));
        }
    }

    /// Checks that scheme, secrets and settings make a working verifier.
    fn check_keys(&self, section: &Section<'_>) {
        let path = &section.path;
        let (secrets, known) = all_secrets(&self.secret, &self.secrets);
        let right = section.is_right(&["secret", "secrets"]);
        if secrets.is_empty() && right {
            let text = format!(
                "[{path}] has no secrets, and unverified messages are never accepted; write secrets = [\"env:NAME\"]"
            );
            section.fault("secrets", text);
        }
        let Some(scheme) = self.scheme else { return };
        let (needs, has) = match scheme {
            Scheme::Twilio => ("public_url, the URL as configured at Twilio: the signature covers it", "public_url"),
            Scheme::Hmac => ("signature_header, e.g. \"x-signature\"", "signature_header"),
            _ => ("", "scheme"),
        };
        if !section.has(has) {
            section.fault("scheme", format!("[{path}] needs {needs}"));
        } else if self.timestamp_header.is_some() && self.timestamp_header == self.signature_header {
            let text = format!(
                "[{path}]: {:?} cannot hold both the signature and the time; name the header that holds the time, or \
                 leave timestamp_header out",
                self.timestamp_header.as_deref().unwrap_or_default()
            );
            section.fault("timestamp_header", text);
        } else if right
            && known
            && !secrets.is_empty()
            && section.is_right(&["scheme", "tolerance", "public_url", "signature_header", "timestamp_header"])
            && let Err(text) = self.verifier(scheme)
        {
            section.fault(if section.has("secrets") { "secrets" } else { "secret" }, format!("[{path}]: {text}"));
        }
    }

    /// Builds the verifier. An error never repeats a key.
    fn verifier(&self, scheme: Scheme) -> Result<Box<dyn Verify>, String> {
        let (secrets, _) = all_secrets(&self.secret, &self.secrets);
        let end = |live: &LiveSecret| live.until.map(|until| UnixSeconds(until.as_second()));
        let secrets: Vec<_> = secrets.iter().map(|live| (live.secret.expose(), end(live))).collect();
        postbox_webhook::verifier_in_rotation(scheme, &secrets, &self.settings()).map_err(|error| error.to_string())
    }

    fn settings(&self) -> Settings {
        let layout = self.signature_header.as_ref().map(|header| {
            let usual = Layout::new(header.as_str());
            Layout {
                prefix: self.signature_prefix.clone().unwrap_or(usual.prefix),
                hash: self.hash.unwrap_or(usual.hash),
                encoding: self.encoding.unwrap_or(usual.encoding),
                timestamp_header: self.timestamp_header.clone(),
                separator: self.separator.clone().unwrap_or(usual.separator),
                signature_header: usual.signature_header,
            }
        });
        let usual = if self.scheme == Some(Scheme::Sns) { TOLERANCE } else { Tolerance::default() };
        let seconds = |tolerance: Duration| u32::try_from(tolerance.as_secs()).unwrap_or(u32::MAX);
        let tolerance = self.tolerance.map(seconds).map(|off| Tolerance { past_s: off, future_s: off });
        Settings { tolerance: tolerance.unwrap_or(usual), public_url: self.public_url.clone(), layout }
    }

    /// How long the sender repeats a message that got no answer.
    pub fn repeats_for(&self) -> Duration {
        self.retry_horizon.unwrap_or_else(|| self.scheme.map_or(HORIZON_UNKNOWN, retry_horizon))
    }

    /// Builds the source. All SNS sources of a process share one `client`. An error never repeats a
    /// key.
    pub fn source(&self, name: SourceName, client: &SnsClient) -> Result<WebhookSource> {
        let invalid = |text| Error::invalid("configure", "secret_invalid", format!("source {name}: {text}"));
        let scheme = self.scheme.ok_or_else(|| invalid("it has no scheme".to_owned()))?;
        let log = self.log.clone();
        let mut source = if scheme == Scheme::Sns {
            let verifier = Verifier::new(self.topics.iter().cloned()).map_err(|error| invalid(error.to_string()))?;
            let verifier = verifier.tolerance(self.settings().tolerance);
            WebhookSource::sns(name, log, verifier, self.confirm.unwrap_or(false), client)?
        } else {
            let verifier = self.verifier(scheme).map_err(invalid)?;
            WebhookSource::new(name, log, verifier)
        };
        source.limits = SourceLimits {
            body_bytes: self.body_max,
            body_timeout: self.body_timeout,
            concurrency: self.concurrency,
            rate: self.rate,
            ..source.limits
        };
        source.allowed_origins.clone_from(&self.allowed_origins);
        let mapping = &mut source.mapping;
        for (place, origin) in [
            (&mut mapping.id, &self.id),
            (&mut mapping.topic, &self.topic),
            (&mut mapping.key, &self.key),
            (&mut mapping.tenant, &self.tenant),
        ] {
            if let Some(origin) = origin {
                *place = vec![origin.clone()];
            }
        }
        Ok(source)
    }
}

/// How long senders of a scheme repeat a message, according to the documents named here, rounded up
/// to whole days. `docs/guide/inbox.md` has the same table for users.
fn retry_horizon(scheme: Scheme) -> Duration {
    let days = |days: u64| Duration::from_hours(days * 24);
    match scheme {
        // The example schedule of the specification ends 75 h 35 min 5 s after the first attempt;
        // Svix's own ends after 27 h 35 min.
        // https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md#deliverability-and-reliability
        // https://docs.svix.com/retries
        Scheme::StandardWebhooks => days(4),
        // Automatically for up to three days. A person can resend any event of the last 30 days.
        // https://docs.stripe.com/webhooks#automatic-retries
        // https://docs.stripe.com/webhooks/process-undelivered-events
        Scheme::Stripe => days(3),
        // Never automatically. By hand: deliveries of the last three days at github.com, of the
        // last seven on Enterprise Server.
        // https://docs.github.com/en/webhooks/testing-and-troubleshooting-webhooks/redelivering-webhooks
        Scheme::GitHub => days(7),
        // Eight times within four hours since September 2024, and up to a day late; before that, 19
        // times within 48 hours. https://shopify.dev/changelog/updates-to-webhook-retry-mechanism
        // https://shopify.dev/docs/apps/build/webhooks/best-practices
        Scheme::Shopify => days(2),
        // Three times within minutes (at once, after one, after five). With *delayed events* on,
        // for about a day more; third-party sources say so, the document itself does not, and the
        // horizon allows for it.
        // https://docs.slack.dev/apis/events-api
        Scheme::Slack => days(2),
        // Once more by default, five times at most, all within 15 seconds (`rc` and `tt`).
        // https://www.twilio.com/docs/usage/webhooks/webhooks-connection-overrides
        Scheme::Twilio => days(1),
        // HTTP and HTTPS: 3,600 seconds in all, a hard limit. SNS does not resend what went to a
        // dead letter queue.
        // https://docs.aws.amazon.com/sns/latest/dg/sns-message-delivery-retries.html
        Scheme::Sns => days(1),
        _ => HORIZON_UNKNOWN,
    }
}

fn scheme(text: &str) -> Result<Scheme, String> {
    match text {
        "standard" => Ok(Scheme::StandardWebhooks),
        other => other.parse().map_err(|_| {
            format!("{other:?} is not a known scheme; {}", suggestion(other, &Scheme::ALL.map(Scheme::as_str)))
        }),
    }
}

fn id(text: &str) -> Result<Origin, String> {
    match origin(text, |_| Ok(()))? {
        Origin::Literal(_) => {
            Err("every message would have the same id; write \"json:/POINTER\", or leave it out".into())
        }
        place => Ok(place),
    }
}

/// A star is refused: it would grant consent to any sender.
fn sender(text: &str) -> Result<String, String> {
    match !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'*') {
        true => Ok(text.to_owned()),
        false => Err(format!(
            "{text:?} is not a valid origin; write the name the sender gives, e.g. \"eventgrid.azure.net\""
        )),
    }
}

fn public_url(text: &str) -> Result<String, String> {
    let host = text.split_once("://").and_then(|(_, rest)| rest.split(['/', '?', '#']).next());
    if host.is_some_and(|host| host.contains('@')) {
        return Err("the url holds a user name or password, which this service does not check: the signature shows \
                    who sends; leave them out, here and at Twilio"
            .into());
    }
    postbox_http::check_url(text).map(|()| text.to_owned())
}

fn plain(text: &str) -> Result<String, String> {
    Ok(text.to_owned())
}

fn header(text: &str) -> Result<String, String> {
    http::HeaderName::try_from(text)
        .map(|name| name.to_string())
        .map_err(|_| format!("{text:?} is not a valid header name"))
}

/// A place in the message, or a fixed text that the event field accepts.
fn origin<T>(text: &str, fixed: fn(&str) -> Result<T, String>) -> Result<Origin, String> {
    if let Some(name) = text.strip_prefix("header:") {
        return header(name).map(Origin::Header);
    }
    match text.strip_prefix("json:") {
        Some(pointer) if pointer.starts_with('/') => Ok(Origin::Json(pointer.to_owned())),
        Some(pointer) => {
            Err(format!("{pointer:?} is not a valid JSON pointer; it begins with a slash, e.g. \"json:/data/id\""))
        }
        None if text.is_empty() => Err("is empty; write a fixed text, \"header:NAME\" or \"json:/POINTER\"".into()),
        None => fixed(text).map(|_| Origin::Literal(text.to_owned())),
    }
}
