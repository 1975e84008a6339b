//! From an event to the headers of its request. The body is the payload, untouched.
//!
//! | header | value |
//! |---|---|
//! | `content-type` | the payload's |
//! | `webhook-id` | [`Delivery::dedupe_id`]: the event id, or a fresh id for each replay a person asked for |
//! | `webhook-timestamp`, `webhook-signature` | Standard Webhooks, made anew for each attempt (the signature only with keys) |
//! | `ce-specversion`, `ce-id`, `ce-type`, `ce-source`, `ce-time` | `1.0`, event id, topic, source, occurred at |
//! | `ce-subject` | the ordering key, if there is one |
//! | `ce-kind`, `ce-aggregate`, `ce-version`, `ce-tenant` | extension attributes, if there are any |
//! | the event's own headers | as they are, unless reserved |
//!
//! An event's header is *reserved*, and left out, if HTTP itself, Postbox or a credential uses its
//! name ([`is_reserved`]), or if the target's configuration sets it. So no event can pose as
//! another, smuggle a request or carry credentials to a target.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, header};
use jiff::Timestamp;
use postbox_core::{Delivery, Outcome};
use postbox_webhook::UnixSeconds;
use postbox_webhook::standard::{ID_HEADER, Signer, TIMESTAMP_HEADER};

use crate::cloudevents::{self, OF_ONE_REQUEST};

/// Other names that events cannot set.
const RESERVED: [&str; 5] =
    ["http2-settings", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-http-method-override"];

/// Beginnings of names that events cannot set: what we sign and say ourselves.
const RESERVED_PREFIXES: [&str; 4] = [cloudevents::PREFIX, "webhook-", "svix-", "proxy-"];

/// Whether a header's name is not an event's to set.
pub(crate) fn is_reserved(name: &HeaderName) -> bool {
    let name = name.as_str();
    OF_ONE_REQUEST.contains(&name)
        || RESERVED.contains(&name)
        || RESERVED_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// What is the same for every event of a target.
pub(crate) struct Envelope {
    pub(crate) signer: Option<Signer>,
    pub(crate) fixed: HeaderMap,
    pub(crate) source: String,
}

impl Envelope {
    /// The headers of one request, or why there can be none.
    pub(crate) fn headers(&self, delivery: &Delivery, now: Timestamp) -> Result<HeaderMap, Outcome> {
        let event = &delivery.event;
        let mut headers = HeaderMap::with_capacity(16 + event.headers.len());
        let mut own = Vec::with_capacity(event.headers.len());
        for (name, value) in &event.headers {
            let name = HeaderName::try_from(name.as_str()).map_err(|_| invalid(name))?;
            if is_reserved(&name) || self.fixed.contains_key(&name) {
                continue;
            }
            if own.contains(&name) {
                let text = format!("the event has the header {name} twice, in different case; HTTP has one");
                return Err(Outcome::dead("header_duplicate", text));
            }
            own.push(name.clone());
            headers.insert(name.clone(), value_of(name.as_str(), value.clone())?);
        }
        headers.extend(self.fixed.clone());
        self.describe(&mut headers, delivery)?;
        self.sign(&mut headers, delivery, now)?;
        Ok(headers)
    }

    fn describe(&self, headers: &mut HeaderMap, delivery: &Delivery) -> Result<(), Outcome> {
        let event = &delivery.event;
        headers.insert(header::CONTENT_TYPE, value_of("content-type", event.content_type().to_owned())?);
        let version = event.version.map(|version| version.to_string());
        for (name, value) in [
            ("ce-specversion", Some("1.0")),
            ("ce-id", Some(event.id.to_string().as_str())),
            ("ce-type", Some(event.topic.as_str())),
            ("ce-source", Some(event.source.as_deref().unwrap_or(&self.source))),
            ("ce-time", Some(event.occurred_at.to_string().as_str())),
            ("ce-subject", event.key.as_ref().map(AsRef::as_ref)),
            ("ce-kind", event.kind.as_deref()),
            ("ce-aggregate", event.aggregate.as_deref()),
            ("ce-version", version.as_deref()),
            ("ce-tenant", event.tenant.as_ref().map(AsRef::as_ref)),
        ] {
            if let Some(value) = value {
                headers.insert(HeaderName::from_static(name), value_of(name, cloudevents::encode(value))?);
            }
        }
        Ok(())
    }

    fn sign(&self, headers: &mut HeaderMap, delivery: &Delivery, now: Timestamp) -> Result<(), Outcome> {
        let id = delivery.dedupe_id();
        let Some(signer) = &self.signer else {
            headers.insert(ID_HEADER, value_of(ID_HEADER, id)?);
            headers.insert(TIMESTAMP_HEADER, HeaderValue::from(now.as_second()));
            return Ok(());
        };
        // The clock is absurd, which is nobody's fault here: try again.
        let signed = signer
            .sign(&id, UnixSeconds(now.as_second()), &delivery.event.payload)
            .map_err(|error| Outcome::retry("sign_failed", error.to_string()))?;
        for (name, value) in signed.headers() {
            headers.insert(HeaderName::from_static(name), value_of(name, value.to_owned())?);
        }
        Ok(())
    }
}

/// A header value; text beyond ASCII goes out as UTF-8.
fn value_of(name: &str, value: String) -> Result<HeaderValue, Outcome> {
    HeaderValue::from_maybe_shared(Bytes::from(value)).map_err(|_| invalid(name))
}

fn invalid(name: &str) -> Outcome {
    let name: String = name.escape_debug().take(100).collect();
    Outcome::dead("header_invalid", format!("the event's header \"{name}\" has a name or value that HTTP cannot carry"))
}
