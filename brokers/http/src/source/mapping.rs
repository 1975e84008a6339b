//! From a verified request to an event.

use std::borrow::Cow;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, header};
use postbox_core::header::MESSAGE_ID;
use postbox_core::limits::{HEADER_BYTES_MAX, HEADERS_MAX, MESSAGE_ID_BYTES_MAX};
use postbox_core::{Inbound, NewEvent, SourceName};
use postbox_webhook::{Scheme, Verified};
use sha2::{Digest, Sha256};
use tracing::warn;

use super::WebhookSource;
use super::answer::Answer;
use super::convert::Message;
use super::json::text_at;
use crate::cloudevents;

/// One place in an inbound message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// Always this text.
    Literal(String),
    /// This request header. Headers are not signed by any scheme, `webhook-id` excepted.
    Header(String),
    /// This place in the JSON body (RFC 6901): a string, number or boolean.
    Json(String),
    /// The id that the scheme signs (Standard Webhooks, Twilio, SNS).
    SignedId,
    /// `sha256:` and the digest of the body: for schemes that sign no id. A replay cannot change it.
    BodyDigest,
}

/// Where the fields of an event come from: of each list, the first place that holds something.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Mapping {
    /// The sender's id of the message, by which it is stored once. Required.
    pub id: Vec<Origin>,
    /// The topic. Required.
    pub topic: Vec<Origin>,
    /// The ordering key; without one the event is in no order.
    pub key: Vec<Origin>,
    /// The tenant. Required if the list is not empty: an event without its tenant would be everybody's.
    pub tenant: Vec<Origin>,
}

impl Mapping {
    /// What suits a scheme. Ids are taken only from what is signed.
    ///
    /// | scheme | id | topic | key |
    /// |---|---|---|---|
    /// | standard-webhooks | `webhook-id` | `ce-type`, else `/type` | `ce-subject` |
    /// | stripe | `/id` | `/type` | |
    /// | github | digest of the body | `x-github-event` | |
    /// | shopify | digest of the body | `x-shopify-topic` | |
    /// | slack | `/event_id`, else digest | `/event/type`, else `/type` | |
    /// | twilio | digest of what is signed | | |
    /// | sns | `MessageId` | | |
    /// | hmac | digest of the body | `/type` | |
    ///
    /// Where nothing gives a topic it is the source's name.
    pub fn usual(scheme: Scheme, source: &SourceName) -> Self {
        let header = |name: &str| Origin::Header(name.into());
        let json = |pointer: &str| Origin::Json(pointer.into());
        let (id, mut topic, key) = match scheme {
            Scheme::StandardWebhooks => {
                (vec![Origin::SignedId], vec![header("ce-type"), json("/type")], vec![header("ce-subject")])
            }
            Scheme::Stripe => (vec![json("/id"), Origin::BodyDigest], vec![json("/type")], vec![]),
            Scheme::GitHub => (vec![Origin::BodyDigest], vec![header("x-github-event")], vec![]),
            Scheme::Shopify => (vec![Origin::BodyDigest], vec![header("x-shopify-topic")], vec![]),
            Scheme::Slack => {
                (vec![json("/event_id"), Origin::BodyDigest], vec![json("/event/type"), json("/type")], vec![])
            }
            Scheme::Twilio | Scheme::Sns => (vec![Origin::SignedId], vec![], vec![]),
            _ => (vec![Origin::BodyDigest], vec![json("/type")], vec![]),
        };
        topic.push(Origin::Literal(source.to_string()));
        Self { id, topic, key, tenant: Vec::new() }
    }
}

/// A verified request with everything a mapping may look at.
pub(super) struct Genuine<'a> {
    pub(super) headers: &'a HeaderMap,
    pub(super) body: Bytes,
    pub(super) verified: Verified,
}

