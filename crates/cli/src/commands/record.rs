//! An event as JSON, for `list` and `show`.

use base64::Engine as _;
use postbox_core::{Event, Headers, Record, SubscriptionInfo};
use serde::Serialize;
use serde_json::value::RawValue;

/// The event's own fields; the same names as the `file` and `stdout` sinks write.
#[derive(Serialize)]
pub(super) struct EventJson<'a> {
    id: String,
    topic: &'a str,
    key: Option<&'a str>,
    aggregate: Option<&'a str>,
    version: Option<i64>,
    kind: &'a str,
    source: Option<&'a str>,
    tenant: Option<&'a str>,
    content_type: &'a str,
    headers: &'a Headers,
    occurred_at: String,
    created_at: String,
    deliver_at: Option<String>,
    /// The JSON itself, if the payload is JSON …
    #[serde(skip_serializing_if = "Option::is_none")]
    payload: Option<Box<RawValue>>,
    /// … else its bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    payload_base64: Option<String>,
}

impl<'a> EventJson<'a> {
    pub(super) fn new(event: &'a Event) -> Self {
        let payload = json_payload(event);
        let payload_base64 =
            payload.is_none().then(|| base64::engine::general_purpose::STANDARD.encode(&event.payload));
        Self {
            id: event.id.to_string(),
            topic: event.topic.as_str(),
            key: event.key.as_ref().map(|key| key.as_str()),
            aggregate: event.aggregate.as_deref(),
            version: event.version,
            kind: event.kind(),
            source: event.source.as_deref(),
            tenant: event.tenant.as_ref().map(|tenant| tenant.as_str()),
            content_type: event.content_type(),
            headers: &event.headers,
            occurred_at: event.occurred_at.to_string(),
            created_at: event.created_at.to_string(),
            deliver_at: event.deliver_at.map(|at| at.to_string()),
            payload,
            payload_base64,
        }
    }
}

/// The payload as it is, not parsed into values and written again: numbers keep their digits.
fn json_payload(event: &Event) -> Option<Box<RawValue>> {
    let text = event.is_json().then(|| std::str::from_utf8(&event.payload).ok()).flatten()?;
    serde_json::from_str(text).ok()
}

/// The word for an event that a subscription's topics and tenant leave out: the store, which counts positions, takes it for read.
pub(super) const NOT_SUBSCRIBED: &str = "not subscribed";

/// Whether the subscription gets this event. A row says so whatever its topics are by now.
pub(super) fn is_wanted(info: &SubscriptionInfo, record: &Record) -> bool {
    let event = &record.event;
    record.updated_at.is_some()
        || info.filter.matches(event.topic.as_str(), event.tenant.as_ref().map(|tenant| tenant.as_str()))
}

/// Where an event stands in one subscription.
#[derive(Serialize)]
pub(super) struct DeliveryJson<'a> {
    subscription: &'a str,
    seq: i64,
    state: &'static str,
    attempts: u32,
    replays: u32,
    due_at: Option<String>,
    code: Option<&'a str>,
    error: Option<&'a str>,
    updated_at: Option<String>,
}

impl<'a> DeliveryJson<'a> {
    pub(super) fn new(subscription: &'a str, record: &'a Record) -> Self {
        Self {
            subscription,
            seq: record.seq.0,
            state: record.state.as_str(),
            attempts: record.attempts,
            replays: record.replays,
            due_at: record.due_at.map(|at| at.to_string()),
            code: record.code.as_deref(),
            error: record.error.as_deref(),
            updated_at: record.updated_at.map(|at| at.to_string()),
        }
    }

    /// As `show` has it: a subscription that leaves the event out says so.
    pub(super) fn of(info: &'a SubscriptionInfo, record: &'a Record) -> Self {
        let delivery = Self::new(info.name.as_str(), record);
        if is_wanted(info, record) { delivery } else { Self { state: NOT_SUBSCRIBED, ..delivery } }
    }
}

/// Both in one object.
#[derive(Serialize)]
pub(super) struct RecordJson<'a> {
    #[serde(flatten)]
    delivery: DeliveryJson<'a>,
    event: EventJson<'a>,
}

impl<'a> RecordJson<'a> {
    pub(super) fn new(subscription: &'a str, record: &'a Record) -> Self {
        Self { delivery: DeliveryJson::new(subscription, record), event: EventJson::new(&record.event) }
    }
}
