//! Code around the handlers of every event.

use async_trait::async_trait;
use postbox_core::{Delivery, Outcome};

use crate::Router;

/// Runs around the handlers of each event of a router: to time them, to note the outcome, to
/// shorten their time, or to skip an event. See [`Router::layer`].
///
/// ```
/// use postbox_core::{Delivery, Outcome};
/// use postbox_router::{Layer, Next};
///
/// /// What this service said itself is no news to it.
/// struct SkipOwn;
///
/// #[async_trait::async_trait]
/// impl Layer for SkipOwn {
///     async fn around(&self, delivery: &Delivery, next: Next<'_>) -> Outcome {
///         match delivery.event.source.as_deref() {
///             Some("billing") => Outcome::DELIVERED,
///             _ => next.run().await,
///         }
///     }
/// }
/// ```
///
/// Behaviour:
/// - It runs in the event's [`Context`](postbox_core::Context).
/// - Its return value is the outcome of the event, whatever the handlers returned.
/// - If `next` is not run, no handler sees the event. If its future is dropped early, the handlers
///   stop there, as at a timeout.
#[async_trait]
pub trait Layer: Send + Sync + 'static {
    /// Handles an event, usually by running `next`.
    async fn around(&self, delivery: &Delivery, next: Next<'_>) -> Outcome;
}

/// The inside of a [`Layer`]: further layers, and the handlers.
#[must_use = "handlers that are not run handle nothing"]
pub struct Next<'t> {
    pub(crate) router: &'t Router,
    pub(crate) delivery: &'t Delivery,
    /// Number of the router's layers that are outside of this one.
    pub(crate) outside: usize,
}

impl Next<'_> {
    /// Runs the inner layers and the handlers. Returns the outcome of the event.
    pub async fn run(self) -> Outcome {
        let Self { router, delivery, outside } = self;
        match router.layers.get(outside) {
            Some(layer) => layer.around(delivery, Next { outside: outside + 1, ..self }).await,
            None => router.handle(delivery).await,
        }
    }
}
