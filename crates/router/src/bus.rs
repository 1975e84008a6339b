//! The in-process bus: handlers in the same program subscribe by topic.

use std::pin::Pin;
use std::sync::Arc;

use async_trait::async_trait;
use futures::future::join_all;
use postbox_core::{Delivery, Outcome, Result, Sink, TopicPattern};

use crate::handler_sink::IntoOutcome;

type HandlerFuture = Pin<Box<dyn Future<Output = Outcome> + Send>>;
type Handler = Arc<dyn Fn(Arc<Delivery>) -> HandlerFuture + Send + Sync>;

/// A sink that hands each event to every handler whose pattern matches its topic.
///
/// All matching handlers run concurrently. The event is delivered when all of them have succeeded.
/// If one fails, the event is retried and *every* handler sees it again: handlers must be
/// idempotent (use the event id as the key). An event that no handler matches counts as delivered.
/// A panic in a handler is a failed attempt of that event. Handlers run in the event's
/// [`Context`](postbox_core::Context).
///
/// ```
/// use std::sync::Arc;
/// use postbox_core::Delivery;
/// use postbox_router::InProcessBus;
///
/// let bus = InProcessBus::new()
///     .on("order.*", |delivery: Arc<Delivery>| async move { println!("{}", delivery.event.topic) })?
///     .on("order.paid", |_| async { Err::<(), _>("the printer is on fire") })?;
/// assert_eq!(bus.topics().collect::<Vec<_>>(), ["order.*", "order.paid"]);
/// # Ok::<(), postbox_core::Error>(())
/// ```
#[derive(Default, Clone)]
pub struct InProcessBus {
    handlers: Vec<(TopicPattern, Handler)>,
}

impl InProcessBus {
    /// Creates a bus without handlers.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a handler for the topics that match `pattern`.
    pub fn on<H, F>(mut self, pattern: &str, handler: H) -> Result<Self>
    where
        H: Fn(Arc<Delivery>) -> F + Send + Sync + 'static,
        F: Future + Send + 'static,
        F::Output: IntoOutcome,
    {
        let handler: Handler = Arc::new(move |delivery| {
            let handled = handler(delivery);
            Box::pin(async move { handled.await.into_outcome() })
        });
        self.handlers.push((TopicPattern::new(pattern)?, handler));
        Ok(self)
    }

    /// Returns the patterns in the order they were added. A subscription that serves only this bus
    /// should filter by them.
    pub fn topics(&self) -> impl Iterator<Item = &str> {
        self.handlers.iter().map(|(pattern, _)| pattern.as_str())
    }
}

/// Returns the worst of the handlers' outcomes. A retry outranks a dead outcome, so that a handler
/// that may still succeed is called again first. Of equals, the one that names the longest wait
/// counts: all handlers are called again, also the one that asked for it.
pub(crate) fn worst(outcomes: Vec<Outcome>) -> Outcome {
    let rank = |outcome: &Outcome| match outcome {
        Outcome::Delivered { duplicate: true, .. } => (0, None),
        Outcome::Delivered { duplicate: false, .. } => (1, None),
        Outcome::Gone { .. } => (2, None),
        Outcome::Dead { .. } => (3, None),
        Outcome::Retry { after, .. } => (4, *after),
        Outcome::ServerError { after, .. } => (5, *after),
        Outcome::Ambiguous { after, .. } => (6, *after),
        Outcome::Throttled { after, .. } => (7, *after),
        Outcome::Unavailable { .. } => (8, None),
    };
    outcomes.into_iter().max_by_key(rank).unwrap_or(Outcome::DELIVERED)
}

#[async_trait]
impl Sink for InProcessBus {
    async fn deliver(&self, deliveries: &[&Delivery]) -> Vec<Outcome> {
        let mut outcomes = Vec::with_capacity(deliveries.len());
        for delivery in deliveries {
            let topic = delivery.event.topic.as_str();
            let delivery = Arc::new((*delivery).clone());
            let handlers = self.handlers.iter().filter(|(pattern, _)| pattern.matches(topic));
            let handled = async { join_all(handlers.map(|(_, handler)| handler(delivery.clone()))).await };
            outcomes.push(worst(delivery.context().scope(handled).await));
        }
        outcomes
    }
}
