//! For the tests of programs that use Postbox: an in-memory store, the events that were appended,
//! the outcome of a handler, and both ends of a webhook. To sign webhooks as their senders do, use
//! the `Secret::sign` of each scheme in [`webhook`](crate::webhook).
//!
//! ```
//! use postbox::router::{Event, Router};
//! use postbox::{NewEvent, Outcome, Postbox, test};
//! use serde::{Deserialize, Serialize};
//!
//! #[derive(postbox::Event, Serialize, Deserialize, Debug, PartialEq)]
//! #[event(topic = "order.paid", key = "order")]
//! struct OrderPaid {
//!     order: i64,
//! }
//!
//! async fn mail(Event(paid): Event<OrderPaid>) -> Result<(), std::io::Error> {
//!     if paid.order == 0 { Err(std::io::ErrorKind::NotFound.into()) } else { Ok(()) }
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> postbox::Result<()> {
//! let store = test::store();
//! let mut tx = store.begin();
//! Postbox::new(store.clone()).append(&mut tx, OrderPaid { order: 42 })?; // the program's doing
//! tx.commit();
//! test::assert_appended!(&store, OrderPaid { order: 42 });
//! assert_eq!(test::appended::<OrderPaid>(&store).await?, [OrderPaid { order: 42 }]); // and no other
//!
//! let router = Router::new().on(mail);
//! assert_eq!(test::deliver(&router, OrderPaid { order: 42 }).await?, Outcome::DELIVERED);
//! let lost = test::deliver(&router, NewEvent::json("order.paid", "[]")).await?;
//! assert!(matches!(lost, Outcome::Dead { code, .. } if code == "payload_not_decoded"));
//! # Ok(())
//! # }
//! ```

#[cfg(feature = "http")]
mod webhooks;

use std::sync::{Arc, Mutex};

use jiff::Timestamp;
use postbox_core::typed::{IntoEvent, decode};
use postbox_core::{
    Delivery, Event, EventId, IntoEvents, Key, LogName, NewEvent, Outcome, Result, Seq, Sink as _, Store, Subscription,
    Tenant, TopicPattern, TypedEvent, lock,
};
use postbox_engine::{Relay, TokioClock};
use postbox_memory::MemoryStore;
use postbox_router::{Router, handler_sink};
use serde::de::DeserializeOwned;

#[cfg(feature = "http")]
pub use webhooks::{Receiver, Webhooks};

/// Creates an empty in-memory store. Its time begins in 1970 and follows tokio's. If a test pauses
/// that (`#[tokio::test(start_paused = true)]`), `tokio::time::advance` steps it, and retries and
/// retention take no real time.
pub fn store() -> MemoryStore {
    MemoryStore::new(Arc::new(TokioClock::simulated(Timestamp::UNIX_EPOCH)))
}

/// Returns the events committed to the log `outbox` with the topic of this type, in log order. A
/// delayed event is missing before its time.
///
/// It reads with a temporary subscription, so it works with any store. If something else uses the
/// store at that time, retention waits for that subscription.
///
/// Cancel-safety: if dropped, it may leave that subscription (`test-` and an id), and retention
/// waits for it until somebody removes it. So it may if the store is down meanwhile.
///
/// An event that cannot be decoded as the type is an error, that of [`decode`].
pub async fn appended<T: TypedEvent + DeserializeOwned>(store: &(impl Store + Clone)) -> Result<Vec<T>> {
    read(store, LogName::outbox(), vec![TopicPattern::from_stored(T::TOPIC)]).await?.iter().map(decode).collect()
}

/// Returns events of these topics, or of all if there are none, in log order.
async fn read(store: &(impl Store + Clone), log: LogName, topics: Vec<TopicPattern>) -> Result<Vec<Event>> {
    let name = format!("test-{}", EventId::now_v7());
    let mut subscription = Subscription::new(name.parse()?, log);
    subscription.filter.topics = topics;
    let name = subscription.name.clone();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let sink = handler_sink({
        let seen = seen.clone();
        move |delivery: Delivery| {
            lock(&seen).push((delivery.seq, delivery.event));
            std::future::ready(())
        }
    });
    let relay = Relay::builder(Arc::new(store.clone()), subscription).sink(Arc::new(sink)).build()?;
    let drained = relay.drain(None).await;
    for info in store.subscriptions().await?.into_iter().filter(|info| info.name == name) {
        store.remove(&name, info.generation).await?;
    }
    drained?;
    let mut seen = std::mem::take(&mut *lock(&seen));
    // Events of different keys go out concurrently, in any order.
    seen.sort_by_key(|(seq, _)| *seq);
    Ok(seen.into_iter().map(|(_, event)| event).collect())
}

/// Asserts that an event, or several in this order, were committed to the log `outbox` of a store,
/// possibly among others. The failure message shows what was committed. Reads as [`appended`] does.
///
/// An event matches the expected one if it has its topic and its payload (as JSON, or to the byte),
/// and every other field and header that the expected one has.
///
/// ```
/// # use postbox::{NewEvent, test};
/// # #[derive(postbox::Event, serde::Serialize)]
/// # #[event(topic = "order.paid", key = "order")]
/// # struct OrderPaid { order: i64 }
/// # async fn example(store: postbox::MemoryStore) {
/// test::assert_appended!(&store, OrderPaid { order: 42 });
/// test::assert_appended!(&store, [NewEvent::json("audit", "{}").actor("user:17"), NewEvent::json("mail.due", "{}")]);
/// # }
/// ```
#[doc(inline)]
pub use crate::assert_appended;

#[doc(hidden)]
#[macro_export]
macro_rules! assert_appended {
    ($store:expr, $events:expr $(,)?) => {
        if let Err(text) = $crate::test::check_appended($store, $events).await {
            panic!("{text}");
        }
    };
}

/// Returns the text of a failed [`assert_appended!`].
#[doc(hidden)]
pub async fn check_appended<Kind>(
    store: &(impl Store + Clone),
    events: impl IntoEvents<Kind>,
) -> std::result::Result<(), String> {
    let expected = events.into_events().map_err(|error| error.to_string())?;
    let appended = read(store, LogName::outbox(), Vec::new()).await.map_err(|error| error.to_string())?;
    let mut rest = appended.iter();
    let Some(missing) = expected.iter().find(|expected| !rest.any(|event| is_expected(event, expected))) else {
        return Ok(());
    };
    let lines = |events: Vec<String>| match events.as_slice() {
        [] => "  nothing".to_owned(),
        events => events.iter().map(|event| format!("  {event}")).collect::<Vec<_>>().join("\n"),
    };
    // Both as stored events, so that they look alike.
    let show = |event: &NewEvent| shown(&event.clone().into_event(EventId::now_v7(), Timestamp::UNIX_EPOCH));
    let (missing, all) = (show(missing), expected.iter().map(show).collect());
    let appended = appended.iter().map(shown).collect();
    Err(format!(
        "not appended, or not in this order:\n  {missing}\nexpected:\n{}\nappended:\n{}",
        lines(all),
        lines(appended)
    ))
}

fn is_expected(event: &Event, expected: &NewEvent) -> bool {
    let json = |bytes: &[u8]| serde_json::from_slice::<serde_json::Value>(bytes).ok();
    let same_payload =
        event.payload == expected.payload || json(&event.payload).is_some_and(|it| json(&expected.payload) == Some(it));
    let has = |expected: Option<&str>, its: Option<&str>| expected.is_none_or(|expected| its == Some(expected));
    event.topic.as_str() == expected.topic
        && same_payload
        && has(expected.key.as_deref(), event.key.as_ref().map(Key::as_str))
        && has(expected.aggregate.as_deref(), event.aggregate.as_deref())
        && has(expected.kind.as_deref(), Some(event.kind()))
        && has(expected.source.as_deref(), event.source.as_deref())
        && has(expected.tenant.as_deref(), event.tenant.as_ref().map(Tenant::as_str))
        && has(expected.content_type.as_deref(), Some(event.content_type()))
        && expected.version.is_none_or(|version| event.version == Some(version))
        && expected.id.is_none_or(|id| event.id == id)
        && expected.occurred_at.is_none_or(|at| event.occurred_at == at)
        && expected.deliver_at.is_none_or(|at| event.deliver_at == Some(at))
        && expected.expires_at.is_none_or(|at| event.expires_at == Some(at))
        && expected.headers.iter().all(|(name, value)| event.header(name) == Some(value))
}

fn shown(event: &Event) -> String {
    let named = |name: &str, value: Option<&str>| value.map(|value| format!(" {name}={value}")).unwrap_or_default();
    let key = named("key", event.key.as_ref().map(Key::as_str));
    let tenant = named("tenant", event.tenant.as_ref().map(Tenant::as_str));
    let headers: String = event.headers.iter().map(|(name, value)| named(name, Some(value))).collect();
    format!("{}{key}{tenant}{headers} {}", event.topic, String::from_utf8_lossy(&event.payload))
}

/// Returns the router's outcome for an event, at its first attempt. A panic of a handler fails the
/// test.
///
/// A router [in a transaction](Router::in_transaction) needs its store: append there, and drain a
/// [`Relay`].
pub async fn deliver<Kind>(router: &Router, event: impl IntoEvent<Kind>) -> Result<Outcome> {
    let event = event.into_event()?;
    event.validate()?;
    let event = event.into_event(EventId::now_v7(), Timestamp::now());
    let delivery = Delivery { event, seq: Seq(1), attempt: 1, replay: 0, trace: None };
    Ok(router.deliver(&[&delivery]).await.remove(0))
}
