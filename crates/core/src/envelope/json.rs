//! The envelopes that are one JSON object.
//!
//! A JSON payload is inserted as it was written. Parsing it into values would turn long integers
//! into floats and refuse deep nesting.

use std::borrow::Cow;
use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;
use serde::de::IgnoredAny;
use serde::ser::{SerializeMap, Serializer};
use serde_json::value::RawValue;
use serde_json::{Result, from_slice, from_str, to_string, to_vec};

use crate::event::{Event, Headers, header};

/// The member of a replica's payload that holds the trace, and the headers that are copied into it.
const TELEMETRY: &str = "_telemetry";
const FOLDED: [(&str, &str); 4] = [
    ("traceparent", header::TRACEPARENT),
    ("tracestate", header::TRACESTATE),
    ("correlation_id", header::CORRELATION_ID),
    ("causation_id", header::CAUSATION_ID),
];

/// Returns the payload as it was written, if its content type is JSON and so are the bytes.
pub(super) fn payload(event: &Event) -> Option<&RawValue> {
    if event.is_json() { from_slice(&event.payload).ok() } else { None }
}

fn base64(event: &Event) -> String {
    STANDARD.encode(&event.payload)
}

/// The event's own fields, as [`Envelope::Json`](super::Envelope::Json) and the CLI name them.
#[derive(Debug, Serialize)]
pub struct EveryField<'a> {
    id: String,
    topic: &'a str,
    key: Option<&'a str>,
    aggregate: Option<&'a str>,
    version: Option<i64>,
    kind: &'a str,
    source: Option<&'a str>,
    tenant: Option<&'a str>,
    headers: &'a Headers,
    occurred_at: String,
    content_type: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload_base64: Option<String>,
}

impl<'a> From<&'a Event> for EveryField<'a> {
    fn from(event: &'a Event) -> Self {
        let payload = payload(event);
        Self {
            id: event.id.to_string(),
            topic: event.topic.as_str(),
            key: event.key.as_ref().map(AsRef::as_ref),
            aggregate: event.aggregate.as_deref(),
            version: event.version,
            kind: event.kind(),
            source: event.source.as_deref(),
            tenant: event.tenant.as_ref().map(AsRef::as_ref),
            headers: &event.headers,
            occurred_at: event.occurred_at.to_string(),
            content_type: event.content_type(),
            payload,
            payload_base64: payload.is_none().then(|| base64(event)),
        }
    }
}

pub(super) fn every_field(event: &Event) -> Result<Vec<u8>> {
    to_vec(&EveryField::from(event))
}

/// The JSON format of CloudEvents. The trace is inside, because a receiver that stores the object
/// loses the transport's headers.
pub(super) fn cloud_event(event: &Event, attributes: &[(&'static str, Cow<'_, str>)]) -> Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(event.payload.len() + 512);
    let mut json = serde_json::Serializer::new(&mut bytes);
    let mut object = json.serialize_map(None)?;
    for (name, value) in attributes {
        object.serialize_entry(name, value)?;
    }
    for name in [header::TRACEPARENT, header::TRACESTATE] {
        if let Some(value) = header::find(&event.headers, name) {
            object.serialize_entry(name, value)?;
        }
    }
    object.serialize_entry("datacontenttype", event.content_type())?;
    match payload(event) {
        Some(payload) => object.serialize_entry("data", payload)?,
        None => object.serialize_entry("data_base64", &base64(event))?,
    }
    object.end()?;
    Ok(bytes)
}

#[derive(Serialize)]
struct Standard<'a> {
    r#type: &'a str,
    timestamp: String,
    data: &'a RawValue,
}

pub(super) fn standard(event: &Event, payload: &RawValue) -> Result<Vec<u8>> {
    to_vec(&Standard { r#type: event.topic.as_str(), timestamp: event.occurred_at.to_string(), data: payload })
}

#[derive(Serialize)]
struct Replica<'a> {
    event_id: String,
    topic: &'a str,
    aggregate_kind: Option<&'a str>,
    aggregate_id: Option<&'a str>,
    entity_version: Option<i64>,
    payload: Cow<'a, RawValue>,
    /// Only the reader of the stream knows it, so it is `None` here.
    stream_id: Option<&'a str>,
    committed_at: String,
}

pub(super) fn replica(event: &Event, payload: &RawValue) -> Result<Vec<u8>> {
    to_vec(&Replica {
        event_id: event.id.to_string(),
        topic: event.topic.as_str(),
        aggregate_kind: event.aggregate.as_deref(),
        aggregate_id: event.key.as_ref().map(AsRef::as_ref),
        entity_version: event.version,
        payload: with_telemetry(event, payload)?,
        stream_id: None,
        committed_at: event.created_at.to_string(),
    })
}

/// Returns the payload with the trace from the headers. Only an object has room for it, and a
/// producer's own `_telemetry` stays as it is.
fn with_telemetry<'a>(event: &'a Event, payload: &'a RawValue) -> Result<Cow<'a, RawValue>> {
    let folded = FOLDED.iter().filter_map(|(member, name)| Some((*member, header::find(&event.headers, name)?)));
    let folded: BTreeMap<&str, &str> = folded.collect();
    let members = from_str::<BTreeMap<String, IgnoredAny>>(payload.get());
    let (false, Ok(members)) = (folded.is_empty(), members) else { return Ok(Cow::Borrowed(payload)) };
    let Some(open) = payload.get().strip_suffix('}').filter(|_| !members.contains_key(TELEMETRY)) else {
        return Ok(Cow::Borrowed(payload));
    };
    let comma = if members.is_empty() { "" } else { "," };
    let text = format!("{open}{comma}\"{TELEMETRY}\":{}}}", to_string(&folded)?);
    RawValue::from_string(text).map(Cow::Owned)
}
