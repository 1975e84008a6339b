//! Envelopes: the form in which a sink sends an event.
//!
//! A sink calls [`Envelope::wrap`] and puts the parts where its transport has a place for them. A
//! [`Binding`] says how a transport names CloudEvents attributes. The guide has the tables:
//! `docs/guide/envelopes.md`.

mod binding;
mod json;
mod read;
#[cfg(test)]
mod tests;

use std::borrow::Cow;

use bytes::Bytes;
use serde_json::value::RawValue;

use crate::event::Event;
use crate::outcome::Outcome;

pub use binding::{Binding, decode};
pub use json::EveryField;

/// The media type of a CloudEvent in structured mode, with everything in the body.
const STRUCTURED: &str = "application/cloudevents+json; charset=UTF-8";
const JSON: &str = "application/json";

/// The form in which an event is sent, as the configuration names it (`envelope = "…"`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Envelope {
    /// `raw`: the payload alone.
    Raw,
    /// `json`: one JSON object with every field of the event.
    Json,
    /// `replica`: one JSON object for those who keep copies of entities.
    Replica,
    /// `cloudevents`: CloudEvents 1.0, structured mode; everything in one JSON object.
    CloudEvents,
    /// `cloudevents-binary`: CloudEvents 1.0, binary mode; the payload, and attributes beside it.
    CloudEventsBinary,
    /// `standard`: `{"type", "timestamp", "data"}`, as Standard Webhooks recommends.
    Standard,
}

/// An event in its envelope.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wrapped<'a> {
    /// The body.
    pub body: Bytes,
    /// The body's media type.
    pub content_type: Cow<'a, str>,
    /// CloudEvents attributes that travel beside the body, without a transport's prefix. Only
    /// [`Envelope::CloudEventsBinary`] has them. [`Binding::spell`] turns them into headers.
    pub attributes: Vec<(&'static str, Cow<'a, str>)>,
}

impl Envelope {
    /// All envelopes.
    pub const ALL: [Self; 6] =
        [Self::Raw, Self::Json, Self::Replica, Self::CloudEvents, Self::CloudEventsBinary, Self::Standard];

    /// The envelopes whose body is always one JSON object.
    pub const OBJECTS: [Self; 4] = [Self::Json, Self::Replica, Self::CloudEvents, Self::Standard];

    /// Code of an event whose payload is not JSON, in an envelope that has no place for it.
    pub const NOT_JSON: &'static str = "payload_not_json";

    /// Returns its name in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Json => "json",
            Self::Replica => "replica",
            Self::CloudEvents => "cloudevents",
            Self::CloudEventsBinary => "cloudevents-binary",
            Self::Standard => "standard",
        }
    }

    /// Puts an event into this envelope. `source` is the CloudEvents source of events without one.
    ///
    /// Only [`Envelope::Json`] has the event's own headers in the body. Otherwise they travel as
    /// the transport's headers, if it has any: the sink puts them there, except
    /// [reserved](Binding::is_reserved) ones.
    ///
    /// The error is [`Outcome::Dead`]: the event does not fit into this envelope and never will.
    pub fn wrap<'a>(self, event: &'a Event, source: &'a str) -> Result<Wrapped<'a>, Outcome> {
        let beside =
            |attributes| Wrapped { body: event.payload.clone(), content_type: event.content_type().into(), attributes };
        let object = |body: Vec<u8>, content_type: &'static str| Wrapped {
            body: body.into(),
            content_type: content_type.into(),
            attributes: Vec::new(),
        };
        let body = match self {
            Self::Raw => return Ok(beside(Vec::new())),
            Self::CloudEventsBinary => return Ok(beside(attributes(event, source))),
            Self::Json => json::every_field(event),
            Self::CloudEvents => json::cloud_event(event, &attributes(event, source)),
            Self::Replica => json::replica(event, self.payload(event)?),
            Self::Standard => json::standard(event, self.payload(event)?),
        };
        let body = body.map_err(|error| Outcome::dead("envelope_failed", error.to_string()))?;
        Ok(object(body, if self == Self::CloudEvents { STRUCTURED } else { JSON }))
    }

    fn payload(self, event: &Event) -> Result<&RawValue, Outcome> {
        json::payload(event).ok_or_else(|| {
            let (name, content_type) = (self.name(), event.content_type());
            let text = format!(
                "the payload ({content_type}) is not JSON, and the envelope {name:?} holds nothing else; \
                 send it raw or as a CloudEvent"
            );
            Outcome::dead(Self::NOT_JSON, text)
        })
    }
}

/// Returns the CloudEvents attributes of an event. All values are text, because a version may be
/// larger than the 32 bits of a CloudEvents integer.
fn attributes<'a>(event: &'a Event, source: &'a str) -> Vec<(&'static str, Cow<'a, str>)> {
    let borrowed = |text: &'a str| Some(Cow::Borrowed(text));
    [
        ("specversion", borrowed("1.0")),
        ("id", Some(event.id.to_string().into())),
        ("type", borrowed(event.topic.as_str())),
        ("source", borrowed(event.source.as_deref().unwrap_or(source))),
        ("time", Some(event.occurred_at.to_string().into())),
        ("subject", event.key.as_ref().map(|key| key.as_str().into())),
        ("kind", event.kind.as_deref().map(Cow::Borrowed)),
        ("aggregate", event.aggregate.as_deref().map(Cow::Borrowed)),
        ("version", event.version.map(|version| version.to_string().into())),
        ("tenant", event.tenant.as_ref().map(|tenant| tenant.as_str().into())),
    ]
    .into_iter()
    .filter_map(|(name, value)| Some((name, value?)))
    .collect()
}
