//! Maps a verified request to an event.

use std::fmt;

use bytes::Bytes;
use http::{HeaderMap, header};
use postbox_core::envelope::{Binding, decode};
use postbox_core::header::MESSAGE_ID;
use postbox_core::kit::is_word;
use postbox_core::limits::{MESSAGE_ID_BYTES_MAX, OCCURRED_AT_MIN};
use postbox_core::{Error, Inbound, NewEvent, SourceName, hex};
use postbox_receiver::log_excerpt;
use postbox_webhook::{Scheme, Verified};
use sha2::{Digest, Sha256};
use tracing::warn;

use crate::WebhookSource;
use crate::answer::Answer;
use crate::convert::Message;
use crate::headers::keep_headers;
use crate::json::text_at;

/// A place in an incoming message that a field is taken from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// Not a place: a constant text.
    Literal(String),
    /// A request header. Headers are unsigned, except `webhook-id` in Standard Webhooks, and the
    /// one with the time in plain HMAC.
    Header(String),
    /// A place in the JSON body (RFC 6901): a string, number or boolean. In an SNS message only
    /// some fields are signed.
    Json(String),
    /// The id that the scheme signs (Standard Webhooks, Twilio, SNS).
    SignedId,
    /// `sha256:` and the digest of the body, or of the signed text where that is another (Twilio,
    /// SNS). For schemes that sign no id; a replay cannot change it.
    BodyDigest,
}

/// The fields of an SNS notification that AWS signs, as JSON pointers.
const SNS_SIGNED: [&str; 6] = ["/Message", "/MessageId", "/Subject", "/Timestamp", "/TopicArn", "/Type"];

impl Origin {
    /// Whether the scheme's signature covers it, so that nobody without the key can change it.
    /// `time_header` is the one that the settings of plain HMAC name for the time, if any.
    pub fn is_signed_by(&self, scheme: Scheme, time_header: Option<&str>) -> bool {
        match self {
            Self::Literal(_) | Self::SignedId | Self::BodyDigest => true,
            // Not `svix-id`, although Svix signs it: an unsigned `svix-id` may accompany the
            // `webhook-id` that was verified.
            Self::Header(name) => {
                let signed = match scheme {
                    Scheme::StandardWebhooks => Some(postbox_webhook::standard::ID_HEADER),
                    Scheme::Hmac => time_header,
                    _ => None,
                };
                signed.is_some_and(|signed| name.eq_ignore_ascii_case(signed))
            }
            Self::Json(pointer) => scheme != Scheme::Sns || SNS_SIGNED.contains(&pointer.as_str()),
        }
    }
}

/// As written in the configuration.
impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Literal(text) => f.write_str(text),
            Self::Header(name) => write!(f, "header:{name}"),
            Self::Json(pointer) => write!(f, "json:{pointer}"),
            Self::SignedId => f.write_str("the signed id"),
            Self::BodyDigest => f.write_str("the digest of what is signed"),
        }
    }
}

/// The places that the fields of an event are taken from. Of each list, the first place that holds
/// something is used.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Mapping {
    /// The sender's message id, under which the message is stored once. Required.
    pub id: Vec<Origin>,
    /// The topic. Required.
    pub topic: Vec<Origin>,
    /// The ordering key; without one the event is unordered.
    pub key: Vec<Origin>,
    /// The tenant. Required if the list is not empty: an event that lost its tenant would be
    /// visible to all tenants. It is part of a message's identity, so it must be signed: see
    /// [`Mapping::fault`].
    pub tenant: Vec<Origin>,
}

impl Mapping {
    /// Returns the default mapping of a scheme. Ids are taken only from signed places.
    ///
    /// | scheme | id | topic | key |
    /// |---|---|---|---|
    /// | standard-webhooks | `webhook-id` | `ce-type`, else `/type` | `ce-subject` |
    /// | stripe | `/id`, else digest of the body | `/type` | |
    /// | github | digest of the body | `x-github-event` | |
    /// | shopify | digest of the body | `x-shopify-topic` | |
    /// | slack | `/event_id`, else digest | `/event/type`, else `/type` | |
    /// | twilio | digest of what is signed | | |
    /// | sns | `MessageId` | | |
    /// | hmac | digest of the body | `/type` | |
    ///
    /// If none of these gives a topic, it is the source's name.
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

