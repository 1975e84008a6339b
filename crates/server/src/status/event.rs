//! An event and its state: `list --json` and `show --json`.

use postbox_core::envelope::EveryField;
use postbox_core::{Attempt, Event, Record, Seq, SubscriptionInfo, SubscriptionName};
use serde::Serialize;

/// An event as it was appended.
#[derive(Debug, Serialize)]
pub struct EventJson<'a> {
    #[serde(flatten)]
    own: EveryField<'a>,
    created_at: String,
    deliver_at: Option<String>,
    expires_at: Option<String>,
}

impl<'a> From<&'a Event> for EventJson<'a> {
    fn from(event: &'a Event) -> Self {
        Self {
            own: EveryField::from(event),
            created_at: event.created_at.to_string(),
            deliver_at: event.deliver_at.map(|at| at.to_string()),
            expires_at: event.expires_at.map(|at| at.to_string()),
        }
    }
}

/// The state of an event in one subscription.
#[derive(Debug, Serialize)]
pub struct DeliveryJson<'a> {
    /// `None`: no subscription wants the event, so it is the state in its log.
    subscription: Option<&'a SubscriptionName>,
    seq: Seq,
    state: &'static str,
    attempts: u32,
    replays: u32,
    due_at: Option<String>,
    code: Option<&'a str>,
    error: Option<&'a str>,
    updated_at: Option<String>,
    /// The latest is last.
    last_attempts: Vec<AttemptJson<'a>>,
}

/// One attempt that did not deliver the event.
#[derive(Debug, Serialize)]
struct AttemptJson<'a> {
    at: String,
    code: &'a str,
    took_seconds: f64,
    answer: &'a str,
    next_at: Option<String>,
}

impl<'a> From<&'a Attempt> for AttemptJson<'a> {
    fn from(attempt: &'a Attempt) -> Self {
        Self {
            at: attempt.at.to_string(),
            code: &attempt.code,
            took_seconds: attempt.took.as_secs_f64(),
            answer: &attempt.answer,
            next_at: attempt.next_at.map(|at| at.to_string()),
        }
    }
}

impl<'a> DeliveryJson<'a> {
    fn new(subscription: Option<&'a SubscriptionName>, record: &'a Record) -> Self {
        Self {
            subscription,
            seq: record.seq,
            state: record.state.as_str(),
            attempts: record.attempts,
            replays: record.replays,
            due_at: record.due_at.map(|at| at.to_string()),
            code: record.code.as_deref(),
            error: record.error.as_deref(),
            updated_at: record.updated_at.map(|at| at.to_string()),
            last_attempts: record.last_attempts.iter().map(AttemptJson::from).collect(),
        }
    }
}

/// One event in one subscription, as `list` shows it.
#[derive(Debug, Serialize)]
pub struct RecordJson<'a> {
    #[serde(flatten)]
    delivery: DeliveryJson<'a>,
    event: EventJson<'a>,
}

impl<'a> RecordJson<'a> {
    /// Builds it from the store's record; without a subscription if no subscription wants the
    /// event.
    pub fn new(subscription: Option<&'a SubscriptionName>, record: &'a Record) -> Self {
        Self { delivery: DeliveryJson::new(subscription, record), event: EventJson::from(&record.event) }
    }
}

/// One event as it was appended, as `tail` shows it.
#[derive(Debug, Serialize)]
pub struct TailedJson<'a> {
    seq: Seq,
    event: EventJson<'a>,
}

impl<'a> TailedJson<'a> {
    /// Builds it from the log's entry.
    pub fn new(seq: Seq, event: &'a Event) -> Self {
        Self { seq, event: EventJson::from(event) }
    }
}

/// One event and its state in each subscription, as `show` shows it.
#[derive(Debug, Serialize)]
pub struct ShowJson<'a> {
    event: EventJson<'a>,
    deliveries: Vec<DeliveryJson<'a>>,
}

impl<'a> ShowJson<'a> {
    /// Builds it from the records of each subscription that has the event; `None` if none has.
    pub fn new(found: &'a [(SubscriptionInfo, Record)]) -> Option<Self> {
        let (_, first) = found.first()?;
        let deliveries = found.iter().map(|(info, record)| DeliveryJson::new(Some(&info.name), record));
        Some(Self { event: EventJson::from(&first.event), deliveries: deliveries.collect() })
    }
}