impl Genuine<'_> {
    /// The message for the store, or what the sender hears instead.
    pub(super) fn into_inbound(self, source: &WebhookSource) -> Result<Inbound, Answer> {
        let unmapped = |code| {
            warn!(source = %source.name, code, "a genuine webhook is not an event by this source's mapping; refused");
            Answer::Unmapped(code)
        };
        let digest: [u8; 32] = Sha256::digest(&self.body).into();
        let message_id = self.message_id(&source.mapping, &digest).map_err(unmapped)?;
        let tenant = self.tenant(&source.mapping, &digest).map_err(unmapped)?;
        let mut event = match &source.convert {
            None => self.event(source, &digest).map_err(unmapped)?,
            Some(convert) => {
                let Self { headers, body, verified } = &self;
                convert.call(&Message { source: &source.name, message_id: &message_id, verified, headers, body })?
            }
        };
        if tenant.is_some() {
            event.tenant = tenant;
        }
        event.source.get_or_insert_with(|| source.name.to_string());
        event.headers.insert(MESSAGE_ID.into(), message_id.clone());
        let dropped = if source.convert.is_none() { keep_headers(&mut event, self.headers) } else { 0 };
        event.validate().map_err(|_| unmapped("event_invalid"))?;
        source.dropped.note(&source.name, dropped);
        Ok(Inbound { source: source.name.clone(), message_id, digest, event })
    }

    fn message_id(&self, mapping: &Mapping, digest: &[u8; 32]) -> Result<String, &'static str> {
        let id = self.find(&mapping.id, digest).ok().flatten().ok_or("id_unmapped")?;
        let fits = id.len() <= MESSAGE_ID_BYTES_MAX && !id.chars().any(char::is_control);
        if fits { Ok(id) } else { Err("id_unmapped") }
    }

    fn tenant(&self, mapping: &Mapping, digest: &[u8; 32]) -> Result<Option<String>, &'static str> {
        match self.find(&mapping.tenant, digest) {
            Ok(None) if mapping.tenant.is_empty() => Ok(None),
            Ok(Some(tenant)) => Ok(Some(tenant)),
            _ => Err("tenant_unmapped"),
        }
    }

    /// The message as it came, as an event.
    fn event(&self, source: &WebhookSource, digest: &[u8; 32]) -> Result<NewEvent, &'static str> {
        let mapping = &source.mapping;
        let topic = self.find(&mapping.topic, digest).ok().flatten().ok_or("topic_unmapped")?;
        let mut event = NewEvent::new(topic, self.body.clone(), self.content_type());
        event.key = self.find(&mapping.key, digest).map_err(|()| "key_unmapped")?;
        if source.check.scheme() == Scheme::StandardWebhooks {
            self.restore(&mut event);
        }
        Ok(event)
    }

    fn content_type(&self) -> String {
        // As bytes: a parameter may be in UTF-8, and what was sent is what is stored.
        let text = self.headers.get(header::CONTENT_TYPE).and_then(|value| std::str::from_utf8(value.as_bytes()).ok());
        text.unwrap_or("application/octet-stream").to_owned()
    }

    /// What another Postbox said of the event beside its topic and key.
    fn restore(&self, event: &mut NewEvent) {
        let attribute = |name| only(self.headers, name).ok().flatten();
        let word = |name| attribute(name).filter(|text| !text.is_empty());
        event.kind = word("ce-kind");
        event.aggregate = word("ce-aggregate");
        event.version = attribute("ce-version").and_then(|version| version.parse().ok());
        event.occurred_at = attribute("ce-time").and_then(|time| time.parse().ok());
    }

    /// The first place that holds something; an error if a header is there twice, for then it says two things.
    fn find(&self, origins: &[Origin], digest: &[u8; 32]) -> Result<Option<String>, ()> {
        for origin in origins {
            let found = match origin {
                Origin::Literal(text) => Some(text.clone()),
                Origin::Header(name) => only(self.headers, name)?,
                Origin::Json(pointer) => text_at(&self.body, pointer),
                Origin::SignedId => self.verified.message_id.clone(),
                Origin::BodyDigest => Some(digest_text(digest)),
            };
            if let Some(text) = found.filter(|text| !text.is_empty()) {
                return Ok(Some(text));
            }
        }
        Ok(None)
    }
}

fn digest_text(digest: &[u8; 32]) -> String {
    let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

/// A header's only value as text, CloudEvents attributes decoded.
fn only(headers: &HeaderMap, name: &str) -> Result<Option<String>, ()> {
    let mut values = headers.get_all(name).iter();
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        return Err(());
    }
    Ok(match name.get(..cloudevents::PREFIX.len()) {
        Some(prefix) if prefix.eq_ignore_ascii_case(cloudevents::PREFIX) => cloudevents::decode(value.as_bytes()),
        _ => std::str::from_utf8(value.as_bytes()).ok().map(str::to_owned),
    })
}