    /// Returns what makes the mapping unusable for a scheme, and the cure: an unsigned tenant. A
    /// message is identified by source, tenant and id, so a captured message could be stored again
    /// under any number of tenants. An ingress rejects such a source. `time_header`: as in
    /// [`Origin::is_signed_by`].
    pub fn fault(&self, scheme: Scheme, time_header: Option<&str>) -> Option<String> {
        let origin = self.tenant.iter().find(|origin| !origin.is_signed_by(scheme, time_header))?;
        Some(format!(
            "the tenant comes from {origin}, which {scheme} does not sign: whoever captures a message could have it \
             stored again for other tenants; write a fixed text (a source for each tenant), or a signed part of the \
             message, e.g. \"json:/tenant\""
        ))
    }

    /// Returns what is allowed but risky: an unsigned id. `time_header`: as in
    /// [`Origin::is_signed_by`].
    pub fn risk(&self, scheme: Scheme, time_header: Option<&str>) -> Option<String> {
        let origin = self.id.iter().find(|origin| !origin.is_signed_by(scheme, time_header))?;
        Some(format!(
            "the id comes from {origin}, which {scheme} does not sign: whoever captures a message can have it \
             applied again under other ids; leave `id` out, or take it from a signed part of the message"
        ))
    }
}

/// A verified request, with everything that a mapping may read.
pub(crate) struct VerifiedRequest<'a> {
    pub(crate) headers: &'a HeaderMap,
    pub(crate) body: Bytes,
    pub(crate) verified: Verified,
}

/// Why a verified message is not stored.
pub(crate) enum Rejection {
    /// Decided by the source's `convert` function.
    Answered(Answer),
    /// The `convert` function failed for the message with this id, or panicked (`None`). Not logged
    /// yet.
    NotConverted(String, Option<String>),
    /// The mapping failed. Not logged yet.
    Mapping(MappingFailure),
}

impl From<Answer> for Rejection {
    fn from(answer: Answer) -> Self {
        Self::Answered(answer)
    }
}

/// Why a verified message is not an event, for the operator's log. Of the message it holds only the
/// id.
pub(crate) struct MappingFailure {
    message_id: String,
    /// The code in the answer and the counter.
    code: &'static str,
    /// The field of the event.
    field: &'static str,
    /// The broken rule.
    rule: String,
    why: String,
}

/// The event fields that a rule can be about; rule codes begin with them.
const FIELDS: [&str; 9] =
    ["topic", "key", "tenant", "kind", "aggregate", "source", "content_type", "payload", "header"];

impl MappingFailure {
    fn new(code: &'static str, field: &'static str, why: impl Into<String>) -> Self {
        Self { message_id: "-".into(), code, field, rule: code.into(), why: why.into() }
    }

    fn invalid(error: &Error) -> Self {
        let field = FIELDS.into_iter().find(|field| error.code().starts_with(field)).unwrap_or("event");
        let message_id = "-".into();
        Self { message_id, code: "event_invalid", field, rule: error.code().into(), why: log_excerpt(error.message()) }
    }

    fn of(self, message_id: &str) -> Rejection {
        Rejection::Mapping(Self { message_id: log_excerpt(message_id), ..self })
    }

    pub(crate) fn answer(&self) -> Answer {
        Answer::Unmapped(self.code)
    }

    pub(crate) fn log(&self, source: &SourceName) {
        let Self { message_id, code, field, rule, why } = self;
        warn!(%source, code, field, rule, message_id, why, "webhook mapping failed");
    }
}

