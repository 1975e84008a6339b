//! For the tests of a program that uses Postbox: a store in memory, what was appended, what a
//! handler makes of an event. Webhooks are signed as their senders do by the `Secret::sign` of each
//! scheme in [`webhook`](crate::webhook).
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
//! assert_eq!(test::appended::<OrderPaid>(&store).await?, [OrderPaid { order: 42 }]);
//!
//! let router = Router::new().on(mail);
//! assert_eq!(test::deliver(&router, OrderPaid { order: 42 }).await?, Outcome::DELIVERED);
//! let lost = test::deliver(&router, NewEvent::json("order.paid", "[]")).await?;
//! assert!(matches!(lost, Outcome::Dead { code, .. } if code == "payload_not_decoded"));
//! # Ok(())
//! # }
//! ```

use std::sync::{Arc, Mutex, PoisonError};

use jiff::Timestamp;
use postbox_core::typed::{IntoEvent, decode};
use postbox_core::{
    Delivery, EventId, LogName, MemoryStore, Outcome, Result, Seq, Sink as _, Store, Subscription, TopicPattern,
    TypedEvent,
};
use postbox_engine::router::Router;
use postbox_engine::{Relay, TokioClock, handler_sink};
use serde::de::DeserializeOwned;

/// An empty store in memory. Its time begins in 1970 and is tokio's: in a test that pauses that
/// (`#[tokio::test(start_paused = true)]`), `tokio::time::advance` steps it, and retries and
/// retention take no time.
pub fn store() -> MemoryStore {
    MemoryStore::new(Arc::new(TokioClock::simulated(Timestamp::UNIX_EPOCH)))
}

/// What was committed to the log `outbox` as this type, by place in the log. Delayed events are not
/// among it before their time.
///
/// It reads as a subscription of its own, which it removes again, and so in any store. In one that
/// something else uses at the time, retention waits for it.
///
/// An event that is not of the type is an error, that of [`decode`].
pub async fn appended<T: TypedEvent + DeserializeOwned>(store: &(impl Store + Clone)) -> Result<Vec<T>> {
    let name = format!("test-{}", EventId::now_v7());
    let mut subscription = Subscription::new(name.parse()?, LogName::outbox());
    subscription.filter.topics = vec![TopicPattern::from_stored(T::TOPIC)];
    let name = subscription.name.clone();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let sink = handler_sink({
        let seen = seen.clone();
        move |delivery: Delivery| {
            seen.lock().unwrap_or_else(PoisonError::into_inner).push((delivery.seq, delivery.event));
            std::future::ready(())
        }
    });
    let relay = Relay::builder(Arc::new(store.clone()), subscription).sink(Arc::new(sink)).build()?;
    relay.drain(None).await?;
    for info in store.subscriptions().await?.into_iter().filter(|info| info.name == name) {
        store.remove(&name, info.generation).await?;
    }
    let mut seen = std::mem::take(&mut *seen.lock().unwrap_or_else(PoisonError::into_inner));
    // Those of different keys go out at once, and in any order.
    seen.sort_by_key(|(seq, _)| *seq);
    seen.iter().map(|(_, event)| decode(event)).collect()
}

/// What becomes of an event that the router gets, at its first attempt. A panic is the test's.
///
/// One [in a transaction](Router::in_transaction) needs its store: append there, and drain a
/// [`Relay`].
pub async fn deliver<Kind>(router: &Router, event: impl IntoEvent<Kind>) -> Result<Outcome> {
    let event = event.into_event()?;
    event.validate()?;
    let event = event.into_event(EventId::now_v7(), Timestamp::now());
    let delivery = Delivery { event, seq: Seq(1), attempt: 1, replay: 0 };
    Ok(router.deliver(&[&delivery]).await.remove(0))
}