/// Headers that are not kept: transport, credentials and signatures, what proxies add, and what has become a field of the event.
const DROPPED: [&str; 41] = [
    "accept",
    "accept-charset",
    "accept-encoding",
    "accept-language",
    "authorization",
    "cache-control",
    "ce-aggregate",
    "ce-kind",
    "ce-specversion",
    "ce-subject",
    "ce-time",
    "ce-type",
    "ce-version",
    "connection",
    "content-encoding",
    "content-length",
    "content-type",
    "cookie",
    "date",
    "expect",
    "forwarded",
    "host",
    "keep-alive",
    "pragma",
    "stripe-signature",
    "svix-signature",
    "svix-timestamp",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "user-agent",
    "via",
    "webhook-signature",
    "webhook-timestamp",
    "x-api-key",
    "x-real-ip",
    "x-shopify-hmac-sha256",
    "x-slack-request-timestamp",
    "x-slack-signature",
    "x-twilio-signature",
];

/// Beginnings of names that are not kept.
const DROPPED_PREFIXES: [&str; 4] = ["x-forwarded-", "x-hub-signature", "proxy-", "postbox-"];

fn is_kept(name: &HeaderName) -> bool {
    let name = name.as_str();
    !DROPPED.contains(&name) && !DROPPED_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// Keeps the request's headers by name, as long as an event has room for them: a proxy's noise must not make a genuine message impossible to store. Last come
/// those that only repeat what is known, so that an event's own are not lost for them. Says how many had to be left out.
fn keep_headers(event: &mut NewEvent, headers: &HeaderMap) -> u64 {
    let (mut places, mut room) = (HEADERS_MAX, HEADER_BYTES_MAX);
    let mut names: Vec<&HeaderName> = headers.keys().filter(|name| is_kept(name)).collect();
    let repeats = |name: &str| name.starts_with(cloudevents::PREFIX) || name.starts_with("webhook-");
    names.sort_by_key(|name| (repeats(name.as_str()), name.as_str()));
    let mut dropped = 0;
    for name in names {
        let text = text_of(headers, name).filter(|text| name.as_str().len() + text.len() <= room && places > 0);
        let Some(text) = text else {
            dropped += 1;
            continue;
        };
        places -= 1;
        room -= name.as_str().len() + text.len();
        event.headers.insert(name.as_str().into(), text.into_owned());
    }
    dropped
}

/// A header's values as one text, if that is what they are.
fn text_of<'h>(headers: &'h HeaderMap, name: &HeaderName) -> Option<Cow<'h, str>> {
    let values = headers.get_all(name).iter().map(|value| std::str::from_utf8(value.as_bytes()).ok());
    let values = values.collect::<Option<Vec<&str>>>()?;
    let text = match values.as_slice() {
        [value] => Cow::Borrowed(*value),
        several => Cow::Owned(several.join(", ")),
    };
    Some(text).filter(|text| !text.chars().any(|c| c.is_control() && c != '\t'))
}

/// What a source's messages lost because an event had no room for it.
#[derive(Debug, Default)]
pub(super) struct Dropped {
    messages: AtomicU64,
    headers: AtomicU64,
}

impl Dropped {
    /// Counts, and tells of the first, second, fourth … message: a proxy that adds too much adds it to all.
    fn note(&self, source: &SourceName, headers: u64) {
        if headers == 0 {
            return;
        }
        self.headers.fetch_add(headers, Ordering::Relaxed);
        let messages = self.messages.fetch_add(1, Ordering::Relaxed) + 1;
        if messages.is_power_of_two() {
            warn!(
                %source, code = "headers_dropped", headers, messages,
                "a message has headers that are not kept: an event has {HEADERS_MAX} at most, {HEADER_BYTES_MAX} bytes together, and of text; the rest is stored"
            );
        }
    }

    pub(super) fn headers(&self) -> u64 {
        self.headers.load(Ordering::Relaxed)
    }
}