impl VerifiedRequest<'_> {
    /// Converts the request to a message for the store, or to the answer for the sender.
    pub(crate) fn into_inbound(self, source: &WebhookSource) -> Result<Inbound, Rejection> {
        // The digest covers what was signed: a copy of it with another spelling is a duplicate and
        // not a conflict.
        let digest = self.verified.digest.unwrap_or_else(|| Sha256::digest(&self.body).into());
        let message_id = self.message_id(&source.mapping, &digest).map_err(Rejection::Mapping)?;
        let unmapped = |failure: MappingFailure| failure.of(&message_id);
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
        let dropped = match source.convert {
            None => keep_headers(&mut event, self.headers, &source.check.chosen_headers()),
            Some(_) => 0,
        };
        event.validate().map_err(|error| unmapped(MappingFailure::invalid(&error)))?;
        source.dropped.note(&source.name, dropped);
        Ok(Inbound { source: source.name.clone(), message_id, digest, event })
    }

    fn message_id(&self, mapping: &Mapping, digest: &[u8; 32]) -> Result<String, MappingFailure> {
        let unmapped = |why: String| MappingFailure::new("id_unmapped", "id", why);
        let id = self.required(&mapping.id, digest).map_err(unmapped)?;
        if id.len() > MESSAGE_ID_BYTES_MAX {
            let (bytes, begins) = (id.len(), log_excerpt(&id.chars().take(40).collect::<String>()));
            return Err(unmapped(format!(
                "the id has {bytes} bytes, at most {MESSAGE_ID_BYTES_MAX} are allowed; it begins with {begins}"
            )));
        }
        if id.chars().any(char::is_control) {
            return Err(unmapped(format!("the id {} has control characters", log_excerpt(&id))));
        }
        Ok(id)
    }

    fn tenant(&self, mapping: &Mapping, digest: &[u8; 32]) -> Result<Option<String>, MappingFailure> {
        if mapping.tenant.is_empty() {
            return Ok(None);
        }
        let tenant = self.required(&mapping.tenant, digest);
        tenant.map(Some).map_err(|why| MappingFailure::new("tenant_unmapped", "tenant", why))
    }

    /// Builds the event from the message by the mapping.
    fn event(&self, source: &WebhookSource, digest: &[u8; 32]) -> Result<NewEvent, MappingFailure> {
        let mapping = &source.mapping;
        let topic =
            self.required(&mapping.topic, digest).map_err(|why| MappingFailure::new("topic_unmapped", "topic", why))?;
        let content_type = match source.check.scheme() {
            // SNS sends its JSON as `text/plain`.
            Scheme::Sns => "application/json".to_owned(),
            _ => self.content_type(),
        };
        let mut event = NewEvent::new(topic, self.body.clone(), content_type);
        event.key = self.find(&mapping.key, digest).map_err(|why| MappingFailure::new("key_unmapped", "key", why))?;
        if source.check.scheme() == Scheme::StandardWebhooks {
            self.restore(&mut event);
        }
        Ok(event)
    }

    /// Returns the content type as it was sent, or of bytes if an event cannot have it: a header
    /// that nobody signed must not make a genuine message impossible to store.
    fn content_type(&self) -> String {
        // Read as bytes: a parameter may be in UTF-8.
        let text = self.headers.get(header::CONTENT_TYPE).and_then(|value| std::str::from_utf8(value.as_bytes()).ok());
        // HTTP allows tabs before a parameter.
        let text = text.map(|text| text.trim().replace('\t', " "));
        text.filter(|text| is_word(text)).unwrap_or_else(|| "application/octet-stream".to_owned())
    }

    /// Restores the event fields that another Postbox sent, besides topic and key, if an event can
    /// have them.
    fn restore(&self, event: &mut NewEvent) {
        let attribute = |name| only(self.headers, name).ok().flatten();
        let word = |name| attribute(name).filter(|text| is_word(text));
        event.kind = word("ce-kind");
        event.aggregate = word("ce-aggregate");
        event.version = attribute("ce-version").and_then(|version| version.parse().ok());
        event.occurred_at = attribute("ce-time").and_then(|time| time.parse().ok());
        event.occurred_at = event.occurred_at.filter(|at| *at >= OCCURRED_AT_MIN);
    }

    /// Returns the value of the first place that holds something, or an error that lists the
    /// places.
    fn required(&self, origins: &[Origin], digest: &[u8; 32]) -> Result<String, String> {
        let looked_at = || origins.iter().map(Origin::to_string).collect::<Vec<_>>().join(", nor at ");
        self.find(origins, digest)?.ok_or_else(|| format!("there is none at {}", looked_at()))
    }

    /// Returns the value of the first place that holds something. A header that occurs twice is an
    /// error, because its value is ambiguous.
    fn find(&self, origins: &[Origin], digest: &[u8; 32]) -> Result<Option<String>, String> {
        for origin in origins {
            let found = match origin {
                Origin::Literal(text) => Some(text.clone()),
                Origin::Header(name) => only(self.headers, name).map_err(|()| format!("{origin} is there twice"))?,
                Origin::Json(pointer) => text_at(&self.body, pointer),
                Origin::SignedId => self.verified.message_id.clone(),
                Origin::BodyDigest => Some(format!("sha256:{}", hex(digest))),
            };
            if let Some(text) = found.filter(|text| !text.is_empty()) {
                return Ok(Some(text));
            }
        }
        Ok(None)
    }
}

/// Returns the single value of a header as text, with CloudEvents attributes decoded.
fn only(headers: &HeaderMap, name: &str) -> Result<Option<String>, ()> {
    let mut values = headers.get_all(name).iter();
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        return Err(());
    }
    Ok(match Binding::HTTP.is_attribute(name) {
        true => decode(value.as_bytes()),
        false => std::str::from_utf8(value.as_bytes()).ok().map(str::to_owned),
    })
}
